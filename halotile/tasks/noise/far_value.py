"""A value far from all others that many pixels share: one that may stand for no measurement."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

LEAST_SHARE, LEAST_COUNT = 1e-4, 8
"""Share of the pixels that have the value, and their number, at least."""


class FarValue(NamedTuple):
    """The least or largest value of an image, farther from the others than these lie from each other."""

    value: float
    number: int
    low: float
    high: float
    """Range of the others."""


class Ends(NamedTuple):
    """The least two and largest two finite values in parts of an image."""

    counts: Counter[float]
    """Number of pixels of each; of the least and largest of all parts it is that in all parts."""
    pixels: int

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """The ends of the finite values of a part."""
        counts: Counter[float] = Counter()
        for sign in (1, -1):
            rest = values.ravel()
            for _ in range(2):
                if rest.size:
                    end = rest.min() if sign == 1 else rest.max()
                    others = rest[rest > end] if sign == 1 else rest[rest < end]
                    counts[float(end)] = rest.size - others.size
                    rest = others
        return cls(counts, values.size)

    def joined(self, other: Ends) -> Ends:
        """The ends of both parts together."""
        return Ends(self.counts + other.counts, self.pixels + other.pixels)

    def far_value(self) -> FarValue | None:
        """The value that lies apart, if there is one.

        Examples
        --------
        >>> import numpy as np
        >>> Ends.of(np.array([-9999.0] * 10 + [12.0, 13.0, 500.0])).far_value()
        FarValue(value=-9999.0, number=10, low=12.0, high=500.0)
        """
        values = sorted(self.counts)
        for end, others in ((values[:1], values[1:]), (values[-1:], values[:-1])):
            if len(others) < 2 or self.counts[end[0]] < max(LEAST_COUNT, LEAST_SHARE * self.pixels):
                continue
            if min(abs(end[0] - other) for other in others) > others[-1] - others[0]:
                return FarValue(end[0], self.counts[end[0]], others[0], others[-1])
        return None


NO_ENDS = Ends(Counter(), 0)
