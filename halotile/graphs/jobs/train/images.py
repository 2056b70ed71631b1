"""The images that a network is trained on, with the axes and the values that it is given."""

import glob
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from halotile.errors import InputError
from halotile.graphs.jobs.denoise.image import nodata_value, value_range
from halotile.graphs.jobs.train.job import Training
from halotile.graphs.kinds.sections import is_pattern
from halotile.graphs.plans.choices import check_whole, with_selected
from halotile.graphs.words import counted
from halotile.storage.arrays import Source, open_source
from halotile.storage.rim import Readable
from halotile.storage.views import WithoutValue, measured, readable_parts
from halotile.tasks.noise.estimate import ImageValues, as_square, image_values
from halotile.tasks.noise.noise_correlation import noise_correlation
from halotile.tasks.noise.quiet_windows import Values, finite_values
from halotile.tasks.training.patches import Pair, PatchSource, Structure, TrainingImage

# Ratio of brightness, offset included, of the brightest and the darkest image or channel above which there is a note.
UNLIKE = 10.0
SAMPLED = 16  # squares of each channel that are sampled


def notes_of_images(patches: PatchSource, sources: Sequence[Source]) -> list[str]:
    """Return what the images lack, what of them is left out, and what one network cannot learn together; ``sources`` are the images as they are stored."""
    notes = []
    if not patches.has_held_out:
        notes.append("the images are too small for patches that are held out: the curve has no validation")
    values = [image.values for image in patches.images]
    if ends := sorted({end for each in values for end in each.saturated}):
        listed = ", ".join(f"{end:g}" for end in ends[:3])
        notes.append(f"pixels of {listed} are saturated: isolated ones, such as hot pixels, are left out")
    seconds = [image.second_values for image in patches.images]
    if far := next((each.far for each in (*values, *seconds) if each.far), None):
        notes.append(
            f"pixels of {far.value:.10g}, far from all others ({far.low:,.5g} to {far.high:,.5g}), are left out: write input.nodata: {far.value:.10g} "
            "here and for the denoising, or input.nodata: none if they are measurements"
        )
    sizes = [(each.size, source.path) for each, source in zip(values, sources, strict=True) if each.size]
    if sizes and max(sizes)[0] > UNLIKE * min(sizes)[0]:
        (low, dark), (high, bright) = min(sizes), max(sizes)
        notes.append(
            f"{bright} is {high / low:,.3g} times as bright as {dark}: one network learns next to nothing from the darkest images. Train one for "
            "each kind, or scale them to the same brightness"
        )
    return notes + _notes_of_channels(patches.images[0], sources[0].path)


def _notes_of_channels(image: TrainingImage, path: str) -> list[str]:
    """Return a note on channels of very unlike brightness."""
    if image.channels < 2:
        return []
    values = map(finite_values, samples_of(image))
    sizes = [(size, n) for n, each in enumerate(values) if each.size and (size := float(np.abs(each).mean()))]
    if not sizes or max(sizes)[0] <= UNLIKE * min(sizes)[0]:
        return []
    (low, dark), (high, bright) = min(sizes), max(sizes)
    return [
        f"channel {bright} of {path} is {high / low:,.3g} times as bright as channel {dark}: a short training mixes channels that show different things, "
        "most of all such ones. Give it thousands of steps, or train on each channel"
    ]


ALONG_ONE = 0.5  # ratio of the correlations along both axes below which noise is shared along one


def samples_of(image: TrainingImage) -> list[list[Values]]:
    """Return squares of each channel of an image, in the units of the image."""
    parts = (readable_parts(image.source, image.sampled(SAMPLED, channel)) for channel in range(image.channels))
    return [[as_square(pixels, image.spatial) for _, pixels in each] for each in parts]


def hidden_with(job: Training, planes: Sequence[Sequence[Values]]) -> tuple[Structure, bool, tuple[str, ...]]:
    """Return the axis along which pixels are hidden with their neighbours, True where noise differs from pixel to pixel, and a note on the decision."""
    found = [each for squares in planes if (each := noise_correlation(squares)) and each.is_clear]
    structure: Structure = "none" if job.structure == "auto" else job.structure
    if job.method == "noise2noise" or not found:
        return structure, structure == "none" and not found, ()
    most = max(found, key=lambda each: sum(each.x) + sum(each.y))
    axis: Structure = "x" if sum(most.x) > sum(most.y) else "y"
    seen = f"neighbouring pixels share noise: their correlation is {most}"
    if min(sum(most.x), sum(most.y)) > ALONG_ONE * max(sum(most.x), sum(most.y)):
        note = "Hidden pixels keep what is shared along both axes: bin the image by 2, or learn from pairs"
    elif job.structure not in ("auto", axis):
        note = f"The network would learn to keep it: write structure: {axis}"
    else:
        structure, note = axis, f"Structure is {axis}: pixels are hidden with their neighbours along it"
    return structure, False, (f"{seen}. {note}",)


