"""Calls on Dask arrays: nothing is computed before the result is."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Sequence
from functools import partial
from operator import getitem
from typing import Any

import dask.array as da
import numpy as np
from dask import delayed
from dask.delayed import Delayed

from halotile.errors import ConfigError
from halotile.graphs.tree_sum import tree
from halotile.storage.grid import Region
from halotile.storage.rim import source_positions
from halotile.tasks.distributed.stacks.windows import LazyBlock
from halotile.tasks.distributed.tiling.processor_call import ProcessorCall
from halotile.tasks.distributed.tiling.tiles import Span, Tiles
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.work import add_arrays, call_on_arrays, run_named_task


def is_lazy(value: Any) -> bool:
    """Return True for a Dask array."""
    return isinstance(value, da.Array)


def lazy_totals(
    phase: str, calls: Sequence[Call], arrays: Sequence[Any], slots: int, split_every: int
) -> list[da.Array]:
    """Return the totals of calls as Dask arrays. Each call reads its arrays whole.

    Shapes and dtypes are determined once, in this process, by calls on arrays of zeros.
    """
    token = uuid.uuid4().hex[:8]
    whole = [_whole(array) for array in arrays]
    zeros = [np.zeros(array.shape, array.dtype) for array in arrays]
    parts: dict[int, list[Delayed]] = {slot: [] for slot in range(slots)}
    specs: dict[int, tuple[tuple[int, ...], Any]] = {}
    for call in calls:
        inputs = [whole[place] for place in call.inputs]
        name = f"{phase} of operator {call.number}"
        for place, slot in enumerate(call.slots):
            key = f"{phase}-{token}-{call.number}-{place}"
            task = delayed(run_named_task, pure=False)(name, call.function, place, *inputs, dask_key_name=key)
            parts[slot].append(task)
            if slot not in specs:
                example = call_on_arrays(call.function, place, *(zeros[i] for i in call.inputs))
                specs[slot] = example.shape, example.dtype
    return [
        da.from_delayed(tree(parts[slot], add_arrays, split_every, f"{token}-{slot}"), *specs[slot])
        for slot in range(slots)
    ]


def lazy_tiles(phase: str, image: da.Array, call: ProcessorCall, tiles: Tiles) -> da.Array:
    """Return an image processed tile by tile; each task reads the window of its tile alone."""
    if tiles.blending is not None:
        raise ConfigError(
            f"blending is {tiles.blending!r}, which dask arrays do not support. compute() them first, or leave it out."
        )
    token = uuid.uuid4().hex[:8]
    window_shape, inner_lengths = list(image.shape), []
    for axis, (tile, *_) in zip(tiles.axes, tiles.axis_tiles, strict=True):
        window_shape[axis] = tile.window[1] - tile.window[0]
        inner_lengths.append(tile.inner[1] - tile.inner[0])
    example = call_on_arrays(call, 0, np.zeros(window_shape, image.dtype))
    shape, dtype = example.shape, example.dtype
    scales = [shape[axis] // length for axis, length in zip(tiles.axes, inner_lengths, strict=True)]
    counts = [len(axis_tiles) for axis_tiles in tiles.axis_tiles]
    parts = np.empty(counts, dtype=object)
    for number, index in enumerate(itertools.product(*map(range, counts))):
        window = image
        place = [slice(None)] * len(shape)
        for axis, axis_tiles, i, scale in zip(tiles.axes, tiles.axis_tiles, index, scales, strict=True):
            tile = axis_tiles[i]
            window = _read_span(window, axis, tile.window)
            place[axis] = slice(*((edge - tile.inner[0]) * scale for edge in tile.core))
        task = delayed(run_named_task, pure=False)(
            f"{phase} of tile {number}",
            call.for_batch(number),
            0,
            _whole(window),
            dask_key_name=f"{phase}-{token}-{number}",
        )
        parts[index] = da.from_delayed(task, shape=shape, dtype=dtype)[tuple(place)]
    return _join(parts, tiles.axes)


def lazy_blocks(
    phase: str, blocks: Sequence[LazyBlock], places: Sequence[Sequence[Region]], arrays: Sequence[da.Array]
) -> list[da.Array]:
    """Return images of blocks; each task reads the windows of its block alone.

    ``phase``: name of the tasks on the dashboard; ``blocks, row by row; ``places``: regions of the results of each block; ``arrays``: arrays that
    windows are cut from.
    """
    token = uuid.uuid4().hex[:8]
    columns = len(blocks) // len({regions[0].start[-2] for regions in places})
    images = [np.empty((len(blocks) // columns, columns), dtype=object) for _ in places[0]]
    for number, (block, regions) in enumerate(zip(blocks, places, strict=True)):
        inputs = [
            _whole(array[window.slices])
            for array, windows in zip(arrays, block.windows, strict=True)
            for window in windows
        ]
        key = f"{phase}-{token}-{number}"
        results = delayed(partial(block), pure=False)(*inputs, dask_key_name=key)
        for slot, region in enumerate(regions):
            part = delayed(getitem)(results, slot, dask_key_name=f"{key}-{slot}")
            pixels = da.from_delayed(part, shape=region.shape, dtype=arrays[0].dtype)
            images[slot][divmod(number, columns)] = pixels
    return [_join(parts, (-2, -1)) for parts in images]


def _join(parts: Any, axes: Sequence[int]) -> da.Array:
    """Concatenate an object array of Dask arrays along these axes."""
    for axis in reversed(axes):
        joined = np.empty(parts.shape[:-1], dtype=object)
        for index in np.ndindex(*parts.shape[:-1]):
            joined[index] = da.concatenate(list(parts[index]), axis=axis)
        parts = joined
    return parts[()]


def _whole(array: Any) -> Delayed:
    """Return an array as a single delayed block."""
    if not is_lazy(array):
        return delayed(array)
    (block,) = array.rechunk(-1).to_delayed().reshape(math.prod((1,) * array.ndim))
    return block


def _read_span(array: da.Array, axis: int, span: Span) -> da.Array:
    """Return a run of pixels along one axis, mirrored past its ends."""
    length = array.shape[axis]
    if span[0] >= 0 and span[1] <= length:
        return array[(slice(None),) * axis + (slice(*span),)]
    return da.take(array, source_positions(*span, length, "mirror"), axis=axis)
