"""Planes of an image as samples show them: range of values, noise level, and its growth with brightness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from halotile.errors import InputError
from halotile.storage.rim import Readable
from halotile.tasks.noise.details import Values
from halotile.tasks.noise.estimate import Ends, PlaneLevel, measure_plane, sampled_planes
from halotile.tasks.noise.photon_noise import fit_photon_noise

PLANES = 64
"""Planes that are looked at, at most."""
TAIL = 1e-3
"""Share of the samples below the range of values, and above."""


@dataclass(frozen=True)
class PlaneSurvey:
    """A plane as its samples show it."""

    place: tuple[int, ...]  # its index on each looped axis
    # low, high: range of all but the least and largest values, in the units of the file; NaN without any
    low: float
    high: float
    noise: PlaneLevel  # noise level in the same units; 0 or NaN where there is none
    grows: bool  # true if the noise clearly grows with brightness
    ends: Ends  # its least and largest values


def survey_planes(
    source: Readable, spatial: Sequence[int], looped: Sequence[int] = ()
) -> tuple[PlaneSurvey, ...]:
    """Look at samples of the planes, spread evenly where there are many; at none that are too small or cannot be read.

    ``source``: image; ``spatial, looped``: positions of the spatial axes, and of those of which each index is a plane by itself.
    """
    found = []
    with suppress(InputError):  # a run says so, where it matters
        for place, squares in sampled_planes(source, spatial, looped, PLANES):
            found.append(_surveyed(place, squares))
    return tuple(found)


def _surveyed(place: tuple[int, ...], squares: list[Values]) -> PlaneSurvey:
    values = np.concatenate([square[np.isfinite(square)] for square in squares])
    low, high = np.quantile(values, [TAIL, 1 - TAIL]) if values.size else (math.nan, math.nan)
    fit = fit_photon_noise(squares)
    grows = fit is not None and fit.is_clear
    return PlaneSurvey(place, float(low), float(high), measure_plane(squares), grows, Ends.of(values))
