"""The type of the result, and notes on what the first planes of the image show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from halotile.graphs.jobs.denoise.image.holes import note_of_far_value
from halotile.graphs.jobs.denoise.image.opening import Levels
from halotile.graphs.jobs.denoise.image.photons import remark_on_noise
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.patterns import stem
from halotile.graphs.plans.notes import place_text
from halotile.graphs.plans.stages import Begun
from halotile.storage.arrays import Source
from halotile.storage.formats.base import number_of_type
from halotile.storage.images.planes import choose_planes, known_channels
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import Channels, is_photo
from halotile.storage.views import readable_parts
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.noise.estimate import NO_ENDS, Ends, sample_regions
from halotile.tasks.noise.survey import PlaneSurvey, survey_planes
from halotile.tasks.roles import Roles

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

    ``source``: image; ``pixels``: its pixels, with NaN in its holes; ``begun``: output, whose name is that of the only channel where the file has
    none, and the plan of an earlier run there.
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


FEW_LEVELS = 128
"""Whole numbers between the least and largest values of a plane below which rounding costs: see docs/design/018."""
LITTLE_NOISE = 2.0
"""Noise level below which it costs in a type of more than a byte, whose images need not fill their range."""
EXACT = 2.0**24
"""Whole numbers up to here are exact in float32."""


class ResultType(NamedTuple):
    """The type of the result, and notes."""

    dtype: str
    notes: tuple[str, ...] = ()


def choose_type(
    job: Denoising,
    denoiser: Denoiser,
    source: Readable,  # image, with NaN in its holes
    roles: Roles,
    original: Source,  # image as it is stored
    *,
    levels: Levels | None,  # estimated noise levels, one for each plane
    nodata: float | None,  # value of a hole
    previous: Mapping[str, Any] | None,
) -> ResultType:
    """Decide the type of the result: that of the image, unless rounding would cost more than a denoiser leaves.

    A resumed run keeps the type that it began with.
    """
    stored = original.dtype
    # A mask is smoothed to values between 0 and 1.
    own = "float32" if stored == np.bool_ else str(stored)
    wanted = own if job.output.dtype == "auto" else job.output.dtype
    if previous is not None:
        before = previous["identity"]["layout"]["dtype"]
        return ResultType(before if job.output.dtype == "auto" and before == "float32" else wanted)
    is_rounded = stored.kind in "iu" and np.dtype(wanted).kind in "iu" and not denoiser.keeps_values
    # Programs show photographs of whole numbers alone.
    is_rounded = is_rounded and not is_photo(known_channels(original))
    if not is_rounded and levels is None:
        return ResultType(wanted)
    if levels is None:  # a network takes channels together, whose values may be very different ones
        roles = replace(roles, channel=None)
    planes = survey_planes(source, roles.spatial, roles.looped)
    remarks = remark_on_noise(job, denoiser, planes, roles, levels)
    if levels is not None:
        remarks = (*_remark_on_saturation(planes, roles), *remarks)
    if stored.kind in "iu":  # floats were looked at with their holes
        ends = reduce(Ends.joined, (plane.ends for plane in planes), NO_ENDS)
        remarks = (*note_of_far_value(ends, job, by_samples=True), *remarks)
    coarse = [plane for plane in planes if is_rounded and _is_coarse(plane, stored)]
    if not coarse:
        return ResultType(wanted, remarks)
    is_held = nodata is None or number_of_type(nodata, np.dtype(np.float32)) is not None
    if job.output.dtype == "auto" and is_held and all(abs(p.high) < EXACT > abs(p.low) for p in planes):
        return ResultType(
            "float32",
            (
                *remarks,
                f"{_reason(coarse)}, so the result is float32. output.dtype: {own} rounds it all the same",
            ),
        )
    return ResultType(wanted, (*remarks, f"{_reason(coarse)}: output.dtype: float32 keeps them"))


def _remark_on_saturation(planes: Sequence[PlaneSurvey], roles: Roles) -> tuple[str, ...]:
    """Return a remark on the plane of which most noise was cut off, too much for its level to be known."""
    plane = max(planes, key=lambda plane: plane.noise.share, default=None)
    if plane is None or not plane.noise.share:
        return ()
    where = f" in {named}" if (named := place_text(roles, plane.place)) else ""
    ends = " or ".join(f"{end:.10g}" for end in plane.noise.saturated if not math.isnan(end))
    return (
        f"about {plane.noise.share:.0%} of the pixels{where} are {ends}, at the end of the range of values, where noise was cut off: the "
        "estimated noise level may be too low. Write sigma as a number",
    )


def _is_coarse(plane: PlaneSurvey, dtype: np.dtype[Any]) -> bool:
    """Return whether rounding costs in a plane; one without noise, such as of labels, is not denoised to anything between."""
    is_wide = dtype.itemsize > 1
    return plane.noise.level > 0 and (
        plane.high - plane.low < FEW_LEVELS or (is_wide and plane.noise.level < LITTLE_NOISE)
    )


def _reason(coarse: Sequence[PlaneSurvey]) -> str:
    """Return why rounding costs, of the plane with the fewest values."""
    plane = min(coarse, key=lambda plane: plane.high - plane.low)
    return (
        f"the image has few values ({plane.low:.4g} to {plane.high:.4g}, with noise of {plane.noise.level:.3g}), and rounding to whole numbers "
        "may cost more than a denoiser leaves"
    )
