"""The image that a job denoises, as its file and the job describe it: axes, side inputs, values, noise level, holes."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.choices import check_whole, with_selected
from halotile.storage import views
from halotile.storage.arrays import Source, open_source
from halotile.storage.formats.base import number_of_type
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import order
from halotile.storage.spacing import voxel_shape
from halotile.tasks.denoise_block import describe_range
from halotile.tasks.denoisers.base import Denoiser, Leveled, Spaced
from halotile.tasks.holes import Holes, describe_value, fill_reach
from halotile.tasks.inner_tiles import Roles, respanned
from halotile.tasks.noise.defects import Defects, Repaired, axes_of_given
from halotile.tasks.noise.estimate import NO_ENDS, Ends, estimate_noise_levels, sample_regions
from halotile.tasks.noise.stripes import LineCorrections, StripedLines, WithoutStripes
from halotile.tasks.options import Auto

FLAT = 2.0  # ratio of the distances along z and within a plane from which planes are denoised one by one


def assign_axes(job: Denoising, denoiser: Denoiser, source: Source) -> tuple[JobImage, Denoiser]:
    """Decide the role of each axis; return the denoiser with the shape of the voxels as well."""
    letters, notes = _tiled_letters(job, denoiser, source)
    if "z" in letters and (shape := _voxel_shape(job, source, letters)):
        denoiser = denoiser.with_spacing(shape)
    if isinstance(denoiser, Spaced):
        denoiser.spacing_along(len(letters))
    readable: Readable = source
    axes, channel, channels = source.axes, None, denoiser.channels[0]
    if denoiser.channels != (1, 1):
        if "c" not in axes:
            if channels != 1:
                raise InputError(
                    f"{denoiser.title} takes {channels} channels, the image has axes {''.join(axes)!r} without c. "
                    "Name its channel axis with input.axes, or use a network of one channel."
                )
            readable, axes = views.ChannelAxis(source), ("c", *axes)
        channel = axes.index("c")
        if readable.shape[channel] != channels:
            raise InputError(
                f"{denoiser.title} takes {channels} channels, the image has {readable.shape[channel]}. "
                "Use a network of as many channels."
            )
    roles = Roles(axes, tuple(sorted(axes.index(a) for a in letters)), channel)
    return JobImage(job=job, original=source, source=readable, roles=roles, notes=notes), denoiser


def _tiled_letters(job: Denoising, denoiser: Denoiser, source: Source) -> tuple[str, tuple[str, ...]]:
    """Return the letters of the tiled axes, and notes."""
    axes = "".join(source.axes)
    letters, notes = job.tile.axes, []
    if letters == "auto":
        space = "".join(letter for letter in "zyx" if letter in axes)
        dims_wanted = next((dims for dims in denoiser.dims if dims <= len(space)), denoiser.dims[-1])
        letters = space[-dims_wanted:]
        if "z" in letters and 2 in denoiser.dims and (why := _flatness(job, source, letters)):
            letters = letters.replace("z", "")
            notes = [why] * (source.shape[axes.index("z")] > 1)
    if any(letter not in axes for letter in letters):
        raise ConfigError(
            f"tile.axes is {letters!r}, the image's axes are {axes!r}. Write some of these, or input.axes if they are others."
        )
    if len(letters) not in denoiser.dims:
        instead = (
            f"input.axes: {'zyx' if len(axes) == 3 else 'one letter for each'}"
            if job.tile.axes == "auto"
            else "that many of them"
        )
        raise ConfigError(
            f"tile.axes is {letters!r}: {denoiser.title} works on {' or '.join(map(str, denoiser.dims))} axes of space. "
            f"The image has {axes!r}; write {instead}."
        )
    return letters, tuple(notes)


def _voxel_shape(job: Denoising, source: Source, letters: str) -> tuple[float, ...] | None:
    """Return the distances of pixels along the tiled axes, the smallest as 1; None where they are not known."""
    at = [source.axes.index(letter) for letter in source.axes if letter in letters]
    given = set(letters) & set(job.input.spacing)
    units = [source.units[i] for i in at]
    is_partly = bool(given) and given != set(letters) and None in units
    shape = None
    if not is_partly:
        shape = voxel_shape([source.scale[i] for i in at], units, is_given=bool(given))
    if "z" in given and shape is None:
        raise ConfigError(
            f"input.spacing is {dict(job.input.spacing)}, which leaves the shape of a voxel unknown along {letters}. "
            "Write the size along each of these axes, all with a unit of length, or all without."
        )
    return shape


def _flatness(job: Denoising, source: Source, letters: str) -> str:
    """Return why planes along z are better denoised one by one; empty where a volume is."""
    shape = _voxel_shape(job, source, letters)
    if shape is None:
        return (
            "planes along z are denoised one by one: their distance is not known. To denoise the volume, write "
            "input.spacing: {z: 0.3 um, y: 0.1 um, x: 0.1 um} with the sizes of your voxels"
        )
    along = dict(zip((letter for letter in source.axes if letter in letters), shape, strict=True))
    ratio = along.pop("z") / min(along.values())
    if ratio < FLAT:
        return ""
    return (
        f"planes along z are {ratio:.3g} times as far apart as pixels, and denoised one by one; tile.axes: {letters} "
        "denoises the volume, where neighbours along z count less"
    )


Levels = NDArray[np.float64]


def open_input(job: Denoising) -> Source:
    """Open the image of a job, with the pixel sizes that it gives, and its axes in the order that OME-Zarr wants."""
    source = open_source(job.input.path, level=job.input.level, dataset=job.input.dataset, axes=job.input.axes)
    if job.output.format != "zarr":
        source = source.in_order(order(source.axes))
    source = with_selected(source, job.input.channels)
    return source.with_sizes(job.input.spacing) if job.input.spacing else source


def open_sides(image: JobImage, denoiser: Denoiser, names: Collection[str]) -> dict[str, Source]:
    """Open the side inputs of a job; the mask may be in the file of the image; ``names``: those that denoisers take."""
    sides: dict[str, Source] = {}
    job, original, source, roles = image.job, image.original, image.source, image.roles
    paths = dict(job.input.sides)
    own = original.mask if job.input.nodata != "none" else None
    if own and "mask" in paths:
        raise ConfigError(
            f"input.sides.mask is {paths['mask']}, and {original.path} has a mask of its own. Leave yours out; or write one that is 0 wherever "
            "either mask is 0, together with input.nodata: none, which ignores the mask of the file."
        )
    if own:
        paths["mask"] = original.path
    allowed = {*names, "mask"}
    spatial_shape = tuple(source.shape[i] for i in roles.spatial)
    for name, path in paths.items():
        is_own = name == "mask" and own is not None
        key = "the file's own mask" if is_own else f"input.sides.{name}"
        without = " Or write input.nodata: none, which does without it." if is_own else ""
        if name not in allowed:
            raise ConfigError(
                f"input.sides.{name}: {denoiser.title} has no such side input. Write one of {', '.join(sorted(allowed))}."
            )
        if name == "mask" and (denoiser.scale != 1 or denoiser.channels[0] != denoiser.channels[1]):
            raise ConfigError(
                f"{key}: {denoiser.title} changes the image's shape, so no pixel can be kept. "
                f"{'Write input.nodata: none, which ignores it.' if is_own else 'Leave the mask out.'}"
            )
        side = open_source(path, level=job.input.level, dataset=own) if is_own else open_side(key, path)
        check_whole(side.path)
        side = side.arranged_as(original)  # it has its axes as the file of the image has them
        if side.shape not in (source.shape, spatial_shape):
            tiled = "" if spatial_shape == source.shape else f" or that of its tiled axes {spatial_shape}"
            raise InputError(f"{key} has shape {side.shape}. Give it the image's shape {source.shape}{tiled}.{without}")
        sides[name] = side
    return sides


def open_side(key: str, path: str) -> Source:
    """Open the file of a side input, which has no dataset to choose."""
    try:
        return open_source(path)
    except InputError as error:
        problem, asked, names = str(error).partition("Write dataset: one of ")
        if not asked:
            raise
        is_group = os.path.isdir(path) or "://" in path
        instead = f"the path of one, such as {path}/NAME" if is_group else "one to a file of its own, and its path"
        raise InputError(f"{key}: {problem}A side input has no dataset to choose. Write {instead}: {names}") from error


def value_range(
    requested: tuple[float, float] | Auto, dtype: np.dtype[Any], trained: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Return the values that are mapped to 0 and 1 before denoising, unless given: as a network was trained, or those of an integer type."""
    if requested != "auto":
        return (float(requested[0]), float(requested[1]))
    if trained is not None:
        return None if trained == (0.0, 1.0) else trained
    return (0.0, float(np.iinfo(dtype).max)) if dtype.kind in "iu" else None


