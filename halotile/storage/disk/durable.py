"""The one seam through which everything durable is written.

A file that :meth:`Disk.write_file` returned from survives a power cut, under its own name and whole:
its bytes are written beside it, fsynced, renamed into place, and the directory is fsynced. A crash on
the way leaves at most a ``<name>.<random>.partial``, which :func:`sweep_partials` removes.

The single-underscore methods are the system calls, one each. Nothing else in this package writes, so
a test that overrides them sees, or loses, every operation there is.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a file that is still being written."""

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]

GONE = (FileNotFoundError, NotADirectoryError)
"""Errors of the system that say for sure that nothing is there; others may be over at another look."""

_IOV_MAX = 1024
_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}
_FILES_IN_FLIGHT = 32


class Disk:
    """Writes files so that they survive a power cut. It has no state, so it pickles."""

    def write_file(self, path: Path, buffers: Buffers, *, mode: int = 0o666, sync: bool = True) -> int:
        """Put a whole file at ``path``, in place of what stood there.

        Parameters
        ----------
        path : Path
            Where the file goes; its directory exists.
        buffers : sequence of bytes-like
            The contents, one after the other; they are not joined in memory.
        mode : int
            Permissions, from which the umask is taken away.
        sync : bool
            Whether the file is durable on return. Without, it is still replaced in one step.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        OSError
            When the disk is full or fails; ``path`` is then as it was.
        """
        return self.write_files([(path, buffers)], mode=mode, sync=sync)

    def write_files(
        self, files: Iterable[tuple[Path, Buffers]], *, mode: int = 0o666, sync: bool = True
    ) -> int:
        """Put many whole files in place; like :meth:`write_file`, with one fsync for each directory.

        ``files`` is drawn from lazily: contents are made when they are written and dropped after.
        """
        total = 0
        directories: dict[Path, None] = {}
        pending: list[tuple[Path, Path, int]] = []
        try:
            for path, buffers in files:
                partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
                fd = self._open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                pending.append((partial, path, fd))
                total += self._write_all(fd, buffers)
                directories[path.parent] = None
                if len(pending) == _FILES_IN_FLIGHT:
                    self._settle(pending, sync)
            self._settle(pending, sync)
        finally:
            self._abandon(pending)
        if sync:
            for directory in directories:
                self.sync_directory(directory)
        return total

    def append(self, path: Path, data: bytes) -> None:
        """Add to the end of an existing file; durable after :meth:`sync`."""
        with self._opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            self._write_all(fd, [data])

    def overwrite(self, path: Path, data: bytes) -> None:
        """Put other contents into a file in place: a full disk takes them where they are no longer. Not durable, and not in one step."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._write_all(fd, [data])
            self._truncate(fd, len(data))

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file off after ``size`` bytes; durable on return."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._truncate(fd, size)
            self._fsync(fd)

    def sync(self, path: Path) -> None:
        """Make what was written to a file durable."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable: files created, renamed and removed in it."""
        with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            try:
                self._fsync(fd)
            except OSError as error:
                if error.errno not in _NOT_FOR_DIRECTORIES:
                    raise

    def make_directory(self, path: Path, mode: int = 0o777, *, parents: bool = True) -> None:
        """Make a directory, and with ``parents`` those above it that are missing; durable on return.

        One that exists already is made durable too: whoever made it may not have come that far.
        """
        if parents and not path.parent.exists():
            self.make_directory(path.parent)
        with suppress(FileExistsError):
            self._mkdir(path, mode)
        self.sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there; durable on return."""
        with suppress(FileNotFoundError):
            self._unlink(path)
            self.sync_directory(path.parent)

    def remove_tree(self, path: Path, *, last: Sequence[str] = ()) -> None:
        """Remove a directory and all that is in it; symlinks are removed, never followed.

        Parameters
        ----------
        path : Path
            The directory.
        last : sequence of str
            Names directly in it that outlive all others, also through a power cut: a tree that is half
            removed can still be told by them.
        """
        keep = [path / name for name in last if (path / name).is_file()]
        for entry in list(os.scandir(path)):
            if path / entry.name not in keep:
                self._remove_entry(entry)
        if keep:
            self.sync_directory(path)
        for file in keep:
            self._unlink(file)
        self._rmdir(path)
        self.sync_directory(path.parent)

    def _remove_entry(self, entry: os.DirEntry[str]) -> None:
        if not entry.is_dir(follow_symlinks=False):
            self._unlink(Path(entry.path))
            return
        for inner in list(os.scandir(entry.path)):
            self._remove_entry(inner)
        self._rmdir(Path(entry.path))

    def _settle(self, pending: list[tuple[Path, Path, int]], sync: bool) -> None:
        """Give written files their names. All are written before the first fsync: one commit serves many."""
        while pending:
            partial, path, fd = pending[0]
            if sync:
                self._fsync(fd)
            self._replace(partial, path)
            pending.pop(0)
            os.close(fd)

    def _abandon(self, pending: list[tuple[Path, Path, int]]) -> None:
        for partial, _, fd in pending:
            os.close(fd)
            with suppress(OSError):
                self._unlink(partial)

    def _write_all(self, fd: int, buffers: Buffers) -> int:
        """Write every buffer, whatever the system takes at once."""
        queue = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = sum(map(len, queue))
        first = 0
        while first < len(queue):
            written = self._write(fd, queue[first : first + _IOV_MAX])
            while first < len(queue) and written >= len(queue[first]):
                written -= len(queue[first])
                first += 1
            if written:
                queue[first] = queue[first][written:]
        return total

    @contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        fd = self._open(path, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, path: Path, flags: int, mode: int) -> int:
        # A folder may be a symlink: it is only opened to be synced.
        follow = 0 if flags & os.O_DIRECTORY else os.O_NOFOLLOW
        return os.open(path, flags | follow | os.O_CLOEXEC, mode)

    def _write(self, fd: int, buffers: Buffers) -> int:
        return os.writev(fd, buffers)

    def _fsync(self, fd: int) -> None:
        os.fsync(fd)

    def _truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def _replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def _mkdir(self, path: Path, mode: int) -> None:
        os.mkdir(path, mode)

    def _unlink(self, path: Path) -> None:
        os.unlink(path)

    def _rmdir(self, path: Path) -> None:
        os.rmdir(path)


def is_full(error: OSError) -> bool:
    """Whether an error says that no room is left, on the disk or in one's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


DISK = Disk()
"""The disk of this machine."""


def sweep_partials(root: Path, disk: Disk = DISK) -> int:
    """Remove the ``*.partial`` files that killed writers left under ``root``; symlinks are not followed.

    Only for a directory that nobody is writing to. Returns how many there were.
    """
    count = 0
    for folder, _, files in os.walk(root):
        for name in files:
            if name.endswith(PARTIAL):
                disk._unlink(Path(folder, name))
                count += 1
    return count
