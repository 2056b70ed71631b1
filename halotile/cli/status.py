"""Status of a run, read from its directory alone: no scheduler is asked, but a batch system about a submitted run."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from halotile.cli.screens.outcome_rows import curve_rows, iteration_text, peak_rows
from halotile.cli.screens.progress_report import Lines, Live, ProgressReport, counts, make_report
from halotile.cli.screens.screen import complain, print_json, print_rows
from halotile.errors import ClusterFailed, ConfigError, DamagedData, HalotileError
from halotile.graphs.kinds.base import Row
from halotile.graphs.kinds.sections import Job, jobs_of
from halotile.graphs.watching.progress import Progress
from halotile.graphs.words import counted, faulty_input, first_line, percent, rate_text, seconds_text
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path, path_of
from halotile.storage.disk.place import check_access
from halotile.storage.run_directory.directory import BATCH, TIME_IS_UP, BatchFiles, RunDirectory
from halotile.storage.run_directory.object_claim import elsewhere

QUEUED = "queued"
CANCELLED = "cancelled"
ACTIVE = ("planned", "running", "draining", QUEUED)  # states of a run whose driver should be alive
# Time without a report after which a driver on another host, which cannot be checked, counts as gone.
SILENCE_SECONDS = 120.0
_DRIVER = ("pid", "host")
POLL_SECONDS = 1.0
STALE_TRIES = 20
STALE_SECONDS = 0.25  # on NFS a file that is replaced while it is read is gone; the next attempt finds the new one
QUEUE_SECONDS = 5.0  # interval of queries to Slurm, which serves others as well


@dataclass(frozen=True)
class RunStatus:
    """Content of status.json at one moment, with the state of its driver."""

    directory: Path
    recorded: Mapping[str, Any]
    driver_gone: bool
    age_seconds: float
    batch: BatchJob | None = None
    # State and reason from its batch job, where the run itself has not reported since.
    corrected: tuple[str, str] | None = None

    @property
    def state(self) -> str:
        """The recorded state, or "interrupted" where no driver is left to change it."""
        if self.corrected is not None:
            return self.corrected[0]
        return "interrupted" if self.driver_gone else str(self.recorded.get("state", "unknown"))

    @property
    def queued(self) -> bool:
        """True where its batch job has not begun, or will begin again."""
        return self.state == QUEUED

    @property
    def reason(self) -> str:
        """Reason for the end of the run."""
        return self.corrected[1] if self.corrected else str(self.recorded.get("reason") or "")

    @property
    def over(self) -> bool:
        """True where nothing will change any more."""
        return self.state not in ACTIVE

    @property
    def progress(self) -> Progress:
        """The counts as a :class:`Progress`."""
        # A message is for those who watched at that time.
        names = [field.name for field in dataclasses.fields(Progress) if field.name != "message"]
        return Progress(**_EMPTY | {name: self.recorded[name] for name in names if name in self.recorded})

    @property
    def bad_blocks(self) -> tuple[GivenUp, ...]:
        """The blocks that this run has given up, from its events."""
        # The events may be long: without a failure they need not be read.
        return blocks_given_up(RunDirectory(self.directory)) if self.progress.failed else ()

    def to_json(self) -> dict[str, Any]:
        """Return all of it, for programs."""
        progress = self.progress
        return (
            progress.to_json()
            | dict(self.recorded)
            | {
                "state": self.state,
                "recorded_state": self.recorded.get("state"),
                "percent": percent(progress.done, progress.total),
                "age_seconds": self.age_seconds,
                "run_directory": os.path.abspath(self.directory),
                "bad_blocks": [bad.to_json() for bad in self.bad_blocks],
                "batch": self.batch.to_json() if self.batch else None,
            }
        )


_EMPTY: dict[str, Any] = {
    "phase": "", "done": 0, "resumed": 0, "total": 0, "pixels_done": 0, "pixels_total": 0, "seconds": 0.0
}  # fmt: skip


def find_run(place: str | OutputPath) -> Path:
    """Return the run directory that a path refers to: itself, or that of an output."""
    path = path_of(place)
    here = [path] if isinstance(path, Path) else []
    for directory in (*here, RunDirectory.beside(full_path(path)).path):
        run = RunDirectory(directory)
        check_access(directory)
        if any(path.is_file() for path in (run.job_path, run.status_path, run.path / BATCH)):
            return directory
        if first := run.read_primary():  # it belongs to a further output
            return Path(first)
    if isinstance(path, Path) and path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        raise ConfigError(
            f"{path} is a job file. To continue its run, write: recon-cli run {shlex.quote(str(path))}. Otherwise write the run directory or the output."
        )
    raise ConfigError(
        f"{path}: no run here. Write the run directory, such as clean.zarr.run, or the output it belongs to.{elsewhere(path)}"
    )


def run_of(output: OutputPath) -> Path:
    """Return the directory that keeps the run of an output, which may be a further output of it."""
    return RunDirectory.beside(full_path(output)).of_run().path


def output_of(place: str | OutputPath) -> OutputPath:
    """Return the output that a path refers to: itself, or that of the run directory.

    >>> str(output_of("here/clean.zarr.run"))
    'here/clean.zarr.run'
    """
    path = path_of(place)
    if isinstance(path, ObjectPath):
        return path
    run = RunDirectory(path)
    output = run.output
    if output == path or not (run.job_path.is_file() or run.read_primary() is not None):
        return path
    if isinstance(output, ObjectPath):
        check_here(path, output)
    return output


def check_here(directory: Path, output: ObjectPath) -> None:
    """Refuse the run directory of an output in a store where that is not looked for, which is in the working directory."""
    if os.path.realpath(RunDirectory.beside(output).path) != os.path.realpath(directory):
        folder = shlex.quote(os.path.dirname(os.path.realpath(directory)))
        raise ConfigError(
            f"{directory} keeps the run of {output}, but the run directory of an output in an object store has to be in the working directory. Write `cd {folder}` first."
        )


def imports_flag(directory: Path) -> str:
    """Return `` --allow-import`` where the job of a run directory needs it, as the end of a command."""
    with suppress(DamagedData):
        if (RunDirectory(directory).read_job() or {}).get("allow_import"):
            return " --allow-import"
    return ""


def read_status(directory: Path) -> RunStatus:
    """Return the current status of the run in a directory."""
    for _ in range(STALE_TRIES):
        try:
            return _read_status(directory)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(STALE_SECONDS)
    raise ConfigError(
        f"{directory}: its file system says that the files there are stale: what another machine replaced or removed was not seen here. "
        "Try again later, or look from the machine of the driver."
    )


def _read_status(directory: Path) -> RunStatus:
    run = RunDirectory(directory)
    recorded, batch, driver = _recorded(run), batch_job(directory), run.is_running()
    corrected = batch.corrected(recorded) if batch is not None and driver is None else None
    if driver is not None and [recorded.get(key) for key in _DRIVER] != [driver.get(key) for key in _DRIVER]:
        corrected = ("planned", "")  # a new attempt, which has not reported yet
    if corrected:
        return RunStatus(directory, recorded, False, _age_seconds(recorded), batch, corrected)
    gone = recorded.get("state") in ACTIVE and _is_gone(run, recorded)
    if gone:
        # It may have ended normally between the two reads.
        recorded = _recorded(run)
        gone = recorded.get("state") in ACTIVE
    return RunStatus(directory, recorded, gone, _age_seconds(recorded), batch)


def _recorded(run: RunDirectory) -> Mapping[str, Any]:
    recorded = run.read_status()
    if recorded is None and (run.path / BATCH).is_file():
        return {}
    if recorded is None:
        raise ConfigError(
            f"{run.path}: no status to read; the run has not begun, or status.json is damaged. "
            f"What counts is the journal: `recon-cli resume {shlex.quote(str(run.path))}` goes on from it."
        )
    return recorded


def _age_seconds(recorded: Mapping[str, Any]) -> float:
    return max(0.0, time.time() - float(recorded.get("updated", 0.0)))


def _is_gone(run: RunDirectory, recorded: Mapping[str, Any]) -> bool:
    """Return True where no process holds the lock. A lock that is held on another host may not be visible here."""
    if run.is_running() is not None:
        return False
    return recorded.get("host") == socket.gethostname() or _age_seconds(recorded) > SILENCE_SECONDS


def is_at_work(directory: Path) -> bool:
    """Return True where a run is writing now: its driver holds the lock, or reported from another host recently."""
    if not directory.is_dir():
        return False
    if RunDirectory(directory).is_running() is not None:
        return True
    try:
        return not read_status(directory).over
    except ConfigError:
        return False


def status_rows(status: RunStatus) -> list[Row]:
    """Return the status as rows for people."""
    progress, recorded = status.progress, status.recorded
    rows = [
        ("output", str(recorded.get("output", RunDirectory(status.directory).output))),
        *([("batch", status.batch.words)] if status.batch else []),
    ]
    with suppress(DamagedData):
        summary = (RunDirectory(status.directory).read_plan() or {}).get("summary", {})
        noise = summary.get("noise", "")
        texts = noise.splitlines() if isinstance(noise, str) else noise  # of several measurements
        rows += zip(["noise", *[""] * len(texts)], texts, strict=False)
        rows += [("calibration", summary["calibration"])] if "calibration" in summary else []
    if not status.over and progress.phase == "start":
        rows.append(("phase", "start: the workers are not ready yet"))
    if progress.total:
        rows.append(("done", f"{counts(progress)}, {percent(progress.done, progress.total):.1f} %"))
    if progress.pixels_done and progress.seconds > 0:
        rates = f"{rate_text(progress.megapixels_per_second)}, {progress.megabytes_per_second:.0f} MB/s"
        rows.append(("rate", f"{rates} over {seconds_text(progress.seconds)}"))
    if progress.figures:
        rows.append(("iteration", iteration_text(progress.figures)))
        rows += curve_rows(RunDirectory(status.directory))
    if not status.over and not status.queued:
        rows.append(("left", seconds_text(progress.eta_seconds)))
    if not status.over and progress.workers:
        rows.append(("workers", str(progress.workers)))
    rows += [("retired", worker) for worker in recorded.get("retired", ())]
    rows += peak_rows(progress)
    if recorded:
        rows.append(("last word", f"{seconds_text(status.age_seconds)} ago"))
    if status.reason:
        rows.append(("reason", status.reason))
    return rows + rows_of(status.bad_blocks)


def advice(status: RunStatus) -> str:
    """Return advice about a run that is over and not complete; empty where all is well."""
    resume = f"run `recon-cli resume {shlex.quote(str(status.directory))}{imports_flag(status.directory)}`"
    if status.batch is not None and status.over and status.state != "finished":
        submit = "`recon-cli submit` of the same configuration"
        has_begun = RunDirectory(status.directory).job_path.is_file()
        resume = f"{submit}, or {resume}" if has_begun else f"run {submit}"
    if status.driver_gone:
        driver = f"pid {status.recorded.get('pid')} on {status.recorded.get('host')}"
        return f"interrupted: the driver ({driver}) is gone; {resume}"
    if status.state == "stopped":
        return f"stopped: {resume} to go on"
    if status.state == "failed" and not status.progress.failed:
        return f"failed: once the cause is fixed, {resume}"
    return _advice_on_blocks(status) if status.over and status.progress.failed else ""


def _advice_on_blocks(status: RunStatus) -> str:
    """Return advice about blocks that were given up, by a run that is over."""
    progress, bad = status.progress, status.bad_blocks
    count = counted(progress.failed, "bad block")
    which = f"finished, except {count}" if status.state == "finished" else f"{status.state} with {count}"
    if progress.done + progress.failed < progress.total:
        then = "what is done stays done"
    else:
        then = f"only {'this one is' if progress.failed == 1 else 'these are'} redone"
    of_input = bool(bad) and all(block.is_of_input for block in bad)
    faulty = faulty_input(block.error for block in bad)
    cause, done, option = (faulty, "repaired", " --same-input") if of_input else ("the cause", "fixed", "")
    words = f"{shlex.quote(str(status.directory))}{option}{imports_flag(status.directory)}"
    return f"{which}: once {cause} is {done}, run `recon-cli resume {words}`; {then}"


def watch(directory: Path, report: ProgressReport, sleep: Callable[[float], None] = time.sleep) -> RunStatus:
    """Show the progress of a run until it is over, and before that what it waits for; return the last status."""
    shown = ""
    while True:
        status = read_status(directory)
        if status.queued and status.batch is not None:
            if status.batch.words != shown and isinstance(report, Lines | Live):
                shown = status.batch.words
                complain(shown)
            sleep(QUEUE_SECONDS)
            continue
        with report:
            while not status.over and not status.queued:
                report(status.progress)
                sleep(POLL_SECONDS if status.batch is None else QUEUE_SECONDS)
                status = read_status(directory)
            if status.over and isinstance(report, Lines):
                report(status.progress)
        if status.over:
            return status


NAMED = 5  # number of blocks that are shown to people; `--json` has all
_OF_INPUT = ("InputError:", "DamagedData:")


@dataclass(frozen=True)
class GivenUp:
    """A block that could not be computed, with the reason."""

    number: int
    index: tuple[int, ...]
    error: str
    output: str | None = None  # path of its output, where the run has several

    @property
    def is_of_input(self) -> bool:
        """True where the image is the cause, not the denoiser or the machine."""
        return self.error.startswith(_OF_INPUT)

    def to_json(self) -> dict[str, Any]:
        """Return the block for programs, with the keys of `recon-cli run --json`."""
        block = {"number": self.number, "index": list(self.index), "error": self.error}
        return block if self.output is None else block | {"output": self.output}

    @property
    def name(self) -> str:
        """The block in words."""
        return f"block {self.number}" + (f" of {Path(self.output).name}" if self.output else "")


def blocks_given_up(run: RunDirectory) -> tuple[GivenUp, ...]:
    """Return the blocks that the last run has given up, by output and number; it tried those of earlier runs again."""
    blocks: dict[tuple[str, int], GivenUp] = {}
    for event in run.read_events():
        # A full disk or a power cut may have left an incomplete line.
        if event.get("event") == "begin":
            blocks.clear()
        elif event.get("event") == "bad block" and "block" in event:
            number, index, output = event["block"], tuple(event.get("index", ())), event.get("output")
            blocks[str(output), number] = GivenUp(number, index, str(event.get("error", "?")), output)
    return tuple(blocks[key] for key in sorted(blocks))


def rows_of(bad: Sequence[GivenUp]) -> list[Row]:
    """Return the first few as rows, each with its reason, for people."""
    lines = [f"{b.name} (index {b.index}): {first_line(b.error)}" for b in bad[:NAMED]]
    if len(bad) > NAMED:
        lines.append(f"and {len(bad) - NAMED:,} more, in events.jsonl with their tracebacks")
    elif bad:
        lines.append("tracebacks are in events.jsonl")
    return [("" if number else "bad blocks", line) for number, line in enumerate(lines)]


# First words of states. PBS and SGE are only asked for jobs that are *in the queue*, running or not.
_AT_WORK = ("RUNNING", "COMPLETING", "in")


@dataclass(frozen=True)
class BatchJob:
    """The batch job of a run."""

    number: str  # its number; empty where it has not been accepted
    attempts: int  # number of attempts that have begun
    # submitted, began: times of the submission and of the beginning of the last attempt (Unix time)
    submitted: float
    began: float
    state: str | None  # state according to its batch system; None once the job is over
    known: bool  # the batch system has answered
    failure: str | None  # reason for the failure, where the run is marked as failed
    stays: bool = False  # in the queue with an error, which nobody but the user can clear

    @property
    def words(self) -> str:
        """Describe the batch job in a few words."""
        unknown = "unknown: the batch system does not answer from this machine"
        state = self.state or ("over" if self.known else unknown)
        return f"job {self.number or '?'}: {state}, {counted(self.attempts, 'attempt')} so far"

    def to_json(self) -> dict[str, Any]:
        """Return the batch job for programs."""
        return {"job": self.number, "state": self.state, "attempts": self.attempts, "failure": self.failure}

    def corrected(self, recorded: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return state and reason where the run's own record is older than its batch job, else None."""
        updated = float(recorded.get("updated", 0.0))
        is_current = updated >= max(self.submitted, self.began)
        drained = recorded.get("state") == "stopped" and self.failure is None
        if self.stays:
            return (
                "failed",
                f"its batch job stays in the queue: {self.state}. Remove it with `recon-cli cancel`, and submit again",
            )
        if self.state is not None:
            at_work = self.state.split()[0] in _AT_WORK
            # A driver that has drained requests another attempt before its job ends.
            if not (at_work and is_current) or drained:
                return QUEUED, ""
            if self.failure is None:  # otherwise its job is about to end
                return None
        if drained and not self.known and TIME_IS_UP in str(recorded.get("reason")):
            return QUEUED, ""
        if self.failure == CANCELLED:
            return "stopped", CANCELLED
        if self.failure is not None and recorded.get("state") != "finished":
            return "failed", self.failure
        if not is_current and self.known:
            return ("failed", "its batch job ended before the run began: `recon-cli logs` shows what it printed")
        return None


