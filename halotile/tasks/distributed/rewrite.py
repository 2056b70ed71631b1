"""Blurs of deepinv that use halotile's convolutions: the same numbers, in a fraction of the time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.stacks.linear_map import (
    LinearMap,
    find_image_shape,
    is_supported,
    measured_shapes,
)
from halotile.tasks.distributed.transport.contents import wants_gradients
from halotile.tasks.distributed.transport.tensors import to_tensor
from halotile.tasks.operators.base import InMemory, Operator, Shape, read_all, with_engine
from halotile.tasks.operators.deepinv import DeepInv

SLOW = ("Blur", "Downsampling")
"""Classes of ``deepinv.physics`` whose adjoint is several times as slow as one by a flipped kernel."""


def rewrite(physics: Any, exact: bool = False) -> Any:
    """Return the same physics with the forward and adjoint of halotile's operator, if there is one.

    Calls that halotile's operator does not support, such as one with another filter or an image of another
    size, go to the physics. ``exact`` keeps to direct sums. A physics with tensors that want gradients stays.

    Examples
    --------
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
    """``A`` or ``A^T`` of a physics, on tensors on the cpu in single or double precision.

    Parameters
    ----------
    physics : LinearPhysics
        The physics for calls that the operator does not support.
    operator : Operator
        The operator.
    name : str
        ``A`` or ``A_adjoint``.
    declared : tuple of int, optional
        Declared shape (C, H, W) of the images of the physics.
    """

    physics: Any
    operator: Operator
    name: str
    declared: Shape | None = None

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
