"""Checks of operators that are probably not what the user meant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from halotile.errors import ConfigError
from halotile.graphs.amounts import short_number
from halotile.graphs.jobs.reconstruct.problem.traffic import MOST_COMPUTED_TWICE
from halotile.graphs.kinds.sections import Run
from halotile.graphs.plans.trials.denoiser_trials import bounded
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.operators.common.adjointness import check_adjoint
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.own import Own

SUM_TOLERANCE = 0.02
"""Distance of a kernel's sum from 1 below which the kernel only spreads light."""
LOOKED_AT = 2**24
"""Pixels of a mask that are checked before a job: if a larger one is 0 so far, the run itself shows the result."""
TRIED = 2**22
"""Most pixels for which an operator that sees the whole image is tried before a job."""
STRIP = 2**20
"""Pixels that are checked at once."""


def notes_of(operators: Iterable[Operator]) -> Iterator[str]:
    """Yield notes on kernels that are valid, but probably not what the user meant.

    Examples
    --------
    >>> from halotile.tasks.operators.blur import Blur
    >>> list(notes_of([Blur(kernel=np.ones((3, 3)) / 9), Blur(kernel=np.ones((1, 2)))]))[0][:70]
    'operators[1]: the kernel sums to 2: the image comes out 0.5 times as b'
    """
    for number, operator in enumerate(operators):
        kernel = getattr(operator, "kernel", None)
        if not isinstance(kernel, np.ndarray):
            continue
        total = float(kernel.sum()) / math.prod(kernel.shape[:-2])
        if abs(total - 1) > SUM_TOLERANCE:
            bright = (
                f"the image comes out {1 / total:.3g} times as bright as the measurement"
                if total > 0
                else "light is taken away"
            )
            yield (
                f"operators[{number}]: the kernel sums to {total:.4g}: {bright}. Divide it by its sum if it only spreads light."
            )
        if any(edge % 2 == 0 for edge in kernel.shape[-2:]):
            yield (
                f"operators[{number}]: the kernel is {' × '.join(map(str, kernel.shape[-2:]))}: an even edge has no middle "
                "pixel, and the image comes out half a pixel aside. Pad it to an odd edge if that matters."
            )


def note_of_shape(shape: Shape, data: Iterable[Shape]) -> Iterator[str]:
    """Yield a note on an image whose shape was inferred, and that is larger than its measurements.

    Examples
    --------
    >>> list(note_of_shape((120, 140), [(60, 70), (120, 140)]))
    []
    >>> list(note_of_shape((120, 140), [(60, 70)]))[0][:84]
    'shape is auto: the image is taken to be 120 × 140, 4 times the pixels of its largest'
    """
    largest = max(map(math.prod, data))
    if math.prod(shape) > largest:
        yield (
            f"shape is auto: the image is taken to be {' × '.join(map(str, shape))}, {short_number(math.prod(shape) / largest)} times the "
            "pixels of its largest measurement. Write shape, or another factor, if that is not what was meant."
        )


def note_of_passes(per_pass: int, twice: float) -> Iterator[str]:
    """Yield a note where several iterations in a pass compute much of the gradient, this fraction of it, twice.

    Examples
    --------
    >>> list(note_of_passes(2, 0.02))
    []
    >>> list(note_of_passes(20, 3.5))[0][:73]
    'solver.checkpoint_every: 20 computes 350 % of the gradient more than once'
    """
    if per_pass > 1 and twice > MOST_COMPUTED_TWICE:
        yield (
            f"solver.checkpoint_every: {per_pass} computes {100 * twice:.0f} % of the gradient more than once: so many iterations look "
            "far beside what is computed at once. Write fewer, or a larger output.shard."
        )


