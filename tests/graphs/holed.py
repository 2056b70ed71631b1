"""Images with holes, and denoisers to try on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from skimage.data import retina

from tests.support import job_of, run_inline

FILTERS: dict[str, dict[str, Any]] = {
    "tv": {"strength": 10.0},
    "nlm": {"strength": 0.8, "sigma": 10.0, "distance": 3},
    "gaussian": {"sigma": 2.0},
    "median": {"size": 5},
    "torch": {"import": "tests.networks:convolutions"},
    "function": {"import": "scipy.ndimage:uniform_filter", "options": {"size": 5}, "depth": 2},
}
NODATA = -9999.0


def scene(nodata: float = np.nan, dtype: str = "float32") -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A real image with noise, and its holes: large ones, lines, single pixels, and at the edge."""
    clean = retina()[300:620, 300:600, 1].astype(np.float64)
    rng = np.random.default_rng(0)
    pixels = clean + 10 * rng.standard_normal(clean.shape)
    holes = rng.random(clean.shape) < 0.002
    holes[100:180, 90:170] = holes[:20, 200:] = holes[250, :] = holes[:, 33] = True
    pixels = np.rint(pixels) if np.dtype(dtype).kind in "iu" else pixels
    return np.where(holes, nodata, pixels).astype(dtype), holes


def with_tag(path: Path, pixels: NDArray[Any], value: str) -> Path:
    """A TIFF with GDAL's tag for pixels without a measurement."""
    tifffile.imwrite(path, pixels, extratags=[(42113, "s", 0, value, True)], metadata=None, tile=(64, 64))
    return path


def cut(folder: Path, source: Path, name: str, tile: int, **parts: Any) -> NDArray[Any]:
    output = folder / f"{source.stem}.{tile}.out.zarr"
    return run_inline(job_of(source, output, name, FILTERS[name], shard=128, tile={"size": tile}, **parts))
