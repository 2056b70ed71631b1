"""Views of an image: a PNG of the whole or of a part, or a TIFF at full resolution."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.units import shape_text, size_text
from halotile.storage.grid import Region

if TYPE_CHECKING:
    from halotile.storage.images.planes import Planes

SIZE = 1024
_TIFF = (".tif", ".tiff")


@dataclass(frozen=True)
class PreviewRequest:
    """The options of the command line, or the arguments of the call."""

    path: str
    file: Path
    size: int | None = None
    region: str | None = None
    plane: str | None = None
    against: str | None = None
    values: tuple[float, float] | None = None
    level: int = 0
    dataset: str | None = None
    overwrite: bool = False
    is_call: bool = False
    """True where a script asks, whose messages name arguments, not options."""

    def option(self, name: str) -> str:
        """Return an option as whoever asks writes it."""
        if self.is_call:
            return {"range": "values", "overwrite": "overwrite=True"}.get(name, name)
        return f"--{name}"


def preview(request: PreviewRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line.

    Raises
    ------
    ConfigError
        When an option is not valid.
    InputError
        When the image cannot be read.
    """
    check(request)
    region = parse_region(request.region, request.option("region"))
    at = parse_plane(request.plane, request.option("plane"))
    images = [_opened(request.path, at, region, request.level, request.dataset)]
    if request.against is not None:
        images.append(_opened(request.against, at, region))
        _refuse_other_shape(request, *images)
    images = [part for image in images for part in _components(image)]
    with _progress(request.file.name, quiet) as tick:
        if _suffix(request) == ".png":
            return _png(request, images, tick)
        if images[0].component is not None:
            raise ConfigError(
                f"{request.file}: the pixels of {request.path} are complex, which few programs read from a TIFF. "
                "Write a name that ends in .png, which shows modulus and phase."
            )
        return _tiff(request, images[0], tick)


def check(request: PreviewRequest) -> None:
    """Refuse options that are wrong for every image, before the image is opened."""
    option = request.option
    if _suffix(request) not in (".png", *_TIFF):
        raise ConfigError(
            f"{request.file}: {f'nothing is written as {_suffix(request)}' if _suffix(request) else 'no suffix says what to write'}. "
            "Write a name that ends in .png (small), .tif or .tiff (full resolution)."
        )
    if _suffix(request) in _TIFF:
        _refuse_for_tiff(request)
    if request.size is not None and request.size < 1:
        raise ConfigError(
            f"{option('size')} {request.size}: an image needs a pixel. Write 1 or more, such as {SIZE}."
        )
    if request.size is not None and request.region is not None:
        raise ConfigError(
            f"{option('size')} and {option('region')}: a region is shown pixel by pixel. Leave one of them out."
        )
    if request.values is not None and not request.values[0] < request.values[1]:
        low, high = request.values
        raise ConfigError(
            f"{option('range')} {low:g} {high:g}: what is black must be less than what is white."
        )
    check_file(request)


def _refuse_for_tiff(request: PreviewRequest) -> None:
    options = {"size": request.size, "against": request.against, "range": request.values}
    for name, value in options.items():
        if value is not None:
            option = request.option(name)
            raise ConfigError(
                f"{option} with {request.file}: a TIFF keeps every pixel and value of one image. "
                f"Leave {option} out, or write a name that ends in .png."
            )


def check_file(request: PreviewRequest) -> None:
    """Refuse a path that a file must not be written to."""
    file, folder = request.file, request.file.parent
    if not folder.is_dir():
        raise OutputRefused(f"{file}: there is no directory {folder}. Make it first.")
    for image in filter(None, (request.path, request.against)):
        if "://" not in image and _is_within(file, Path(image)):
            raise OutputRefused(f"{file}: it is the image {image}, or inside it. Write a name elsewhere.")
    if file.is_dir():
        raise OutputRefused(f"{file}: a directory stands there. Write another name.")
    if os.path.lexists(file) and not request.overwrite:
        raise OutputRefused(
            f"{file}: something stands there. Write another name, or {request.option('overwrite')}."
        )


def _is_within(path: Path, image: Path) -> bool:
    resolved = path.resolve()
    return image.resolve() in (resolved, *resolved.parents)


