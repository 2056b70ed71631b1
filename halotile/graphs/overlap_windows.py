"""Stored arrays cut into overlapping windows, one for each block of a Dask array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from numbers import Number
from os import PathLike
from typing import Any

import dask.array as da
import numpy as np
from dask.base import normalize_token

from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.storage.grid import Depth, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window

NAMED_RULES = ("reflect", "nearest", "periodic")


def for_each_array(value: Any, name: str, ndims: list[int]) -> list[list[Any]]:
    """Return the entries of ``depth`` or ``boundary`` per array and axis; None for an axis without one.

    A list has one entry for each array. A tuple starts at the first axis; a dict names axes, negative ones
    from the last.

    >>> for_each_array({1: 3}, "depth", [2])
    [[None, 3]]
    >>> for_each_array({-1: 3}, "depth", [2])
    [[None, 3]]
    >>> for_each_array([1, (2, 3)], "depth", [1, 2])
    [[1], [2, 3]]
    """
    if not isinstance(value, list):
        value = [value] * len(ndims)
    if len(value) != len(ndims):
        raise ConfigError(
            f"{name} is a list of {counted(len(value), 'entry')} for {counted(len(ndims), 'array')}. Write an entry for each array, "
            f"or a tuple for different axes."
        )
    return [_for_each_axis(entry, name, ndim, max(ndims)) for entry, ndim in zip(value, ndims, strict=True)]


def _for_each_axis(value: Any, name: str, ndim: int, max_ndim: int) -> list[Any]:
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [value] * ndim
    if unknown := [axis for axis in value if axis not in range(-max_ndim, max_ndim)]:
        raise ConfigError(
            f"{name} names the axes {unknown}, but the arrays have the axes {list(range(max_ndim))}. Write those."
        )
    named = {axis % ndim: entry for axis, entry in value.items() if axis in range(-ndim, ndim)}
    return [named.get(axis) for axis in range(ndim)]


def as_halo(entries: list[Any]) -> Depth:
    """Return the halo width (before, after) of each axis.

    >>> as_halo([2, (1, 0), None])
    ((2, 2), (1, 0), (0, 0))
    """
    return tuple(_as_pair(entry) for entry in entries)


def _as_pair(entry: Any) -> tuple[int, int]:
    try:
        before, after = entry if isinstance(entry, tuple) else (entry or 0,) * 2
        pair = operator.index(before), operator.index(after)
    except (TypeError, ValueError):
        pair = (-1, -1)
    if min(pair) < 0:
        raise ConfigError(
            f"depth is {entry!r} for an axis: it must be a number of pixels. Write an integer >= 0, "
            "or a pair (before, after) of integers."
        )
    return pair


def as_rim(entries: list[Any], dtype: np.dtype[Any]) -> Rim:
    """Return the rim rule of each axis; constants become pixels of ``dtype``.

    >>> as_rim(["none", 7], np.dtype("uint8"))
    Rim(rules=('cut', 'constant'), values=(0, 7))
    """
    rules, values = [], []
    for entry in entries:
        constant = isinstance(entry, Number | np.generic)
        rules.append("constant" if constant else _rule(entry))
        values.append(_as_pixel(entry if constant else 0, dtype))
    return Rim(tuple(rules), tuple(values))


def _rule(entry: Any) -> str:
    if entry is None or (isinstance(entry, str) and entry in ("none", "cut")):
        return "cut"
    if isinstance(entry, str) and entry in NAMED_RULES:
        return entry
    raise ConfigError(
        f"boundary is {entry!r}, which is not a rim rule. Write one of {', '.join(NAMED_RULES)}, none, or a number."
    )


def _as_pixel(value: Any, dtype: np.dtype[Any]) -> Any:
    """Convert a constant to ``dtype`` and back to a Python number."""
    if dtype.kind in "iu" and value != value:
        raise ConfigError(f"boundary is {value!r}, which {dtype} pixels cannot hold. Write an integer.")
    try:
        return np.full((), value, dtype).item()
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"boundary is {value!r}, which {dtype} pixels cannot hold. Write a number that they can hold."
        ) from error


def dask_depth(depth: Depth) -> dict[int, int | tuple[int, int]]:
    """Return a halo as Dask's depth argument."""
    return {axis: pair[0] if pair[0] == pair[1] else pair for axis, pair in enumerate(depth)}


def dask_boundary(rim: Rim) -> dict[int, Any]:
    """Return rim rules as Dask's boundary argument.

    >>> dask_boundary(Rim(("cut", "reflect"), (0, 0)))
    {0: 'none', 1: 'reflect'}
    """
    names = {"cut": "none"}
    return {
        axis: value if rule == "constant" else names.get(rule, rule)
        for axis, (rule, value) in enumerate(zip(rim.rules, rim.values, strict=True))
    }


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
                f"block is {block!r}: it has {counted(len(block), 'entry')} for {max_ndim} axes. Write one for each axis."
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
