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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.storage.grid import Block, Grid, Region
from halotile.storage.rim import source_positions

CONFIG = Path(__file__).with_name("demo.yaml")
SHARD = 1024
OPTIC_DISC = (500, 130)  # where the detail that is drawn starts: vessels of every width meet here

Image = NDArray[np.float32]


@dataclass(frozen=True)
class Retina:
    """The retina as float32 in [0, 1], mirrored again and again until it is ``size`` pixels wide."""

    size: int
    sigma: float = 0.1
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write ``truth.zarr`` and ``noisy.zarr`` shard by shard."""
        tile = retina()
        truth, noisy = (_create(folder / f"{name}.zarr", self.size) for name in ("truth", "noisy"))

        def write_shard(block: Block) -> None:
            clean = _mirrored(tile, block.core)
            noise = np.random.default_rng([self.seed, block.number]).standard_normal(clean.shape, np.float32)
            truth[block.core.slices] = clean
            noisy[block.core.slices] = clean + np.float32(self.sigma) * noise

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write_shard, self.grid))

    @property
    def grid(self) -> Grid:
        """The shards of the images written."""
        return Grid((self.size, self.size), (SHARD, SHARD), ((0, 0), (0, 0)))


def retina() -> Image:
    """The green channel of scikit-image's retina: the one in which blood vessels stand out."""
    from skimage import data

    return np.asarray(data.retina()[..., 1], np.float32) / np.float32(255)


def _mirrored(tile: Image, region: Region) -> Image:
    rows, columns = (
        source_positions(start, stop, length, "reflect")
        for start, stop, length in zip(region.start, region.stop, tile.shape, strict=True)
    )
    return tile[np.ix_(rows, columns)]


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
    command = [sys.executable, "-m", "halotile.cli.main", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def open_image(path: Path) -> zarr.Array:
    """Open an array, or the finest level of an OME-Zarr."""
    node: Any = zarr.open(path, mode="r")
    return node["0"] if isinstance(node, zarr.Group) else node


def psnr(folder: Path, name: str, grid: Grid) -> float:
    """Peak signal-to-noise ratio of an image against the truth, in dB, for a peak of 1; read shard by shard."""
    image, truth = (open_image(folder / f"{n}.zarr") for n in (name, "truth"))

    def squares(block: Block) -> float:
        difference = np.subtract(image[block.core.slices], truth[block.core.slices], dtype=np.float64)
        return float(np.vdot(difference, difference))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return 10 * math.log10(math.prod(grid.shape) / math.fsum(pool.map(squares, grid)))


def draw(folder: Path, size: int, before: float, after: float) -> Path:
    """Draw noisy, denoised and true image side by side, a detail above and the whole below, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"noisy": f"noisy, {before:.1f} dB", "clean": f"denoised, {after:.1f} dB", "truth": "truth"}
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 8.4), layout="constrained")
    top, left = (min(start, max(0, size - 320)) for start in OPTIC_DISC)
    detail = np.s_[top : top + 320, left : left + 320]
    step = max(1, size // 800)
    for column, (name, title) in enumerate(titles.items()):
        image = open_image(folder / f"{name}.zarr")
        axes[0, column].set_title(title)
        for row, part in enumerate((detail, np.s_[::step, ::step])):
            axes[row, column].imshow(image[part], cmap="gray", vmin=0, vmax=0.9)
            axes[row, column].set_axis_off()
    path = folder / "before-after.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def main() -> None:
    """Make the image, denoise it, say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder that everything is written into"
    )
    parser.add_argument("--size", type=int, default=4096, help="edge of the image in pixels")
    parser.add_argument("--workers", type=int, default=2)
    request = parser.parse_args()
    image = Retina(request.size)
    image.write(request.out)
    summary = denoise(request.out, request.workers)
    before, after = (psnr(request.out, name, image.grid) for name in ("noisy", "clean"))
    drawn = draw(request.out, request.size, before, after)
    print(f"image      {request.size} x {request.size} pixels, noise of sigma {image.sigma}")
    print(f"PSNR         {before:.2f} dB before, {after:.2f} dB after")
    print(f"throughput   {summary['megapixels_per_second']:.2f} Mpix/s, {summary['seconds']:.1f} s in all")
    print(
        f"peak memory  {summary['peak_memory_bytes'] / 2**20:.0f} MiB in the largest worker, libraries included"
    )
    print(f"before/after {drawn}")
    print(f"output Zarr  {summary['output']}")


if __name__ == "__main__":
    main()
