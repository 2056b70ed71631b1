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
from halotile.graphs.plans.notes import place_text
from halotile.storage.arrays import Source
from halotile.storage.formats.base import number_of_type
from halotile.storage.images.planes import known_channels
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import is_photo
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.noise.far_value import NO_ENDS, Ends
from halotile.tasks.noise.survey import PlaneSurvey, survey_planes
from halotile.tasks.roles import Roles

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
    source: Readable,
    roles: Roles,
    original: Source,
    *,
    levels: Levels | None,
    nodata: float | None,
    previous: Mapping[str, Any] | None,
) -> ResultType:
    """Decide the type of the result: that of the image, unless rounding would cost more than a denoiser leaves.

    A resumed run keeps the type that it began with.

    Parameters
    ----------
    source : Readable
        The image, with NaN in its holes.
    original : Source
        The image as it is stored.
    levels : ndarray or None
        The estimated noise levels, one for each plane.
    nodata : float or None
        The value of a hole.
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
