"""Lengths and resolutions as text."""

from __future__ import annotations

from typing import Literal

ResolutionBound = Literal["", "best", "worst"]
"""Empty for a resolution that was measured; best: it is that or better; worst: worse than that."""
BOUND_NUMBERS: dict[ResolutionBound, float] = {"": 0.0, "best": 1.0, "worst": -1.0}
"""The bounds among the figures of a curve."""


def shown_length(metres: float) -> str:
    """A length with a unit in which it is 1 to 1000.

    Examples
    --------
    >>> shown_length(1.786e-7), shown_length(2e-11)
    ('178.6 nm', '20 pm')
    """
    for factor, unit in ((1.0, "m"), (1e-3, "mm"), (1e-6, "µm"), (1e-9, "nm")):
        if metres >= factor:
            return f"{metres / factor:.4g} {unit}"
    return f"{metres / 1e-12:.4g} pm"


def shown_resolution(metres: float, bound: float = 0.0) -> str:
    """Half of a period and what it is, by its number in :data:`BOUND_NUMBERS`.

    Examples
    --------
    >>> shown_resolution(1.786e-7, 1.0)
    '178.6 nm or better: the pixel is its limit'
    """
    length = shown_length(metres)
    if bound == BOUND_NUMBERS["best"]:
        return f"{length} or better: the pixel is its limit"
    if bound == BOUND_NUMBERS["worst"]:
        return f"worse than {length}: the two halves have nothing in common"
    return length
