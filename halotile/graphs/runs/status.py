"""Progress of a run: status.json and events.jsonl in its directory, its observer, its dashboard page."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from halotile.graphs.kinds.base import JobOutput, PassCount
from halotile.graphs.watching.page import QUARANTINED, RETRIED, Watch
from halotile.graphs.watching.progress import Observer, Progress
from halotile.graphs.words import counted, first_line
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.block import BadBlock, Receipt

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import Plan
    from halotile.graphs.runs.held_output import HeldOutputs
    from halotile.graphs.runs.signals import Signals


STATUS_SECONDS = 1.0
NOTIFY_SECONDS = 0.4
# Fields of a receipt that are added up under the same name.
_SUMMED = ("holes", "defects", "read_bytes", "written_bytes", "compute_seconds")


@dataclass(frozen=True)
class Counts:
    """Numbers of blocks and pixels of all passes of a job."""

    passes: Sequence[PassCount]

    @property
    def total(self) -> int:
        """Number of blocks."""
        return sum(len(phase.grid) * phase.times for phase in self.passes)

    @property
    def pixels(self) -> int:
        return sum(math.prod(phase.grid.shape) * phase.times for phase in self.passes)

    def before(self, phase: str, number: int) -> int:
        """Return the number of blocks of the passes before a given pass of a phase."""
        count = 0
        for each in self.passes:
            if each.phase == phase and number < each.times:
                return count + len(each.grid) * number
            count += len(each.grid) * each.times
            number -= each.times * (each.phase == phase)
        return count


def status_of(progress: Progress, state: str, reason: str, *, output: str) -> dict[str, Any]:
    """Return the content of status.json, as this process reports it now."""
    return progress.to_json() | {
        "state": state,
        "reason": reason,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "updated": time.time(),
        "output": output,
    }


class Status:
    """Adds up receipts; reports progress to the observer, the run directory and the dashboard page."""

    def __init__(self, directory: RunDirectory, plan: Plan, observer: Observer | None) -> None:
        self.directory = directory
        self.plan = plan
        self.observer = observer
        self.watch = Watch()
        """The page on the dashboard."""
        self.batch: int | None = None
        """Number of tiles at once that a worker was reduced to for lack of memory."""
        self._counts = Counts(plan.work.passes)
        self._before = 0
        """Number of blocks of the passes before the current one."""
        self.retired: dict[str, str] = {}
        """Workers that are given no more blocks, by address: host and reason."""
        self._rows: Sequence[Mapping[str, float]] = ()
        self._hardware: set[str] = set()
        self._dashboard: str | None = None
        self._has_begun = False
        """True once a pass began."""
        total, pixels, workers = self._counts.total, self._counts.pixels, plan.run.count
        self._sums = Progress("start", 0, 0, total, 0, pixels, 0.0, workers=workers, counted=plan.counted)
        """Sums of the receipts so far."""
        self.not_finite = self.spoiled = 0
        """As of :class:`~halotile.tasks.block.Receipt`."""
        self._made = time.perf_counter()
        self._began: float | None = None
        self._notified_at = 0.0
        self._written = 0.0
        self._message = ""
        """Lines that no observer has been given yet."""
        self._taking = threading.Lock()
        """Held while lines are added or taken: a run reports from one thread and notifies from another."""
        self._finished = False
        """True where an earlier run left nothing to do: its status stays."""
        self._earlier_seconds = 0.0
        """Duration of the attempts before this one."""

    @property
    def fingerprint(self) -> str:
        """Digest of the identity that checkpoints are tied to."""
        return self.plan.fingerprint

    def begin(self, done: int) -> None:
        """Report that the run holds its outputs, with this number of all their blocks done."""
        if done:  # the passes before the output are done as well
            self._before = self._counts.total - self.plan.blocks
        progress = self.progress("start", done=done, failed=0)
        before = self.directory.read_status() or {}
        self._finished = progress.done == progress.total and before.get("state") == "finished"
        self._earlier_seconds = before.get("all_seconds", 0.0) if progress.done else 0.0
        self.event("begin", fingerprint=self.plan.fingerprint, resumed=progress.done)
        self._sums = replace(self._sums, resumed=progress.done)
        self._write("running", replace(progress, resumed=progress.done))
        unit = steps.counted if (steps := self.plan.kind.steps) else "block"
        if progress.done == progress.total:
            all_done = f"the one {unit} is" if progress.total == 1 else f"all {progress.total} {unit}s are"
            self.report(f"nothing left to do: {all_done} done; checking every byte")
        elif done:
            are = "is" if done == 1 else "are"
            self.report(f"{done} of {counted(progress.total, unit)} {are} done already")

    def uncount(self, damaged: int) -> None:
        """Count fewer blocks as done by earlier runs: so many of them are damaged, and done again."""
        self._finished = False
        self._sums = replace(self._sums, resumed=max(self._sums.resumed - damaged, 0))

    def pass_begins(self, phase: str, number: int, done: int) -> None:
        """Count from here on the blocks of another pass; some may be done."""
        self._before = self._counts.before(phase, number)
        # The blocks of earlier runs do not measure the speed of this one. Output blocks were counted at the beginning.
        if not self._has_begun and self._counts.total > self.plan.blocks:
            self._sums = replace(self._sums, resumed=max(self._sums.resumed, self._before + done))
        self._has_begun = True

    def all_passes_are_over(self) -> None:
        """Count every pass as done, also those of a solver that ended early."""
        self._before = self._counts.total - self.plan.blocks

    def work_begins(self) -> None:
        """Start the clock for rates, unless it runs already: the cluster is up."""
        if self._began is None:
            self._began = time.perf_counter()
            self._sums = replace(self._sums, start_seconds=self._began - self._made)

    def count(self, receipt: Receipt) -> None:
        """Add a receipt to the sums."""
        self.not_finite += receipt.not_finite
        self.spoiled += receipt.spoiled
        sums = self._sums
        self._sums = replace(
            sums,
            pixels_done=sums.pixels_done + receipt.pixels,
            device_peak_bytes=max(sums.device_peak_bytes, receipt.device_peak_bytes),
            **{name: getattr(sums, name) + getattr(receipt, name) for name in _SUMMED},
        )
        self.count_memory(receipt.peak_memory_bytes)
        self.watch.take(receipt)

    def count_memory(self, peak_bytes: int) -> None:
        """Record the memory peak of a worker."""
        peak = max(self._sums.peak_memory_bytes, peak_bytes)
        self._sums = replace(self._sums, peak_memory_bytes=peak)

    def retry(self, bad: BadBlock) -> None:
        """Record a block that failed and is tried again."""
        self._sums = replace(self._sums, retried=self._sums.retried + 1)
        self.watch.mark(bad.number, RETRIED)
        self.event("retry", block=bad.number, error=bad.error)

    def give_up(self, bad: BadBlock, output: JobOutput | None) -> None:
        """Report a block of an output, or of a scratch array, that failed for good."""
        self.watch.mark(bad.number, QUARANTINED)
        shown = output if len(self.plan.outputs) > 1 else None
        where = {"output": str(shown.path)} if shown else {}
        reasons = {"index": bad.index, "error": bad.error, "traceback": bad.traceback}
        self.event("bad block", block=bad.number, **where, **reasons)
        of_output = f" of {shown.path.name}" if shown else ""
        self.report(f"block {bad.number}{of_output} at {bad.region.start}–{bad.region.stop} failed: {bad.error}")

    def retire(self, worker: str, host: str, reason: str) -> None:
        """Report a worker that is given no more blocks."""
        if worker not in self.retired:
            self.retired[worker] = f"{worker} on {host}: {first_line(reason)}"
            self.report(f"{reason}. No more blocks go to worker {worker} on {host}.")

    def batch_fell(self, batch: int, before: int) -> None:
        """Report fewer tiles at once on a worker for lack of memory; a resumed run begins with that number."""
        self.batch = batch
        self.report(f"memory ran out on a worker: {batch} tiles at once there, in place of {before}")
        with suppress(OSError):  # a full disk is reported where blocks are written
            self.directory.update_plan(batch=batch)

    def note_arithmetic(self, receipt: Receipt) -> None:
        """Warn once where workers with several kinds of CPU or GPU share a run, or a GPU gives a fixed batch other bits."""
        kinds = {receipt.cpu_kind, *(f"batch {shape}: {digest}" for shape, digest in receipt.bits.items())}
        if kinds <= self._hardware:
            return
        self._hardware |= kinds
        plan = self.directory.read_valid_plan() or {}
        hardware, bits = plan.get("processors", []), plan.get("bits", {})
        with suppress(OSError):  # a full disk is reported where blocks are written
            self.directory.update_plan(
                processors=[*dict.fromkeys((*hardware, receipt.cpu_kind))], bits=receipt.bits | bits
            )
        if hardware and receipt.cpu_kind not in hardware:
            self.report(
                f"blocks of this run come from {len(hardware) + 1} kinds of CPUs or GPUs, and their last bits may differ: "
                f"{receipt.cpu_kind}; before: {'; '.join(hardware)}"
            )
        elif any(bits.get(shape, digest) != digest for shape, digest in receipt.bits.items()):
            self.report(
                f"the GPU of worker {receipt.worker} on {receipt.host} now rounds differently: cuDNN has chosen another "
                "algorithm, as it does when GPU memory is short. Last bits of blocks may differ from here on. Run nothing "
                "else on that GPU; for the same bits everywhere, run again with --fresh."
            )

    def report_row(self, rows: Sequence[Mapping[str, float]], total: int) -> None:
        """Show the figures of all iterations so far, out of at most ``total``."""
        self._rows = rows
        if rows:
            self._sums = replace(self._sums, figures=dict(rows[-1]) | {"iterations": total})

    def dashboard_at(self, address: str) -> None:
        """Report the address of the dashboard, on the driver's machine."""
        self._dashboard = address
        self.report(f"dashboard: {address}")

    def progress(self, phase: str, *, done: int, failed: int) -> Progress:
        """Return the sums as a value; ``done`` counts blocks of the current pass."""
        done = min(max(self._before + done, self._sums.resumed), self._sums.total)
        seconds = time.perf_counter() - self._began if self._began is not None else 0.0
        return replace(self._sums, phase=phase, done=done, failed=failed, seconds=seconds, message=self._message)

    def notify(self, progress: Progress) -> None:
        """Notify the observer and the status file, each not more often than it needs."""
        now = time.monotonic()
        if now - self._notified_at >= NOTIFY_SECONDS:
            self._notified_at = now
            self._notify(progress)
        if now - self._written >= STATUS_SECONDS:
            self._write("draining" if progress.phase == "drain" else "running", progress)

    def notify_now(self, progress: Progress) -> None:
        """Notify both at once."""
        self._notified_at = self._written = 0.0
        self.notify(progress)

    @contextmanager
    def ticking(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Report the progress again and again while the driver waits in this context."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(NOTIFY_SECONDS):
                self.notify(progress())

        self.notify(progress())
        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def report(self, message: str) -> None:
        """Pass a line on to observers, and log it.

        An error in the user's code may have more lines: they are logged, not shown.
        """
        self.event("message", text=message)
        line = first_line(message)
        with self._taking:
            self._message = f"{self._message}\n{line}" if self._message else line
        self._notified_at = 0.0

    def event(self, kind: str, **details: Any) -> None:
        """Log an event. A full disk may lose it: the run does not fail for that."""
        with suppress(OSError):
            self.directory.append_event({"time": time.time(), "event": kind} | details)

    def end(self, state: str, progress: Progress, reason: str) -> None:
        """Record the end of the run."""
        self.event(state, reason=reason, done=progress.done)
        self._write(state, progress, reason)
        self._notify(progress)

    def _notify(self, progress: Progress) -> None:
        with self._taking:
            message, self._message = self._message, ""
        if self.observer is not None:
            self.observer(replace(progress, message=message))

    def _write(self, state: str, progress: Progress, reason: str = "") -> None:
        self._written = time.monotonic()
        if self._finished:
            return
        own: dict[str, Any] = {"dashboard": self._dashboard, "retired": list(self.retired.values())}
        own["all_seconds"] = self._earlier_seconds + progress.seconds
        status = status_of(progress, state, reason, output=str(self.plan.output)) | own
        with suppress(OSError):  # as for events
            self.directory.write_status(status)
        self.watch.show(self.plan, status, self._rows)


@dataclass(frozen=True)
class RunContext:
    """A run as its passes see it."""

    plan: Plan
    outputs: HeldOutputs  # the outputs, which are checked during the run
    directory: RunDirectory  # the run directory, in which workers look for a request to stop
    signals: Signals  # requests to the driver
    status: Status  # progress, reported and written to disk
