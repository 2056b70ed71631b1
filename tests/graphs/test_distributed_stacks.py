"""Distributed stacks: the numbers of plain ones for every operation, whole, by blocks and in part; and solutions of their equations."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, InputError, TaskFailed, WrongKind
from halotile.graphs.clusters.base import RunningCluster
from tests.graphs.distributing import NEAR, STACKS, Patch, difference, image, in_blocks, kernel, optim, physics, squares

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def blurs(padding: str = "circular", edges: tuple[int, ...] = (3, 5, 7, 9), **kwargs: Any) -> list[Any]:
    return [physics.Blur(filter=kernel(n), padding=padding, **kwargs) for n in edges]


def downsampling(padding: str, rows: int = 69, columns: int = 51) -> list[Any]:
    size = {} if rows == 0 else {"img_size": (1, rows, columns)}
    return [physics.Downsampling(filter="gaussian", factor=2, padding=padding, **size)]


def masked_and_downsampled() -> list[Any]:
    mask = physics.Inpainting(img_size=(1, 65, 47), mask=(image(1, 65, 47) > 0).float())
    return [mask, *downsampling("reflect", 65, 47)]


OPERATIONS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "A": lambda p, x, y: p.A(x),
    "A_adjoint": lambda p, x, y: p.A_adjoint(y),
    "A_vjp": lambda p, x, y: p.A_vjp(x, y),
    "A_adjoint_A": lambda p, x, y: p.A_adjoint_A(x),
    "A_A_adjoint": lambda p, x, y: p.A_A_adjoint(y),
}
PICKED = [5, 0, -3]
Row = tuple[Callable[[], list[Any]], tuple[int, int]]
WHOLE: dict[str, Row] = {
    **{name: (make, (20, 24)) for name, make in STACKS.items()},
    "odd sizes": (masked_and_downsampled, (65, 47)),
    "odd sizes, circular": (partial(downsampling, "circular"), (69, 51)),
}
CUT: dict[str, Row] = {
    **{rim: (partial(blurs, rim, (3, 13)), (70, 50)) for rim in ("circular", "reflect", "constant", "valid")},
    "half, circular": (partial(downsampling, "circular", 70, 50), (70, 50)),
    **{f"half, {rim}": (partial(downsampling, rim), (69, 51)) for rim in ("reflect", "valid")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "picked"), [*((name, None) for name in (*WHOLE, *CUT)), ("seven", PICKED), ("circular", [1])]
)
def test_operations_and_gradients_equal_the_plain_stack(ctx: Any, name: str, picked: Any, monkeypatch: Patch) -> None:
    if name in CUT:
        in_blocks(monkeypatch, 40)
    make, shape = (WHOLE | CUT)[name]
    stack, parts = distribute(make(), ctx), make()
    if picked:
        stack, parts = stack[picked], [parts[n] for n in picked]
    plain = physics.StackedLinearPhysics(parts)
    for operation, run in OPERATIONS.items():
        found = []
        for each in (stack, plain):
            x = image(1 if name in CUT else 2, 1, *shape).requires_grad_()
            y = [part.detach().requires_grad_() for part in plain.A(x)]
            inputs = [x] if operation in ("A", "A_adjoint_A") else y
            slopes = torch.autograd.grad(squares(run(each, x, y)), inputs)
            with torch.no_grad():
                found.append([run(each, x, y), slopes])
        assert difference(*found) < NEAR, operation
    assert (stack._local_cache is not None) == (name in CUT)
    if name in CUT:
        lazy = da.from_array(x.detach().numpy(), chunks=(1, 1, 30, 30))
        y, wanted = stack.A(lazy), plain.A_adjoint_A(x.detach())
        assert max(y[0].numblocks) > 1
        for later in (stack.A_adjoint(y), stack.A_adjoint_A(lazy)):
            assert difference(torch.from_numpy(later.compute()), wanted) < NEAR


def test_solutions_and_norms_are_those_of_the_whole_stack(ctx: DistributedContext) -> None:
    x, plain = image(1, 1, 20, 24), physics.StackedLinearPhysics(blurs())
    stack, y = distribute(plain, ctx), plain.A(x)
    assert float((stack.A_dagger(y) - x).norm() / x.norm()) < 1e-4
    truth = float(plain.compute_sqnorm(x, max_iter=300, tol=1e-6, verbose=False))
    assert float(stack.compute_sqnorm(x, verbose=False)) == pytest.approx(truth, rel=0.01)
    gamma, z = 0.7, x.flip(-1).requires_grad_()
    found = stack.prox_l2(z, y, gamma)
    assert difference(gamma * plain.A_adjoint_A(found) + found, gamma * plain.A_adjoint(y) + z) < NEAR
    (gradient,) = torch.autograd.grad(found.sum(), z)
    assert difference(gamma * plain.A_adjoint_A(gradient) + gradient, torch.ones_like(z)) < NEAR


@pytest.mark.parametrize("edges", [(20, 24), (80, 70)])
def test_an_adjoint_is_the_sum_whatever_the_reduction(ctx: DistributedContext, edges: Any, monkeypatch: Patch) -> None:
    """As in deepinv, whose demos of unrolled networks distribute their physics with ``reduction="mean"``."""
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", 1000)
    x, parts = image(1, 1, *edges), blurs()
    y = [x.flip(-1) * (number + 1) for number in range(len(parts))]
    plain = physics.StackedLinearPhysics(parts)
    for reduction in ("mean", None):
        stack = distribute(parts, ctx, reduction=reduction)
        assert difference(stack.A_adjoint(y), plain.A_adjoint(y)) < NEAR
        assert difference(stack.A_adjoint_A(x), plain.A_adjoint_A(x)) < NEAR
        assert difference(stack.A_vjp(x, y), plain.A_adjoint(y)) < NEAR
    single = [part.A_adjoint_A(x) for part in parts]
    for reduce_op, wanted in (("sum", sum(single)), ("mean", sum(single) / len(single)), (None, single)):
        assert difference(stack.A_adjoint_A(x, reduce_op=reduce_op), wanted) < NEAR
    with pytest.raises(ConfigError, match=r"reduce_op is 'average'\. Write 'sum', 'mean', or None"):
        stack.A_adjoint_A(x, reduce_op="average")


def test_sums_have_the_same_bits_for_any_number_of_workers(counts: list[DistributedContext]) -> None:
    stacks, x = [distribute(STACKS["seven"](), each) for each in counts], image(1, 3, 160, 90)
    for used in (stacks, [stack[PICKED] for stack in stacks]):
        first, *others = (stack.A_adjoint_A(x) for stack in used)
        assert all(torch.equal(first, other) for other in others)


def test_few_partial_images_of_many_operators_exist_at_once(cluster: RunningCluster) -> None:
    with DistributedContext(cluster=cluster, device_mode="cpu", accumulate="float64") as fresh:
        stack, x = distribute(blurs(edges=(3,)) * 256, fresh), image(1, 1, 160, 160)
        assert difference(stack.A_adjoint_A(x), 256 * blurs()[0].A_adjoint_A(x)) < 1e-6
        assert fresh.most_alive <= 12


def test_a_factory_is_called_on_the_workers_with_the_shared_values(ctx: DistributedContext) -> None:
    def make(index: int, device: torch.device, shared: dict[str, Any]) -> Any:
        assert os.getpid() != shared["driver"]
        return physics.Blur(filter=shared["kernels"][index], padding="circular", device=device)

    shared, x = {"kernels": [kernel(n) for n in (3, 5, 7, 9)], "driver": os.getpid()}, image(1, 1, 16, 16)
    given: list[dict[str, Any]] = [{"shared": shared}, {"factory_kwargs": shared}]
    for kwargs in given:
        stack = distribute(make, ctx, num_operators=4, type_object="linear_physics", **kwargs)
        assert difference(stack.A_adjoint_A(x), physics.StackedLinearPhysics(blurs()).A_adjoint_A(x)) < NEAR


def test_an_unreached_tolerance_is_reported_once_with_figures(ctx: DistributedContext) -> None:
    stack = distribute(blurs(), ctx)
    y = stack.A(image(1, 1, 20, 24))
    with pytest.warns(UserWarning, match=r"A_dagger ended after 2 steps .* residual of .*, and tol is 1e-09"):
        stack.A_dagger(y, max_iter=2, tol=1e-9)
    with pytest.warns(UserWarning, match=r"prox_l2 ended after 1 steps.* Write prox_l2\(\.\.\., max_iter=5\)"):
        stack.prox_l2(y[0], y, 1.0, max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.A_dagger(y, max_iter=2, tol=1e-9)
        distribute(STACKS["complementary masks"](), ctx).A_dagger([image(1, 1, 20, 24)] * 3)


@pytest.mark.parametrize("method", ["A_dagger", "prox_l2", "compute_sqnorm"])
def test_iterations_are_the_same_in_one_call_or_many(ctx: DistributedContext, method: str, monkeypatch: Patch) -> None:
    stack, x = distribute(blurs(), ctx), image(2, 1, 20, 24)
    y = stack.A(x)
    given = {"A_dagger": (y,), "prox_l2": (x.flip(-1), y, torch.tensor([0.5, 2.0])), "compute_sqnorm": (x,)}
    found = []
    for size in (2**16, 0):
        monkeypatch.setattr("halotile.tasks.distributed.stacks.linear.SMALL_BYTES", size)
        found.append(getattr(stack, method)(*given[method], verbose=False, max_iter=8))
    assert difference(*found) < NEAR


def test_noise_is_that_of_the_operator_until_it_is_set(ctx: DistributedContext) -> None:
    x = image(1, 1, 64, 64)

    def level(found: Any) -> float:
        return float((found(x) - found.A(x)).std())

    (blur,) = blurs(edges=(3,), noise_model=physics.GaussianNoise(0.1))
    one = distribute(blur, ctx)
    changes: dict[float, Callable[[], Any]] = {
        0.1: lambda: None,
        0.5: lambda: one(x, sigma=0.5),
        0.2: lambda: one.set_noise_model(physics.GaussianNoise(0.2)),
        0.3: lambda: setattr(one, "noise_model", physics.GaussianNoise(0.3)),
    }
    for sigma, change in changes.items():
        change()
        assert level(one) == pytest.approx(sigma, rel=0.1)
    stack = distribute([blur, blur], ctx)
    assert level(stack[1]) == pytest.approx(0.3, rel=0.1)
    stack.set_noise_model(physics.ZeroNoise())
    assert [float((a - b).abs().max()) for a, b in zip(stack(x), stack.A(x), strict=True)] == [0, 0]


def test_noise_follows_from_the_seed_and_not_the_blocks(cluster: RunningCluster, monkeypatch: Patch) -> None:
    parts, x = blurs(edges=(3, 7), noise_model=physics.GaussianNoise(0.1)), image(1, 1, 70, 50).requires_grad_()
    found = []
    for large in (100, 10**9, 10**9):
        in_blocks(monkeypatch, 32, large)
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=8) as opened:
            stack = distribute(parts, opened)
            y = stack(x)
            found.append([*y, *stack(x), *torch.autograd.grad(squares(y), x)])
            assert (stack._local_cache is None) == (large > 100)
    assert difference(*found[:2]) < NEAR
    assert all(map(torch.equal, found[1], found[2]))
    assert len({float(part.sum()) for part in found[0]}) == 5
    assert float((found[0][0] - parts[0].A(x)).std()) == pytest.approx(0.1, rel=0.1)


DERIVATIVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.flip(-1))[0],
    "grad of grad": lambda f, x: torch.func.grad(
        lambda z: (torch.func.grad(lambda w: (f(w) ** 3).sum())(z) ** 2).sum()
    )(x),
    "in inference mode": lambda f, x: torch.inference_mode()(lambda z: f(z + 0))(x),
}


@pytest.mark.parametrize("large", [10**9, 100], ids=["by operators", "by blocks"])
def test_torch_func_accepts_our_operators(ctx: DistributedContext, large: int, monkeypatch: Patch) -> None:
    in_blocks(monkeypatch, 32, large)
    plain, x = physics.StackedLinearPhysics(blurs()), image(1, 1, 20, 24)
    stack = distribute(plain, ctx)
    for name, derivative in DERIVATIVES.items():
        assert difference(derivative(stack.A_adjoint_A, x), derivative(plain.A_adjoint_A, x)) < NEAR, name


# --- by blocks ------------------------------------------------------------------------------------


def test_squares_of_large_images_are_summed_by_blocks(ctx: DistributedContext, monkeypatch: Patch) -> None:
    parts = blurs(edges=(3, 7))
    stack, fidelity = distribute(parts, ctx), distribute(optim.L2(sigma=0.5), ctx)
    x = image(2, 1, 70, 50).requires_grad_()
    y = [part.A(x.detach().flip(-1)).requires_grad_() for part in parts]
    found = []
    for large in (100, 10**9):
        in_blocks(monkeypatch, 32, large)
        slope = fidelity.grad(x, y, stack)
        found.append([slope.detach(), *torch.autograd.grad(slope.square().sum(), [x, *y])])
        found[-1].append(fidelity.fn(x.detach(), [part.detach() for part in y], stack))
    assert difference(*found) < NEAR


@pytest.mark.parametrize("kind", ["circular", "reflect"])
def test_the_normal_operator_is_exact_or_not(ctx: DistributedContext, kind: str, monkeypatch: Patch) -> None:
    in_blocks(monkeypatch, 64)
    plain, x = physics.StackedLinearPhysics(blurs(kind, (3, 9))), image(1, 1, 120, 100)
    wanted = plain.A_adjoint(plain.A(x))
    for exact in (True, False):
        stack = distribute(plain, ctx, exact=exact)
        assert (stack._local_stack()._folded is None) == exact
        assert float((stack.A_adjoint_A(x) - wanted).norm() / wanted.norm()) < 1e-6


def test_a_part_of_a_dask_array_reads_its_neighbourhood(ctx: DistributedContext, monkeypatch: Patch) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.BLOCK", 64)
    taken: list[Any] = []

    def note(block: Any, block_info: Any = None) -> Any:
        taken.append(block_info[0]["chunk-location"])
        return block

    zeros = da.zeros((1, 1, 1000, 1000), chunks=(1, 1, 100, 100), dtype="float32")
    noted = da.map_blocks(note, zeros, dtype="float32", meta=np.empty((0,) * 4, "float32"))
    distribute(blurs(edges=(3,)), ctx).A(noted)[0][..., 500:510, 500:510].compute(scheduler="sync")
    assert 1 <= len(set(taken)) <= 16


class DeadColumn(physics.LinearPhysics):  # type: ignore[misc]
    """A camera with one dead column, which no trial on a small image detects."""

    def A(self, x: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        seen = x.clone()
        seen[..., 700:701] = 0
        return seen

    A_adjoint = A


class Differences(physics.LinearPhysics):  # type: ignore[misc]
    """``x[i] - x[i - 1]`` along x."""

    def A(self, x: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        return x - torch.nn.functional.pad(x, (1, 0))[..., :-1]

    def A_adjoint(self, y: Any, **_: Any) -> Any:  # noqa: N802 - deepinv's name
        return y - torch.nn.functional.pad(y, (0, 1))[..., 1:]


def test_unknown_operators_are_cut_into_blocks_where_their_reach_is_declared(ctx: DistributedContext) -> None:
    x = image(1, 1, 730, 740)
    assert torch.equal(distribute([DeadColumn()], ctx).A_adjoint_A(x), DeadColumn().A(x))
    stack = distribute([Differences()], ctx, reach=1)
    assert stack._local_stack() is not None
    assert difference(stack.A_adjoint_A(x), Differences().A_adjoint(Differences().A(x))) < NEAR
    assert distribute([Differences()], ctx)._local_stack() is None
    undeclared = distribute(downsampling("circular", 0), ctx)
    assert difference(undeclared.A(x), downsampling("circular", 730, 740)[0].A(x)) < NEAR


# --- what is refused ------------------------------------------------------------------------------


def linear(held: Any = None) -> Any:
    """An identity with an attribute."""
    one = physics.LinearPhysics(A=lambda x, **_: x, A_adjoint=lambda y, **_: y)
    one.held = held
    return one


ONE_ARRAY, NOT_COMPUTED = "one array of shape .* Write a list", r"not computed yet.* compute\(\)"
INVALID_INPUTS: list[tuple[str, Callable[[Any, torch.Tensor], Any]]] = [
    (r"one array of shape \(2, 1, 20, 24\) .* 2 operators", lambda p, x: p.A_adjoint(x)),
    (ONE_ARRAY, lambda p, x: p.A_adjoint(x.numpy())),
    (ONE_ARRAY, lambda p, x: p.A_adjoint(da.from_array(x.numpy()))),
    (ONE_ARRAY, lambda p, x: p.A_vjp(x, x)),
    (ONE_ARRAY, lambda p, x: p.A_dagger(x)),
    ("of type int was given as the measurements", lambda p, x: p.A_adjoint(3)),
    ("of type int in the place of a tensor", lambda p, x: p.A_adjoint([1, 2])),
    ("of type list in the place of a tensor", lambda p, x: p.A([x])),
    ("of type TensorList in the place of a tensor", lambda p, x: p.A_adjoint_A(p.A(x))),
    ("compute_sqnorm was given .* list", lambda p, x: p.compute_sqnorm([x])),
    (NOT_COMPUTED, lambda p, x: p.A_dagger(p.A(da.from_array(x.numpy())))),
    (NOT_COMPUTED, lambda p, x: p.compute_sqnorm(da.from_array(x.numpy()))),
    (NOT_COMPUTED, lambda p, x: p.prox_l2(da.from_array(x.numpy()), p.A(x), 1.0)),
    (r"A_dagger was given an empty tensor of shape \(0, 1, 20, 24\)", lambda p, x: p.A_dagger([x[:0]] * 2)),
    (r"operators \[0, 2\] were asked for, and there are 2, from 0 to 1", lambda p, x: p[[0, 2]]),
    (r"were asked for.*Write a list of their numbers", lambda p, x: p[[True, False]]),
    (r"were asked for.*Write a list of their numbers", lambda p, x: p[torch.ones(2) > 0]),
    (r"were asked for.*Write a list of their numbers", lambda p, x: p[1.5]),
    (r"none of 2 operators is taken", lambda p, x: p[[]]),
]


def test_invalid_images_measurements_and_subsets_are_refused(ctx: DistributedContext) -> None:
    stack, x = distribute([linear(), linear()], ctx), image(2, 1, 20, 24)
    for message, call in INVALID_INPUTS:
        with pytest.raises(ConfigError, match=message):
            call(stack, x)
    assert len(stack[torch.tensor([1]).tolist()]) == 1
    halves = distribute([physics.Denoising(), *downsampling("circular", 0)], ctx)
    with pytest.raises(InputError, match=r"\(1, 1, 21, 24\) and \(1, 1, 22, 24\).* Write img_size="):
        halves.A_adjoint(halves.A(image(1, 1, 21, 24)))


def test_an_object_that_cannot_be_sent_or_returns_no_tensor_is_named_by_its_number(ctx: DistributedContext) -> None:
    lock = threading.Lock()
    with pytest.raises(WrongKind, match=r"operator 1: an object of type LinearPhysics cannot be sent .*lock"):
        distribute([linear(), linear(lock)], ctx)
    with pytest.raises(WrongKind, match=r"the factory and its shared values: .* cannot be sent .*lock"):
        distribute(linear, ctx, num_operators=2, type_object="physics", shared={"lock": lock})
    for given in (None, (1, 2)):
        stack = distribute([linear(), physics.Physics(A=lambda x, given=given: given)], ctx)
        with pytest.raises(TaskFailed, match=f"forward of operator 1 .*A returned .* {type(given).__name__},"):
            stack.A(image(1, 1, 20, 24))


@pytest.mark.parametrize("large", [100, 10**9], ids=["by blocks", "whole"])
def test_nothing_is_sent_again_for_subsets_of_stacks(ctx: DistributedContext, large: int, monkeypatch: Patch) -> None:
    """Operators for blocks are tried and sent once, not for each selection: masks are as large as images."""
    in_blocks(monkeypatch, 32, large)
    parts, x = [*STACKS["complementary masks"](), *blurs()], image(1, 1, 20, 24)
    data = [optim.L2(sigma=1 + n) for n in range(7)]
    stack, fidelity, single = distribute(parts, ctx), distribute(data, ctx), distribute(optim.L2(), ctx)
    y = [each.flip(-1) for each in stack.A(x)]

    def sent() -> set[Path]:
        return {path for ending in ("*.pkl", "*.npy") for path in Path(ctx.folder).rglob(ending)}

    before = sent()
    for part in (PICKED, [0, 1], [2, 0], [1]):
        for used, plain in ((fidelity, data), (single, [optim.L2()] * 7)):
            found = used[part].grad(x, [y[n] for n in part], stack[part])
            assert difference(found, sum(plain[n].grad(x, y[n], parts[n]) for n in part)) < NEAR
    assert single[PICKED] is single
    assert sent() == before
