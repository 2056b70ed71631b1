"""Names, colours and contrast of the channels, for viewers."""

from __future__ import annotations

from typing import Any

import numpy as np

from halotile.graphs.kinds.patterns import stem
from halotile.graphs.plans.stages import Begun
from halotile.storage.arrays import Source
from halotile.storage.images.planes import choose_planes
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels
from halotile.storage.views import readable_parts
from halotile.tasks.noise.estimate import sample_regions

SAMPLES = 8
"""Squares of each channel from which its contrast is taken."""
TAILS = (0.1, 99.9)
"""Percentiles that are shown as black and white."""
WHITE = "FFFFFF"
PAIR = ("FF00FF", "00FF00")
MANY = ("00FFFF", "FFFF00", "FF00FF", "FF0000", "00FF00", "0000FF")
"""Colours of two channels, and of more."""
MOST_UNNAMED = len(MANY)


def display_channels(source: Source, pixels: Readable, begun: Begun) -> Channels:
    """Return the channels as the ``omero`` metadata of OME-Zarr have them; none of many that the file does not describe.

    The contrast that a file leaves open is that of samples of the image; a resumed run keeps the one that it began with.

    Parameters
    ----------
    source : Source
        The image.
    pixels : Readable
        Its pixels, with NaN in its holes.
    begun : Begun
        The output, whose name is that of the only channel where the file has none, and the plan of an earlier run there.
    """
    if begun.previous:
        kept = begun.previous["outputs"][0]["layout"].get("omero")
        return tuple(kept["channels"]) if kept else ()
    count = source.shape[source.axes.index("c")] if "c" in source.axes else 1
    described = source.channels or _unnamed(source, count, begun)
    if len(described) != count or (source.ome and source.ome.omero):
        return ()
    return tuple(
        {
            "label": channel.get("label", str(number)),
            "color": channel.get("color", WHITE),
            "active": channel.get("active", True),
            "window": _window(channel.get("window"), source, pixels, number),
        }
        for number, channel in enumerate(described)
    )


def _unnamed(source: Source, count: int, begun: Begun) -> Channels:
    """Return a description of channels that the file does not describe: the name of the output for one, colours as viewers choose them for several."""
    if count == 1:
        return ({"label": stem(str(begun.output))},)
    if count > MOST_UNNAMED or choose_planes(source, {}, None).colour:
        return ()
    return tuple({"color": color} for color in (PAIR if count == 2 else MANY)[:count])


def _window(given: Any, source: Source, pixels: Readable, number: int) -> dict[str, float]:
    """Return the values that are shown, and those that are possible."""
    values = np.zeros(1) if given else _sampled(source, pixels, number)
    start, end = given or np.percentile(values, TAILS).tolist()
    end = end if end > start else start + 1
    if source.dtype.kind in "iu":
        lowest, highest = np.iinfo(str(source.dtype)).min, np.iinfo(str(source.dtype)).max
    else:
        lowest, highest = min(start, values.min()), max(end, values.max())
    window = {"start": start, "end": end, "min": lowest, "max": highest}
    return {key: float(value) for key, value in window.items()}


def _sampled(source: Source, pixels: Readable, number: int) -> Any:
    """Return pixels of squares of one channel that are finite."""
    at = source.axes.index("c") if "c" in source.axes else None
    shape = tuple(1 if axis == at else n for axis, n in enumerate(source.shape))
    square = (source.axes.index("y"), source.axes.index("x"))
    shift = tuple(number if axis == at else 0 for axis in range(len(shape)))
    regions = [region.shift(shift) for region in sample_regions(shape, SAMPLES, square)]
    values = np.concatenate([np.zeros(0), *(part.ravel() for _, part in readable_parts(pixels, regions))])
    finite = values[np.isfinite(values)]
    return finite if finite.size else np.zeros(1)
