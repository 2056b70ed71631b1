"""Feed of a run's page: the driver collects the data and sends it once a second."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed import Client

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.base import IterationRows
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.watching.board import DONE, QUARANTINED, RETRIED, Board
from halotile.graphs.watching.page import ADDRESS, CLIENT, TOPIC, JobPage, kept_page
from halotile.storage.grid import Grid
from halotile.storage.run_directory.names import EXAMPLES
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.tasks.block import Receipt

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import Plan

RPC_SECONDS = 5.0
LAST_SECONDS = 2.0
"""Timeout of the last message."""
ROWS = 400
"""Iterations of the curve, at most."""
CURVES = ("residual", "objective", "misfit", "loss", "validation", "change", "psnr", "rate")
STAGES = ("read", "compute", "write")
PROGRESS = (
    "state",
    "phase",
    "done",
    "resumed",
    "total",
    "seconds",
    "pixels_done",
    "pixels_total",
    "read_bytes",
    "written_bytes",
    "peak_memory_bytes",
    "device_peak_bytes",
    "compute_seconds",
    "retried",
    "failed",
    "megapixels_per_second",
    "megabytes_per_second",
    "eta_seconds",
)
"""Status fields sent to the page. The owner and the paths of a run are not among them."""


class Watch:
    """Feed of the page of a run. It does nothing until it is opened, or where there is no dashboard."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.board: Board | None = None
        self.grid: Grid
        """Blocks of the pass under way."""
        self.current_pass: dict[str, Any] = {}
        self.in_flight: Callable[[], Iterable[int]] = tuple
        """The blocks that the workers have at hand."""
        self.stages = dict.fromkeys(STAGES, 0.0)
        self._latest: Callable[[], dict[str, Any]] = dict
        self._facts: dict[str, Any] = {}
        self._sending: Future[Any] | None = None

    def open(self, cluster: RunningCluster) -> str | None:
        """Add the page to a cluster's dashboard, and return its address, else that of the dashboard."""
        if not cluster.dashboard:
            return None
        with suppress(Exception):  # a run goes on without its page
            page = JobPage(cluster.client.id)
            cluster.client.sync(cluster.client.register_plugin, page, callback_timeout=RPC_SECONDS)
            self.client = cluster.client
            return f"{cluster.dashboard.rpartition('/')[0]}/{ADDRESS}"
        return cluster.dashboard

    def begin(
        self, grid: Grid, *, done: RangeSet, quarantined: Collection[int], phase: str, title: str
    ) -> None:
        """Begin another pass over all blocks, of which some are done."""
        if self.client is None:
            return
        self.grid = grid
        self.board = Board(grid.counts, done.ranges(), quarantined)
        which = title.removeprefix(" in ")
        self.current_pass = {"phase": phase, "title": which if which != title else f"{phase}{title}"}
        self.stages = dict.fromkeys(STAGES, 0.0)

    def take(self, receipt: Receipt) -> None:
        """Mark the blocks of a receipt as done."""
        if self.board is None:
            return
        self.board.mark(receipt.done, DONE, receipt.took)
        for stage in STAGES:
            self.stages[stage] += getattr(receipt, f"{stage}_seconds")

    def retry(self, number: int) -> None:
        """Mark a block that failed and is tried again."""
        if self.board is not None:
            self.board.mark([number], RETRIED)

    def give_up(self, number: int) -> None:
        """Mark a block that was given up."""
        if self.board is not None:
            self.board.mark([number], QUARANTINED)

    def show(self, plan: Plan, status: Mapping[str, Any], rows: IterationRows) -> None:
        """Send the current data without waiting, unless the last message is still on its way."""
        if self.client is None:
            return
        self._latest = partial(self._message, plan, status, rows)
        if self._sending is None or self._sending.done():
            with suppress(Exception):
                self._send(self._latest())

    def close(self) -> str:
        """Send the last message: the job is over, or its cluster is lost. Returns the page that shows it; empty where there was none."""
        if self.client is None:
            return ""
        message = self._latest() | {"over": True}
        with suppress(Exception):
            if self._sending is not None:
                self._sending.result(LAST_SECONDS)
            self._send(message)
            assert self._sending is not None
            self._sending.result(LAST_SECONDS)
        self.client = self.board = self._sending = None
        return kept_page(message) if "job" in message else ""

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.client is not None
        sent = self.client.scheduler.log_event(topic=TOPIC, msg={**message, CLIENT: self.client.id})
        self._sending = asyncio.run_coroutine_threadsafe(sent, self.client.loop.asyncio_loop)

    def _message(self, plan: Plan, status: Mapping[str, Any], rows: IterationRows) -> dict[str, Any]:
        if not self._facts:
            self._facts = facts(plan)
        shown: dict[str, Any] = {
            "job": self._facts,
            "progress": _finite({name: status[name] for name in PROGRESS}),
            "curve": curve(rows),
        }
        with suppress(OSError):  # some kinds have none
            shown["examples"] = base64.b64encode((plan.run_directory / EXAMPLES).read_bytes()).decode()
        if self.board is not None:
            extent = [self.grid.shape[axis] for axis in self.board.axes]
            in_flight = list(self.in_flight())
            shown |= {
                "pass": self.current_pass,
                "stages": self.stages,
                "blocks": self.board.counted(in_flight),
                "map": self.board.cells(in_flight) | {"extent": extent},
            }
        return shown


def facts(plan: Plan) -> dict[str, Any]:
    """Return the data that do not change during a run; without paths, since others may see the page."""
    return {
        "name": plan.output.name,
        "shape": list(plan.grid.shape),
        "block": list(plan.grid.block),
        "counted": plan.counted,
        "uncounted": [each.phase for each in plan.work.passes if not each.times],
        "drawing": plan.kind.steps.drawing if plan.kind.steps else "",
        "workers": plan.run.workers,
        "planned_memory_bytes": plan.summary().get("peak_memory_per_worker_bytes"),
        "allowed_memory_bytes": parse_bytes(plan.run.memory_per_worker),
    }


def curve(rows: IterationRows) -> dict[str, list[float | None]]:
    """Return the figures of the iterations by name, thinned out where there are more than ``ROWS``.

    Examples
    --------
    >>> curve([{"iteration": 1, "misfit": 9.0}, {"iteration": 2, "misfit": 4.0, "seconds": 0.1}])
    {'iteration': [1, 2], 'misfit': [9.0, 4.0]}
    """
    last = len(rows) - 1
    places = sorted({round(last * n / (ROWS - 1)) for n in range(ROWS)}) if last >= ROWS else range(last + 1)
    thin = [_finite(rows[place]) for place in places]
    names = [name for name in ("iteration", *CURVES) if any(name in row for row in thin)]
    return {name: [row.get(name) for row in thin] for name in names}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with None in place of infinities and NaN, which JSON lacks."""
    wild = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in wild else value for name, value in values.items()}
