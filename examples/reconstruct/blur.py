"""A real image, and three kernels to blur it with: one out of focus, two shaken along different lines.

::

    python examples/reconstruct/blur.py deblur
    recon-cli simulate deblur/job.yaml
    recon-cli run deblur/job.yaml

The image is scikit-image's Hubble deep field (NASA, public domain), which comes with that package. ``README.md``
beside this file goes on from here.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

CENTRE = (430, 630)
"""Where there is much to see."""

Image = NDArray[np.float32]


def hubble(size: int | None = None) -> Image:
    """The deep field in grey, 872 x 1000, between 0 and 1; or a square of this size out of it."""
    from skimage import data

    grey: Image = data.hubble_deep_field().mean(-1).astype(np.float32) / 255
    if size is None:
        return grey
    rows, columns = (
        slice(max(0, min(middle - size // 2, edge - size)), None)
        for middle, edge in zip(CENTRE, grey.shape, strict=True)
    )
    return grey[rows, columns][:size, :size]


def defocus(edge: int, sigma: float) -> Image:
    """A gaussian kernel."""
    line = np.exp(-((np.arange(edge) - edge // 2) ** 2) / (2 * sigma**2))
    return _normed(np.outer(line, line))


def shake(edge: int, angle: float) -> Image:
    """A kernel along a line."""
    kernel = np.zeros((edge, edge))
    for way in np.linspace(-(edge // 2), edge // 2, 8 * edge):
        row, column = (round(edge // 2 + way * f) for f in (np.sin(angle), np.cos(angle)))
        kernel[row, column] += 1
    return _normed(kernel)


def _normed(kernel: NDArray[Any]) -> Image:
    normed: Image = (kernel / kernel.sum()).astype(np.float32)
    return normed


KERNELS = (defocus(11, 2.0), shake(15, 0.3), shake(13, 1.9))
JOBS = ("job.yaml", "pnp.yaml")


def write(folder: Path, size: int | None = None) -> None:
    """Write the image, the kernels and the jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    image = hubble(size)
    truth = zarr.create_array(
        folder / "truth.zarr", shape=image.shape, dtype="float32", chunks=(256, 256), overwrite=True
    )
    truth[...] = image
    for number, kernel in enumerate(KERNELS):
        np.save(folder / f"psf{number}.npy", kernel)
    for job in JOBS:
        shutil.copy(Path(__file__).with_name(job), folder)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--size", type=int, help="edge of a square out of the image; left out: all of it")
    request = parser.parse_args()
    write(request.folder, request.size)
    print(f"{request.folder}: the image, three kernels, {' and '.join(JOBS)}.")
    print(f"Now: recon-cli simulate {request.folder / JOBS[0]}")


if __name__ == "__main__":
    main()
