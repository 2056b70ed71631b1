"""The second image of a training beside the first: it should differ in its noise alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halotile.errors import InputError
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.train.placing import Placing, placing_of
from halotile.storage.arrays import Source
from halotile.storage.rim import Pixels
from halotile.storage.views import readable_parts
from halotile.tasks.noise.details import Values
from halotile.tasks.noise.estimate import as_square
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
        for where, pair, placing in _compared(images[number], max(1, SQUARES // count)):
            notes += _judged(pair, placing, f"{first[number].path}{where}", second[number].path)
    return tuple(notes[:1])


def _compared(image: TrainingImage, squares: int) -> Iterator[tuple[str, Pair, Placing]]:
    """Yield the statistics of each channel, or of some where there are many, after words that name it."""
    assert image.second is not None
    compared = min(image.channels, CHANNELS)
    for channel in (n * image.channels // compared for n in range(compared)):
        parts = readable_parts(image.source, image.sampled(squares, channel))
        read = [region for region, _ in parts]
        first = [_square(image, part) for _, part in parts]
        second = [_square(image, image.second.read(region)) for region in read]
        pair = Pair.of(zip(first, second, strict=True))
        if pair is not None:
            is_like = not pair.shared_finely < LIKELY_SHARED
            placing = placing_of(image, read, (first, second), is_like)
            yield (f", channel {channel}," if image.channels > 1 else ""), pair, placing


def _square(image: TrainingImage, pixels: Pixels) -> Values:
    return as_square(pixels, image.spatial)


def _judged(pair: Pair, placing: Placing, first: str, second: str) -> list[str]:
    """Return what differs between two images besides noise, as a note."""
    if pair.is_copy:
        raise InputError(
            f"second: {second} has the same pixels as {first}: its noise is no other. Write the path of another image of the same."
        )
    if placing.turned:
        raise InputError(
            f"second: {second} does not show the same as {first}: it would fit if it were {placing.turned}. Write the path of an image that lies as the "
            "first does."
        )
    shift = pair.shift if pair.structure >= STRUCTURE and any(pair.shift) else placing.shift
    if any(shift):
        rows, columns = (counted(n, word) for n, word in zip(shift, ("row", "column"), strict=True))
        return [
            f"second: {second} is shifted by {rows} and {columns} against {first}: it learns to blur. Align them"
        ]
    if pair.structure < STRUCTURE:
        return []
    return _unlike(pair, first, second)


def _unlike(pair: Pair, first: str, second: str) -> list[str]:
    """Return what is unlike in two images that are not shifted, as a note."""
    if pair.shared < SHARED:
        raise InputError(
            f"second: {second} does not show the same as {first}: they share {max(0.0, pair.shared):.0%} of their structure. "
            "Write the path of an image of the same, with other noise, or method: noise2void."
        )
    for shared, which in ((pair.shared, ""), (pair.shared_finely, "fine ")):
        if shared < LIKELY_SHARED:
            return [
                f"second: {second} and {first} share {max(0.0, shared):.0%} of their {which}structure: they should show the same, unless neighbouring pixels "
                "share most of their noise"
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
    return [
        f"second: {second} {', and '.join(differs)}: it learns the mean of both. Scale one of them to the other"
    ]
