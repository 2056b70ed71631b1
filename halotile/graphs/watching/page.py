"""A page of ours on the scheduler's dashboard: ``/halotile`` shows the job, ``/halotile.json`` tells it.

The scheduler keeps nothing but the last message of the driver, and serves it: so the page is the same where the scheduler
lives in the driver and where it was joined, and what goes wrong with a page stays there.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import SchedulerPlugin
from tornado.routing import URLSpec
from tornado.web import Application, RequestHandler

from halotile.graphs.watching.dask_report import keep_tasks
from halotile.graphs.watching.metrics import Metrics

NAME = "halotile-page"
TOPIC = "halotile"
"""Of the messages from the driver."""
CLIENT = "client"
"""Which driver a message is from."""
ADDRESS = "halotile"
WAIT_SECONDS = 5.0
"""How long a browser is kept waiting for news."""
HTML = Path(__file__).with_name("page.html")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # The page brings all that it needs. Whatever a name in a message may hold, nothing else is loaded or run.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class JobPage(SchedulerPlugin):  # type: ignore[misc]
    """Serves what the driver tells of its job.

    ``start`` uses what Dask does not promise to keep. Should that move, it raises: registering the page fails, and the run
    goes on without.

    Parameters
    ----------
    client : str
        The driver's name: its job is over when it is gone.
    """

    name = NAME

    def __init__(self, client: str) -> None:
        self.client = client
        self.told: dict[str, Any] = {}
        self.over = False
        self.heard = 0.0
        self.serial = f"{uuid.uuid4().hex[:8]}-0"
        """Of the last message."""

    def start(self, scheduler: Any) -> None:
        """Take the place of an earlier run's page, or be the first."""
        self.scheduler = scheduler
        self.heard = time.monotonic()
        self.news = asyncio.Event()
        earlier = scheduler.plugins.pop(NAME, None)
        if earlier is None:
            scheduler.http_application.add_application(application(scheduler))
        else:
            earlier.end()
        keep_tasks(scheduler)
        self.metrics = Metrics(lambda: self.told)

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear of the job."""
        if topic != TOPIC:
            return
        message = dict(msg)
        teller = message.pop(CLIENT, self.client)
        if teller != self.client and self.over and not message.get("over"):
            self._turn_to(teller)
        if teller != self.client or self.over:
            return
        self.told = message
        self.heard = time.monotonic()
        if message.get("over"):
            self.end()
        self._wake()
        with suppress(Exception):  # else Dask keeps many of them
            self.scheduler._broker.truncate(TOPIC)

    def _turn_to(self, client: str) -> None:
        """Another run on the same scheduler goes on: it is shown from now on."""
        self.client = client
        self.over = False
        self.metrics = Metrics(lambda: self.told)

    def remove_client(self, scheduler: Any, client: str) -> None:
        """The driver may end without a word."""
        if client == self.client:
            self.end()

    async def close(self) -> None:
        """The scheduler ends."""
        self.end()

    def end(self) -> None:
        """The job is over: what was told last stays to be seen."""
        self.over = True
        self.metrics.end()
        self._wake()

    def _wake(self) -> None:
        """Answer those who wait for news."""
        name, _, count = self.serial.partition("-")
        self.serial = f"{name}-{int(count) + 1}"
        self.news.set()
        self.news = asyncio.Event()

    def to_json(self) -> bytes:
        """What was told last, with what the scheduler itself knows."""
        own = {
            "serial": self.serial,
            "over": self.over,
            "workers_now": len(self.scheduler.workers),
            "silent_seconds": time.monotonic() - self.heard,
        }
        return json.dumps(self.told | own, allow_nan=False).encode()


def application(scheduler: Any) -> Application:
    """The two addresses, under whatever prefix the dashboard has."""
    page = URLSpec(r"(?:/.*)?/halotile", _Page)
    job = URLSpec(r"(?:/.*)?/halotile\.json", _Job, {"scheduler": scheduler})
    return Application([page, job], compress_response=True)


class _Quiet(RequestHandler):
    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)


class _Page(_Quiet):
    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write(HTML.read_bytes())


class _Job(_Quiet):
    def initialize(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    async def get(self) -> None:
        """At once, or once there is something else than what was seen: the last message comes just before the end."""
        page = self.scheduler.plugins[NAME]
        if self.get_query_argument("seen", "") == page.serial:
            with suppress(TimeoutError):
                await asyncio.wait_for(page.news.wait(), WAIT_SECONDS)
        self.set_header("Content-Type", "application/json")
        self.write(self.scheduler.plugins[NAME].to_json())
