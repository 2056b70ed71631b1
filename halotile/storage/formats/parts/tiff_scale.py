"""Physical sizes and positions of pixels in TIFF files, from OME-XML, ImageJ's description or the resolution tags."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from halotile.storage.formats.base import Header
from halotile.storage.formats.parts.geotiff import band_names
from halotile.storage.formats.parts.ome_scale import AS_UNKNOWN
from halotile.storage.sharded.ome_metadata import RGB, Channels, rgb_channels
from halotile.storage.spacing import in_known_unit

_RGB, _YCBCR, _JPEG = 2, 6, 7
_OPACITY = (1, 2)
"""Kinds of further samples that are opacity."""


def channels_of(file: Any, series: int) -> Channels:
    """The channels that the file describes; none where it does not."""
    page = file.series[series].keyframe
    # Other YCbCr than that of a JPEG is not decoded to RGB.
    is_rgb = page.photometric == _RGB or (page.photometric, page.compression) == (_YCBCR, _JPEG)
    if is_rgb and page.samplesperpixel == len(RGB) + has_opacity(page):
        named = (*(band_names(page) or ({},) * len(RGB))[: len(RGB)], {})
        return tuple(
            {**colour, **name}
            for colour, name in zip(rgb_channels(page.dtype, page.samplesperpixel), named, strict=False)
        )
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
    return (
        "".join(f"{int(level):02X}" for level in table[:, -1]) if len(shape) == 2 and shape[0] == 3 else None
    )


def _described(label: str | None, colour: str | None) -> dict[str, Any]:
    return ({"label": label} if label else {}) | ({"color": colour} if colour else {})


MASK = "mask"
"""Dataset of the mask in the file of an image."""


def split_series(file: Any) -> tuple[list[Any], list[Any]]:
    """The series that are images, and those that are masks; masks without an image are images."""
    masks = [one for one in file.series if one.keyframe.is_mask]
    images = [one for one in file.series if not one.keyframe.is_mask]
    return (images, masks) if images else (masks, [])


def with_mask(header: Header, masks: Sequence[Any], level: int, path: str) -> Header:
    """The header of an image, with its mask of the same level, or a remark on one that is not read."""
    beside = Path(f"{path}.msk")
    if masks:
        sizes = [
            dict(zip(one.axes, one.shape, strict=True))
            for mask in masks
            for one in mask.levels[level : level + 1]
        ]
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
