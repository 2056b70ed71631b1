"""Stacks of local operators on large images run by blocks, exactly or fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.graphs.clusters.base import RunningCluster
from tests.cases import all_of
from tests.graphs.distributing import NEAR, OPERATIONS, difference, image, kernel

physics: Any = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def in_blocks(monkeypatch: pytest.MonkeyPatch, edge: int) -> None:
    """Cut small images too, into blocks of this length."""
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", 100)
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", edge)


@pytest.mark.parametrize("kind", ["circular", "reflect", "constant"])
def test_large_images_run_by_blocks(ctx: DistributedContext, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks(monkeypatch, 32)
    plain = physics.StackedLinearPhysics([physics.Blur(filter=kernel(n), padding=kind) for n in (3, 7)])
    stack = distribute(plain, ctx)
    x = image(1, 2, 70, 50).requires_grad_()
    y = plain.A(x.detach())
    for run in OPERATIONS.values():
        assert difference(run(stack, x.detach(), y), run(plain, x.detach(), y)) < NEAR
    assert stack._local_stack() is not None
    grads = [torch.autograd.grad(sum(part.square().sum() for part in s.A(x)), x)[0] for s in (stack, plain)]
    assert difference(*grads) < NEAR


def test_noise_is_the_same_for_large_and_small_images(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", 32)
    noise = physics.GaussianNoise(0.1)
    parts = [physics.Blur(filter=kernel(n), padding="circular", noise_model=noise) for n in (3, 7)]
    x = image(1, 1, 70, 50).requires_grad_()
    found = []
    for large in (100, 10**9):
        monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", large)
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=8) as opened:
            stack = distribute(parts, opened)
            y = stack(x)
            found.append([*y, *stack(x), *torch.autograd.grad(sum(part.square().sum() for part in y), x)])
            assert (stack._local_cache is None) == (large > 100)
    assert difference(*found) < NEAR
    clean = parts[0].A(x)
    assert float((found[0][0] - clean).std()) == pytest.approx(0.1, rel=0.1)


def test_squares_of_large_images_are_added_up_by_blocks(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", 32)
    parts = [physics.Blur(filter=kernel(n), padding="circular") for n in (3, 7)]
    stack, fidelity = distribute(parts, ctx), distribute(optim.L2(sigma=0.5), ctx)
    x = image(2, 1, 70, 50).requires_grad_()
    y = [part.A(x.detach().flip(-1)).requires_grad_() for part in parts]
    found = []
    for large in (100, 10**9):
        monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", large)
        slope = fidelity.grad(x, y, stack)
        found.append([slope.detach(), *torch.autograd.grad(slope.square().sum(), [x, *y])])
        found[-1].append(fidelity.fn(x.detach(), [part.detach() for part in y], stack))
    assert difference(*found) < NEAR


@pytest.mark.parametrize("padding", ["circular", "reflect", "valid"])
def test_super_resolution_of_large_images_of_odd_sizes_equals_deepinv(
    ctx: DistributedContext, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch, 32)
    kwargs = {"filter": "gaussian", "factor": 2, "padding": padding}
    plain = physics.StackedLinearPhysics([physics.Downsampling(img_size=(1, 69, 51), **kwargs)])
    x = image(1, 1, 69, 51)
    y = plain.A(x)
    undeclared = distribute([physics.Downsampling(**kwargs)], ctx)
    assert difference(undeclared.A(x), y) < NEAR
    for run in OPERATIONS.values():
        assert difference(run(distribute(plain, ctx), x, y), run(plain, x, y)) < NEAR


@pytest.mark.parametrize("kind", ["circular", "reflect"])
def test_the_normal_operator_equals_the_blurs_exact_or_not(
    ctx: DistributedContext, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch, 64)
    plain = physics.StackedLinearPhysics([physics.Blur(filter=kernel(n), padding=kind) for n in (3, 9)])
    x = image(1, 1, 120, 100)
    wanted = plain.A_adjoint(plain.A(x))
    exact, fast = distribute(plain, ctx, exact=True), distribute(plain, ctx)
    assert exact._local_stack()._folded is None
    assert fast._local_stack()._folded is not None
    for stack in (exact, fast):
        assert float((stack.A_adjoint_A(x) - wanted).norm() / wanted.norm()) < 1e-6


def blurs(padding: str) -> list[Any]:
    """A blur by direct sums, and one by Fourier transforms."""
    return [physics.Blur(filter=kernel(edge), padding=padding) for edge in (3, 13)]


def downsampling() -> list[Any]:
    kwargs = {"filter": "gaussian", "factor": 2, "padding": "circular"}
    return [physics.Downsampling(img_size=(1, 1100, 900), **kwargs)]


LOCAL: dict[str, Callable[[], list[Any]]] = {
    **{padding: partial(blurs, padding) for padding in ("circular", "reflect", "constant", "valid")},
    "downsampling": downsampling,
}


@pytest.mark.parametrize("kind", all_of(LOCAL, thorough=["reflect", "constant"]))
def test_large_dask_arrays_run_by_blocks(ctx: DistributedContext, kind: str) -> None:
    stack, x = distribute(LOCAL[kind](), ctx), image(1, 1, 1100, 900)
    lazy = da.from_array(x.numpy(), chunks=(1, 1, 400, 400))
    y = stack.A(lazy)
    assert y[0].numblocks[-2:] == (3, 2)
    assert difference([torch.from_numpy(part.compute()) for part in y], stack.A(x)) < NEAR
    for later in (stack.A_adjoint(y), stack.A_adjoint_A(lazy)):
        assert difference(torch.from_numpy(later.compute()), stack.A_adjoint_A(x)) < NEAR


def test_a_part_of_a_large_dask_array_reads_only_its_neighbourhood(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", 64)
    stack = distribute([physics.Blur(filter=kernel(3), padding="circular")], ctx)
    taken: list[Any] = []

    def note(block: Any, block_info: Any = None) -> Any:
        taken.append(block_info[0]["chunk-location"])
        return block

    zeros = da.zeros((1, 1, 1000, 1000), chunks=(1, 1, 100, 100), dtype="float32")
    noted = da.map_blocks(note, zeros, dtype="float32", meta=np.empty((0,) * 4, "float32"))
    stack.A(noted)[0][..., 500:510, 500:510].compute(scheduler="sync")
    assert 1 <= len(set(taken)) <= 16


class DeadColumn(physics.LinearPhysics):  # type: ignore[misc]
    """A camera with one dead column, which no trial on a small image detects."""

    COLUMN = 700

    def A(self, x: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        seen = x.clone()
        seen[..., self.COLUMN : self.COLUMN + 1] = 0
        return seen

    def A_adjoint(self, y: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        return self.A(y)


def test_a_position_dependent_operator_is_not_cut_into_blocks(ctx: DistributedContext) -> None:
    x = image(1, 1, 730, 740)
    found = distribute(physics.StackedLinearPhysics([DeadColumn()]), ctx).A_adjoint_A(x)
    assert torch.equal(found, DeadColumn().A(x))


def test_unknown_operators_with_a_declared_reach_run_by_blocks(ctx: DistributedContext) -> None:
    x = image(1, 1, 730, 740)
    stack = distribute(physics.StackedLinearPhysics([Differences()]), ctx, reach=1)
    assert stack._local_stack() is not None
    assert difference(stack.A_adjoint_A(x), Differences().A_adjoint(Differences().A(x))) < NEAR
    assert distribute(physics.StackedLinearPhysics([Differences()]), ctx)._local_stack() is None


class Differences(physics.LinearPhysics):  # type: ignore[misc]
    """``x[i] - x[i - 1]`` along x."""

    def A(self, x: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        return x - torch.nn.functional.pad(x, (1, 0))[..., :-1]

    def A_adjoint(self, y: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        return y - torch.nn.functional.pad(y, (0, 1))[..., 1:]
