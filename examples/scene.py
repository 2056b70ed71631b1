"""A scene of any size with its exact truth: every pixel is a function of (seed, y, x) alone.

::

    python examples/scene.py scene --size 4096
    python examples/scene.py scene --size 70000 --sparse 8

The first writes ``scene/truth.zarr`` and ``scene/noisy.zarr`` block by block, in the memory of one block. The
second makes the same arrays 70 000 pixels wide and writes 8 of their shards; the rest reads as zero.

Discs and fibres stand on a jittered lattice over smooth ground. All of it is made of +, -, *, / and square
roots, which round the same way everywhere, so the bits do not depend on how the scene is cut.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.storage.grid import Grid, Region

DISC_CELL, FIBRE_CELL, NOISE_TILE = 128, 256, 256
GROUND, DISCS, FIBRES = 1, 2, 3  # layers; each draws numbers of its own

Image = NDArray[np.float32]
Floats = NDArray[np.float64]


def truth_at(region: Region, seed: int = 0) -> Image:
    """The clean scene in ``region``, float32 in [0, 1].

    Examples
    --------
    >>> whole = truth_at(Region((0, 0), (40, 60)))
    >>> part = truth_at(Region((10, 20), (40, 60)))
    >>> bool((whole[10:, 20:] == part).all())
    True
    """
    image = _ground(region, seed)
    for y, x in _cells(region, DISC_CELL, DISC_CELL):
        _draw_disc(image, region, y, x, seed)
    for y, x in _cells(region, FIBRE_CELL, FIBRE_CELL):
        _draw_fibre(image, region, (y, x), (y, x + 1), seed)
        _draw_fibre(image, region, (y, x), (y + 1, x), seed)
    return image.astype(np.float32)


def noisy_at(region: Region, seed: int = 0, sigma: float = 0.1) -> Image:
    """The scene in ``region`` with gaussian noise of standard deviation ``sigma``, float32."""
    return truth_at(region, seed) + np.float32(sigma) * noise_at(region, seed)


def noise_at(region: Region, seed: int = 0) -> Image:
    """Gaussian noise of standard deviation 1 in ``region``, keyed by global tiles of 256 x 256 pixels."""
    noise = np.empty(region.shape, np.float32)
    for y, x in _cells(region, NOISE_TILE, 0):
        bits = np.random.Philox(key=[seed, (y << 32) + x])
        tile = np.random.Generator(bits).standard_normal((NOISE_TILE, NOISE_TILE), np.float32)
        here = Region((y * NOISE_TILE, x * NOISE_TILE), ((y + 1) * NOISE_TILE, (x + 1) * NOISE_TILE))
        part = here.clip(region)
        noise[part.relative_to(region).slices] = tile[part.relative_to(here).slices]
    return noise


def write_scene(
    folder: Path, size: int, *, sparse: int | None = None, seed: int = 0, sigma: float = 0.1, shard: int = 1024
) -> list[Region]:
    """Write ``truth.zarr`` and ``noisy.zarr`` (Zarr v3, sharded) and return the regions written.

    ``sparse`` writes only that many shards, the first and the last among them.
    """
    grid = Grid((size, size), (shard, shard), ((0, 0), (0, 0)))
    truth, noisy = (_create(folder / f"{name}.zarr", size, shard) for name in ("truth", "noisy"))
    regions = [grid.block_at(number).core for number in _chosen(len(grid), sparse, seed)]
    for region in regions:
        truth[region.slices] = truth_at(region, seed)
        noisy[region.slices] = noisy_at(region, seed, sigma)
    return regions


def _create(path: Path, size: int, shard: int) -> zarr.Array:
    path.parent.mkdir(parents=True, exist_ok=True)
    return zarr.create_array(
        path,
        shape=(size, size),
        shards=(shard, shard),
        chunks=(min(256, shard), min(256, shard)),
        dtype="float32",
        fill_value=0.0,
        dimension_names=("y", "x"),
        overwrite=True,
    )


def _chosen(total: int, sparse: int | None, seed: int) -> list[int]:
    """Numbers of the shards to write: all of them, or the first, the last and some between."""
    if sparse is None or sparse >= total:
        return list(range(total))
    between = np.random.default_rng(seed).permutation(np.arange(1, total - 1))
    return sorted([0, total - 1, *map(int, between)][:sparse])


def _cells(region: Region, cell: int, reach: int) -> Iterator[tuple[int, int]]:
    """The lattice cells whose structures, ``reach`` pixels around them, may touch ``region``."""
    (y0, x0), (y1, x1) = region.start, region.stop
    for y in range((y0 - reach) // cell, (y1 + reach - 1) // cell + 1):
        for x in range((x0 - reach) // cell, (x1 + reach - 1) // cell + 1):
            yield y, x


def _draws(seed: int, layer: int, y: NDArray[np.int64], x: NDArray[np.int64], count: int) -> Floats:
    """``count`` numbers in [0, 1) for each lattice point (y, x), shape (count, *points)."""
    y, x = np.broadcast_arrays(y, x)
    bits = np.full((count, *y.shape), (seed << 3) + layer, np.uint64)
    for word in (y, x, np.arange(count).reshape(count, *[1] * y.ndim)):
        bits = _mixed(bits + word.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each bit depends on all."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _cell_draws(seed: int, layer: int, y: int, x: int, count: int) -> list[float]:
    return [float(u) for u in _draws(seed, layer, np.array(y), np.array(x), count)]


def _ground(region: Region, seed: int) -> Floats:
    """Smooth ground between 0.05 and 0.35: values on two lattices, interpolated between their points."""
    coarse = _interpolated(region, 512, seed, GROUND)
    fine = _interpolated(region, 96, seed + 1, GROUND)
    return 0.05 + 0.2 * coarse + 0.1 * fine


def _interpolated(region: Region, cell: int, seed: int, layer: int) -> Floats:
    (y, fy), (x, fx) = (_lattice(a, b, cell) for a, b in zip(region.start, region.stop, strict=True))
    rows = np.arange(y[0], y[-1] + 2)[:, None]
    columns = np.arange(x[0], x[-1] + 2)[None, :]
    values = _draws(seed, layer, rows, columns, 1)[0]
    y, x = y - y[0], x - x[0]
    down = values[y] + fy[:, None] * (values[y + 1] - values[y])
    across: Floats = down[:, x] + fx * (down[:, x + 1] - down[:, x])
    return across


def _lattice(start: int, stop: int, cell: int) -> tuple[NDArray[np.int64], Floats]:
    """For each position the lattice point before it, and the smooth step from there to the next."""
    point, rest = np.divmod(np.arange(start, stop), cell)
    t = rest / cell
    return point, t * t * (3 - 2 * t)


def _draw_disc(image: Floats, region: Region, y: int, x: int, seed: int) -> None:
    """Draw the disc of cell (y, x): 4 to 40 pixels of radius, its edge two pixels soft."""
    down, across, size, level = _cell_draws(seed, DISCS, y, x, 4)
    cy, cx = (y + down) * DISC_CELL, (x + across) * DISC_CELL
    radius = 4 + 36 * size * size
    box = _box(cy - radius, cx - radius, cy + radius, cx + radius)
    _draw(image, region, box, lambda py, px: np.sqrt((py - cy) ** 2 + (px - cx) ** 2), radius, 0.35 + 0.4 * level)


def _draw_fibre(image: Floats, region: Region, cell: tuple[int, int], other: tuple[int, int], seed: int) -> None:
    """Draw the fibre between the nodes of two neighbouring cells: 1 to 3 pixels to each side."""
    (y0, x0), (y1, x1) = _node(*cell, seed), _node(*other, seed)
    *_, width, level = _cell_draws(seed, FIBRES, *cell, 4)
    ty, tx, squared = y1 - y0, x1 - x0, (y1 - y0) ** 2 + (x1 - x0) ** 2

    def distance(y: Floats, x: Floats) -> Floats:
        along = np.clip(((y - y0) * ty + (x - x0) * tx) / squared, 0, 1)
        return np.sqrt((y - y0 - along * ty) ** 2 + (x - x0 - along * tx) ** 2)

    half = 1 + 2 * width
    box = _box(min(y0, y1) - half, min(x0, x1) - half, max(y0, y1) + half, max(x0, x1) + half)
    _draw(image, region, box, distance, half, 0.6 + 0.35 * level)


def _node(y: int, x: int, seed: int) -> tuple[float, float]:
    """The node of a fibre cell, in its middle half: neighbouring nodes never meet."""
    down, across = _cell_draws(seed, FIBRES, y, x, 2)
    return (y + 0.25 + 0.5 * down) * FIBRE_CELL, (x + 0.25 + 0.5 * across) * FIBRE_CELL


def _box(top: float, left: float, bottom: float, right: float) -> Region:
    """The pixels of a bounding box, two more on each side for the soft edge."""
    return Region((int(top) - 2, int(left) - 2), (int(bottom) + 3, int(right) + 3))


def _draw(
    image: Floats, region: Region, box: Region, distance: Callable[[Floats, Floats], Floats], reach: float, level: float
) -> None:
    """Lay a shape of brightness ``level`` over the image. The brighter wins, so no order matters."""
    part = box.clip(region)
    if not part.size:
        return
    y, x = (np.arange(a, b, dtype=np.float64) for a, b in zip(part.start, part.stop, strict=True))
    cover = np.clip((reach - distance(y[:, None], x[None, :])) / 2 + 0.5, 0, 1)
    target = image[part.relative_to(region).slices]
    np.maximum(target, level * cover, out=target)


def main() -> None:
    """Write a scene as the command line asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to write truth.zarr and noisy.zarr into")
    parser.add_argument("--size", type=int, default=4096, help="edge of the scene in pixels")
    parser.add_argument("--sparse", type=int, help="write only this many shards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sigma", type=float, default=0.1, help="standard deviation of the noise")
    parser.add_argument("--shard", type=int, default=1024, help="edge of one shard in pixels")
    request = parser.parse_args()
    options = {"sparse": request.sparse, "seed": request.seed, "sigma": request.sigma, "shard": request.shard}
    regions = write_scene(request.folder, request.size, **options)
    print(f"{request.folder}: truth.zarr and noisy.zarr, {request.size} pixels wide, {len(regions)} shards written")


if __name__ == "__main__":
    main()
