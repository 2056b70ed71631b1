"""Iterations with ``A^T A`` as single calls: for small images a call costs far more than a product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from halotile.tasks.distributed.stacks.krylov import Apply, conjugate_gradients, largest_eigenvalue
from halotile.tasks.distributed.transport.calls import Call, RemoteObject, Tensors, check_kind
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch
from halotile.tasks.distributed.transport.loaded_objects import load_for_call

SMALL_BYTES = 2**16
"""Iterations on images smaller than this are single calls."""


@dataclass(frozen=True)
class NormalProducts:
    """Products with ``A^T A``, added up in the order of the operators.

    Parameters
    ----------
    operators : tuple of Packed or FactoryObject
        The operators.
    kind : str, optional
        Name of the class of ``deepinv.physics`` that they must be instances of.
    """

    operators: tuple[RemoteObject, ...]
    kind: str | None

    @contextmanager
    def load(self) -> Iterator[Apply]:
        """Yield the function ``x -> sum_i A_i^T A_i x``."""
        with load_for_call(None, *self.operators) as operators:
            for operator in operators:
                check_kind(operator, self.kind)
            yield lambda x: reduce(add, (operator.A_adjoint_A(x) for operator in operators))


@dataclass(frozen=True)
class SolverCall:
    """The solution of ``(w A^T A + s) x = b``, and its relative residual.

    Parameters
    ----------
    products : NormalProducts
        ``A^T A``.
    shift : float
        ``s``.
    tol : float
        Relative residual to reach.
    max_iter : int
        Largest number of products.
    """

    products: NormalProducts
    shift: float
    tol: float
    max_iter: int

    def __call__(self, right: torch.Tensor, weight: torch.Tensor) -> Tensors:
        with self.products.load() as product:
            apply = shifted(product, weight, self.shift)
            solution, residual = conjugate_gradients(apply, right, self.tol, self.max_iter)
        return solution, torch.tensor(residual, dtype=torch.float64)


def shifted(product: Apply, weight: torch.Tensor, shift: float) -> Apply:
    """Return the function ``x -> w M x + s x`` for a function ``M``."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = weight * product(x)
        return weighted + shift * x if shift else weighted

    return apply


@dataclass(frozen=True)
class EigenvalueCall:
    """The largest eigenvalue of ``A^T A``.

    Parameters
    ----------
    products : NormalProducts
        ``A^T A``.
    tol : float
        Relative change at which to stop.
    max_iter : int
        Largest number of products.
    """

    products: NormalProducts
    tol: float
    max_iter: int

    def __call__(self, start: torch.Tensor) -> Tensors:
        with self.products.load() as product:
            eigenvalue = largest_eigenvalue(product, start, self.tol, self.max_iter)
        return (torch.tensor(eigenvalue, dtype=torch.float64),)


def is_small(engine: Engine, x: torch.Tensor) -> bool:
    """Return True if an iteration on this image is a single call."""
    return engine.accumulate is None and x.numel() * x.element_size() < SMALL_BYTES


def run_iteration(
    engine: Engine, phase: str, function: SolverCall | EigenvalueCall, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run an iteration on one worker and return its values."""
    count = 2 if isinstance(function, SolverCall) else 1
    call = Call(function, tuple(range(len(tensors))), tuple(range(count)), 0)
    values = Batch(engine, phase, (call,), count, "iteration").values(tensors)
    return [value for value in values if value is not None]
