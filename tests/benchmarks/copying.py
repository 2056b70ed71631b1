"""A copy of an image by a worker's own reads and writes, with nothing computed between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halotile.storage.grid import Block, Grid
from halotile.storage.io_threads import IO_THREADS
from halotile.storage.rim import Pixels, Readable
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.block import BlockRunner, Receipt
from halotile.tasks.devices.device import prepare_process


@dataclass(frozen=True)
class Copy:
    """What a copy does to a block: one thread reads the next and another one writes the last, as in a job on a GPU."""

    source: Readable
    writer: ShardWriter
    grid: Grid
    io_threads: int
    overlap = True
    batch = 1

    def stages(self) -> Copy:
        """There is nothing to load."""
        return self

    def check(self) -> None:
        """Nothing is computed."""

    def read(self, block: Block) -> Pixels:
        """The core alone."""
        return self.source.read(block.core)

    def compute(self, block: Block, what_was_read: Any, receipt: Receipt) -> Any:
        """The same pixels."""
        return what_was_read

    def write(self, block: Block, result: Any, receipt: Receipt) -> None:
        """Encoded and durable, as every output is."""
        receipt.enter(block.number, [self.writer.write(block.core, result)])

    def finish(self, receipt: Receipt) -> None:
        """There is no device."""


def copied(task: Copy) -> float:
    """Seconds that it takes this process."""
    prepare_process(threads=1)
    IO_THREADS.resize(task.io_threads)
    receipt = BlockRunner(task).run(range(len(task.grid)))
    assert not receipt.bad, receipt.bad[0].traceback
    return receipt.seconds
