"""Mapping of a function over overlapping blocks of stored arrays, one Dask task per block.

Stock ``dask.array.map_overlap`` loads every block, cuts off its edges, sends them to the
neighbours and concatenates them: some fifteen tasks per block. A store can be read anywhere, so here each
task reads its own core and halo, calls the function and trims: one Blockwise layer, which holds no pixels
and in which no block waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.utils import funcname, has_keyword
from numpy.typing import DTypeLike

from halotile.errors import ConfigError
from halotile.graphs.overlap_windows import (
    Chunks,
    Index,
    Windows,
    align,
    as_dask,
    as_halo,
    as_rim,
    chunks_of,
    dask_boundary,
    dask_depth,
    for_each_array,
    open_store,
)
from halotile.storage.grid import Depth

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
    axes: tuple[int | None, ...]
    """Input axis of each output axis (of the store with most axes); None for a new one."""
    trim: bool
    mapped_chunks: Chunks
    dtype: Any
    """The dtype in the function's ``block_info``."""
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
