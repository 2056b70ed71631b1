"""Physical sizes and positions of pixels in TIFF files, from OME-XML, ImageJ's description or the resolution tags."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree

from halotile.storage.formats.parts.ome_scale import AS_UNKNOWN
from halotile.storage.spacing import in_known_unit

_CENTIMETER = 3
_UNITLESS = ("", "none", "pixel", "pixels", "px")
"""Words in place of a unit for sizes that are not known."""

Sizes = dict[str, tuple[float, str | None]]
"""Pixel size, or position, and unit for each axis letter."""
Stated = dict[str, tuple[Any, str]]
"""The same in the words of a file."""


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
            remarks.append(
                f"it has {word!r:.50} as the unit along {axis}, which is no unit of space or time: left out"
            )
    if "<OME" in file.pages.first.description and not ome_images(file.pages.first.description):
        remarks.append("its OME-XML is damaged: sizes, units and names in it are left out")
    return sizes, tuple(remarks)


def _from_ome(xml: str, series: int) -> Stated:
    """PhysicalSizeX and similar attributes of one image in OME-XML; the default unit is micrometers."""
    element = _ome_pixels(xml, series)
    pixels = {} if element is None else element.attrib
    names = {axis: (f"PhysicalSize{axis.upper()}", "µm") for axis in "zyx"} | {"t": ("TimeIncrement", "s")}
    return {
        axis: (pixels[name], pixels.get(f"{name}Unit", usual))
        for axis, (name, usual) in names.items()
        if name in pixels
    }


def _ome_pixels(xml: str, series: int) -> ElementTree.Element | None:
    """The element of the pixels of one image in OME-XML."""
    return next(
        (e for image in ome_images(xml)[series : series + 1] for e in image if e.tag.endswith("Pixels")), None
    )


def ome_images(xml: str) -> list[ElementTree.Element]:
    """The elements of the images in OME-XML; none where it is damaged."""
    try:
        return [e for e in ElementTree.fromstring(xml) if e.tag.endswith("}Image") or e.tag == "Image"]
    except (ElementTree.ParseError, ValueError):
        return []


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
