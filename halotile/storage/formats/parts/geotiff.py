"""GeoTIFF tags: the place of an image on Earth, as read from a TIFF or written to one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import unescape

import numpy as np

from halotile.errors import ConfigError
from halotile.storage.georeference import Georeference
from halotile.storage.sharded.ome_metadata import Channels

PIXEL_SCALE, TIEPOINT, MATRIX = 33550, 33922, 34264
DIRECTORY, DOUBLES, ASCII, METADATA, NODATA = 34735, 34736, 34737, 42112, 42113
_RPC = 50844
_MODEL, _RASTER, _GEOGRAPHIC, _ANGULAR_UNIT, _PROJECTED, _LINEAR_UNIT = 1024, 1025, 2048, 2054, 3072, 3076
"""GeoKeys."""
_UNITS = {9001: "meter", 9002: "foot", 9003: "foot", 9102: "degree"}
"""Units by their EPSG code; a US survey foot is two millionths longer."""
_USER_DEFINED = 32767
_QUOTES = {"&quot;": '"', "&apos;": "'"}

Tag = tuple[int, str, int, Any, bool]
"""Number, type, count, value and True, as tifffile writes it."""


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
