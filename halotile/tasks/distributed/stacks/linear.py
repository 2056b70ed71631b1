"""Stacked linear operators on workers, with adjoints, pseudo-inverses and proximal operators; and data fidelities of stacks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import add
from typing import Any, Literal

import torch
from deepinv.distributed.distribute import DistributedDataFidelity as DeepinvFidelity
from deepinv.distributed.distribute import DistributedStackedLinearPhysics as DeepinvClass
from deepinv.optim.data_fidelity import L2
from deepinv.optim.potential import Potential
from deepinv.physics import LinearPhysics, StackedLinearPhysics

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.stacks.blockwise import LocalOperator, LocalStack, OutputName, is_large, local_operator
from halotile.tasks.distributed.stacks.physics import (
    ADJOINT,
    FORWARD,
    DistributedStackedPhysics,
    SentObjects,
    SingleLinearOperator,
    check_reduction,
    check_unchanged,
    chosen_numbers,
    evaluate_reduced,
    live_tensors,
)
from halotile.tasks.distributed.transport.calls import Call, Engine, ObjectCall, Tensors, compute
from halotile.tasks.distributed.transport.objects import pack_arguments
from halotile.tasks.distributed.transport.type_conversion import convert_types
from halotile.tasks.krylov import Apply, System, conjugate_gradients, largest_eigenvalue

# Results that blocks can compute, by the name of the method, and True for a sum or mean over the operators.
BLOCKS: dict[tuple[str, bool], OutputName] = {
    ("A", False): "forward",
    ("forward", False): "forward",
    ("A_adjoint", True): "adjoint",
    ("A_adjoint_A", True): "normal",
}
SMALL_BYTES = 2**16  # iterations on images smaller than this are single calls


def iterate(function: Callable[..., Tensors], tensors: Sequence[torch.Tensor], *operators: Any) -> Tensors:
    """Call an iteration with the product ``sum_i A_i^T A_i x``, added up in the order of the operators."""
    return function(lambda x: reduce(add, (o.A_adjoint_A(x) for o in operators)), *tensors)


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


MAX_PRODUCTS = 200  # default limit of conjugate gradient steps
TOLERANCE = 1e-6  # default relative residual of conjugate gradients


class DistributedStackedLinearPhysics(DistributedStackedPhysics, DeepinvClass, StackedLinearPhysics):  # type: ignore[misc]
    """``A = (A_1; ...; A_n)``, a ``deepinv.physics.StackedLinearPhysics``, which algorithms with ordered subsets ask for.

    ``A^T y = sum_i A_i^T y_i`` is added up by a tree of tasks in the order of the operators, so it has the
    same bits for any number of workers.

    ``ctx, common, numbers, dtype, gather_strategy``: as for :class:`~halotile.tasks.distributed.stacks.physics.DistributedStackedPhysics`.
    """

    single_operator = SingleLinearOperator
    _local_cache: tuple[SentObjects, LocalStack | None] | None = None

    def _compute_blocks(self, name: str, tensors: Sequence[Any], reduce_op: str | None) -> Any:
        """Compute large images of local operators by blocks; None for others."""
        output = BLOCKS.get((name, reduce_op is not None))
        if output is None or not all(is_large(self.ctx, tensor) for tensor in tensors):
            return None
        is_noisy = name == "forward"
        if is_noisy and self.ctx.is_lazy(tensors[0]):
            return None
        local = self._local_stack()
        image = local and local.image_shape(output, tensors)
        if not (local and image):
            return None
        results = local.apply(output, tensors, image)
        if reduce_op is None:
            return self._add_noise(results) if is_noisy else results
        return results[0] / self.num_operators if reduce_op == "mean" else results[0]

    def _local_stack(self) -> LocalStack | None:
        """Return the stack by blocks if its operators are local; determined once."""
        operators = self.operators
        check_unchanged(operators)
        if self._local_cache is None or self._local_cache[0] is not self._common.operators:
            # Blocks are computed without torch: operators that want gradients have a task each.
            are_there = operators[0].local is not None and not live_tensors(operators)
            parts = [self._local_operator(number) for number in self._numbers] if are_there else [None]
            found = [part for part in parts if part is not None]
            local = LocalStack(self.ctx, found, self.exact) if len(found) == len(parts) else None
            self._local_cache = self._common.operators, local
        return self._local_cache[1]

    def _local_operator(self, number: int) -> LocalOperator | None:
        """Return an operator for blocks, if it can be one; tried and sent once for a stack and its subsets."""
        tried: dict[int, LocalOperator | None] = self._common.tried
        if number not in tried:
            physics = self._common.operators[number].local
            tried[number] = local_operator(self.ctx, physics, self.exact, self.reach)
        return tried[number]

    @convert_types
    def A_adjoint(self, y: Any, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any) -> Any:
        """``sum_i A_i^T y_i``, their mean, or with ``reduce_op=None`` the list of its terms."""
        return self._remote_call("A_adjoint", (), self._measurements(y), reduce_op, kwargs)

    @convert_types
    def A_adjoint_A(self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any) -> Any:
        """``sum_i A_i^T A_i x``, forward and adjoint in one task for each operator."""
        return self._remote_call("A_adjoint_A", [x], (), reduce_op, kwargs)

    @convert_types
    def A_A_adjoint(self, y: Any, gather: bool = True, **kwargs: Any) -> Any:
        """``A (A^T y)``: every measurement depends on all of them."""
        return self.A(self.A_adjoint(y, **kwargs), gather=gather, **kwargs)

    @convert_types
    def A_dagger(
        self,
        y: Any,  # measurements
        solver: str = "CG",  # `CG`; another one of deepinv's runs as it does there
        max_iter: int | None = None,  # largest number of steps; 200 when left out
        # relative residual; 1e-6 when left out. There is a warning if it is not reached
        tol: float | None = None,
        verbose: bool = False,
        *,
        # return not the solution but the mean of the solutions for each single operator, deepinv's default
        local_only: bool = False,
        gather: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Solve ``A^T A x = A^T y`` by conjugate gradients from 0."""
        parts = self._measurements(y)
        self._check_values("A_dagger", *parts)
        if local_only:
            return self._remote_call("A_dagger", (), parts, "mean", kwargs)
        if solver != "CG":
            options = {"solver": solver, "max_iter": max_iter, "tol": tol, "verbose": verbose}
            return LinearPhysics.A_dagger(self, y, **options, **kwargs)
        right = self.A_adjoint(y, reduce_op="sum", **kwargs)
        system = self._system("A_dagger", 0.0, right.real.new_ones(()), tol, max_iter, kwargs)
        return system.solve(right)

    @convert_types
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
        self._check_values("prox_l2", z)
        weight = as_weight(gamma, z, z.dtype)
        system = self._system("prox_l2", 1.0, weight, tol, max_iter, kwargs)
        return system.solve(weight * self.A_adjoint(y, reduce_op="sum", **kwargs) + z)

    @convert_types
    def compute_sqnorm(
        self,
        x0: torch.Tensor,  # tensor of the shape of an image
        *,
        max_iter: int = 50,  # largest number of products with `A^T A`
        tol: float = 1e-3,  # relative change at which to stop
        verbose: bool = True,  # print the result
        local_only: bool = False,  # return not the norm but the upper bound `sum_i |A_i|²`, deepinv's default
        gather: bool = True,
        rng: torch.Generator | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute ``|A|²``, the largest eigenvalue of ``A^T A``, by the Lanczos method."""
        self._check_values("compute_sqnorm", x0)
        check_unchanged(self.operators)
        if local_only:
            options = {"max_iter": max_iter, "tol": tol, "verbose": False, **kwargs}
            return self._remote_call("compute_sqnorm", [x0], (), "sum", options).reshape(())
        if torch.is_grad_enabled() and live_tensors(self.operators) and "compute_sqnorm" not in self._common.warned:
            self._common.warned.add("compute_sqnorm")
            warnings.warn(
                "the norm of operators that want gradients is a constant: parameters get no gradient through it. This warning is "
                "given once.",
                stacklevel=2,
            )
        with torch.no_grad():
            function = partial(eigenvalue, tol=tol, max_iter=max_iter)
            norm = float(self._iterate(function, [x0.detach()], 1, kwargs)[0])
        if verbose:
            print(f"||A||² = {norm:.4g}")
        return torch.tensor(norm, dtype=x0.real.dtype, device=x0.device)

    def _iterate(
        self, function: Callable[..., Tensors], tensors: Sequence[torch.Tensor], count: int, kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Run an iteration with ``A^T A`` on one worker if its image is small, or here; return its ``count`` values."""
        size = tensors[0].numel() * tensors[0].element_size()
        if kwargs or self.ctx.accumulate is not None or size >= SMALL_BYTES:
            return list(function(partial(self.A_adjoint_A, reduce_op="sum", **kwargs), *tensors))
        inputs = [*tensors, *live_tensors(self.operators)]
        call = ObjectCall(partial(iterate, function), tuple(sent.remote for sent in self.operators))
        calls = [Call(call, tuple(range(len(inputs))), tuple(range(count)), 0)]
        return compute(self.ctx, ADJOINT, calls, inputs, count, "iteration")

    def _system(
        self,
        name: str,
        shift: float,
        weight: torch.Tensor,
        tol: float | None,
        max_iter: int | None,
        kwargs: Mapping[str, Any],
    ) -> System:
        """Return the system ``w A^T A + s`` of a method, which warns once about an unreached tolerance."""
        goal, steps = tol or TOLERANCE, max_iter or MAX_PRODUCTS
        apply = shifted(partial(self.A_adjoint_A, reduce_op="sum", **kwargs), weight, shift)

        def solver(right: torch.Tensor) -> tuple[torch.Tensor, float]:
            function = partial(solve, shift=shift, tol=goal, max_iter=steps)
            solution, residual = self._iterate(function, [right, weight], 2, kwargs)
            return solution, float(residual)

        def warn(residual: float) -> None:
            if name not in self._common.warned:
                self._common.warned.add(name)
                warnings.warn(
                    f"{name} ended after {steps} steps of conjugate gradients at a relative residual of {residual:.1e}, and "
                    f"tol is {goal:g}: the result is not the solution. Write {name}(..., max_iter={5 * steps}), or a larger "
                    "tol. This warning is given once.",
                    stacklevel=2,
                )

        return System(apply, solver, goal, warn)

    def _check_values(self, name: str, *values: Any) -> None:
        """Refuse values that an iteration cannot compute with."""
        for value in values:
            if self.ctx.is_lazy(value):
                raise ConfigError(
                    f"{name} was given an array that is not computed yet, and its iteration needs the values. compute() it first."
                )
            if not isinstance(value, torch.Tensor):
                raise WrongKind(
                    f"{name} was given an object of type {type(value).__name__} in the place of a tensor. Write the tensor."
                )
            if value.numel() == 0:
                raise ConfigError(
                    f"{name} was given an empty tensor of shape {tuple(value.shape)}: there is nothing to compute. Leave the "
                    "call out where a batch is empty."
                )


def as_weight(gamma: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a step size, or one for each image of a batch, as a tensor that multiplies ``x``."""
    weight = torch.as_tensor(gamma, dtype=dtype, device=x.device)
    return weight.reshape(weight.shape + (1,) * (x.dim() - 1)) if weight.dim() == 1 else weight


PROX_GAP = 0.05  # largest residual of the equation of a prox, relative to the length of the step, without a warning
DIVERGENCE = 10.0  # largest growth of that residual over a descent that is a warning and not an error


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


class DistributedDataFidelity(DeepinvFidelity):  # type: ignore[misc]
    """``f(x) = sum_i d_i(A_i x, y_i)``, each term in one call on a worker.

    It derives from deepinv's class for scripts that test by ``isinstance``, and uses none of its methods.

    ``ctx``: the context; ``fidelities``: one for each operator, or one for all; ``single``: the one for all, in this process; ``reduction``:
    ``sum`` or ``mean`` over the operators.
    """

    def __init__(
        self, ctx: Engine, fidelities: SentObjects, single: Any = None, *, reduction: str | None = "sum"
    ) -> None:
        super(DeepinvFidelity, self).__init__()
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
