"""Stored arrays cut into overlapping windows, one for each block of a Dask array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any

import dask.array as da
import numpy as np
from dask.base import normalize_token

from halotile.errors import ConfigError
from halotile.storage.grid import Depth, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window

Chunks = tuple[tuple[int, ...], ...]
Index = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """A store cut into cores that are read with their halos."""

    source: Readable
    chunks: Chunks
    depth: Depth
    rim: Rim

    @cached_property
    def edges(self) -> Chunks:
        """Starts of the cores along each axis, followed by the end of the last one."""
        return tuple(tuple(accumulate(c, initial=0)) for c in self.chunks)

    @cached_property
    def halos(self) -> tuple[Depth, ...]:
        """The actual halo (before, after) of each core along each axis: a cut one ends at the array edge."""
        return tuple(
            tuple((min(before, a), min(after, edges[-1] - b)) for a, b in pairwise(edges))
            if rule == "cut"
            else ((before, after),) * (len(edges) - 1)
            for edges, (before, after), rule in zip(self.edges, self.depth, self.rim.rules, strict=True)
        )

    @cached_property
    def lengths(self) -> Chunks:
        """Lengths of the windows along each axis."""
        return tuple(
            tuple(n + before + after for n, (before, after) in zip(sizes, halos, strict=True))
            for sizes, halos in zip(self.chunks, self.halos, strict=True)
        )

    def read(self, block_id: Index) -> Pixels:
        """Read one window."""
        start = tuple(edges[i] for edges, i in zip(self.edges, block_id, strict=True))
        stop = tuple(edges[i + 1] for edges, i in zip(self.edges, block_id, strict=True))
        return read_window(self.source, Region(start, stop).grow(self.depth), self.rim)

    def merge(self, axes: Sequence[int]) -> Windows:
        """Return the same store with one core along each of ``axes``."""
        sizes = tuple((sum(c),) if axis in axes else c for axis, c in enumerate(self.chunks))
        return Windows(self.source, sizes, self.depth, self.rim)

    def __dask_tokenize__(self) -> object:
        # A file that was overwritten must get new keys, or a scheduler may return the old result.
        fingerprint = getattr(self.source, "fingerprint", None)
        identity = fingerprint() if callable(fingerprint) else self.source
        return normalize_token(("halotile.Windows", identity, self.chunks, self.depth, self.rim))


@dataclass(frozen=True)
class ZarrReadable:
    """An open Zarr array as a Readable."""

    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]

    def read(self, region: Region) -> Pixels:
        """Read the pixels of ``region``."""
        return np.asarray(self.array[region.slices])


def open_store(array: Any) -> Readable:
    """Return the store of a path, a Zarr array or a Readable."""
    if isinstance(array, str | PathLike):
        from halotile.storage.arrays import open_array

        array = open_array(array)
    elif type(array).__module__.partition(".")[0] == "zarr" and hasattr(array, "chunks"):
        array = ZarrReadable(array, tuple(array.shape), np.dtype(array.dtype), tuple(array.chunks))
    if not all(hasattr(array, name) for name in ("shape", "dtype", "read")):
        raise ConfigError(
            f"an array is a {type(array).__name__}: its blocks cannot be read. Write a path, a Readable, a zarr.Array, "
            "a NumPy array, or dask.array.from_array(it)."
        )
    if 0 in array.shape:
        raise ConfigError(f"an array has shape {array.shape}: no pixels to map. Leave the array out.")
    store: Readable = array
    return store


def chunks_of(store: Readable, block: Any, max_ndim: int) -> Chunks:
    """Return the core sizes: ``block``, which is for the array with most axes, or the store's own chunks."""
    if block is None:
        stored = getattr(store, "chunks", None)
        # A file without chunks reports 1 on every axis: any block size is as good.
        unchunked = getattr(store, "mapped", False) and max(stored or (1,)) == 1
        block = "auto" if unchunked or not stored else stored
    elif isinstance(block, tuple | list):
        if len(block) != max_ndim:
            raise ConfigError(
                f"block is {block!r}: it has {len(block)} entries for {max_ndim} axes. Write one for each axis."
            )
        block = tuple(block)[max_ndim - len(store.shape) :]
    sizes = block if isinstance(block, tuple) else (block,)
    if any(isinstance(size, int) and size < 1 and size != -1 for size in sizes):
        raise ConfigError(
            f"block is {block!r}: a block is at least 1 pixel long. Write a size per axis, or -1 for all of it."
        )
    try:
        cut: Chunks = da.core.normalize_chunks(block, shape=store.shape, dtype=store.dtype)
    except (ValueError, TypeError, NotImplementedError) as error:  # raised by Dask for bad chunks
        raise ConfigError(
            f"block is {block!r}: an array of shape {store.shape} cannot be cut like that ({error}). Write a size per axis."
        ) from error
    return cut


def align(cuts: Sequence[Chunks], refine: bool) -> list[Chunks]:
    """Refine the cuts until all blocks match; axes are matched from the last, as in NumPy.

    Examples
    --------
    >>> align([((4, 4),), ((6, 2),)], refine=True)
    [((4, 2, 2),), ((4, 2, 2),)]
    """
    aligned = [list(cut) for cut in cuts]
    for back in range(1, max(map(len, cuts), default=0) + 1):
        members = [cut for cut in aligned if len(cut) >= back and sum(cut[-back]) > 1]
        axis_cuts = {cut[-back] for cut in members}
        if len({sum(sizes) for sizes in axis_cuts}) > 1:
            raise ConfigError(
                f"the arrays are {sorted(map(sum, axis_cuts))} pixels long along axis {-back}: they cannot "
                "be broadcast together. Give arrays of one length, or of length 1."
            )
        if len(axis_cuts) > 1 and not refine:
            raise ConfigError(
                f"the arrays are cut into {sorted(axis_cuts)} along axis {-back}, but align_arrays is False. "
                "Write align_arrays=True, or one block= for all."
            )
        edges = sorted({0}.union(*(accumulate(sizes) for sizes in axis_cuts)))
        for cut in members:
            cut[-back] = tuple(b - a for a, b in pairwise(edges))
    return [tuple(cut) for cut in aligned]


def as_dask(array: Any) -> da.Array:
    """Return a store, or an array in memory, as an ordinary Dask array."""
    if isinstance(array, da.Array):
        return array
    if isinstance(array, np.ndarray):
        return da.from_array(array)
    cut = chunks_of(array, None, len(array.shape))
    axes = len(cut)
    windows = Windows(array, cut, ((0, 0),) * axes, Rim.everywhere("cut", axes))
    return da.map_blocks(windows.read, chunks=cut, dtype=array.dtype, meta=np.empty((0,) * axes, array.dtype))
