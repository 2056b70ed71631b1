"""Defects of the image of a denoising job: those that stand out of the noise, those that stand out in many planes, and those that the job names."""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from halotile.errors import InputError
from halotile.graphs.jobs.denoise.image import JobImage, open_side, plane_values
from halotile.graphs.jobs.denoise.pixels import defects_text
from halotile.graphs.plans.choices import check_whole
from halotile.graphs.words import counted
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.rim import Array, Readable
from halotile.storage.views import PlaneValues, readable_parts
from halotile.tasks.inner_tiles import Roles, respanned
from halotile.tasks.noise.defects import Defects, Places, outliers, stabilised
from halotile.tasks.noise.estimate import planes_at_once, sampled_planes, spread_evenly
from halotile.tasks.noise.photon_noise import PLANES, PhotonNoise, noise_of_plane

# Fewest planes along z and t in which lasting defects are searched, and most planes that are read for them.
LEAST_PLANES, MOST_PLANES = 4, 16
# Pixels of the largest plane in which they are looked for, and pixels that are read at once.
PLANE_PIXELS, AT_ONCE_PIXELS = 1 << 26, 1 << 27


class ChosenDefects(NamedTuple):
    """The pixels that are replaced, the image that names them, and notes."""

    defects: Defects | None = None
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any] | None:
        """Return the part of the identity of a job."""
        if (chosen := self.defects) is None:
            return None
        return {
            "kept": chosen.are_kept,
            "given": [side.fingerprint() for side in self.sources],
            "noise": [part.values.tolist() for part in chosen.noise or ()],
            "places": [] if chosen.places is None else chosen.places.tolist(),
        }


def choose_defects(image: JobImage, photons: PhotonNoise | None) -> ChosenDefects:
    """Decide which pixels are replaced. A resumed run keeps the noise and the places that it began with."""
    job, view, roles, previous = image.job, image.even, image.roles, image.previous
    wanted, kept = job.input.defects, job.input.defects_in_output == "kept"
    if wanted == "none":
        return ChosenDefects()
    if wanted != "auto":
        given = _given(wanted, image.original, view, roles)
        note = f"pixels that are not 0 in {wanted} are defects, and replaced before anything is computed"
        return ChosenDefects(Defects(given=given, are_kept=kept), (given,), (note,))
    known = (previous["identity"].get("defects") or {}) if previous else {}
    if known.get("noise"):
        gain, variance = (PlaneValues(np.asarray(part, np.float64)) for part in known["noise"])
        places = np.asarray(known["places"], np.intp).reshape(-1, len(view.shape))
        return ChosenDefects(Defects((gain, variance), places, are_kept=kept))
    gain, variance, number = _noise_of(view, roles, photons, job.noise.read_sigma)
    places = _lasting(view, roles, gain, variance)
    notes = []
    if round(number) or len(places):
        also = f", and {len(places):,} in the mean of several planes" if len(places) else ""
        notes.append(
            f"{defects_text(number, view.shape)} stand out from the noise as isolated pixels{also}: they are defects, and are replaced before anything is computed"
        )
    if without := int(np.count_nonzero((gain.values == 0) & (variance.values == 0))):
        notes.append(
            f"input.defects: auto finds nothing in {counted(without, 'plane')} of {gain.values.size:,}, whose samples show no noise. If there is noise, write its "
            "level in the units of the file, noise: {read_sigma: ...}"
        )
    return ChosenDefects(Defects((gain, variance), places, are_kept=kept), (), tuple(notes))


def _given(path: str, original: Source, view: Readable, roles: Roles) -> Source:
    """Open the image of defects that a job names."""
    side = open_side("input.defects", path).arranged_as(original)
    check_whole(side.path)
    spatial = tuple(view.shape[axis] for axis in roles.spatial)
    if side.shape not in (view.shape, spatial, spatial[-2:]):
        raise InputError(
            f"input.defects has shape {side.shape}. Write an image that is not 0 where a pixel is a defect, of the shape of the image {view.shape} "
            f"or of its tiled axes {spatial}; or auto."
        )
    return side


