"""Calls on dask arrays: nothing is computed before the result is."""

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
from halotile.tasks.distributed.stacks.windows import Late
from halotile.tasks.distributed.tiling.processed import Processed
from halotile.tasks.distributed.tiling.tiles import Span, Tiles
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.work import add_arrays, on_arrays_named, outcome


def is_lazy(thing: Any) -> bool:
    """Whether it is a dask array."""
    return isinstance(thing, da.Array)


def calls_on(
    calls: Sequence[Call], arrays: Sequence[Any], slots: int, split_every: int, phase: str
) -> list[da.Array]:
    """The totals of calls. Each call sees its arrays whole.

    What shapes come out is learnt from arrays of zeros, once, in this process.
    """
    token = uuid.uuid4().hex[:8]
    whole = [_whole(array) for array in arrays]
    zeros = [np.zeros(array.shape, array.dtype) for array in arrays]
    parts: dict[int, list[Delayed]] = {slot: [] for slot in range(slots)}
    found: dict[int, tuple[tuple[int, ...], Any]] = {}
    for call in calls:
        inputs = [whole[place] for place in call.inputs]
        for place, slot in enumerate(call.slots):
            key = f"{phase}-{token}-{call.number}-{place}"
            named = f"{phase} of operator {call.number}"
            parts[slot].append(
                delayed(on_arrays_named, pure=False)(named, call.function, place, *inputs, dask_key_name=key)
            )
            if slot not in found:
                found[slot] = outcome(call.function, place, [zeros[i] for i in call.inputs])
    return [
        da.from_delayed(
            tree(parts[slot], add_arrays, split_every, f"{token}-{slot}"),
            shape=found[slot][0],
            dtype=found[slot][1],
        )
        for slot in range(slots)
    ]


def tiles_on(image: da.Array, processed: Processed, tiles: Tiles, phase: str) -> da.Array:
    """An image processed tile by tile; each tile sees its window alone.

    Raises
    ------
    ConfigError
        Where neighbours are to be blended.
    """
    if tiles.blending is not None:
        raise ConfigError(
            f"blending is {tiles.blending!r}, which dask arrays have not: compute() them first, or leave it out."
        )
    token = uuid.uuid4().hex[:8]
    windows = [cuts[0].window[1] - cuts[0].window[0] for cuts in tiles.cuts]
    small = list(image.shape)
    for axis, length in zip(tiles.axes, windows, strict=True):
        small[axis] = length
    shape, dtype = outcome(processed, 0, [np.zeros(small, image.dtype)])
    inner = [cuts[0].inner[1] - cuts[0].inner[0] for cuts in tiles.cuts]
    scales = [shape[axis] // length for axis, length in zip(tiles.axes, inner, strict=True)]
    counts = [len(cuts) for cuts in tiles.cuts]
    made = np.empty(counts, dtype=object)
    for number, index in enumerate(itertools.product(*map(range, counts))):
        cuts = [tiles.cuts[k][i] for k, i in enumerate(index)]
        window = image
        for axis, cut in zip(tiles.axes, cuts, strict=True):
            window = _span(window, axis, cut.window)
        key = f"{phase}-{token}-{number}"
        named = f"{phase} of tile {number}"
        tile = delayed(on_arrays_named, pure=False)(
            named, processed.of(number), 0, _whole(window), dask_key_name=key
        )
        part = da.from_delayed(tile, shape=shape, dtype=dtype)
        place = [slice(None)] * len(shape)
        for axis, cut, scale in zip(tiles.axes, cuts, scales, strict=True):
            place[axis] = slice((cut.core[0] - cut.inner[0]) * scale, (cut.core[1] - cut.inner[0]) * scale)
        made[index] = part[tuple(place)]
    return _joined(made, tiles.axes)


def blocks_on(
    lates: Sequence[Late], places: Sequence[Sequence[Region]], arrays: Sequence[da.Array], phase: str
) -> list[da.Array]:
    """Images of blocks, each of which sees its windows alone.

    Parameters
    ----------
    lates : sequence of Late
        The blocks, row by row.
    places : sequence of sequence of Region
        For each of them where its results lie.
    arrays : sequence of Array
        What windows are cut from.
    phase : str
        What the dashboard calls the tasks.
    """
    token = uuid.uuid4().hex[:8]
    columns = len(lates) // len({regions[0].start[-2] for regions in places})
    made = [np.empty((len(lates) // columns, columns), dtype=object) for _ in places[0]]
    for number, (late, regions) in enumerate(zip(lates, places, strict=True)):
        seen = [
            _whole(array[window.slices])
            for array, near in zip(arrays, late.windows, strict=True)
            for window in near
        ]
        results = delayed(partial(late), pure=False)(*seen, dask_key_name=f"{phase}-{token}-{number}")
        for slot, region in enumerate(regions):
            part = delayed(getitem)(results, slot, dask_key_name=f"{phase}-{token}-{number}-{slot}")
            block = da.from_delayed(part, shape=region.shape, dtype=arrays[0].dtype)
            made[slot][divmod(number, columns)] = block
    return [_joined(blocks, (-2, -1)) for blocks in made]


def _joined(made: Any, axes: Sequence[int]) -> da.Array:
    for axis in reversed(axes):
        joined = np.empty(made.shape[:-1], dtype=object)
        for index in np.ndindex(*made.shape[:-1]):
            joined[index] = da.concatenate(list(made[index]), axis=axis)
        made = joined
    return made[()]


def _whole(array: Any) -> Delayed:
    """An array in one piece."""
    if not is_lazy(array):
        return delayed(array)
    (block,) = array.rechunk(-1).to_delayed().reshape(math.prod((1,) * array.ndim))
    return block


def _span(array: da.Array, axis: int, span: Span) -> da.Array:
    """A run of pixels along one axis, mirrored past its ends."""
    length = array.shape[axis]
    if span[0] >= 0 and span[1] <= length:
        return array[(slice(None),) * axis + (slice(*span),)]
    return da.take(array, source_positions(*span, length, "mirror"), axis=axis)
