"""Parameters of distributed operators: the gradients of the plain stack, the same bits for any number of workers, and changes between calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, TaskFailed
from tests.cases import all_of
from tests.graphs.distributing import Patch, difference, image, in_blocks, kernel, optim, physics, squares

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

TensorList: Any = pytest.importorskip("deepinv.utils.tensorlist").TensorList
NEAR = {torch.float32: 1e-5, torch.float64: 1e-10}
SHAPE = (1, 1, 18, 20)


class Projection(physics.LinearPhysics):  # type: ignore[misc]
    """The image turned by an angle and added up along its columns, weighted by a parameter that others share."""

    def __init__(self, angle: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.held = {"angle": [angle]}  # no parameter of a module: any place will do
        self.weight = weight

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: N802 - deepinv's name
        (angle,) = self.held["angle"]
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        turn = torch.stack([torch.stack([cos, -sin, zero]), torch.stack([sin, cos, zero])])
        grid = torch.nn.functional.affine_grid(turn[None], list(x.shape), align_corners=False)
        return self.weight * torch.nn.functional.grid_sample(x, grid, align_corners=False).sum(-2)

    def A_adjoint(self, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: N802 - deepinv's name
        with torch.enable_grad():
            x = y.new_zeros(SHAPE, requires_grad=True)
            (back,) = torch.autograd.grad(self.A(x), x, y, create_graph=True)
        return back


def gaussian(sigma: torch.Tensor) -> torch.Tensor:
    line = torch.exp(-(torch.arange(-2, 3, dtype=sigma.dtype) ** 2) / (2 * sigma**2))
    return torch.outer(line, line)[None, None] / line.sum() ** 2


def made_projection(index: int, device: torch.device, shared: Any) -> Any:
    """A factory: projections whose angles begin at one parameter, and are a second apart."""
    first, step, weight = shared["p"]
    return Projection(first + index * step, weight)


def made_coils(index: int, device: torch.device, shared: Any) -> Any:
    """A factory: the same coils, with every third line of the frequencies."""
    mask = (torch.arange(12) % 3 == index).double()[:, None].expand(12, 12)
    return physics.MultiCoilMRI(mask=mask, coil_maps=shared["p"][0], img_size=(2, 12, 12))


def three_of(factory: Callable[..., Any]) -> Callable[[list[torch.Tensor]], list[Any]]:
    return lambda parameters: [factory(n, torch.device("cpu"), {"p": parameters}) for n in range(3)]


@dataclass(frozen=True)
class Case:
    """A stack that follows from parameters: a list of operators, or three of a factory that shares the parameters."""

    parameters: Callable[[], list[torch.Tensor]]
    stack: Callable[[list[torch.Tensor]], list[Any]]
    factory: Callable[..., Any] | None = None
    shape: tuple[int, ...] = SHAPE

    def distributed(self, ctx: DistributedContext, parameters: list[torch.Tensor]) -> Any:
        if self.factory is None:
            return distribute(self.stack(parameters), ctx)
        return distribute(self.factory, ctx, num_operators=3, type_object="linear_physics", shared={"p": parameters})

    def plain(self, parameters: list[torch.Tensor]) -> Any:
        return physics.StackedLinearPhysics(self.stack(parameters))


def scalars(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def coil_maps() -> list[torch.Tensor]:
    """Sensitivities of two coils."""
    real = image(1, 2, 12, 12, dtype=torch.float64)
    return [torch.complex(real, real.flip(-1))]


CASES: dict[str, Case] = {
    "kernels": Case(
        lambda: [kernel(3).double(), kernel(5).double(), kernel(3).double() + 0.1],
        lambda p: [physics.Blur(filter=k, padding=pad) for k, pad in zip(p, ("circular", "valid", "reflect"), strict=True)],
    ),
    "shared width": Case(
        lambda: scalars(0.8),
        lambda p: [physics.Blur(filter=gaussian(p[0] * n), padding="circular") for n in (1, 2, 3)],
    ),
    "angles and a shared weight": Case(
        lambda: scalars(0.1, -0.3, 0.7, 1.2), lambda p: [Projection(angle, p[0]) for angle in p[1:]]
    ),
    "angles of a factory": Case(lambda: scalars(0.2, 0.5, 0.3), three_of(made_projection), made_projection),
    "coil maps of a factory": Case(coil_maps, three_of(made_coils), made_coils, shape=(1, 2, 12, 12)),
}  # fmt: skip


LOSSES: dict[str, Callable[[Any, torch.Tensor, Any, Any], torch.Tensor]] = {
    "A": lambda stack, x, y, f: squares(stack.A(x)),
    "A of one": lambda stack, x, y, f: squares(stack[1].A(x)),
    "A_adjoint": lambda stack, x, y, f: squares(stack.A_adjoint(y)),
    "A_adjoint_A": lambda stack, x, y, f: squares(stack.A_adjoint_A(x)),
    "fn": lambda stack, x, y, f: f.fn(x, y, stack).sum(),
    "grad": lambda stack, x, y, f: squares(f.grad(x, y, stack)),
}


def gradients(case: Case, dtype: torch.dtype, ctx: DistributedContext | None, *losses: str) -> list[torch.Tensor]:
    """The gradients of losses with respect to all parameters and the image."""
    kinds = [dtype.to_complex() if p.is_complex() else dtype for p in case.parameters()]
    parameters = [p.to(kind).requires_grad_() for p, kind in zip(case.parameters(), kinds, strict=True)]
    stack = case.plain(parameters) if ctx is None else case.distributed(ctx, parameters)
    x = image(*case.shape, dtype=dtype).requires_grad_()
    with torch.no_grad():
        y = [0.7 * part.flip(-1) for part in case.plain(parameters).A(x)]
        y = y if ctx else TensorList(y)
    fidelity, found = distribute(optim.L2(), ctx) if ctx else optim.StackedPhysicsDataFidelity([optim.L2()] * 3), []
    for loss in losses:
        value, inputs = LOSSES[loss](stack, x, y, fidelity), [*parameters, x]
        slopes = torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True)
        found += [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, slopes, strict=True)]
        if case is CASES["kernels"]:  # an optimiser changes them between calls: workers see the new ones
            with torch.no_grad():
                for parameter in parameters:
                    parameter *= 1.5
    return found


def distances(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("dtype", all_of(NEAR, thorough=[torch.float64]), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_plain_stack(ctx: DistributedContext, name: str, dtype: torch.dtype) -> None:
    found, plain = (gradients(CASES[name], dtype, each, *LOSSES) for each in (ctx, None))
    assert all(bool(g.any()) for g in plain[: len(CASES[name].parameters())])
    assert max(distances(found, plain)) < NEAR[dtype]


@pytest.mark.parametrize("name", ["shared width", "coil maps of a factory"])
def test_any_workers_give_the_same_gradients(counts: list[DistributedContext], name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("halotile.graphs.tree_sum.SMALL_BYTES", 0)  # a task for each operator
    first, *others = (gradients(CASES[name], torch.float32, each, "fn") for each in counts)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["shared width", "coil maps of a factory"])
def test_a_solution_has_the_gradient_of_its_equation(ctx: DistributedContext, name: str) -> None:
    """``prox_l2`` by conjugate gradients, against a dense system."""
    case, found = CASES[name], []
    z = image(*case.shape, dtype=torch.float64)
    units = torch.eye(z.numel()).double()
    y = case.plain(case.parameters()).A(z.flip(-1))
    for context in (ctx, None):
        (parameter,) = parameters = [p.requires_grad_() for p in case.parameters()]
        if context is not None:
            solution = case.distributed(context, parameters).prox_l2(z, y, 0.7, tol=1e-13, max_iter=500)
        else:
            plain = case.plain(parameters)
            columns = [plain.A_adjoint_A(unit.reshape(case.shape)).reshape(-1) for unit in units]
            matrix = units + 0.7 * torch.stack(columns, 1)
            solution = torch.linalg.solve(matrix, (0.7 * plain.A_adjoint(y) + z).reshape(-1))
        found.append(torch.autograd.grad(squares(solution), parameter))
    assert max(distances(*found)) < 1e-10


def test_gradients_that_would_be_lost_are_refused(ctx: DistributedContext) -> None:
    x = image(*SHAPE).requires_grad_()
    own_weight = lambda *_: physics.Blur(filter=torch.nn.Parameter(kernel(3)), padding="circular")  # noqa: E731
    hidden = distribute(own_weight, ctx, num_operators=2, type_object="linear_physics")
    with torch.no_grad():
        hidden.A(x)
    with pytest.raises(TaskFailed, match=r"operator 0 .*exists on the worker alone.*shared="):
        squares(hidden.A(x)).backward()
    given = kernel(3)
    late = distribute([physics.Blur(filter=given, padding="circular")], ctx)
    given.requires_grad_()
    for call in (late.A, late[0].A, late.A_adjoint_A):
        with pytest.raises(ConfigError, match=r"operator 0 wants a gradient since.*distribute\(\.\.\.\) afterwards"):
            call(x)
    norm = distribute([physics.Blur(filter=given, padding="circular")], ctx).compute_sqnorm
    with pytest.warns(UserWarning, match=r"norm of operators that want gradients is a constant"):
        norm(image(*SHAPE), verbose=False)


@pytest.mark.parametrize("loss", ["fn", "grad", "prox"])
def test_the_noise_level_of_a_fidelity_gets_its_gradient(ctx: DistributedContext, loss: str) -> None:
    blurs = [physics.Blur(filter=kernel(n).double(), padding="circular") for n in (3, 5)]
    plain, x, found = physics.StackedLinearPhysics(blurs), image(1, 1, 8, 8, dtype=torch.float64), []
    y = TensorList([part.flip(-1) for part in plain.A(x)])
    columns = [plain.A_adjoint_A(unit.reshape(1, 1, 8, 8)).reshape(-1) for unit in torch.eye(64).double()]
    for is_distributed in (True, False):
        sigma = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        if is_distributed:
            call = getattr(distribute(optim.L2(sigma=sigma), ctx), loss)
            value = call(x, list(y), distribute(plain, ctx), **({"gamma": 0.3} if loss == "prox" else {}))
        elif loss == "prox":
            weight = 0.3 / sigma**2
            matrix = torch.eye(64).double() + weight * torch.stack(columns, 1)
            value = torch.linalg.solve(matrix, (x + weight * plain.A_adjoint(y)).reshape(-1))
        else:
            gaps = TensorList([a - b for a, b in zip(plain.A(x), y, strict=True)])
            value = squares(gaps) / (2 * sigma**2) if loss == "fn" else plain.A_adjoint(gaps) / sigma**2
        found.append(torch.autograd.grad(squares(value), sigma))
    assert max(distances(*found)) < (1e-4 if loss == "prox" else 1e-10)


# --- changes between calls ------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "blur": lambda: physics.Blur(filter=kernel(3), padding="circular"),
    "blur of a computed transfer function": lambda: physics.BlurFFT(img_size=SHAPE[1:], filter=kernel(3)),
}


@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_changed_in_place_stays_the_same(ctx: DistributedContext, kind: str, is_parameter: bool) -> None:
    """As in calibration by ``A(x, filter=k)``: calls that follow without it have the values of the last call with it."""
    x, found = image(*SHAPE), []
    for make in (lambda blurs: distribute(blurs, ctx), physics.StackedLinearPhysics):
        stack = make([KINDS[kind]() for _ in range(2)])
        given = torch.nn.Parameter(kernel(5)) if is_parameter else kernel(5).requires_grad_()
        for _ in range(3):
            back = stack.A_adjoint(stack.A(x, filter=given))
            (slope,) = torch.autograd.grad(squares(back), given)
            found += [back.detach(), slope]
            with torch.no_grad():
                given -= 1e-3 * slope / slope.norm()
    assert difference(found[:6], found[6:]) < 1e-5
    assert difference(found[0], found[4]) > 1e-3


@pytest.mark.parametrize("large", [100, 10**9], ids=["by blocks", "whole"])
def test_changes_by_a_subset_and_by_its_stack_are_one(ctx: DistributedContext, large: int, monkeypatch: Patch) -> None:
    """The operators are the same objects, as in plain lists of them; each call keeps to its own parameters for its gradient."""
    in_blocks(monkeypatch, 32, large)
    x, found = image(1, 1, 40, 30).requires_grad_(), []
    for is_distributed in (True, False):
        blurs = [physics.Blur(filter=kernel(3), padding="circular") for _ in range(4)]
        stack: Any = distribute(blurs, ctx) if is_distributed else physics.StackedLinearPhysics(blurs)
        ends: Any = stack[[0, 3]] if is_distributed else physics.StackedLinearPhysics([blurs[0], blurs[3]])
        last: Any = ends[[1]] if is_distributed else physics.StackedLinearPhysics([blurs[3]])
        alone: Any = physics.Blur(filter=kernel(3), padding="circular")
        alone = distribute(alone, ctx) if is_distributed else alone
        changes: list[Callable[..., Any]] = [
            lambda *_: None,
            lambda stack, ends, last, alone: squares(ends.A(x, filter=kernel(5))),
            lambda stack, ends, last, alone: squares(stack[0].A(x, filter=kernel(7))),
            lambda stack, ends, last, alone: last.update_parameters(filter=kernel(9)),
            lambda stack, ends, last, alone: squares(ends.A_adjoint(ends.A(x), filter=kernel(5))),
            lambda stack, ends, last, alone: stack.update(filter=kernel(3)),
            lambda *held: squares(held[3].A(x, filter=kernel(5))) + squares(held[3].A(x, filter=kernel(7))),
        ]
        told = []
        for change in changes:
            value = change(stack, ends, last, alone)
            told += [] if value is None else [value.detach(), *torch.autograd.grad(value, x)]
            told += [each.A_adjoint_A(x).detach() for each in (stack, ends, last, alone)]
        found.append(told)
    assert difference(*found) < 1e-5


def test_a_tensor_that_changed_in_place_is_refused(ctx: DistributedContext) -> None:
    """It would be that of before on the workers: only those that want gradients are sent with each call."""
    x, held, data = image(*SHAPE), kernel(3), optim.L2(sigma=torch.tensor(0.5))
    blurs = [physics.Blur(filter=kernel(3), padding="circular"), physics.Blur(filter=held, padding="circular")]
    stack, fidelity = distribute(blurs, ctx), distribute(data, ctx)
    y = stack.A(x)
    data.norm.mul_(2)
    for call in (fidelity.grad, fidelity.prox):
        with pytest.raises(ConfigError, match=r"of fidelity 0 was changed in place.*distribute\(\.\.\.\) afterwards"):
            call(x, y, stack)
    with torch.no_grad():
        held.mul_(2)
        for call in (stack.A, stack[1].A, stack[[1]].A_adjoint_A, stack.compute_sqnorm):
            with pytest.raises(ConfigError, match=r"shape \(1, 1, 3, 3\) of operator . was changed in place"):
                call(x)
        assert stack[[0]].A(x)[0].shape == x.shape
    stack.update_parameters(filter=held)
    assert difference(stack.A(x)[1], blurs[1].A(x)) < 1e-5


def test_parts_of_one_parameter_and_what_follows_from_it(ctx: DistributedContext) -> None:
    """Slices and results of computations are inputs as well; gradients of gradients; operators without any of it."""
    found = []
    for is_distributed in (True, False):
        x = image(*SHAPE).requires_grad_()
        bank = torch.nn.Parameter(torch.cat([kernel(3), kernel(3) + 0.1]))
        filters = [bank[:1], torch.softmax(bank[1:].flatten(1), 1).reshape(1, 1, 3, 3), kernel(5)]
        blurs = [physics.Blur(filter=each, padding="circular") for each in filters]
        stack = distribute(blurs, ctx) if is_distributed else physics.StackedLinearPhysics(blurs)
        slopes = torch.autograd.grad(squares(stack.A_adjoint_A(x)), [bank, x], create_graph=True)
        product = sum(((slope**3).sum() for slope in slopes), torch.zeros(()))
        first = torch.autograd.grad(product, [bank, x], retain_graph=True)
        again = torch.autograd.grad(product, [bank, x])
        assert all(map(torch.equal, first, again))
        found.append([*(each.detach() for each in slopes), *again])
        if is_distributed:
            assert not stack[[2]].A(x.detach())[0].requires_grad
    assert difference(*found) < 1e-5


class Ramp(physics.LinearPhysics):  # type: ignore[misc]
    """An operator that makes numbers of torch's default type."""

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: N802 - deepinv's name
        return x * torch.linspace(0.1, 1 / 3, x.shape[-1])

    A_adjoint = A


def test_workers_have_the_default_type_of_the_driver(ctx: DistributedContext) -> None:
    x, stack = image(*SHAPE, dtype=torch.float64), distribute([Ramp()], ctx)
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert difference(stack.A_adjoint_A(x), Ramp().A(Ramp().A(x))) < 1e-10
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.thorough
def test_workers_that_were_killed_change_no_gradient() -> None:
    """Before a backward pass, and before the step that follows: no values are kept on the workers."""
    with DistributedContext(workers=2, device_mode="cpu", memory_per_worker="3GiB") as ctx:
        x, kernels = image(*SHAPE), [torch.nn.Parameter(kernel(n)) for n in (3, 5)]
        blurs = [physics.Blur(filter=each, padding="circular") for each in kernels]
        stack, plain = distribute(blurs, ctx), physics.StackedLinearPhysics(blurs)
        for step in range(2):
            losses = [squares(each.A_adjoint_A(x)) for each in (stack, plain)]
            for pid in ctx.client.run(os.getpid).values() if step == 0 else ():
                os.kill(pid, signal.SIGKILL)
            assert difference(*[torch.autograd.grad(loss, kernels) for loss in losses]) < 1e-5
            with torch.no_grad():
                for each in kernels:
                    each *= 0.5
