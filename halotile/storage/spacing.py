"""Physical sizes of pixels: units, sizes that a user writes, the shape of a voxel, and the place on Earth by GeoZarr's conventions."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

_PREFIXES = {
    "": ("", 0), "atto": ("a", -18), "centi": ("c", -2), "deci": ("d", -1), "exa": ("E", 18), "femto": ("f", -15), "giga": ("G", 9),
    "hecto": ("h", 2), "kilo": ("k", 3), "mega": ("M", 6), "micro": ("µ", -6), "milli": ("m", -3), "nano": ("n", -9),
    "peta": ("P", 15), "pico": ("p", -12), "tera": ("T", 12), "yocto": ("y", -24), "yotta": ("Y", 24), "zepto": ("z", -21), "zetta": ("Z", 21),
}  # fmt: skip
"""Symbol and power of ten of each prefix."""
SYMBOLS_OF_LENGTH = {f"{prefix}meter": f"{symbol}m" for prefix, (symbol, _) in _PREFIXES.items()} | {
    "angstrom": "Å", "foot": "ft", "inch": "in", "mile": "mi", "parsec": "pc", "yard": "yd",
}  # fmt: skip
"""Symbols in OME-XML of the units of length in OME-Zarr."""
SYMBOLS_OF_TIME = {f"{prefix}second": f"{symbol}s" for prefix, (symbol, _) in _PREFIXES.items()} | {
    "day": "d", "hour": "h", "minute": "min",
}  # fmt: skip
"""Symbols in OME-XML of the units of time in OME-Zarr."""
_METERS = {f"{prefix}meter": 10.0**power for prefix, (_, power) in _PREFIXES.items()} | {
    "angstrom": 1e-10, "foot": 0.3048, "inch": 0.0254, "mile": 1609.344, "parsec": 3.0856775814913673e16, "yard": 0.9144,
}  # fmt: skip
"""Units of length in meters."""

# Units of space and time in OME-Zarr; its list lacks the degree, which maps have and viewers read.
OME_UNITS = frozenset((*SYMBOLS_OF_LENGTH, *SYMBOLS_OF_TIME, "degree"))
_WORDS = {symbol: name for names in (SYMBOLS_OF_LENGTH, SYMBOLS_OF_TIME) for name, symbol in names.items()} | {
    "micron": "micrometer", "feet": "foot", "inches": "inch", "sec": "second", "hr": "hour", "deg": "degree", "°": "degree",
}  # fmt: skip
"""Units by their symbols and usual words in files."""
_OTHERS = {
    "dam": (10.0, "meter"), "li": (127 / 60, "millimeter"), "ly": (9460730472580.8, "kilometer"), "pt": (127 / 360, "millimeter"),
    "thou": (25.4, "micrometer"), "mil": (25.4, "micrometer"), "ua": (149597870.7, "kilometer"), "das": (10.0, "second"),
}  # fmt: skip
"""Units of OME-XML that OME-Zarr lacks, as lengths and times in others."""

ALIKE = 0.01  # relative difference of two sizes that counts as none


def known_unit(word: str) -> str | None:
    """The name in OME-Zarr of a unit of space or time, by its name, symbol or plural; None for another word.

    >>> known_unit("um"), known_unit("Mm"), known_unit("inches"), known_unit("parsnip")
    ('micrometer', 'megameter', 'inch', None)
    """
    symbol = re.sub(r"^(u|μ|\\u00[Bb]5)(?=[ms]$)", "µ", word)
    if symbol in _WORDS or len(word) < 3:  # the case of a letter tells milli from mega
        return _WORDS.get(symbol)
    name = word.lower().replace("metre", "meter")
    found = (_WORDS.get(form, form) for form in (name, name.removesuffix("s")))
    return next((form for form in found if form in OME_UNITS), None)


def in_known_unit(size: float, word: str) -> tuple[float, str | None]:
    """A size, or position, in a unit of OME-Zarr; without a unit where the word names none.

    >>> in_known_unit(2.0, "thou"), in_known_unit(2.0, "km"), in_known_unit(2.0, "reference frame")
    ((50.8, 'micrometer'), (2.0, 'kilometer'), (2.0, None))
    """
    factor, name = _OTHERS.get(word, (1.0, known_unit(word)))
    return size * factor, name


def converted(value: float, unit: str | None, wanted: str | None) -> float | None:
    """A length in another unit; None where one of them is unknown.

    >>> converted(1.5, "millimeter", "micrometer"), converted(3.0, None, "micrometer")
    (1500.0, None)
    """
    if unit == wanted:
        return None if unit is None else value
    meters, others = _METERS.get(unit or ""), _METERS.get(wanted or "")
    return value * float(f"{meters / others:.12g}") if meters and others else None


def parse_size(value: float | str) -> tuple[float, str | None] | None:
    """The number and the unit of a size such as ``0.3 um``; None for what is not a size above 0.

    >>> parse_size("0.3 um"), parse_size(5), parse_size("-1"), parse_size("2 parsnip")
    ((0.3, 'micrometer'), (5.0, None), None, None)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", str(value))
    try:
        size, unit = in_known_unit(float(match[1]), match[2]) if match else (0.0, None)
    except ValueError:
        return None
    if not match or not 0 < size < math.inf or (match[2] and unit is None):
        return None
    return size, unit


