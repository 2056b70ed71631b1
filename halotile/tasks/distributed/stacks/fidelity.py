"""How well an image explains the measurements of a distributed stack, and which way to change it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from deepinv.distributed.distribute import DistributedDataFidelity as Peer
from deepinv.optim.potential import Potential

from halotile.errors import ConfigError
from halotile.tasks.distributed.stacks.blockwise import is_large
from halotile.tasks.distributed.stacks.krylov import System, conjugate_gradients
from halotile.tasks.distributed.stacks.linear import MOST_PRODUCTS, TOLERANCE, DistributedStackedLinearPhysics
from halotile.tasks.distributed.stacks.operators import Operators, pack_note
from halotile.tasks.distributed.stacks.physics import (
    ADJOINT,
    FORWARD,
    DistributedStackedPhysics,
    check_reduction,
)
from halotile.tasks.distributed.transport.calls import Call, Misfit, SquareWeight, square_weight
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch, evaluate
from halotile.tasks.distributed.transport.typed import typed

NEARLY = 0.05
"""How far off the equation of a prox may be, for each unit of the step, without a warning."""
WILD = 10.0
"""How much farther off than where it began a descent may end, and be told, not refused."""


class _Descent(Potential):  # type: ignore[misc]
    """The prox of a function of which only the gradient is at hand."""

    def __init__(self, of: DistributedDataFidelity) -> None:
        super().__init__()
        self.of = (of,)

    def grad(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of the sum."""
        return self.of[0].grad(x, *args, **kwargs)


