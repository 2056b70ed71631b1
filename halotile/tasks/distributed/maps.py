"""Linear maps of tensors that know their transpose, so that autograd need not find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.tensors import to_tensor
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
    def forward(ctx: Any, linear: Linear, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.linear = linear
        return tuple(linear.apply(list(tensors)))

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


def image_measured_as(
    operators: Sequence[Operator], shapes: Sequence[Shape], known: Shape | None = None
) -> Shape | None:
    """Shape of the image that has measurements of these shapes; None where none is found.

    Parameters
    ----------
    operators : sequence of Operator
        What measures it.
    shapes : sequence of tuple of int
        One for each.
    known : tuple of int, optional
        A shape to try first: several images may have measurements of one shape.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> image_measured_as([Blur(kernel=np.ones((3, 3)), boundary="valid")], [(1, 1, 8, 8)])
    (1, 1, 10, 10)
    """
    guesses = [
        guess
        for operator, shape in zip(operators, shapes, strict=True)
        for guess in _guesses(operator, shape)
    ]
    for image in [known, *guesses] if known else guesses:
        try:
            if [operator.measured(image) for operator in operators] == list(shapes):
                return image
        except ConfigError:
            continue
    return None


def _guesses(operator: Operator, shape: Shape) -> Iterator[Shape]:
    factor = getattr(operator, "factor", 1)
    taps = getattr(operator, "kernel", None)
    yield shape
    yield (*shape[:-2], *(n * factor for n in shape[-2:]))
    if taps is not None:
        yield (*shape[:-2], *((n - 1) * factor + k for n, k in zip(shape[-2:], taps.shape[-2:], strict=True)))