def metres(length: float | str) -> float | None:
    """The metres of a length such as ``3.65 mm``; None for what is none.

    >>> metres("3.65 mm"), metres(0.5), metres("3 s")
    (0.00365, 0.5, None)
    """
    size = parse_size(length)
    return size and (size[0] if size[1] is None else converted(size[0], size[1], "meter"))


def signed_metres(length: float | str) -> float | None:
    """The metres of a length that may be below 0; None for what is none.

    >>> signed_metres("-2 um"), signed_metres(0.5), signed_metres("-")
    (-2e-06, 0.5, None)
    """
    text = str(length).strip()
    size = metres(text.removeprefix("-"))
    return -size if size and text.startswith("-") else size


def with_sizes(
    axes: Sequence[str], scale: Sequence[float], units: Sequence[str | None], sizes: Mapping[str, float | str]
) -> tuple[tuple[float, ...], tuple[str | None, ...]]:
    """Scale and units with the sizes of some axes replaced.

    >>> with_sizes("zyx", (1.0, 0.1, 0.1), (None, "micrometer", "micrometer"), {"z": "0.5 um"})
    ((0.5, 0.1, 0.1), ('micrometer', 'micrometer', 'micrometer'))
    """
    given = {axis: parsed for axis, size in sizes.items() if (parsed := parse_size(size))}
    entries = [given.get(axis, (s, u)) for axis, s, u in zip(axes, scale, units, strict=True)]
    return tuple(size for size, _ in entries), tuple(unit for _, unit in entries)


def voxel_shape(
    scale: Sequence[float], units: Sequence[str | None], *, is_given: bool = False
) -> tuple[float, ...] | None:
    """Sizes relative to the smallest one; None where the file does not know all of them.

    A file that knows no size has 1 along every axis, without a unit.

    ``scale``: size along each axis; ``is_given``: sizes are the user's, who needs no units.

    >>> voxel_shape((0.5, 0.1, 0.1), ("micrometer",) * 3)
    (5.0, 1.0, 1.0)
    >>> voxel_shape((0.3, 0.299, 0.3), ("micrometer",) * 3)
    (1.0, 1.0, 1.0)
    >>> voxel_shape((1.0, 0.1, 0.1), (None, "micrometer", "micrometer")), voxel_shape((1.0,) * 3, (None,) * 3)
    (None, None)
    >>> voxel_shape((300.0, 0.1, 0.1), ("nanometer", "micrometer", "micrometer"))
    (3.0, 1.0, 1.0)
    """
    if len(set(units)) != 1 and not all(unit in _METERS for unit in units):
        return None
    if units[0] is None and set(scale) == {1.0} and not is_given:
        return None
    sizes = [size * _METERS.get(unit or "", 1.0) for size, unit in zip(scale, units, strict=True)]
    ratios = (size / min(sizes) for size in sizes)
    return tuple(1.0 if ratio < 1 + ALIKE else round(ratio, 6) for ratio in ratios)


def downsampling(finest: int, coarse: int) -> float:
    """The downsampling factor of a level: a whole number where the lengths permit it.

    >>> downsampling(1001, 251), downsampling(1001, 250), downsampling(10, 7)
    (4, 4, 1.4285714285714286)
    """
    whole = max(1, round(finest / coarse))
    return whole if abs(finest / whole - coarse) <= 1 else finest / coarse


CRS_NAMES = ("proj:code", "proj:wkt2", "proj:projjson")
_PROJ = "Coordinate reference system information for geospatial data"
_CONVENTIONS = [
    {
        "schema_url": f"https://raw.githubusercontent.com/zarr-conventions/{name}/refs/tags/v1/schema.json",
        "spec_url": f"https://github.com/zarr-conventions/{name}/blob/v1/README.md",
        "uuid": uuid,
        "name": prefix,
        "description": description,
    }
    for name, prefix, uuid, description in (
        ("spatial", "spatial:", "689b58e2-cf7b-45e0-9fff-9cfc0883d6b4", "Spatial coordinate information"),
        ("geo-proj", "proj:", "f17cb550-5864-4468-aeb7-f3180cfb622f", _PROJ),
    )
]


