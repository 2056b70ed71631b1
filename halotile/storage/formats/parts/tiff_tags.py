"""Tags of TIFF files: a check that all pixels are there, physical sizes and positions, channels, masks, and the place on Earth."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree
from xml.sax.saxutils import unescape

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData
from halotile.storage.formats.base import Header
from halotile.storage.formats.parts.ome_scale import AS_UNKNOWN
from halotile.storage.sharded.ome_metadata import RGB, Channels, rgb_channels
from halotile.storage.spacing import Georeference, in_known_unit

PIXEL_SCALE, TIEPOINT, MATRIX = 33550, 33922, 34264
DIRECTORY, DOUBLES, ASCII, METADATA, NODATA = 34735, 34736, 34737, 42112, 42113
_RPC = 50844
_MODEL, _RASTER, _GEOGRAPHIC, _ANGULAR_UNIT, _PROJECTED, _LINEAR_UNIT = 1024, 1025, 2048, 2054, 3072, 3076  # GeoKeys
# Units by their EPSG code; a US survey foot is two millionths longer.
_UNITS = {9001: "meter", 9002: "foot", 9003: "foot", 9102: "degree"}
_USER_DEFINED = 32767
_QUOTES = {"&quot;": '"', "&apos;": "'"}

Tag = tuple[int, str, int, Any, bool]  # number, type, count, value and True, as tifffile writes it


def georeference_of(page: Any) -> Georeference | None:
    """The georeference of a page of a TIFF; None where it has none, or one without a transform."""
    numbers = (PIXEL_SCALE, TIEPOINT, MATRIX, DIRECTORY, DOUBLES, ASCII, METADATA)
    tags = {number: page.tags[number].value for number in numbers if number in page.tags}
    shorts, doubles = partial(_numbers, np.uint16), partial(_numbers, np.float64)
    kinds: dict[int, Any] = {DIRECTORY: shorts, DOUBLES: doubles, ASCII: _ascii, METADATA: str}
    try:
        transform = _transform(tags)
        found = {number: tags[number] for number in kinds if tags.get(number) is not None}
        geokeys = {str(number): kinds[number](value) for number, value in found.items()}
    except (TypeError, ValueError, OverflowError):
        return None
    if transform is None or transform[0] * transform[4] == transform[1] * transform[3]:
        return None
    code = _code(_shorts(geokeys))
    place = Georeference(transform, {} if code is None else {"proj:code": f"EPSG:{code}"}, geokeys)
    return place.cropped(-0.5, -0.5) if _is_point(geokeys) else place


def unit_of(place: Georeference) -> str | None:
    """Unit of the coordinates; None where the GeoKeys do not tell."""
    keys = _shorts(place.geokeys)
    return _UNITS.get(keys.get(_ANGULAR_UNIT if _is_geographic(keys) else _LINEAR_UNIT, 0))


def remarks_of(page: Any, place: Georeference | None) -> tuple[str, ...]:
    """Remarks on what an output does not keep of the place of the image."""
    remarks = []
    if place is None and TIEPOINT in page.tags:
        remarks.append("its ground control points are not kept: the output has no georeference")
    if _RPC in page.tags:
        remarks.append("its rational polynomial coefficients (RPC) are not kept")
    if place is not None and not place.crs and _MODEL in _shorts(place.geokeys):
        remarks.append(
            "its coordinate reference system has no EPSG code, so the output's GeoZarr attributes name none: its GeoKeys are kept beside "
            "them, and `recon-cli export --cog` writes them back"
        )
    return tuple(remarks)


def band_names(page: Any) -> Channels:
    """The descriptions of bands in GDAL's metadata, as labels of one channel each; none without any."""
    root = _gdal_metadata(page.tags[METADATA].value) if METADATA in page.tags else None
    found = {
        item.get("sample"): unescape(item.text.strip(), _QUOTES)  # which GDAL escapes twice
        for item in (() if root is None else root)
        if item.get("role") == "description" and item.text
    }
    labels = [found.get(str(band)) for band in range(page.samplesperpixel)]
    return tuple({"label": label} if label else {} for label in labels) if any(labels) else ()


