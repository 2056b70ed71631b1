"""Linear maps of tensors with a known transpose, which autograd uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.transport.objects import wants_gradients
from halotile.tasks.distributed.transport.tensors import to_tensor
from halotile.tasks.operators.base import InMemory, Operator, Shape, read_all, with_engine
from halotile.tasks.operators.deepinv import DeepInv

SLOW = ("Blur", "Downsampling")
"""Classes of ``deepinv.physics`` whose adjoint is several times as slow as one by a flipped kernel."""


def rewrite(physics: Any, exact: bool = False) -> Any:
    """Return the same physics with the forward and adjoint of halotile's operator, if there is one.

    Calls that halotile's operator does not support, such as one with another filter or an image of another
    size, go to the physics. ``exact`` keeps to direct sums. A physics with tensors that want gradients stays.

    >>> from deepinv.physics import Blur
    >>> blur = rewrite(Blur(filter=torch.ones(1, 1, 3, 3) / 9, padding="circular"))
    >>> type(blur).__name__, float(blur.A_adjoint_A(torch.ones(1, 1, 8, 8)).mean())
    ('Blur', 1.0)
    """
    if type(physics).__name__ not in SLOW or wants_gradients(physics):
        return physics
    wrapped = DeepInv(physics=physics)
    try:
        operator = wrapped.replacement
    except (ConfigError, ValueError, RuntimeError):
        return physics
    if operator is None:
        return physics
    operator = with_engine(operator, np.dtype(np.float32), exact=exact)
    same = copy.copy(physics)
    same.A = OperatorMethod(physics, operator, "A")
    same.A_adjoint = OperatorMethod(physics, operator, "A_adjoint", wrapped.fixed_shape)
    return same


@dataclass(frozen=True)
class RewritingFactory:
    """A factory of rewritten physics."""

    factory: Callable[..., Any]
    exact: bool

    def __call__(self, index: int, device: Any, shared: Mapping[str, Any] | None) -> Any:
        return rewrite(self.factory(index, device, shared), self.exact)


@dataclass(frozen=True)
class OperatorMethod:
    """``A`` or ``A^T`` of a physics, on tensors on the cpu in single or double precision."""

    physics: Any  # physics for calls that the operator does not support
    operator: Operator
    name: str  # `A` or `A_adjoint`
    declared: Shape | None = None  # declared shape (C, H, W) of the images of the physics

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not args and not kwargs and is_supported(x):
            shape = tuple(x.shape)
            if self.name == "A":
                if measured_shapes([self.operator], shape):
                    return self._linear(shape)([x])[0]
            elif image := find_image_shape([self.operator], [shape], [self.declared]):
                return self._linear(image).transposed([x])[0]
        result: torch.Tensor = getattr(self.physics, self.name)(x, *args, **kwargs)
        return result

    def _linear(self, image: Shape) -> LinearMap:
        """The operator on images of this shape."""

        def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [to_tensor(read_all(self.operator.forward(InMemory(tensors[0].numpy()))))]

        def adjoint(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [to_tensor(read_all(self.operator.adjoint(InMemory(tensors[0].numpy()), image)))]

        return LinearMap(forward, adjoint)


TensorMap = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class LinearMap:
    """A linear map of several tensors to several, with its transpose; differentiable any number of times.

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

    ``shapes``: shape of each measurement; ``declared``: for each operator the declared shape (C, H, W) of its images, or None.

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