class DistributedDataFidelity(Peer):  # type: ignore[misc]
    """``f(x) = sum_i d_i(A_i x, y_i)``, each term in one call on a worker.

    It is one of deepinv's class for scripts that ask by ``isinstance``, and takes nothing from it.

    Parameters
    ----------
    ctx : Engine
        The context.
    fidelities : Operators
        One for each operator, or one for all.
    single : DataFidelity, optional
        The one for all, in this process.
    reduction : str
        ``sum`` or ``mean`` over the operators.
    """

    def __init__(
        self, ctx: Engine, fidelities: Operators, single: Any = None, *, reduction: str | None = "sum"
    ) -> None:
        super(Peer, self).__init__()
        check_reduction("reduction", reduction)
        self.ctx = ctx
        self.fidelities = fidelities
        self.single_fidelity = single
        self.reduction_mode = reduction

    @typed
    def forward(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, **kwargs: Any) -> Any:
        """``f(x)``."""
        return self.fn(x, y, physics, *args, **kwargs)

    @typed
    def fn(
        self, x: torch.Tensor, y: Any, physics: Any, gather: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        """``sum_i d_i(A_i x, y_i)``, for each image of a batch."""
        return self._summed(FORWARD, "fn", x, y, physics, args, kwargs)

    @typed
    def grad(
        self, x: torch.Tensor, y: Any, physics: Any, gather: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        """``sum_i A_i^T d_i'(A_i x, y_i)``: forward and adjoint of an operator in one task."""
        return self._summed(ADJOINT, "grad", x, y, physics, args, kwargs)

    @typed
    def prox(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, gamma: Any = 1.0, **kwargs: Any) -> Any:
        """``argmin_u gamma f(u) + |u - x|² / 2``.

        Squares of linear operators are solved by conjugate gradients, as ``physics.prox_l2``. For the others it is deepinv's
        descent along the gradient of the sum, with its keywords ``stepsize_inter``, ``max_iter_inter`` and ``tol_inter``; a
        warning tells where that has not come to an end.
        """
        from deepinv.optim.data_fidelity import L2

        self._check(physics)
        is_linear = isinstance(physics, DistributedStackedLinearPhysics)
        if is_linear and type(self.single_fidelity) is L2:
            return self.single_fidelity.prox(x, y, physics, gamma=gamma)
        if is_linear and self._weights(len(physics)) is not None:
            return self._prox_of_squares(x, y, physics, gamma)
        found = _Descent(self).prox(x, y, physics, *args, gamma=gamma, **kwargs)
        with torch.no_grad():
            self._check_prox(found, x, lambda u: gamma * self.grad(u, y, physics, *args))
        return found

    def _prox_of_squares(self, x: torch.Tensor, y: Any, physics: Any, gamma: Any) -> torch.Tensor:
        """``(I + gamma N) u = x + gamma b``, where the gradient at u is ``N u - b``."""
        weight = torch.as_tensor(gamma, dtype=x.real.dtype, device=x.device)
        weight = weight.reshape(weight.shape + (1,) * (x.dim() - 1)) if weight.dim() == 1 else weight
        offset = self.grad(torch.zeros_like(x), y, physics)

        def apply(u: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = u + weight * (self.grad(u, y, physics) - offset)
            return result

        def solver(right: torch.Tensor) -> tuple[torch.Tensor, float]:
            return conjugate_gradients(apply, right, TOLERANCE, MOST_PRODUCTS)

        def told(residual: float) -> None:
            warnings.warn(
                f"prox ended after {MOST_PRODUCTS} steps of conjugate gradients at a relative residual of {residual:.1e}. "
                "Write a smaller gamma.",
                stacklevel=2,
            )

        return System(apply, solver, TOLERANCE, told).solve(x - weight * offset)

    def _check_prox(
        self, found: torch.Tensor, x: torch.Tensor, slope: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Tell when ``u - x + gamma f'(u)`` is not 0: the descent has not come to an end. Refuse what is worse than ``x`` itself."""
        moved = float((found - x).norm())
        gap = float((found - x + slope(found)).norm())
        if math.isfinite(gap) and gap <= NEARLY * moved:
            return
        if not gap <= WILD * (began := float(slope(x).norm())):
            raise ConfigError(
                f"prox: the descent went away from its end: its equation is off by {gap:.3g}, and by {began:.3g} where it began. "
                "Write a smaller stepsize_inter."
            )
        warnings.warn(
            f"prox: the descent ended where its equation is off by {gap:.3g}, for a step of {moved:.3g}. "
            "Write a smaller stepsize_inter, or a larger max_iter_inter.",
            stacklevel=3,
        )

    def _summed(
        self, phase: str, wants: str, x: torch.Tensor, y: Any, physics: Any, rest: Any, words: Any
    ) -> Any:
        self._check(physics)
        parts = physics._parts(y)
        if not rest and not words and (found := self._by_blocks(wants, x, parts, physics)) is not None:
            return found
        packed = pack_note(self.ctx, (rest, words) if rest or words else None)
        calls = tuple(
            Call(
                Misfit(self._of(number), thing, wants, packed),
                (0, number + 1),
                (0 if self.reduction_mode else number,),
                number,
            )
            for number, thing in enumerate(physics.operators.things)
        )
        totals = 1 if self.reduction_mode else len(calls)
        found = evaluate(Batch(self.ctx, phase, calls, totals), [x, *parts])
        if self.reduction_mode is None:
            return found
        return found[0] / len(calls) if self.reduction_mode == "mean" else found[0]

    def _by_blocks(self, wants: str, x: Any, parts: list[torch.Tensor], physics: Any) -> torch.Tensor | None:
        """The same for squares of local operators on large images; None for others."""
        weights = self._weights(len(parts))
        if weights is None or self.reduction_mode != "sum" or not is_large(x):
            return None
        is_tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parts))
        local = physics._local(x) if isinstance(physics, DistributedStackedLinearPhysics) else None
        if local is None or (wants == "fn" and is_tracked):
            return None
        found: torch.Tensor = (local.misfit if wants == "fn" else local.gradient)(x, parts, weights)
        return found

    def _weights(self, count: int) -> tuple[float, ...] | None:
        """How much each square counts; None where there are other distances."""
        if self.single_fidelity is not None:
            weights = [square_weight(self.single_fidelity)] * count
        elif self.fidelities.here:
            weights = [square_weight(each) for each in self.fidelities.here]
        else:
            weights = self._made_weights
        known = tuple(weight for weight in weights if weight is not None)
        return known if len(known) == len(weights) else None

    @cached_property
    def _made_weights(self) -> list[float | None]:
        """Those of fidelities that a factory makes: workers tell."""
        things = self.fidelities.things
        calls = tuple(Call(SquareWeight(thing), (), (number,), number) for number, thing in enumerate(things))
        told = evaluate(Batch(self.ctx, FORWARD, calls, len(calls)), [])
        return [None if math.isnan(weight) else float(weight) for weight in told]

    def _of(self, number: int) -> Any:
        things = self.fidelities.things
        return things[0] if self.single_fidelity is not None else things[number]

    def _check(self, physics: Any) -> None:
        if not isinstance(physics, DistributedStackedPhysics):
            raise ConfigError(
                f"physics is a {type(physics).__name__}: a distributed fidelity needs a distributed physics. "
                "Write distribute(physics, ctx)."
            )
        if self.single_fidelity is None and len(self.fidelities) != len(physics):
            raise ConfigError(
                f"there are {len(self.fidelities)} fidelities for {len(physics)} operators. Write one for each."
            )
