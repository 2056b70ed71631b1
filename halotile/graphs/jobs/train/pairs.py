"""The second image of a training beside the first: it should differ in its noise alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from halotile.errors import InputError
from halotile.graphs.amounts import counted
from halotile.storage.arrays import Source
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.views import readable_parts
from halotile.tasks.noise.details import Values
from halotile.tasks.noise.estimate import as_square
from halotile.tasks.training.alignment import FineStructure
from halotile.tasks.training.pairs import Pair
from halotile.tasks.training.patches import TrainingImage

TURNED = 1.5
"""Correlation with the second image mirrored or turned, relative to that as it is, above which it is so: that of right pairs was up to 1.15."""


class _Turn(NamedTuple):
    """Another way to place an image: its rows and columns may be exchanged first, then be in reverse order."""

    is_transposed: bool
    reverses_rows: bool
    reverses_columns: bool

    def region(self, region: Region, image: TrainingImage) -> Region:
        """Return the region whose pixels come to lie at this one."""
        start, stop = [*region.start], [*region.stop]
        spans = [(region.start[axis], region.stop[axis]) for axis in image.spatial]
        for number, is_reversed in enumerate((self.reverses_rows, self.reverses_columns)):
            if is_reversed:
                spans[number] = image.edges[number] - spans[number][1], image.edges[number] - spans[number][0]
        for axis, span in zip(image.spatial, reversed(spans) if self.is_transposed else spans, strict=True):
            start[axis], stop[axis] = span
        return Region(tuple(start), tuple(stop))

    def turned(self, square: Values) -> Values:
        """Return a square of that region as it comes to lie."""
        square = square.T if self.is_transposed else square
        return square[:: -1 if self.reverses_rows else 1, :: -1 if self.reverses_columns else 1]


TURNS: Mapping[_Turn, str] = {
    _Turn(False, True, False): "mirrored top to bottom",
    _Turn(False, False, True): "mirrored left to right",
    _Turn(False, True, True): "turned by 180 degrees",
    _Turn(True, True, False): "turned by 90 degrees",
    _Turn(True, False, True): "turned by 90 degrees",
    _Turn(True, False, False): "mirrored, with its rows as columns",
    _Turn(True, True, True): "mirrored, with its rows as columns",
}


class Placing(NamedTuple):
    """The place of a second image on the first.

    Parameters
    ----------
    turned : str
        What would make it fit, empty where it fits best as it is.
    shift : (int, int)
        Rows and columns by which it is shifted; 0 where that is not clear.
    """

    turned: str = ""
    shift: tuple[int, int] = (0, 0)


def placing_of(
    image: TrainingImage, regions: Sequence[Region], squares: tuple[list[Values], list[Values]], is_like: bool
) -> Placing:
    """Compare squares of an image with those of its second one, and with that mirrored and turned where they do not clearly fit.

    Parameters
    ----------
    regions : sequence of Region
        Places of the squares.
    squares : (list of ndarray, list of ndarray)
        Rows and columns of each, of the first and of the second.
    is_like : bool
        False where their structure tells that they may show different things.
    """
    assert image.second is not None
    first, second = map(FineStructure, squares)
    fit = first.fit(second)
    shift = fit.shift if fit.is_shifted else (0, 0)
    if fit.is_sure and is_like:
        return Placing("", shift)
    best, found = TURNED * fit.best, ""
    for turn, words in TURNS.items():
        if turn.is_transposed and image.edges[0] != image.edges[1]:
            continue
        parts = readable_parts(image.second, [turn.region(region, image) for region in regions])
        if len(parts) < len(regions):
            continue
        turned = first.fit(FineStructure([turn.turned(as_square(part, image.spatial)) for _, part in parts]))
        if turned.is_clear and turned.best > best:
            best, found = turned.best, words
    return Placing(found, shift)


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
