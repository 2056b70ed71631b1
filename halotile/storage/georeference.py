"""Place of an image on Earth, as the GeoZarr conventions ``spatial`` and ``proj`` describe it in Zarr attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from halotile.storage.spacing import downsampling

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
    crs: Mapping[str, Any] = field(default_factory=dict)  # some of the attributes :data:`CRS_NAMES`
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
