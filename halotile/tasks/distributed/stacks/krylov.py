"""Linear systems and norms from products with a symmetric operator alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError, InputError

INDEFINITE = 1e-3
"""By how much of its largest possible value <x, M x> may be negative, and be taken for rounding."""

Apply = Callable[[torch.Tensor], torch.Tensor]


def conjugate_gradients(
    apply: Apply, right: torch.Tensor, tol: float, max_iter: int
) -> tuple[torch.Tensor, float]:
    """``x`` with ``M x = b``, each image of a batch by itself; from 0, until ``|b - M x| <= tol |b|``.

    Returns it with the largest ``|b - M x| / |b|`` of an image: above ``tol`` where ``max_iter`` products did not do.

    Parameters
    ----------
    apply : callable
        ``M``, symmetric and positive.
    right : Tensor, shape (B, ...)
        ``b``.
    tol : float
        Relative residual.
    max_iter : int
        Products at most.

    Raises
    ------
    InputError
        When ``b``, or a product, is not finite.
    ConfigError
        When M is not positive, as no product of an operator with its adjoint is.

    References
    ----------
    Hestenes and Stiefel, Methods of conjugate gradients for solving linear systems, 1952.

    Examples
    --------
    >>> conjugate_gradients(lambda x: 4 * x, torch.ones(1, 3), 1e-6, 9)
    (tensor([[0.2500, 0.2500, 0.2500]]), 0.0)
    """
    x, residual = torch.zeros_like(right), right.clone()
    direction, square = residual.clone(), _dots(residual, residual)
    whole = square
    _check_finite(whole, "what is asked for: look at the measurements")
    goal = tol**2 * whole
    for _ in range(max_iter):
        if bool((square <= goal).all()):
            break
        product = apply(direction)
        along = _dots(direction, product)
        _check_finite(along, "what the operators make of a finite image")
        if bool((along < -INDEFINITE * _lengths(direction) * _lengths(product)).any()):
            raise ConfigError(
                "<x, A^T A x> is negative for an image x: A_adjoint is not the adjoint of A. "
                "Mend it, or take deepinv.physics.adjoint_function."
            )
        step = _ratio(square, along)
        x = x + _scaled(step, direction)
        residual = residual - _scaled(step, product)
        before, square = square, _dots(residual, residual)
        direction = residual + _scaled(_ratio(square, before), direction)
    return x, float(_ratio(square, whole).max().sqrt())


def largest_eigenvalue(apply: Apply, start: torch.Tensor, tol: float, max_iter: int) -> float:
    """The largest eigenvalue of a symmetric positive operator, by Lanczos' method.

    Parameters
    ----------
    apply : callable
        The operator.
    start : Tensor
        Of the shape that it takes; nothing else of it is used.
    tol : float
        Stop when a step changes the estimate by less than a tenth of this, relatively.
    max_iter : int
        Products at most.

    References
    ----------
    Lanczos, An iteration method for the solution of the eigenvalue problem, 1950.

    Examples
    --------
    >>> weights = torch.linspace(0, 2, 50)
    >>> round(largest_eigenvalue(lambda x: weights * x, torch.zeros(50), 1e-3, 30), 2)
    2.0
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(start.shape, generator=generator, dtype=torch.float64).to(start)
    vector = vector / vector.norm()
    before, beta = torch.zeros_like(vector), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    estimate = 0.0
    for _ in range(max_iter):
        product = apply(vector)
        alpha = float(_dot(vector, product))
        _check_finite(torch.tensor(alpha), "what the operators make of a finite image")
        product = product - alpha * vector - beta * before
        diagonal.append(alpha)
        known, estimate = estimate, _top(diagonal, beside)
        beta = float(_dot(product, product)) ** 0.5
        if abs(estimate - known) <= 0.1 * tol * abs(estimate) or beta <= 1e-12 * max(abs(estimate), 1e-300):
            break
        beside.append(beta)
        before, vector = vector, product / beta
    return estimate


def _top(diagonal: list[float], beside: list[float]) -> float:
    return float(np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))[-1])


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left.conj() * right
    return (product.real if product.is_complex() else product).sum(dtype=torch.float64)


def _dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The inner product of each image of a batch, in double precision."""
    product = (left.conj() * right).flatten(1)
    return (product.real if product.is_complex() else product).sum(1, dtype=torch.float64)


def _lengths(images: torch.Tensor) -> torch.Tensor:
    return _dots(images, images).sqrt()


def _check_finite(numbers: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(f"there are NaN or infinities in {what}.")


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.where(
        below > 0, above / below.clamp_min(torch.finfo(torch.float64).tiny), torch.zeros_like(above)
    )


def _scaled(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return factor.reshape(-1, *(1,) * (images.dim() - 1)).to(images.dtype) * images


@dataclass(frozen=True)
class System:
    """``M x = b`` with ``M`` symmetric: solved once, differentiated by solving once more.

    Parameters
    ----------
    apply : callable
        ``M``, differentiable by whatever it depends on.
    solver : callable
        Gives ``x`` for ``b``, and the relative residual.
    tol : float
        What that should be.
    told : callable
        Is given the residual where it is more.
    """

    apply: Apply
    solver: Callable[[torch.Tensor], tuple[torch.Tensor, float]]
    tol: float
    told: Callable[[float], None]

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """``x``, differentiable by ``b`` and by what ``M`` depends on."""
        with torch.no_grad():
            found = self._solved(right)
        if not torch.is_grad_enabled():
            return found
        # 0 up to rounding; its derivatives are those of the equation.
        gap = right - self.apply(found)
        result: torch.Tensor = _Implicit.apply(self, found, gap) if gap.requires_grad else found
        return result

    def _solved(self, right: torch.Tensor) -> torch.Tensor:
        found, residual = self.solver(right)
        if residual > self.tol:
            self.told(residual)
        return found


class _Implicit(torch.autograd.Function):  # type: ignore[misc]
    """``x``, whose derivative by ``b - M x`` is the inverse of ``M``."""

    @staticmethod
    def forward(ctx: Any, system: System, found: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        ctx.system = system
        return found.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, ctx.system.solve(cotangent)
