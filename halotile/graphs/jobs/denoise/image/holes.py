"""Holes of the image that a job denoises: the values that stand for one, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.storage.arrays import Source
from halotile.storage.formats.base import number_of_type
from halotile.storage.grid import Grid, Region
from halotile.storage.rim import Readable
from halotile.storage.views import axes_of_side, chunks_of, measured, readable_parts, side_at
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.holes import Holes, describe_value, fill_reach
from halotile.tasks.noise.estimate import NO_ENDS, Ends, sample_regions
from halotile.tasks.roles import Roles

COUNTED_PIXELS = 2**24
"""Pixels of an image whose holes are counted one by one while a job is planned."""
COUNTED_AT_ONCE = 2048
SAMPLES = 64
"""Squares in which the holes of larger images are counted."""


class Holed(NamedTuple):
    """The values that stand for a hole, and notes about them."""

    holes: Holes | None
    notes: tuple[str, ...]

    @property
    def value(self) -> float | None:
        """The value that stands for a hole, besides NaN."""
        return self.holes.value if self.holes else None

    def view(self, source: Readable, mask: Readable | None, roles: Roles) -> Readable:
        """The image with NaN in its holes, and where it is masked."""
        return measured(source, self.value, mask, roles.spatial, len(roles.axes))

    def halo(self, denoiser: Denoiser, depth: int, dims: int) -> int:
        """Pixels that a block reads beyond its halo, to fill holes."""
        possible = self.holes is not None and not denoiser.takes_valid and depth > 0
        return fill_reach(dims) if possible else 0


def choose_holes(
    job: Denoising,
    original: Source,
    source: Readable,
    spatial: Sequence[int],
    mask: Readable | None,
    previous: Mapping[str, Any] | None,
) -> Holed:
    """Decide which values stand for a hole; ``source`` is the image with the axes that the denoiser takes.

    A resumed run keeps the mean that it began with.
    """
    dtype, is_float = source.dtype, source.dtype.kind == "f"
    value = _value(job, original, dtype)
    has_nan = is_float and job.input.nodata != "none"
    is_plain = value is None and not has_nan and mask is None
    if is_plain and (not is_float or job.run.on_nan == "fail"):
        return Holed(None, ())
    counted = _counted(measured(source, value, None, spatial, len(source.shape)), mask, spatial)
    if is_plain:
        there = _number_text(counted.holes, source.shape)
        note = (
            f"pixels of NaN or infinity ({there}) are taken for measurements, as input.nodata: none says, and spoil the pixels around them. "
            "To keep them as they are, leave nodata out, or write nodata: nan"
        )
        return Holed(None, (note,) if counted.holes else ())
    share = counted.holes if has_nan or value is not None else 0.0
    written = job.output.dtype
    if share and value is None and written != "auto" and np.dtype(written).kind != "f":
        raise ConfigError(
            f"output.dtype is {written}, which cannot hold the NaN of this image's holes. Write a type of floats, such as float32."
        )
    holed = _noted(Holes(value, counted.mean, share, has_nan), dtype, source.shape)
    notes = list(holed.notes)
    if counted.masked:
        there = _number_text(counted.masked, source.shape)
        notes.append(f"masked pixels ({there}) stay as they are, and no other pixel depends on them")
    if is_float:
        notes += note_of_far_value(counted.ends, job, by_samples=math.prod(source.shape) > COUNTED_PIXELS)
    known: Any = previous["identity"].get("holes") if previous else None
    is_kept = known and (known["value"], known.get("nan", True)) == (value, has_nan)
    return Holed(Holes(**known) if is_kept else holed.holes, tuple(notes))


def note_of_far_value(ends: Ends, job: Denoising, *, by_samples: bool) -> tuple[str, ...]:
    """Return a note on a value far from all others, which nothing declares as that of holes."""
    far = ends.far_value()
    if far is None or job.input.nodata == "none":
        return ()
    there = (
        f"about {far.number / ends.pixels:.2%} of the pixels, by samples,"
        if by_samples
        else f"{far.number:,} pixels"
    )
    return (
        f"{there} are {far.value:.10g}, far from all others ({far.low:,.5g} to {far.high:,.5g}): if they are no measurements, write "
        f"input.nodata: {far.value:.10g}, or they may spoil the pixels around them",
    )


class _Counted(NamedTuple):
    """Shares of holes and of masked pixels in what is looked at, with mean and ends of the others."""

    holes: float
    masked: float
    mean: float
    ends: Ends


def _counted(view: Readable, mask: Readable | None, spatial: Sequence[int]) -> _Counted:
    """Look at the pixels of an image, or at samples of a large one."""
    holes, masked, pixels, total, known, ends = 0, 0, 0, 0.0, 0, NO_ENDS
    for square in _squares(view, tuple(spatial[-2:])):
        for _, part in readable_parts(view, [square]):
            finite = np.isfinite(part)
            holes, pixels = holes + part.size - int(finite.sum()), pixels + part.size
            if mask is not None:
                sides = side_at(mask, axes_of_side(mask, spatial, part.ndim), square)
                kept = np.broadcast_to(sides != 0, part.shape)
                masked += part.size - int(kept.sum())
                finite &= kept
            total, known = total + float(part[finite].sum(dtype=np.float64)), known + int(finite.sum())
            ends = ends.joined(Ends.of(part[finite]))
    return _Counted(holes / max(pixels, 1), masked / max(pixels, 1), total / max(known, 1), ends)


def _squares(view: Readable, plane: tuple[int, ...]) -> Sequence[Region]:
    """Return the parts of an image in which holes are counted: all of it, where it is not large, and planes of the same chunks together."""
    shape = view.shape
    if math.prod(shape) > COUNTED_PIXELS:
        return sample_regions(shape, SAMPLES, plane)
    edges = tuple(
        min(n, COUNTED_AT_ONCE if axis in plane else chunk)
        for axis, (n, chunk) in enumerate(zip(shape, chunks_of(view), strict=True))
    )
    return [block.core for block in Grid(shape, edges, ((0, 0),) * len(shape))]


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


def _noted(holes: Holes, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Holed:
    if not holes.are_likely:
        return Holed(holes, ())
    there = _number_text(holes.share, shape)
    kept = f"pixels of {describe_value(holes.value, dtype)} are holes ({there}): they stay as they are, and no other pixel depends on them"
    if holes.value is None or math.isnan(holes.value):  # which nothing can be computed from
        return Holed(holes, (kept,))
    instead = "nan" if dtype.kind == "f" else "none"
    return Holed(
        holes, (f"{kept}. To denoise those of {holes.value:.10g} too, write input.nodata: {instead}",)
    )


def _number_text(share: float, shape: tuple[int, ...]) -> str:
    """Return the number of pixels of a share of the image; of a large one that was sampled, about."""
    size = math.prod(shape)
    if size <= COUNTED_PIXELS:
        return f"{round(share * size):,} of {size:,}"
    return f"about {share:.2%} of the pixels, by samples" if share else "none in the samples"
