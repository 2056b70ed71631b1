"""Export of images of any size as tiled TIFF files with resolution levels that common viewers open.

Pixel values are preserved, and each pixel of a level is the mean of 2 x 2 of the one before. The file is compressed with deflate,
which needs no package besides tifffile; its metadata are OME-XML, with the resolution in the plain TIFF tags as well.
"""

import errno
import itertools
import math
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np

from halotile.errors import ConfigError, InputError
from halotile.registry import optional
from halotile.storage.arrays import open_source
from halotile.storage.formats.parts import tiff_tags
from halotile.storage.formats.parts.tiff_tags import PLANES
from halotile.storage.grid import Region
from halotile.storage.images.planes import WINDOW_BYTES, Planes, choose_planes, known_channels
from halotile.storage.images.png import Tick
from halotile.storage.rim import Pixels
from halotile.storage.run_directory.directory import replacing
from halotile.storage.sharded.layout import coarser, read_layout
from halotile.storage.sharded.ome_metadata import Channels, are_colours
from halotile.storage.sharded.output import halve_to
from halotile.storage.spacing import SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME, converted

# Longest edge in pixels of the coarsest level; validators of GeoTIFFs ask for levels of a larger image.
LARGEST_TOP = 512
_HALF = (2, 2)


def level_shapes(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Height and width of every level, finest first.

    >>> level_shapes((1500, 700)), level_shapes((9, 9))
    ([(1500, 700), (750, 350), (375, 175)], [(9, 9)])
    """
    shapes = [shape]
    while max(shapes[-1]) > LARGEST_TOP:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


def stored_levels(planes: Planes) -> list[Planes]:
    """The coarser levels that a run wrote with the image, as means over 2 x 2; none of other images, nor of a part of one."""
    source = planes.source
    try:
        layout = read_layout(source.path) if source.format == "ome" else None
    except InputError:
        return []
    shapes = [array.shape for array in layout.arrays] if layout else []
    halves = tuple(2 if axis in "yx" else 1 for axis in source.axes)
    if layout is None or layout.factor != halves or planes.shape != source.shape[-2:] or source.shape not in shapes:
        return []
    levels = range(shapes.index(source.shape) + 1, layout.levels)
    return [choose_planes(open_source(source.path, level=level), planes.at, None) for level in levels]


@dataclass(frozen=True)
class NextLevel:
    """A scratch file with the next level of planes, which is written while these are read."""

    path: Path
    planes: Planes
    dtype: np.dtype[Any]  # type of the pixels that are added
    nodata: float | None  # their value without a measurement

    def make(self) -> None:
        """Make the file, of the right size. Its room is reserved: writing to a mapped file on a full disk would end the process."""
        shape = coarser(Region.whole(self.planes.shape), _HALF).shape
        samples = (self.planes.samples,) if self.planes.colour else ()
        np.lib.format.open_memmap(self.path, "w+", self.dtype, (*self.planes.counts, *shape, *samples))
        with self.path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, self.path.stat().st_size)

    def add(self, index: tuple[int, ...], part: Region, pixels: Pixels) -> None:
        """Add the means of a part of one plane, which begins at even rows and columns."""
        # Only once a part of the image could be read: its header may promise anything.
        if not self.path.exists():
            self.make()
        # Opened anew for each part, or the whole file would count as memory of this process.
        array = np.lib.format.open_memmap(self.path, "r+")
        array[index][coarser(part, _HALF).slices] = halve_to(pixels, _HALF, self.dtype, self.nodata)

    def read(self) -> Planes:
        """The planes of the level, when all parts were added."""
        axes = "".join((*self.planes.loops, *"yx", *"c" * self.planes.colour))
        return replace(choose_planes(open_source(self.path, axes=axes), {}, None), colour=self.planes.colour)


TILE = 256  # edge of a tile in pixels; TIFF requires a multiple of 16
_CLASSIC_BYTES = 4_000_000_000  # limit for a classic TIFF with 32-bit offsets
_BUFFER_BYTES = 16 * 2**20
_THREADS = 2
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")  # characters that XML does not permit
# Least size of a pixel in centimeters that the tags of a resolution can state; the largest is its inverse.
_LEAST_CM = 2**-31


def write_tiff(path: Path, planes: Planes, *, cog: bool = False, tick: Tick = lambda _: None) -> int:
    """Write every plane with its resolution levels; an existing file at ``path`` is replaced at the end.

    ``path``: the TIFF; a BigTIFF when it may exceed 4 GB; ``planes``: image. float16 is written as float32 and bool as 0 and 255, which viewers
    support; ``cog``: false: an OME-TIFF, with the levels of a page in its SubIFDs. True: a Cloud Optimized GeoTIFF, with the planes as bands;
    ``tick``: progress callback, called with the finished fraction, 0 to 1.

    Returns
    -------
    int
        Bytes written.
    """
    import tifffile

    if cog:
        optional("a Cloud Optimized GeoTIFF is written with rasterio", "rasterio", '"halotile[geo]"')
    dtype, levels = _viewable(planes.source.dtype), len(level_shapes(planes.shape))
    letters = "".join(planes.loops) + ("yxs" if planes.colour else "yx")
    is_ome = not cog and set(letters) <= set("tczyxs")
    tags = [*_place_tags(planes, cog=cog), *_nodata_tags(planes)]
    first: dict[str, Any] = {"metadata": None, "extratags": tags}
    if not cog:
        first |= {**_resolution(planes), "subifds": levels - 1}
        if is_ome or planes.shape[1] > 1:  # in its own metadata tifffile takes a last axis of 1 for samples
            first |= {"metadata": {"axes": letters.upper(), **_calibration(planes)}}
    reduced = {"metadata": None, "extratags": _nodata_tags(planes), "subfiletype": 1}
    with replacing(path) as made:
        scratch = made.parent
        written = scratch / "levels.tif" if cog else made
        is_big = cog or _most_bytes(planes, dtype) > _CLASSIC_BYTES
        with tifffile.TiffWriter(written, bigtiff=is_big, ome=is_ome, byteorder="<") as file:
            for number, (level, tiles) in enumerate(_levels(planes, dtype, scratch, tick)):
                options = reduced if number else first
                file.write(tiles, dtype=dtype, **_layout(level, dtype, cog=cog), **options)
        if cog:
            _put_directories_first(written, made, is_integer=dtype.kind in "iu")
    return path.stat().st_size


def _put_directories_first(tiff: Path, cog: Path, *, is_integer: bool) -> None:
    """Copy a TIFF with its levels as a Cloud Optimized GeoTIFF: programs read where everything is with one request."""
    import rasterio
    import tifffile
    from rasterio import shutil

    options = {"BLOCKSIZE": TILE, "COMPRESS": "DEFLATE", "PREDICTOR": "YES" if is_integer else "NO"}
    try:
        with rasterio.Env(GDAL_NUM_THREADS=_THREADS, GDAL_CACHEMAX=_BUFFER_BYTES >> 20):
            shutil.copy(tiff, cog, driver="COG", BIGTIFF="YES", STATISTICS="NO", **options)
        with tifffile.TiffFile(cog) as file:  # GDAL may end without an error where the disk was full
            parts = [zip(page.dataoffsets, page.databytecounts, strict=True) for page in file.pages]
            is_whole = all(0 < count <= file.filehandle.size - offset for offset, count in itertools.chain(*parts))
    except Exception as error:
        if disk_usage(cog.parent).free > tiff.stat().st_size:
            raise
        raise OSError(errno.ENOSPC, f"GDAL: {error}") from error
    if not is_whole:
        raise OSError(errno.ENOSPC, "GDAL did not write all tiles")


def _viewable(dtype: np.dtype[np.generic]) -> np.dtype[Any]:
    return np.dtype({"float16": "float32", "bool": "uint8"}.get(dtype.name, dtype))


def _most_bytes(planes: Planes, dtype: np.dtype[Any]) -> float:
    """Size of all levels without compression, and a little more, which it may add to noise."""
    pixels = sum(math.prod(shape) for shape in level_shapes(planes.shape))
    return 1.01 * pixels * math.prod(planes.counts) * planes.samples * dtype.itemsize


def _layout(planes: Planes, dtype: np.dtype[Any], *, cog: bool) -> dict[str, Any]:
    """Shape and encoding of a level, as tifffile takes them."""
    bands = math.prod(planes.counts)
    counts = planes.counts if not cog else (bands,) if bands > 1 else ()
    arrangement = "contig" if planes.colour else "separate" if cog and bands > 1 else None
    # Bands of a map may be any: four without names are hardly colours and opacity.
    named = are_colours(known_channels(planes.source))
    is_rgb = planes.colour and (not cog or dtype == np.uint8 or (named and dtype.kind == "u"))
    unnamed = planes.samples - 3 if is_rgb and cog and not named else 0
    return {
        "shape": (*counts, *planes.shape, *((planes.samples,) if planes.colour else ())),
        "tile": (TILE, TILE),
        "photometric": "rgb" if is_rgb else "minisblack",
        "extrasamples": ("unspecified",) * unnamed or None,
        "planarconfig": arrangement,
        "compression": "zlib",
        # Without imagecodecs, tifffile supports this predictor for integers only.
        "predictor": dtype.kind in "iu",
        "maxworkers": _THREADS,
        "buffersize": _BUFFER_BYTES,
    }


def _levels(planes: Planes, dtype: np.dtype[Any], scratch: Path, tick: Tick) -> Iterator[tuple[Planes, Any]]:
    """Every level, finest first, with its tiles in the order of the file; all are to be taken before the next level."""
    shapes, stored, nodata = level_shapes(planes.shape), stored_levels(planes), _nodata(planes)
    pixels = [math.prod(shape) for shape in shapes]
    for number in range(len(shapes)):
        following = None
        if len(stored) <= number < len(shapes) - 1:
            following = NextLevel(scratch / f"{number}.npy", planes, dtype, nodata)

        def tick_of_all(done: float, number: int = number) -> None:
            tick((sum(pixels[:number]) + done * pixels[number]) / sum(pixels))

        yield planes, _tiles(planes, dtype, following, tick_of_all)
        if number < len(stored):
            planes = stored[number]
        elif following is not None:
            planes = following.read()


def _tiles(planes: Planes, dtype: np.dtype[Any], following: NextLevel | None, tick: Tick) -> Iterator[Pixels]:
    """Every tile of every plane, in the order of the file."""
    highest = 255 if planes.source.dtype == np.bool_ else 1
    total = math.prod(planes.counts)
    for number, index in enumerate(itertools.product(*map(range, planes.counts))):
        for part in _bands(planes):
            pixels = planes.read(index, part).astype(dtype, copy=False)
            pixels = pixels * dtype.type(highest) if highest > 1 else pixels
            # Before the yield, because tifffile does not resume the generator after the last tile.
            if following is not None:
                following.add(index, part, pixels)
            tick((number + part.stop[0] / planes.shape[0]) / total)
            yield from _cut_tiles(pixels)


def _bands(planes: Planes) -> Iterator[Region]:
    """Divide a plane into parts of whole tiles: rows of tiles as high as a chunk, or segments of one row of tiles."""
    height, width = planes.shape
    tiles = max(1, WINDOW_BYTES // (TILE * TILE * planes.pixel_bytes))
    across = -(-width // TILE)
    rows = TILE * max(1, min(-(-planes.chunk()[0] // TILE), tiles // across))
    columns = TILE * min(across, tiles)
    for top, left in itertools.product(range(0, height, rows), range(0, width, columns)):
        yield Region((top, left), (min(top + rows, height), min(left + columns, width)))


def _cut_tiles(pixels: Pixels) -> Iterator[Pixels]:
    """Whole tiles, row by row: tifffile would pad those at the far edges itself, and garble the ones a single pixel wide."""
    height, width = pixels.shape[:2]
    for top, left in itertools.product(range(0, height, TILE), range(0, width, TILE)):
        tile = pixels[top : top + TILE, left : left + TILE]
        missing = [(0, TILE - n) for n in tile.shape[:2]] + [(0, 0)] * (tile.ndim - 2)
        yield np.pad(tile, missing, mode="edge")


def _known_sizes(planes: Planes) -> dict[str, tuple[float, str]]:
    """Size of a pixel and its unit along the spatial axes where both are known."""
    source = planes.source
    known = dict(zip(source.axes, zip(source.scale, source.units, strict=True), strict=True))
    spatial = {axis: (size, unit) for axis, (size, unit) in known.items() if axis in "zyx" and size > 0}
    return {axis: (size, unit) for axis, (size, unit) in spatial.items() if unit in SYMBOLS_OF_LENGTH}


def _calibration(planes: Planes) -> dict[str, Any]:
    """Pixel sizes, time step, names and colours of the channels as OME-XML attributes."""
    source = planes.source
    attributes: dict[str, Any] = {}
    for axis, (size, unit) in _known_sizes(planes).items():
        name = f"PhysicalSize{axis.upper()}"
        attributes |= {name: size, f"{name}Unit": SYMBOLS_OF_LENGTH[unit]}
    for axis, step, time in zip(source.axes, source.scale, source.units, strict=True):
        if axis == "t" and time in SYMBOLS_OF_TIME:
            attributes |= {"TimeIncrement": step, "TimeIncrementUnit": SYMBOLS_OF_TIME[time]}
    if source.ome is not None and source.ome.name:
        attributes["Name"] = _NOT_XML.sub("\ufffd", source.ome.name)
    if channels := _channels(planes):
        names = [_NOT_XML.sub("\ufffd", str(one.get("label", n))) for n, one in enumerate(channels)]
        colours = [_ome_colour(channel.get("color", "FFFFFF")) for channel in channels]
        attributes["Channel"] = {"Name": names, "Color": colours}
    return attributes | _plane_values(planes)


def _plane_values(planes: Planes) -> dict[str, Any]:
    """Exposure time, position and so on of each plane that is written, where the image has kept them from an OME-TIFF."""
    kept, lengths = (
        planes.source.attributes.get(PLANES),
        dict(zip(planes.source.axes, planes.source.shape, strict=True)),
    )
    places = [dict(zip(planes.loops, index, strict=True)) for index in itertools.product(*map(range, planes.counts))]
    sizes = [1 if planes.colour and axis == "c" else lengths.get(axis, 1) for axis in "tcz"]
    if not isinstance(kept, dict) or kept.get("sizes") != sizes or not set(planes.loops) <= set("tcz"):
        return {}
    numbers = [np.ravel_multi_index([{**planes.at, **place}.get(a, 0) for a in "tcz"], sizes) for place in places]
    return {"Plane": [kept["planes"][number] for number in numbers]}


def _channels(planes: Planes) -> Channels:
    """The channels that are written as planes; none in colour, or where the file does not describe all of them."""
    source = planes.source
    known = known_channels(source)
    count = source.shape[source.axes.index("c")] if "c" in source.axes else 1
    if planes.colour or len(known) != count:
        return ()
    return (known[planes.at["c"]],) if "c" in planes.at else known


def _ome_colour(colour: str) -> int:
    """Red, green, blue and opacity as a signed number of 32 bits."""
    return int.from_bytes(bytes.fromhex(f"{colour}FF"), signed=True)


def _place_tags(planes: Planes, *, cog: bool) -> list[tiff_tags.Tag]:
    """The georeference, which another TIFF than a COG need not have."""
    place = planes.source.georeference
    with nullcontext() if cog else suppress(ConfigError):
        return tiff_tags.geotiff_tags(place.cropped(*planes.window.start), planes.at.get("c")) if place else []
    return []


def _nodata(planes: Planes) -> float | None:
    """The value of holes as it is written: of bool 0 or 255."""
    nodata = planes.source.nodata
    return nodata if nodata is None or planes.source.dtype != np.bool_ else 255 * nodata


def _nodata_tags(planes: Planes) -> list[tiff_tags.Tag]:
    """The value of holes; with a georeference, NaN in floats is declared as well, because GIS programs need it."""
    nodata, is_float = _nodata(planes), planes.source.dtype.kind == "f"
    if nodata is None and is_float and planes.source.georeference:
        nodata = math.nan
    if nodata is None:
        return []
    return [(tiff_tags.NODATA, "s", 0, repr(nodata if is_float else int(nodata)), True)]


def _resolution(planes: Planes) -> dict[str, Any]:
    """Pixels per centimeter along x and y, as TIFF tags."""
    known = _known_sizes(planes)
    lengths = [converted(*known[axis], "centimeter") or 0.0 for axis in "xy" if axis in known]
    if len(lengths) < 2 or not all(_LEAST_CM < length < 1 / _LEAST_CM for length in lengths):
        return {}
    return {"resolution": tuple(1 / length for length in lengths), "resolutionunit": "CENTIMETER"}
