"""The directory of a run: its job, plan, progress and locks; and the files of its batch job.

It is private to its owner, because it names paths, and whoever can write it can control a resumed run. The locks
are ``flock`` locks, which the system releases when a process dies for any reason.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, HalotileError, OutputInUse, OutputRefused
from halotile.storage.disk.durable import DISK, GONE, PARTIAL, Disk, is_full, refusing_full, remove_partials
from halotile.storage.disk.object_path import ObjectPath, OutputPath, path_of
from halotile.storage.disk.place import check_access, check_owner, check_parents
from halotile.storage.run_directory import locks
from halotile.storage.run_directory.json_files import FILE_MODE, digest, read_object

JOB = "job.json"  # the job as requested; the first file to be written, it claims the output
CONFIG = "config.json"  # the same job as a configuration with all sizes resolved
PLAN = "plan.json"  # the plan and its fingerprint; the last file to be written, without it nothing resumes
JOURNAL = "journal"  # the finished blocks
STATUS = "status.json"  # the progress of the run, replaced about once a second
EVENTS = "events.jsonl"  # events, one JSON object per line
ITERATIONS = "iterations.jsonl"  # results of each iteration of a solver
EXAMPLES = "examples.png"  # patches of a training, denoised; the object of a ptychographic reconstruction
PAGE = "page.html"  # the page of the run as it was at the end, if its dashboard was on
WRITTEN = "written.json"  # the iterations up to the one whose image is in the output
STATE = "state"  # a solver's images and numbers between two iterations
WORKERS = "workers"  # output of workers on other machines, and their certificates while they live
BATCH = "batch.json"  # the batch job: its number and its request
SCRIPT, LOG = "batch.sh", "batch.log"  # the batch script and its output
FINISHED, FAILED = "finished", "failed"  # the end of the run, for other programs; the second has the reason
PRIMARY = "primary.json"  # beside a further output: path of the run directory, beside the first
CLAIM = "claim.json"  # the claim on an output in an object store, as it is beside that
REPLACED = "replaced"  # in the state of a scratch folder: what was there before
STOP = "stop"  # exists while a run ends early: workers start no further block
NAMES = {
    JOB, CONFIG, PLAN, JOURNAL, STATUS, EVENTS, locks.LOCK, locks.WORKERS_LOCK, STOP, STATE,
    ITERATIONS, EXAMPLES, WRITTEN, WORKERS, BATCH, SCRIPT, LOG, FINISHED, FAILED, PAGE, PRIMARY, CLAIM,
}  # fmt: skip
TIME_IS_UP = "SIGUSR1"  # signal of the batch system before it ends a job
# Default waiting time for the lock, longer than RunDirectory.is_running holds it to check whether it is free.
LOCK_SECONDS = 0.5
_SEAL = "digest"
_DIRECTORY_MODE = 0o700
_PROGRESS = (PLAN, JOURNAL, STATUS, EVENTS)
_SHOWN = (ITERATIONS, EXAMPLES, WRITTEN, PAGE)
_SUBMITTED = (BATCH, SCRIPT, FINISHED, FAILED)
_ADVICE = "Run with --fresh to start over."


class _File:
    """The path of a file in a run directory, as an attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, kind: Any = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """A run directory. Nothing is created before :meth:`lock` or :meth:`create`."""

    path: Path  # directory
    disk: Disk = DISK  # disk to write with
    is_scratch: bool = False  # true: its lock removes it at the end, unless it holds what was replaced

    job_path = _File(JOB)
    plan_path = _File(PLAN)
    journal_path = _File(JOURNAL)
    status_path = _File(STATUS)
    events_path = _File(EVENTS)
    iterations_path = _File(ITERATIONS)
    state_path = _File(STATE)

    def claims_output(self) -> bool:
        """Return True when a run of halotile wrote, or was about to write, the output beside the directory."""
        check_access(self.path)
        claims = (JOB, PLAN, JOURNAL, PRIMARY)
        return any((self.path / name).is_file() for name in claims)

    def create(self) -> None:
        """Create the directory, private to its owner; durable on return."""
        self.disk.make_directory(self.path, _DIRECTORY_MODE)
        self.check_place()  # afterwards: what another user puts there now is not followed
        self.path.chmod(_DIRECTORY_MODE)

    def remove(self) -> None:
        """Remove the directory within :meth:`lock`; another call may take it as soon as its lock file, the last one, is gone."""
        with suppress(OSError):
            self.disk.remove_tree(self.path, last=(locks.LOCK,))

    def check_place(self) -> None:
        """Refuse a path with anything that is not a run directory."""
        check_access(self.path)
        if self.path.is_symlink() or (self.path.exists() and not self._is_run_directory()):
            raise OutputRefused(
                f"{self.path} is where this run would keep its journal, but something that no run made is there already. Move it away, or write another path."
            )
        check_owner(self.path)

    def forget(self) -> None:
        """Remove the records of the run, beginning with the plan; the job stays, because it claims the output."""
        self._remove(*_PROGRESS, *_SHOWN)
        self.forget_state()

    def keep_run(self) -> None:
        """Keep a run of its own from here on, where the directory belonged to a further output."""
        self._remove(PRIMARY)

    def belong_to(self, primary: Path) -> None:
        """Belong to a further output of the run that is kept in ``primary``, and forget every other run."""
        relative = os.path.relpath(primary, self.path.parent)
        self._write(self.path / PRIMARY, {"run": relative})  # first: it claims the output
        self.forget()
        self._remove(JOB, CONFIG, BATCH, SCRIPT, FINISHED, FAILED)

    def _remove(self, *files: str) -> None:
        for name in files:
            self.disk.remove(self.path / name)

    def forget_state(self) -> None:
        """Remove a solver's state."""
        if self.state_path.is_dir():
            self.disk.remove_tree(self.state_path)

    def write_job(self, job: dict[str, Any]) -> None:
        """Write the job; durable on return."""
        self._write(self.job_path, job)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the configuration with all sizes resolved; durable on return."""
        self._write(self.path / CONFIG, config)

    def read_job(self) -> dict[str, Any] | None:
        """The job, or None when there is none. Raises DamagedData when it cannot be read."""
        return self._read(self.job_path)

    def read_valid_job(self) -> dict[str, Any] | None:
        """The job, or None when there is no readable one."""
        return _or_none(self.read_job)

    def read_primary(self) -> str | None:
        """The directory that keeps the run, where this one is beside a further output of it."""
        run = (_or_none(lambda: self._read(self.path / PRIMARY)) or {}).get("run")
        return os.path.normpath(self.path.parent / run) if run else None

    @classmethod
    def beside(cls, output: str | OutputPath) -> RunDirectory:
        """The run directory of an output: beside it, or in the working directory for an output in a store.

        >>> RunDirectory.beside("scans/clean.zarr").path.as_posix(), RunDirectory.beside("s3://day/clean.zarr").path.name
        ('scans/clean.zarr.run', 's3+day+clean.zarr.run')
        """
        place = path_of(output)
        if isinstance(place, ObjectPath):
            return cls(Path.cwd() / f"{place.as_name}.run")
        return cls(place.parent / f"{place.name}.run")

    @property
    def output(self) -> OutputPath:
        """Place of the output that the directory belongs to, the inverse of :meth:`beside`; without ``.run``, the path itself."""
        name = self.path.name.removesuffix(".run")
        place = ObjectPath.from_name(name) if name != self.path.name else None
        return place or self.path.with_name(name)

    def of_run(self) -> RunDirectory:
        """Return the directory that keeps the run: this one, or that of the first output of its run."""
        first = self.read_primary()
        return RunDirectory(Path(first), self.disk) if first else self

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write the plan, with a checksum because the run depends on it; durable on return."""
        self._write(self.plan_path, plan | {_SEAL: digest(plan)})

    def update_plan(self, **values: Any) -> None:
        """Add values determined during the run to the plan; durable on return."""
        if plan := self.read_valid_plan():
            self.write_plan(plan | values)

    def read_plan(self) -> dict[str, Any] | None:
        """The plan, or None when there is none. Raises DamagedData when it differs from what was written."""
        plan = self._read(self.plan_path)
        if plan is not None and plan.pop(_SEAL, None) != digest(plan):
            raise DamagedData(f"{self.plan_path} is damaged. {_ADVICE}")
        return plan

    def read_valid_plan(self) -> dict[str, Any] | None:
        """The plan, or None when there is no readable one: the journal also identifies its plan."""
        return _or_none(self.read_plan)

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status atomically. It is not fsynced, because the journal is authoritative."""
        data = json.dumps(status).encode()
        try:
            self._write_text(STATUS, data)
        except OSError as error:
            if not is_full(error):
                raise
            self.disk.overwrite(self.status_path, data)  # the status must also be able to report a full disk

    def read_status(self) -> dict[str, Any] | None:
        """The status, or None when there is no valid one: a power cut may have damaged it."""
        return _or_none(lambda: self._read(self.status_path))

    def append_event(self, event: dict[str, Any]) -> None:
        """Append a line to the events; not fsynced."""
        if not self.events_path.exists():
            self._write_text(EVENTS, b"")
        self.disk.append(self.events_path, _json_lines([event]))

    def write_iterations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the results of a solver's iterations; not fsynced."""
        self._write_text(ITERATIONS, _json_lines(rows))

    def write_output_iterations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the iterations that led to the image about to be written; durable on return."""
        self._write(self.path / WRITTEN, {"iterations": list(rows)})

    def read_output_iterations(self) -> list[dict[str, Any]]:
        """The iterations that led to the image in the output; empty before it was started."""
        written = _or_none(lambda: self._read(self.path / WRITTEN)) or {}
        rows: list[dict[str, Any]] = written.get("iterations", [])
        return rows

    def write_page(self, html: str) -> None:
        """Replace the page of the run; not fsynced."""
        self._write_text(PAGE, html.encode())

    def read_events(self) -> Iterator[dict[str, Any]]:
        """The events in order, without unreadable lines and values that are not objects."""
        if not self.events_path.exists():
            return
        with self.events_path.open("rb") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    if isinstance(event := json.loads(line), dict):
                        yield event

    @contextmanager
    def lock(
        self, patience_seconds: float = LOCK_SECONDS, cut_short: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Be the only driver of this run inside the context.

        ``patience_seconds``: maximum time to wait for another driver; ``cut_short``: callback that returns True to end the wait early.
        """
        with self._locked_file(patience_seconds, cut_short) as fd:
            try:
                locks.write_holder(fd)
                remove_partials(self.path, self.disk)
                yield
            except OSError as error:
                if isinstance(error, HalotileError) or self._is_lock_file(fd):
                    raise
                raise OutputRefused(
                    f"{self.path} was moved or removed during its run ({error}), and with it the journal. Put it back and run again to continue, or run with output.overwrite: true to start over."
                ) from error
            finally:
                if self.is_scratch and not (self.state_path / REPLACED).exists():
                    self.remove()

    @contextmanager
    def _locked_file(self, patience_seconds: float, cut_short: Callable[[], bool]) -> Iterator[int]:
        """Open and lock the lock file, or the next one where its holder has removed it."""
        while True:
            self.create()
            with locks.opened(self.path / locks.LOCK, os.O_RDWR | os.O_CREAT) as fd:
                if not locks.acquire(fd, patience_seconds, cut_short):
                    raise self._in_use(locks.read_holder(fd))
                if self._is_lock_file(fd):
                    yield fd
                    return

    def _is_lock_file(self, fd: int) -> bool:
        """Return True when the open file is the lock file in the directory."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path / locks.LOCK))
        return False

    def check_free(self) -> None:
        """Refuse a directory that is locked by another driver."""
        if (holder := self.is_running()) is not None:
            raise self._in_use(holder)

    def _in_use(self, holder: dict[str, Any]) -> OutputInUse:
        return OutputInUse(
            f"{self.path} is in use: {locks.describe(holder)} is writing this output. Wait until it ends, or write another path."
        )

    def is_running(self) -> dict[str, Any] | None:
        """The driver that runs here now, as ``pid``, ``host`` and ``started`` (Unix time); None if there is none."""
        with suppress(*GONE), locks.opened(self.path / locks.LOCK, os.O_RDONLY) as fd:
            try:
                locks.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return locks.read_holder(fd)
        return None

    def request_stop(self) -> None:
        """Ask all workers, including future ones, to start no further block. A full disk may prevent it."""
        with suppress(OSError):
            self._write_text(STOP, b"")

    def is_stopping(self) -> bool:
        """Return True when workers are to start no further block."""
        return (self.path / STOP).exists()

    def clear_stop(self) -> None:
        """Allow workers to start blocks."""
        self.disk.remove(self.path / STOP)

    def driver(self) -> dict[str, Any]:
        """The last driver that took the lock, as ``pid``, ``host`` and ``started``; empty when there was none."""
        return locks.last_holder(self.path / locks.LOCK)

    def _is_run_directory(self) -> bool:
        if not self.path.is_dir():
            return False
        if (self.path / locks.LOCK).is_file():
            return True
        # The lock file is not fsynced: after a power cut the other files may exist without it, the job first.
        files = {name for name in os.listdir(self.path) if not name.endswith(PARTIAL)}
        return files <= NAMES and (bool({JOB, PRIMARY} & files) or files.isdisjoint(_PROGRESS))

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        self.disk.write_file(path, [json.dumps(value, indent=2).encode()], mode=FILE_MODE)

    def _write_text(self, name: str, text: bytes) -> None:
        """Replace a file atomically, without fsync."""
        self.disk.write_file(self.path / name, [text], mode=FILE_MODE, sync=False)

    def _read(self, path: Path) -> dict[str, Any] | None:
        check_access(self.path)
        return read_object(path, _ADVICE)


def _or_none(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Read a file; None also for a damaged one."""
    with suppress(DamagedData):
        return read()
    return None


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@dataclass(frozen=True)
class BatchFiles:
    """The files of one submitted run."""

    run: RunDirectory  # directory of the files

    @property
    def log_path(self) -> Path:
        """Path of the output of the batch job."""
        return self.run.path / LOG

    @property
    def script_path(self) -> Path:
        """Path of the submitted script."""
        return self.run.path / SCRIPT

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record of the submission; durable on return."""
        self._write(BATCH, json.dumps(record, indent=2).encode())

    def read(self) -> dict[str, Any] | None:
        """The record of the submission; None when there is none."""
        return read_object(self.run.path / BATCH, "Remove it, and submit the configuration again.")

    def state(self) -> Mapping[str, bytes | None]:
        """Contents of the files, except the log, for :meth:`restore`."""
        paths = {name: self.run.path / name for name in _SUBMITTED}
        return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}

    def restore(self, state: Mapping[str, bytes | None]) -> None:
        """Restore the contents from before a submission that was rejected."""
        for name, text in state.items():
            if text is None:
                self.run.disk.remove(self.run.path / name)
            else:
                self._write(name, text)
        if self.log_path.is_file() and not self.log_path.stat().st_size:
            self.run.disk.remove(self.log_path)

    def write_script(self, text: str) -> None:
        """Write the script; durable on return."""
        self._write(SCRIPT, text.encode())

    def mark_end(self, reason: str | None) -> None:
        """Mark the run as finished, or as failed for a reason; other programs look for these files."""
        self.clear_end()
        self._write(*((FINISHED, b"") if reason is None else (FAILED, f"{reason}\n".encode())))

    def clear_end(self) -> None:
        """Remove the marks, because the run continues."""
        for name in (FINISHED, FAILED):
            self.run.disk.remove(self.run.path / name)

    def failure(self) -> str | None:
        """The reason of the failure; None when the run is not marked as failed."""
        path = self.run.path / FAILED
        return path.read_text(errors="replace").strip() if path.is_file() else None

    @property
    def finished(self) -> bool:
        """True when the run is marked as finished."""
        return (self.run.path / FINISHED).is_file()

    def _write(self, name: str, text: bytes) -> None:
        self.run.disk.write_file(self.run.path / name, [text], mode=FILE_MODE)


@contextmanager
def replacing(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a new path to write to. On success it replaces ``path``, durably; on failure ``path`` is unchanged.

    The new path is in a folder beside ``path`` that is private to this user, and locked. Scratch files may be put beside it. The folder
    is removed at the end, or by the next call for ``path`` if the process is killed. It stays while it holds what was at ``path``.

    ``path``: path of a file or a folder; ``check``: called at the beginning and again before the replacement; it raises an error where `path` must
    not be replaced.
    """
    check()
    place = path.absolute()
    check_parents(place, "the path")
    run = RunDirectory.beside(place)
    work = RunDirectory(place.with_name(f".{place.name}{PARTIAL}"), is_scratch=True)
    made, replaced = work.state_path / "made", work.state_path / REPLACED

    def bring_back() -> None:
        """Undo the first move of a call that ended before its second one."""
        if replaced.exists() and not os.path.lexists(place):
            DISK.move(replaced, place)

    with refusing_full(f"{path} cannot be written"), work.lock():
        try:
            bring_back()
            check()  # it saw a free place before
            work.forget_state()
            work.state_path.mkdir()
            run.of_run().check_free()
            yield made
            for entry in (made, *made.rglob("*")):
                (DISK.sync_directory if entry.is_dir() else DISK.sync)(entry)
            check()
            run.of_run().check_free()
            if place.is_dir() and not place.is_symlink():
                DISK.move(place, replaced)
            DISK.move(made, place)
            work.forget_state()  # until then the scratch folder stays: it may hold the only copy
        finally:
            bring_back()
