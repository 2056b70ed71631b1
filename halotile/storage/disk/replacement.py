"""Files and folders that are made beside their place, and moved there once they are complete."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from halotile.errors import OutputInUse, OutputRefused
from halotile.storage.disk.durable import DISK, PARTIAL, Buffers, is_full, refusing_full
from halotile.storage.run_directory.directory import FILE_MODE, LOCK_SECONDS, RunDirectory
from halotile.storage.run_directory.locks import acquire, describe, read_holder, write_holder


@contextmanager
def replacing(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a new path to write to. On success it replaces ``path``, durably; on failure ``path`` is unchanged.

    The new path is in a folder beside ``path`` that is private to this user and has an unpredictable name. Scratch files may be put
    there too. The folder is removed at the end; if the process is killed, the next call for ``path`` removes it.

    Parameters
    ----------
    path : Path
        Path of a file or a folder.
    check : callable
        Called at the beginning and again before the replacement; it raises an error where ``path`` must not be replaced.

    Raises
    ------
    OutputInUse
        When another process is writing ``path``.
    OutputRefused
        When this user may not write there.
    DiskRefused
        When the disk is full.
    """
    check()
    place = path.absolute()
    with refusing_full(f"{path} cannot be written"), _locked(place):
        _check_free(place)
        with TemporaryDirectory(
            prefix=f".{place.name}.", suffix=PARTIAL, dir=place.parent, ignore_cleanup_errors=True
        ) as folder:
            made = Path(folder, "made")
            yield made
            for name, _, files in os.walk(made, topdown=False):
                for file in files:
                    DISK.sync(Path(name, file))
                DISK.sync_directory(Path(name))
            if made.is_file():
                DISK.sync(made)
            check()
            _check_free(place)
            if place.is_dir() and not place.is_symlink():
                DISK.move(place, made.with_name("replaced"))
            DISK.move(made, place)


def replace_file(path: Path, buffers: Buffers) -> None:
    """Replace a file by the contents of buffers; errors as of :func:`replacing`."""
    with replacing(path) as made:
        DISK.write_file(made, buffers, sync=False)


def _check_free(place: Path) -> None:
    """Refuse a place that a run is writing."""
    if (run := RunDirectory.beside(place)).path.is_dir():
        run.of_run().check_free()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Be the only process that replaces ``place``, and remove the folders of those that were killed."""
    lock = place.with_name(f".{place.name}.lock")
    with ExitStack() as stack:
        while True:
            fd = _open(lock, place)
            stack.callback(os.close, fd)
            try:
                is_alone = acquire(fd, LOCK_SECONDS)
            except (
                OutputRefused
            ):  # no locks here: names keep two writers apart, and the last one to end replaces ``place``
                lock.unlink(missing_ok=True)
                yield
                return
            if not is_alone:
                holder = describe(read_holder(fd))
                raise OutputInUse(
                    f"{place} is in use: {holder} is writing it. Wait until it ends, or write another path."
                )
            with suppress(FileNotFoundError):  # the last holder removed it
                if os.path.samestat(os.fstat(fd), os.lstat(lock)):
                    break
        stack.callback(partial(lock.unlink, missing_ok=True))
        write_holder(fd)
        random = "?" * 8  # of tempfile
        for left in place.parent.glob(f".{glob.escape(place.name)}.{random}{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _open(lock: Path, place: Path) -> int:
    """Open a lock file of this user."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        status, problem = os.fstat(fd), "is not a file of yours alone"
        if status.st_uid == os.geteuid() and status.st_nlink <= 1:
            return fd
        os.close(fd)
    except OSError as error:
        if is_full(error):
            raise
        problem = f"cannot be made ({error.strerror})"
    raise OutputRefused(
        f"{place} cannot be written: {lock} {problem}. Remove it, or write a path in a folder of your own."
    )
