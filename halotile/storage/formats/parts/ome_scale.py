"""Pixel sizes and positions in OME-Zarr attributes, with remarks on those that cannot be meant."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halotile.errors import InputError
from halotile.storage.spacing import known_unit

_SPACE_AND_TIME = "tzyx"  # axes whose units OME-Zarr lists
# Consequence of a size that cannot be meant.
AS_UNKNOWN = "the size is taken as not known, unless input.spacing gives it"


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one level, as its attributes state them."""

    scale: tuple[float, ...]  # pixel size along each axis
    position: tuple[float, ...]  # position of the first pixel; empty without any translation
    # type and length of each transformation of another number of axes, which is left out
    misfits: tuple[tuple[str, int], ...]


def coordinates(image: Mapping[str, Any], entry: Mapping[str, Any], count: int) -> Coordinates:
    """Coordinates by the transformations of the level, then of the image."""
    scale, position, is_known = [1.0] * count, [0.0] * count, False
    misfits = []
    for holder in (entry, image):
        for kind, numbers in _transformations(holder, count):
            if len(numbers) != count:
                misfits.append((kind, len(numbers)))
            elif kind == "scale":
                scale = [a * b for a, b in zip(scale, numbers, strict=True)]
                position = [a * b for a, b in zip(position, numbers, strict=True)]
            else:
                position, is_known = [a + b for a, b in zip(position, numbers, strict=True)], True
    return Coordinates(tuple(scale), tuple(position) if is_known else (), tuple(misfits))


def _transformations(holder: Mapping[str, Any], count: int) -> Iterator[tuple[str, list[float]]]:
    """Scales and translations in order, without other types. Transforms for another number of axes are ignored."""
    steps = holder.get("coordinateTransformations") or []
    try:
        for step in steps:
            kind = step.get("type")
            numbers = step.get(kind) if kind in ("scale", "translation") else None
            if isinstance(numbers, list) and len(numbers) != count:
                yield kind, numbers
            elif isinstance(numbers, list):
                values = [float(number) for number in numbers]
                if not all(map(math.isfinite, values)):
                    raise ValueError
                yield kind, values
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"its coordinateTransformations are {steps!r:.200}: OME-Zarr requires a list of scales and translations, each with a "
            f"number for each of the {count} axes. Repair the attributes, or write the path of the level itself, which is read without them."
        ) from None


def known_sizes(
    axes: Sequence[str], stated: Coordinates, units: Sequence[str | None]
) -> tuple[tuple[float, ...], tuple[str | None, ...], tuple[str, ...]]:
    """Sizes and units without those that cannot be meant, which are 1.0 and None, and a remark on each of these.

    ``axes``: letter of each axis; ``stated``: coordinates in the attributes; ``units``: unit of each axis in the attributes.

    >>> known_sizes("yx", Coordinates((0.5, -1.0), (), ()), ("micrometer", "micrometer"))[:2]
    ((0.5, 1.0), ('micrometer', None))
    """
    remarks = [
        f"its OME-Zarr has a {kind} of {length} {'number' if length == 1 else 'numbers'} for {len(axes)} axes, which is left out"
        + (f": {AS_UNKNOWN}" if kind == "scale" else "")
        for kind, length in stated.misfits
    ]
    fits = all(kind != "scale" for kind, _ in stated.misfits)
    sizes: list[tuple[float, str | None]] = []
    for axis, size, word in zip(axes, stated.scale, units, strict=True):
        is_size = 0 < size < math.inf
        if not is_size:
            remarks.append(f"its OME-Zarr has {size:g} as the size along {axis}, which is none: {AS_UNKNOWN}")
        unit = known_unit(word) if word and axis in _SPACE_AND_TIME else word
        if word and unit is None:
            remarks.append(
                f"its OME-Zarr has {word!r:.50} as the unit along {axis}, which is no unit of space or time: left out"
            )
        sizes.append((size, unit) if fits and is_size else (1.0, None))
    return tuple(size for size, _ in sizes), tuple(unit for _, unit in sizes), tuple(remarks)