def _suffix(request: PreviewRequest) -> str:
    return request.file.suffix.lower()


def parse_region(text: str | None, option: str = "--region") -> Region | None:
    """Parse rows and columns from ``y0:y1,x0:x1``.

    Examples
    --------
    >>> parse_region("0:100,50:250")
    Region(start=(0, 50), stop=(100, 250))
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+):(\d+)\s*,\s*(\d+):(\d+)\s*", text)
    if match is None:
        raise ConfigError(
            f"{option} {text}: not rows and columns. Write first row:last row,first column:last column, "
            "such as 0:512,1000:1512."
        )
    y0, y1, x0, x1 = (int(number) for number in match.groups())
    return Region((y0, x0), (y1, x1))


def parse_plane(text: str | None, option: str = "--plane") -> Mapping[str, int]:
    """Parse places along axes from ``t=0,c=1``.

    Examples
    --------
    >>> parse_plane("t=0, c=1")
    {'t': 0, 'c': 1}
    """
    positions: dict[str, int] = {}
    for entry in (text or "").split(",") if text else ():
        match = re.fullmatch(r"\s*([A-Za-z])\s*=\s*(\d+)\s*", entry)
        if match is None or match[1].lower() in positions:
            raise ConfigError(
                f"{option} {text}: not a number for each axis. Write it as {option} t=0,c=1, each axis once."
            )
        positions[match[1].lower()] = int(match[2])
    return positions


def _opened(
    path: str, at: Mapping[str, int], region: Region | None, level: int = 0, dataset: str | None = None
) -> Planes:
    from halotile.storage.arrays import open_source
    from halotile.storage.images.planes import choose_planes

    source = open_source(path, level=level, dataset=dataset, complex_pixels=True)
    return choose_planes(source, at, region)


def _components(planes: Planes) -> list[Planes]:
    """Return what is drawn of an image: modulus and phase of complex pixels, else the image itself."""
    if planes.source.dtype.kind != "c":
        return [planes]
    return [replace(planes, component="modulus"), replace(planes, component="phase")]


def _refuse_other_shape(request: PreviewRequest, first: Planes, second: Planes) -> None:
    shapes = [dict(zip(p.source.axes, p.source.shape, strict=True)) for p in (first, second)]
    sizes = [(shape["y"], shape["x"]) for shape in shapes]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{request.option('against')} {request.against}: {size_text(sizes[1])} cannot be laid beside {size_text(sizes[0])} of "
            f"{request.path}. Write an image of the same width and height."
        )


def _png(request: PreviewRequest, images: list[Planes], tick: Callable[[float], None]) -> str:
    from halotile.storage.images.png import write_png

    edge = None if request.region is not None else request.size or SIZE
    drawn = write_png(request.file, images, edge=edge, values=request.values, tick=tick)
    averaging = f", each the mean of {drawn.step} × {drawn.step}" if drawn.step > 1 else ""
    phase = "; modulus and phase, the phase from -π to π" if images[0].component else ""
    return (
        f"{request.file}: {size_text(drawn.shape)}{averaging}; black is {drawn.low:g}, white {drawn.high:g}"
        f"{phase}{_plane_text(images[0])}"
    )


def _plane_text(planes: Planes) -> str:
    """Describe the plane, where there are others."""
    shown = {**planes.at, **dict.fromkeys(planes.loops, 0)}
    places = ", ".join(f"{axis}={shown[axis]}" for axis in planes.source.axes if axis in shown)
    return f"; plane {places}" if places else ""


def _tiff(request: PreviewRequest, planes: Planes, tick: Callable[[float], None]) -> str:
    from halotile.storage.images.tiff_export import write_tiff

    nbytes = write_tiff(request.file, planes, tick=tick)
    stack = f"{shape_text(planes.counts)} planes of " if math.prod(planes.counts) > 1 else ""
    return f"{request.file}: {stack}{size_text(planes.shape)}, {bytes_text(nbytes)}"


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress

    from halotile.cli.screens.screen import progress_console

    with Progress(console=progress_console(), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done: bar.update(task, completed=done)
