"""Distributed fidelities are sums over the operators, and deepinv's algorithms accept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError
from tests.cases import all_of, thorough
from tests.graphs.distributing import NEAR, STACKS, difference, image

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


FIDELITIES: dict[str, Callable[[], Any]] = {
    "l2": lambda: optim.L2(sigma=0.5),
    "l1": optim.L1,
    "poisson": lambda: optim.PoissonLikelihood(gain=0.5),
    "log-poisson": optim.LogPoissonLikelihood,
    "amplitude": optim.AmplitudeLoss,
    "zero": optim.ZeroFidelity,
}
COUNT = 3
"""Blurs in the stacks of these tests."""


def blurs() -> list[Any]:
    return STACKS["circular blurs"]()[:COUNT]


def problem() -> tuple[torch.Tensor, Any]:
    """A positive image, and measurements of another one."""
    x = image(2, 1, 20, 24).abs() + 0.1
    return x, physics.StackedLinearPhysics(blurs()).A(x.flip(-1))


def given(form: str, make: Callable[[], Any], ctx: DistributedContext) -> Any:
    """A distributed fidelity in one of the accepted forms."""
    if form == "factory":
        made: Any = make()

        def factory(index: int, device: Any, shared: Any) -> Any:
            return made

        return distribute(factory, ctx, num_operators=COUNT, type_object="data_fidelity")
    forms: dict[str, Callable[[], Any]] = {
        "single": make,
        "list": lambda: [make() for _ in range(COUNT)],
        "stacked": lambda: optim.StackedPhysicsDataFidelity([make() for _ in range(COUNT)]),
    }
    return distribute(forms[form](), ctx)


@pytest.mark.parametrize("form", ["single", thorough("list"), "stacked", thorough("factory")])
@pytest.mark.parametrize("name", FIDELITIES)
def test_value_and_gradient_equal_the_plain_stack(ctx: DistributedContext, name: str, form: str) -> None:
    plain = optim.StackedPhysicsDataFidelity([FIDELITIES[name]() for _ in range(COUNT)])
    operators, (x, y) = physics.StackedLinearPhysics(blurs()), problem()
    stack, fidelity = distribute(operators, ctx), given(form, FIDELITIES[name], ctx)
    assert near(fidelity.fn(x, y, stack), plain.fn(x, y, operators))
    assert near(fidelity.grad(x, y, stack), plain.grad(x, y, operators))


@pytest.mark.parametrize("form", ["single", "list"])
@pytest.mark.parametrize("name", [name for name in FIDELITIES if name != "l2"])
def test_a_prox_equals_the_plain_stack(ctx: DistributedContext, name: str, form: str) -> None:
    plain = optim.StackedPhysicsDataFidelity([FIDELITIES[name]() for _ in range(COUNT)])
    operators, (x, y) = physics.StackedLinearPhysics(blurs()), problem()
    stack, fidelity = distribute(operators, ctx), given(form, FIDELITIES[name], ctx)
    kwargs = {"gamma": 0.2, "stepsize_inter": 0.3, "max_iter_inter": 4}
    assert near(fidelity.prox(x, y, stack, **kwargs), plain.prox(x, y, operators, **kwargs))


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found, wanted) or difference(found, wanted) < NEAR


def test_the_prox_of_squares_solves_its_equation(ctx: DistributedContext) -> None:
    plain = physics.StackedLinearPhysics(blurs())
    stack, y, z = distribute(plain, ctx), plain.A(image(1, 1, 20, 24)), image(1, 1, 20, 24).flip(-1)
    x = distribute(optim.L2(), ctx).prox(z, y, stack, gamma=0.7)
    assert difference(0.7 * plain.A_adjoint_A(x) + x, 0.7 * plain.A_adjoint(y) + z) < NEAR


@pytest.mark.parametrize("form", ["list", "factory"])
def test_the_prox_of_squares_of_several_weights_solves_its_equation(ctx: DistributedContext, form: str) -> None:
    def made(index: int, device: Any, shared: Any) -> Any:
        return optim.L2(sigma=(0.1, 0.3)[index])

    plain = [physics.Denoising(), physics.Denoising()]
    stack, x = distribute(physics.StackedLinearPhysics(plain), ctx), image(1, 1, 20, 24)
    y = [x + 1, x - 2]
    several: Any = made if form == "factory" else [made(number, None, None) for number in range(2)]
    fidelity = distribute(several, ctx, num_operators=2, type_object="data_fidelity")
    found = fidelity.prox(x, y, stack, gamma=1.0)
    weights = [1 / 0.1**2, 1 / 0.3**2]
    wanted = (x + weights[0] * y[0] + weights[1] * y[1]) / (1 + sum(weights))
    assert difference(found, wanted) < NEAR


def test_a_prox_whose_descent_diverges_is_refused(ctx: DistributedContext) -> None:
    class Quartic(optim.Distance):  # type: ignore[misc, name-defined]
        def fn(self, x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return (x - y).pow(4).flatten(1).sum(1) / 4

        def grad(self, x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return (x - y).pow(3)

    stack, x = distribute(physics.StackedLinearPhysics([physics.Denoising()]), ctx), image(1, 1, 20, 24)
    fidelity = distribute(optim.DataFidelity(Quartic()), ctx)
    with pytest.raises(ConfigError, match=r"prox: the descent diverged.* Write a smaller stepsize_inter"):
        fidelity.prox(x, [x + 3], stack, gamma=1.0, max_iter_inter=5)


def test_a_prox_that_has_not_converged_is_reported(ctx: DistributedContext) -> None:
    stack, x = distribute(physics.StackedLinearPhysics([physics.Denoising()]), ctx), image(1, 1, 20, 24)
    fidelity = distribute(optim.data_fidelity.L1(), ctx)
    with pytest.warns(UserWarning, match="prox: the descent did not converge: the residual of its equation is"):
        fidelity.prox(x, [x + 0.01], stack, gamma=0.1, max_iter_inter=3)


class L2OfStacks(optim.L2):  # type: ignore[misc, name-defined]
    """deepinv's L2, whose value fails on a stack."""

    def fn(self, x: torch.Tensor, y: Any, physics: Any, *args: Any, **kwargs: Any) -> Any:
        return sum(super(L2OfStacks, self).fn(x, part, one) for part, one in zip(y, physics, strict=True))


