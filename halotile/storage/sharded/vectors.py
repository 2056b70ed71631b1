"""Stored images of a solver's state, with a few copies of each that are written in rotation."""

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

    Vectors of iteration k are in copy ``k`` modulo the number of copies, so that a pass never writes the copy it reads.
    """

    folder: Path  # folder of the images
    layout: Layout  # layout of each image
    copies: Mapping[str, int]  # number of copies of each image
    disk: Disk = DISK  # disk to write with

    def path(self, name: str, iteration: int) -> Path:
        """Path of an image of an iteration."""
        return self.folder / f"{name}.{iteration % self.copies[name]}"

    def create(self) -> None:
        """Create all copies, without pixels."""
        for path in self.paths():
            create_metadata(path, self.layout, self.disk)

    def aside(self, name: str) -> Path:
        """Path of the image that was set aside."""
        return self.folder / f"{name}.aside"

    def set_aside(self, name: str, iteration: int) -> None:
        """Remove the image of an iteration from the rotation, unless that was done already."""
        if not self.aside(name).exists():
            self.path(name, iteration).rename(self.aside(name))
        create_metadata(self.path(name, iteration), self.layout, self.disk)

    def forget_aside(self, name: str) -> None:
        """Remove the image that was set aside."""
        shutil.rmtree(self.aside(name), ignore_errors=True)

    def paths(self) -> Iterator[Path]:
        """Paths of all copies."""
        for name, count in self.copies.items():
            yield from (self.path(name, copy) for copy in range(count))

    def open(self, name: str, iteration: int) -> Source:
        """Open an image of an iteration for reading."""
        return open_source(self.path(name, iteration))

    def writer(self, name: str, iteration: int) -> ShardWriter:
        """Writer of an image of an iteration."""
        return ShardWriter(self.path(name, iteration), self.layout, self.disk)

    @property
    def size_bytes(self) -> int:
        """Maximum size of all copies."""
        return self.layout.size_bytes * sum(self.copies.values())
