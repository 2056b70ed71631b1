"""Linear systems and norms by products with a symmetric operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError, InputError

INDEFINITE = 1e-3  # largest negative part of <x, M x>, relative to |x| |M x|, that counts as rounding
RESULT = "the result of the operators for a finite image"

Apply = Callable[[torch.Tensor], torch.Tensor]


def conjugate_gradients(apply: Apply, right: torch.Tensor, tol: float, max_iter: int) -> tuple[torch.Tensor, float]:
    """Solve ``M x = b`` for each image of a batch by itself, from 0, until ``|b - M x| <= tol |b|``.

    Returns ``x`` and the largest ``|b - M x| / |b|`` of an image: above ``tol`` if ``max_iter`` products were
    too few.

    ``apply``: `M`, symmetric and positive; ``right``: `b`; ``tol``: relative residual; ``max_iter``: largest number of products.

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
    start = square
    _check_finite(start, "the right-hand side: check the measurements")
    goal = tol**2 * start
    for _ in range(max_iter):
        if bool((square <= goal).all()):
            break
        product = apply(direction)
        along = _dots(direction, product)
        _check_finite(along, RESULT)
        if bool((along < -INDEFINITE * _lengths(direction) * _lengths(product)).any()):
            raise ConfigError(
                "<x, A^T A x> is negative for an image x: A_adjoint is not the adjoint of A. "
                "Correct it, or use deepinv.physics.adjoint_function."
            )
        step = _ratio(square, along)
        x = x + _scaled(step, direction)
        residual = residual - _scaled(step, product)
        before, square = square, _dots(residual, residual)
        direction = residual + _scaled(_ratio(square, before), direction)
    return x, float(_ratio(square, start).max().sqrt())


def largest_eigenvalue(apply: Apply, start: torch.Tensor, tol: float, max_iter: int) -> float:
    """Compute the largest eigenvalue of a symmetric positive operator by the Lanczos method.

    ``apply``: operator; ``start``: tensor of the shape, dtype and device of an image; ``tol``: stop when a step changes the estimate by less than a
    tenth of this, relative to it; ``max_iter``: largest number of products.

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
    off_diagonal: list[float] = []
    estimate = 0.0
    for _ in range(max_iter):
        product = apply(vector)
        alpha = float(_dot(vector, product))
        _check_finite(torch.tensor(alpha), RESULT)
        product = product - alpha * vector - beta * before
        diagonal.append(alpha)
        previous, estimate = estimate, _largest_ritz_value(diagonal, off_diagonal)
        beta = float(_dot(product, product)) ** 0.5
        if abs(estimate - previous) <= 0.1 * tol * abs(estimate) or beta <= 1e-12 * max(abs(estimate), 1e-300):
            break
        off_diagonal.append(beta)
        before, vector = vector, product / beta
    return estimate


def _largest_ritz_value(diagonal: list[float], off_diagonal: list[float]) -> float:
    matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    return float(np.linalg.eigvalsh(matrix)[-1])


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left.conj() * right
    return (product.real if product.is_complex() else product).sum(dtype=torch.float64)


def _dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Inner product of each image of a batch, in double precision."""
    product = (left.conj() * right).flatten(1)
    return (product.real if product.is_complex() else product).sum(1, dtype=torch.float64)


def _lengths(images: torch.Tensor) -> torch.Tensor:
    return _dots(images, images).sqrt()


def _check_finite(numbers: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(f"there are NaN or infinities in {what}.")


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    quotient = above / below.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(below > 0, quotient, torch.zeros_like(above))


def _scaled(factor: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return factor.reshape(-1, *(1,) * (images.dim() - 1)).to(images.dtype) * images


@dataclass(frozen=True)
class System:
    """A linear system ``M x = b`` with symmetric ``M``: its derivative takes one more solution."""

    apply: Apply  # `M`, differentiable with respect to everything it depends on
    # returns `x` for `b`, and the relative residual
    solver: Callable[[torch.Tensor], tuple[torch.Tensor, float]]
    tol: float  # relative residual to reach
    warn: Callable[[float], None]  # called with the residual if it is larger

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """Solve for ``x``, differentiable with respect to ``b`` and everything ``M`` depends on."""
        with torch.no_grad():
            solution, residual = self.solver(right)
            if residual > self.tol:
                self.warn(residual)
        if not torch.is_grad_enabled():
            return solution
        # 0 up to rounding; its derivatives are those of the equation.
        gap = right - self.apply(solution)
        result: torch.Tensor = _Implicit.apply(self, solution, gap) if gap.requires_grad else solution
        return result


class _Implicit(torch.autograd.Function):  # type: ignore[misc]
    """The solution ``x``, whose derivative with respect to ``b - M x`` is the inverse of ``M``."""

    @staticmethod
    def forward(ctx: Any, system: System, solution: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        ctx.system = system
        return solution.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, ctx.system.solve(cotangent)
