"""The bar of a phase on Dask's dashboard counts the blocks of the job.

A stream lets go of its tasks at once, so the scheduler forgets them, and the dashboard's own bar
would only ever show the handful in flight. A group without tasks stands in for the blocks that are done and for
those still to come.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from dask.utils import key_split
from distributed import Client, SchedulerPlugin
from distributed.scheduler import TaskGroup

RPC_SECONDS = 5.0


def show_blocks(client: Client, phase: str, *, done: int, total: int) -> None:
    """Let the dashboard's bar of a phase count blocks, of which some are done already."""
    with suppress(Exception):  # a run goes on without its bar
        client.sync(client.register_plugin, BlockBar(phase, done, total), callback_timeout=RPC_SECONDS)


class BlockBar(SchedulerPlugin):  # type: ignore[misc]
    """Counts the blocks of one phase where the dashboard looks.

    The dashboard reads what Dask does not promise to keep. Should that move, the bar is lost and nothing else.

    Parameters
    ----------
    phase : str
        Prefix of the tasks' keys; the bar has its name.
    done, total : int
        Blocks that are done already, and all of them.
    """

    def __init__(self, phase: str, done: int, total: int) -> None:
        self.name = f"halotile-bar-{phase}"
        self.phase = phase
        self.done = done
        self.total = total

    def start(self, scheduler: Any) -> None:
        """Begin to count on this scheduler, in the place of an earlier run."""
        scheduler.plugins.pop(self.name, None)
        self.scheduler = scheduler
        self.group: TaskGroup | None = None

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task of the phase has another state: its key says how many blocks it has."""
        if key_split(key) != self.phase:
            return
        with suppress(Exception):
            if finish == "memory":
                self.done = min(self.total, self.done + blocks_of(key))
            self._show()

    def _show(self) -> None:
        prefix = self.scheduler.task_prefixes[self.phase]
        if self.group is None:
            name = f"{self.phase}-blocks"
            earlier = {group.name: group for group in prefix.groups}
            self.group = earlier[name] if name in earlier else TaskGroup(name, prefix)
        ours = self.group.states
        real = Counter(prefix.states)
        real.subtract(ours)
        released = max(0, self.done - real["memory"])
        live = sum(count for state, count in real.items() if state != "forgotten")
        shown = {"released": released, "waiting": max(0, self.total - released - live)}
        for state, count in shown.items():
            prefix.states[state] += count - ours[state]
            ours[state] = count


def task_key(phase: str, serial: int, blocks: int) -> str:
    """The key of a task of so many blocks.

    Examples
    --------
    >>> task_key("denoise", 17, 4), blocks_of(task_key("denoise", 17, 4))
    ('denoise-17-4', 4)
    """
    return f"{phase}-{serial}-{blocks}"


def blocks_of(key: str) -> int:
    """How many blocks a task with this key has."""
    return int(key.rpartition("-")[2])
