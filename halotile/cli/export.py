"""Files from an image: a PNG of the whole or of a part, a TIFF with resolution levels, and levels added in place."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.cli.arguments import ExportRequest, ImageRequest, PreviewRequest
from halotile.errors import ConfigError
from halotile.graphs.words import bytes_text, counted, shape_text, size_text
from halotile.storage.disk.object_path import full_path
from halotile.storage.run_directory.directory import RunDirectory

if TYPE_CHECKING:
    from halotile.storage.images.planes import Planes

SIZE = 1024
_TIFF = (".tif", ".tiff")  # names of files that another command writes


def preview(request: PreviewRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line."""
    check(request)
    images = [opened_planes(request)]
    if request.against is not None:
        images.append(opened_planes(replace(request, path=request.against, level=0, dataset=None)))
        _refuse_other_shape(request, *images)
    images = [part for image in images for part in _components(image)]
    if images[0].blend != images[-1].blend:  # as the second has other channels
        images = [replace(image, colour=False, blend=()) if image.blend else image for image in images]
    with progress(request.file.name, quiet) as tick:
        return _png(request, images, tick)


def check(request: PreviewRequest) -> None:
    """Refuse options that are wrong for every image, before the image is opened."""
    option = request.spelled
    if request.file.suffix.lower() in _TIFF:
        export = "halotile.export(...)" if request.is_call else f"recon-cli export {request.path} {request.file}"
        raise ConfigError(f"{request.file}: a preview is a PNG. For a TIFF of every pixel write: {export}")
    if request.file.suffix.lower() != ".png":
        raise ConfigError(f"{request.file}: a preview is a PNG. Write a name that ends in .png.")
    if request.size is not None and request.size < 1:
        raise ConfigError(f"{option('size')} {request.size}: an image needs a pixel. Write 1 or more, such as {SIZE}.")
    if request.size is not None and request.region is not None:
        raise ConfigError(
            f"{option('size')} and {option('region')}: a region is shown pixel by pixel. Leave one of them out."
        )
    if request.values is not None and not request.values[0] < request.values[1]:
        low, high = request.values
        raise ConfigError(f"{option('range')} {low:g} {high:g}: the black level must be below the white level.")
    images = [path for path in (request.path, request.against) if path is not None]
    request.check_file(request.file, images)


def opened_planes(request: ImageRequest) -> Planes:
    """Open the planes of an image, or of a part of it; pixels may be complex."""
    from halotile.storage.arrays import open_source
    from halotile.storage.images.planes import choose_planes

    area, at = request.area, request.at
    source = open_source(request.path, level=request.level, dataset=request.dataset, complex_pixels=True)
    return choose_planes(source, at, area)


def _components(planes: Planes) -> list[Planes]:
    """Return what is drawn of an image: modulus and phase of complex pixels, else the image itself."""
    if planes.source.dtype.kind != "c":
        return [planes.blended()]
    return [replace(planes, component="modulus"), replace(planes, component="phase")]


def _refuse_other_shape(request: PreviewRequest, first: Planes, second: Planes) -> None:
    sizes = [tuple(p.source.shape[p.source.axes.index(axis)] for axis in "yx") for p in (first, second)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{request.spelled('against')} {request.against}: {size_text(sizes[1])} cannot be laid beside {size_text(sizes[0])} of "
            f"{request.path}. Write an image of the same width and height."
        )


def _png(request: PreviewRequest, images: list[Planes], tick: Callable[[float], None]) -> str:
    from halotile.storage.images.planes import channel_names
    from halotile.storage.images.png import write_png

    edge = None if request.region is not None else request.size or SIZE
    drawn = write_png(request.file, images, edge=edge, values=request.values, tick=tick)
    averaging = f", each the mean of {drawn.step} × {drawn.step}" if drawn.step > 1 else ""
    phase = "; modulus and phase, the phase from -π to π" if images[0].component else ""
    limits = f"black is {drawn.low:g}, white {drawn.high:g}"
    if images[0].blend:
        limits = f"channels {', '.join(channel_names(images[0].source))} in their colours"
    text = f"{request.file}: {size_text(drawn.shape)}{averaging}; {limits}{phase}{_plane_text(images[0])}"
    paths = [path for path in (request.path, request.against) if path is not None and _is_unfinished(path)]
    return "".join([text, *(f"; the run of {path} is not finished, and its missing blocks are 0" for path in paths)])


def _is_unfinished(path: str) -> bool:
    """True for the output of a run that has not finished."""
    status = RunDirectory.beside(full_path(path)).read_status()
    return status is not None and status.get("state") != "finished"


def _plane_text(planes: Planes) -> str:
    """Describe the plane, where there are others."""
    shown = {**planes.at, **dict.fromkeys(planes.loops, 0)}
    places = ", ".join(f"{axis}={shown[axis]}" for axis in planes.source.axes if axis in shown)
    return f"; plane {places}" if places else ""


@contextmanager
def progress(name: str, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress

    from halotile.cli.screens.screen import progress_console

    with Progress(console=progress_console(), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def draw_sheet(request: ExportRequest) -> None:
    """Draw a ptychographic scan, or its result, as a PNG."""
    from halotile.cli.screens.scan_views import draw_result, draw_scan
    from halotile.storage.scans.scan import is_scan, open_scan, open_summary, read_result

    path = request.path
    request.check_file(request.file, [path])
    if is_scan(path):
        draw_scan(request.file, open_scan(path)[0], *open_summary(path))
    else:
        draw_result(request.file, read_result(path))


def export(request: ExportRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line."""
    from halotile.cli.screens.screen import complain
    from halotile.graphs.plans.choices import check_whole
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


MOST_THREADS = 8  # threads that read and average; each holds a part of the image


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
