"""A blur of deepinv that convolves as halotile does: to the same numbers, in a fraction of the time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError
from halotile.tasks.distributed.stacks.maps import Linear, Many, image_measured_as, is_measured, is_real, own
from halotile.tasks.operators.base import InMemory, Operator, Shape, read_all, with_engine
from halotile.tasks.operators.deepinv import DeepInv

SLOW = ("Blur", "Downsampling")
"""Classes of ``deepinv.physics`` whose adjoint is a transposed convolution: several times as slow as a flipped kernel."""


def rewritten(physics: Any, exact: bool = False) -> Any:
    """The same physics, with the forward and adjoint operator of halotile where there is one.

    Calls that halotile's operator does not take, with another filter or on an image of another size say, go to the
    physics. ``exact`` keeps to direct sums.

    Examples
    --------
    >>> from deepinv.physics import Blur
    >>> blur = rewritten(Blur(filter=torch.ones(1, 1, 3, 3) / 9, padding="circular"))
    >>> type(blur).__name__, float(blur.A_adjoint_A(torch.ones(1, 1, 8, 8)).mean())
    ('Blur', 1.0)
    """
    if type(physics).__name__ not in SLOW:
        return physics
    theirs = DeepInv(physics=physics)
    try:
        operator = theirs.replacement
    except (ConfigError, ValueError, RuntimeError):
        return physics
    if operator is None:
        return physics
    operator = with_engine(operator, np.dtype(np.float32), exact=exact)
    same = copy.copy(physics)
    same.A = Applied(physics, operator, "A")
    same.A_adjoint = Applied(physics, operator, "A_adjoint", theirs.fixed_shape)
    return same


@dataclass(frozen=True)
class Rewriting:
    """A factory of physics, which are rewritten."""

    factory: Callable[..., Any]
    exact: bool

    def __call__(self, index: int, device: Any, shared: Mapping[str, Any] | None) -> Any:
        return rewritten(self.factory(index, device, shared), self.exact)


@dataclass(frozen=True)
class Applied:
    """``A`` or ``A^T`` of a physics, on tensors of the processor in single or double precision.

    Parameters
    ----------
    physics : LinearPhysics
        What is asked where the operator has no answer.
    operator : Operator
        What is applied.
    name : str
        ``A`` or ``A_adjoint``.
    told : tuple of int, optional
        Shape (C, H, W) of the images that the physics is told to have.
    """

    physics: Any
    operator: Operator
    name: str
    told: Shape | None = None

    def __call__(self, x: torch.Tensor, *args: Any, **words: Any) -> torch.Tensor:
        if not args and not words and is_real(x):
            shape = tuple(x.shape)
            if self.name == "A" and is_measured([self.operator], shape):
                return self._between(shape)([x])[0]
            if self.name != "A" and (image := image_measured_as([self.operator], [shape], [self.told])):
                return self._between(image).transposed([x])[0]
        applied: torch.Tensor = getattr(self.physics, self.name)(x, *args, **words)
        return applied

    def _between(self, image: Shape) -> Linear:
        """The operator on images of this shape."""

        def forward(tensors: Many) -> Many:
            return [own(read_all(self.operator.forward(InMemory(tensors[0].numpy()))))]

        def adjoint(tensors: Many) -> Many:
            return [own(read_all(self.operator.adjoint(InMemory(tensors[0].numpy()), image)))]

        return Linear(forward, adjoint)
