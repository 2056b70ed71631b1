"""Resolution levels of OME-Zarr 0.4 and 0.5 images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halotile.errors import InputError
from halotile.storage.formats import zarr as plain
from halotile.storage.formats.base import Header, Source, make_header
from halotile.storage.run_directory.checksummed_lines import digest
from halotile.storage.sharded.ome_metadata import OmeImage, checked_omero
from halotile.storage.stored_array import StoredArray

_BEFORE_NAMES = "tczyx"
"""Axes of an image of OME-Zarr 0.1 or 0.2, all of which have five."""


def claims(path: Path) -> bool:
    """Return True when the attributes at the root of a Zarr describe a multiscale image."""
    if not (path.is_dir() or path.suffix == ".zip"):
        return False
    new = plain.read_document(path, "zarr.json")
    attributes = new.get("attributes", {}) if isinstance(new, dict) else plain.read_document(path, ".zattrs")
    return isinstance(attributes, dict) and bool(plain.ome_attributes(attributes).get("multiscales"))


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open one level of an OME-Zarr image; with ``dataset``, that array of the group."""
    if dataset is not None:
        return plain.open(path, level=level, dataset=dataset, axes=axes)
    return StoredArray(path, "ome", OmeReader, level=level, axes=axes)


class OmeReader(plain.ArrayReader):
    """An open level of an OME-Zarr image."""

    def __init__(self, path: str, *, level: int, axes: str | None) -> None:
        group = plain.open_node(path)
        attributes = plain.ome_attributes(group.attrs)
        image = _first_image(attributes.get("multiscales"))
        entry = _level_entry(image, level)
        array = plain.choose_array(group, entry["path"])
        named, units = _axis_names(image.get("axes"), len(array.shape))
        scale, translation = _coordinates(image, entry, len(array.shape))
        super().__init__(path, array)
        self.header: Header = make_header(
            array.shape,
            array.dtype,
            requested=axes,
            named=named,
            chunks=array.chunks,
            shards=array.shards or array.chunks,
            scale=scale,
            units=units,
            identity={"level": level, "multiscales": digest(image), **self.identity()},
            mapped=self.mapped,
            ome=OmeImage(translation, _text(image.get("name")), checked_omero(attributes.get("omero"))),
        )


def _first_image(multiscales: Any) -> Mapping[str, Any]:
    """The first image of a group, after validation of its levels."""
    image: Any = multiscales[0] if isinstance(multiscales, list) and multiscales else None
    entries = image.get("datasets") if isinstance(image, dict) else None
    if isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries
    ):
        return dict(image)
    raise InputError(
        "its OME-Zarr attributes name no levels: multiscales[0].datasets is not a list with a path in each entry. "
        "Repair the attributes, or write dataset: the path of an array inside."
    )


def _level_entry(image: Mapping[str, Any], level: int) -> Mapping[str, Any]:
    """The entry of one level in the multiscale attributes."""
    entries: Sequence[Mapping[str, Any]] = image["datasets"]
    if level < len(entries):
        return entries[level]
    known = ", ".join(f"{number} ({entry['path']!r})" for number, entry in enumerate(entries))
    raise InputError(f"level is {level}, but this image has no such level. Write one of: {known or 'none'}.")


def _axis_names(entries: Any, count: int) -> tuple[Sequence[str | None] | None, Sequence[str | None] | None]:
    """Name and unit of each axis; entries are dictionaries since 0.4, plain names in 0.3, and tczyx without any before."""
    if entries is None and count == len(_BEFORE_NAMES):
        return list(_BEFORE_NAMES), None
    if not isinstance(entries, list) or len(entries) != count:
        return None, None
    axes = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    return [_axis_name(axis) for axis in axes], [_text(axis.get("unit")) for axis in axes]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _axis_name(axis: Mapping[str, Any]) -> str:
    """The name of an axis, or its type when that identifies a longer name."""
    name = str(axis.get("name", ""))
    return str(axis["type"]) if len(name) != 1 and axis.get("type") in ("time", "channel") else name


def _coordinates(
    image: Mapping[str, Any], entry: Mapping[str, Any], count: int
) -> tuple[list[float], tuple[float, ...]]:
    """Pixel size of one level and position of its first pixel, by the transformations of the level, then of the image.

    The position is empty without any translation.
    """
    scale, position, is_known = [1.0] * count, [0.0] * count, False
    for holder in (entry, image):
        for kind, numbers in _transformations(holder, count):
            if kind == "scale":
                scale = [a * b for a, b in zip(scale, numbers, strict=True)]
                position = [a * b for a, b in zip(position, numbers, strict=True)]
            else:
                position, is_known = [a + b for a, b in zip(position, numbers, strict=True)], True
    return scale, tuple(position) if is_known else ()


def _transformations(holder: Mapping[str, Any], count: int) -> Iterator[tuple[str, list[float]]]:
    """Scales and translations in order, without those of another number of axes or of other types."""
    steps = holder.get("coordinateTransformations") or []
    try:
        for step in steps:
            kind = step.get("type")
            numbers = step.get(kind) if kind in ("scale", "translation") else None
            if isinstance(numbers, list) and len(numbers) == count:
                values = [float(number) for number in numbers]
                if not all(map(math.isfinite, values)):
                    raise ValueError
                yield kind, values
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"its coordinateTransformations are {steps!r:.200}: OME-Zarr requires a list of scales and translations, each with a "
            f"number for each of the {count} axes. Repair the attributes, or write dataset: the path of an array inside."
        ) from None
