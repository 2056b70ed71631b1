"""A sum of delayed tasks as a tree: of bounded fan-in, in a fixed order."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dask import delayed
from dask.delayed import Delayed

from halotile.tasks.distributed.calls import Call
from halotile.tasks.distributed.work import Work

REDUCE = "reduce"
"""The phase of sums."""
MOST_LEAVES = 64
"""Leaves of a tree at most: of 256 operators each leaf adds up four, one after the other."""

Item = TypeVar("Item")


def tree(leaves: Sequence[Delayed], add: Callable[[list[Any]], Any], split_every: int, token: str) -> Delayed:
    """The sum of the leaves: of ``split_every`` neighbours at a time, then of those sums.

    Which are added to which depends on their number alone, so the sum has the same bits wherever they run.

    Parameters
    ----------
    leaves : sequence of Delayed
        In the order in which they are added.
    add : callable
        Adds up a list of results.
    split_every : int
        Results that one task adds up, two at least.
    token : str
        Part of every key.

    Examples
    --------
    >>> leaves = [delayed(str)(number) for number in range(5)]
    >>> tree(leaves, lambda parts: f"({' '.join(parts)})", 2, "t").compute(scheduler="sync")
    '(((0 1) (2 3)) 4)'
    """
    layer, depth = list(leaves), 0
    while len(layer) > 1:
        groups = cut(layer, split_every)
        layer = [
            group[0]
            if len(group) == 1
            else delayed(add, pure=False)(list(group), dask_key_name=f"{REDUCE}-{token}-{depth}-{place}")
            for place, group in enumerate(groups)
        ]
        depth += 1
    return layer[0]


def cut(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The items in runs of so many.

    Examples
    --------
    >>> cut([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


def plan_calls(work: Work, calls: Sequence[Call], split_every: int) -> list[Delayed]:
    """The calls as delayed tasks: one that gives everything where sums are to be made, else one for each call."""
    token = uuid.uuid4().hex[:8]
    counts = Counter(slot for call in calls for slot in call.slots)
    is_summed = any(count > 1 for count in counts.values())
    size = -(-len(calls) // MOST_LEAVES) if is_summed else 1
    compute = delayed(work.compute, pure=False)
    leaves = [
        compute(group, dask_key_name=f"{work.phase}-{token}-{group[0].number}") for group in cut(calls, size)
    ]
    return [tree(leaves, work.add, split_every, token)] if is_summed else leaves
