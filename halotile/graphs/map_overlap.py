"""Mapping of a function over overlapping blocks of stored arrays, one Dask task per block.

Stock ``dask.array.map_overlap`` loads every block, cuts off its edges, sends them to the neighbours and concatenates them: some fifteen
tasks per block. A store can be read anywhere, so here each task reads its own core and halo, calls the function and trims: one Blockwise
layer, which holds no pixels and in which no block waits for another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from numbers import Number
from os import PathLike
from typing import Any

import dask.array as da
import numpy as np
from dask.base import normalize_token, tokenize
from dask.utils import funcname, has_keyword
from numpy.typing import DTypeLike

from halotile.errors import ConfigError
from halotile.graphs.words import counted
from halotile.storage.grid import Depth, Region
from halotile.storage.rim import Pixels, Readable, Rim, read_window

NAMED_RULES = ("reflect", "nearest", "periodic")


def for_each_array(value: Any, name: str, ndims: list[int]) -> list[list[Any]]:
    """Return the entries of ``depth`` or ``boundary`` per array and axis; None for an axis without one.

    A list has one entry for each array. A tuple starts at the first axis; a dict names axes, negative ones from the last.

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
    return {
        axis: value if rule == "constant" else "none" if rule == "cut" else rule
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


RESERVED_BY_DASK = frozenset({"func", "adjust_chunks", "new_axes", "concatenate"})


def map_overlap(
    func: Callable[..., Any],
    /,
    *arrays: Any,
    depth: Any = None,
    boundary: Any = None,
    trim: bool = True,
    align_arrays: bool = True,
    allow_rechunk: bool = True,
    block: Any = None,
    name: str | None = None,
    token: str | None = None,
    dtype: DTypeLike | None = None,
    meta: Any = None,
    chunks: Any = None,
    drop_axis: int | Sequence[int] | None = None,
    new_axis: int | Sequence[int] | None = None,
    enforce_ndim: bool = False,
    **kwargs: Any,
) -> da.Array:
    """Map ``func`` over the blocks of arrays, each extended by ``depth`` pixels on every side.

    The result equals that of ``dask.array.map_overlap``, and is lazy as well. If every array is a store, the
    graph has one task per block, which reads its own halo. Otherwise stock Dask is called.

    Parameters
    ----------
    func : callable
        Called with one window of each array (an ndarray); returns an array. It gets ``block_id`` and
        ``block_info`` as in ``dask.array.map_blocks`` if it has these parameters.
    *arrays : path, Source, zarr.Array, dask.array.Array or ndarray
        Stores are paths, and objects that satisfy ``halotile.storage.rim.Readable``. They are pickled for the
        workers, and must broadcast together.
    depth : int, tuple, dict or list, optional
        Halo width in pixels: for all axes, for each axis, or by axis; a list has one entry for each array. A
        pair ``(before, after)`` for an axis makes it asymmetric (in a tuple or dict; stores take any boundary
        with it, dask arrays only 'none'). It may exceed the blocks, and the array, of a store. Negative axes
        count from the last, in ``boundary`` as well; stock Dask ignores them.
    boundary : str, number, tuple, dict or list, optional
        Pixels outside the array: 'reflect', 'periodic', 'nearest', a constant, or 'none' (the default; 'cut'
        means the same): the window ends at the edge.
    trim : bool
        Cut the halo off the result of ``func``. False if ``func`` does so itself.
    align_arrays : bool
        Cut the blocks of several arrays finer until they match; False refuses arrays that do not match.
    allow_rechunk : bool
        Allow Dask arrays to be rechunked to fit the depth. Stores never need it.
    block : int or tuple, optional
        Block size of stores (anything ``dask.array`` takes as chunks); by default their own chunks.
    name, token, dtype, meta, chunks, drop_axis, new_axis, enforce_ndim
        As in ``dask.array.map_blocks``. ``chunks`` are the sizes that ``func`` returns, before the trim.
        Along a dropped axis, stores need depth 0 or a single block: pixels would count twice.
    **kwargs
        Passed on to ``func``. Bind a keyword with the name of a parameter above by ``functools.partial``.

    Returns
    -------
    dask.array.Array
        Lazy; nothing is read before it is computed.

    Raises
    ------
    ConfigError
        If depth, boundary, block or axes do not fit the arrays, or the arrays do not fit each other; or if
        ``dtype`` is left out and ``func`` fails on the array of one pixel that its dtype is inferred from.
    InputError
        If a path cannot be opened.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from halotile.graphs.map_overlap import map_overlap
    >>> def step(x):
    ...     return x - np.roll(x, 1, axis=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "squares.npy")
    ...     np.save(path, np.arange(12, dtype="int16").reshape(2, 6) ** 2)
    ...     map_overlap(step, path, depth=(0, 1), boundary="nearest", block=(2, 3)).compute()
    array([[ 0,  1,  3,  5,  7,  9],
           [ 0, 13, 15, 17, 19, 21]], dtype=int16)
    """
    if not callable(func):
        raise ConfigError(f"func is {func!r}: it cannot be called. Write map_overlap(function, array, ...).")
    if not arrays:
        raise ConfigError("no array was given to map. Write map_overlap(function, array, ...).")
    if names := RESERVED_BY_DASK & kwargs.keys():
        func = partial(func, **{key: kwargs.pop(key) for key in names})
    opened: list[Any] = [a if isinstance(a, da.Array | np.ndarray) else open_store(a) for a in arrays]
    ndims = [len(array.shape) for array in opened]
    depths = [as_halo(entries) for entries in for_each_array(depth, "depth", ndims)]
    rims = [
        as_rim(entries, array.dtype)
        for entries, array in zip(for_each_array(boundary, "boundary", ndims), opened, strict=True)
    ]
    options: dict[str, Any] = {"drop_axis": _as_tuple(drop_axis), "enforce_ndim": enforce_ndim}
    naming = {"name": name, "token": token}
    output = {"dtype": dtype, "meta": meta, "chunks": chunks, "new_axis": new_axis}
    options |= {key: value for key, value in (naming | output).items() if value is not None}
    if any(isinstance(array, da.Array | np.ndarray) for array in opened):
        if block is not None:
            raise ConfigError(f"block is {block!r}: it is for stores only. Call .rechunk() on the dask arrays.")
        with _explained_inference(func):
            return da.map_overlap(
                func,
                *map(as_dask, opened),
                depth=[dask_depth(halo) for halo in depths],
                boundary=[dask_boundary(rim) for rim in rims],
                trim=trim,
                align_arrays=align_arrays,
                allow_rechunk=allow_rechunk,
                **options,
                **kwargs,
            )
    cuts = align([chunks_of(store, block, max(ndims)) for store in opened], align_arrays)
    stores = tuple(Windows(*parts) for parts in zip(opened, cuts, depths, rims, strict=True))
    return _map_stores(func, stores, trim, options, kwargs)


@dataclass(frozen=True)
class WindowTask:
    """The work of one task: reading a window of each store, calling the function, and trimming."""

    func: Callable[..., Any]
    stores: tuple[Windows, ...]
    axes: tuple[int | None, ...]  # input axis of each output axis (of the store with most axes); None for a new one
    trim: bool
    mapped_chunks: Chunks
    dtype: Any  # the dtype in the function's `block_info`
    enforce_ndim: bool

    def __call__(self, *, kwargs: Mapping[str, Any], block_id: Index) -> Any:
        kwargs = dict(kwargs)
        if has_keyword(self.func, "block_id"):
            kwargs["block_id"] = block_id
        if has_keyword(self.func, "block_info"):
            kwargs["block_info"] = self.block_info(block_id)
        windows = (store.read(self.index_in(store, block_id)) for store in self.stores)
        result = self.func(*windows, **kwargs)
        if self.enforce_ndim and getattr(result, "ndim", 0) != len(block_id):
            raise ConfigError(
                f"{funcname(self.func)} returned an array of {getattr(result, 'ndim', 0)} axes, but the result has "
                f"{len(block_id)}. Write drop_axis or new_axis as the function does, or enforce_ndim=False."
            )
        if not self.trim:
            return result
        halo = [self.halos(axis)[i] for axis, i in enumerate(block_id)]
        return result[tuple(slice(before, -after or None) for before, after in halo)]

    def index_in(self, store: Windows, block_id: Index) -> Index:
        """Return the index of a store's window for an output block; axes of one block are broadcast."""
        place = {axis: i for axis, i in zip(self.axes, block_id, strict=True) if axis is not None}
        first = _max_ndim(self.stores) - len(store.chunks)
        return tuple(place[first + a] if len(sizes) > 1 else 0 for a, sizes in enumerate(store.chunks))

    def halos(self, axis: int) -> Depth:
        """Return the widths to trim from each output block along an output axis, before and after."""
        number = len(self.mapped_chunks[axis])
        input_axis = self.axes[axis]
        if input_axis is None or not self.trim:
            return ((0, 0),) * number
        store, own = _reference_store(self.stores, input_axis)
        return store.halos[own] if len(store.halos[own]) > 1 else store.halos[own] * number

    def block_info(self, block_id: Index) -> dict[int | None, dict[str, Any]]:
        """Return map_blocks' block_info for a block; locations refer to overlapping windows, as in Dask."""
        info: dict[int | None, dict[str, Any]] = {
            number: _location(store.lengths, self.index_in(store, block_id)) for number, store in enumerate(self.stores)
        }
        shape = tuple(sizes[i] for sizes, i in zip(self.mapped_chunks, block_id, strict=True))
        info[None] = _location(self.mapped_chunks, block_id) | {"chunk-shape": shape, "dtype": self.dtype}
        return info


def _map_stores(
    func: Callable[..., Any], stores: tuple[Windows, ...], trim: bool, options: dict[str, Any], kwargs: dict[str, Any]
) -> da.Array:
    """Return the result as a single map_blocks over block numbers."""
    name, token = options.pop("name", None), options.pop("token", None)
    enforce_ndim = options.pop("enforce_ndim")
    stores, kept = _drop(stores, options["drop_axis"])
    options["new_axis"] = _new_axes(options, len(kept))
    axes: list[int | None] = [*kept]
    for axis in sorted(options["new_axis"] or ()):
        axes.insert(axis, None)
    overlaps = any(pair != (0, 0) for store in stores for pair in store.depth)
    if overlaps and not trim:
        sources = [None if axis is None else _reference_store(stores, axis) for axis in axes]
        options.setdefault("chunks", tuple(1 if pair is None else pair[0].chunks[pair[1]] for pair in sources))
    # Stock map_blocks on arrays shaped like the windows determines sizes, dtype and meta of the results.
    likes = [da.empty([sum(c) for c in s.lengths], chunks=s.lengths, dtype=s.source.dtype) for s in stores]
    with _explained_inference(func):
        mapped = da.map_blocks(_without_block_info(func), *likes, **options, **kwargs)
    # As in map_blocks: the dtype as it was given, and the inferred one only without a meta.
    dtype = options.get("dtype", None if "meta" in options else mapped.dtype)
    task = WindowTask(func, stores, tuple(axes), trim and overlaps, mapped.chunks, dtype, enforce_ndim)
    return da.map_blocks(
        task,
        kwargs=kwargs,
        chunks=tuple(_trimmed(task, axis) for axis in range(len(axes))),
        name=name or f"{token or funcname(func)}-{tokenize(task, kwargs)}",
        dtype=mapped.dtype,
        meta=mapped._meta,
    )


@contextmanager
def _explained_inference(func: Callable[..., Any]) -> Iterator[None]:
    """Replace Dask's error if ``func`` fails on the array of one pixel that its dtype is inferred from."""
    try:
        yield
    except ValueError as error:
        head, _, rest = str(error).partition("Original error is below:")
        if "inference failed" not in head:
            raise
        cause = next((line for line in rest.splitlines() if line.strip("- ")), "no reason given")
        raise ConfigError(
            f"dtype is not given, and {funcname(func)} fails on the array of one pixel from which it would be "
            f'inferred: {cause}. Write the dtype that it returns, such as dtype="float32".'
        ) from error


def _trimmed(task: WindowTask, axis: int) -> tuple[int, ...]:
    """Return the block sizes of the result along one axis."""
    mapped, halos = task.mapped_chunks[axis], task.halos(axis)
    sizes = tuple(n - before - after for n, (before, after) in zip(mapped, halos, strict=True))
    if any(n < 0 for n in sizes):
        raise ConfigError(
            f"the function returns blocks of {mapped} along axis {axis}, too short to trim {halos} from them. "
            "Write chunks as the sizes before the trim, or trim=False."
        )
    return sizes


def _drop(stores: tuple[Windows, ...], drop_axis: tuple[int, ...]) -> tuple[tuple[Windows, ...], list[int]]:
    """Merge the cores of the stores along dropped axes, and return them with the axes that are left."""
    ndim = _max_ndim(stores)
    if any(not -ndim <= axis < ndim for axis in drop_axis):
        raise ConfigError(f"drop_axis is {drop_axis}, but the arrays have {ndim} axes. Write some of these.")
    dropped = {axis % ndim for axis in drop_axis}
    merged = []
    for store in stores:
        own = [axis - ndim + len(store.chunks) for axis in dropped if axis >= ndim - len(store.chunks)]
        for axis in own:
            if len(store.chunks[axis]) > 1 and store.depth[axis] != (0, 0):
                raise ConfigError(
                    f"axis {axis} is dropped, but has {len(store.chunks[axis])} blocks that overlap by "
                    f"{store.depth[axis]}: pixels would be counted twice. Write depth 0 or one block along it."
                )
        merged.append(store.merge(own))
    return tuple(merged), [axis for axis in range(ndim) if axis not in dropped]


def _new_axes(options: dict[str, Any], kept: int) -> tuple[int, ...] | None:
    """Return the axes that the function adds; more chunks than axes add leading ones, as in map_blocks."""
    if "new_axis" not in options and len(options.get("chunks", ())) > kept:
        return tuple(range(len(options["chunks"]) - kept))
    return _as_tuple(options.get("new_axis")) or None


def _as_tuple(axes: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return one or several axes as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _max_ndim(stores: Sequence[Windows]) -> int:
    return max(len(store.chunks) for store in stores)


def _reference_store(stores: Sequence[Windows], axis: int) -> tuple[Windows, int]:
    """Return the store that defines the blocks along an axis, with its own number of that axis.

    It is the first store with most axes that is not broadcast.
    """
    ndim = _max_ndim(stores)
    own = [(store, axis - ndim + len(store.chunks)) for store in stores]
    return max(
        ((store, a) for store, a in own if a >= 0),
        key=lambda pair: (pair[0].source.shape[pair[1]] > 1, len(pair[0].chunks)),
    )


def _location(chunks: Chunks, index: Index) -> dict[str, Any]:
    """Return one entry of Dask's block_info."""
    starts = [sum(sizes[:i]) for sizes, i in zip(chunks, index, strict=True)]
    return {
        "shape": tuple(sum(sizes) for sizes in chunks),
        "num-chunks": tuple(len(sizes) for sizes in chunks),
        "array-location": [(a, a + sizes[i]) for a, sizes, i in zip(starts, chunks, index, strict=True)],
        "chunk-location": index,
    }


def _without_block_info(func: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the ``block_info`` parameter of a function, for which Dask would build a dict for every block."""
    if not has_keyword(func, "block_info"):
        return func
    return lambda *windows, **kwargs: func(*windows, **kwargs)
