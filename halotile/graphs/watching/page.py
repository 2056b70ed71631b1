"""The page of a job on the scheduler's dashboard, ``/halotile``, and the feed of its data, once a second.

The scheduler keeps only the driver's last message, and serves it. So the page is the same where the scheduler lives in the driver and
where it was joined, and an error in a page does not reach the driver.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, SchedulerPlugin
from numpy.typing import NDArray
from tornado.routing import URLSpec
from tornado.web import Application, RequestHandler

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.base import IterationRows
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.watching.progress import RATES, Progress
from halotile.graphs.watching.report import before_and_after, can_be_drawn
from halotile.storage.grid import Grid, Region
from halotile.storage.run_directory.directory import EXAMPLES
from halotile.storage.run_directory.number_ranges import RangeSet
from halotile.tasks.block import Receipt

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import Plan


COUNTERS = {
    "pixels": ("pixels_done", "Pixels computed by this run"),
    "bytes_read": ("read_bytes", "Bytes read by this run"),
    "bytes_written": ("written_bytes", "Bytes written by this run"),
    "compute_seconds": ("compute_seconds", "Seconds that workers, or their GPUs, were computing in this run"),
    "retries": ("retried", "Times that a block of this run was tried again"),
}
GAUGES = {
    "blocks_planned": ("total", "Blocks of the whole job, each counted once for every pass"),
    "blocks_finished": ("done", "Blocks done so far, each counted once for every pass"),
    "peak_memory_bytes": ("peak_memory_bytes", "The most memory that a worker has had"),
    "device_peak_bytes": ("device_peak_bytes", "The most memory that a worker has held on its GPU"),
    "eta_seconds": ("eta_seconds", "Time left at the rate so far"),
}
PREFIX = "halotile"


class Metrics:
    """A collector in the registry that Dask serves, where prometheus_client is installed; without it, nothing.

    Parameters
    ----------
    message : callable
        Returns the last message of the job.
    """

    def __init__(self, message: Callable[[], Mapping[str, Any]]) -> None:
        self.message = message
        # It is not installed, has another interface, or serves another job's figures already.
        with suppress(Exception):
            from prometheus_client import REGISTRY

            REGISTRY.register(self)

    def end(self) -> None:
        """Remove the figures, where they are served."""
        with suppress(Exception):
            from prometheus_client import REGISTRY

            REGISTRY.unregister(self)

    def describe(self) -> Iterator[Any]:
        """Describe nothing in advance: names come with the figures."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """The figures now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        message = self.message()
        progress = message.get("progress", {})
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=progress.get(key, 0))
        for name, (key, text) in GAUGES.items():
            if progress.get(key) is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=progress[key])
        if iterations := message.get("curve", {}).get("iteration"):
            yield GaugeMetricFamily(f"{PREFIX}_iteration", "Iterations of the solver so far", value=iterations[-1])
        blocks = GaugeMetricFamily(f"{PREFIX}_blocks", "Blocks of the current pass", labels=["state"])
        for state, count in message.get("blocks", {}).items():
            blocks.add_metric([state], count)
        yield blocks


