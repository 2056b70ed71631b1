"""Reads and writes of outputs, on a disk or in an object store.

An object that the store has acknowledged is durable, and whoever reads sees the old one or the new one: a put is a write, an fsync and a
rename in one. The store checks what it was sent against a SHA-256 that the request carries.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any, Protocol

from halotile.storage.disk.durable import DISK, Buffers
from halotile.storage.disk.object_path import ObjectPath, OutputPath, store_errors
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.sharded.shards import encoded_digest

DIGEST = "halotile"  # name of the metadata of an object with the digest of its shard
MOST_PUT_BYTES = 5 * 10**9  # size of an object that stores take in one request
READS_AT_ONCE = 32  # requests at once for the checksums of shards: one takes milliseconds, in which nothing is computed


class OutputDisk(Protocol):
    """Durable writes of outputs; the paths are those of one kind."""

    def write_file(self, path: Any, buffers: Buffers) -> int:
        """Write a complete file, replacing an existing one atomically; durable on return."""

    def write_files(self, files: Iterable[tuple[Any, Buffers]]) -> int:
        """Write several complete files, taken lazily; durable on return. Returns the bytes written."""

    def make_directory(self, path: Any, *, parents: bool = True) -> None:
        """Create a directory; durable on return."""

    def make_folders(self, path: Any, top: Any, known: set[Any]) -> None:
        """Create the directories of a file below ``top``, which exists, unless they are ``known``; durable on return."""

    def remove_tree(self, path: Any, *, last: Sequence[str] = ()) -> None:
        """Remove everything below a path; the files ``last`` come last."""


class ObjectDisk:
    """Writes to an object store. It has no state, so it can be pickled."""

    def write_file(self, path: ObjectPath, buffers: Buffers) -> int:
        """Put an object."""
        return self.write_files([(path, buffers)])

    def write_files(self, files: Iterable[tuple[ObjectPath, Buffers]]) -> int:
        """Put several objects, as many at once as there are I/O threads."""
        return sum(IO_THREADS.map(self._put, files))

    def make_directory(self, path: ObjectPath, *, parents: bool = True) -> None:
        """Do nothing: there are no directories."""

    def make_folders(self, path: ObjectPath, top: ObjectPath, known: set[ObjectPath]) -> None:
        """Do nothing: there are no directories."""

    def remove_tree(self, path: ObjectPath, *, last: Sequence[str] = ()) -> None:
        """Delete the objects below a path, those named ``last`` when all others are gone."""
        import obstore

        below = list(path.objects())
        with store_errors(path):
            for is_last in (False, True):
                if names := [(path / name).key for name in below if (name in last) is is_last]:
                    obstore.delete(path.store, names)

    def _put(self, file: tuple[ObjectPath, Buffers]) -> int:
        import obstore

        path, buffers = file
        digest = {DIGEST: encoded_digest(buffers).hex()}
        with store_errors(path):
            obstore.put(path.store, path.key, buffers, attributes=digest, use_multipart=False)
        return sum(map(len, buffers))


def disk_of(path: OutputPath) -> OutputDisk:
    """Return the disk that an output is written to."""
    return ObjectDisk() if isinstance(path, ObjectPath) else DISK


class StoredFile:
    """A file that is read.

    Parameters
    ----------
    file : FileIO
        The open file.
    """

    # digest of the shard that it was when it was written, known once a part of it was read; None: unknown
    digest: bytes | None = None

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return a part, shorter where the file ends."""
        return os.pread(self._file.fileno(), nbytes, offset)

    def whole(self) -> bytes:
        """Return all of it."""
        return self._file.read()


class StoredObject(StoredFile):
    """An object that is read."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.size = path.facts()["size"]

    def read(self, nbytes: int, offset: int) -> bytes:
        """Return a part, shorter where the object ends."""
        import obstore

        if offset >= self.size:
            return b""
        with store_errors(self._path):
            part = obstore.get(self._path.store, self._path.key, options={"range": (offset, offset + nbytes)})
            with suppress(KeyError, ValueError):  # a copy may lack it
                self.digest = bytes.fromhex(part.attributes[DIGEST])
            return bytes(part.bytes())

    def whole(self) -> bytes:
        """Return all of it."""
        return self._path.read_bytes()


@contextmanager
def opened(path: OutputPath) -> Iterator[StoredFile]:
    """Open a file, or an object, for reading."""
    if isinstance(path, ObjectPath):
        yield StoredObject(path)
        return
    with open(path, "rb", buffering=0) as file:
        yield StoredFile(file)
