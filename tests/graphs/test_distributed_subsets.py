"""Subsets of distributed stacks: the numbers of plain ones, and stochastic solvers written as loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute, ordered_subset
from halotile.errors import ConfigError
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


def test_a_subset_of_fidelities_goes_with_that_of_the_stack_and_nothing_is_sent_again(
    ctx: DistributedContext,
) -> None:
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


def run_saga(stack: Any, fidelity: Any, y: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """SAGA with a memory of one gradient for each of three subsets."""
    count, subsets, step = len(y), 3, 0.05
    memory: dict[tuple[int, ...], torch.Tensor] = {}
    mean = torch.zeros_like(x)
    for iteration in range(9):
        part = ordered_subset(count, subsets, iteration, order="random", seed=2)
        slope = fidelity[part].grad(x, [y[n] for n in part], stack[part])
        before = memory.get(part, torch.zeros_like(x))
        x = x - step * (slope - before + mean / subsets)
        memory[part], mean = slope, mean + slope - before
    return x


def run_osem(stack: Any, fidelity: Any, y: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for iteration in range(6):
        chosen = stack[part := ordered_subset(len(y), 2, iteration)]
        ratios = [y[n] / seen for n, seen in zip(part, chosen.A(x), strict=True)]
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


@pytest.mark.parametrize("run", [run_saga, run_osem])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_a_loop_over_subsets_gives_the_numbers_of_a_program_in_one_process(
    ctx: DistributedContext, run: Any, dtype: torch.dtype, near: float
) -> None:
    parts = blurs(dtype)
    x = image(1, 1, 20, 24, dtype=dtype).abs() + 1
    y = Plain(parts).A(x.flip(-1))
    found = run(distribute(parts, ctx), distribute(optim.L2(), ctx), y, x)
    expected = run(Plain(parts), Plain(parts), y, x)
    assert difference(found, expected) < near
    assert difference(expected, x) > 0.01


def test_a_subset_that_is_none_is_refused(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["seven"](), ctx)
    with pytest.raises(ConfigError, match=r"operators \[0, 7\] were asked for, and there are 7, from 0 to 6"):
        stack[[0, 7]]
    with pytest.raises(ConfigError, match=r"none of 7 operators is taken"):
        stack[[]]
    assert len(stack[torch.tensor([1, 2]).tolist()]) == 2
