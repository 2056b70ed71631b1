"""Durable writes to the local file system.

After :meth:`Disk.write_file` returns, the file survives a power cut, complete and under its own name:
its bytes are written to a file beside it and fsynced, that file is renamed, and the directory is fsynced. A crash in between
leaves at most a ``<name>.<random>.partial``, which :func:`remove_partials` removes.

The methods with a leading underscore at the end of the class each wrap one system call. Nothing else in this package writes, so
a test that overrides them can observe, or drop, every operation.
"""

import ctypes
import errno
import glob
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from halotile.errors import DiskRefused, HalotileError
from halotile.storage.disk.object_path import OutputPath, files_below
from halotile.storage.io_threads import IO_THREADS

PARTIAL = ".partial"  # suffix of a file that is still being written

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]

# System errors that prove that a file is absent; others may be temporary.
GONE = (FileNotFoundError, NotADirectoryError)

_IOV_MAX = 1024
_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}
_FILES_IN_FLIGHT = 32
_BEGIN_TO_WRITE = 2
# Call of Linux that lets the disk begin with what was written to a file.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)


class Disk:
    """Writes that survive a power cut. It has no state, so it can be pickled."""

    def write_file(self, path: Path, buffers: Buffers, *, mode: int = 0o666, sync: bool = True) -> int:
        """Write a complete file to ``path``, replacing an existing one atomically.

        ``path``: path of the file; its directory exists; ``buffers``: contents, one after the other; they are not joined in memory; ``mode``:
        permissions, before the umask is applied; ``sync``: true: the file is durable on return. False: it is still replaced atomically.

        Returns
        -------
        int
            Bytes written.
        """
        return self.write_files([(path, buffers)], mode=mode, sync=sync)

    def write_files(self, files: Iterable[tuple[Path, Buffers]], *, mode: int = 0o666, sync: bool = True) -> int:
        """Write several complete files, like :meth:`write_file`, with one fsync for each directory.

        ``files`` is consumed lazily, so that only the contents of one file are in memory at a time.
        """
        total = 0
        directories: set[Path] = set()
        pending: list[tuple[Path, Path, int]] = []
        try:
            for path, buffers in files:
                partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
                fd = self._open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                pending.append((partial, path, fd))
                total += self._write_all(fd, buffers)
                if sync:
                    self._begin_fsync(fd)
                directories.add(path.parent)
                if len(pending) == _FILES_IN_FLIGHT:
                    self._publish(pending, sync)
            self._publish(pending, sync)
        finally:
            self._discard(pending)
        if sync:
            for directory in sorted(directories):
                self.sync_directory(directory)
        return total

    def append(self, path: Path, data: bytes) -> None:
        """Append to an existing file; durable after :meth:`sync`."""
        with self._opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            self._write_all(fd, [data])

    def overwrite(self, path: Path, data: bytes) -> None:
        """Overwrite a file in place, which works on a full disk when the file does not grow. Neither durable nor atomic."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._write_all(fd, [data])
            self._truncate(fd, len(data))

    def truncate(self, path: Path, size: int) -> None:
        """Truncate a file to ``size`` bytes; durable on return."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._truncate(fd, size)
            self._fsync(fd)

    def sync(self, path: Path) -> None:
        """Make earlier writes to a file durable."""
        with self._opened(path, os.O_WRONLY) as fd:
            self._fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable: creations, renames and removals."""
        with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            try:
                self._fsync(fd)
            except OSError as error:
                if error.errno not in _NOT_FOR_DIRECTORIES:
                    raise

    def make_directory(self, path: Path, mode: int = 0o777, *, parents: bool = True) -> None:
        """Create a directory, and with ``parents`` its missing parents; durable on return.

        An existing directory is made durable too, because its creator may not have done so yet.
        """
        if parents and not path.parent.exists():
            self.make_directory(path.parent)
        with suppress(FileExistsError):
            self._mkdir(path, mode)
        self.sync_directory(path.parent)

    def make_folders(self, path: Path, top: Path, known: set[Path]) -> None:
        """Make the directories of a file below ``top``, which exists, durable once for each set of ``known`` ones.

        An existing directory may not survive a power cut yet, because another process may not have fsynced it.
        """
        folder = path.parent
        if folder == top or (folder in known and folder.exists()):
            return
        self.make_folders(folder, top, known)
        self.make_directory(folder, parents=False)
        known.add(folder)

    def move(self, old: Path, new: Path) -> None:
        """Move a file or directory to another directory of the file system; durable on return."""
        self._replace(old, new)
        self.sync_directory(new.parent)
        self.sync_directory(old.parent)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists; durable on return."""
        with suppress(FileNotFoundError):
            self._unlink(path)
            self.sync_directory(path.parent)

    def remove_tree(self, path: Path, *, last: Sequence[str] = ()) -> None:
        """Remove a directory and its contents; symlinks are removed, never followed.

        ``path``: directory; ``last``: names of files directly in it to remove last, even across a power cut: a partly removed tree can still be
        recognized by them.
        """
        if path.is_symlink():
            self._unlink(path)
            return
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

    def _publish(self, pending: list[tuple[Path, Path, int]], sync: bool) -> None:
        """Rename written files to their final names. All are written before the first fsync, so one commit covers many."""
        if sync:
            IO_THREADS.run_all(self._fsync, [fd for _, _, fd in pending])
        while pending:
            partial, path, fd = pending[0]
            self._replace(partial, path)
            pending.pop(0)
            os.close(fd)

    def _discard(self, pending: list[tuple[Path, Path, int]]) -> None:
        for partial, _, fd in pending:
            os.close(fd)
            with suppress(OSError):
                self._unlink(partial)

    def _write_all(self, fd: int, buffers: Buffers) -> int:
        """Write every buffer, with as many system calls as needed."""
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
        # Directories may be symlinks: they are only opened for fsync.
        follow = 0 if flags & os.O_DIRECTORY else os.O_NOFOLLOW
        return os.open(path, flags | follow | os.O_CLOEXEC, mode)

    def _write(self, fd: int, buffers: Buffers) -> int:
        return os.writev(fd, buffers)

    def _fsync(self, fd: int) -> None:
        os.fsync(fd)

    def _begin_fsync(self, fd: int) -> None:
        """Let the disk work while the next file is made: :meth:`_fsync` then waits less, and reports every failure."""
        if _SYNC_FILE_RANGE is not None:
            _SYNC_FILE_RANGE(fd, ctypes.c_int64(0), ctypes.c_int64(0), _BEGIN_TO_WRITE)

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
    """Return True when an error means a full disk or an exhausted quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def refusing_full(problem: str, remedy: str = "Free some space and run again.") -> Iterator[None]:
    """Refuse with the problem and the remedy when the disk is full."""
    try:
        yield
    except OSError as error:
        if isinstance(error, HalotileError) or not is_full(error):
            raise
        raise DiskRefused(f"the disk ran full: {problem} ({error}). {remedy}") from error


DISK = Disk()  # the default instance


def remove_partials(root: OutputPath, disk: Disk = DISK) -> int:
    """Remove the ``*.partial`` files of killed writers under ``root`` and return their number; a store has none.

    No process may be writing to the directory. Symlinks are not followed.
    """
    if not isinstance(root, Path):
        return 0
    if not root.is_dir():
        beside = [path for path in root.parent.glob(f"{glob.escape(root.name)}.*{PARTIAL}") if path.is_file()]
        for path in beside:
            disk._unlink(path)
        return len(beside)
    partials = [name for name in files_below(root) if name.endswith(PARTIAL)]
    for name in partials:
        disk._unlink(root / name)
    return len(partials)