def check_units(denoiser: Denoiser, values: tuple[float, float] | None, sides: Mapping[str, Readable]) -> None:
    """Refuse a noise level, or a strength in its place, that is in other units than the image that is denoised."""
    if values is None:
        return
    sigma = getattr(denoiser, "sigma", None)
    is_known = sigma is not None or "sigma" in sides
    in_units = {
        "sigma": sigma if "sigma" in denoiser.side_inputs else None,
        "strength": getattr(denoiser, "strength", None) if isinstance(denoiser, Leveled) and not is_known else None,
    }
    for key, setting in in_units.items():
        if isinstance(setting, int | float) and setting > 1:
            quantity, instead = ("noise", "auto") if key == "sigma" else ("strength", "sigma: auto beside it")
            raise ConfigError(
                f"denoiser.{key} is {setting:g}. {describe_range(values, quantity)} "
                f"Write {key}: {setting / (values[1] - values[0]):.3g}, or {instead}."
            )


def choose_noise_level(
    image: JobImage, denoiser: Denoiser, values: tuple[float, float] | None, sides: Mapping[str, Readable]
) -> tuple[Denoiser, Levels | None]:
    """Return the denoiser, and the noise level of each plane if it wants one; it is set where there is only one.

    A noise map of the job, or a level that it gives in the units of the file, takes the place of an estimate. A resumed run keeps the estimate
    that it began with.

    Returns
    -------
    (Denoiser, ndarray or None)
        Levels in the units that the denoiser computes in, one for each index of the looped axes.
    """
    if not denoiser.wants_noise_level or "sigma" in sides:
        return denoiser, None
    (low, high), roles = values or (0.0, 1.0), image.roles
    if given := image.job.noise.read_sigma:
        return denoiser.with_noise_level(given / (high - low)), None
    known = image.previous["identity"].get("noise_level") if image.previous else None
    levels = np.asarray(known, float)
    if known is None or levels.shape != tuple(image.source.shape[i] for i in roles.looped):
        levels = estimate_noise_levels(image.even, roles.spatial, roles.looped) / (high - low)
    return denoiser.with_noise_level(float(levels.flat[0])) if levels.size == 1 else denoiser, levels