def check_kernels(operators: Iterable[Operator], image: Shape) -> None:
    """Refuse a kernel that is larger than its image."""
    for number, operator in enumerate(operators):
        for kernel, planes in _kernels(operator, image):
            if any(taps > n for taps, n in zip(kernel, planes, strict=True)):
                raise ConfigError(
                    f"operators[{number}]: the kernel is {' × '.join(map(str, kernel))} and its image "
                    f"{' × '.join(map(str, planes))}: it would look past both sides at once. Write the shape of the image as it "
                    "is, or crop the kernel to the part that is not 0."
                )


def _kernels(operator: Operator, image: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yield rows and columns of every kernel, and of the image that it is applied to."""
    kernel = getattr(operator, "kernel", None)
    if isinstance(kernel, np.ndarray):
        yield kernel.shape[-2:], image[-2:]
    parts = getattr(operator, "operators", ())
    shapes = operator.shapes(image) if isinstance(operator, Composition) else [image] * len(parts)
    for part, shape in zip(parts, shapes, strict=False):
        yield from _kernels(part, shape)


def check_signs(operators: Iterable[Operator]) -> None:
    """Refuse kernels, and weights of sums, below 0 where an image is multiplied by corrections."""
    for number, operator in enumerate(operators):
        if any(float(np.min(numbers)) < 0 for numbers in _factors(operator)):
            raise ConfigError(
                f"operators[{number}] ({operator.name}) has numbers below 0 in its kernel or its weights, and solver osem multiplies: "
                "it needs operators without any. Write 0 in their place, or solver.name: fista."
            )


def _factors(operator: Operator) -> Iterator[Any]:
    """Yield kernel and weights of an operator and of those inside it."""
    found = (getattr(operator, name, None) for name in ("kernel", "weights"))
    yield from (numbers for numbers in found if isinstance(numbers, np.ndarray | tuple) and len(numbers))
    for part in getattr(operator, "operators", ()):
        yield from _factors(part)


def check_masks(operators: Iterable[Operator]) -> None:
    """Refuse a mask that leaves out every pixel, as far as this can be checked quickly."""
    for number, operator in enumerate(operators):
        mask = getattr(operator, "mask", None)
        if mask is not None and _is_empty(mask):
            raise ConfigError(
                f"operators[{number}]: the mask is 0 everywhere: nothing of the image would be measured. Write another."
            )


def _is_empty(mask: Readable) -> bool:
    """Return True where all of a mask is 0; False for one that is too large to check."""
    length, *other_axes = mask.shape
    if length * math.prod(other_axes) > LOOKED_AT:
        return False
    rows = max(1, STRIP // math.prod(other_axes))
    strips = (
        Region((first, *(0 for _ in other_axes)), (min(first + rows, length), *other_axes))
        for first in range(0, length, rows)
    )
    return not any(np.any(mask.read(strip)) for strip in strips)


def try_adjoints(operators: Iterable[Operator], image: Shape, run: Run) -> tuple[str, ...]:
    """Compare adjoint and forward of foreign operators in a separate process; return notes on those not tried."""
    untried = []
    for number, operator in enumerate(operators):
        if not _is_foreign(operator):
            continue
        if operator.kind == "whole" and math.prod(image) > TRIED:
            untried.append(
                f"operators[{number}] sees the whole image, which is too large to hold its adjoint against its forward: try a smaller one"
            )
            continue
        named = operator.import_ if isinstance(operator, Own) else operator.name
        title = f"operators[{number}] ({named})"
        bounded(partial(_check_adjoint, title, operator, image), title, run)
    return tuple(untried)


def _check_adjoint(title: str, operator: Operator, image: Shape) -> None:
    try:
        check_adjoint(operator, image)
    except ConfigError as error:
        raise ConfigError(f"{title}: {error}") from error


def _is_foreign(operator: Operator) -> bool:
    """Return True where somebody else wrote the operator or a part of it."""
    is_foreign = type(operator).__module__.partition(".")[0] != "halotile"
    return (
        is_foreign or isinstance(operator, Own) or any(map(_is_foreign, getattr(operator, "operators", ())))
    )