NAME = "halotile-page"
TOPIC = "halotile"  # topic of the messages from the driver
CLIENT = "client"  # key of a message with the driver that it is from
ADDRESS = "halotile"
# Seconds for which the picture of the latest block stays, and how long relative to the time to draw it.
PICTURE_SECONDS, PICTURE_PAUSE = 3.0, 50
WAIT_SECONDS = 5.0  # time after which a browser gets an answer without news
HTML = Path(__file__).with_name("page.html")
# Statements of the page that a kept one has its message and its report in.
KEPT, REPORT = "const kept = null;", "const found = null;"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # The page contains all that it needs. Nothing else is loaded or run, whatever a message contains.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class JobPage(SchedulerPlugin):  # type: ignore[misc]
    """Serves the messages of the driver.

    ``start`` uses internals of Dask. Should they change, it raises: registering the page fails, and the run goes on without.

    Parameters
    ----------
    client : str
        The driver's name: its job is over when it is gone.
    """

    name = NAME

    def __init__(self, client: str) -> None:
        self.client = client
        self.message: dict[str, Any] = {}
        self.over = False
        self.updated = 0.0
        self.serial = f"{uuid.uuid4().hex[:8]}-0"
        """Serial of the last message."""

    def start(self, scheduler: Any) -> None:
        """Add the page to the dashboard, or replace an earlier run's."""
        self.scheduler = scheduler
        self.updated = time.monotonic()
        self.news = asyncio.Event()
        earlier = scheduler.plugins.pop(NAME, None)
        if earlier is None:
            scheduler.http_application.add_application(application(scheduler))
        else:
            earlier.end()
        self.metrics = Metrics(lambda: self.message)

    def log_event(self, topic: str, msg: Any) -> None:
        """Receive a message of a driver."""
        if topic != TOPIC:
            return
        message = dict(msg)
        sender = message.pop(CLIENT, self.client)
        if sender != self.client and self.over and not message.get("over"):
            # Another run on the same scheduler goes on: it is shown from now on.
            self.client, self.over = sender, False
            self.metrics = Metrics(lambda: self.message)
        if sender != self.client or self.over:
            return
        self.message = message
        self.updated = time.monotonic()
        if message.get("over"):
            self.end()
        self._wake()
        with suppress(Exception):  # else Dask keeps many of them
            self.scheduler._broker.truncate(TOPIC)

    def remove_client(self, scheduler: Any, client: str) -> None:
        """End with the driver, which may be killed."""
        if client == self.client:
            self.end()

    async def close(self) -> None:
        """End with the scheduler."""
        self.end()

    def end(self) -> None:
        """Mark the job as over: its last message stays on the page."""
        self.over = True
        self.metrics.end()
        self._wake()

    def _wake(self) -> None:
        """Answer the browsers that wait for news."""
        name, _, count = self.serial.partition("-")
        self.serial = f"{name}-{int(count) + 1}"
        self.news.set()
        self.news = asyncio.Event()

    def to_json(self) -> bytes:
        """The last message, with the scheduler's own figures."""
        own = {
            "serial": self.serial,
            "over": self.over,
            "workers_now": len(self.scheduler.workers),
            "silent_seconds": time.monotonic() - self.updated,
        }
        return json.dumps(self.message | own, allow_nan=False).encode()


def kept_page(message: Mapping[str, Any]) -> str:
    """Return the page as it shows the last message of a run, for a file."""
    return HTML.read_text("utf-8").replace(KEPT, f"const kept = {_script(message)};")


def with_report(page: str, report: Mapping[str, Any]) -> str:
    """Return a page that was kept, with the report of its run."""
    return page.replace(REPORT, f"const found = {_script(report)};")


def _script(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")  # no name ends the script


def application(scheduler: Any) -> Application:
    """The two addresses, under whatever prefix the dashboard has."""
    page = URLSpec(r"(?:/.*)?/halotile", _Page)
    job = URLSpec(r"(?:/.*)?/halotile\.json", _Job, {"scheduler": scheduler})
    return Application([page, job], compress_response=True)


class _Handler(RequestHandler):
    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)


class _Page(_Handler):
    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write(HTML.read_bytes())