def geotiff_tags(place: Georeference, band: int | None = None) -> list[Tag]:
    """The tags of a GeoTIFF: the GeoKeys that the image came with, or else made from the EPSG code, and GDAL's own.

    ``place``: with the tags that the image came with; ``band``: only band that is written; by default all.
    """
    code = place.crs.get("proj:code")
    keys, known = place.geokeys, _code(_shorts(place.geokeys))
    if place.crs and (known is None or code != f"EPSG:{known}"):
        keys = {str(DIRECTORY): _directory(place)}
    types = ((DIRECTORY, "H"), (DOUBLES, "d"), (ASCII, "s"))
    found = [(number, kind, keys[str(number)]) for number, kind in types if keys.get(str(number))]
    tags: list[Tag] = [(number, kind, 0 if kind == "s" else len(v), v, True) for number, kind, v in found]
    if metadata := band_metadata(place.geokeys.get(str(METADATA)), None if band is None else [band]):
        tags.append((METADATA, "s", 0, metadata, True))
    a, b, _, d, e, _ = place.transform
    shift = 0.5 if _is_point(keys) else 0.0
    x, y = place.position(shift, shift)
    if b == d == 0 and a > 0 > e:
        tiepoint = (TIEPOINT, "d", 6, (0.0, 0.0, 0.0, x, y, 0.0), True)
        return [(PIXEL_SCALE, "d", 3, (a, -e, 0.0), True), tiepoint, *tags]
    return [(MATRIX, "d", 16, (a, b, 0, x, d, e, 0, y, 0, 0, 0, 0, 0, 0, 0, 1), True), *tags]


def band_metadata(text: Any, bands: Sequence[int] | None = None) -> str:
    """GDAL's metadata, such as scale, offset, unit and name of each band, without statistics, which are of the noisy pixels; of some bands, in this order."""
    root = _gdal_metadata(text)
    if root is None:
        return ""
    places = None if bands is None else {str(band): str(place) for place, band in enumerate(bands)}
    for item in list(root):
        number = item.get("sample")
        is_of_another = places is not None and number is not None and number not in places
        if is_of_another or item.get("name", "").startswith("STATISTICS_"):
            root.remove(item)
        elif places is not None and number is not None:
            item.set("sample", places[number])
    return ElementTree.tostring(root, encoding="us-ascii").decode() if len(root) else ""


def _gdal_metadata(text: Any) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(str(text).strip("\0"))
    except ElementTree.ParseError:
        return None


def _transform(tags: Mapping[int, Any]) -> tuple[float, ...] | None:
    """The transform of pixel numbers by the tags, whose place in the pixel the GeoKeys tell."""
    if MATRIX in tags:
        m = [float(number) for number in tags[MATRIX]]
        transform = (m[0], m[1], m[3], m[4], m[5], m[7]) if len(m) == 16 else ()
    elif PIXEL_SCALE in tags and len(tags.get(TIEPOINT, ())) >= 6:
        width, height = (float(size) for size in tags[PIXEL_SCALE][:2])
        column, row, _, x, y, _ = (float(number) for number in tags[TIEPOINT][:6])
        transform = (width, 0.0, x - column * width, 0.0, -height, y + row * height)
    else:
        return None
    return transform if transform and all(map(math.isfinite, transform)) else None


def _ascii(value: Any) -> str:
    """A text of one byte each, in which places are counted, as a TIFF may hold it."""
    stored = value if isinstance(value, bytes) else str(value).encode()
    return "".join(chr(byte) if byte < 128 else "?" for byte in stored)


def _numbers(kind: type[np.generic], value: Any) -> Any:
    """A list of numbers of a type, whatever type they are stored in."""
    return np.array([kind(n) for n in (value if isinstance(value, tuple | list) else (value,))]).tolist()