def batch_job(directory: Path) -> BatchJob | None:
    """Return the batch job of a run; None for a run that was not submitted."""
    from halotile.graphs.clusters.launches.batch_system import system_in

    files = BatchFiles(RunDirectory(directory))
    record = files.read()
    if record is None:
        return None
    number, state, has_answer, system = record["number"], None, True, system_in(record)
    try:
        state = system.state_of(number) if number else None
    except ClusterFailed:
        has_answer = False
    times, stays = (record["submitted"], record["began"]), (state or "").startswith(system.stays)
    return BatchJob(number, record["attempts"], *times, state, has_answer, files.failure(), stays)


MOST_ROWS = 20  # images that are listed one by one
MOST_OPENED = 1000  # images that are opened to see whether they can be
IDLE_SECONDS = 30  # time without a run after which no other is expected


def show_many(job: Job, *, follow: bool, as_json: bool) -> None:
    """Show how the run of each image stands."""
    stand = _followed(job, quiet=as_json) if follow else _stand(job)
    recorded = (RunDirectory.beside(full_path(job.place)).read_status() or {}).get("failed_images", {})
    faults = {path: recorded.get(path) or fault for path, fault in _faults(job, stand).items()}
    states = {path: "cannot be read" if fault else "not begun" for path, fault in faults.items()}
    states |= dict.fromkeys(recorded.keys() & faults, "failed")
    states |= {path: one.state for path, one in stand.items() if one}
    together = _together(job)
    if together and together.queued:
        states |= {path: QUEUED for path, state in states.items() if state == "not begun"}
    reasons = {path: first_line(one.reason) for path, one in stand.items() if one and one.reason} | faults
    if as_json:
        unbegun = {path: {"state": states[path], "reason": fault} for path, fault in faults.items()}
        print_json({"images": {path: one.to_json() if one else unbegun[path] for path, one in stand.items()}})
        return
    counts = {state: list(states.values()).count(state) for state in dict.fromkeys(states.values())}
    rows = [("images", ", ".join(f"{count:,} {state}" for state, count in counts.items()))]
    unfinished = [path for path in stand if states[path] != "finished"]
    for path in unfinished[:MOST_ROWS]:
        said = ": ".join(filter(None, (PurePath(path).name, states[path], reasons.get(path))))
        rows.append((_done(stand[path]), said))
    rows += unlisted_row(len(unfinished))
    if together and together.batch:
        rows.append(("batch", together.batch.words))
    if "not begun" in counts and len(counts) > 1:
        rows.append(("not begun", "`recon-cli plan` of this job says why an image cannot begin"))
    print_rows(f"{counts.get('finished', 0):,} of {counted(len(stand), 'image')} finished", rows)


