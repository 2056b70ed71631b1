"""How the pixels of an image and of a measurement lie to each other along one axis, where a kernel joins them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halotile.storage.rim import source_positions

FOLDING = ("reflect", "mirror", "nearest")
"""Rim rules under which what the adjoint puts outside the image comes back into it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Measurement pixel i sees the image pixels ``step i - before`` to ``step i - before + taps - 1``.

    Examples
    --------
    >>> frame = Frame(length=10, count=10, taps=3, step=1, before=1, rule="mirror")
    >>> frame.seen(0, 4)
    (-1, 5)
    >>> frame.touching(2, 3)
    (1, 4)
    """

    length: int
    """Pixels of the image."""
    count: int
    """Pixels of the measurement."""
    taps: int
    step: int
    before: int
    rule: str
    """What is read outside the image."""

    def seen(self, start: int, stop: int) -> tuple[int, int]:
        """The image pixels that these measurement pixels see; they may lie outside."""
        return self.step * start - self.before, self.step * (stop - 1) - self.before + self.taps

    def touching(self, start: int, stop: int) -> tuple[int, int]:
        """The measurement pixels that see any of these image pixels; they may lie outside."""
        first = -(-(start + self.before - self.taps + 1) // self.step)
        return first, (stop - 1 + self.before) // self.step + 1

    def unfolded(self, start: int, stop: int) -> tuple[int, int]:
        """The span that the adjoint needs for these image pixels before the rim is folded back.

        A span that ends within the fold is drawn out to the edge: the fold touches all of it.
        """
        low, high = self.seen(0, self.count)
        before, after = max(0, -low), max(0, high - self.length)
        if self.rule not in FOLDING:
            return start, stop
        return (
            -before if before and start <= before else start,
            self.length + after if after and stop >= self.length - after - 1 else stop,
        )

    def targets(self, start: int, stop: int) -> NDArray[np.intp]:
        """Where each position of an unfolded span belongs in the image; the rule is one that folds."""
        return source_positions(start, stop, self.length, self.rule)