def plane_values(values: Levels, roles: Roles) -> views.PlaneValues:
    """Return a number for each index of the looped axes as a side input."""
    shape = [1] * len(roles.axes)
    for axis, length in zip(roles.looped, values.shape, strict=True):
        shape[axis] = length
    return views.PlaneValues(values.reshape(shape))


COUNTED_PIXELS = 2**24  # pixels of an image whose holes are counted one by one while a job is planned
COUNTED_AT_ONCE = 2048
SAMPLES = 64  # squares in which the holes of larger images are counted


class Holed(NamedTuple):
    """The values that stand for a hole, and notes about them."""

    holes: Holes | None = None
    notes: tuple[str, ...] = ()

    @property
    def value(self) -> float | None:
        """The value that stands for a hole, besides NaN."""
        return self.holes.value if self.holes else None

    def view(self, source: Readable, mask: Readable | None, roles: Roles) -> Readable:
        """The image with NaN in its holes, and where it is masked."""
        return views.measured(source, self.value, mask, roles.spatial, len(roles.axes))

    def halo(self, denoiser: Denoiser, depth: int, dims: int) -> int:
        """Pixels that a block reads beyond its halo, to fill holes."""
        possible = self.holes is not None and not denoiser.takes_valid and depth > 0
        return fill_reach(dims) if possible else 0