def show_several(paths: Sequence[str], *, as_json: bool) -> None:
    """Show how each of several runs stands, in a row; paths that belong to no run are named."""
    stand = dict.fromkeys(paths)
    for path in paths:
        with suppress(ConfigError):
            stand[path] = read_status(find_run(path))
    if as_json:
        print_json({"runs": {path: one.to_json() if one else None for path, one in stand.items()}})
        return
    rows = [(one.state if one else "no run", _row_of(path, one)) for path, one in stand.items()]
    print_rows(f"{counted(len(rows), 'run')}", rows)


def _row_of(path: str, one: RunStatus | None) -> str:
    if one is None:
        return path
    left = "" if one.over or one.queued else f", {seconds_text(one.progress.eta_seconds)} left"
    done = f"{counts(one.progress)}, {_done(one)}{left}" if one.progress.total else ""
    return ": ".join(filter(None, (path, done, one.reason and first_line(one.reason))))


def unlisted_row(count: int) -> list[Row]:
    """Return a row that says how many of so many images the rows above are of; none where they are of all."""
    return [("", f"{MOST_ROWS} of {count:,} images; --json lists all")] if count > MOST_ROWS else []


def _together(job: Job) -> RunStatus | None:
    """Return the status of all images together, where they were submitted as one batch job."""
    directory = RunDirectory.beside(full_path(job.place)).path
    return read_status(directory) if (directory / BATCH).is_file() else None


