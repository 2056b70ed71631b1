"""Bars of Dask's dashboard that count the blocks of the job, by phase and by stage.

A stream releases its tasks at once, so the scheduler forgets them, and the dashboard's own bar
would only ever show the handful in flight. A group without tasks stands in for the blocks that are done and for
those still to come. A task reads its blocks, computes them and writes them, so that no pixels pass between tasks; bars
without any task of their own count the blocks that went through each of these stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dask.utils import key_split
from distributed import Client, SchedulerPlugin
from distributed.scheduler import TaskGroup, TaskPrefix

RPC_SECONDS = 5.0

Key = tuple[str, int, int]


def show_blocks(client: Client, phase: str, *, done: int, total: int, stages: Sequence[str] = ()) -> None:
    """Have the dashboard's bars of a phase count blocks, of which some are done already."""
    with suppress(Exception):  # a run goes on without its bars
        bar = BlockBar(phase, done, total, stages)
        client.sync(client.register_plugin, bar, callback_timeout=RPC_SECONDS)


class BlockBar(SchedulerPlugin):  # type: ignore[misc]
    """Counts the blocks of one phase in the task groups that the dashboard reads.

    These are no public interface of Dask. Should they change, the bars are lost and nothing else.

    Parameters
    ----------
    phase : str
        Prefix of the tasks' keys; the bar has its name.
    done, total : int
        Number of blocks that are done already, and of all blocks.
    stages : sequence of str
        Stages of a block besides the phase: names of more bars.
    """

    def __init__(self, phase: str, done: int, total: int, stages: Sequence[str] = ()) -> None:
        self.name = f"halotile-bar-{phase}"
        self.phase = phase
        self.done = done
        self.total = total
        self.stages = [stage for stage in stages if stage != phase]

    def start(self, scheduler: Any) -> None:
        """Begin to count on this scheduler, and replace the bar of an earlier run."""
        scheduler.plugins.pop(self.name, None)
        self.scheduler = scheduler
        self.groups: dict[str, TaskGroup] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Count a task of the phase that changes its state: its key has its number of blocks."""
        if key_split(key) != self.phase:
            return
        with suppress(Exception):
            if finish == "memory":
                self.done = min(self.total, self.done + blocks_of(key))
                for stage in self.stages:
                    self._show(stage)
            self._show(self.phase)

    def _show(self, name: str) -> None:
        if name not in self.groups:
            self.groups[name] = self._group(self._prefix(name))
        prefix, ours = self.groups[name].prefix, self.groups[name].states
        real = Counter(prefix.states)
        real.subtract(ours)
        released = max(0, self.done - real["memory"])
        live = sum(count for state, count in real.items() if state != "forgotten")
        shown = {"released": released, "waiting": max(0, self.total - released - live)}
        for state, count in shown.items():
            prefix.states[state] += count - ours[state]
            ours[state] = count

    def _prefix(self, name: str) -> TaskPrefix:
        prefixes = self.scheduler.task_prefixes
        if name not in prefixes:
            prefixes[name] = TaskPrefix(name)
        return prefixes[name]

    def _group(self, prefix: TaskPrefix) -> TaskGroup:
        """The group that stands in for blocks."""
        name = f"{prefix.name}-blocks"
        for group in prefix.groups:
            if group.name == name:
                return group
        return TaskGroup(name, prefix)


def group_of(phase: str, iteration: int | None = None) -> str:
    """The task group of a pass: each iteration is one, and all of them have the phase's prefix.

    Examples
    --------
    >>> group_of("denoise"), group_of("iterate", 11), key_split((group_of("iterate", 11), 17, 4))
    ('denoise', 'iterate-it012', 'iterate')
    """
    return phase if iteration is None else f"{phase}-it{iteration + 1:03d}"


def task_key(group: str, serial: int, blocks: int) -> Key:
    """The key of a task of ``blocks`` blocks.

    Examples
    --------
    >>> task_key("denoise", 17, 4), blocks_of(task_key("denoise", 17, 4))
    (('denoise', 17, 4), 4)
    """
    return group, serial, blocks


def blocks_of(key: Key) -> int:
    """Number of blocks of a task with this key."""
    return key[-1]
