"""What a run says of itself: status.json and events.jsonl in its directory, and its observer."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halotile.graphs.amounts import counted, first_line
from halotile.graphs.runs.progress import Observer, Progress
from halotile.graphs.watching.page_feed import Watch
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.block import Receipt

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import RunPlan

STATUS_SECONDS = 1.0
NOTIFY_SECONDS = 0.4


class StatusFile:
    """Sums up receipts and tells the observer and the run directory about it."""

    def __init__(self, directory: RunDirectory, plan: RunPlan, observer: Observer | None) -> None:
        self.directory = directory
        self.plan = plan
        self.observer = observer
        self.figures: Mapping[str, float] = {}
        """What a solver's last iteration came to."""
        self.rows: Sequence[Mapping[str, float]] = ()
        """What each iteration came to."""
        self.watch = Watch()
        """Who tells the page on the dashboard."""
        self.earlier = 0
        """Blocks of the sweeps before the one at hand."""
        self.dashboard: str | None = None
        """Where the dashboard is, on the driver's machine."""
        self.resumed = 0
        self.retried = 0
        self.pixels = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.peak_memory_bytes = 0
        self.device_peak_bytes = 0
        self.compute_seconds = 0.0
        self.batch: int | None = None
        """Tiles at once that a worker came down to, for want of memory."""
        self._made = time.perf_counter()
        self._began: float | None = None
        self._told = 0.0
        self._written = 0.0
        self._message = ""
        self._finished = False
        """Whether an earlier run left nothing to do: what it said of itself stays."""

    def begin(self, progress: Progress) -> None:
        """The run has the output for itself."""
        self.resumed = progress.done
        # It was summed up before anybody knew what was there already.
        progress = replace(progress, resumed=self.resumed)
        before = self.directory.read_status() or {}
        self._finished = progress.done == progress.total and before.get("state") == "finished"
        self.event("begin", fingerprint=self.plan.fingerprint, resumed=self.resumed)
        self._write("running", progress)
        if self.resumed == progress.total:
            all_done = "the one block is" if progress.total == 1 else f"all {progress.total} blocks are"
            self.report(f"nothing left to do: {all_done} done; checking every byte")
        elif self.resumed:
            are = "is" if self.resumed == 1 else "are"
            self.report(f"{self.resumed} of {counted(progress.total, 'block')} {are} done already")

    def work_begins(self) -> None:
        """The cluster is up: the clock for rates starts, unless it runs already."""
        if self._began is None:
            self._began = time.perf_counter()

    def count(self, receipt: Receipt) -> None:
        """Enter a receipt into the sums."""
        self.pixels += receipt.pixels
        self.read_bytes += receipt.read_bytes
        self.written_bytes += receipt.written_bytes
        self.peak_memory_bytes = max(self.peak_memory_bytes, receipt.peak_memory_bytes)
        self.device_peak_bytes = max(self.device_peak_bytes, receipt.device_peak_bytes)
        self.compute_seconds += receipt.compute_seconds
        self.watch.take(receipt)

    def progress(self, phase: str, *, done: int, failed: int) -> Progress:
        """The sums as a value."""
        return Progress(
            phase=phase,
            done=max(self.earlier + done, self.resumed),
            resumed=self.resumed,
            total=len(self.plan.grid) * self.plan.sweeps,
            pixels_done=self.pixels,
            pixels_total=math.prod(self.plan.grid.shape) * self.plan.sweeps,
            seconds=time.perf_counter() - self._began if self._began is not None else 0.0,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
            start_seconds=self._began - self._made if self._began is not None else 0.0,
            workers=self.plan.run.count,
            peak_memory_bytes=self.peak_memory_bytes,
            device_peak_bytes=self.device_peak_bytes,
            compute_seconds=self.compute_seconds,
            retried=self.retried,
            failed=failed,
            message=self._message,
            figures=self.figures,
        )

    def tell(self, progress: Progress) -> None:
        """Tell the observer and the status file, each not more often than it needs."""
        now = time.monotonic()
        if now - self._told >= NOTIFY_SECONDS:
            self._told = now
            self._notify(progress)
        if now - self._written >= STATUS_SECONDS:
            self._write("draining" if progress.phase == "drain" else "running", progress)

    def notify_now(self, progress: Progress) -> None:
        """Tell them at once."""
        self._told = self._written = 0.0
        self.tell(progress)

    @contextmanager
    def ticking(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Tell the progress again and again while the driver waits for something in this context."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(NOTIFY_SECONDS):
                self.tell(progress())

        self.tell(progress())
        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def report(self, message: str) -> None:
        """Pass a line on to whoever watches, and keep it.

        An error of somebody's own code may bring more lines: they are kept, not shown.
        """
        self.event("message", text=message)
        line = first_line(message)
        self._message = f"{self._message}\n{line}" if self._message else line
        self._told = 0.0

    def event(self, kind: str, **details: Any) -> None:
        """Keep something that happened. A full disk may cost it: the run does not fail for that."""
        with suppress(OSError):
            self.directory.append_event({"time": time.time(), "event": kind} | details)

    def end(self, state: str, progress: Progress, reason: str) -> None:
        """The run is over."""
        self.event(state, reason=reason, done=progress.done)
        self._write(state, progress, reason)
        self._notify(progress)

    def _notify(self, progress: Progress) -> None:
        if self.observer is not None:
            self.observer(progress)
        self._message = ""

    def _write(self, state: str, progress: Progress, reason: str = "") -> None:
        self._written = time.monotonic()
        if self._finished:
            return
        status = progress.to_json() | {
            "state": state,
            "reason": reason,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": time.time(),
            "output": str(self.plan.output),
            "dashboard": self.dashboard,
        }
        with suppress(OSError):  # as with events
            self.directory.write_status(status)
        self.watch.show(self.plan, status, self.rows)