# Pairs of images that are compared, channels of each, and squares of a channel in all pairs together.
PAIRS, CHANNELS, SQUARES = 8, 8, 16
STRUCTURE = 0.05  # share of structure in the pixels from which it can be compared: else there is too much noise
# Shared structure below which the second shows something else, and below which it may: noise that neighbours share
# counts as structure of each.
SHARED, LIKELY_SHARED = 0.3, 0.6
# Ratio of contrasts that is noted and that is refused, and difference of brightness in standard deviations that is
# noted.
CONTRAST, CLEAR_CONTRAST, OFFSET = 1.15, 1.5, 0.1


def notes_of_pairs(
    images: Sequence[TrainingImage], first: Sequence[Source], second: Sequence[Source]
) -> tuple[str, ...]:
    """Compare a few places of the images with their second ones.

    Returns
    -------
    tuple of str
        A note on the first pair that is shifted, or of other brightness.
    """
    count = min(len(second), PAIRS)
    notes: list[str] = []
    for number in (n * len(second) // count for n in range(count)):
        for where, pair in _compared(images[number], max(1, SQUARES // count)):
            notes += _judged(pair, f"{first[number].path}{where}", second[number].path)
    return tuple(notes[:1])


def _compared(image: TrainingImage, squares: int) -> Iterator[tuple[str, Pair]]:
    """Yield the statistics of each channel, or of some where there are many, after words that name it."""
    assert image.second is not None
    compared = min(image.channels, CHANNELS)
    for channel in (n * image.channels // compared for n in range(compared)):
        parts = readable_parts(image.source, image.sampled(squares, channel))
        second = [image.second.read(region) for region, _ in parts]
        pairs = zip((part for _, part in parts), second, strict=True)
        pair = Pair.from_squares(
            (as_square(one, image.spatial), as_square(other, image.spatial)) for one, other in pairs
        )
        if pair is not None:
            yield (f", channel {channel}," if image.channels > 1 else ""), pair


def _judged(pair: Pair, first: str, second: str) -> list[str]:
    """Return what differs between two images besides noise, as a note."""
    if pair.is_copy:
        raise InputError(
            f"second: {second} has the same pixels as {first}, and so the same noise. Write the path of another image of the same object."
        )
    if pair.structure < STRUCTURE:
        return []
    if any(pair.shift):
        rows, columns = (counted(n, word) for n, word in zip(pair.shift, ("row", "column"), strict=True))
        return [
            f"second: {second} is shifted by {rows} and {columns} relative to {first}: the network would learn to blur. Align them"
        ]
    return _unlike(pair, first, second)


def _unlike(pair: Pair, first: str, second: str) -> list[str]:
    """Return what is unlike in two images that are not shifted, as a note."""
    if pair.shared < SHARED:
        raise InputError(
            f"second: {second} does not show the same as {first}: they share {max(0.0, pair.shared):.0%} of their structure. "
            "Write the path of an image of the same object with independent noise; or leave second out and write method: noise2void."
        )
    for shared, which in ((pair.shared, ""), (pair.shared_finely, "fine ")):
        if shared < LIKELY_SHARED:
            return [
                f"second: {second} and {first} share {max(0.0, shared):.0%} of their {which}structure: one may be shifted, mirrored or turned, or show "
                "something else, unless neighbouring pixels share most of their noise"
            ]
    ratio = max(pair.contrast, 1 / pair.contrast)
    if ratio > CLEAR_CONTRAST:
        raise InputError(
            f"second: {second} has {pair.contrast:.2g} times the contrast of {first}: it would learn the mean of both. Scale one of them to the other."
        )
    differs = [f"has {pair.contrast:.2g} times the contrast of {first}"] if ratio > CONTRAST else []
    if abs(pair.offset) > OFFSET:
        than = "" if differs else f" than {first}"
        by = f"{abs(pair.offset):.2g} standard deviations"
        differs.append(f"is {'brighter' if pair.offset > 0 else 'darker'}{than} by {by}")
    if not differs:
        return []
    return [f"second: {second} {', and '.join(differs)}: it learns the mean of both. Scale one of them to the other"]


MOST_CHANNELS = 16


def open_images(job: Training, key: str, path: str) -> tuple[Source, ...]:
    """Open the image at a path, or those that a pattern matches, in the order of their paths."""
    paths = sorted(glob.glob(path, recursive=True)) if is_pattern(path) else [path]
    given = job.input
    opened = (open_source(one, level=given.level, dataset=given.dataset, axes=given.axes) for one in paths)
    sources = [with_selected(source, given.channels).one_of_many() for source in opened]
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
    """Return the patches of the images of a job, whose noise is taken to differ from pixel to pixel."""
    if second and [*map(_form, second)] != [*map(_form, first)]:
        raise InputError(
            f"second: {counted(len(second), 'image')} of {_form_text(second[0])}, and input.path: {counted(len(first), 'image')} of "
            f"{_form_text(first[0])}. Write as many images, of the same shape, type and axes."
        )
    if same := {os.path.realpath(source.path) for source in first} & {
        os.path.realpath(source.path) for source in second
    }:
        raise InputError(
            f"second has {min(same)} as well as input.path, with the same noise. Write the path of another image."
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
    """Refuse images without anything to learn from."""
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
    return TrainingImage(view, (rows, columns), channel, values, *_trusted(job, second, (rows, columns), looped))


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
        own = open_source(source.path, level=job.input.level, dataset=source.mask).arranged_as(source).one_of_many()
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