@dataclass(frozen=True)
class Georeference:
    """Coordinates of pixels in a coordinate reference system (CRS).

    >>> place = Georeference((10.0, 0.0, 5e5, 0.0, -10.0, 5e6), {"proj:code": "EPSG:32632"})
    >>> place.resampled(2, 2).transform
    (20.0, 0.0, 500000.0, 0.0, -20.0, 5000000.0)
    >>> place.attributes((100, 200))["spatial:bbox"]
    [500000.0, 4999000.0, 502000.0, 5000000.0]
    """

    # numbers a to f of x = a column + b row + c and y = d column + e row + f, where (0, 0) is the outer
    # corner of the first pixel
    transform: tuple[float, ...]
    crs: Mapping[str, Any] = field(default_factory=dict)  # some of the attributes CRS_NAMES
    # GeoKeys and GDAL's metadata of the GeoTIFF that the image comes from, by the number of their tag
    geokeys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pixel_size(self) -> dict[str, float]:
        """Size of a pixel along y and x."""
        a, b, _, d, e, _ = self.transform
        return {"y": math.hypot(b, e), "x": math.hypot(a, d)}

    def resampled(self, rows: float, columns: float) -> Self:
        """The georeference of pixels that each cover so many rows and columns of these."""
        a, b, c, d, e, f = self.transform
        return replace(self, transform=(a * columns, b * rows, c, d * columns, e * rows, f))

    def cropped(self, top: float, left: float) -> Self:
        """The georeference of a part that begins at a row and a column."""
        a, b, _, d, e, _ = self.transform
        x, y = self.position(top, left)
        return replace(self, transform=(a, b, x, d, e, y))

    def position(self, row: float, column: float) -> tuple[float, float]:
        """Coordinates x and y of a point of the pixel grid."""
        a, b, c, d, e, f = self.transform
        return a * column + b * row + c, d * column + e * row + f

    def attributes(self, shape: Sequence[int]) -> dict[str, Any]:
        """Zarr attributes of an array with so many rows and columns, or of a group with such an array."""
        height, width = shape
        corners = [self.position(row, column) for row in (0, height) for column in (0, width)]
        x, y = zip(*corners, strict=True)
        return {
            "zarr_conventions": _CONVENTIONS[: 2 if self.crs else 1],
            "spatial:dimensions": ["y", "x"],
            "spatial:transform": list(self.transform),
            "spatial:shape": [height, width],
            "spatial:bbox": [min(x), min(y), max(x), max(y)],
            **self.crs,
        }


def read_georeference(attributes: Mapping[str, Any], shape: Sequence[int]) -> Georeference | None:
    """The georeference in the attributes of an array with so many rows and columns, and of its group; None where there is none.

    >>> place = Georeference((10.0, 0.0, 5e5, 0.0, -10.0, 5e6), {"proj:code": "EPSG:32632"})
    >>> read_georeference(place.attributes((100, 200)), (50, 100)) == place.resampled(2, 2)
    True
    """
    halotile = attributes.get("halotile")
    try:
        a, b, c, d, e, f = (float(number) for number in attributes["spatial:transform"])
        stated = [int(n) for n in attributes.get("spatial:shape", shape)]
        rows, columns = (downsampling(n, m) for n, m in zip(stated, shape, strict=True))
        geokeys = dict(halotile.get("geokeys", {})) if isinstance(halotile, Mapping) else {}
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    is_affine = attributes.get("spatial:transform_type", "affine") == "affine"
    if not is_affine or min(rows, columns) <= 0 or not _is_map(a, b, c, d, e, f):
        return None
    crs = {name: attributes[name] for name in CRS_NAMES if attributes.get(name)}
    place = Georeference((a, b, c, d, e, f), crs, geokeys)
    if attributes.get("spatial:registration") == "node":  # whose coordinates are those of pixel centres
        place = place.cropped(-0.5, -0.5)
    return place.resampled(rows, columns)


def _is_map(a: float, b: float, c: float, d: float, e: float, f: float) -> bool:
    """Return True when no two pixels have the same coordinates."""
    return all(map(math.isfinite, (a, b, c, d, e, f))) and a * e != b * d
