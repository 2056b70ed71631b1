"""The main job on a real image: a retina, mirrored out to 4096 x 4096 pixels, noised and denoised.

::

    python examples/retina.py --out demo --workers 2

The image is the green channel of scikit-image's retina (1411 x 1411, CC0), which comes with that package.
The denoising is the real command on ``examples/demo.yaml``; everything written lies under ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.storage.grid import Block, Grid
from halotile.storage.images.png import Cell, draw_sheet, grey
from halotile.storage.rim import source_positions

CONFIG = Path(__file__).with_name("demo.yaml")
SHARD = 1024
EDGE = 400  # of the images that are drawn, about
OPTIC_DISC = (500, 130)  # where the detail that is drawn starts: vessels of every width meet here

Image = NDArray[np.float32]


def photograph() -> Image:
    """The green channel of scikit-image's retina: the one in which blood vessels stand out."""
    from skimage import data

    return np.asarray(data.retina()[..., 1], np.float32) / np.float32(255)


@dataclass(frozen=True)
class Retina:
    """The retina as float32 in [0, 1], mirrored again and again until it is ``size`` pixels wide."""

    size: int
    sigma: float = 0.1
    seed: int = 0
    photograph: Image = field(default_factory=photograph)

    def __getitem__(self, part: tuple[slice, ...]) -> Image:
        """A part of the image without noise."""
        rows, columns = (
            source_positions(0, self.size, length, "reflect")[along]
            for along, length in zip(part, self.photograph.shape, strict=True)
        )
        return self.photograph[np.ix_(rows, columns)]

    def write(self, folder: Path) -> None:
        """Write the image with noise, ``noisy.zarr``, shard by shard."""
        noisy = _create(folder / "noisy.zarr", self.size)

        def write_shard(block: Block) -> None:
            clean = self[block.core.slices]
            noise = np.random.default_rng([self.seed, block.number]).standard_normal(clean.shape, np.float32)
            noisy[block.core.slices] = clean + np.float32(self.sigma) * noise

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write_shard, self.grid))

    @property
    def grid(self) -> Grid:
        """The shards of the image written."""
        return Grid((self.size, self.size), (SHARD, SHARD), ((0, 0), (0, 0)))


def _create(path: Path, size: int) -> zarr.Array:
    path.parent.mkdir(parents=True, exist_ok=True)
    return zarr.create_array(
        path,
        shape=(size, size),
        shards=(SHARD, SHARD),
        chunks=(256, 256),
        dtype="float32",
        dimension_names=("y", "x"),
        overwrite=True,
    )


def denoise(folder: Path, workers: int) -> dict[str, Any]:
    """Run ``recon-cli run examples/demo.yaml`` on the images in ``folder``; return its summary."""
    paths = {"input.path": folder / "noisy.zarr", "output.path": folder / "clean.zarr"}
    settings = [word for key, path in paths.items() for word in ("--set", f"{key}={path.resolve()}")]
    words = ["run", str(CONFIG), "--workers", str(workers), "--fresh", "--json", *settings]
    print("$ recon-cli", *words, flush=True)
    command = [sys.executable, "-m", "halotile", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def open_image(path: Path) -> zarr.Array:
    """Open an array, or the finest level of an OME-Zarr."""
    node: Any = zarr.open(path, mode="r")
    return node["0"] if isinstance(node, zarr.Group) else node


def psnr(image: zarr.Array, truth: Retina) -> float:
    """Peak signal-to-noise ratio of an image against the truth, in dB, for a peak of 1; read shard by shard."""

    def squares(block: Block) -> float:
        part = block.core.slices
        difference = np.subtract(image[part], truth[part], dtype=np.float64)
        return float(np.vdot(difference, difference))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return 10 * math.log10(math.prod(image.shape) / math.fsum(pool.map(squares, truth.grid)))


def draw(path: Path, images: Mapping[str, zarr.Array | Retina], size: int) -> None:
    """Draw images side by side, each under its title, a detail above and the whole below, as a PNG."""
    step = max(1, round(size / EDGE))
    edge = -(-size // step)
    top, left = (min(start, size - edge) for start in OPTIC_DISC)
    parts = (np.s_[top : top + edge, left : left + edge], np.s_[::step, ::step])
    shown = [
        (title, [grey(np.asarray(image[part])[None], 0, 0.9) for part in parts]) for title, image in images.items()
    ]
    path.write_bytes(draw_sheet([Cell(title, drawn) for title, drawn in shown]))


def main() -> None:
    """Make the image, denoise it, say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder that everything is written into")
    parser.add_argument("--size", type=int, default=4096, help="edge of the image in pixels")
    parser.add_argument("--workers", type=int, default=2)
    request = parser.parse_args()
    truth = Retina(request.size)
    truth.write(request.out)
    summary = denoise(request.out, request.workers)
    noisy, clean = (open_image(request.out / f"{name}.zarr") for name in ("noisy", "clean"))
    before, after = psnr(noisy, truth), psnr(clean, truth)
    drawn = request.out / "before-after.png"
    draw(drawn, {f"noisy, {before:.1f} dB": noisy, f"denoised, {after:.1f} dB": clean, "truth": truth}, request.size)
    print(f"image      {request.size} x {request.size} pixels, noise of sigma {truth.sigma}")
    print(f"PSNR         {before:.2f} dB before, {after:.2f} dB after")
    print(f"throughput   {summary['megapixels_per_second']:.2f} Mpix/s, {summary['seconds']:.1f} s in all")
    print(f"peak memory  {summary['peak_memory_bytes'] / 2**20:.0f} MiB in the largest worker, libraries included")
    print(f"before/after {drawn}")
    print(f"output Zarr  {summary['output']}")


if __name__ == "__main__":
    main()
