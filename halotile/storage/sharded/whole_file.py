"""Outputs that are one file, which is replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from halotile.storage.disk.durable import DISK, GONE, Disk
from halotile.storage.disk.place import check_place
from halotile.storage.sharded.shards import digest_of

UNREADABLE = "cannot be read"
"""End of the problem of a file that another attempt may be able to read."""


@dataclass(frozen=True)
class FileLayout:
    """The layout of an output that is one file; empty until its only block is written.

    Parameters
    ----------
    file_bytes : int
        Size of the file, at most.
    """

    file_bytes: int
    shape: ClassVar[tuple[int, ...]] = (1,)
    ome: ClassVar[bool] = False
    files: ClassVar[int] = 1
    inodes: ClassVar[int] = 1

    @property
    def size_bytes(self) -> int:
        """Size of the file, at most."""
        return self.file_bytes

    def documents(self) -> dict[str, bytes]:
        """The metadata files: none."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return asdict(self)

    def describe(self) -> Mapping[str, Any]:
        """Figures of the output in a plan."""
        return {"format": "file"}

    def create(self, path: Path, disk: Disk = DISK, *, overwrite: bool = False) -> None:
        """Create an empty file; durable on return.

        Raises
        ------
        OutputRefused
            When something is there that may not be replaced.
        """
        check_place(path, overwrite=overwrite, is_file=True)
        disk.write_file(path, [b""])

    def write(self, path: Path, content: bytes, disk: Disk = DISK) -> tuple[int, bytes]:
        """Replace the file; durable on return. Returns its size and its digest."""
        return disk.write_file(path, [content]), digest_of([content])

    def inspect(self, path: Path) -> tuple[list[str], bytes]:
        """The problem of the file, and its digest if there is none."""
        try:
            content = path.read_bytes()
        except GONE:
            return ["the file is missing"], b""
        except IsADirectoryError:
            return ["there is a directory in place of the file"], b""
        except OSError as error:
            return [f"the file {UNREADABLE}: {error.strerror}"], b""
        return ([], digest_of([content])) if content else (["the file is empty"], b"")