ALGORITHMS: dict[str, dict[str, Any]] = {
    "GD": {},
    "PGD": {},
    "FISTA": {"a": 3},
    "HQS": {},
    "ADMM": {"beta": 1.0},
    "DRS": {"beta": 1.0},
}


@pytest.mark.parametrize("distributed", ["physics", thorough("physics and fidelity"), "all"])
@pytest.mark.parametrize("algorithm", all_of(ALGORITHMS, thorough=["GD", "DRS"]))
def test_algorithms_of_deepinv_accept_distributed_objects(
    ctx: DistributedContext, algorithm: str, distributed: str
) -> None:
    models = pytest.importorskip("deepinv.models")
    plain, (x, y) = physics.StackedLinearPhysics(blurs()), problem()
    plain.solver, plain.tol, plain.max_iter = "CG", 3e-7, 40  # its own prox ends at 1e-4
    stack = distribute(plain, ctx)
    fidelity = L2OfStacks() if distributed == "physics" else distribute(optim.L2(), ctx)
    prior = optim.PnP(models.MedianFilter(3)) if algorithm != "GD" else optim.Tikhonov()
    tiles = distribute(prior, ctx, patch_size=32) if distributed == "all" and algorithm != "GD" else prior
    kwargs = {"stepsize": 0.3, "lambda": 0.1, "g_param": 0.05, **ALGORITHMS[algorithm]}

    def run(data_fidelity: Any, used: Any, operators: Any) -> torch.Tensor:
        model = optim.optim_builder(
            algorithm, max_iter=3, data_fidelity=data_fidelity, prior=used, params_algo=dict(kwargs), early_stop=False
        )
        found: torch.Tensor = model(y, operators, init=(x, x))
        return found

    assert difference(run(fidelity, tiles, stack), run(L2OfStacks(), prior, plain)) < NEAR


