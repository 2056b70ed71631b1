"""The directory of a run: its job, plan, progress and locks.

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
from halotile.storage.disk.durable import DISK, GONE, PARTIAL, Disk, is_full, remove_partials
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.disk.place import check_access, check_owner
from halotile.storage.run_directory import names, validation
from halotile.storage.run_directory.locks import acquire, describe, flock, never, read_holder, write_holder
from halotile.storage.run_directory.validation import digest

_SEAL = "digest"
_DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
LOCK_SECONDS = 0.5
"""Default waiting time for the lock, longer than :meth:`RunDirectory.is_running` holds it to check whether it is free."""
_PROGRESS = (names.PLAN, names.JOURNAL, names.STATUS, names.EVENTS)
_SHOWN = (names.ITERATIONS, names.EXAMPLES, names.WRITTEN, names.PAGE)
_ADVICE = "Run with --fresh to start over."


@dataclass(frozen=True)
class RunDirectory:
    """A run directory. Nothing is created before :meth:`lock` or :meth:`create`."""

    path: Path  # directory
    disk: Disk = DISK  # disk to write with
    is_scratch: bool = False  # true: its lock removes it at the end

    @property
    def job_path(self) -> Path:
        """Path of the job as requested."""
        return self.path / names.JOB

    @property
    def plan_path(self) -> Path:
        return self.path / names.PLAN

    @property
    def journal_path(self) -> Path:
        """Path of the journal of blocks."""
        return self.path / names.JOURNAL

    @property
    def status_path(self) -> Path:
        """Path of the progress of the run."""
        return self.path / names.STATUS

    @property
    def events_path(self) -> Path:
        return self.path / names.EVENTS

    @property
    def iterations_path(self) -> Path:
        """Path of the results of a solver's iterations, one JSON object per line."""
        return self.path / names.ITERATIONS

    @property
    def state_path(self) -> Path:
        """Path of the folder of a solver's state between two iterations."""
        return self.path / names.STATE

    def exists(self) -> bool:
        """Return True when a run was started here."""
        return (self.path / names.LOCK).is_file()

    def claims_output(self) -> bool:
        """Return True when a run of halotile wrote, or was about to write, the output beside the directory."""
        check_access(self.path)
        claims = (names.JOB, names.PLAN, names.JOURNAL, names.PRIMARY)
        return any((self.path / name).is_file() for name in claims)

    def create(self) -> None:
        """Create the directory, private to its owner; durable on return."""
        self.disk.make_directory(self.path, _DIRECTORY_MODE)
        self.check_place()  # afterwards: what another user puts there now is not followed
        self.path.chmod(_DIRECTORY_MODE)

    def remove(self) -> None:
        """Remove the directory within :meth:`lock`; another call may take it as soon as its lock file, the last one, is gone."""
        with suppress(OSError):
            self.disk.remove_tree(self.path, last=(names.LOCK,))

    def check_place(self) -> None:
        """Refuse a path with anything that is not a run directory."""
        check_access(self.path)
        if self.path.is_symlink() or (self.path.exists() and not self._is_run_directory()):
            raise OutputRefused(
                f"{self.path} is where this run would keep its journal, but something that no run made is there already. Move it away, or write another path."
            )
        check_owner(self.path)
        self.check_files()

    def check_files(self) -> None:
        """Refuse a run directory with a directory in place of a file, or the reverse."""
        check_access(self.path)
        for name in sorted(names.NAMES):
            path, folder = self.path / name, name in (names.STATE, names.WORKERS)
            if path.exists() and path.is_dir() != folder:
                actual, expected = ("a file", "a directory") if folder else ("a directory", "a file")
                raise OutputRefused(
                    f"{path} is {actual}, and a run keeps {expected} there. Move it away, and run again."
                )

    def forget(self) -> None:
        """Remove the records of the run, beginning with the plan; the job stays, because it claims the output."""
        self._remove(*_PROGRESS, *_SHOWN)
        self.forget_state()

    def keep_run(self) -> None:
        """Keep a run of its own from here on, where the directory belonged to a further output."""
        self._remove(names.PRIMARY)

    def belong_to(self, primary: Path) -> None:
        """Belong to a further output of the run that is kept in ``primary``, and forget every other run."""
        relative = os.path.relpath(primary, self.path.parent)
        self._write(self.path / names.PRIMARY, {"run": relative})  # first: it claims the output
        self.forget()
        self._remove(names.JOB, names.CONFIG, names.BATCH, names.SCRIPT, names.FINISHED, names.FAILED)

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
        self._write(self.path / names.CONFIG, config)

    def read_job(self) -> dict[str, Any] | None:
        """The job, or None when there is none. Raises DamagedData when it cannot be read."""
        return self._read(self.job_path)

    def read_primary(self) -> str | None:
        """The directory that keeps the run, where this one lies beside a further output of it."""
        with suppress(DamagedData):
            run = (self._read(self.path / names.PRIMARY) or {}).get("run")
            return os.path.normpath(self.path.parent / run) if isinstance(run, str) else None
        return None

    @classmethod
    def beside(cls, output: str | OutputPath) -> RunDirectory:
        """Return the run directory of an output: ``clean.zarr.run`` beside ``clean.zarr``; see :func:`names.run_path`."""
        return cls(names.run_path(path_of(output)))

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
        with suppress(DamagedData):
            return self.read_plan()
        return None

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status atomically. It is not fsynced, because the journal is authoritative."""
        data = json.dumps(status).encode()
        try:
            self._write_text(names.STATUS, data)
        except OSError as error:
            if not is_full(error):
                raise
            self.disk.overwrite(self.status_path, data)  # the status must also be able to report a full disk

    def read_status(self) -> dict[str, Any] | None:
        """The status, or None when there is no valid one: a power cut may have damaged it."""
        check_access(self.path)
        with suppress(DamagedData):
            return validation.read_object(self.status_path, _ADVICE, validation.STATUS)
        return None

    def append_event(self, event: dict[str, Any]) -> None:
        """Append a line to the events; not fsynced."""
        if not self.events_path.exists():
            self._write_text(names.EVENTS, b"")
        self.disk.append(self.events_path, _json_lines([event]))

    def write_iterations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the results of a solver's iterations; not fsynced."""
        self._write_text(names.ITERATIONS, _json_lines(rows))

    def write_output_iterations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the iterations that led to the image about to be written; durable on return."""
        self._write(self.path / names.WRITTEN, {"iterations": list(rows)})

    def read_output_iterations(self) -> list[dict[str, Any]]:
        """The iterations that led to the image in the output; empty before it was started."""
        with suppress(DamagedData):
            rows = (self._read(self.path / names.WRITTEN) or {}).get("iterations")
            if isinstance(rows, list) and all(
                isinstance(row, dict) and isinstance(row.get("iteration"), int) for row in rows
            ):
                return rows
        return []

    def write_page(self, html: str) -> None:
        """Replace the page of the run; not fsynced."""
        self._write_text(names.PAGE, html.encode())

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
        self, patience_seconds: float = LOCK_SECONDS, cut_short: Callable[[], bool] = never
    ) -> Iterator[None]:
        """Be the only driver of this run inside the context.

        ``patience_seconds``: maximum time to wait for another driver; ``cut_short``: callback that returns True to end the wait early.
        """
        with self._locked_file(patience_seconds, cut_short) as fd:
            try:
                write_holder(fd)
                remove_partials(self.path, self.disk)
                yield
            except OSError as error:
                if isinstance(error, HalotileError) or self._is_lock_file(fd):
                    raise
                raise OutputRefused(
                    f"{self.path} was moved or removed during its run ({error}), and with it the journal. Put it back and run again to continue, or run with output.overwrite: true to start over."
                ) from error
            finally:
                if self.is_scratch and not (self.state_path / names.REPLACED).exists():
                    self.remove()

    @contextmanager
    def _locked_file(self, patience_seconds: float, cut_short: Callable[[], bool]) -> Iterator[int]:
        """Open and lock the lock file, or the next one where its holder has removed it."""
        while True:
            self.create()
            with self._lock_file(os.O_RDWR | os.O_CREAT) as fd:
                if not acquire(fd, patience_seconds, cut_short):
                    raise self._in_use(read_holder(fd))
                if self._is_lock_file(fd):
                    yield fd
                    return

    @contextmanager
    def _lock_file(self, flags: int) -> Iterator[int]:
        """Open the lock file."""
        fd = os.open(self.path / names.LOCK, flags | os.O_NOFOLLOW, FILE_MODE)
        try:
            yield fd
        finally:
            os.close(fd)

    def _is_lock_file(self, fd: int) -> bool:
        """Return True when the open file is the lock file in the directory."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path / names.LOCK))
        return False

    def check_free(self) -> None:
        """Refuse a directory that is locked by another driver."""
        if (holder := self.is_running()) is not None:
            raise self._in_use(holder)

    def _in_use(self, holder: dict[str, Any]) -> OutputInUse:
        return OutputInUse(
            f"{self.path} is in use: {describe(holder)} is writing this output. Wait until it ends, or write another path."
        )

    def is_running(self) -> dict[str, Any] | None:
        """The driver that runs here now, as ``pid``, ``host`` and ``started`` (Unix time); None if there is none."""
        with suppress(*GONE), self._lock_file(os.O_RDONLY) as fd:
            try:
                flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return read_holder(fd)
        return None

    def request_stop(self) -> None:
        """Ask all workers, including future ones, to start no further block. A full disk may prevent it."""
        with suppress(OSError):
            self._write_text(names.STOP, b"")

    def is_stopping(self) -> bool:
        """Return True when workers are to start no further block."""
        return (self.path / names.STOP).exists()

    def clear_stop(self) -> None:
        """Allow workers to start blocks."""
        self.disk.remove(self.path / names.STOP)

    def driver(self) -> dict[str, Any]:
        """The last driver that took the lock, as ``pid``, ``host`` and ``started``; empty when there was none."""
        with suppress(FileNotFoundError), self._lock_file(os.O_RDONLY) as fd:
            return read_holder(fd)
        return {}

    def _is_run_directory(self) -> bool:
        if not self.path.is_dir():
            return False
        if self.exists():
            return True
        # The lock file is not fsynced: after a power cut the other files may exist without it, the job first.
        files = {name for name in os.listdir(self.path) if not name.endswith(PARTIAL)}
        return files <= names.NAMES and (
            bool({names.JOB, names.PRIMARY} & files) or files.isdisjoint(_PROGRESS)
        )

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        self.disk.write_file(path, [json.dumps(value, indent=2).encode()], mode=FILE_MODE)

    def _write_text(self, name: str, text: bytes) -> None:
        """Replace a file atomically, without fsync."""
        self.disk.write_file(self.path / name, [text], mode=FILE_MODE, sync=False)

    def _read(self, path: Path) -> dict[str, Any] | None:
        check_access(self.path)
        return validation.read_object(path, _ADVICE)


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()
