"""Iterations with ``A^T A`` as single calls: for small images a call costs far more than a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from halotile.tasks.distributed.engine import Engine
from halotile.tasks.distributed.stacks.krylov import Apply, conjugate_gradients, largest_eigenvalue
from halotile.tasks.distributed.transport.calls import Call, RemoteObject, Tensors, check_kind
from halotile.tasks.distributed.transport.evaluate import Batch
from halotile.tasks.distributed.transport.loaded_objects import load_for_call

SMALL_BYTES = 2**16
"""Iterations on images smaller than this are single calls."""


@dataclass(frozen=True)
class IterationCall:
    """An iteration with products ``sum_i A_i^T A_i x``, added up in the order of the operators.

    Parameters
    ----------
    iterate : callable
        Returns values, from the product as a function of ``x`` and the input tensors.
    operators : tuple of Packed or FactoryObject
        The operators.
    kind : str, optional
        Name of the class of ``deepinv.physics`` that they must be instances of.
    """

    iterate: Callable[..., Tensors]
    operators: tuple[RemoteObject, ...]
    kind: str | None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(None, tensors, *self.operators) as (own, *operators):
            for operator in operators:
                check_kind(operator, self.kind)
            return self.iterate(lambda x: reduce(add, (o.A_adjoint_A(x) for o in operators)), *own)

    def run(
        self,
        engine: Engine,
        phase: str,
        tensors: Sequence[torch.Tensor],
        live: Sequence[torch.Tensor],
        count: int,
    ) -> list[torch.Tensor]:
        """Run the iteration on one worker, and return its ``count`` values."""
        inputs = [*tensors, *live]
        call = Call(self, tuple(range(len(inputs))), tuple(range(count)), 0)
        values = Batch(engine, phase, (call,), count, "iteration").values(inputs)
        return [value for value in values if value is not None]


def shifted(product: Apply, weight: torch.Tensor, shift: float) -> Apply:
    """Return the function ``x -> w M x + s x`` for a function ``M``."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = weight * product(x)
        return weighted + shift * x if shift else weighted

    return apply


def solve(
    product: Apply, right: torch.Tensor, weight: torch.Tensor, *, shift: float, tol: float, max_iter: int
) -> Tensors:
    """Solve ``(w M + s) x = b`` by conjugate gradients, and return ``x`` with its relative residual."""
    solution, residual = conjugate_gradients(shifted(product, weight, shift), right, tol, max_iter)
    return solution, torch.tensor(residual, dtype=torch.float64)


def eigenvalue(product: Apply, start: torch.Tensor, *, tol: float, max_iter: int) -> Tensors:
    """Compute the largest eigenvalue by the Lanczos method."""
    return (torch.tensor(largest_eigenvalue(product, start, tol, max_iter), dtype=torch.float64),)


def is_small(engine: Engine, x: torch.Tensor) -> bool:
    """Return True if an iteration on this image is a single call."""
    return engine.accumulate is None and x.numel() * x.element_size() < SMALL_BYTES
