"""Parameters of distributed operators get the gradients of the plain stack, and the same bits for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, TaskFailed
from tests.cases import all_of
from tests.graphs.distributing import difference, image, kernel, squares

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

from deepinv.utils.tensorlist import TensorList  # noqa: E402

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

NEAR = {torch.float32: 1e-5, torch.float64: 1e-10}
SHAPE = (1, 1, 18, 20)


class Projection(physics.LinearPhysics):  # type: ignore[misc, name-defined]
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
    at = torch.arange(-2, 3, dtype=sigma.dtype)
    line = torch.exp(-(at**2) / (2 * sigma**2))
    return torch.outer(line, line)[None, None] / line.sum() ** 2


def made_blur(index: int, device: torch.device, shared: Any) -> Any:
    """A factory: blurs whose widths follow from one shared parameter."""
    return physics.Blur(filter=gaussian(shared["p"][0] * (1 + index)), padding="circular")


def made_projection(index: int, device: torch.device, shared: Any) -> Any:
    """A factory: projections whose angles begin at one parameter, and are a second apart."""
    first, step, weight = shared["p"]
    return Projection(first + index * step, weight)


def made_coils(index: int, device: torch.device, shared: Any) -> Any:
    """A factory: the same coils, with every third line of the frequencies."""
    mask = (torch.arange(12) % 3 == index).double()[:, None].expand(12, 12)
    return physics.MultiCoilMRI(mask=mask, coil_maps=shared["p"][0], img_size=(2, 12, 12))


def coils(parameters: list[torch.Tensor]) -> list[Any]:
    return [physics.MultiCoilMRI(coil_maps=each, img_size=(2, 12, 12)) for each in (*parameters, parameters[0])]


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
        shared = {"p": parameters}
        return distribute(self.factory, ctx, num_operators=3, type_object="linear_physics", shared=shared)

    def plain(self, parameters: list[torch.Tensor]) -> Any:
        return physics.StackedLinearPhysics(self.stack(parameters))


def scalars(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def maps(*scales: int) -> list[torch.Tensor]:
    """Sensitivities of four coils."""
    real = image(1, 4, 12, 12, dtype=torch.float64)
    return [torch.complex(real, real.flip(-1)) * scale for scale in scales]


def typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


CASES: dict[str, Case] = {
    "kernels": Case(
        lambda: [kernel(3).double(), kernel(5).double(), kernel(3).double() + 0.1],
        lambda p: [physics.Blur(filter=k, padding=pad) for k, pad in zip(p, ("circular", "valid", "reflect"), strict=True)],
    ),
    "shared width": Case(
        lambda: scalars(0.8),
        lambda p: [physics.Blur(filter=gaussian(p[0] * n), padding="circular") for n in (1, 2, 3)],
    ),
    "one kernel for all": Case(
        lambda: [kernel(5).double()],
        lambda p: [physics.Blur(filter=p[0], padding=pad) for pad in ("circular", "replicate") * 3],
    ),
    "factory": Case(lambda: scalars(0.7), three_of(made_blur), made_blur),
    "angles and a shared weight": Case(
        lambda: scalars(0.1, -0.3, 0.7, 1.2), lambda p: [Projection(angle, p[0]) for angle in p[1:]]
    ),
    "angles of a factory": Case(lambda: scalars(0.2, 0.5, 0.3), three_of(made_projection), made_projection),
    "coil maps": Case(lambda: maps(1, 2), coils, shape=(1, 2, 12, 12)),
    "coil maps of a factory": Case(lambda: maps(1), three_of(made_coils), made_coils, shape=(1, 2, 12, 12)),
}  # fmt: skip


def fidelity_of(stack: Any, ctx: DistributedContext | None) -> Any:
    return distribute(optim.L2(), ctx) if ctx else optim.StackedPhysicsDataFidelity([optim.L2()] * len(stack))


LOSSES: dict[str, Callable[[Any, torch.Tensor, Any, Any], torch.Tensor]] = {
    "A": lambda stack, x, y, f: squares(stack.A(x)),
    "A of one": lambda stack, x, y, f: squares(stack[1].A(x)),
    "A_adjoint": lambda stack, x, y, f: squares(stack.A_adjoint(y)),
    "A_adjoint_A": lambda stack, x, y, f: squares(stack.A_adjoint_A(x)),
    "fn": lambda stack, x, y, f: f.fn(x, y, stack).sum(),
    "grad": lambda stack, x, y, f: squares(f.grad(x, y, stack)),
}


def gradients(case: Case, loss: str, dtype: torch.dtype, ctx: DistributedContext | None) -> tuple[torch.Tensor, ...]:
    """The gradients of a loss with respect to all parameters and the image."""
    parameters = [typed(p, dtype).requires_grad_() for p in case.parameters()]
    stack = case.plain(parameters) if ctx is None else case.distributed(ctx, parameters)
    x = image(*case.shape, dtype=dtype).requires_grad_()
    with torch.no_grad():
        y = [0.7 * part.flip(-1) for part in case.plain(parameters).A(x)]
        y = y if ctx else TensorList(y)
    value = LOSSES[loss](stack, x, y, fidelity_of(stack if ctx else stack.physics_list, ctx))
    found = torch.autograd.grad(value, [*parameters, x], allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for t, g in zip([*parameters, x], found, strict=True))


def distances(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("dtype", all_of(NEAR, thorough=[torch.float64]), ids=str)
@pytest.mark.parametrize("loss", all_of(LOSSES, thorough=["A of one", "grad"]))
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_plain_stack(ctx: DistributedContext, name: str, loss: str, dtype: torch.dtype) -> None:
    found, plain = (gradients(CASES[name], loss, dtype, each) for each in (ctx, None))
    assert any(bool(g.any()) for g in plain[:-1])
    assert max(distances(found, plain)) < NEAR[dtype]


@pytest.mark.parametrize("name", ["one kernel for all", "factory", "coil maps of a factory"])
def test_gradients_have_the_same_bits_for_any_number_of_workers(
    counts: list[DistributedContext], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.graphs.tree_sum.SMALL_BYTES", 0)  # a task for each operator
    first, *others = (gradients(CASES[name], "fn", torch.float32, each) for each in counts)
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
            stack = case.distributed(context, parameters)
            solution = stack.prox_l2(z, y, 0.7, tol=1e-13, max_iter=500)
        else:
            plain = case.plain(parameters)
            columns = [plain.A_adjoint_A(unit.reshape(case.shape)).reshape(-1) for unit in units]
            matrix = units + 0.7 * torch.stack(columns, 1)
            solution = torch.linalg.solve(matrix, (0.7 * plain.A_adjoint(y) + z).reshape(-1))
        found.append(torch.autograd.grad(squares(solution), parameter))
    assert max(distances(*found)) < 1e-10


def test_a_parameter_in_a_call_gets_its_gradient_and_stays(ctx: DistributedContext) -> None:
    blurs = [physics.Blur(filter=kernel(3), padding="circular") for _ in range(2)]
    x, found = image(*SHAPE), []
    for stack in (distribute(blurs, ctx), physics.StackedLinearPhysics(blurs)):
        for factor in (1.0, 2.0):
            given = (factor * kernel(5)).requires_grad_()
            squares(stack.A(x, filter=given)).backward()
            squares(stack.A_adjoint_A(x)).backward()
            assert given.grad is not None
            found.append(given.grad)
    assert max(distances(found[:2], found[2:])) < 1e-5


@pytest.mark.parametrize("blind", [False, True], ids=["image known", "blind"])
def test_training_a_kernel_follows_the_plain_program(ctx: DistributedContext, blind: bool) -> None:
    """The optimiser changes the kernels between calls: workers see the new ones."""
    truth = physics.StackedLinearPhysics([physics.Blur(filter=kernel(5) * n, padding="circular") for n in (1, 2)])
    x, ends = image(*SHAPE), []
    y = truth.A(x)
    for is_distributed in (True, False):
        kernels = [torch.nn.Parameter(torch.full((1, 1, 5, 5), 0.04)) for _ in range(2)]
        blurs = [physics.Blur(filter=k, padding="circular") for k in kernels]
        estimate = torch.nn.Parameter(0.9 * x) if blind else x
        stack = distribute(blurs, ctx) if is_distributed else physics.StackedLinearPhysics(blurs)
        steps = torch.optim.Adam([*kernels, *([estimate] if blind else [])], lr=1e-2)
        for _ in range(5):
            steps.zero_grad()
            sum((a - b).square().sum() for a, b in zip(stack.A(estimate), y, strict=True)).backward()
            steps.step()
        ends.append([k.detach() for k in kernels])
    assert max(distances(*ends)) < 1e-5


@pytest.mark.thorough
def test_large_images_and_dask_arrays_take_live_kernels(ctx: DistributedContext) -> None:
    x, found = image(1, 1, 800, 700), []
    blurs = [physics.Blur(filter=torch.nn.Parameter(kernel(n)), padding="circular") for n in (3, 5)]
    for stack in (distribute(blurs, ctx), physics.StackedLinearPhysics(blurs)):
        found.append(torch.autograd.grad(squares(stack.A_adjoint_A(x)), [blur.filter for blur in blurs]))
    assert max(distances(*found)) < 1e-5
    lazy = distribute(blurs, ctx).A_adjoint_A(da.from_array(x.numpy())).compute()
    with torch.no_grad():
        assert difference(torch.from_numpy(lazy), stack.A_adjoint_A(x)) < 1e-5


def own_weight(index: int, device: torch.device, shared: Any) -> Any:
    return physics.Blur(filter=torch.nn.Parameter(kernel(3)), padding="circular")


def test_gradients_that_would_be_lost_are_refused(ctx: DistributedContext) -> None:
    x = image(*SHAPE).requires_grad_()
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
    x, found = image(1, 1, 8, 8, dtype=torch.float64), []
    for is_distributed in (True, False):
        sigma = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        stack: Any = physics.StackedLinearPhysics(blurs)
        y = [part.flip(-1) for part in stack.A(x)]
        if is_distributed:
            stack = distribute(stack, ctx)
            fidelity = distribute(optim.L2(sigma=sigma), ctx)
            value = getattr(fidelity, loss)(x, y, stack) if loss != "prox" else fidelity.prox(x, y, stack, gamma=0.3)
        elif loss == "fn":
            value = sum((a - b).square().sum() for a, b in zip(stack.A(x), y, strict=True)) / (2 * sigma**2)
        elif loss == "grad":
            value = stack.A_adjoint(TensorList([a - b for a, b in zip(stack.A(x), y, strict=True)])) / sigma**2
        else:
            columns = [stack.A_adjoint_A(unit.reshape(1, 1, 8, 8)).reshape(-1) for unit in torch.eye(64).double()]
            weight = 0.3 / sigma**2
            matrix = torch.eye(64).double() + weight * torch.stack(columns, 1)
            value = torch.linalg.solve(matrix, (x + weight * stack.A_adjoint(TensorList(y))).reshape(-1))
        found.append(torch.autograd.grad(squares(value), sigma))
    assert max(distances(*found)) < (1e-4 if loss == "prox" else 1e-10)
