"""Lengths and resolutions as text."""

MEASURED, AT_WORST, AT_BEST = 0.0, 1.0, -1.0  # a resolution is as measured; that or better; or worse than that


def shown_length(metres: float) -> str:
    """A length with a unit in which it is 1 to 1000.

    >>> shown_length(1.786e-7), shown_length(2e-11)
    ('178.6 nm', '20 pm')
    """
    for factor, unit in ((1.0, "m"), (1e-3, "mm"), (1e-6, "µm"), (1e-9, "nm")):
        if metres >= factor:
            return f"{metres / factor:.4g} {unit}"
    return f"{metres / 1e-12:.4g} pm"


def shown_resolution(metres: float, bound: float = MEASURED) -> str:
    """Half of a period, and what it is: one of the three numbers above.

    >>> shown_resolution(1.786e-7, AT_WORST)
    '178.6 nm or better: the pixel is its limit'
    """
    length = shown_length(metres)
    if bound == AT_WORST:
        return f"{length} or better: the pixel is its limit"
    if bound == AT_BEST:
        return f"worse than {length}: even there the two halves do not agree"
    return length
