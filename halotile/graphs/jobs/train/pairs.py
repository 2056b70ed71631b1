"""The second image of a training beside the first: it should differ in its noise alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halotile.errors import InputError
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.views import readable_parts
from halotile.tasks.noise.details import Values
from halotile.tasks.noise.estimate import as_square, sample_regions
from halotile.tasks.training.pairs import Pair
from halotile.tasks.training.patches import TrainingImage

PAIRS, CHANNELS, SQUARES = 8, 8, 16
"""Pairs of images that are compared, channels of each, and squares of a channel in all pairs together."""
STRUCTURE = 0.05
"""Share of structure in the pixels from which it can be compared: else there is too much noise."""
SHARED, LIKELY_SHARED = 0.3, 0.6
"""Shared structure below which the second shows something else, and below which it may: noise that neighbours share counts as structure of each."""
CONTRAST, CLEAR_CONTRAST, OFFSET = 1.15, 1.5, 0.1
"""Ratio of contrasts that is noted and that is refused, and difference of brightness in standard deviations that is noted."""


def notes_of_pairs(
    images: Sequence[TrainingImage], first: Sequence[Source], second: Sequence[Source]
) -> tuple[str, ...]:
    """Compare a few places of the images with their second ones.

    Returns
    -------
    tuple of str
        A note on the first pair that is shifted, or of other brightness.

    Raises
    ------
    InputError
        When a second image is a copy, shows something else, or has another contrast.
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
    axis = image.channel
    channels = 1 if axis is None else image.source.shape[axis]
    regions = sample_regions(image.source.shape, squares, image.spatial)
    compared = min(channels, CHANNELS)
    for channel in (n * channels // compared for n in range(compared)):
        own = regions if axis is None else [_with_index(region, axis, channel) for region in regions]
        parts = readable_parts(image.source, own)
        pair = Pair.of(
            (_square(image, part), _square(image, image.second.read(region))) for region, part in parts
        )
        if pair is not None:
            yield (f", channel {channel}," if channels > 1 else ""), pair


def _with_index(region: Region, axis: int, index: int) -> Region:
    """Return the same region at another index of an axis."""
    start, stop = [*region.start], [*region.stop]
    start[axis], stop[axis] = index, index + 1
    return Region(tuple(start), tuple(stop))


def _square(image: TrainingImage, pixels: Pixels) -> Values:
    return as_square(pixels, image.spatial)


def _judged(pair: Pair, first: str, second: str) -> list[str]:
    """Return what differs between two images besides noise, as a note."""
    if pair.is_copy:
        raise InputError(
            f"second: {second} has the same pixels as {first}: its noise is no other. Write the path of another image of the same."
        )
    if pair.structure < STRUCTURE:
        return []
    if any(pair.shift):
        rows, columns = pair.shift
        return [
            f"second: {second} is shifted by {rows} rows and {columns} columns against {first}: it learns to blur. Align them"
        ]
    if pair.shared < SHARED:
        raise InputError(
            f"second: {second} does not show the same as {first}: they share {max(0.0, pair.shared):.0%} of their structure. "
            "Write the path of an image of the same, with other noise, or method: noise2void."
        )
    if pair.shared < LIKELY_SHARED:
        return [
            f"second: {second} and {first} share {pair.shared:.0%} of their structure: they should show the same, unless neighbouring pixels share most of their noise"
        ]
    ratio = max(pair.contrast, 1 / pair.contrast)
    if ratio > CLEAR_CONTRAST:
        raise InputError(
            f"second: {second} has {pair.contrast:.2g} times the contrast of {first}: it would learn the mean of both. Scale one of them to the other."
        )
    if ratio > CONTRAST or abs(pair.offset) > OFFSET:
        return [
            f"second: {second} has {pair.contrast:.2g} times the contrast of {first}, and is {'brighter' if pair.offset > 0 else 'darker'} by "
            f"{abs(pair.offset):.2g} standard deviations: it learns the mean of both. Scale one of them to the other"
        ]
    return []
