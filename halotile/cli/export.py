"""Export of an image as one TIFF with resolution levels, and levels added to an image in place."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from halotile.cli.arguments import ExportRequest
from halotile.cli.preview import opened_planes, progress
from halotile.errors import ConfigError
from halotile.graphs.amounts import bytes_text, counted, shape_text, size_text


def draw_sheet(request: ExportRequest) -> None:
    """Draw a ptychographic scan, or its result, as a PNG."""
    from halotile.cli.screens.scan_views import draw_result, draw_scan
    from halotile.storage.scans.export import read_result
    from halotile.storage.scans.scan import is_scan, open_scan, open_summary

    path = request.path
    request.check_file(request.file, [path])
    if is_scan(path):
        draw_scan(request.file, open_scan(path)[0], *open_summary(path))
    else:
        draw_result(request.file, read_result(path))


def export(request: ExportRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line."""
    from halotile.cli.screens.screen import complain
    from halotile.graphs.plans.inputs import check_whole
    from halotile.storage.formats.base import packing_text
    from halotile.storage.images.planes import known_channels
    from halotile.storage.images.tiff_export import level_shapes, write_tiff
    from halotile.storage.sharded.ome_metadata import is_photo

    if request.file.suffix.lower() not in (".tif", ".tiff"):
        raise ConfigError(f"{request.file}: what is written is a TIFF. Write a name that ends in .tif or .tiff.")
    request.check_file(request.file, [request.path])
    check_whole(request.path)
    planes = opened_planes(request)
    source = planes.source
    channels = known_channels(source)
    if not request.cog and any(channel.get("label") for channel in channels) and not is_photo(channels):
        planes = replace(planes, colour=False)  # samples of red, green and blue have no names in a TIFF
    if source.dtype.kind == "c":
        raise ConfigError(
            f"{request.file}: the pixels of {request.path} are complex, which few programs read from a TIFF. "
            "`recon-cli preview` shows modulus and phase in a PNG."
        )
    if request.cog and source.georeference is None:
        raise ConfigError(
            f"{request.spelled('cog')}: {request.path} says nothing of its place on Earth, which a Cloud Optimized GeoTIFF has. "
            f"Leave {request.spelled('cog')} out for a TIFF with levels."
        )
    if request.cog and sum(count > 1 for count in planes.counts) > 1:
        raise ConfigError(
            f"{request.spelled('cog')}: {request.path} has planes along {', '.join(planes.loops)}, and a GeoTIFF has one row of bands. "
            f"Write {request.spelled('plane')} {planes.loops[0]}=0, or another of them."
        )
    if packing := packing_text(source.attributes):
        complain(
            f"note: {request.path}: values are packed with {packing}. The TIFF has the stored numbers, and does not name the packing."
        )
    with progress(request.file.name, quiet) as tick:
        nbytes = write_tiff(request.file, planes, cog=request.cog, tick=tick)
    stack = f"{shape_text(planes.counts)} planes of " if math.prod(planes.counts) > 1 else ""
    levels = counted(len(level_shapes(planes.shape)), "level")
    return f"{request.file}: {stack}{size_text(planes.shape)}, {levels}, {bytes_text(nbytes)}"


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
