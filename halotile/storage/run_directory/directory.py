"""The directory of a run: what it was asked, how far it is, and who may write.

Only the owner may enter it: it names paths, and whoever can write it can steer a resumed run. The locks
are ``flock``: the system lets go of them when a process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import DamagedData, HalotileError, OutputInUse, OutputRefused
from halotile.storage.disk.durable import DISK, PARTIAL, Disk, is_full, sweep_partials
from halotile.storage.disk.place import check_entry, check_owner
from halotile.storage.run_directory import plausible
from halotile.storage.run_directory.checksummed_lines import digest
from halotile.storage.run_directory.locks import acquire, describe, flock, never, read_holder, write_holder
from halotile.storage.run_directory.names import (
    CONFIG,
    EVENTS,
    ITERATIONS,
    JOB,
    JOURNAL,
    LOCK,
    NAMES,
    PLAN,
    PRIMARY,
    REPORT,
    STATE,
    STATUS,
    STOP,
    WORKERS,
    WRITTEN,
)

_SEAL = "digest"
_DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
LOCK_SECONDS = 0.5
"""Longer than :meth:`RunDirectory.is_running` holds the lock to see whether it is free."""


@dataclass(frozen=True)
class RunDirectory:
    """One run directory. Nothing is made before :meth:`lock` or :meth:`create`.

    Parameters
    ----------
    path : Path
        The directory.
    disk : Disk
        What writes in it.
    """

    path: Path
    disk: Disk = DISK

    @property
    def job_path(self) -> Path:
        """The job as it was asked for."""
        return self.path / JOB

    @property
    def plan_path(self) -> Path:
        """The plan."""
        return self.path / PLAN

    @property
    def journal_path(self) -> Path:
        """The journal of blocks."""
        return self.path / JOURNAL

    @property
    def status_path(self) -> Path:
        """How far the run is."""
        return self.path / STATUS

    @property
    def events_path(self) -> Path:
        """What happened."""
        return self.path / EVENTS

    @property
    def iterations_path(self) -> Path:
        """What a solver's iterations came to, one JSON object a line."""
        return self.path / ITERATIONS

    @property
    def state_path(self) -> Path:
        """A folder for what a solver keeps between two iterations."""
        return self.path / STATE

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / LOCK).is_file()

    def claims_output(self) -> bool:
        """Whether the output beside it is, or was about to be, the work of a run of ours."""
        check_entry(self.path)
        return any(path.is_file() for path in (self.job_path, self.plan_path, self.journal_path))

    def create(self) -> None:
        """Make the directory, for its owner alone; durable on return.

        Raises
        ------
        OutputRefused
            When something else stands there, or another user made it.
        """
        self.check_place()
        self.disk.make_directory(self.path, _DIRECTORY_MODE)
        check_owner(self.path)
        self.path.chmod(_DIRECTORY_MODE)

    def check_place(self) -> None:
        """Refuse a path where something stands that no run made.

        Raises
        ------
        OutputRefused
            When that is so.
        """
        check_entry(self.path)
        if self.path.is_symlink() or (self.path.exists() and not self._is_ours()):
            raise OutputRefused(
                f"{self.path} is where this run would keep its journal, and something that no run made stands there. "
                "Move it away, or write another output.path."
            )
        check_owner(self.path)
        self.check_files()

    def check_files(self) -> None:
        """Refuse a run directory with a directory where a file belongs, or the reverse.

        Raises
        ------
        OutputRefused
            Naming the first, or when it is closed to this user.
        """
        check_entry(self.path)
        for name in sorted(NAMES):
            path, folder = self.path / name, name in (STATE, WORKERS)
            if path.exists() and path.is_dir() != folder:
                stands, wanted = ("a file", "a directory") if folder else ("a directory", "a file")
                raise OutputRefused(
                    f"{path} is {stands}, and a run keeps {wanted} there. Move it away, and run again."
                )

    def forget(self) -> None:
        """Remove what is known of the run, the plan first; the job stays, it claims the output."""
        for path in (
            self.plan_path,
            self.journal_path,
            self.status_path,
            self.events_path,
            self.iterations_path,
            self.path / WRITTEN,
            self.path / REPORT,
            self.path / PRIMARY,
        ):
            self.disk.remove(path)
        self.forget_state()

    def forget_state(self) -> None:
        """Remove a solver's state."""
        if self.state_path.is_dir():
            self.disk.remove_tree(self.state_path)

    def write_job(self, job: dict[str, Any]) -> None:
        """Keep the job; durable on return."""
        self._write(self.job_path, job)

    def write_config(self, config: dict[str, Any]) -> None:
        """Keep the configuration with every size decided; durable on return."""
        self._write(self.path / CONFIG, config)

    def read_job(self) -> dict[str, Any] | None:
        """The job, or None when there is none. Raises DamagedData when it cannot be read."""
        return self._read(self.job_path)

    def write_primary(self, path: Path) -> None:
        """Point to the directory that keeps the run, where this one lies beside a further output; durable on return."""
        self._write(self.path / PRIMARY, {"run": str(path)})

    def read_primary(self) -> str | None:
        """The directory that keeps the run, where this one lies beside a further output of it."""
        with contextlib.suppress(DamagedData):
            run = (self._read(self.path / PRIMARY) or {}).get("run")
            return run if isinstance(run, str) else None
        return None

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Keep the plan, under a checksum: much is built on what it says. Durable on return."""
        self._write(self.plan_path, plan | {_SEAL: digest(plan)})

    def remember(self, **found: Any) -> None:
        """Add to the plan what was found on the way; durable on return."""
        if plan := self.whole_plan():
            self.write_plan(plan | found)

    def read_plan(self) -> dict[str, Any] | None:
        """The plan, or None when there is none. Raises DamagedData when it is not as it was written."""
        plan = self._read(self.plan_path)
        if plan is not None and plan.pop(_SEAL, None) != digest(plan):
            raise self._damaged(self.plan_path)
        return plan

    def whole_plan(self) -> dict[str, Any] | None:
        """The plan, or None when there is none that can be read: the journal tells whose it is."""
        with contextlib.suppress(DamagedData):
            return self.read_plan()
        return None

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status in one step. It is not fsynced: the journal is what counts."""
        data = json.dumps(status).encode()
        try:
            self.disk.write_file(self.status_path, [data], mode=FILE_MODE, sync=False)
        except OSError as error:
            if not is_full(error):
                raise
            self.disk.overwrite(self.status_path, data)  # that it is full is to be told as well

    def read_status(self) -> dict[str, Any] | None:
        """The status, or None when there is none that can be read: a power cut may have cost it. What it tells of is of its kind."""
        with contextlib.suppress(DamagedData):
            status = self._read(self.status_path)
            return status if plausible.fits(status or {}, plausible.STATUS) else None
        return None

    def append_event(self, event: dict[str, Any]) -> None:
        """Add a line to the events; not fsynced."""
        if not self.events_path.exists():
            self.disk.write_file(self.events_path, [b""], mode=FILE_MODE, sync=False)
        self.disk.append(self.events_path, json.dumps(event).encode() + b"\n")

    def write_iterations(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace what is told of a solver's iterations; not fsynced."""
        self.disk.write_file(self.iterations_path, [_json_lines(rows)], mode=FILE_MODE, sync=False)

    def append_iteration(self, row: Mapping[str, Any]) -> None:
        """Add an iteration to it."""
        self.disk.append(self.iterations_path, _json_lines([row]))

    def write_written(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Tell which iterations led to the image that is about to be written; durable on return."""
        self._write(self.path / WRITTEN, {"iterations": list(rows)})

    def read_written(self) -> list[dict[str, Any]]:
        """The iterations that led to the image that the output holds; none before it was begun."""
        with contextlib.suppress(DamagedData):
            rows = (self._read(self.path / WRITTEN) or {}).get("iterations")
            if isinstance(rows, list) and all(
                isinstance(row, dict) and isinstance(row.get("iteration"), int) for row in rows
            ):
                return rows
        return []

    def write_report(self, html: str) -> None:
        """Replace Dask's report of the run; not fsynced."""
        self.disk.write_file(self.path / REPORT, [html.encode()], mode=FILE_MODE, sync=False)

    def read_events(self) -> Iterator[dict[str, Any]]:
        """The events in order; lines that cannot be read, or are no objects, are left out."""
        if not self.events_path.exists():
            return
        with self.events_path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(event := json.loads(line), dict):
                        yield event

    @contextmanager
    def lock(
        self, patience_seconds: float = LOCK_SECONDS, cut_short: Callable[[], bool] = never
    ) -> Iterator[None]:
        """Be the one driver of this run, for the length of the context.

        Parameters
        ----------
        patience_seconds : float
            How long another driver is waited for.
        cut_short : callable
            Whether it is to be waited for no longer.

        Raises
        ------
        OutputInUse
            When another driver is: the message says which.
        OutputRefused
            When something else stands at the path.
        """
        self.create()
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            if not acquire(fd, patience_seconds, cut_short):
                raise self._in_use(read_holder(fd))
            write_holder(fd)
            sweep_partials(self.path, self.disk)
            yield
        except OSError as error:
            if isinstance(error, HalotileError) or self._holds(fd):
                raise
            raise OutputRefused(
                f"{self.path} was moved or removed while its run was at work ({error}), and with it the journal of what is done. "
                "Put it back and run again to go on, or run with output.overwrite: true to start over."
            ) from error
        finally:
            os.close(fd)

    def _holds(self, fd: int) -> bool:
        """Whether the lock that is held is the one that stands here."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path / LOCK))
        return False

    def check_free(self) -> None:
        """Refuse a directory that another driver holds.

        Raises
        ------
        OutputInUse
            When one does: the message says which.
        """
        if (holder := self.is_running()) is not None:
            raise self._in_use(holder)

    def _in_use(self, holder: dict[str, Any]) -> OutputInUse:
        return OutputInUse(
            f"{self.path} is in use: {describe(holder)} is writing this output. "
            "Wait until it ends, or write another output.path."
        )

    def is_running(self) -> dict[str, Any] | None:
        """The driver that runs here now, as ``pid``, ``host`` and ``started`` (Unix time); None if none does."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_holder(fd)
        finally:
            os.close(fd)
        return None

    def ask_to_stop(self) -> None:
        """Ask the workers, also those yet to start, to begin no further block. A full disk may cost it."""
        with contextlib.suppress(OSError):
            self.disk.write_file(self.path / STOP, [b""], mode=FILE_MODE, sync=False)

    def is_stopping(self) -> bool:
        """Whether workers are to begin no further block."""
        return (self.path / STOP).exists()

    def clear_stop(self) -> None:
        """Let workers begin blocks."""
        self.disk.remove(self.path / STOP)

    def driver(self) -> dict[str, Any]:
        """The driver that took the lock last, as ``pid``, ``host`` and ``started``; empty when none ever did."""
        try:
            fd = os.open(self.path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return {}
        try:
            return read_holder(fd)
        finally:
            os.close(fd)

    def _is_ours(self) -> bool:
        if not self.path.is_dir():
            return False
        if self.exists():
            return True
        # The lock itself is not fsynced: after a power cut the other files may stand there without it, the job first.
        names = {name for name in os.listdir(self.path) if not name.endswith(PARTIAL)}
        return names <= NAMES and (
            bool({JOB, PRIMARY} & names) or not names & {PLAN, JOURNAL, STATUS, EVENTS}
        )

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        self.disk.write_file(path, [json.dumps(value, indent=2).encode()], mode=FILE_MODE)

    def _read(self, path: Path) -> dict[str, Any] | None:
        check_entry(self.path)
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError, IsADirectoryError):
            value = None
        if not isinstance(value, dict):
            raise self._damaged(path)
        return value

    @staticmethod
    def _damaged(path: Path) -> DamagedData:
        return DamagedData(f"{path} is damaged. Run with --fresh to start over.")


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()
