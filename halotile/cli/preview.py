"""Views of an image: a PNG of the whole or of a part."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.amounts import size_text
from halotile.storage.disk.object_path import lies_in
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Region

if TYPE_CHECKING:
    from halotile.storage.images.planes import Planes

SIZE = 1024
_ARGUMENTS = {"range": "values", "overwrite": "overwrite=True", "cog": "cog=True"}
"""Arguments that have another name than the option, or a value."""
_TIFF = (".tif", ".tiff")
"""Names of files that another command writes."""


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
        return option_text(name, is_call=self.is_call)


def option_text(name: str, *, is_call: bool) -> str:
    """Return an option of a command, or the argument of the call in Python.

    Examples
    --------
    >>> option_text("overwrite", is_call=False), option_text("overwrite", is_call=True)
    ('--overwrite', 'overwrite=True')
    """
    return _ARGUMENTS.get(name, name) if is_call else f"--{name}"


def preview(request: PreviewRequest, *, quiet: bool = False) -> str:
    """Write the file; return a description of it in one line."""
    check(request)
    region = parse_region(request.region, request.option("region"))
    at = parse_plane(request.plane, request.option("plane"))
    images = [opened_planes(request.path, at, region, request.level, request.dataset)]
    if request.against is not None:
        images.append(opened_planes(request.against, at, region))
        _refuse_other_shape(request, *images)
    images = [part for image in images for part in _components(image)]
    with progress(request.file.name, quiet) as tick:
        return _png(request, images, tick)


def check(request: PreviewRequest) -> None:
    """Refuse options that are wrong for every image, before the image is opened."""
    option = request.option
    if request.file.suffix.lower() in _TIFF:
        export = (
            "halotile.export(...)" if request.is_call else f"recon-cli export {request.path} {request.file}"
        )
        raise ConfigError(f"{request.file}: a preview is a PNG. For a TIFF of every pixel write: {export}")
    if request.file.suffix.lower() != ".png":
        raise ConfigError(f"{request.file}: a preview is a PNG. Write a name that ends in .png.")
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
            f"{option('range')} {low:g} {high:g}: the black level must be below the white level."
        )
    images = [path for path in (request.path, request.against) if path is not None]
    check_file(request.file, images, None if request.overwrite else request.option("overwrite"))


def check_file(file: Path, images: Iterable[str], to_replace: str | None) -> None:
    """Refuse a path that a file must not be written to; ``to_replace`` is the option with which one there is replaced."""
    for image in images:
        if "://" not in image and lies_in(file.resolve(), Path(image).resolve()):
            raise OutputRefused(f"{file}: it is the image {image}, or inside it. Write a name elsewhere.")
    check_place(file, overwrite=to_replace is None, key="the path", remedy=to_replace or "", is_file=True)


def parse_region(text: str | None, option: str = "--region") -> Region | None:
    """Parse rows and columns from ``y0:y1,x0:x1``.

    Examples
    --------
    >>> parse_region("0:100,50:250")
    Region(start=(0, 50), stop=(100, 250))
    """
    if text is None:
        return None
    _check_text(text, option, "0:512,1000:1512")
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
    _check_text(text or "", option, "t=0,c=1")
    for entry in (text or "").split(",") if text else ():
        match = re.fullmatch(r"\s*([A-Za-z])\s*=\s*(\d+)\s*", entry)
        if match is None or match[1].lower() in positions:
            raise ConfigError(
                f"{option} {text}: not a number for each axis. Write it as {option} t=0,c=1, each axis once."
            )
        positions[match[1].lower()] = int(match[2])
    return positions


def _check_text(text: object, option: str, instead: str) -> None:
    """Refuse what a script passes in place of a text."""
    if not isinstance(text, str):
        raise ConfigError(f'{option} is {text!r}: it is written as on the command line, such as "{instead}".')


def opened_planes(
    path: str, at: Mapping[str, int], region: Region | None, level: int = 0, dataset: str | None = None
) -> Planes:
    """Open the planes of an image, or of a part of it; pixels may be complex."""
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