class Striped(NamedTuple):
    """Stripes of an image, which are removed or reported."""

    lines: StripedLines | None = None  # lines whose stripes are removed
    axis: str = ""  # axis along which lines differ; empty without stripes
    rms: float = 0.0  # standard deviation in samples
    gain: bool = False  # true if lines clearly differ by factors
    channels: str = ""  # channels that have them; empty where all have

    @property
    def text(self) -> str:
        """The stripes in a few words; empty without any."""
        return f"{self.rms:.3g} rms along {self.axis}, {'removed' if self.lines else 'kept'}" if self.axis else ""

    @property
    def notes(self) -> tuple[str, ...]:
        where = f" of {self.channels}" if self.channels else ""
        lines, wanted = "columns" if self.axis == "x" else "rows", f"axis: {self.axis}{', gain: true' * self.gain}"
        if self.lines:
            is_lacking = self.gain and not self.lines.gain
            return (f"{lines}{where} differ by factors as well: write input.stripes: {{{wanted}}}",) * is_lacking
        note = (
            f"{lines}{where} are off by {self.rms:.3g} rms, each over its whole length in samples: stripes of the instrument, "
            f"which a denoiser keeps in part. To remove them first, write input.stripes: {{{wanted}}}"
        )
        return (note,) * bool(self.axis)

    def read(self, source: Readable, view: Readable) -> Readable:
        """The image without stripes, which are measured where it is read."""
        lines = self.lines
        return WithoutStripes(source, view, LineCorrections(view, lines), lines) if lines else source


NO_HOLES, NO_STRIPES = Holed(), Striped()


@dataclass(frozen=True, kw_only=True)
class JobImage:
    """The image that a job reads, as all of its channels have it."""

    job: Denoising
    original: Source  # input as it is stored
    source: Readable  # the same with the axes that the denoiser takes
    roles: Roles
    previous: Mapping[str, Any] | None = None  # plan of the run that is resumed
    sides: Mapping[str, Source] = field(default_factory=dict)
    holed: Holed = NO_HOLES
    striped: Striped = NO_STRIPES
    notes: Sequence[str] = ()  # on the axes

    @cached_property
    def view(self) -> Readable:
        """The input with NaN in its holes, and where it is masked."""
        return self.holed.view(views.Remembered(self.source), self.sides.get("mask"), self.roles)

    @cached_property
    def even(self) -> Readable:
        """The same without the stripes that are removed."""
        return self.striped.read(self.view, self.view)

    @cached_property
    def corrected(self) -> Readable:
        """The input without the stripes that are removed."""
        return self.striped.read(self.source, self.view)

    def subset(self, numbers: Sequence[int]) -> Self:
        """The image with some of its channels; all where there are no numbers."""
        if not numbers:
            return self
        some, dims, at = self.original.with_channels(numbers), len(self.roles.axes), self.roles.axes.index("c")
        sides = {k: s.with_channels(numbers, at) if len(s.shape) == dims else s for k, s in self.sides.items()}
        return replace(self, original=some, source=some, sides=sides)


