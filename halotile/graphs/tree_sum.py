"""Sums of delayed tasks as trees with bounded fan-in and a fixed order."""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from dask import delayed
from dask.delayed import Delayed

from halotile.graphs.kinds.base import Numbered, SumFunctions

REDUCE = "reduce"  # phase of sums
MOST_LEAVES = 64  # largest number of leaves of a tree: for 256 operators each leaf adds up four, one after the other
SMALL_BYTES = 2**16  # inputs smaller than this are computed in a single task

Item = TypeVar("Item")


def tree(leaves: Sequence[Delayed], add: Callable[[list[Any]], Any], split_every: int, token: str) -> Delayed:
    """Sum up the leaves: ``split_every`` neighbours at a time, then those sums.

    The grouping depends on the number of leaves alone, so the sum has the same bits wherever they run.

    ``leaves``: tasks in the order in which they are added; ``add``: adds up a list of results; ``split_every``: results that one task adds up, at
    least two; ``token``: part of every key.

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
    """Split the items into runs of ``size``.

    >>> cut([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


Counted = TypeVar("Counted", bound=Numbered)


def groups_of(calls: Sequence[Counted], read_bytes: int) -> tuple[list[Sequence[Counted]], bool]:
    """Return the calls of each task, and True if the results of the tasks are to be added up."""
    counts = Counter(slot for call in calls for slot in call.slots)
    if not any(count > 1 for count in counts.values()):
        return [[call] for call in calls], False
    groups = cut(calls, len(calls) if read_bytes < SMALL_BYTES else -(-len(calls) // MOST_LEAVES))
    return groups, len(groups) > 1


def plan_calls(
    work: SumFunctions, calls: Sequence[Numbered], split_every: int, workers: int, read_bytes: int
) -> list[Delayed]:
    """Return the calls as delayed tasks: one for the sum if there is one, else one for each call."""
    groups, are_added = groups_of(calls, read_bytes)
    if are_added:
        return [plan_sums(work, groups, split_every, workers)]
    token = uuid.uuid4().hex[:8]
    return [leaf(work, group, None, token) for group in groups]


def leaf(work: SumFunctions, group: Sequence[Numbered], after: Delayed | None, token: str) -> Delayed:
    """Return a task that computes some calls."""
    # Bound by partial: Dask would search every field of every argument for tasks.
    compute = delayed(partial(work.compute, list(group)), pure=False)
    return compute(after, dask_key_name=key_of(work, group, token))


def key_of(work: SumFunctions, group: Sequence[Numbered], token: str) -> str:
    """Return the key of a task, which names its calls: it is the only trace of them when a worker dies."""
    first, last = group[0].number, group[-1].number
    numbers = f"{work.what}-{first}" if first == last else f"{work.what}s-{first}-to-{last}"
    return f"{work.phase}-{token}-{numbers}"


def plan_sums(work: SumFunctions, groups: Sequence[Sequence[Numbered]], split_every: int, workers: int) -> Delayed:
    """Return the task that adds up the groups of calls.

    A leaf waits for the sum of the leaves some distance before it, so that fast workers do not fill the disk
    with images that are still to be added up.
    """
    token = uuid.uuid4().hex[:8]
    ahead = -(-workers // split_every)
    sums: list[Delayed] = []
    for place, part in enumerate(cut(groups, split_every)):
        after = sums[place - ahead] if place >= ahead else None
        leaves = [leaf(work, group, after, token) for group in part]
        sums.append(tree(leaves, work.add, split_every, f"{token}-{place}"))
    return tree(sums, work.add, split_every, token)