def _shorts(geokeys: Mapping[str, Any]) -> dict[int, int]:
    """The GeoKeys whose value is a number in the directory itself."""
    numbers = geokeys.get(str(DIRECTORY), ())
    entries = zip(*(numbers[first::4] for first in range(4, 8)), strict=False)
    return {key: value for key, location, _, value in entries if location == 0}


def _code(keys: Mapping[int, int]) -> int | None:
    """EPSG code of the coordinate reference system; None where it is user-defined or unknown."""
    code = keys.get(_PROJECTED, keys.get(_GEOGRAPHIC, 0))
    return code if 0 < code < _USER_DEFINED and keys.get(_PROJECTED, 1) else None


def _is_geographic(keys: Mapping[int, int]) -> bool:
    return keys.get(_MODEL) == 2 or (_MODEL not in keys and _PROJECTED not in keys)


def _is_point(geokeys: Mapping[str, Any]) -> bool:
    """Return True where coordinates are those of pixel centres."""
    return _shorts(geokeys).get(_RASTER) == 2


def _directory(place: Georeference) -> list[int]:
    """GeoKeys of the EPSG code alone; programs take its kind and its units from the code."""
    stated = str(place.crs.get("proj:code", "not named by a code"))
    authority, _, number = stated.partition(":")
    if authority != "EPSG" or not number.isdecimal() or not 0 < int(number) < _USER_DEFINED:
        raise ConfigError(
            f"the image's coordinate reference system is {stated}, and a GeoTIFF names it by an EPSG code. "
            'Write the attribute "proj:code": "EPSG:..." into its Zarr, if there is one.'
        )
    x, y = place.position(0, 0)
    # Programs look the code up under either key; this one is right for coordinates that can be degrees alone.
    is_geographic = abs(x) <= 360 and abs(y) <= 90 and max(place.pixel_size.values()) < 10
    key = _GEOGRAPHIC if is_geographic else _PROJECTED
    entries = ((_MODEL, 2 if is_geographic else 1), (_RASTER, 1), (key, int(number)))
    return [1, 1, 0, len(entries), *(n for key, value in entries for n in (key, 0, 1, value))]


_TYPES = {1: "u1", 2: "S1", 3: "u2", 4: "u4", 5: "u8", 6: "i1", 7: "u1", 8: "i2", 9: "i4", 10: "u8", 11: "f4"}
_TYPES |= {12: "f8", 13: "u4", 16: "u8", 17: "i8", 18: "u8"}
_SEGMENTS = ((273, 279), (324, 325))  # tags of the offsets and lengths of strips, and of tiles
_WIDTH, _LENGTH, _SAMPLES, _ROWS, _PLANAR, _TILE_WIDTH, _TILE_LENGTH = 256, 257, 277, 278, 284, 322, 323
_OLD_JPEG = 513  # tag of pages, mostly thumbnails, whose pixels are a JPEG file instead of strips
_SUB_DIRECTORIES = 330
_LAST_STANDARD_TAG = 532
_ADVICE = "Copy it again from its origin."
Numbers = NDArray[np.generic]


def check_tiff(path: str) -> None:
    """Raise when a directory, a value or a segment of pixels is past the end of the file, or is missing.

    A TIFF is a chain of directories that point to values, to pixels and to the next directory. Readers fill missing pixels with zeros, or drop
    pages, without an error. No pixel is read here.
    """
    if Path(path).suffix.lower() == ".ndpi":
        return  # this variant stores the upper halves of its offsets elsewhere
    file = _Directories(path)
    waiting, seen = [file.first], set[int]()
    while waiting:
        offset = waiting.pop()
        if offset and offset not in seen:
            seen.add(offset)
            waiting += file.check(offset)


