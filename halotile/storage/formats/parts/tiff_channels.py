"""Names, colours and contrast of the channels of TIFF files, from OME-XML, ImageJ's description, GDAL's or the kind of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halotile.storage.formats.parts.geotiff import band_names
from halotile.storage.formats.parts.tiff_scale import ome_images
from halotile.storage.sharded.ome_metadata import RGB, Channels, rgb_channels

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
        return _from_ome(file.ome_metadata, series)
    return _from_imagej(file.imagej_metadata or {}) if file.is_imagej else band_names(page)


def has_opacity(page: Any) -> bool:
    """Return True where the last sample of a pixel is its opacity."""
    return bool(page.extrasamples) and page.extrasamples[-1] in _OPACITY


def _from_ome(xml: str, series: int) -> Channels:
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


def _from_imagej(description: Mapping[str, Any]) -> Channels:
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
