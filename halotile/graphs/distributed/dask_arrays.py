"""Calls on Dask arrays: nothing is computed before the result is."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from functools import partial
from operator import getitem
from typing import Any

import dask.array as da
from dask import delayed
from dask.delayed import Delayed

from halotile.graphs.tree_sum import tree
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.work import add_arrays, run_named_task


def is_lazy(value: Any) -> bool:
    """Return True for a Dask array."""
    return isinstance(value, da.Array)


def run_lazily(
    phase: str, calls: Sequence[Call], arrays: Sequence[Any], like: Sequence[Any], what: str, split_every: int
) -> list[da.Array]:
    """Return the totals of calls as Dask arrays with the shapes and dtypes of ``like``.

    Each call reads its arrays whole.
    """
    token = uuid.uuid4().hex[:8]
    whole = [_whole(array) for array in arrays]
    parts: list[list[Delayed]] = [[] for _ in like]
    for call in calls:
        key = f"{phase}-{token}-{call.number}"
        # Bound by partial: Dask would search every field of every argument for tasks.
        run = partial(run_named_task, f"{phase} of {what} {call.number}", call.function)
        values = delayed(run, pure=False)(*(whole[place] for place in call.inputs), dask_key_name=key)
        for place, slot in enumerate(call.slots):
            parts[slot].append(delayed(getitem)(values, place, dask_key_name=f"{key}-{place}"))
    return [
        da.from_delayed(tree(part, add_arrays, split_every, f"{token}-{slot}"), each.shape, each.dtype)
        for slot, (part, each) in enumerate(zip(parts, like, strict=True))
    ]


def _whole(array: Any) -> Delayed:
    """Return an array as a single delayed block."""
    if not is_lazy(array):
        return delayed(array)
    (block,) = array.rechunk(-1).to_delayed().reshape(math.prod((1,) * array.ndim))
    return block
