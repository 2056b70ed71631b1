"""A result that is one file, written as the only block of a pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halotile.errors import OutputRefused
from halotile.storage.grid import Block, Grid
from halotile.storage.sharded.output import FileLayout, WrittenBlock
from halotile.tasks.block import Receipt

ONE_BLOCK = Grid((1,), (1,), ((0, 0),))


@dataclass(frozen=True)
class WriteFile:
    """Writes a result, as a task of one block."""

    encode: Callable[[], bytes]  # returns the content of the file; called on a worker
    path: Path  # file to write
    layout: FileLayout
    grid: Grid = ONE_BLOCK
    overlap: bool = False
    io_threads: int = 1
    batch: int = 1

    def stages(self) -> FileStages:
        """The stages of the block."""
        return FileStages(self)


@dataclass
class FileStages:
    """Encoding and writing of a result."""

    task: WriteFile
    batch: int = 1
    device_peak_bytes: int = 0

    def check(self) -> None:
        """Nothing can be refused."""

    def read(self, block: Block) -> bytes:
        """Encode the result."""
        return self.task.encode()

    def compute(self, block: Block, what_was_read: bytes, receipt: Receipt) -> bytes:
        """Return it as it is."""
        return what_was_read

    def write(self, block: Block, result: bytes, receipt: Receipt) -> None:
        """Replace the empty file that the run has made."""
        with suppress(FileNotFoundError):
            if (present := self.task.path.read_bytes()) not in (b"", result):
                raise OutputRefused(
                    f"{self.task.path} has {len(present):,} bytes that no run wrote. Move it away and run again to write the result."
                )
        receipt.enter(block.number, [WrittenBlock(*self.task.layout.write(self.task.path, result))])
