"""Linear maps of tensors with a known transpose, which autograd uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.operators.base import Operator, Shape

TensorMap = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class LinearMap:
    """A linear map of several tensors to several, with its transpose; differentiable any number of times.

    Examples
    --------
    >>> double = LinearMap(lambda t: [2 * t[0]], lambda t: [2 * t[0]])
    >>> x = torch.ones(1, requires_grad=True)
    >>> double([x])[0].backward()
    >>> x.grad.item()
    2.0
    """

    apply: TensorMap
    transpose: TensorMap

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Apply the map."""
        return list(_LinearFunction.apply(self, *tensors))

    @property
    def transposed(self) -> LinearMap:
        """The transpose, whose transpose is this map."""
        return LinearMap(self.transpose, self.apply)


class _LinearFunction(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of a linear map: backward is the transpose, whose backward is the map."""

    @staticmethod
    def forward(linear: LinearMap, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear.apply(list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.linear.transposed(cotangents))


def is_supported(x: Any) -> bool:
    """Return True for a batch of images on the cpu whose dtype halotile's operators support."""
    return (
        isinstance(x, torch.Tensor)
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type == "cpu"
    )


def measured_shapes(operators: Sequence[Operator], image: Shape) -> list[Shape] | None:
    """Return the shapes of an image's measurements; None if one of the operators does not accept the image.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> [measured_shapes([Blur(kernel=np.ones((3, 3)), factor=2)], (1, 1, n, n)) for n in (8, 9)]
    [[(1, 1, 4, 4)], None]
    """
    try:
        return [operator.measured(image) for operator in operators]
    except ConfigError:
        return None


def find_image_shape(
    operators: Sequence[Operator], shapes: Sequence[Shape], declared: Sequence[Shape | None]
) -> Shape | None:
    """Find the shape of the image with measurements of these shapes; None if there is none.

    If several images have measurements of one shape, it is the one that deepinv's adjoints return.

    Parameters
    ----------
    operators : sequence of Operator
        The operators.
    shapes : sequence of tuple of int
        Shape of each measurement.
    declared : sequence of tuple of int
        For each operator the declared shape (C, H, W) of its images, or None.

    Examples
    --------
    >>> import numpy as np
    >>> from halotile.tasks.operators.blur import Blur
    >>> find_image_shape([Blur(kernel=np.ones((3, 3)), boundary="valid")], [(1, 1, 8, 8)], [None])
    (1, 1, 10, 10)
    """
    sizes = {(*shape[:-3], *size) for shape, size in zip(shapes, declared, strict=True) if size}
    if len(sizes) > 1:
        return None
    candidates = sizes or (
        candidate
        for operator, shape in zip(operators, shapes, strict=True)
        for candidate in _candidates(operator, shape)
    )
    return next((image for image in candidates if measured_shapes(operators, image) == list(shapes)), None)


def _candidates(operator: Operator, shape: Shape) -> Iterator[Shape]:
    factor = getattr(operator, "factor", 1)
    taps = getattr(operator, "kernel", None)
    yield (*shape[:-2], *(n * factor for n in shape[-2:]))
    if taps is not None and factor == 1:
        yield (*shape[:-2], *(n + k - 1 for n, k in zip(shape[-2:], taps.shape[-2:], strict=True)))
