"""Cutting of an image: receptive field, tiles, super-blocks, their windows, and the shards of the output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds.sections import Output, Run, Size, Tile, parse_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES, share_bytes
from halotile.graphs.words import counted
from halotile.storage.arrays import Source
from halotile.storage.axes import choose_axes
from halotile.storage.grid import Depth, Grid
from halotile.storage.rim import Rim
from halotile.storage.sharded.layout import MOST_FILES
from halotile.storage.sharded.ome_metadata import OmeImage, output_fields
from halotile.storage.sharded.output import Layout
from halotile.tasks.convolution.stable import FEW
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.inner_tiles import Roles, Tiling
from halotile.tasks.operators.base import Shape
from halotile.tasks.options import Auto
from halotile.tasks.trials.probe import check_ragged, probe
from halotile.tasks.trials.rehearsal import rehearse, tiling_error
from halotile.tasks.trials.trial import check_depth


def blocks_for(
    geometry: Geometry,  # image
    unit: tuple[int, ...],  # shape that a super-block is a multiple of: whole shards
    workers: int,  # number of workers that share the blocks
    # super-block of an earlier run. A resumed run keeps it, whatever its number of workers: its journal numbers these
    # blocks
    earlier: Sequence[int] | None,
    *,
    given: Size | Auto = "auto",  # super-block that the job asks for
    on_gpu: bool = False,  # GPUs compute
) -> list[tuple[int, ...]]:
    """Return candidate super-blocks, the best first: k units on each tiled axis.

    Larger ones read less halo; but there must be enough of them to keep all workers busy.
    """
    if given != "auto":
        return [check_block(geometry, given, unit)]
    if earlier is not None and len(earlier) == len(unit):
        block = tuple(earlier)
        if all(b % u == 0 or b >= n for b, u, n in zip(block, unit, geometry.shape, strict=True)):
            return [block]
    candidates: dict[tuple[int, ...], tuple[int, ...]] = {}
    largest = LARGEST_BLOCK.get(geometry.dims, 512) * (2 if on_gpu else 1)
    fewest = workers * (BLOCKS_PER_GPU if on_gpu else BLOCKS_PER_WORKER)
    for k in range(1, 65):
        block = tuple(u * k if i in geometry.roles.spatial else u for i, u in enumerate(unit))
        counts = tuple(-(-n // b) for n, b in zip(geometry.shape, block, strict=True))
        too_long = any(block[i] > largest for i in geometry.roles.spatial)
        if k > 1 and (too_long or math.prod(counts) < fewest):
            break
        candidates.setdefault(counts, block)  # the smallest that cuts as often: the most even
    return list(candidates.values())[::-1]


def rim_of(tile: Tile, denoiser: Denoiser, roles: Roles) -> Rim:
    """Return the rim of the image: on tiled axes by the job's boundary rule, or the denoiser's own."""
    rule = denoiser.boundary if tile.boundary == "auto" else tile.boundary
    return Rim(tuple(rule if i in roles.spatial else "cut" for i in range(len(roles.axes))))


def tiling_of(
    requested: Tile, denoiser: Denoiser, halo: Halo, geometry: Geometry, size: Size, block: Shape, dtype: np.dtype[Any]
) -> Tiling:
    """Return the compute tiles of a block, and the number of tiles computed at once."""
    roles = geometry.roles
    wide = dtype.itemsize >= 4 and dtype != np.float32 and not denoiser.convolutional
    least = least_window(geometry, denoiser.convolutional)
    tile = fit_tile(geometry, size, block)
    window = math.prod(t + a + b for t, (a, b) in zip(tile, halo.depth, strict=True))
    # As many pixels at once as one tile of the requested size: blocks may be smaller than it.
    at_once = math.prod(geometry.spread("tile.size", size, geometry.shape)[i] for i in roles.spatial)
    tiles = math.prod(-(-block[i] // t) for i, t in zip(roles.spatial, tile, strict=True))
    planes = math.prod(block[i] for i in roles.looped)
    batch = min(max(1, at_once // window), tiles * planes) if requested.batch == "auto" else requested.batch
    if math.prod(least) <= FEW and denoiser.convolutional:
        batch = 1  # several images at once would use the other library
    return Tiling(
        tile=tile,
        depth=halo.depth,
        align=(halo.align,) * len(roles.spatial),
        least=least,
        image=tuple(geometry.shape[i] for i in roles.spatial),
        scale=denoiser.scale,
        batch=batch,
        range=None,
        work_dtype="float64" if wide else "float32",
    )


def grid_of(geometry: Geometry, halo: Halo, block: Shape, tiling: Tiling, *, further: int = 0) -> Grid:
    """Return the grid of super-blocks, which read some pixels further than their tiles look."""
    roles = geometry.roles
    widths = [(before + further, after + further) for before, after in halo.depth]
    depth = dict(zip(roles.spatial, widths, strict=True))
    # The halo beyond the image does not count where the window is cut there.
    least = {i: n + max(depth[i]) for i, n in zip(roles.spatial, tiling.least, strict=True) if n > 1}
    return Grid(
        shape=geometry.shape,
        block=tuple(min(b, n) for b, n in zip(block, geometry.shape, strict=True)),
        depth=tuple(depth.get(i, (0, 0)) for i in range(len(geometry.shape))),
        align=roles.per_axis(halo.align, 1),
        least=tuple(least.get(i, 1) for i in range(len(geometry.shape))),
    )


def overlap_pays(run: Run) -> bool:
    """Return True where there are cores to spare for reading and writing at the same time as computing."""
    return cores_here() > run.count


def allowed_bytes(run: Run, machine: int | None) -> int:
    """Return the memory that one worker may need: as the job sets it, at most its share of the machine."""
    limit = parse_bytes(run.memory_per_worker)
    return limit if machine is None else min(limit, share_bytes(machine, run.count))


CHUNK = {1: 65536, 2: 256, 3: 64}
SHARD_CHUNKS = 4
# A shard is at most this fraction of a worker's free memory: a block reads, computes and encodes one or more.
SHARES = 12
# Candidate compute tiles, the fastest first; the smaller ones are for little memory. In a volume no tile of a useful
# size stays in the cache, and a halo of 8 pixels doubles the work on a tile of 64: the halo decides.
TILES = {2: (512, 256, 128), 3: (256, 384, 512, 192, 128, 96, 64, 32)}
MOST_REDUNDANT = 1.3  # ratio of computed to written pixels up to which a tile of a volume is preferred to a larger one
# Candidate tiles on a GPU: small ones in big batches may be as good, and there may be memory for large ones.
GPU_TILES = {2: (512, 1024, 2048, 4096, 8192, 256, 128), 3: (96, 128, 192, 64, 48, 32)}
# Longest edge of a block on a CPU. A GPU may have twice the edge: it outruns the storage, and reads less halo.
LARGEST_BLOCK = {2: 4096, 3: 512}
BLOCKS_PER_WORKER = 8  # with fewer super-blocks than this for each worker, the last ones leave workers idle
# The same for a GPU, which is idle while its first block is read and its last one is written: of so many blocks, for
# the time of two.
BLOCKS_PER_GPU = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """Properties of the image that the sizes depend on."""

    shape: tuple[int, ...]  # shape of the input, in pixels
    output_shape: tuple[int, ...]  # shape of the output, in pixels
    roles: Roles
    scale: int
    align: int

    @property
    def dims(self) -> int:
        """Number of tiled axes."""
        return len(self.roles.spatial)

    def spread(self, field: str, size: Size, other: tuple[int, ...]) -> tuple[int, ...]:
        """Return a size given for the tiled axes, as one number for each axis; ``other`` on the others."""
        spatial = self.roles.spatial
        edges = (size,) * len(spatial) if isinstance(size, int) else tuple(size)
        if len(edges) != len(spatial):
            raise ConfigError(
                f"{field} is {list(edges)}: {counted(len(edges), 'number')} for the {len(spatial)} tiled axes "
                f"{''.join(self.roles.axes[i] for i in spatial)}. Write one number, or one for each."
            )
        full = list(other)
        for position, edge in zip(spatial, edges, strict=True):
            full[position] = edge
        return tuple(full)


def choose_chunk(geometry: Geometry, requested: Output) -> tuple[int, ...]:
    """Return the inner chunk, in output pixels: never longer than the array; 1 on looped axes, whole on channels.

    A chunk that is not given is no longer than a given shard.
    """
    others = [1] * len(geometry.output_shape)
    if geometry.roles.channel is not None:
        others[geometry.roles.channel] = geometry.output_shape[geometry.roles.channel]
    usual = CHUNK.get(geometry.dims, 64)
    chunk = geometry.spread("output.chunk", usual if requested.chunk == "auto" else requested.chunk, tuple(others))
    if requested.chunk == "auto" and requested.shard != "auto":
        chunk = tuple(map(min, chunk, geometry.spread("output.shard", requested.shard, chunk)))
    return tuple(min(c, n) for c, n in zip(chunk, geometry.output_shape, strict=True))


def choose_shard(
    geometry: Geometry,
    requested: Output,
    chunk: Shape,
    memory_bytes: int,
    itemsize: int,
    source: Source,
    previous: Mapping[str, Any] | None,
) -> Shape:
    """Return the shard, in output pixels: a whole number of chunks, no longer than covers the array.

    One that is not given is the usual one, or that of the input, doubled on tiled axes until there are few enough; or the one that a run began with.
    ``memory_bytes``: memory of a worker; ``itemsize``: bytes of a pixel while it is computed; ``source``: input; ``previous``: stored plan of the run
    that is resumed.
    """
    shape, spatial, size = geometry.output_shape, geometry.roles.spatial, requested.shard
    covering = tuple(-(-n // c) * c for n, c in zip(shape, chunk, strict=True))
    if size != "auto":
        edges = geometry.spread("output.shard", size, chunk)
        shard = tuple(map(min, edges, covering))
        for s, c in zip(shard, chunk, strict=True):
            if s % c:
                raise ConfigError(
                    f"output.shard is {size} and output.chunk {list(chunk)}: a shard holds whole chunks. "
                    f"Write a multiple of {c}."
                )
        return shard

    def times(shard: Shape, factor: int) -> Shape:
        return tuple(
            min(s * factor, w) if i in spatial else s for i, (s, w) in enumerate(zip(shard, covering, strict=True))
        )

    def files(shard: Shape) -> int:
        return math.prod(-(-n // s) for n, s in zip(shape, shard, strict=True))

    # Half of all files hold coarser levels.
    most_files = MOST_FILES if requested.format == "zarr" or requested.levels == 1 else MOST_FILES // 2
    most_pixels = max(0, min(memory_bytes // 8, (memory_bytes - IMPORTS_BYTES) // SHARES)) // max(4, itemsize)
    before = tuple(previous["outputs"][0]["layout"]["shard"]) if previous else None
    shard, kept = times(chunk, SHARD_CHUNKS), _fitting_shard(before, geometry, chunk)
    if kept and geometry.dims >= 3:  # that of a volume depends on the memory
        return kept
    if files(shard) <= most_files:
        return shard
    if kept:
        return kept
    like = _fitting_shard(source.shards, geometry, chunk)
    if like and math.prod(like) <= most_pixels and files(like) < files(shard):
        shard = like
    while files(shard) > most_files and (larger := times(shard, 2)) != shard:
        if math.prod(larger) > most_pixels:
            break
        shard = larger
    return shard


def _fitting_shard(shard: tuple[int, ...] | None, geometry: Geometry, chunk: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a given shard where it holds whole chunks and differs from them on tiled axes alone."""
    if shard is None or len(shard) != len(chunk):
        return None
    fits = all(
        s % c == 0 and (s == c or i in geometry.roles.spatial)
        for i, (s, c) in enumerate(zip(shard, chunk, strict=True))
    )
    return shard if fits else None


