"""Levels added to an image in place, so that viewers open it quickly."""

from __future__ import annotations

import os
from pathlib import Path

from halotile.cli.preview import progress
from halotile.errors import ConfigError
from halotile.graphs.amounts import counted, shape_text

MOST_THREADS = 8
"""Threads that read and average; each holds a part of the image."""


def add_levels(path: str | os.PathLike[str]) -> list[tuple[int, ...]]:
    """Add the resolution levels that an OME-Zarr image lacks, in place, so that viewers open it quickly.

    They are those that a job writes: means of 2 x 2 pixels without holes, until no edge is longer than 1024. The image is
    complete at any moment. An interrupted call goes on when it is repeated.

    Parameters
    ----------
    path : path
        The group of an OME-Zarr image, or of a Zarr that contains one image.

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
    """
    _, _, shapes = _add(os.fspath(path), quiet=True)
    return shapes[1:]


def complete(path: str, *, quiet: bool = False) -> str:
    """Add the levels that an image lacks; return a description in one line."""
    group, count, shapes = _add(path, quiet=quiet)
    name = path if os.path.samefile(path, group) else str(group)
    if len(shapes) == 1:
        return f"{name} has {counted(count, 'level')} down to {shape_text(shapes[0])}: nothing to do"
    return f"{name}: {counted(len(shapes) - 1, 'level')} added, down to {shape_text(shapes[-1])}"


def _add(path: str, *, quiet: bool) -> tuple[Path, int, list[tuple[int, ...]]]:
    """Return the group of the image, the number of its levels, and shapes from the coarsest that it had."""
    from halotile.graphs.clusters.common.machine import cores_here
    from halotile.storage.arrays import find_image
    from halotile.storage.images.added_levels import add_levels as add
    from halotile.storage.io_threads import IO_THREADS

    group = find_image(path)
    if group is None:
        raise ConfigError(_advice(path))
    threads = IO_THREADS.count
    IO_THREADS.resize(min(cores_here(), MOST_THREADS))
    try:
        with progress(group.name, quiet) as tick:
            return group, *add(group, tick)
    finally:
        IO_THREADS.resize(threads)


def _advice(path: str) -> str:
    """Return the message for an image that is not an OME-Zarr, with a job that writes it as one with levels."""
    from halotile.cli.info import job_text
    from halotile.storage.arrays import open_source

    source = open_source(path)
    what = (
        "is at a URL"
        if "://" in path
        else "is a Zarr without the metadata of an OME-Zarr"
        if source.format == "zarr"
        else "is not an OME-Zarr"
    )
    axes = "".join(source.axes) if source.remarks and source.format == "zarr" else None
    return (
        f"{path} {what}: levels cannot be added to it. To write it as an image with levels, write this"
        f"{', with the right axes,' if axes else ''} to levels.yaml and type "
        f"`recon-cli run levels.yaml`:\n\n{job_text(path, '{name: none}', 'levels', axes=axes).rstrip()}"
    )