class _Directories:
    """The directories of one file, classic (32-bit offsets) or BigTIFF (64-bit)."""

    def __init__(self, path: str) -> None:
        # A plain ndarray view, because slices of np.memmap are several times slower.
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self.order: Literal["<", ">"] = "<" if self.data[0] == ord("I") else ">"
        big = int(self._read("u2", 2, 1)[0]) == 43
        self.word, self.count = ("u8", "u8") if big else ("u4", "u2")
        self.first = int(self._read(self.word, 8 if big else 4, 1)[0])
        self.entry = np.dtype([("tag", "u2"), ("type", "u2"), ("count", self.word), ("value", self.word)])

    def check(self, offset: int) -> list[int]:
        """Check one directory and return the offsets of the directories it points to."""
        count = int(self._read(self.count, offset, 1)[0])
        start = offset + np.dtype(self.count).itemsize
        entries = self._read(self.entry, start, count)
        values = {}
        for number, entry in enumerate(entries):
            if entry["tag"] <= _LAST_STANDARD_TAG:
                values[int(entry["tag"])] = self._value(start + number * self.entry.itemsize, entry)
        for offsets, lengths in _SEGMENTS:
            self._check_segments(values.get(offsets), values.get(lengths))
        if _WIDTH in values and _LENGTH in values and _OLD_JPEG not in values:
            _check_count(values)
        following = int(self._read(self.word, start + count * self.entry.itemsize, 1)[0])
        return [following, *(int(n) for n in values.get(_SUB_DIRECTORIES, ()))]

    def _value(self, offset: int, entry: np.void) -> Numbers:
        """The values of the entry at an offset: stored in the entry itself if they fit, else where it points."""
        kind = np.dtype(_TYPES.get(int(entry["type"]), "u1"))
        count, inline_bytes = int(entry["count"]), np.dtype(self.word).itemsize
        if kind.itemsize * count <= inline_bytes:
            return self._read(kind, offset + self.entry.itemsize - inline_bytes, count)
        return self._read(kind, int(entry["value"]), count)

    def _check_segments(self, offsets: Numbers | None, lengths: Numbers | None) -> None:
        """Raise when a strip or tile ends past the end of the file."""
        if offsets is None or not len(offsets):
            return
        ends = offsets.astype(np.uint64)
        if lengths is not None and len(lengths) == len(offsets):
            ends = ends + lengths.astype(np.uint64)
            # Of a sparse image both are 0, and the pixels are.
            if lost := int(np.count_nonzero((offsets == 0) != (lengths == 0))):
                raise DamagedData(
                    f"the TIFF is damaged: the place or the length of {lost} of the {len(ends)} strips or tiles of a page is 0. {_ADVICE}"
                )
        missing = int(np.count_nonzero(ends > len(self.data)))
        if missing:
            raise DamagedData(
                f"the TIFF is cut short: it has {len(self.data)} bytes, and {missing} of the {len(ends)} strips or "
                f"tiles of a page end past that, the last at byte {int(ends.max())}. {_ADVICE}"
            )

    def _read(self, kind: Any, offset: int, count: int) -> Numbers:
        """Numbers at an offset in the file."""
        dtype = np.dtype(kind).newbyteorder(self.order)
        stop = offset + count * dtype.itemsize
        if stop > len(self.data):
            raise DamagedData(
                f"the TIFF is cut short: it has {len(self.data)} bytes, and the description of its pages extends "
                f"to byte {stop}. {_ADVICE}"
            )
        return self.data[offset:stop].view(dtype)