def layout_like(
    source: Source,  # image it is computed from; its axes may be fewer
    requested: Output,  # requested storage
    geometry: Geometry,  # shape and axes of the image
    dtype: np.dtype[Any],  # type of the computation: also the stored type where `requested` has `auto`
    memory_bytes: int,  # memory of a worker
    previous: Mapping[str, Any] | None = None,  # stored plan of the run that is resumed
    ome: OmeImage | None = None,  # metadata of an image that has its pixels from those of `source`, or finer ones
) -> Layout:
    """Return the layout of a computed image: its pixels are as large as those of ``source``, if shaped alike."""
    chunk = choose_chunk(geometry, requested)
    alike, axes = ome is not None or source.shape == geometry.shape, geometry.roles.axes
    added, factor = len(axes) - len(source.axes), geometry.roles.per_axis(geometry.scale, 1)
    scale = ((1.0,) * added + tuple(source.scale)) if alike else (1.0,) * len(axes)
    stored = str(dtype) if requested.dtype == "auto" else requested.dtype
    return Layout(
        shape=geometry.output_shape,
        dtype=stored,
        # An iteration has several images at once.
        shard=choose_shard(
            geometry, requested, chunk, memory_bytes, (1 if ome else 2) * dtype.itemsize, source, previous
        ),
        chunk=chunk,
        codec=requested.codec,
        axes=axes,
        scale=tuple(s / f for s, f in zip(scale, factor, strict=True)),
        units=((None,) * added + tuple(source.units)) if alike else (None,) * len(axes),
        **output_fields(
            ome or (source.ome if alike else None),
            axes,
            "zarr" if np.dtype(stored).kind == "c" else requested.format,
            scale=scale,
            factor=factor,
            channels=geometry.output_shape[axes.index("c")] if "c" in axes else None,
        ),
    )


