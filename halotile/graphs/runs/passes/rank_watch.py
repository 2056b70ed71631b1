"""Words about ranks that are still at work when others have returned: one that hangs cannot be told from one that saves for an hour."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from halotile.graphs.clusters.connection.present import ask
from halotile.graphs.runs.passes.rank_calls import has_returned, place_of_rank, stack_of_rank

LOOK_SECONDS = 2.0
"""Time in which a worker answers about its rank; one that was stopped does not."""
LINGER_SECONDS = 60.0
"""Time between the first looks at ranks that may wait for others; after each report it doubles."""


def warn(text: str) -> None:
    """Warn the caller of :meth:`~halotile.graphs.distributed.context.DistributedContext.run_torch`."""
    warnings.warn(text, stacklevel=7)


@dataclass
class RankWatch:
    """Reports the ranks that are still at work, again and again, once others have returned.

    Parameters
    ----------
    client : Client
        Connection to the cluster.
    workers : sequence of str
        The worker of each rank.
    report : callable
        Called with each report.
    """

    client: Client
    workers: Sequence[str]
    report: Callable[[str], None]
    pause: float = field(default_factory=lambda: LINGER_SECONDS)
    looked: float = field(default_factory=time.monotonic)
    """Time of the last look."""
    returned: float | None = None
    """Time at which some ranks were first seen to have returned."""

    def look(self, ended: Collection[int]) -> None:
        """Look at the ranks where it is time for it; those that have ended are known."""
        now = time.monotonic()
        if now - self.looked < self.pause:
            return
        self.looked = now
        still = [worker for rank, worker in enumerate(self.workers) if rank not in ended]
        waiting = answers(self.client, has_returned, still)
        at_work = [worker for worker in still if not waiting.get(worker)]
        if not at_work or len(at_work) == len(self.workers):
            return
        if self.returned is None:  # they may have returned just now
            self.returned = now
            return
        self.pause *= 2
        self.report(self._text(at_work, now - self.returned))

    def _text(self, at_work: Sequence[str], seconds: float) -> str:
        ranks = [str(self.workers.index(worker)) for worker in at_work]
        are = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"
        place = _joined(answers(self.client, place_of_rank, at_work), at_work)
        here = f" The place in the code:\n{place}" if place else ""
        return (
            f"{are} still at work, and the other ranks of {len(self.workers)} returned more than {seconds:.0f} s ago."
            f"{here}"
        )


def where(client: Client, workers: Sequence[str]) -> str:
    """Tracebacks of the ranks on some workers, as far as these answer; the ranks are about to be ended."""
    return _joined(answers(client, stack_of_rank, workers), workers)


def _joined(stacks: Mapping[str, str], workers: Sequence[str]) -> str:
    return "".join(stacks.get(worker) or "" for worker in workers)


def answers(client: Client, question: Callable[[], Any], workers: Sequence[str]) -> dict[str, Any]:
    """Answers of those workers that give one in time."""
    given: dict[str, Any] = {}

    async def ask_one(worker: str) -> None:
        with suppress(Exception):  # a worker may end just now
            given.update(await asyncio.wait_for(client.run(question, workers=[worker]), LOOK_SECONDS))

    async def ask_all() -> None:
        await asyncio.gather(*map(ask_one, workers))

    with suppress(Exception):
        ask(client, ask_all)
    return given
