"""Three blurred, noisy copies of a real picture, for ``job.yaml`` beside this file to make one sharp picture of.

::

    python examples/reconstruct/blur.py deblur
    recon-cli run deblur/job.yaml

The picture is scikit-image's Hubble deep field (NASA, public domain), which comes with that package. One copy is
out of focus, two are shaken, along different lines; each has its own noise.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur

NOISE = 0.01

Picture = NDArray[np.float32]


def hubble() -> Picture:
    """The deep field in grey, 872 x 1000, between 0 and 1."""
    from skimage import data

    grey: Picture = data.hubble_deep_field().mean(-1).astype(np.float32) / 255
    return grey


def defocus(edge: int, sigma: float) -> Picture:
    """A gaussian kernel."""
    line = np.exp(-((np.arange(edge) - edge // 2) ** 2) / (2 * sigma**2))
    return _normed(np.outer(line, line))


def shake(edge: int, angle: float) -> Picture:
    """A kernel along a line."""
    kernel = np.zeros((edge, edge))
    for way in np.linspace(-(edge // 2), edge // 2, 8 * edge):
        row, column = (round(edge // 2 + way * f) for f in (np.sin(angle), np.cos(angle)))
        kernel[row, column] += 1
    return _normed(kernel)


def _normed(kernel: NDArray[Any]) -> Picture:
    normed: Picture = (kernel / kernel.sum()).astype(np.float32)
    return normed


KERNELS = (defocus(11, 2.0), shake(15, 0.3), shake(13, 1.9))


def write(folder: Path) -> None:
    """Write the kernels, the copies, the true picture and the job."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = hubble()
    _save(folder / "truth.zarr", truth)
    for number, kernel in enumerate(KERNELS):
        np.save(folder / f"psf{number}.npy", kernel)
        blurred = read_all(Blur(kernel=kernel, boundary="reflect").forward(InMemory(truth)))
        noise = np.random.default_rng(number).standard_normal(truth.shape, np.float32)
        _save(folder / f"y{number}.zarr", np.add(blurred, np.float32(NOISE) * noise))
    shutil.copy(Path(__file__).with_name("job.yaml"), folder)


def _save(path: Path, picture: Picture) -> None:
    array = zarr.create_array(path, shape=picture.shape, dtype="float32", chunks=(256, 256), overwrite=True)
    array[...] = picture


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to write")
    folder: Path = parser.parse_args().folder
    write(folder)
    print(f"{folder}: three copies, their kernels and job.yaml. Now: recon-cli run {folder / 'job.yaml'}")


if __name__ == "__main__":
    main()
