"""The images that a network is trained on, with the axes and the values that it is given."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Sequence

from halotile.errors import InputError
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.denoise.image.holes import nodata_value
from halotile.graphs.jobs.denoise.image.opening import value_range
from halotile.graphs.jobs.train.job import Training
from halotile.graphs.kinds.patterns import is_pattern
from halotile.graphs.plans.inputs import check_whole
from halotile.storage.arrays import Source, open_source
from halotile.storage.rim import Readable
from halotile.storage.views import WithoutValue, measured
from halotile.tasks.noise.estimate import ImageValues, image_values
from halotile.tasks.training.patches import PatchSource, TrainingImage

MOST_CHANNELS = 16


def open_images(job: Training, key: str, path: str) -> tuple[Source, ...]:
    """Open the image at a path, or those that a pattern matches, in the order of their paths.

    Raises
    ------
    InputError
        When an image has other channels or another type than the first.
    """
    paths = sorted(glob.glob(path, recursive=True)) if is_pattern(path) else [path]
    given = job.input
    sources = [
        open_source(one, level=given.level, dataset=given.dataset, axes=given.axes).one_of_many()
        for one in paths
    ]
    for source in sources:
        check_whole(source.path)
        first = sources[0]
        if (source.dtype, source.axes, _channels(source)) != (first.dtype, first.axes, _channels(first)):
            raise InputError(
                f"{key}: {source.path} has pixels of {source.dtype}, axes {''.join(source.axes)} and {counted(_channels(source), 'channel')}, and {first.path} "
                f"{first.dtype}, {''.join(first.axes)} and {_channels(first)}. Write a pattern of images of one kind."
            )
    return tuple(sources)


def smallest_edge(sources: Sequence[Source]) -> int:
    """Return the least number of rows or columns of images."""
    return min(source.shape[axis] for source in sources for axis in _axes(source)[:2])


def patch_source(job: Training, first: Sequence[Source], second: Sequence[Source]) -> PatchSource:
    """Return the patches of the images of a job.

    Raises
    ------
    InputError
        When the second images are other ones than the first, or a patch is larger than an image.
    """
    if second and [*map(_form, second)] != [*map(_form, first)]:
        raise InputError(
            f"second: {counted(len(second), 'image')} of {_form_text(second[0])}, and input.path: {counted(len(first), 'image')} of "
            f"{_form_text(first[0])}. Write as many images, of the same shape, type and axes."
        )
    if same := {os.path.realpath(source.path) for source in first} & {
        os.path.realpath(source.path) for source in second
    }:
        raise InputError(
            f"second has {min(same)} as well as input.path: its noise is no other. Write the path of another image."
        )
    others: Sequence[Source | None] = second or [None] * len(first)
    pairs = zip(first, others, strict=True)
    images = tuple(_image(job, source, other) for source, other in pairs)
    for image, source in zip(images, first, strict=True):
        if min(image.edges) < job.patch:
            raise InputError(
                f"{source.path} has {image.edges[0]} × {image.edges[1]} pixels, and patch is {job.patch}. Write a smaller patch, or larger images."
            )
    check_something_varies(images)
    values = value_range(job.input.range, first[0].dtype) or (0.0, 1.0)
    return PatchSource(images, job.patch, values, job.seed)


def check_something_varies(images: Sequence[TrainingImage]) -> None:
    """Refuse images without anything to learn from.

    Raises
    ------
    InputError
        When all pixels are equal, or none is measured.
    """
    if any(image.values.low < image.values.high for image in images):
        return
    known = {image.values.low for image in images if math.isfinite(image.values.low)}
    why = f"all pixels are {min(known):g}" if known else "no pixel is finite, or none is measured"
    raise InputError(
        f"input.path: {why}, wherever it was sampled: there is nothing to learn from. Write the path of another image."
    )


def epochs_of(patches: PatchSource, steps: int, batch: int) -> float:
    """Return how often a pixel is in a patch, on average."""
    return steps * batch * patches.patch**2 / _pixels(patches)


def steps_of_epochs(patches: PatchSource, epochs: float, batch: int) -> int:
    """Return the number of steps for so many epochs."""
    return max(1, math.ceil(epochs * _pixels(patches) / (batch * patches.patch**2)))


def _pixels(patches: PatchSource) -> int:
    return sum(math.prod(image.planes) * math.prod(image.edges) for image in patches.images)


def _form(source: Source) -> tuple[object, ...]:
    return source.shape, source.dtype, source.axes


def _form_text(source: Source) -> str:
    return f"shape {source.shape}, {source.dtype}, axes {''.join(source.axes)}"


def _image(job: Training, source: Source, second: Source | None) -> TrainingImage:
    rows, columns, channel = _axes(source)
    looped = tuple(axis for axis in range(len(source.shape)) if axis not in (rows, columns))
    view, values = _trusted(job, source, (rows, columns), looped)
    if second is None:
        return TrainingImage(view, (rows, columns), channel, values)
    return TrainingImage(
        view, (rows, columns), channel, values, *_trusted(job, second, (rows, columns), looped)
    )


def _trusted(
    job: Training, source: Source, spatial: tuple[int, int], looped: tuple[int, ...]
) -> tuple[Readable, ImageValues]:
    """An image with NaN where nothing was measured, as a value that is far from all others says too; and its values."""
    view = _measured(job, source, spatial)
    values = image_values(view, spatial, looped)
    if values.far is None or job.input.nodata == "none":
        return view, values._replace(far=None)
    view = WithoutValue(view, values.far.value)
    return view, image_values(view, spatial, looped)._replace(far=values.far)


def _measured(job: Training, source: Source, spatial: tuple[int, int]) -> Readable:
    """An image with NaN in its holes, and where a mask in its file is 0."""
    wanted = job.input.nodata
    if wanted == "none":
        return source
    value = nodata_value(wanted, source, source.dtype)
    own = None
    if source.mask:
        own = open_source(source.path, level=job.input.level, dataset=source.mask).one_of_many()
    return measured(source, value, own, spatial, len(source.shape))


def _axes(source: Source) -> tuple[int, int, int | None]:
    """Positions of rows, columns and channels: the last two axes where no names tell."""
    names = source.axes
    rows, columns = (
        (names.index("y"), names.index("x")) if {"y", "x"} <= set(names) else (len(names) - 2, len(names) - 1)
    )
    channel = names.index("c") if "c" in names else None
    return rows, columns, channel if channel not in (rows, columns) else None


def _channels(source: Source) -> int:
    channel = _axes(source)[2]
    count = 1 if channel is None else source.shape[channel]
    if count > MOST_CHANNELS:
        raise InputError(
            f"{source.path} has {count} channels, which a network would take together; more than {MOST_CHANNELS} are hardly colours. "
            "Write input.axes with another letter for that axis, such as t."
        )
    return count
