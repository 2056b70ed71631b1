"""The place of the second image of a training on the first: it may be shifted, mirrored or turned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from halotile.storage.grid import Region
from halotile.storage.views import readable_parts
from halotile.tasks.noise.details import Values
from halotile.tasks.noise.estimate import as_square
from halotile.tasks.training.alignment import FineStructure
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
