"""Distributed fidelities are sums over the operators, and deepinv's algorithms take them."""

from __future__ import annotations

import pytest
import torch

from halotile import DistributedContext, distribute
from tests.graphs.distributing import NEAR, STACKS, difference, image

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


FIDELITIES = {
    "l2": lambda: optim.L2(sigma=0.5),
    "l1": lambda: optim.L1(),
    "poisson": lambda: optim.PoissonLikelihood(gain=0.5),
}


@pytest.mark.parametrize("name", FIDELITIES)
def test_a_fidelity_is_the_sum_over_the_operators(ctx: DistributedContext, name: str) -> None:
    parts = STACKS["circular blurs"]()
    x, truth = image(2, 1, 20, 24).abs(), image(2, 1, 20, 24).abs().flip(-1)
    y = [part.A(truth) for part in parts]
    stack, one = distribute(parts, ctx), FIDELITIES[name]()
    value = sum(one.fn(x, y_i, part) for part, y_i in zip(parts, y, strict=True))
    slope = sum(one.grad(x, y_i, part) for part, y_i in zip(parts, y, strict=True))
    for given in (one, [FIDELITIES[name]() for _ in parts], optim.StackedPhysicsDataFidelity([one] * 4)):
        fidelity = distribute(given, ctx)
        assert difference(fidelity.fn(x, y, stack), value) < NEAR
        assert difference(fidelity.grad(x, y, stack), slope) < 3e-5


def test_a_fidelity_has_a_prox(ctx: DistributedContext) -> None:
    plain = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    stack, y, z = distribute(plain, ctx), plain.A(image(1, 1, 20, 24)), image(1, 1, 20, 24).flip(-1)
    x = distribute(optim.L2(), ctx).prox(z, y, stack, gamma=0.7)
    assert difference(0.7 * plain.A_adjoint_A(x) + x, 0.7 * plain.A_adjoint(y) + z) < NEAR


@pytest.mark.parametrize("algorithm", ["PGD", "FISTA", "GD"])
def test_algorithms_of_deepinv_take_the_stack_as_it_is(ctx: DistributedContext, algorithm: str) -> None:
    plain = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    stack, y = distribute(plain, ctx), plain.A(image(1, 1, 20, 24))
    theirs = optim.StackedPhysicsDataFidelity([optim.L2() for _ in range(4)])
    found = []
    for fidelity, operators in ((theirs, plain), (theirs, stack), (distribute(optim.L2(), ctx), stack)):
        words = {"stepsize": 0.3, "lambda_reg": 0.1, "max_iter": 3, "early_stop": False}
        model = getattr(optim, algorithm)(data_fidelity=fidelity, prior=optim.Tikhonov(), **words)
        zero = torch.zeros(1, 1, 20, 24)
        found.append(model(y, operators, init=(zero, zero) if algorithm == "FISTA" else zero))
    assert max(difference(each, found[0]) for each in found) < NEAR
