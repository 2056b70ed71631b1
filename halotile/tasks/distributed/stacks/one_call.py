"""Iterations with ``A^T A`` as one call: on small images a call costs far more than a product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from halotile.tasks.distributed.stacks.krylov import Apply, conjugate_gradients, largest_eigenvalue
from halotile.tasks.distributed.transport.calls import Call, Tensors, Thing, check_kind
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch
from halotile.tasks.distributed.transport.loaded_objects import lent

SMALL_BYTES = 2**16
"""Images of less than this are iterated on in one call."""


@dataclass(frozen=True)
class Products:
    """Products with ``A^T A``, added up in the order of the operators.

    Parameters
    ----------
    things : tuple of Carried or Made
        The operators.
    kind : str, optional
        Name of a class of ``deepinv.physics`` that they have to be of.
    """

    things: tuple[Thing, ...]
    kind: str | None

    @contextmanager
    def lent(self) -> Iterator[Apply]:
        """``sum_i A_i^T A_i x``, as a function of x."""
        with lent(None, *self.things) as things:
            for thing in things if self.kind is not None else ():
                check_kind(thing, str(self.kind))
            yield lambda x: reduce(add, (thing.A_adjoint_A(x) for thing in things))


@dataclass(frozen=True)
class Solution:
    """``x`` with ``(w A^T A + s) x = b``, and the relative residual.

    Parameters
    ----------
    products : Products
        ``A^T A``.
    shift : float
        ``s``.
    tol : float
        Relative residual that ends it.
    max_iter : int
        Products at most.
    """

    products: Products
    shift: float
    tol: float
    max_iter: int

    def __call__(self, right: torch.Tensor, weight: torch.Tensor) -> Tensors:
        with self.products.lent() as products:

            def apply(x: torch.Tensor) -> torch.Tensor:
                product: torch.Tensor = weight * products(x)
                return product + self.shift * x if self.shift else product

            found, residual = conjugate_gradients(apply, right, self.tol, self.max_iter)
        return found, torch.tensor(residual, dtype=torch.float64)


@dataclass(frozen=True)
class Largest:
    """The largest eigenvalue of ``A^T A``.

    Parameters
    ----------
    products : Products
        ``A^T A``.
    tol : float
        Relative change that ends it.
    max_iter : int
        Products at most.
    """

    products: Products
    tol: float
    max_iter: int

    def __call__(self, start: torch.Tensor) -> Tensors:
        with self.products.lent() as products:
            found = largest_eigenvalue(products, start, self.tol, self.max_iter)
        return (torch.tensor(found, dtype=torch.float64),)


def is_small(engine: Engine, x: torch.Tensor) -> bool:
    """Whether an image is iterated on in one call."""
    return engine.accumulate is None and x.numel() * x.element_size() < SMALL_BYTES


def computed(
    engine: Engine, phase: str, function: Solution | Largest, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The values of one of these, computed by one worker."""
    count = 2 if isinstance(function, Solution) else 1
    call = Call(function, tuple(range(len(tensors))), tuple(range(count)), 0)
    found = Batch(engine, phase, (call,), count, "iteration").values(tensors)
    return [value for value in found if value is not None]
