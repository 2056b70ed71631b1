"""Linear maps of tensors that know their transpose, so that autograd need not find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.transport.tensors import to_tensor
from halotile.tasks.operators.base import Operator, Shape

Many = list[torch.Tensor]


@dataclass(frozen=True)
class Linear:
    """A linear map of several tensors to several, with its transpose.

    Examples
    --------
    >>> double = Linear(lambda t: [2 * t[0]], lambda t: [2 * t[0]])
    >>> x = torch.ones(1, requires_grad=True)
    >>> double([x])[0].backward()
    >>> x.grad.item()
    2.0
    """

    apply: Callable[[Many], Many]
    transpose: Callable[[Many], Many]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Many:
        """Its values, differentiable as often as wanted."""
        return list(_Linear.apply(self, *tensors))

    @property
    def transposed(self) -> Linear:
        """The transpose, whose transpose is this."""
        return Linear(self.transpose, self.apply)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """Forward: the map. Backward: its transpose, whose backward is the map."""

    @staticmethod
    def forward(linear: Linear, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear.apply(list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.linear.transposed(cotangents))


def own(pixels: Any) -> torch.Tensor:
    """Pixels that were just computed, as a tensor."""
    return to_tensor(pixels, str(pixels.dtype))


def is_real(x: Any) -> bool:
    """Whether it is a batch of images of a type that halotile's operators compute in, on the processor."""
    return (
        isinstance(x, torch.Tensor)
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type == "cpu"
    )


def is_measured(operators: Sequence[Operator], image: Shape) -> bool:
    """Whether all of these take an image of this shape.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> [is_measured([Blur(kernel=np.ones((3, 3)), factor=2)], (1, 1, n, n)) for n in (8, 9)]
    [True, False]
    """
    return _measured(operators, image) is not None


def _measured(operators: Sequence[Operator], image: Shape) -> list[Shape] | None:
    try:
        return [operator.measured(image) for operator in operators]
    except ConfigError:
        return None


def image_measured_as(
    operators: Sequence[Operator], shapes: Sequence[Shape], told: Sequence[Shape | None]
) -> Shape | None:
    """Shape of the image that has measurements of these shapes; None where none is found.

    Several images may have measurements of one shape. Then it is the one that deepinv's adjoints give.

    Parameters
    ----------
    operators : sequence of Operator
        What measures it.
    shapes : sequence of tuple of int
        One for each.
    told : sequence of tuple of int
        For each the shape (C, H, W) of the images that it is told to have, or None.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> image_measured_as([Blur(kernel=np.ones((3, 3)), boundary="valid")], [(1, 1, 8, 8)], [None])
    (1, 1, 10, 10)
    """
    sizes = {(*shape[:-3], *size) for shape, size in zip(shapes, told, strict=True) if size}
    if len(sizes) > 1:
        return None
    guesses = sizes or (
        guess
        for operator, shape in zip(operators, shapes, strict=True)
        for guess in _guesses(operator, shape)
    )
    return next((image for image in guesses if _measured(operators, image) == list(shapes)), None)


def _guesses(operator: Operator, shape: Shape) -> Iterator[Shape]:
    factor = getattr(operator, "factor", 1)
    taps = getattr(operator, "kernel", None)
    yield (*shape[:-2], *(n * factor for n in shape[-2:]))
    if taps is not None and factor == 1:
        yield (*shape[:-2], *(n + k - 1 for n, k in zip(shape[-2:], taps.shape[-2:], strict=True)))