def _followed(job: Job, *, quiet: bool) -> dict[str, RunStatus | None]:
    """Show the progress of the batch job, or else of one image after the other, until none has begun for a while."""
    if (together := _together(job)) and not together.over:
        watch(together.directory, make_report(quiet=quiet))
        return _stand(job)
    idle = 0
    while idle <= IDLE_SECONDS:
        stand = _stand(job)
        if active := next((one for one in stand.values() if one and not one.over), None):
            watch(active.directory, make_report(quiet=quiet))
            idle = 0
        elif all(stand.values()):
            break
        else:
            time.sleep(1)
            idle += 1
    return stand


def _faults(job: Job, stand: Mapping[str, RunStatus | None]) -> dict[str, str]:
    """Return the fault of each image without a run; of many, those that a run has passed over are read, and of very many no others opened."""
    unbegun = [path for path, one in stand.items() if one is None]
    last = max((path for path, one in stand.items() if one), default="")
    opened = {path for path in unbegun if len(unbegun) <= MOST_OPENED or path < last}
    few = len(unbegun) <= MOST_ROWS
    return {path: _fault(job, path, read=few or path < last) if path in opened else "" for path in unbegun}


def _fault(job: Any, path: str, *, read: bool) -> str:
    """Return why an image cannot be opened as the job says, or its first pixel not be read; empty where it can."""
    from halotile.storage.arrays import open_source

    chosen = job.input
    if not hasattr(chosen, "level"):  # it is no image
        return ""
    try:
        source = open_source(path, level=chosen.level, dataset=chosen.dataset, axes=chosen.axes)
        if read:
            source[(0,) * len(source.shape)]
    except HalotileError as error:
        return first_line(str(error)).removeprefix(f"{path}: ")
    return ""


def _stand(job: Job) -> dict[str, RunStatus | None]:
    """Return the status of the run of each image; None where it has not begun."""
    stand: dict[str, RunStatus | None] = {}
    for path, one in jobs_of(job).items():
        try:
            stand[path] = read_status(find_run(one.place))
        except ConfigError:
            stand[path] = None
    return stand


def _done(one: RunStatus | None) -> str:
    return f"{percent(one.progress.done, one.progress.total):.0f} %" if one and one.progress.total else ""