def _check_count(values: Mapping[int, Numbers]) -> None:
    """Raise when a page names fewer strips or tiles than its pixels are in."""

    def number(tag: int, default: int) -> int:
        found = values.get(tag)
        return default if found is None or not len(found) or found.dtype.kind not in "iu" else int(found[0])

    width, length = number(_WIDTH, 0), number(_LENGTH, 0)
    across, down = number(_TILE_WIDTH, width), number(_TILE_LENGTH, number(_ROWS, length))
    planes = number(_SAMPLES, 1) if number(_PLANAR, 1) == 2 else 1
    if min(width, length, across, down) <= 0:
        return  # which the reader refuses
    needed = -(-width // across) * -(-length // down) * planes
    named = max(len(values.get(offsets, ())) for offsets, _ in _SEGMENTS)
    if named < needed:
        raise DamagedData(
            f"the TIFF is damaged: a page of {width} × {length} pixels names {named} of its {needed} strips or tiles. {_ADVICE}"
        )


_RGB, _YCBCR, _JPEG = 2, 6, 7
_OPACITY = (1, 2)  # kinds of further samples that are opacity


def channels_of(file: Any, series: int) -> Channels:
    """The channels that the file describes; none where it does not."""
    page = file.series[series].keyframe
    # Other YCbCr than that of a JPEG is not decoded to RGB.
    is_rgb = page.photometric == _RGB or (page.photometric, page.compression) == (_YCBCR, _JPEG)
    if is_rgb and page.samplesperpixel == len(RGB) + has_opacity(page):
        named = (*(band_names(page) or ({},) * len(RGB))[: len(RGB)], {})
        colours = rgb_channels(page.dtype, page.samplesperpixel)
        return tuple({**colour, **name} for colour, name in zip(colours, named, strict=False))
    if file.is_ome:
        return _channels_from_ome(file.ome_metadata, series)
    return _channels_from_imagej(file.imagej_metadata or {}) if file.is_imagej else band_names(page)


def has_opacity(page: Any) -> bool:
    """Return True where the last sample of a pixel is its opacity."""
    return bool(page.extrasamples) and page.extrasamples[-1] in _OPACITY


def _channels_from_ome(xml: str, series: int) -> Channels:
    """Name and Color of the channels of one image in OME-XML; a colour is a signed number of red, green, blue and alpha."""
    images = ome_images(xml)[series : series + 1]
    found = [e.attrib for image in images for pixels in image for e in pixels if e.tag.endswith("Channel")]
    channels = tuple(_described(channel.get("Name"), _ome_colour(channel.get("Color"))) for channel in found)
    return channels if any(channels) else ()


def _ome_colour(text: str | None) -> str | None:
    try:
        return None if text is None else f"{(int(text) >> 8) & 0xFFFFFF:06X}"
    except ValueError:
        return None


def _channels_from_imagej(description: Mapping[str, Any]) -> Channels:
    """Lookup tables, the ranges that were shown, and names of slices that are the channels, of an ImageJ hyperstack."""
    tables, ranges = description.get("LUTs") or (), description.get("Ranges") or ()
    names = [str(label).strip() for label in description.get("Labels") or ()]
    if description.get("channels") != len(names) or not all(names):
        names = []
    channels = []
    for number in range(max(len(tables), len(ranges) // 2, len(names))):
        label = names[number] if names else None
        channel = _described(label, _brightest(tables[number]) if number < len(tables) else None)
        match [float(end) for end in ranges[2 * number : 2 * number + 2]]:
            case [low, high] if -math.inf < low < high < math.inf:
                channel["window"] = (low, high)
        channels.append(channel)
    return tuple(channels)


def _brightest(table: Any) -> str | None:
    """The last colour of a lookup table of shape (3, 256)."""
    shape: Any = getattr(table, "shape", ())
    return bytes(map(int, table[:, -1])).hex().upper() if len(shape) == 2 and shape[0] == 3 else None


def _described(label: str | None, colour: str | None) -> dict[str, Any]:
    return ({"label": label} if label else {}) | ({"color": colour} if colour else {})


MASK = "mask"  # dataset of the mask in the file of an image


def split_series(file: Any) -> tuple[list[Any], list[Any]]:
    """The series that are images, and those that are masks; masks without an image are images."""
    masks = [one for one in file.series if one.keyframe.is_mask]
    images = [one for one in file.series if not one.keyframe.is_mask]
    return (images, masks) if images else (masks, [])


def with_mask(header: Header, masks: Sequence[Any], level: int, path: str) -> Header:
    """The header of an image, with its mask of the same level, or a remark on one that is not read."""
    beside = Path(f"{path}.msk")
    if masks:
        levels = [one for mask in masks for one in mask.levels[level : level + 1]]
        sizes = [dict(zip(one.axes, one.shape, strict=True)) for one in levels]
        if [(size.get("Y"), size.get("X")) for size in sizes] == [header.rows_and_columns]:
            remark = "the file has a mask: a denoising job leaves pixels where it is 0 as they are. To denoise them too, write input.nodata: none"
            return replace(header, mask=MASK, remarks=(*header.remarks, remark))
        remark = "the file has masks that are not read. Write them to a file of their own, and input: {sides: {mask: its path}}"
    elif beside.exists():
        remark = f"its mask is not read: it is in a file of its own. To leave those pixels as they are, write input: {{sides: {{mask: {beside}}}}}"
    else:
        return header
    return replace(header, remarks=(*header.remarks, remark))


_CENTIMETER = 3
_UNITLESS = ("", "none", "pixel", "pixels", "px")  # words in place of a unit for sizes that are not known

Sizes = dict[str, tuple[float, str | None]]  # pixel size, or position, and unit for each axis letter
Stated = dict[str, tuple[Any, str]]  # the same in the words of a file


def pixel_sizes(file: Any, series: int) -> tuple[Sizes, tuple[str, ...]]:
    """The pixel sizes that the file states, without other axes, and a remark on each that cannot be meant."""
    page = file.series[series].keyframe
    if file.is_ome:
        stated = _from_ome(file.ome_metadata, series)
    else:
        stated = _from_imagej(file, page) if file.is_imagej else _from_tags(page)
    sizes: Sizes = {}
    remarks = []
    for axis, (value, word) in stated.items():
        if (size := _length(value)) is None:
            remarks.append(f"it has {str(value)!r:.50} as the size along {axis}, which is none: {AS_UNKNOWN}")
            continue
        sizes[axis] = in_known_unit(size, word.strip())
        if sizes[axis][1] is None and word.strip().lower() not in _UNITLESS:
            remarks.append(f"it has {word!r:.50} as the unit along {axis}, which is no unit of space or time: left out")
    if "<OME" in file.pages.first.description and not ome_images(file.pages.first.description):
        remarks.append("its OME-XML is damaged: sizes, units and names in it are left out")
    return sizes, tuple(remarks)


def _from_ome(xml: str, series: int) -> Stated:
    """PhysicalSizeX and similar attributes of one image in OME-XML; the default unit is micrometers."""
    element = _ome_pixels(xml, series)
    pixels = {} if element is None else element.attrib
    names = {axis: (f"PhysicalSize{axis.upper()}", "µm") for axis in "zyx"} | {"t": ("TimeIncrement", "s")}
    there = {axis: found for axis, found in names.items() if found[0] in pixels}
    return {axis: (pixels[name], pixels.get(f"{name}Unit", usual)) for axis, (name, usual) in there.items()}


def _ome_pixels(xml: str, series: int) -> ElementTree.Element | None:
    """The element of the pixels of one image in OME-XML."""
    images = ome_images(xml)[series : series + 1]
    return next((e for image in images for e in image if e.tag.endswith("Pixels")), None)


def ome_images(xml: str) -> list[ElementTree.Element]:
    """The elements of the images in OME-XML; none where it is damaged."""
    try:
        return [e for e in ElementTree.fromstring(xml) if e.tag.endswith("}Image") or e.tag == "Image"]
    except (ElementTree.ParseError, ValueError):
        return []


# Attribute of an array with the exposure times, positions and other values of its planes, in the order t, c, z, as OME-
# XML has them.
PLANES = "ome_planes"


def _ome_planes(file: Any, series: int) -> list[Mapping[str, str]]:
    element = _ome_pixels(file.ome_metadata, series) if file.is_ome else None
    return [e.attrib for e in (() if element is None else element) if e.tag.endswith("Plane")]


def plane_attributes(file: Any, series: int) -> dict[str, Any]:
    """The attribute :data:`PLANES` of an OME-TIFF: lengths along t, c and z, and the values of each plane; empty without any."""
    found: dict[tuple[int, ...], dict[str, str]] = {}
    with suppress(KeyError, ValueError):
        for plane in _ome_planes(file, series):
            values = {name: text for name, text in plane.items() if not name.startswith("The")}
            found[tuple(int(plane[f"The{letter}"]) for letter in "TCZ")] = values
        sizes = [1 + max(place[i] for place in found) for i in range(3)]
        if any(found.values()) and math.prod(sizes) == len(found):
            return {PLANES: {"sizes": sizes, "planes": [found[place] for place in sorted(found)]}}
    return {}


def planes_of_channels(attributes: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """The attributes with the values of the planes of some channels, in this order; without these where they are others."""
    others = {name: value for name, value in attributes.items() if name != PLANES}
    with suppress(KeyError, TypeError, ValueError, IndexError):
        kept = attributes[PLANES]
        chosen = np.arange(len(kept["planes"])).reshape(kept["sizes"])[:, list(numbers)]
        return others | {PLANES: {"sizes": list(chosen.shape), "planes": [kept["planes"][n] for n in chosen.flat]}}
    return others


def positions(file: Any, series: int) -> Sizes:
    """Position of the first pixel and its unit for each axis letter, where all planes of an OME-TIFF agree; along z that of the first planes."""
    planes = _ome_planes(file, series)
    found: Sizes = {}
    for axis in "zyx":
        name = f"Position{axis.upper()}"
        first = [plane for plane in planes if axis != "z" or plane.get("TheZ") == "0"]
        stated = {(plane.get(name), plane.get(f"{name}Unit", "")) for plane in first}
        if len(stated) == 1:
            text, unit = stated.pop()
            with suppress(TypeError, ValueError):
                if math.isfinite(position := float(text or "")):
                    found[axis] = in_known_unit(position, unit.strip())
    return found


def _length(value: Any) -> float | None:
    """A positive finite number; None for any other value."""
    try:
        size = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return size if 0 < size < math.inf else None


def _from_imagej(file: Any, page: Any) -> Stated:
    """Sizes from the resolution tags and ImageJ's description, which names units of other axes where they differ from that along x."""
    description = file.imagej_metadata or {}
    unit = str(description.get("unit", ""))
    if unit.strip().lower() in _UNITLESS:
        return {}
    stated = _resolution(page, unit, 1.0)
    if "y" in stated and "yunit" in description:
        stated["y"] = (stated["y"][0], str(description["yunit"]))
    for axis, key, usual in (("z", "spacing", unit), ("t", "finterval", "s")):
        if key in description:
            stated[axis] = (description[key], str(description.get(f"{axis}unit", usual)))
    return stated


def _from_tags(page: Any) -> Stated:
    """Sizes from resolution tags in pixels per centimeter. Those per inch concern printing, and are ignored."""
    tag = page.tags.get("ResolutionUnit")
    return _resolution(page, "µm", 1e4) if tag is not None and tag.value == _CENTIMETER else {}


def _resolution(page: Any, unit: str, length: float) -> Stated:
    """Pixel sizes from the two resolution tags, which are fractions in pixels per ``length``."""
    stated: Stated = {}
    for axis in "xy":
        tag = page.tags.get(f"{axis.upper()}Resolution")
        match tag.value if tag is not None else None:
            case (int(pixels), int(per)) if pixels and (size := _length(length * per / pixels)) is not None:
                stated[axis] = (size, unit)
    return stated