def choose_holes(image: JobImage) -> Holed:
    """Decide which values stand for a hole. A resumed run keeps the mean that it began with."""
    job, source, previous = image.job, image.source, image.previous
    mask, spatial = image.sides.get("mask"), image.roles.spatial
    dtype, is_float = source.dtype, source.dtype.kind == "f"
    value = _value(job, image.original, dtype)
    has_nan = is_float and job.input.nodata != "none"
    is_plain = value is None and not has_nan and mask is None
    if is_plain and (not is_float or job.run.on_nan == "fail"):
        return Holed(None, ())
    counted = _counted(views.measured(source, value, None, spatial, len(source.shape)), mask, spatial)
    if is_plain:
        there = counted.holes.text(source.shape)
        note = (
            f"pixels of NaN or infinity ({there}) are taken for measurements, as input.nodata: none says, and spoil the pixels around them. "
            "To keep them as they are, leave nodata out, or write nodata: nan"
        )
        return Holed(None, (note,) if counted.holes.share else ())
    share = counted.holes.share if has_nan or value is not None else 0.0
    written = job.output.dtype
    if share and value is None and written != "auto" and np.dtype(written).kind != "f":
        raise ConfigError(
            f"output.dtype is {written}, which cannot hold the NaN of this image's holes. Write a type of floats, such as float32."
        )
    holed = _noted(Holes(value, counted.mean, share, has_nan), dtype, counted.holes.text(source.shape))
    notes = list(holed.notes)
    if counted.masked.share:
        there = counted.masked.text(source.shape)
        notes.append(f"masked pixels ({there}) stay as they are, and no other pixel depends on them")
    if is_float:
        notes += note_of_far_value(counted.ends, job, by_samples=math.prod(source.shape) > COUNTED_PIXELS)
    known: Any = previous["identity"].get("holes") if previous else None
    is_kept = known and (known["value"], known.get("nan", True)) == (value, has_nan)
    return Holed(Holes(**known) if is_kept else holed.holes, tuple(notes))


def note_of_far_value(ends: Ends, job: Denoising, *, by_samples: bool, alone: int = 0) -> tuple[str, ...]:
    """Return a note on a value far from all others, which nothing declares as that of holes; none where no more pixels have it than stand alone."""
    far = ends.far_value()
    if far is None or job.input.nodata == "none" or far.number <= alone:
        return ()
    there = (
        f"about {far.number / ends.pixels:.2%} of the pixels, by samples," if by_samples else f"{far.number:,} pixels"
    )
    return (
        f"{there} are {far.value:.10g}, far from all others ({far.low:,.5g} to {far.high:,.5g}): if they are no measurements, write "
        f"input.nodata: {far.value:.10g}, or they may spoil the pixels around them",
    )


class _Share(NamedTuple):
    """The share of some pixels in an image, and the most that it may be by what parts of it have."""

    share: float
    most: float

    @classmethod
    def from_counts(cls, counts: Sequence[int], sizes: Sequence[int]) -> Self:
        """The share by the numbers of such pixels in parts of these sizes: any may be in what is between the parts, where many of them are alike."""
        if not sizes:
            return cls(0.0, 0.0)
        share, each = sum(counts) / sum(sizes), np.divide(counts, sizes)
        return cls(share, min(1.0, share + 2 * float(each.std()) / math.sqrt(len(sizes)) + 3 / len(sizes)))

    def text(self, shape: tuple[int, ...]) -> str:
        """The number of these pixels; of a large image that was sampled, about."""
        size = math.prod(shape)
        if size <= COUNTED_PIXELS:
            return f"{round(self.share * size):,} of {size:,}"
        about = f"about {self.share:.2%} of the pixels" if self.share else "none"
        return f"{about} in samples of it, and at most about {self.most:.0%} of the image"


class _Counted(NamedTuple):
    """Shares of holes and of masked pixels in what is looked at, with mean and ends of the others."""

    holes: _Share
    masked: _Share
    mean: float
    ends: Ends


