"""The page of the job on the scheduler's dashboard: ``/halotile``, with its data at ``/halotile.json``.

The scheduler keeps nothing but the last message of the driver, and serves it: so the page is the same where the scheduler
lives in the driver and where it was joined, and an error in a page does not reach the driver.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import SchedulerPlugin
from tornado.routing import URLSpec
from tornado.web import Application, RequestHandler

COUNTERS = {
    "pixels": ("pixels_done", "Pixels computed by this run"),
    "bytes_read": ("read_bytes", "Bytes read by this run"),
    "bytes_written": ("written_bytes", "Bytes written by this run"),
    "compute_seconds": (
        "compute_seconds",
        "Seconds that workers, or their GPUs, were computing in this run",
    ),
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
        self._registry: Any = None
        # It is not installed, has another interface, or serves another job's figures already.
        with suppress(Exception):
            from prometheus_client import REGISTRY

            REGISTRY.register(self)
            self._registry = REGISTRY

    def end(self) -> None:
        """Remove the figures."""
        registry, self._registry = self._registry, None
        with suppress(Exception):
            if registry is not None:
                registry.unregister(self)

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
            yield GaugeMetricFamily(
                f"{PREFIX}_iteration", "Iterations of the solver so far", value=iterations[-1]
            )
        blocks = GaugeMetricFamily(f"{PREFIX}_blocks", "Blocks of the current pass", labels=["state"])
        for state, count in message.get("blocks", {}).items():
            blocks.add_metric([state], count)
        yield blocks


NAME = "halotile-page"
TOPIC = "halotile"
"""Topic of the messages from the driver."""
CLIENT = "client"
"""Key of a message with the driver that it is from."""
ADDRESS = "halotile"
WAIT_SECONDS = 5.0
"""Time after which a browser gets an answer without news."""
HTML = Path(__file__).with_name("page.html")
KEPT = "const kept = null;"
"""Statement of the page that a kept one has its message in."""
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
    shown = json.dumps(message, allow_nan=False).replace("<", "\\u003c")  # no name ends the script
    return HTML.read_text("utf-8").replace(KEPT, f"const kept = {shown};")


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
