"""Kinds of noise, each denoised as plain noise and as its own kind: the image of docs/noise.md.

::

    python examples/noises.py --out noises

The image is scikit-image's camera at half its size. Every result comes from ``recon-cli run``; everything written lies under ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray
from skimage import data
from skimage.transform import downscale_local_mean

from halotile.storage.images.png import Cell, draw_sheet, grey

Values = NDArray[np.float64]
SHOWN = np.s_[30:190, 70:230]


class Kind(NamedTuple):
    """A kind of noise: the noisy image, the true one in its units, and the keys of a job for it."""

    title: str
    noisy: NDArray[Any]
    truth: Values
    keys: Mapping[str, Mapping[str, Any]]


def kinds(seed: int = 0) -> list[Kind]:
    """The kinds of noise, on an image of 256 x 256 pixels."""
    rng = np.random.default_rng(seed)
    image = downscale_local_mean(data.camera().astype(float), (2, 2))
    photons = image / 255 * 30
    camera = 2.2 * rng.poisson(photons) + 100 + 3 * rng.standard_normal(image.shape)
    plain = image + 15 * rng.standard_normal(image.shape)
    hot = plain.copy()
    hot.flat[rng.choice(hot.size, 200, replace=False)] = rng.uniform(400, 1000, 200)
    striped = plain + 17 * rng.standard_normal(image.shape[1])
    return [
        Kind(
            "photons of a camera",
            camera.round().astype(np.uint16),
            2.2 * photons + 100,
            {"noise": {"model": "poisson-gaussian"}},
        ),
        Kind("hot pixels", hot.astype(np.float32), image, {"input": {"defects": "auto"}}),
        Kind("column stripes", striped.astype(np.float32), image, {"input": {"stripes": "auto"}}),
    ]


def denoised(kind: Kind, keys: Mapping[str, Mapping[str, Any]], folder: Path) -> Values:
    """Run a job with these keys on a noisy image; return the result."""
    folder.mkdir(parents=True, exist_ok=True)
    source, output = folder / "noisy.npy", folder / "clean.zarr"
    np.save(source, kind.noisy)
    job: dict[str, Any] = {
        "version": 1,
        "job": "denoise",
        "input": {"path": str(source), "axes": "yx", **keys.get("input", {})},
        "output": {"path": str(output), "overwrite": True, "dtype": "float32", "format": "zarr"},
        "denoiser": {"name": "tv", "strength": 1.0, "sigma": "auto"},
        "noise": keys.get("noise", {}),
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    words = ["run", str(folder / "job.yaml"), "--workers", "1", "--fresh", "--json"]
    subprocess.run([sys.executable, "-m", "halotile", *words], stdout=subprocess.DEVNULL, check=True)
    return np.asarray(zarr.open_array(output, mode="r")[:], np.float64)


def main() -> None:
    """Denoise every kind in both ways, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("noises"), help="folder that everything is written into")
    request = parser.parse_args()
    cells = []
    for number, kind in enumerate(kinds()):
        low, high = np.percentile(kind.truth, (0.5, 99.5))
        images = {"noisy": kind.noisy.astype(float)} | {
            name: denoised(kind, keys, request.out / f"{number}-{name}")
            for name, keys in (("plain", {}), ("own", kind.keys))
        }
        errors = {name: math.sqrt(float(np.mean(np.square(image - kind.truth)))) for name, image in images.items()}
        print(f"{kind.title:20}", "  ".join(f"{name} {error:.2f}" for name, error in errors.items()), flush=True)
        lines = [
            "from above: noisy, as plain noise, as its own kind",
            "error " + ", ".join(f"{error:.1f}" for error in errors.values()),
        ]
        cells.append(Cell(kind.title, [grey(image[SHOWN][None], low, high) for image in images.values()], lines))
    (request.out / "noises.png").write_bytes(draw_sheet(cells))


if __name__ == "__main__":
    main()