class _Job(_Handler):
    def initialize(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    async def get(self) -> None:
        """Answer at once, or wait for another message than the one that was seen: the last one comes just before the end."""
        page = self.scheduler.plugins[NAME]
        if self.get_query_argument("seen", "") == page.serial:
            with suppress(TimeoutError):
                await asyncio.wait_for(page.news.wait(), WAIT_SECONDS)
        self.set_header("Content-Type", "application/json")
        self.write(self.scheduler.plugins[NAME].to_json())


BlockNumbers = NDArray[np.intp]

EDGE = 128  # cells along an edge of the map, at most
# States of a block. One that is retried has failed, and is not done yet.
STATES = ("todo", "running", "done", "retried", "quarantined")
WAITING, RUNNING, DONE, RETRIED, QUARANTINED = range(len(STATES))
# The states that a cell shows before others where its blocks differ: rarer and more important ones first.
_FIRST_SEEN = (QUARANTINED, RETRIED, RUNNING)
FILLED = 9  # value of `filled` for a cell whose blocks are all done
# Durations from the shortest to the longest, on a logarithmic scale.
LEVELS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNKNOWN = "."  # stands for the duration of a cell in which no block was timed


class Board:
    """A map of the blocks of a pass: the state and the duration of each.

    An image may have a million blocks. The map has at most :data:`EDGE` cells on an edge; a cell sums up the blocks in it. So an update
    costs as much as the blocks that changed, and the map costs the same for any number of blocks.

    Parameters
    ----------
    counts : tuple of int
        Numbers of blocks along each axis of the image. The last two axes that are cut are those of the map; others are summed
        over.
    done : iterable of range
        Blocks that are done already.
    quarantined : collection of int
        Blocks that were given up already.

    Examples
    --------
    >>> board = Board((2, 3), done=[range(0, 1)])
    >>> board.mark([1, 2], DONE, {1: 0.5, 2: 2.0})
    >>> board.mark([3], RETRIED)
    >>> board.counted(in_flight=[5])
    {'todo': 1, 'running': 1, 'done': 3, 'retried': 1, 'quarantined': 0}
    >>> board.cells(in_flight=[5])["states"]
    '222301'
    """

    def __init__(self, counts: tuple[int, ...], done: Iterable[range] = (), quarantined: Collection[int] = ()) -> None:
        self.counts = counts
        cut = [axis for axis, count in enumerate(counts) if count > 1] or [0]
        self.axes = tuple(cut[-2:])
        """The axes of the image that the map shows: rows and columns, or columns alone."""
        self._edges = [min(EDGE, counts[axis]) for axis in self.axes]
        self.rows, self.columns = self._edges if len(self._edges) == 2 else (1, *self._edges)
        self._state = np.zeros(math.prod(counts), np.uint8)
        for numbers in done:
            self._state[numbers.start : numbers.stop] = DONE
        self._state[list(quarantined)] = QUARANTINED
        cells = self._cells_of(np.arange(self._state.size))
        size = self.rows * self.columns
        self._blocks = np.bincount(cells, minlength=size)
        self._totals = np.stack([np.bincount(cells[self._state == s], minlength=size) for s in range(len(STATES))])
        self._seconds = np.zeros(size)
        self._timed = np.zeros(size, np.intp)

    def mark(self, numbers: Iterable[int], state: int, seconds: Mapping[int, float] | None = None) -> None:
        """Change the state of blocks; ``seconds`` are their durations."""
        which = _array(numbers)
        cells = self._cells_of(which)
        np.subtract.at(self._totals.reshape(-1), self._state[which].astype(np.intp) * self._blocks.size + cells, 1)
        np.add.at(self._totals[state], cells, 1)
        self._state[which] = state
        if seconds:
            timed = self._cells_of(_array(seconds))
            np.add.at(self._seconds, timed, list(seconds.values()))
            np.add.at(self._timed, timed, 1)

    def counted(self, in_flight: Iterable[int] = ()) -> dict[str, int]:
        """Number of blocks in each state; ``in_flight`` are those that the workers are processing."""
        totals = self._totals.sum(axis=1)
        running = int(np.count_nonzero(self._state[_array(in_flight)] == WAITING))
        totals[WAITING] -= running
        totals[RUNNING] += running
        return {name: int(count) for name, count in zip(STATES, totals, strict=True)}

    def cells(self, in_flight: Iterable[int] = ()) -> dict[str, Any]:
        """The map, row by row: a character for each cell.

        ``states`` is the index in :data:`STATES` of the state that a cell shows, ``filled`` the part of it that is done in ninths,
        ``seconds`` the duration of its blocks, between ``least`` and ``most``, as an index in :data:`LEVELS`.
        """
        which = _array(in_flight)
        running = np.bincount(self._cells_of(which[self._state[which] == WAITING]), minlength=self.rows * self.columns)
        done = self._totals[DONE]
        seen = np.where(done == self._blocks, DONE, WAITING)
        for state in reversed(_FIRST_SEEN):
            seen[(running if state == RUNNING else self._totals[state]) > 0] = state
        return {
            "rows": self.rows,
            "columns": self.columns,
            "states": "".join(map(str, seen)),
            "filled": "".join(map(str, FILLED * done // self._blocks)),
            **self._durations(),
        }

    def _durations(self) -> dict[str, Any]:
        """The mean duration of the blocks of each cell."""
        timed = self._timed > 0
        if not timed.any():
            return {"least": None, "most": None, "seconds": UNKNOWN * timed.size}
        means = np.maximum(self._seconds[timed] / self._timed[timed], 1e-6)
        least, most = _separated(float(means.min()), float(means.max()))
        scale = math.log(most / least)
        levels = np.full(timed.size, len(LEVELS))
        levels[timed] = np.rint(np.log(means / least) / scale * (len(LEVELS) - 1))
        seconds = "".join(map((LEVELS + UNKNOWN).__getitem__, levels))
        return {"least": least, "most": most, "seconds": seconds}

    def _cells_of(self, numbers: BlockNumbers) -> BlockNumbers:
        """The cell of each block."""
        index = np.unravel_index(numbers, self.counts)
        places = [index[axis] * edge // self.counts[axis] for axis, edge in zip(self.axes, self._edges, strict=True)]
        cells: BlockNumbers = places[-1]
        return cells if len(places) == 1 else cells + places[0] * self.columns


def _separated(least: float, most: float) -> tuple[float, float]:
    """Move two durations at least a factor of two apart: durations that are nearly equal look equal."""
    middle = math.sqrt(least * most)
    return min(least, middle / math.sqrt(2)), max(most, middle * math.sqrt(2))


def _array(numbers: Iterable[int]) -> BlockNumbers:
    return np.fromiter(numbers, np.intp)


RPC_SECONDS = 5.0
LAST_SECONDS = 2.0  # timeout of the last message
ROWS = 400  # iterations of the curve, at most
CURVES = ("residual", "objective", "misfit", "loss", "validation", "error", "tv", "nlm", "change", "psnr", "rate")
STAGES = ("read", "compute", "write")
UNSEEN = ("message", "figures", "counted", "holes", "defects", "workers", "start_seconds")
# Status fields sent to the page. The owner and the paths of a run are not among them.
PROGRESS = ("state", "all_seconds", *(name for name in Progress.__slots__ if name not in UNSEEN), *RATES)


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
        self.records: object = None
        """Output of the pass under way, if it writes one."""
        self._last: int | None = None  # block that was finished last
        self._picture, self._draw_at = "", 0.0  # it before and after, and when to draw another one
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
        self, grid: Grid, done: RangeSet, quarantined: Collection[int], phase: str, title: str, records: object = None
    ) -> None:
        """Begin another pass over all blocks; some may be done; ``records``: the output that it writes, if it is one."""
        if self.client is None:
            return
        self.grid, self.records, self._last = grid, records, None
        self.board = Board(grid.counts, done.ranges(), quarantined)
        which = title.removeprefix(" in ")
        self.current_pass = {"phase": phase, "title": which if which != title else f"{phase}{title}"}
        self.stages = dict.fromkeys(STAGES, 0.0)

    def take(self, receipt: Receipt) -> None:
        """Mark the blocks of a receipt as done."""
        if self.board is None:
            return
        self.board.mark(receipt.done, DONE, receipt.took)
        self._last = max(receipt.done, default=self._last)
        for stage in STAGES:
            self.stages[stage] += getattr(receipt, f"{stage}_seconds")

    def mark(self, number: int, state: int) -> None:
        """Mark a block that failed, and is tried again or given up."""
        if self.board is not None:
            self.board.mark([number], state)

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
        self._last = None  # the report has pictures
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
        is_shown = self.records is plan.outputs[0] and can_be_drawn(plan)
        if self._last is not None and is_shown:
            self._draw(plan, self.grid.block_at(self._last).core)
            if self._picture:
                shown["examples"] = self._picture
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

    def _draw(self, plan: Plan, block: Region) -> None:
        """Draw a block before and after, some seconds after the last one and longer where it took long; a slow disk holds up no block."""
        if time.monotonic() < self._draw_at:
            return
        self._draw_at = math.inf  # until it is drawn

        def draw() -> None:
            begun = time.monotonic()
            try:
                self._picture = before_and_after(plan, block)
            except Exception:  # out of reach, perhaps for a while
                self._picture = ""
            self._draw_at = time.monotonic() + max(PICTURE_SECONDS, PICTURE_PAUSE * (time.monotonic() - begun))

        threading.Thread(target=draw, name="halotile-picture", daemon=True).start()


def facts(plan: Plan) -> dict[str, Any]:
    """Return the data that do not change during a run; without paths, since others may see the page."""
    return {
        "name": plan.output.name,
        "shape": list(plan.grid.shape),
        "block": list(plan.grid.block),
        "counted": plan.counted,
        "uncounted": [each.phase for each in plan.work.passes if not each.times],
        "drawing": (plan.kind.steps and plan.kind.steps.drawing) or "Latest block, before and after",
        "workers": plan.run.workers,
        "planned_memory_bytes": plan.summary().get("peak_memory_per_worker_bytes"),
        "allowed_memory_bytes": parse_bytes(plan.run.memory_per_worker),
    }


def curve(rows: IterationRows) -> dict[str, list[float | None]]:
    """Return the figures of the iterations by name, thinned out where there are more than ``ROWS``.

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
