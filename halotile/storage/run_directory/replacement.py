"""Files and folders that are made beside their place, and moved there once they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halotile.storage.disk.durable import DISK, PARTIAL, refusing_full
from halotile.storage.disk.place import check_parents
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.names import REPLACED


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
    with refusing_full(f"{path} cannot be written"), work.lock():
        made, replaced = work.state_path / "made", work.state_path / REPLACED
        if replaced.exists() and not os.path.lexists(place):  # a call was killed between its two moves
            DISK.move(replaced, place)
            check()  # it saw a free place before
        work.forget_state()
        work.state_path.mkdir()
        run.of_run().check_free()
        yield made
        for entry in (made, *made.rglob("*")):
            (DISK.sync_directory if entry.is_dir() else DISK.sync)(entry)
        check()
        run.of_run().check_free()
        try:
            if place.is_dir() and not place.is_symlink():
                DISK.move(place, replaced)
            DISK.move(made, place)
        except BaseException:
            if replaced.exists() and not os.path.lexists(place):
                DISK.move(replaced, place)
            raise
        work.forget_state()  # until then the scratch folder stays: it may hold the only copy