def axes_like(source: Source, count: int) -> tuple[str, ...]:
    """Return the axes of a computed image: the last ones of ``source``, or the usual ones if it has fewer."""
    if 0 < count <= len(source.axes):
        return tuple(source.axes[-count:])
    return choose_axes(None, None, (1,) * count)


def block_unit(geometry: Geometry, shard: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest super-block, in input pixels: whole shards of output, aligned for the network."""
    unit = []
    for i, s in enumerate(shard):
        if i in geometry.roles.spatial:
            unit.append(math.lcm(s // math.gcd(s, geometry.scale), geometry.align))
        else:
            unit.append(geometry.shape[i] if i == geometry.roles.channel else s)
    return tuple(unit)


def check_block(geometry: Geometry, size: Size, unit: tuple[int, ...]) -> tuple[int, ...]:
    """Return a super-block that was given: refused unless it is a whole number of shards."""
    block = geometry.spread("tile.block", size, unit)
    for b, u, n in zip(block, unit, geometry.shape, strict=True):
        if b % u and b < n:
            raise ConfigError(
                f"tile.block is {size}: a block writes whole shards, which take {u} pixels of the input. "
                f"Write a multiple of {u}."
            )
    return block


def least_window(geometry: Geometry, convolutional: bool) -> tuple[int, ...]:
    """Return the shortest window on each tiled axis that is computed as the whole image is.

    torch passes a convolution over a single image of up to 20480 numbers to another library, which rounds
    differently. An image that is itself no larger is one window.
    """
    image = [geometry.shape[i] for i in geometry.roles.spatial]
    if not convolutional:
        return (1,) * len(image)
    if math.prod(image) <= FEW:
        return tuple(image)
    least = [min(n, math.ceil((FEW + 1) ** (1 / len(image)))) for n in image]
    while math.prod(least) <= FEW:
        room = [i for i, n in enumerate(image) if least[i] < n]
        i = min(room, key=lambda axis: least[axis])
        other_lengths = math.prod(least) // least[i]
        least[i] = min(image[i], FEW // other_lengths + 1)
    return tuple(least)


def candidate_tiles(
    geometry: Geometry, size: Size | Auto, depth: Depth = (), *, on_gpu: bool = False
) -> tuple[Size, ...]:
    """Return candidate compute tiles, the most promising first; only the given one, if there is one.

    ``geometry``: image; ``size``: requested tile; ``depth``: halo on each tiled axis; ``on_gpu``: GPUs compute.
    """
    if size != "auto":
        return (size,)
    tiles = (GPU_TILES if on_gpu else TILES).get(geometry.dims, (64,))
    if on_gpu or geometry.dims < 3:
        return tiles

    def redundancy(edge: int) -> float:
        return math.prod(1 + (before + after) / edge for before, after in depth)

    frugal = [edge for edge in tiles if redundancy(edge) <= MOST_REDUNDANT]
    return (*frugal, *sorted(set(tiles) - set(frugal), reverse=True))


def fit_tile(geometry: Geometry, size: Size, block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the compute tile on the tiled axes, in input pixels: aligned, within the block and the image."""
    spread = geometry.spread("tile.size", size, geometry.shape)
    align = geometry.align
    least = (min(spread[i], block[i], geometry.shape[i]) for i in geometry.roles.spatial)
    return tuple(-(-edge // align) * align for edge in least)


DIFFER = "tiles differ from the whole image"  # start of a note that is kept with the run


@dataclass(frozen=True, slots=True)
class Halo:
    """The halo of a job, its origin, and notes about it."""

    depth: Depth  # width before and after, for each tiled axis, in pixels
    align: int
    origin: str
    probed: tuple[int, int] | None = None  # receptive field and alignment, where they had to be probed
    notes: tuple[str, ...] = ()
    # Largest difference between tiles and the whole image in a trial, relative to the largest pixel.
    difference: float = 0.0

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and the difference in words."""
        if not self.difference:
            return self.notes
        note = f"{DIFFER} by {self.difference:.1g} of its largest pixel, on a trial"
        return (*self.notes, note)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Build a halo from the JSON of its :func:`~dataclasses.asdict`."""
        return cls(**{name: _with_tuples(value) for name, value in stored.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def resolve_halo(tile: Tile, denoiser: Denoiser, dims: int, known: tuple[int, int] | None = None) -> Halo:
    """Return the depth of a job's tiles. A resumed run keeps the probed values of its first run as ``known``."""
    needed, align, probed = denoiser.receptive_field(), denoiser.alignment, None
    origin = f"declared by {denoiser.name}"
    if needed is None:
        probed = known or probe(denoiser, dims)
        described = denoiser.probed(*probed)  # what the job declares takes precedence
        needed, align = described.receptive_field() or 0, described.alignment
        origin = "probed"
    if tile.depth == "auto":
        return Halo(((needed, needed),) * dims, align, origin, probed)
    widths = (tile.depth,) * dims if isinstance(tile.depth, int) else tuple(tile.depth)
    if len(widths) != dims:
        raise ConfigError(f"tile.depth is {tile.depth}: write one number, or one for each of the {dims} tiled axes.")
    given = Halo(tuple((d, d) for d in widths), align, "given", probed)
    if min(widths) >= needed:
        return given
    if tile.seams == "allow":
        return replace(given, notes=(f"depth {min(widths)} is below the receptive field {needed}: seams will show",))
    raise ConfigError(
        f"tile.depth is {min(widths)} but {denoiser.title}'s receptive field is {needed}: seams would show. "
        f"Write depth: {needed}, or depth: auto, or seams: allow."
    )


def is_cut_at_edge(tile: Tile, denoiser: Denoiser) -> bool:
    """Return True where windows end with the image; else a boundary rule continues it."""
    return (denoiser.boundary if tile.boundary == "auto" else tile.boundary) == "cut"


def rehearsed(tile: Tile, denoiser: Denoiser, halo: Halo, image: tuple[int, ...]) -> Halo:
    """Return the halo of a user's network or function after comparing its tiles with a whole image.

    ``image``: lengths of the tiled axes.

    Returns
    -------
    Halo
        With a larger alignment, where tiles agree with the whole only then; with the difference, where they
        do not quite agree.
    """
    is_cut = is_cut_at_edge(tile, denoiser)
    if isinstance(denoiser, ArrayDenoiser):
        if tile.seams != "allow":
            check_depth(denoiser, halo.depth, image, is_cut=is_cut)
        return halo
    probed = denoiser.probed(*halo.probed) if halo.probed else denoiser
    if probed.alignment > 1:
        check_ragged(probed, image)
    if tile.seams == "allow":
        return halo
    rehearsal = rehearse(probed, halo.depth, image, search=halo.probed is not None, is_cut=is_cut)
    if halo.probed is not None:
        if not rehearsal.agrees:
            raise tiling_error(denoiser, rehearsal, image)
        halo = replace(halo, align=rehearsal.alignment, probed=(halo.probed[0], rehearsal.alignment))
    return replace(halo, difference=rehearsal.difference)
