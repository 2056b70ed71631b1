"""The data fidelity of a distributed stack: its value, gradient and prox."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from deepinv.distributed.distribute import DistributedDataFidelity as DeepinvClass
from deepinv.optim.data_fidelity import L2
from deepinv.optim.potential import Potential

from halotile.errors import ConfigError
from halotile.tasks.distributed.stacks.blockwise import is_large
from halotile.tasks.distributed.stacks.linear import MAX_PRODUCTS, TOLERANCE, DistributedStackedLinearPhysics, as_weight
from halotile.tasks.distributed.stacks.operators import SentObjects, check_unchanged, chosen_numbers
from halotile.tasks.distributed.stacks.physics import (
    ADJOINT,
    FORWARD,
    DistributedStackedPhysics,
    check_reduction,
    evaluate_reduced,
)
from halotile.tasks.distributed.transport.calls import Engine, ObjectCall, Tensors
from halotile.tasks.distributed.transport.objects import pack_arguments
from halotile.tasks.distributed.transport.type_conversion import convert_types
from halotile.tasks.krylov import System, conjugate_gradients

PROX_GAP = 0.05
"""Largest residual of the equation of a prox, relative to the length of the step, without a warning."""
DIVERGENCE = 10.0
"""Largest growth of that residual over a descent that is a warning and not an error."""


def evaluate_term(
    output: Literal["fn", "grad"], tensors: Sequence[torch.Tensor], fidelity: Any, physics: Any, arguments: Any
) -> Tensors:
    """Return ``d(A x, y)``, or its gradient ``A^T d'(A x, y)``: forward and adjoint in one call.

    The arguments are those of the distance, and keywords of distance and operator.
    """
    (x, y), (args, kwargs) = tensors, arguments or ((), {})
    value = getattr(fidelity.d, output)(physics.A(x, **kwargs), y, *args, **kwargs)
    return (value if output == "fn" else physics.A_vjp(x, value, **kwargs),)


def square_weight(fidelity: Any) -> float | None:
    """Return the weight of ``|A x - y|²``, or None for another distance."""
    is_square = type(fidelity) is L2 and not isinstance(fidelity.norm, torch.Tensor)
    return float(fidelity.norm) if is_square else None


def weight_tensor(tensors: Sequence[torch.Tensor], fidelity: Any) -> Tensors:
    """Return the weight of ``|A x - y|²`` as a tensor; NaN for another distance."""
    weight = square_weight(fidelity)
    return (torch.full((1,), math.nan if weight is None else weight, dtype=torch.float64),)


class _Descent(Potential):  # type: ignore[misc]
    """The potential that deepinv's descent minimises: it has the gradient of the sum alone."""

    def __init__(self, fidelity: DistributedDataFidelity) -> None:
        super().__init__()
        self.fidelity = (fidelity,)  # in a tuple, so that it is not a submodule

    def grad(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Gradient of the sum."""
        return self.fidelity[0].grad(x, *args, **kwargs)


class DistributedDataFidelity(DeepinvClass):  # type: ignore[misc]
    """``f(x) = sum_i d_i(A_i x, y_i)``, each term in one call on a worker.

    It derives from deepinv's class for scripts that test by ``isinstance``, and uses none of its methods.

    ``ctx``: the context; ``fidelities``: one for each operator, or one for all; ``single``: the one for all, in this process; ``reduction``:
    ``sum`` or ``mean`` over the operators.
    """

    def __init__(
        self, ctx: Engine, fidelities: SentObjects, single: Any = None, *, reduction: str | None = "sum"
    ) -> None:
        super(DeepinvClass, self).__init__()
        check_reduction("reduction", reduction)
        self.ctx = ctx
        self.fidelities = fidelities
        self.single_fidelity = single
        self.reduction_mode = reduction

    def __getitem__(self, which: slice | Sequence[int]) -> DistributedDataFidelity:
        """Return the fidelity of some of the operators, for a stack that was selected in the same way."""
        if self.single_fidelity is not None:
            return self
        chosen = tuple(self.fidelities[number] for number in chosen_numbers(len(self.fidelities), which))
        return DistributedDataFidelity(self.ctx, chosen, reduction=self.reduction_mode)

    @convert_types
    def forward(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, **kwargs: Any) -> Any:
        """``f(x)``."""
        return self.fn(x, y, physics, *args, **kwargs)

    @convert_types
    def fn(self, x: torch.Tensor, y: Any, physics: Any, gather: bool = True, *args: Any, **kwargs: Any) -> Any:
        """``sum_i d_i(A_i x, y_i)``, for each image of a batch."""
        return self._sum(FORWARD, "fn", x, y, physics, args, kwargs)

    @convert_types
    def grad(self, x: torch.Tensor, y: Any, physics: Any, gather: bool = True, *args: Any, **kwargs: Any) -> Any:
        """``sum_i A_i^T d_i'(A_i x, y_i)``: forward and adjoint of an operator in one task."""
        return self._sum(ADJOINT, "grad", x, y, physics, args, kwargs)

    @convert_types
    def prox(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, gamma: Any = 1.0, **kwargs: Any) -> Any:
        """``argmin_u gamma f(u) + |u - x|² / 2``.

        Squares of linear operators are solved by conjugate gradients, like ``physics.prox_l2``. Others use
        deepinv's descent along the gradient of the sum, with its keywords ``stepsize_inter``,
        ``max_iter_inter`` and ``tol_inter``; there is a warning if it has not converged.
        """
        self._check(physics)
        is_linear = isinstance(physics, DistributedStackedLinearPhysics)
        if is_linear and type(self.single_fidelity) is L2:
            return self.single_fidelity.prox(x, y, physics, gamma=gamma)
        if is_linear and self._weights(len(physics)) is not None:
            return self._prox_of_squares(x, y, physics, gamma)
        result = _Descent(self).prox(x, y, physics, *args, gamma=gamma, **kwargs)
        with torch.no_grad():
            self._check_prox(result, x, lambda u: gamma * self.grad(u, y, physics, *args))
        return result

    def _prox_of_squares(self, x: torch.Tensor, y: Any, physics: Any, gamma: Any) -> torch.Tensor:
        """Solve ``(I + gamma N) u = x + gamma b``, where the gradient at u is ``N u - b``."""
        weight = as_weight(gamma, x, x.real.dtype)
        offset = self.grad(torch.zeros_like(x), y, physics)

        def apply(u: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = u + weight * (self.grad(u, y, physics) - offset)
            return result

        def warn(residual: float) -> None:
            warnings.warn(
                f"prox ended after {MAX_PRODUCTS} steps of conjugate gradients at a relative residual of {residual:.1e}. "
                "Write a smaller gamma.",
                stacklevel=2,
            )

        solver = partial(conjugate_gradients, apply, tol=TOLERANCE, max_iter=MAX_PRODUCTS)
        return System(apply, solver, TOLERANCE, warn).solve(x - weight * offset)

    def _check_prox(self, result: torch.Tensor, x: torch.Tensor, slope: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Warn if ``u - x + gamma f'(u)`` is not 0 after the descent; refuse a result worse than ``x``."""
        step = float((result - x).norm())
        gap = float((result - x + slope(result)).norm())
        if math.isfinite(gap) and gap <= PROX_GAP * step:
            return
        if not gap <= DIVERGENCE * (first_gap := float(slope(x).norm())):
            raise ConfigError(
                f"prox: the descent diverged: the residual of its equation is {gap:.3g}, and was {first_gap:.3g} at the start. "
                "Write a smaller stepsize_inter."
            )
        warnings.warn(
            f"prox: the descent did not converge: the residual of its equation is {gap:.3g}, for a step of {step:.3g}. "
            "Write a smaller stepsize_inter, or a larger max_iter_inter.",
            stacklevel=3,
        )

    def _sum(
        self, phase: str, output: Literal["fn", "grad"], x: Any, y: Any, physics: Any, args: Any, kwargs: Any
    ) -> Any:
        self._check(physics)
        parts = physics._measurements(y)
        if not args and not kwargs and (result := self._sum_blocks(output, x, parts, physics)) is not None:
            return result
        arguments = (args, kwargs) if args or kwargs else None
        packed, live = pack_arguments(arguments, self.ctx.folder, self.ctx.device)
        check_unchanged(physics.operators)
        # One fidelity for all operators, or one for each.
        pairs = list(zip(self.fidelities * (len(physics) // len(self.fidelities)), physics.operators, strict=True))
        function = partial(evaluate_term, output)
        calls = {n: ObjectCall(function, (f.remote, o.remote, packed)) for n, (f, o) in enumerate(pairs)}
        held = [(*fidelity.live, *operator.live, *live) for fidelity, operator in pairs]
        return evaluate_reduced(self.ctx, phase, calls, [x], parts, self.reduction_mode, held)

    def _sum_blocks(
        self, output: Literal["fn", "grad"], x: Any, parts: list[torch.Tensor], physics: Any
    ) -> torch.Tensor | None:
        """Compute squares of local operators on large images by blocks; None for others."""
        weights = self._weights(len(parts))
        if weights is None or self.reduction_mode != "sum" or self.ctx.is_lazy(x) or not is_large(self.ctx, x):
            return None
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parts))
        local = physics._local_stack() if isinstance(physics, DistributedStackedLinearPhysics) else None
        if local is None or local.image_shape("gradient", [x]) is None or (output == "fn" and needs_grad):
            return None
        result: torch.Tensor = (local.misfit if output == "fn" else local.gradient)(x, parts, weights)
        return result

    def _weights(self, count: int) -> tuple[float, ...] | None:
        """Return the weight of each square; None if there are other distances."""
        if self.single_fidelity is not None:
            weights = [square_weight(self.single_fidelity)] * count
        elif self.fidelities[0].local is not None:
            weights = [square_weight(fidelity.local) for fidelity in self.fidelities]
        else:
            weights = self._factory_weights
        known = tuple(weight for weight in weights if weight is not None)
        return known if len(known) == len(weights) else None

    @cached_property
    def _factory_weights(self) -> list[float | None]:
        """Weights of fidelities that a factory makes, which workers compute."""
        calls = {n: ObjectCall(weight_tensor, (each.remote,)) for n, each in enumerate(self.fidelities)}
        values = evaluate_reduced(self.ctx, FORWARD, calls, (), (), None, [f.live for f in self.fidelities])
        return [None if math.isnan(weight) else float(weight) for weight in values]

    def _check(self, physics: Any) -> None:
        if not isinstance(physics, DistributedStackedPhysics):
            raise ConfigError(
                f"physics is a {type(physics).__name__}: a distributed fidelity needs a distributed physics. "
                "Write distribute(physics, ctx)."
            )
        check_unchanged(self.fidelities, "fidelity")
        if self.single_fidelity is None and len(self.fidelities) != len(physics):
            raise ConfigError(
                f"there are {len(self.fidelities)} fidelities for {len(physics)} operators. Write one for each."
            )
