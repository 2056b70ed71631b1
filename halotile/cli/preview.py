"""Views of an image: a PNG of the whole or of a part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from halotile.cli.arguments import ImageRequest, PreviewRequest
from halotile.errors import ConfigError
from halotile.graphs.amounts import size_text

if TYPE_CHECKING:
    from halotile.storage.images.planes import Planes

SIZE = 1024
_TIFF = (".tif", ".tiff")
"""Names of files that another command writes."""


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
    return f"{request.file}: {size_text(drawn.shape)}{averaging}; {limits}{phase}{_plane_text(images[0])}"


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
