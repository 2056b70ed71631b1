"""Subsets of distributed stacks: the numbers of plain ones, and stochastic solvers written as loops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute, ordered_subset
from halotile.errors import ConfigError
from tests.cases import thorough
from tests.graphs.distributing import OPERATIONS, STACKS, difference, image, kernel

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

PICKED = [5, 0, -3]


def blurs(dtype: torch.dtype = torch.float64) -> list[Any]:
    return [physics.Blur(filter=kernel(3 + n % 3 * 2).to(dtype), padding="circular") for n in range(7)]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("edge", [24, 800], ids=["whole", "by blocks"])
def test_a_subset_has_the_numbers_of_the_plain_stack_of_its_operators(
    ctx: DistributedContext, operation: str, edge: int
) -> None:
    parts = blurs(torch.float32)
    plain = physics.StackedLinearPhysics([parts[n] for n in PICKED])
    x = image(1, 1, edge, edge)
    y = plain.A(x)
    run = OPERATIONS[operation]
    assert difference(run(distribute(parts, ctx)[PICKED], x, y), run(plain, x, y)) < 1e-5


def test_a_subset_of_fidelities_goes_with_that_of_the_stack_and_nothing_is_sent_again(ctx: DistributedContext) -> None:
    parts, data = blurs(), [optim.L2(sigma=1 + n) for n in range(7)]
    stack, fidelity = distribute(parts, ctx), distribute(data, ctx)
    x = image(1, 1, 20, 24, dtype=torch.float64)
    y = [part.flip(-1) for part in stack.A(x)]
    sent = sorted(Path(ctx.folder).rglob("*.pkl"))
    picked = [y[n] for n in PICKED]
    found = fidelity[PICKED].grad(x, picked, stack[PICKED])
    assert sorted(Path(ctx.folder).rglob("*.pkl")) == sent
    expected = sum(data[n].grad(x, y[n], parts[n]) for n in PICKED)
    assert difference(found, expected) < 1e-10
    single = distribute(optim.L2(), ctx)
    assert single[PICKED] is single


SUBSETS, STEP = 3, 0.05


@dataclass
class Loop:
    """What the loops of a user have in common: the gradient of the subset of an iteration, which is uneven."""

    stack: Any
    fidelity: Any
    y: list[torch.Tensor]
    order: str

    def part(self, iteration: int) -> tuple[int, ...]:
        return ordered_subset(len(self.y), SUBSETS, iteration, order=self.order, seed=2)

    def slope(self, x: torch.Tensor, part: tuple[int, ...]) -> torch.Tensor:
        found: torch.Tensor = self.fidelity[part].grad(x, [self.y[n] for n in part], self.stack[part])
        return found


def run_sgd(loop: Loop, x: torch.Tensor) -> torch.Tensor:
    """Steps that become shorter from epoch to epoch."""
    for iteration in range(7):
        x = x - STEP / (1 + iteration // SUBSETS) * loop.slope(x, loop.part(iteration))
    return x


def run_saga(loop: Loop, x: torch.Tensor) -> torch.Tensor:
    """A memory of one gradient for each subset."""
    memory: dict[tuple[int, ...], torch.Tensor] = {}
    mean = torch.zeros_like(x)
    for iteration in range(7):
        part = loop.part(iteration)
        slope, before = loop.slope(x, part), memory.get(part, torch.zeros_like(x))
        x = x - STEP * (slope - before + mean / SUBSETS)
        memory[part], mean = slope, mean + slope - before
    return x


def run_svrg(loop: Loop, x: torch.Tensor) -> torch.Tensor:
    """Two gradients of a subset, and that of all operators at the image that an epoch began with."""
    for iteration in range(7):
        if iteration % SUBSETS == 0:
            anchor, full = x, loop.slope(x, tuple(range(len(loop.y))))
        part = loop.part(iteration)
        x = x - STEP * (loop.slope(x, part) - loop.slope(anchor, part) + full / SUBSETS)
    return x


def run_osem(loop: Loop, x: torch.Tensor) -> torch.Tensor:
    for iteration in range(7):
        chosen = loop.stack[part := loop.part(iteration)]
        ratios = [loop.y[n] / seen for n, seen in zip(part, chosen.A(x), strict=True)]
        x = x * chosen.A_adjoint(ratios) / chosen.A_adjoint([torch.ones_like(each) for each in ratios])
    return x


class Plain:
    """A stack, or its fidelity, in this process, with the same selections."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __getitem__(self, part: Any) -> Plain:
        return Plain([self.parts[n] for n in part])

    def A(self, x: torch.Tensor) -> list[torch.Tensor]:  # noqa: N802 - deepinv's name
        return [each.A(x) for each in self.parts]

    def A_adjoint(self, y: list[torch.Tensor]) -> Any:  # noqa: N802 - deepinv's name
        return sum(each.A_adjoint(part) for each, part in zip(self.parts, y, strict=True))

    def grad(self, x: torch.Tensor, y: list[torch.Tensor], stack: Plain) -> Any:
        return sum(optim.L2().grad(x, part, each) for each, part in zip(stack.parts, y, strict=True))


@pytest.mark.parametrize("run", [run_sgd, run_saga, run_svrg, run_osem])
@pytest.mark.parametrize("order", [thorough("cyclic"), "random"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), thorough(torch.float64, 1e-10)], ids=str)
def test_a_loop_over_subsets_gives_the_numbers_of_a_program_in_one_process(
    counts: list[DistributedContext], run: Any, order: str, dtype: torch.dtype, near: float
) -> None:
    parts = blurs(dtype)
    x = image(1, 1, 20, 24, dtype=dtype).abs() + 1
    y = Plain(parts).A(x.flip(-1))
    found = [run(Loop(distribute(parts, each), distribute(optim.L2(), each), y, order), x) for each in counts]
    expected = run(Loop(Plain(parts), Plain(parts), y, order), x)
    assert difference(found[0], expected) < near
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert difference(expected, x) > 0.01


def test_nothing_is_sent_again_for_subsets_of_large_images(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators for blocks are tried and sent once, not for each selection: masks are as large as images."""
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", 100)
    parts = STACKS["complementary masks"]()
    stack, fidelity = distribute(parts, ctx), distribute(optim.L2(), ctx)
    x = image(1, 1, 20, 24)
    y = stack.A(x.flip(-1))
    sent = sorted(Path(ctx.folder).rglob("*.npy")) + sorted(Path(ctx.folder).rglob("*.pkl"))
    for part in ([0, 1], [2, 0], [1]):
        found = fidelity.grad(x, [y[n] for n in part], stack[part])
        expected = sum(optim.L2().grad(x, y[n], parts[n]) for n in part)
        assert difference(found, expected) < 1e-5
        assert sorted(Path(ctx.folder).rglob("*.npy")) + sorted(Path(ctx.folder).rglob("*.pkl")) == sent


def test_a_subset_that_is_none_is_refused(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["seven"](), ctx)
    with pytest.raises(ConfigError, match=r"operators \[0, 7\] were asked for, and there are 7, from 0 to 6"):
        stack[[0, 7]]
    for mask in ([True, False], torch.ones(7) > 0, 1.5):
        with pytest.raises(ConfigError, match=r"were asked for.*Write a list of their numbers"):
            stack[mask]
    with pytest.raises(ConfigError, match=r"none of 7 operators is taken"):
        stack[[]]
    assert len(stack[torch.tensor([1, 2]).tolist()]) == 2