def _noise_of(
    view: Readable, roles: Roles, photons: PhotonNoise | None, level: float
) -> tuple[PlaneValues, PlaneValues, float]:
    """Return the gain and the variance of each plane, and the number of defects by samples."""
    apart = roles.apart
    gain, variance = (np.zeros([view.shape[axis] for axis in apart.looped]) for _ in range(2))
    known = photons or (PhotonNoise(*map(np.asarray, (0.0, 0.0, level))) if level else None)
    if known:
        lacking = [apart.looped.index(axis) for axis in apart.looped if axis not in roles.looped]
        parts = (known.gain, known.variance)
        gain[...], variance[...] = (np.expand_dims(part, lacking) if part.ndim else part for part in parts)
    found = looked = 0
    with suppress(*[InputError] if known else []):  # a plane that is too small to look at samples
        for place, squares in sampled_planes(view, roles.spatial, apart.looped, PLANES if known else None):
            if not known:
                _, gain[place], variance[place] = noise_of_plane(squares)
            found += sum(len(outliers(square, float(gain[place]), float(variance[place]))) for square in squares)
            looked += sum(square.size for square in squares)
    return plane_values(gain, apart), plane_values(variance, apart), found / max(looked, 1) * math.prod(view.shape)


def _lasting(view: Readable, roles: Roles, gain: PlaneValues, variance: PlaneValues) -> Places:
    """Return the places, -1 along z, t and an axis without a name, of pixels that stand out in the mean of planes there, though perhaps in none of them.

    The least and the largest value of each pixel do not count, such as those of a cosmic ray, nor holes.
    """
    plane, whole, dims = roles.spatial[-2:], Region.whole(view.shape), len(view.shape)
    along = [axis for axis, letter in enumerate(roles.axes) if letter in "ztq" and axis not in plane]
    pixels, found = math.prod(view.shape[axis] for axis in plane), [np.zeros((0, dims), np.intp)]
    if math.prod(view.shape[axis] for axis in along) < LEAST_PLANES or pixels > PLANE_PIXELS:
        return found[0]
    groups = planes_at_once(view, along, max(1, min(MOST_PLANES, AT_ONCE_PIXELS // pixels)))
    chosen = dict.fromkeys(spread_evenly(groups, max(1, MOST_PLANES // groups[0].size)))
    for other in np.ndindex(*(1 if axis in (*along, *plane) else n for axis, n in enumerate(view.shape))):
        spans = {axis: (index, index + 1) for axis, index in enumerate(other) if axis not in plane}
        ends = (zip(along, zip(group.start, group.stop, strict=True), strict=True) for group in chosen)
        count, total, least, most = (np.full((), start, np.float32) for start in (0, 0, np.inf, -np.inf))
        for level in _in_levels(view, (respanned(whole, spans | dict(each)) for each in ends), plane, gain, variance):
            is_known = np.isfinite(level)
            count, total = count + is_known, total + np.where(is_known, level, 0)
            least = np.minimum(least, np.where(is_known, level, np.inf))
            most = np.maximum(most, np.where(is_known, level, -np.inf))
        if count.ndim and count.max() >= LEAST_PLANES:
            count[count < LEAST_PLANES] = np.nan
            with np.errstate(invalid="ignore"):  # a pixel that is a hole in every plane
                mean = (total - least - most) / np.sqrt(count - 2)
            lasting = outliers(mean, 0.0, 1.0)
            places = np.tile(other, (len(lasting), 1))
            places[:, along], places[:, plane] = -1, lasting
            found.append(places)
    return np.concatenate(found)


def _in_levels(
    view: Readable, parts: Iterable[Region], plane: tuple[int, ...], gain: PlaneValues, variance: PlaneValues
) -> Iterator[Array]:
    """Yield planes in units in which their noise has a level of 1."""
    for part, read in itertools.chain.from_iterable(readable_parts(view, [part]) for part in parts):
        pixels = np.moveaxis(read, plane, (-2, -1))
        noise = (np.moveaxis(each.read(part), plane, (-2, -1)) for each in (gain, variance))
        numbers = (np.broadcast_to(each, (*pixels.shape[:-2], 1, 1)).ravel().tolist() for each in noise)
        for one, *each in zip(pixels.reshape(-1, *pixels.shape[-2:]), *numbers, strict=True):
            if max(each) > 0:
                yield stabilised(one, *each)
