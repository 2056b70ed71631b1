"""Physical sizes and positions of pixels in TIFF files, from OME-XML, ImageJ's description or the resolution tags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree

from halotile.storage.spacing import UNITS

_CENTIMETER = 3

Sizes = dict[str, tuple[float, str | None]]
"""Pixel size, or position, and unit for each axis letter."""


def pixel_sizes(file: Any, series: int) -> Sizes:
    """The pixel sizes that the file states; other axes are left out."""
    if file.is_ome:
        return _from_ome(file.ome_metadata, series)
    page = file.series[series].keyframe
    return _from_imagej(file, page) if file.is_imagej else _from_tags(page)


def _from_ome(xml: str, series: int) -> Sizes:
    """PhysicalSizeX and similar attributes of one image in OME-XML; the default unit is micrometers."""
    element = _ome_pixels(xml, series)
    pixels = {} if element is None else element.attrib
    sizes = {axis: _size(pixels, f"PhysicalSize{axis.upper()}", "µm") for axis in "zyx"}
    sizes["t"] = _size(pixels, "TimeIncrement", "s")
    return {axis: size for axis, size in sizes.items() if size is not None}


def _ome_pixels(xml: str, series: int) -> ElementTree.Element | None:
    """The element of the pixels of one image in OME-XML."""
    try:
        images = [e for e in ElementTree.fromstring(xml) if e.tag.endswith("}Image") or e.tag == "Image"]
        return next(e for e in images[series] if e.tag.endswith("Pixels"))
    except (ElementTree.ParseError, IndexError, StopIteration):
        return None


def positions(file: Any, series: int) -> Sizes:
    """Position of the first pixel and its unit for each axis letter, where all planes of an OME-TIFF agree; along z that of the first planes."""
    element = _ome_pixels(file.ome_metadata, series) if file.is_ome else None
    planes = [e.attrib for e in (() if element is None else element) if e.tag.endswith("Plane")]
    found: Sizes = {}
    for axis in "zyx":
        name = f"Position{axis.upper()}"
        stated = {
            (plane.get(name), plane.get(f"{name}Unit", ""))
            for plane in planes
            if axis != "z" or plane.get("TheZ") == "0"
        }
        if len(stated) == 1:
            text, unit = stated.pop()
            with suppress(TypeError, ValueError):
                if math.isfinite(position := float(text or "")):
                    found[axis] = (position, _unit(unit))
    return found


def _size(pixels: Mapping[str, str], name: str, unit: str) -> tuple[float, str | None] | None:
    """The value and unit of one attribute."""
    size = _length(pixels.get(name))
    return None if size is None else (size, _unit(pixels.get(f"{name}Unit", unit)))


def _length(value: Any) -> float | None:
    """A positive finite number; None for any other value."""
    try:
        size = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return size if 0 < size < math.inf else None


def _from_imagej(file: Any, page: Any) -> Sizes:
    """Sizes from the resolution tags and ImageJ's description, which names units of other axes where they differ from that along x."""
    description = file.imagej_metadata or {}
    unit = _unit(str(description.get("unit", "")))
    if unit is None:
        return {}
    sizes = _resolution(page, unit, 1.0)
    if "y" in sizes and "yunit" in description:
        sizes["y"] = (sizes["y"][0], _unit(str(description["yunit"])))
    for axis, key, usual in (("z", "spacing", unit), ("t", "finterval", "second")):
        if (size := _length(description.get(key))) is not None:
            named = description.get(f"{axis}unit")
            sizes[axis] = (size, usual if named is None else _unit(str(named)))
    return sizes


def _from_tags(page: Any) -> Sizes:
    """Sizes from resolution tags in pixels per centimeter. Those per inch concern printing, and are ignored."""
    tag = page.tags.get("ResolutionUnit")
    return _resolution(page, "micrometer", 1e4) if tag is not None and tag.value == _CENTIMETER else {}


def _resolution(page: Any, unit: str, length: float) -> Sizes:
    """Pixel sizes from the two resolution tags, which are fractions in pixels per ``length``."""
    sizes: Sizes = {}
    for axis in "xy":
        tag = page.tags.get(f"{axis.upper()}Resolution")
        match tag.value if tag is not None else None:
            case (int(pixels), int(per)) if pixels and (size := _length(length * per / pixels)) is not None:
                sizes[axis] = (size, unit)
    return sizes


def _unit(text: str) -> str | None:
    """The name of a unit in OME-Zarr; unknown units are unchanged."""
    word = text.strip()
    return UNITS.get(word, word) if word and word not in ("pixel", "pixels", "none") else None