def _counted(view: Readable, mask: Readable | None, spatial: Sequence[int]) -> _Counted:
    """Look at the pixels of an image, or at samples of a large one."""
    holes, masked, sizes, total, known, ends = list[int](), list[int](), list[int](), 0.0, 0, NO_ENDS
    for square in _squares(view, tuple(spatial[-2:])):
        for _, part in views.readable_parts(view, [square]):
            finite, kept = np.isfinite(part), np.ones((), bool)
            if mask is not None:
                kept = np.broadcast_to(
                    views.side_at(mask, views.axes_of_side(mask, spatial, part.ndim), square) != 0, part.shape
                )
            sizes.append(part.size)
            holes.append(part.size - int(finite.sum()))
            masked.append(int((~kept).sum()))
            finite &= kept
            total, known = total + float(part[finite].sum(dtype=np.float64)), known + int(finite.sum())
            ends = ends.joined(Ends.from_values(part[finite]))
    return _Counted(_Share.from_counts(holes, sizes), _Share.from_counts(masked, sizes), total / max(known, 1), ends)


def _squares(view: Readable, plane: tuple[int, ...]) -> Sequence[Region]:
    """Return the parts of an image in which holes are counted: all of it, where it is not large, and planes of the same chunks together."""
    shape = view.shape
    if math.prod(shape) > COUNTED_PIXELS:
        return sample_regions(shape, SAMPLES, plane)
    edges = tuple(
        min(n, COUNTED_AT_ONCE if axis in plane else chunk)
        for axis, (n, chunk) in enumerate(zip(shape, views.chunks_of(view), strict=True))
    )
    return [block.core for block in Grid(shape, edges, ((0, 0),) * len(shape))]


def check_marked(image: JobImage, marked: Sequence[Source]) -> None:
    """Refuse images that mark a whole area as defects, because nothing can replace its pixels; large images are sampled."""
    spatial, dims = image.roles.spatial, len(image.roles.axes)
    for side in marked:
        repaired = Repaired(image.view, spatial, None, None, Defects(given=side))
        axes = [axis % dims for axis in axes_of_given(side, spatial, dims)]
        for square in _squares(side, tuple(axes.index(axis) for axis in spatial[-2:])):
            spans = dict(zip(axes, zip(square.start, square.stop, strict=True), strict=True))
            views.readable_parts(repaired, [respanned(Region.whole((1,) * dims), spans)])


def nodata_value(
    wanted: float | Literal["auto", "nan", "none"], source: Source, dtype: np.dtype[np.generic]
) -> float | None:
    """Return the value that stands for a hole, besides NaN: as the job or the file says."""
    if isinstance(wanted, str) or np.isnan(wanted):
        return source.nodata if wanted == "auto" else None
    value = number_of_type(wanted, dtype)
    if value is None:
        raise ConfigError(
            f"input.nodata is {wanted:g}, and no pixel of type {dtype} has that value. Write another, or leave it out."
        )
    return value


def _value(job: Denoising, original: Source, dtype: np.dtype[np.generic]) -> float | None:
    """Return the value that stands for a hole, besides NaN, which the output has to hold."""
    value = nodata_value(job.input.nodata, original, dtype)
    written = job.output.dtype
    if value is not None and written != "auto" and number_of_type(value, np.dtype(written)) is None:
        raise ConfigError(
            f"output.dtype is {written}, which cannot hold the value of holes, {value:g}. Write a type that can, or input.nodata: none."
        )
    return value


def _noted(holes: Holes, dtype: np.dtype[np.generic], there: str) -> Holed:
    if not holes.are_likely:
        return Holed(holes, ())
    kept = f"pixels of {describe_value(holes.value, dtype)} are holes ({there}): they stay as they are, and no other pixel depends on them"
    if holes.value is None or math.isnan(holes.value):  # which nothing can be computed from
        return Holed(holes, (kept,))
    instead = "nan" if dtype.kind == "f" else "none"
    return Holed(holes, (f"{kept}. To denoise those of {holes.value:.10g} too, write input.nodata: {instead}",))
