"""Operators whose parameters change between calls, by any of the ways there are: the numbers of the plain stack, or words."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError
from tests.graphs.distributing import difference, image, kernel, squares

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

SHAPE = (1, 1, 18, 20)
KINDS: dict[str, Callable[[], Any]] = {
    "blur": lambda: physics.Blur(filter=kernel(3), padding="circular"),
    "blur of a computed transfer function": lambda: physics.BlurFFT(img_size=SHAPE[1:], filter=kernel(3)),
}


@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_of_calls_that_changes_in_place_stays_as_it_is_then(
    ctx: DistributedContext, kind: str, is_parameter: bool
) -> None:
    """As in calibration by ``A(x, filter=k)``: calls that follow without it have the values of the last call with it."""
    x, found = image(*SHAPE), []
    for is_distributed in (True, False):
        blurs = [KINDS[kind]() for _ in range(2)]
        stack = distribute(blurs, ctx) if is_distributed else physics.StackedLinearPhysics(blurs)
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
def test_a_change_by_a_subset_is_one_of_the_stack_and_the_other_way_round(
    ctx: DistributedContext, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators are the same objects, as in plain lists of them."""
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", large)
    x, found = image(1, 1, 40, 30), []
    for is_distributed in (True, False):
        blurs = [physics.Blur(filter=kernel(3), padding="circular") for _ in range(4)]
        stack: Any = distribute(blurs, ctx) if is_distributed else physics.StackedLinearPhysics(blurs)
        ends: Any = stack[[0, 3]] if is_distributed else physics.StackedLinearPhysics([blurs[0], blurs[3]])
        last: Any = ends[[1]] if is_distributed else physics.StackedLinearPhysics([blurs[3]])
        for which in (stack, ends, last):
            which.A_adjoint_A(x)
        ends.A(x, filter=kernel(5))
        found.append([each.A_adjoint_A(x) for each in (stack, ends, last)])
        stack[0].A(x, filter=kernel(7))
        last.update_parameters(filter=kernel(9))
        found[-1] += [each.A_adjoint_A(x) for each in (stack, ends, last)]
        ends.A(x, filter=kernel(5))
        found[-1] += [each.A_adjoint_A(x) for each in (stack, ends, last)]
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


class Ramp(physics.LinearPhysics):  # type: ignore[misc, name-defined]
    """An operator that makes numbers of torch's default type."""

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: N802 - deepinv's name
        return x * torch.linspace(0.1, 1 / 3, x.shape[-1])

    A_adjoint = A


def test_workers_have_the_default_type_of_the_driver(ctx: DistributedContext) -> None:
    x = image(*SHAPE, dtype=torch.float64)
    stack = distribute([Ramp()], ctx)
    torch.set_default_dtype(torch.float64)
    try:
        assert difference(stack.A_adjoint_A(x), Ramp().A(Ramp().A(x))) < 1e-10
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference(stack.A_adjoint_A(x), Ramp().A(Ramp().A(x))) < 1e-10


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
            slopes = [torch.autograd.grad(loss, kernels) for loss in losses]
            assert difference(*slopes) < 1e-5
            with torch.no_grad():
                for each in kernels:
                    each *= 0.5
