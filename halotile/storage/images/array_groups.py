"""OME-Zarr groups made in place of bare Zarr arrays, which become their finest level without a copy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import OutputRefused
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.durable import DISK, Disk
from halotile.storage.disk.place import ZARR_FILES, ZARR_JSON, check_owner, check_path, first_link, is_array
from halotile.storage.images.added_levels import WORK, refuse_unfinished
from halotile.storage.images.level_metadata import encode
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.ome_metadata import FINEST, group_attributes, order

_FILES = (ZARR_JSON, ".zgroup", ".zattrs")
"""Metadata files of a group."""


@dataclass(frozen=True)
class ArrayGroup:
    """The group that an array on a local disk is to become.

    It is made beside the array, in a hidden folder. The array is moved into that, and that to the array's path: between these two
    renames nothing is at the path, and the folder is the whole group. A repeated call goes on from any state.

    Parameters
    ----------
    path : Path
        Path of the array without symlinks, and of the group.
    source : Source
        The array, at its path or where an interrupted call has moved it.
    disk : Disk
        Disk to write with.
    """

    path: Path
    source: Source
    disk: Disk = DISK

    @classmethod
    def of(cls, path: str, disk: Disk = DISK) -> ArrayGroup | None:
        """The group for the array at a path, which may be a symlink; None where there is no array on a local disk."""
        top = Path(os.path.realpath(os.path.expanduser(path)))
        array = None if "://" in path else _array_of(top)
        return None if array is None else cls(top, open_source(array), disk)

    def obstacle(self) -> str:
        """Describe an obstacle to the group; empty when there is none.

        Raises
        ------
        OutputRefused
            When a run is writing the array, or has not finished it.
        """
        path, source = self.path, self.source
        if Path(source.path) != path and os.path.lexists(path):
            return f"an interrupted command has moved an array from there to {source.path}, and something else is there now: move one of the two away"
        for parent in path.parents:
            if any((parent / name).is_file() for name in ZARR_FILES):
                return f"it belongs to the Zarr {parent}, whose readers know its path"
        refuse_unfinished(path)
        if (run := RunDirectory.beside(path)).claims_output():
            return f"{run.path} belongs to it: `recon-cli verify` would miss the array. Move that away if you need it no more"
        if not all(os.access(folder, os.W_OK | os.X_OK) for folder in (path.parent, source.path)):
            return f"you may not write there and in {path.parent}: ask its owner"
        if source.remarks:
            return source.remarks[0]
        if (wanted := [source.axes[axis] for axis in order(source.axes)]) != list(source.axes):
            return f"its axes are {''.join(source.axes)}, and those of an OME-Zarr {''.join(wanted)}: they have to be reordered"
        if link := first_link(Path(source.path)):
            return f"{link} is a symlink, which may lead elsewhere when it is moved"
        return ""

    def make(self) -> None:
        """Make the group, for which there is no obstacle; durable on return.

        Raises
        ------
        OutputInUse
            When another process makes it.
        OutputRefused
            When the system does not move the array, which stays where it is.
        """
        hidden = _hidden(self.path)
        check_path(hidden, "the folder of the group")
        check_owner(hidden)
        work = RunDirectory(hidden / WORK, self.disk)
        with work.lock():
            array = _array_of(self.path)
            if array is None:  # another process was faster
                self._discard(hidden)
                return
            self._write_metadata(array, hidden, work.state_path)
            try:
                if array == self.path:
                    self.disk.move(array, hidden / FINEST)
            except OSError as error:
                self._discard(hidden)
                raise OutputRefused(
                    f"{array} cannot be moved into a group ({error.strerror}). A job writes it as an image with levels: "
                    "`recon-cli levels` without --as-group shows it."
                ) from error
            self.disk.move(hidden, self.path)

    def _write_metadata(self, array: Path, hidden: Path, scratch: Path) -> None:
        """Write the metadata files of the group, and in Zarr v3 the names of the array's axes, which OME-Zarr 0.5 requires."""
        axes, file = self.source.axes, array / ZARR_JSON
        attributes = group_attributes(axes, self.source.scale, self.source.units)
        documents: dict[Path, dict[str, Any]]
        if file.is_file():
            documents = {
                hidden / ZARR_JSON: {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            }
            document = json.loads(file.read_bytes())
            if document.get("dimension_names") != list(axes):
                documents[file] = document | {"dimension_names": list(axes)}
        else:
            image = {"version": "0.4", **attributes["ome"]["multiscales"][0]}
            documents = {hidden / ".zgroup": {"zarr_format": 2}, hidden / ".zattrs": {"multiscales": [image]}}
        self._remove(path for name in _FILES if (path := hidden / name) not in documents)
        self.disk.make_directory(scratch)
        for path, document in documents.items():
            self.disk.write_file(scratch / path.name, [encode(document)])
            self.disk.move(scratch / path.name, path)

    def _discard(self, hidden: Path) -> None:
        """Remove the folder of a group without an array; one with an array is not empty, and stays."""
        with suppress(OSError):
            self.disk.remove_tree(hidden / WORK)
            self._remove(hidden / name for name in _FILES)
            self.disk._rmdir(hidden)

    def _remove(self, files: Iterable[Path]) -> None:
        for file in files:
            self.disk.remove(file)


def _hidden(path: Path) -> Path:
    """The folder in which the group is made."""
    return path.with_name(f".{path.name}.group")


def _array_of(path: Path) -> Path | None:
    """The array that is at a path, or in the folder of its group; None where there is none."""
    moved = _hidden(path) / FINEST
    return moved if os.path.lexists(moved) else path if is_array(path) else None
