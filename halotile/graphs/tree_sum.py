"""A sum of delayed tasks as a tree: of bounded fan-in, in a fixed order."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from dask import delayed
from dask.delayed import Delayed

REDUCE = "reduce"
"""The phase of sums."""
MOST_LEAVES = 64
"""Leaves of a tree at most: of 256 operators each leaf adds up four, one after the other."""
SMALL_BYTES = 2**16
"""Inputs of less than this are worth no second task."""

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


class Numbered(Protocol):
    """Something to compute, with the totals that it is part of."""

    @property
    def number(self) -> int:
        """Its place in the order."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """The totals."""
        ...


Counted = TypeVar("Counted", bound=Numbered)


class Work(Protocol):
    """What workers do to compute and to add up."""

    @property
    def phase(self) -> str:
        """What the dashboard calls it."""
        ...

    @property
    def what(self) -> str:
        """What a number counts: operators, tiles."""
        ...

    @property
    def compute(self) -> Callable[..., Any]:
        """``compute(several, after)``: what these come to; ``after`` is only waited for."""
        ...

    @property
    def add(self) -> Callable[[list[Any]], Any]:
        """The sum of what several of these came to."""
        ...


def groups_of(calls: Sequence[Counted], read_bytes: int) -> tuple[list[Sequence[Counted]], bool]:
    """The calls of each task, and whether what the tasks come to is to be added up."""
    counts = Counter(slot for call in calls for slot in call.slots)
    if not any(count > 1 for count in counts.values()):
        return [[call] for call in calls], False
    groups = cut(calls, len(calls) if read_bytes < SMALL_BYTES else -(-len(calls) // MOST_LEAVES))
    return groups, len(groups) > 1


def plan_calls(
    work: Work, calls: Sequence[Numbered], split_every: int, workers: int, read_bytes: int
) -> list[Delayed]:
    """The calls as delayed tasks: one that gives everything where sums are to be made, else one for each call."""
    groups, are_added = groups_of(calls, read_bytes)
    if are_added:
        return [plan_sums(work, groups, split_every, workers)]
    token = uuid.uuid4().hex[:8]
    return [leaf(work, group, None, token) for group in groups]


def leaf(work: Work, group: Sequence[Numbered], after: Delayed | None, token: str) -> Delayed:
    """A task that computes some calls."""
    # Bound to the function, where Dask does not look through every field of every call for tasks.
    compute = delayed(partial(work.compute, list(group)), pure=False)
    return compute(after, dask_key_name=key_of(work, group, token))


def key_of(work: Work, group: Sequence[Numbered], token: str) -> str:
    """The key of a task, which says what it computes: of a worker that dies it is all that is left."""
    first, last = group[0].number, group[-1].number
    numbers = f"{work.what}-{first}" if first == last else f"{work.what}s-{first}-to-{last}"
    return f"{work.phase}-{token}-{numbers}"


def plan_sums(work: Work, groups: Sequence[Sequence[Numbered]], split_every: int, workers: int) -> Delayed:
    """The groups of calls as delayed tasks, and one that adds up what they come to.

    A leaf waits for the sum of the leaves some way before it, so that workers which are quick do not fill the disk with
    images that are still to be added up.
    """
    token = uuid.uuid4().hex[:8]
    ahead = -(-workers // split_every)
    sums: list[Delayed] = []
    for place, part in enumerate(cut(groups, split_every)):
        after = sums[place - ahead] if place >= ahead else None
        leaves = [leaf(work, group, after, token) for group in part]
        sums.append(tree(leaves, work.add, split_every, f"{token}-{place}"))
    return tree(sums, work.add, split_every, token)
