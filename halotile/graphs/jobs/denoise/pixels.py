"""Samples of the image that a job denoises: photon noise, channels, type of the result, agreement with the training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.image import JobImage, Levels, Striped, note_of_far_value
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel, noise_of_camera, noise_of_denoiser
from halotile.graphs.kinds.base import OutputState
from halotile.graphs.kinds.sections import Tile, stem
from halotile.graphs.plans.cutting import Halo, resolve_halo
from halotile.graphs.plans.notes import place_text, plane_word, planes_text, values_text
from halotile.graphs.rules.values import apply_rules
from halotile.graphs.words import dotted
from halotile.storage.arrays import Source
from halotile.storage.formats.base import number_of_type
from halotile.storage.images.planes import choose_planes, known_channels
from halotile.storage.rim import Pixels, Readable
from halotile.storage.sharded.ome_metadata import MANY, Channels, is_photo, shown_colours
from halotile.storage.views import readable_parts
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.common.photon_denoiser import ROUNDS, for_photon_noise
from halotile.tasks.inner_tiles import Roles
from halotile.tasks.noise.estimate import NO_ENDS, Ends, plane_regions, sample_regions
from halotile.tasks.noise.photon_noise import PhotonNoise, PlaneSurvey, estimate_photon_noise, survey_planes
from halotile.tasks.noise.quiet_windows import finite_values

MODEL: Literal["poisson-gaussian"] = "poisson-gaussian"
NAMED_PLANES = 6  # planes that a note names


@dataclass(frozen=True)
class Photons:
    """Photon noise of each plane, or of all."""

    noise: PhotonNoise  # in the units of the file: a number for each index of the looped axes, or one
    white: float  # the value that the denoiser sees as 1
    is_given: bool

    def to_json(self) -> dict[str, Any]:
        """Return the part of the identity of a job."""
        return {**self.noise.to_json(), "estimated": not self.is_given}

    def in_rounds(self, denoiser: Denoiser, halo: Halo, tile: Tile, dims: int) -> tuple[Denoiser, Halo]:
        """Return the denoiser for this noise, and its halo from that of the denoiser itself."""
        around = for_photon_noise(denoiser, self.noise, self.white)
        wide = resolve_halo(tile, around, dims)
        origin = wide.origin if tile.depth != "auto" else f"{ROUNDS} rounds, {halo.origin}"
        kept = replace(halo, depth=wide.depth, origin=origin, notes=(*halo.notes, *wide.notes))
        return around, kept

    def note(self, roles: Roles) -> str:
        """Return the noise as a sentence.

        >>> noise = PhotonNoise.from_values(np.array(2.0), np.array(-191.0))
        >>> Photons(noise, 255.0, is_given=False).note(Roles(("y", "x"), (0, 1), None))
        'photon noise of gain 2, offset 95.5 and read noise 0, estimated from the whole image: denoised in 3 rounds'
        """
        noise = self.noise
        gain, offset, read = (values_text(each, roles) for each in noise)
        origin = ", as given" if self.is_given else planes_text(noise.gain, roles)
        constant = [tuple(map(int, place)) for place in np.argwhere(noise.gain == 0)] if noise.gain.ndim else []
        named = [
            f"{place_text(roles, place)} shows no photon noise: taken as constant, {noise.read_sigma[place]:.4g}"
            for place in constant[:NAMED_PLANES]
        ]
        more = [f"so do {len(constant) - NAMED_PLANES} more"] if len(constant) > NAMED_PLANES else []
        low, high = float(noise.gain.min()), float(noise.gain.max())
        if (
            not self.is_given
            and 0 < low < high <= ALIKE * low
            and any(roles.axes[axis] == "c" for axis in roles.looped)
        ):
            more.append("if one camera took all channels, noise.shared: image estimates one gain from all of them")
        rounds = (
            f"photon noise of gain {gain}, offset {offset} and read noise {read}{origin}: denoised in {ROUNDS} rounds"
        )
        return "; ".join((rounds, *named, *more))


def choose_photon_noise(image: JobImage, denoiser: Denoiser, values: tuple[float, float] | None) -> Photons | None:
    """Return the photon noise of each plane; None where noise does not depend on brightness.

    A resumed run keeps the estimate that it began with.
    """
    job, roles, previous, wanted = image.job, image.roles, image.previous, image.job.noise
    for place, message in faults_of_noise(job, denoiser, wanted).items():
        raise ConfigError(f"{dotted(place)}: {message}.")
    if wanted.model == "gaussian" or faults_of_noise(job, denoiser, replace(wanted, model=MODEL)):
        return None
    white = values[1] if values else 1.0
    if not isinstance(wanted.gain, str):
        numbers = map(np.float64, (wanted.gain, wanted.offset, wanted.read_sigma))
        return Photons(PhotonNoise(*map(np.asarray, numbers)), white, is_given=True)
    known = previous["identity"].get("noise") if previous else None
    if known and known["estimated"]:
        kept = PhotonNoise.from_json(known)
        if kept.gain.shape in ((), tuple(image.source.shape[i] for i in roles.looped)):
            return Photons(kept, white, is_given=False)
    is_auto = wanted.model == "auto"
    if is_auto and previous and "noise" in previous["identity"]:
        return None
    channels = [axis for axis in roles.looped if roles.axes[axis] == "c" and wanted.shared != "image"]
    found = estimate_photon_noise(
        image.even, roles.spatial, roles.looped, apart=channels, shared=wanted.shared != "none", clearly=is_auto
    )
    if found is None and is_auto:
        return None
    if found is None:
        raise ConfigError(
            "noise.model is poisson-gaussian without a gain, and samples of the image do not show noise that grows with brightness. "
            "Write noise.gain, in units of the file per photon, with the noise.offset of the camera, or model: gaussian."
        )
    return Photons(found, white, is_given=False)


def faults_of_noise(job: Denoising, denoiser: Denoiser, noise: NoiseModel) -> Mapping[tuple[str | int, ...], str]:
    """Return the faults of a noise model for this job."""
    parts = {"noise": noise, "denoiser": denoiser, "input": job.input}
    return apply_rules((noise_of_camera, noise_of_denoiser), parts)


def remark_on_noise(
    job: Denoising, denoiser: Denoiser, planes: Sequence[PlaneSurvey], roles: Roles, levels: Levels | None
) -> tuple[str, ...]:
    """Return a remark on noise that clearly grows with brightness, where one level is estimated for each plane."""
    if levels is None or faults_of_noise(job, denoiser, NoiseModel(model=MODEL)):
        return ()
    if not (growing := [plane for plane in planes if plane.grows]):
        return ()
    where = _where(growing, planes, roles)
    plane = plane_word("".join(roles.axes[i] for i, n in zip(roles.looped, levels.shape, strict=True) if n > 1))
    one_by_one = f", {plane} by {plane}" if levels.size > 1 else ""
    return (
        f"the noise grows with brightness{where}, as that of counted photons does, and one level is taken for dark and bright alike. If "
        f"photons are counted, write noise: {{model: {MODEL}}}, or compare the two with `recon-cli try`{one_by_one}",
    )


def _where(some: Sequence[PlaneSurvey], planes: Sequence[PlaneSurvey], roles: Roles) -> str:
    """Return the names of some of the planes; nothing for all."""
    names = "; ".join(place_text(roles, plane.place) for plane in some[:NAMED_PLANES])
    return "" if len(some) == len(planes) else f" in {names}{' and others' if len(some) > NAMED_PLANES else ''}"


def _remark_on_correlation(planes: Sequence[PlaneSurvey], roles: Roles, striped: Striped) -> tuple[str, ...]:
    """Return a remark on noise that is clearly not independent from pixel to pixel; stripes that are seen have a note of their own."""
    clear = [
        plane
        for plane in planes
        if (seen := plane.correlation) and seen.is_clear and not (striped.axis and seen.across)
    ]
    if not clear:
        return ()
    found, more = clear[0].correlation, "" if len(clear) == 1 else " in the first of them"
    assert found
    return (
        f"the noise is correlated{_where(clear, planes, roles)}, by {found}{more}: denoisers take such noise for structure of the image, "
        f"and keep it; an estimate of its level is too low. {found.advice}",
    )


def decided_noise(wanted: NoiseModel, photons: Photons | None) -> dict[str, Any]:
    """Return the keys of the noise model that were decided."""
    if photons is None:
        return {"model": "gaussian"}
    is_one = photons.noise.gain.size == 1
    return {"model": MODEL} | {name: float(np.ravel(v)[0]) for name, v in photons.noise.to_json().items() if is_one}


SAMPLES = 8  # squares of each channel from which its contrast is taken
TAILS = (0.1, 99.9)  # percentiles that are shown as black and white
MOST_UNNAMED = len(MANY)


def display_channels(image: JobImage, state: OutputState) -> Channels:
    """Return the channels as the ``omero`` metadata of OME-Zarr have them; none of many that the file does not describe.

    The contrast that a file leaves open is that of samples of the image; a resumed run keeps the one that it began with. The name of the output is
    that of the only channel where the file has none.
    """
    source, pixels = image.original, image.holed.view(image.original, image.sides.get("mask"), image.roles)
    if state.previous:
        kept = state.previous["outputs"][0]["layout"].get("omero")
        return tuple(kept["channels"]) if kept else ()
    count = source.shape[source.axes.index("c")] if "c" in source.axes else 1
    described = source.channels or _unnamed(source, count, state)
    if len(described) != count or (source.ome and source.ome.omero):
        return ()
    colours = shown_colours(described)
    return tuple(
        {
            "label": channel.get("label", str(number)),
            "color": colours[number],
            "active": channel.get("active", True),
            "window": _window(channel.get("window"), source, pixels, number),
        }
        for number, channel in enumerate(described)
    )


def _unnamed(source: Source, count: int, state: OutputState) -> Channels:
    """Return a description of channels that the file does not describe: the name of the output for one, colours as viewers choose them for several."""
    if count == 1:
        return ({"label": stem(str(state.output))},)
    if count > MOST_UNNAMED or choose_planes(source, {}, None).colour:
        return ()
    return ({},) * count


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
    at = {source.axes.index("c"): number} if "c" in source.axes else {}
    regions = plane_regions(source.shape, (source.axes.index("y"), source.axes.index("x")), at, SAMPLES)
    finite = finite_values([part for _, part in readable_parts(pixels, regions)])
    return finite if finite.size else np.zeros(1)


ALIKE = 2.0  # ratio of the gains of channels up to which they may be those of one camera
# Whole numbers between the least and largest values of a plane below which rounding costs: see docs/design/018.
FEW_LEVELS = 128
# Noise level below which it costs in a type of more than a byte, whose images need not fill their range.
LITTLE_NOISE = 2.0
EXACT = 2.0**24  # whole numbers up to here are exact in float32


class ResultType(NamedTuple):
    """The type of the result, and notes."""

    dtype: str
    notes: tuple[str, ...] = ()
    alone: float = 0.0  # pixels that stand out of the noise alone, by samples, and stay


def choose_type(image: JobImage, denoiser: Denoiser, levels: Levels | None) -> ResultType:
    """Decide the type of the result: that of the image, unless rounding would cost more than a denoiser leaves.

    A resumed run keeps the type that it began with. ``levels``: estimated noise levels, one for each plane.
    """
    job, source, roles, original = image.job, image.even, image.roles, image.original
    stored, nodata, previous = original.dtype, image.holed.value, image.previous
    # A mask is smoothed to values between 0 and 1.
    own = "float32" if stored == np.bool_ else str(stored)
    wanted = own if job.output.dtype == "auto" else job.output.dtype
    if previous is not None:
        before = previous["identity"]["layout"]["dtype"]
        return ResultType(before if job.output.dtype == "auto" and before == "float32" else wanted)
    is_rounded = stored.kind in "iu" and np.dtype(wanted).kind in "iu" and not denoiser.keeps_values
    # Programs show photographs of whole numbers alone.
    photo = is_photo(known_channels(original))
    is_rounded = is_rounded and not photo
    looks_for_defects = job.input.defects == "none" and not photo and stored.kind in "iuf"
    if not is_rounded and levels is None and not looks_for_defects:
        return ResultType(wanted)
    if levels is None:  # a network takes channels together, whose values may be very different ones
        roles = roles.apart
    counts_alone = not is_rounded and levels is None
    planes = survey_planes(source, roles.spatial, roles.looped, correlated=not counts_alone)
    found = sum(plane.defects for plane in planes)
    looked = sum(plane.size for plane in planes) if looks_for_defects else 0
    alone = found / looked * math.prod(source.shape) if looked else 0.0
    if counts_alone:
        return ResultType(wanted, (), alone)
    remarks = (
        *remark_on_noise(job, denoiser, planes, roles, levels),
        *_remark_on_correlation(planes, roles, image.striped),
    )
    if levels is not None:
        remarks = (*_remark_on_saturation(planes, roles), *remarks)
    if stored.kind in "iu":  # floats were looked at with their holes
        ends = reduce(Ends.joined, (plane.ends for plane in planes), NO_ENDS)
        remarks = (*note_of_far_value(ends, job, by_samples=True, alone=found), *remarks)
    coarse = [plane for plane in planes if is_rounded and _is_coarse(plane, stored)]
    if coarse:
        is_held = nodata is None or number_of_type(nodata, np.dtype(np.float32)) is not None
        known = [plane for plane in planes if plane.ends.pixels]
        keeps = job.output.dtype == "auto" and is_held and all(abs(p.high) < EXACT > abs(p.low) for p in known)
        wanted = "float32" if keeps else wanted
        end = (
            f", so the result is float32. output.dtype: {own} rounds it all the same"
            if keeps
            else ": output.dtype: float32 keeps them"
        )
        remarks = (*remarks, f"{_reason(coarse)}{end}")
    return ResultType(wanted, remarks, alone)


def _remark_on_saturation(planes: Sequence[PlaneSurvey], roles: Roles) -> tuple[str, ...]:
    """Return a remark on the plane that lost most of its noise to cut-off values, too much for its level to be known."""
    plane = max(planes, key=lambda plane: plane.noise.share, default=None)
    if plane is None or not plane.noise.share:
        return ()
    where = f" in {named}" if (named := place_text(roles, plane.place)) else ""
    ends = " or ".join(f"{end:.10g}" for end in plane.noise.saturated if not math.isnan(end))
    return (
        f"about {plane.noise.share:.0%} of the pixels{where} are {ends}, at the end of the range of values, where noise was cut off: the "
        "estimated noise level may be too low. Write the level in the units of the file: noise: {model: gaussian, read_sigma: ...}",
    )


def note_of_defects(alone: float, shape: Sequence[int]) -> tuple[str, ...]:
    """Return a note on so many pixels that stand out of the noise alone, and stay."""
    there = defects_text(alone, shape)
    advice = "they spoil the pixels around them. To replace such pixels, write input.defects: auto"
    return (f"{there} stand out from the noise as isolated pixels, as hot and dead ones do: {advice}",) if alone else ()


def defects_text(number: float, shape: Sequence[int]) -> str:
    """Return an estimated number of pixels of an image.

    >>> defects_text(2.1504, (480, 448))
    'about 2 of 215,040 pixels'
    """
    return f"about {round(number):,} of {math.prod(shape):,} pixels"


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


LEARNED_SAMPLES = 16  # squares of the image that are looked at
# Quantiles beyond which values may be cut off: few that are far from the others may have been in no patch of the
# training, or here in no square.
LEARNED_TAILS = 0.01, 0.99
# Ratio of deviations above which there is a note; and ratio, or distance of means in deviations, above which the units
# are others.
NOTED, FAR = 4.0, 16.0
# Distance of means in deviations above which there is a note: an image of half the photons, whose PSNR falls by 6 dB,
# is 1.4 away.
AWAY = 1.25
# An image may be so many times flatter, such as an empty field of view; but not by less than this, where whole numbers
# were learned from.
FLAT, COUNTS = 1000.0, 0.5
USUAL = (0.0, 1.0), (0.0, 255.0), (0.0, 4095.0), (0.0, 65535.0)  # ranges that are offered where they fit


class _Spread(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4g} and deviation {self.deviation:.4g}"

    def within(self, low: float, high: float) -> _Spread:
        """The same where these values count as 0 and 1."""
        return _Spread((self.mean - low) / (high - low), self.deviation / (high - low))

    def outside(self, low: float, high: float) -> _Spread:
        """The same in units of the file, where these values count as 0 and 1."""
        return _Spread(self.mean * (high - low) + low, self.deviation * (high - low))

    def distance(self, other: _Spread) -> float:
        """Distance of the means, in the larger of the deviations."""
        return abs(self.mean - other.mean) / (max(self.deviation, other.deviation) or 1.0)

    def difference(self, other: _Spread) -> float:
        """Ratio of the deviations, or the distance of the means with the same weight: whichever is larger."""
        small, large = sorted((self.deviation, other.deviation))
        return max(self.distance(other) * NOTED / AWAY, large / small if small else 1.0)


def note_of_trained_pixels(image: JobImage, denoiser: Denoiser, values: tuple[float, float] | None) -> tuple[str, ...]:
    """Return a note on an image whose pixels are unlike those that the weights learned from; ``values``: those that count as 0 and 1."""
    dtype: np.dtype[Any] = image.source.dtype
    trained = denoiser.trained_pixels
    if trained is None or image.previous is not None:
        return ()
    low, high = values or (0.0, 1.0)
    notes: list[str] = []
    spreads = map(_Spread, trained.mean, trained.deviation)
    for channel, (learned, (whole, middle)) in enumerate(zip(spreads, _spreads(image.view, image.roles), strict=False)):
        seen = min((part.within(low, high) for part in (whole, middle)), key=learned.difference)
        if learned.difference(seen) <= NOTED:
            continue
        where = f" of channel {channel}" if len(trained.mean) > 1 else ""
        found = f"the pixels{where} have {seen.outside(low, high)}, and the weights expect {learned.outside(low, high)}"
        lit = "darker" if seen.mean < learned.mean else "brighter"
        instead = f"if it is the same kind of image, only {lit} or in other units, write input.range: {_range_text(learned, middle, high - low)}"
        # No type of fewer numbers than those that were learned from has the same unit.
        is_narrower = dtype.kind in "iu" and np.iinfo(dtype).max < high
        if image.job.input.range == "auto" and (is_narrower or _is_in_other_units(seen, learned, high - low)):
            raise ConfigError(
                f"input.range is auto, which assumes the units of the training images: {found}. For this image, {instead}; if it is another kind, train on "
                f"images like it, or write input.range: [{low:g}, {high:g}] to go on."
            )
        notes.append(f"{found}: {instead}; otherwise use weights that were trained on images like this one")
    return tuple(notes[:1])


def _spreads(view: Readable, roles: Roles) -> Iterator[tuple[_Spread, _Spread]]:
    """Yield mean and deviation of each channel that a network takes, with all values and without the tails."""
    square = tuple(sorted((*roles.spatial[-2:], *(() if roles.channel is None else (roles.channel,)))))
    regions = sample_regions(view.shape, LEARNED_SAMPLES, square)
    parts = [roles.arrange(part) for _, part in readable_parts(view, regions)]
    for channel in range(parts[0].shape[len(roles.looped)] if parts else 0):
        values = finite_values([part.take(channel, len(roles.looped)) for part in parts])
        if values.size:
            low, high = np.quantile(values, LEARNED_TAILS)
            middle = values[(values >= low) & (values <= high)]
            yield _spread(values), _spread(middle)


def _spread(values: Pixels) -> _Spread:
    return _Spread(float(values.mean()), float(values.std()))


def _is_in_other_units(seen: _Spread, learned: _Spread, width: float) -> bool:
    """Return True where no image like those of the training has such pixels."""
    if not seen.deviation:  # an empty image has no scale that could be another
        return learned.distance(seen) > FAR
    is_flat = seen.deviation * FAR < learned.deviation
    is_below_counts = width >= USUAL[1][1] and seen.deviation * width < COUNTS
    return (
        learned.distance(seen) > FAR
        or seen.deviation > FAR * learned.deviation
        or seen.deviation * FLAT < learned.deviation
        or (is_flat and is_below_counts)
    )


def _range_text(learned: _Spread, seen: _Spread, usual: float) -> str:
    """Return the range in which an image has the mean and deviation that were learned from, or a usual one near it; of the usual width where all is equal.

    >>> _range_text(_Spread(0.42, 0.33), _Spread(110.0, 80.0), 1.0), _range_text(_Spread(0.02, 0.01), _Spread(0.4, 0.3), 1.0)
    ('[0, 255]', '[-0.2, 29.8]')
    >>> _range_text(_Spread(0.3, 0.1), _Spread(50.0, 0.0), 100.0)
    '[20, 120]'
    """
    width = seen.deviation / learned.deviation if seen.deviation and learned.deviation else usual
    low = seen.mean - learned.mean * width
    near = [ends for ends in USUAL if learned.difference(seen.within(*ends)) < 2] if seen.deviation else []
    if near:
        ends = min(near, key=lambda ends: learned.difference(seen.within(*ends)))
        return f"[{ends[0]:g}, {ends[1]:g}]"
    digits = max(3, math.ceil(math.log10(max(abs(low), width) / width)) + 3)
    return f"[{_plain(low, digits)}, {_plain(low + width, digits)}]"


def _plain(number: float, digits: int) -> str:
    """Return a rounded number without an exponent, as a person writes it."""
    return f"{float(f'{number:.{digits}g}'):.15g}"
