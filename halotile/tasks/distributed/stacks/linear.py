"""A stack of linear operators: their adjoints run on workers, and are added up there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from deepinv.distributed.distribute import DistributedStackedLinearPhysics as Peer
from deepinv.physics import LinearPhysics

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.stacks.blockwise import LocalStack, is_large, is_large_later, local_stack
from halotile.tasks.distributed.stacks.krylov import System, conjugate_gradients, largest_eigenvalue
from halotile.tasks.distributed.stacks.one_call import Largest, Products, Solution, computed, is_small
from halotile.tasks.distributed.stacks.physics import ADJOINT, DistributedStackedPhysics, check_reduction
from halotile.tasks.distributed.stacks.single import OneOperator
from halotile.tasks.distributed.transport.typed import typed

MOST_PRODUCTS = 200
"""Steps of conjugate gradients, where it is not said how many."""
TOLERANCE = 1e-6
"""Relative residual of conjugate gradients, where it is not said."""


class DistributedStackedLinearPhysics(DistributedStackedPhysics, Peer):  # type: ignore[misc]
    """``A = (A_1; ...; A_n)``, a ``deepinv.physics.LinearPhysics``.

    ``A^T y = sum_i A_i^T y_i`` is added up by a tree of tasks in the order of the operators, so it has the same
    bits for any number of workers.

    Parameters
    ----------
    ctx, operators, dtype, gather_strategy
        As for :class:`~halotile.tasks.distributed.stacks.physics.DistributedStackedPhysics`.
    """

    kind = "LinearPhysics"
    one = OneOperator

    def _measured(
        self, name: str, x: torch.Tensor, gather: bool, reduce_op: str | None, words: Any, draws: bool = False
    ) -> Any:
        later = self.ctx.is_lazy(x)
        is_plain = reduce_op is None and not words and not (draws and later)
        if is_plain and self._is_cut(x) and (local := self._local(x)):
            seen = local.later("forward", [x], tuple(x.shape)) if later else local.forward(x)
            seen = self._noisy(seen) if draws else seen
            return self._listed(seen, gather)
        return super()._measured(name, x, gather, reduce_op, words, draws)

    def _is_cut(self, x: Any) -> bool:
        """Whether an image is large enough to be cut into blocks."""
        return is_large(x) or is_large_later(self.ctx, x)

    def _changed(self, method: str, words: Mapping[str, Any], numbers: Iterable[int] | None = None) -> None:
        super()._changed(method, words, numbers)
        self._found = None

    def _local(self, x: Any = None) -> LocalStack | None:
        """The stack by blocks, if its operators are local, found out once, and take the image ``x``."""
        if self._found is None:
            self._found = (local_stack(self.ctx, self.operators.here, self.exact, self.reach),)
        (local,) = self._found
        return local if x is None or (local and local.takes(tuple(x.shape))) else None

    _found: tuple[LocalStack | None] | None = None

    @cached_property
    def _told(self) -> set[str]:
        """Methods that have said that they did not reach their tolerance."""
        return set()

    def _mean(self, total: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return total / self.num_operators if reduce_op == "mean" else total

    @typed
    def A_adjoint(self, y: Any, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any) -> Any:
        """``sum_i A_i^T y_i``; their mean, or with ``reduce_op=None`` the list of them."""
        check_reduction("reduce_op", reduce_op)
        parts = self._parts(y)
        if reduce_op and not kwargs and all(map(self._is_cut, parts)) and (local := self._local()):
            image = local.image_of(parts)
            if image is not None and self.ctx.is_lazy(parts[0]):
                return self._mean(local.later("adjoint", parts, image)[0], reduce_op)
            if image is not None:
                return self._mean(local.adjoint(parts, image), reduce_op)
        uses = [(number,) for number in range(self.num_operators)]
        return self._applied(ADJOINT, "A_adjoint", parts, uses, reduce_op, kwargs)

    @typed
    def A_adjoint_A(
        self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any
    ) -> Any:
        """``sum_i A_i^T A_i x``, there and back in one task for each operator."""
        check_reduction("reduce_op", reduce_op)
        if reduce_op and not kwargs and self._is_cut(x) and (local := self._local(x)):
            if self.ctx.is_lazy(x):
                return self._mean(local.later("normal", [x], tuple(x.shape))[0], reduce_op)
            return self._mean(local.normal(x), reduce_op)
        return self._applied(ADJOINT, "A_adjoint_A", [x], [(0,)] * self.num_operators, reduce_op, kwargs)

    @typed
    def A_A_adjoint(self, y: Any, gather: bool = True, **kwargs: Any) -> Any:
        """``A (A^T y)``: every measurement depends on all of them."""
        return self.A(self.A_adjoint(y, **kwargs), gather=gather, **kwargs)

    @typed
    def A_dagger(
        self,
        y: Any,
        solver: str = "CG",
        max_iter: int | None = None,
        tol: float | None = None,
        verbose: bool = False,
        *,
        local_only: bool = False,
        gather: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The solution of ``A^T A x = A^T y``, by conjugate gradients from 0.

        Parameters
        ----------
        y : TensorList
            The measurements.
        solver : str
            ``CG``; another one of deepinv's is run as it is there.
        max_iter : int, optional
            Steps at most; 200 when left out.
        tol : float, optional
            Relative residual; 1e-6 when left out. A warning tells when it is not reached.
        local_only : bool
            Not the solution, but the mean of the solutions for each operator by itself, as deepinv gives unasked.
        """
        self._check_numbers("A_dagger", *self._parts(y))
        if local_only:
            uses = [(number,) for number in range(self.num_operators)]
            return self._applied(ADJOINT, "A_dagger", self._parts(y), uses, "mean", kwargs)
        if solver != "CG":
            words = {"solver": solver, "max_iter": max_iter, "tol": tol, "verbose": verbose}
            return LinearPhysics.A_dagger(self, y, **words, **kwargs)
        right = self.A_adjoint(y, reduce_op="sum", **kwargs)
        system = self._system("A_dagger", 0.0, right.real.new_ones(()), tol, max_iter, kwargs)
        return system.solve(right)

    @typed
    def prox_l2(
        self,
        z: torch.Tensor,
        y: Any,
        gamma: Any,
        solver: str = "CG",
        max_iter: int | None = None,
        tol: float | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``argmin_x gamma |A x - y|² / 2 + |x - z|² / 2``, by conjugate gradients."""
        self._check_numbers("prox_l2", z)
        weight = torch.as_tensor(gamma, dtype=z.dtype, device=z.device)
        weight = (
            weight.reshape(weight.shape + (1,) * (z.dim() - weight.dim())) if weight.dim() == 1 else weight
        )
        system = self._system("prox_l2", 1.0, weight, tol, max_iter, kwargs)
        return system.solve(weight * self.A_adjoint(y, reduce_op="sum", **kwargs) + z)

    @typed
    def compute_sqnorm(
        self,
        x0: torch.Tensor,
        *,
        max_iter: int = 50,
        tol: float = 1e-3,
        verbose: bool = True,
        local_only: bool = False,
        gather: bool = True,
        rng: torch.Generator | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``|A|²``, the largest eigenvalue of ``A^T A``, by Lanczos' method.

        Parameters
        ----------
        x0 : Tensor
            Of the shape of an image.
        max_iter : int
            Products with ``A^T A`` at most.
        tol : float
            Relative change that ends it.
        verbose : bool
            Whether it is printed.
        local_only : bool
            Not the norm, but the upper bound ``sum_i |A_i|²``, as deepinv gives unasked.
        """
        self._check_numbers("compute_sqnorm", x0)
        if local_only:
            words = {"max_iter": max_iter, "tol": tol, "verbose": False, **kwargs}
            bound = self._applied(ADJOINT, "compute_sqnorm", [x0], [(0,)] * self.num_operators, "sum", words)
            return bound.reshape(())
        with torch.no_grad():
            found = self._largest(x0.detach(), tol, max_iter, kwargs)
        if verbose:
            print(f"||A||² = {found:.4g}")
        return torch.tensor(found, dtype=x0.real.dtype, device=x0.device)

    def _largest(self, start: torch.Tensor, tol: float, max_iter: int, words: Mapping[str, Any]) -> float:
        """The largest eigenvalue of ``A^T A``."""
        if not words and is_small(self.ctx, start):
            return float(computed(self.ctx, ADJOINT, Largest(self._products, tol, max_iter), [start])[0])
        return largest_eigenvalue(
            lambda x: self.A_adjoint_A(x, reduce_op="sum", **words), start, tol, max_iter
        )

    def _system(
        self,
        name: str,
        shift: float,
        weight: torch.Tensor,
        tol: float | None,
        max_iter: int | None,
        words: Mapping[str, Any],
    ) -> System:
        """``w A^T A + s``, for a method, which says once where it does not reach its tolerance."""
        goal, steps = tol or TOLERANCE, max_iter or MOST_PRODUCTS

        def apply(x: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = weight * self.A_adjoint_A(x, reduce_op="sum", **words)
            return product + shift * x if shift else product

        def solver(right: torch.Tensor) -> tuple[torch.Tensor, float]:
            if words or not is_small(self.ctx, right):
                return conjugate_gradients(apply, right, goal, steps)
            function = Solution(self._products, shift, goal, steps)
            found, residual = computed(self.ctx, ADJOINT, function, [right, weight])
            return found, float(residual)

        def told(residual: float) -> None:
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"{name} ended after {steps} steps of conjugate gradients at a relative residual of {residual:.1e}, and "
                    f"tol is {goal:g}: the result is not the solution. Write {name}(..., max_iter={5 * steps}), or a tol that "
                    "is enough for you. This is said once.",
                    stacklevel=2,
                )

        return System(apply, solver, goal, told)

    @property
    def _products(self) -> Products:
        return Products(self.operators.things, self.kind)

    def _check_numbers(self, name: str, *values: Any) -> None:
        """Refuse what is no numbers, where each step depends on those of the one before."""
        for value in values:
            if self.ctx.is_lazy(value):
                raise ConfigError(
                    f"{name} was given an array that is not computed yet, and iterates on numbers. compute() it first."
                )
            if not isinstance(value, torch.Tensor):
                raise WrongKind(
                    f"{name} was given an object of type {type(value).__name__} in the place of a tensor. Write the tensor."
                )
            if value.numel() == 0:
                raise ConfigError(
                    f"{name} was given a tensor of shape {tuple(value.shape)}: there are no numbers to iterate on. Leave the "
                    "call out where a batch is empty."
                )
