"""Levels added to an image in place, so that viewers open it quickly."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.cli.preview import progress
from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.units import shape_text

if TYPE_CHECKING:
    from halotile.storage.images.array_groups import ArrayGroup

MOST_THREADS = 8
"""Threads that read and average; each holds a part of the image."""


def add_levels(path: str | os.PathLike[str], *, as_group: bool = False) -> list[tuple[int, ...]]:
    """Add the resolution levels that an OME-Zarr image lacks, in place, so that viewers open it quickly.

    They are those that a job writes: means of 2 x 2 pixels without holes, until no edge is longer than 1024. The image is
    complete at any moment. An interrupted call goes on when it is repeated.

    Parameters
    ----------
    path : path
        The group of an OME-Zarr image, or of a Zarr that contains one image.
    as_group : bool
        Make a bare Zarr array the level 0 of an OME-Zarr group of its name first, without a copy: the array is ``path/0`` from then on.

    Returns
    -------
    list of tuple of int
        Shape of each level that was added, in pixels; empty where none was missing.

    Raises
    ------
    ConfigError
        When levels cannot be added to what is there, or a run is writing it.
    InputError
        When the image cannot be read, or was changed meanwhile.
    DiskRefused
        When there is too little room.

    Examples
    --------
    >>> import halotile, numpy, pathlib, tempfile, zarr
    >>> path = pathlib.Path(tempfile.mkdtemp(), "cells.zarr")
    >>> group = zarr.create_group(path)
    >>> group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    >>> array = group.create_array("0", data=numpy.zeros((3000, 900), "uint8"), chunks=(512, 512))
    >>> halotile.add_levels(path), halotile.add_levels(path)
    ([(1500, 450), (750, 225)], [])
    >>> bare = zarr.create_array(path.with_name("bare.zarr"), data=numpy.zeros((3000, 900), "uint8"), chunks=(512, 512))
    >>> halotile.add_levels(path.with_name("bare.zarr"), as_group=True)
    [(1500, 450), (750, 225)]
    """
    _, _, shapes = _add(os.fspath(path), as_group=as_group, quiet=True)
    return shapes[1:]


def complete(path: str, *, as_group: bool = False, quiet: bool = False) -> str:
    """Add the levels that an image lacks; return a description in one line."""
    from halotile.storage.images.image_groups import find_image

    was_array = as_group and find_image(path) is None
    group, count, shapes = _add(path, as_group=as_group, quiet=quiet)
    name = path if os.path.samefile(path, group) else str(group)
    moved = f"its array is {os.path.join(name, '0')} now" if was_array else ""
    if len(shapes) == 1:
        return f"{name} has {counted(count, 'level')} down to {shape_text(shapes[0])}: {moved or 'nothing to do'}"
    added = f"{name}: {counted(len(shapes) - 1, 'level')} added, down to {shape_text(shapes[-1])}"
    return f"{added}; {moved}" if moved else added


def _add(path: str, *, as_group: bool, quiet: bool) -> tuple[Path, int, list[tuple[int, ...]]]:
    """Return the group of the image, the number of its levels, and shapes from the coarsest that it had."""
    from halotile.graphs.clusters.detection.cores import cores_here
    from halotile.storage.images.added_levels import add_levels as add
    from halotile.storage.images.image_groups import find_image
    from halotile.storage.io_threads import IO_THREADS

    group = find_image(path) or _make_group(path, as_group=as_group)
    threads = IO_THREADS.count
    IO_THREADS.resize(min(cores_here(), MOST_THREADS))
    try:
        with progress(group.name, quiet) as tick:
            return group, *add(group, tick)
    finally:
        IO_THREADS.resize(threads)


def _make_group(path: str, *, as_group: bool) -> Path:
    """Make an array a group where that is wanted and possible; return its path."""
    from halotile.storage.images.array_groups import ArrayGroup

    array = ArrayGroup.of(path)
    obstacle = array.obstacle() if array else ""
    if array is None or obstacle or not as_group:
        raise ConfigError(_advice(path, array, obstacle))
    array.make()
    return array.path


def _advice(path: str, array: ArrayGroup | None, obstacle: str) -> str:
    """Return the words for an image of another kind, with a job that writes it as an OME-Zarr with levels."""
    from halotile.cli.info import job_text
    from halotile.storage.arrays import open_source

    source = array.source if array else open_source(path)
    what = (
        "is at a URL"
        if "://" in path
        else "is a Zarr without the metadata of an OME-Zarr"
        if source.format == "zarr"
        else "is no folder of an OME-Zarr"
    )
    offer = (
        f" Nor can it become one in place, with --as-group: {obstacle}."
        if obstacle
        else f" `recon-cli levels {shlex.quote(path)} --as-group` makes it level 0 of an OME-Zarr of its name without a copy, then adds them: "
        f"the path of the array, also in scripts that open it, becomes {os.path.join(path, '0')}."
        if array
        else ""
    )
    axes = "".join(source.axes) if array and source.remarks else None
    return (
        f"{path} {what}: levels cannot be added to it.{offer} To write it as an image with levels, write this"
        f"{', with the right axes,' if axes else ''} to levels.yaml and type "
        f"`recon-cli run levels.yaml`:\n\n{job_text(path, '{name: none}', 'levels', axes=axes).rstrip()}"
    )
