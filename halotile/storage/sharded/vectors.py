"""The stored images of a solver's state: a few copies of each, written in turns."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.durable import DISK, Disk
from halotile.storage.sharded.output import Layout, ShardWriter, create_metadata


@dataclass(frozen=True)
class Vectors:
    """The images of one solver in one folder.

    Those of iteration k lie in copy ``k`` modulo the number of copies: a sweep never writes what it reads.

    Parameters
    ----------
    folder : Path
        Where they lie.
    layout : Layout
        That of each.
    copies : mapping of str to int
        How many copies there are of each.
    disk : Disk
        What writes.
    """

    folder: Path
    layout: Layout
    copies: Mapping[str, int]
    disk: Disk = DISK

    def path(self, name: str, iteration: int) -> Path:
        """Where an image of an iteration lies."""
        return self.folder / f"{name}.{iteration % self.copies[name]}"

    def create(self) -> None:
        """Make every copy, empty where it is not there yet."""
        for path in self.paths():
            create_metadata(path, self.layout, self.disk)

    def aside(self, name: str) -> Path:
        """Where an image lies that is not written over."""
        return self.folder / f"{name}.aside"

    def set_aside(self, name: str, iteration: int) -> None:
        """Take the image of an iteration out of the turns; where that was done already, nothing."""
        if not self.aside(name).exists():
            self.path(name, iteration).rename(self.aside(name))
        create_metadata(self.path(name, iteration), self.layout, self.disk)

    def forget_aside(self, name: str) -> None:
        """Remove what was set aside."""
        shutil.rmtree(self.aside(name), ignore_errors=True)

    def paths(self) -> Iterator[Path]:
        """Where all copies lie."""
        for name, count in self.copies.items():
            yield from (self.path(name, copy) for copy in range(count))

    def open(self, name: str, iteration: int) -> Source:
        """An image of an iteration, to read."""
        return open_source(self.path(name, iteration))

    def writer(self, name: str, iteration: int) -> ShardWriter:
        """What writes an image of an iteration."""
        return ShardWriter(self.path(name, iteration), self.layout, self.disk)

    @property
    def size_bytes(self) -> int:
        """What all of them take at most."""
        return self.layout.size_bytes * sum(self.copies.values())