@pytest.mark.parametrize("algorithm", ["OSEM", "BSREM"])
def test_algorithms_with_ordered_subsets_accept_distributed_stacks(ctx: DistributedContext, algorithm: str) -> None:
    plain, (_, y) = physics.StackedLinearPhysics(blurs()), problem()
    counts = [part.abs() for part in y]

    def run(operators: Any) -> torch.Tensor:
        model = getattr(optim, algorithm)(num_subsets=len(counts), max_iter=2)
        found: torch.Tensor = model(counts, operators)
        return found

    assert difference(run(distribute(plain, ctx)), run(plain)) < NEAR


@pytest.mark.parametrize("distributed", [False, True], ids=["deepinv's", "distributed"])
@pytest.mark.parametrize("name", ["l2", "l1", "poisson"])
def test_a_single_physics_works_with_deepinvs_fidelities_and_algorithms(
    ctx: DistributedContext, name: str, distributed: bool
) -> None:
    plain, x = blurs()[0], image(2, 1, 20, 24).abs() + 0.1
    one, y = distribute(plain, ctx), plain.A(x)
    assert difference(one.A(x), y) < NEAR
    fidelity = FIDELITIES[name]()
    used = distribute(fidelity, ctx) if distributed else fidelity
    z = x.flip(-1)
    assert near(used.fn(z, y, one), fidelity.fn(z, y, plain))
    assert near(used.grad(z, y, one), fidelity.grad(z, y, plain))

    def run(data_fidelity: Any, operator: Any) -> torch.Tensor:
        kwargs = {"prior": optim.Tikhonov(), "stepsize": 0.05, "lambda_reg": 0.1, "max_iter": 3}
        found: torch.Tensor = optim.PGD(data_fidelity=data_fidelity, **kwargs)(y, operator)
        return found

    assert difference(run(used, one), run(fidelity, plain)) < NEAR


def test_a_single_physics_keeps_its_interface(ctx: DistributedContext) -> None:
    x = image(1, 1, 20, 24)
    nonlinear = physics.Physics(A=torch.square)
    for plain in (blurs()[0], nonlinear):
        one = distribute(plain, ctx)
        for given in (x, x.numpy()):
            assert type(one(given)) is type(given)
        assert difference(one(x), plain(x)) < NEAR
    assert len(distribute([nonlinear], ctx)(x)) == 1
    one, y = distribute(blurs()[0], ctx), blurs()[0].A(x)
    assert difference(one.A_adjoint(y), blurs()[0].A_adjoint(y)) < NEAR
    assert torch.equal(one.A_adjoint([y]), one.A_adjoint(y))
    assert one.A_A_adjoint(y).shape == one.A_dagger(y).shape == y.shape


@pytest.mark.parametrize("form", ["single", "list"])
@pytest.mark.parametrize("name", ["l2", "l1"])
def test_fidelities_of_nonlinear_stacks_equal_the_plain_stack(ctx: DistributedContext, name: str, form: str) -> None:
    parts = [physics.Physics(A=torch.square), physics.Physics(A=torch.exp), physics.Denoising()]
    x, operators = image(2, 1, 20, 24), physics.StackedPhysics(parts)
    y, stack = operators.A(x.flip(-1)), distribute(operators, ctx)
    plain = optim.StackedPhysicsDataFidelity([FIDELITIES[name]() for _ in parts])
    kwargs = {"gamma": 0.01, "stepsize_inter": 0.1, "max_iter_inter": 3}
    fidelity = given(form, FIDELITIES[name], ctx)
    assert near(plain.grad(x, y, stack), plain.grad(x, y, operators))
    assert near(fidelity.fn(x, y, stack), plain.fn(x, y, operators))
    assert near(fidelity.grad(x, y, stack), plain.grad(x, y, operators))
    assert near(fidelity.prox(x, y, stack, **kwargs), plain.prox(x, y, operators, **kwargs))
