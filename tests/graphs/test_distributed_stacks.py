"""Distributed stacks give the results of plain ones, and solve their equations."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import dask.array as da
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, InputError, TaskFailed, WrongKind
from halotile.graphs.clusters.base import RunningCluster
from tests.cases import thorough
from tests.graphs.distributing import NEAR, OPERATIONS, STACKS, difference, image, kernel, masks

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", STACKS)
def test_an_operation_equals_the_plain_stack(ctx: DistributedContext, name: str, operation: str) -> None:
    plain = physics.StackedLinearPhysics(STACKS[name]())
    x = image(2, 1, 20, 24)
    y = plain.A(x)
    run = OPERATIONS[operation]
    assert difference(run(distribute(plain, ctx), x, y), run(plain, x, y)) < NEAR


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["circular blurs", "other sizes"])
def test_gradients_equal_the_plain_stack(ctx: DistributedContext, name: str, operation: str) -> None:
    plain = physics.StackedLinearPhysics(STACKS[name]())
    found = []
    for stack in (distribute(plain, ctx), plain):
        x = image(1, 1, 20, 24).requires_grad_()
        y = [part.detach().requires_grad_() for part in plain.A(x)]
        result = OPERATIONS[operation](stack, x, y)
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        loss = sum((part * part).sum() for part in parts)
        inputs = [x] if operation in ("A", "A_adjoint_A") else y
        found.append(torch.autograd.grad(loss, inputs))
    assert difference(*found) < NEAR


@pytest.mark.parametrize(
    ("kinds", "tolerance"), [("complementary masks", 1e-5), ("circular blurs", 1e-4)], ids=["masks", "blurs"]
)
def test_a_dagger_is_the_pseudo_inverse(ctx: DistributedContext, kinds: str, tolerance: float) -> None:
    plain = physics.StackedLinearPhysics(STACKS[kinds]())
    x = image(1, 1, 20, 24)
    found = distribute(plain, ctx).A_dagger(plain.A(x))
    assert float((found - x).norm() / x.norm()) < tolerance


def test_the_norm_is_that_of_the_whole_stack(ctx: DistributedContext) -> None:
    plain = physics.StackedLinearPhysics(masks(3))
    assert float(distribute(plain, ctx).compute_sqnorm(image(1, 1, 20, 24), verbose=False)) == pytest.approx(
        1, rel=0.01
    )
    blurs = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    truth = float(blurs.compute_sqnorm(image(1, 1, 20, 24), max_iter=300, tol=1e-6, verbose=False))
    found = distribute(blurs, ctx).compute_sqnorm(image(1, 1, 20, 24), verbose=False)
    assert float(found) == pytest.approx(truth, rel=0.01)


def test_prox_l2_solves_its_equation_and_has_its_gradient(ctx: DistributedContext) -> None:
    plain = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    stack = distribute(plain, ctx)
    y, gamma = plain.A(image(1, 1, 20, 24)), 0.7
    z = image(1, 1, 20, 24).flip(-1).requires_grad_()
    x = stack.prox_l2(z, y, gamma)
    assert difference(gamma * plain.A_adjoint_A(x) + x, gamma * plain.A_adjoint(y) + z) < NEAR
    (gradient,) = torch.autograd.grad(x.sum(), z)
    assert difference(gamma * plain.A_adjoint_A(gradient) + gradient, torch.ones_like(z)) < NEAR


@pytest.mark.parametrize("reduce_op", ["sum", "mean", None])
def test_reduce_op_reduces_the_contributions(ctx: DistributedContext, reduce_op: str | None) -> None:
    parts = STACKS["circular blurs"]()
    x = image(1, 1, 20, 24)
    single = [part.A_adjoint_A(x) for part in parts]
    wanted = {"sum": sum(single), "mean": sum(single) / len(single), None: single}[reduce_op]
    assert difference(distribute(parts, ctx).A_adjoint_A(x, reduce_op=reduce_op), wanted) < NEAR


def test_an_unknown_reduction_is_refused_at_any_size(ctx: DistributedContext) -> None:
    stack, x = distribute(STACKS["circular blurs"](), ctx), image(1, 1, 800, 700)
    with pytest.raises(ConfigError, match=r"reduce_op is 'average'\. Write 'sum', 'mean', or None"):
        stack.A_adjoint_A(x, reduce_op="average")


@pytest.mark.parametrize("reduction", [thorough("sum"), "mean", None])
@pytest.mark.parametrize("name", ["circular blurs", "large"])
def test_an_adjoint_is_the_sum_whatever_the_reduction(
    ctx: DistributedContext, name: str, reduction: str | None
) -> None:
    """As in deepinv, whose demos of unrolled networks distribute their physics with ``reduction="mean"``."""
    shape = (1, 1, 20, 24) if name == "circular blurs" else (1, 1, 800, 700)
    parts = STACKS["circular blurs"]()
    stack, x = distribute(parts, ctx, reduction=reduction), image(*shape)
    y = [image(*shape).flip(-1) * (number + 1) for number in range(len(parts))]
    plain = physics.StackedLinearPhysics(parts)
    left = sum(float((a * b).sum()) for a, b in zip(stack.A(x), y, strict=True))
    assert left == pytest.approx(float((x * stack.A_adjoint(y)).sum()), rel=1e-4)
    assert difference(stack.A_adjoint_A(x), plain.A_adjoint_A(x)) < NEAR
    assert difference(stack.A_vjp(x, y), plain.A_adjoint(y)) < NEAR


def test_sums_have_the_same_bits_on_one_worker_and_on_two(ctx: DistributedContext) -> None:
    parts, x = STACKS["seven"](), image(1, 3, 160, 90)
    with DistributedContext(workers=1, device_mode="cpu") as alone:
        assert torch.equal(distribute(parts, alone).A_adjoint_A(x), distribute(parts, ctx).A_adjoint_A(x))


def test_few_partial_images_of_many_operators_exist_at_once(cluster: RunningCluster) -> None:
    with DistributedContext(cluster=cluster, device_mode="cpu", accumulate="float64") as fresh:
        stack = distribute([physics.Blur(filter=kernel(3), padding="circular")] * 256, fresh)
        x = image(1, 1, 160, 160)
        single = physics.Blur(filter=kernel(3), padding="circular").A_adjoint_A(x)
        assert difference(stack.A_adjoint_A(x), 256 * single) < 1e-6
        assert fresh.most_alive <= 12


def test_noise_follows_from_the_seed_on_any_worker(cluster: RunningCluster) -> None:
    parts = [physics.Denoising(noise_model=physics.GaussianNoise(0.1)) for _ in range(3)]
    drawn = []
    for _ in range(2):
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=8) as opened:
            stack = distribute(parts, opened)
            drawn.append([*stack(torch.zeros(1, 1, 9, 9)), *stack(torch.zeros(1, 1, 9, 9))])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert len({float(part.sum()) for part in drawn[0]}) == 6


def test_a_factory_is_called_on_the_workers_with_the_shared_values(ctx: DistributedContext) -> None:
    def make(index: int, device: torch.device, shared: dict[str, Any]) -> Any:
        return physics.Blur(filter=shared["kernels"][index], padding="circular", device=device)

    shared = {"kernels": [kernel(n) for n in (3, 5, 7, 9)], "driver": os.getpid()}
    plain = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    given: list[dict[str, Any]] = [{"shared": shared}, {"factory_kwargs": shared}]
    for kwargs in given:
        stack = distribute(make, ctx, num_operators=4, type_object="linear_physics", **kwargs)
        assert difference(stack.A_adjoint_A(image(1, 1, 16, 16)), plain.A_adjoint_A(image(1, 1, 16, 16))) < NEAR


def test_an_unreached_tolerance_is_reported_once_with_figures(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
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
def test_iterations_are_the_same_in_one_call_and_in_many(
    ctx: DistributedContext, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, x = distribute(STACKS["circular blurs"](), ctx), image(2, 1, 20, 24)
    y = stack.A(x)
    given = {"A_dagger": (y,), "prox_l2": (x.flip(-1), y, torch.tensor([0.5, 2.0])), "compute_sqnorm": (x,)}
    kwargs = {"verbose": False, "max_iter": 8}
    found = []
    for size in (2**16, 0):
        monkeypatch.setattr("halotile.tasks.distributed.stacks.linear.SMALL_BYTES", size)
        found.append(getattr(stack, method)(*given[method], **kwargs))
    assert difference(*found) < NEAR


def test_an_update_applies_to_every_later_call(ctx: DistributedContext) -> None:
    x, other = image(1, 1, 20, 24), kernel(5)
    stack = distribute([physics.Blur(filter=kernel(3), padding="circular")], ctx)
    before = stack.A(x)[0]
    stack.update(filter=other)
    wanted = physics.Blur(filter=other, padding="circular").A(x)
    assert difference(stack.A(x)[0], wanted) < NEAR
    assert difference(before, wanted) > NEAR


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("which", ["stack", "one physics", "one of a stack"])
def test_parameters_of_a_call_are_stored_as_in_deepinv(
    ctx: DistributedContext, which: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", 100)
    x, first, other = image(1, 1, 20, 24), kernel(3), kernel(5)

    def made(word: torch.Tensor) -> Any:
        blurs = [physics.Blur(filter=word.clone(), padding="circular") for _ in range(2)]
        return blurs[0] if which == "one physics" else physics.StackedLinearPhysics(blurs)

    given = distribute(made(first), ctx)
    found = given[1] if which == "one of a stack" else given
    wanted = made(other)[1] if which == "one of a stack" else made(other)
    y = found.A(x, filter=other)
    assert difference(y, wanted.A(x)) < NEAR
    assert difference(found.A_adjoint(y), wanted.A_adjoint(wanted.A(x))) < NEAR
    assert difference(found.A(x), wanted.A(x)) < NEAR
    found.A_adjoint(y, filter=first)
    assert difference(found.A(x), wanted.A(x)) > NEAR
    if which == "one of a stack":
        assert difference(given.A(x)[0], made(first).A(x)[0]) < NEAR, "the others stay as they are"


def test_gradients_of_calls_use_the_parameters_of_their_own_call(ctx: DistributedContext) -> None:
    found = []
    for distributed in (True, False):
        plain = physics.Blur(filter=kernel(3), padding="circular")
        blur = distribute(plain, ctx) if distributed else plain
        x = image(1, 1, 20, 24).requires_grad_()
        loss = (blur.A(x, filter=kernel(5)) ** 2).sum() + (blur.A(x, filter=kernel(7)) ** 2).sum()
        found.append(torch.autograd.grad(loss, x)[0])
    assert difference(*found) < NEAR


def test_noise_is_that_of_the_operator_until_it_is_set(ctx: DistributedContext) -> None:
    x = image(1, 1, 64, 64)

    def level(found: Any) -> float:
        return float((found(x) - found.A(x)).std())

    blur = physics.Blur(filter=kernel(3), padding="circular", noise_model=physics.GaussianNoise(0.1))
    one = distribute(blur, ctx)
    assert float(one.noise_model.sigma) == pytest.approx(0.1)
    assert level(one) == pytest.approx(0.1, rel=0.1)
    one(x, sigma=0.5)
    assert level(one) == pytest.approx(0.5, rel=0.1)
    one.set_noise_model(physics.GaussianNoise(0.2))
    assert level(one) == pytest.approx(0.2, rel=0.1)
    one.noise_model = physics.GaussianNoise(0.3)
    assert level(one) == pytest.approx(0.3, rel=0.1)
    stack = distribute([blur, blur], ctx)
    assert level(stack[1]) == pytest.approx(0.3, rel=0.1)
    stack.set_noise_model(physics.ZeroNoise())
    assert [float((a - b).abs().max()) for a, b in zip(stack(x), stack.A(x), strict=True)] == [0, 0]


SIZES = {"odd": (1, 65, 47), "odd by odd": (1, 63, 45)}


@pytest.mark.thorough
@pytest.mark.parametrize("padding", ["circular", "reflect"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_super_resolution_of_odd_sizes_equals_deepinv(
    ctx: DistributedContext, size: tuple[int, int, int], padding: str
) -> None:
    low = physics.Downsampling(img_size=size, factor=2, filter="gaussian", padding=padding)
    mask = physics.Inpainting(img_size=size, mask=(image(*size) > 0).float())
    plain = physics.StackedLinearPhysics([mask, low])
    stack, x = distribute(plain, ctx), image(1, *size)
    y = plain.A(x)
    for run in OPERATIONS.values():
        assert difference(run(stack, x, y), run(plain, x, y)) < NEAR
    assert difference(stack.A_adjoint_A(stack.A_dagger(y)), plain.A_adjoint(y)) < 1e-4
    truth = float(plain.compute_sqnorm(x, max_iter=300, tol=1e-6, verbose=False))
    assert float(stack.compute_sqnorm(x, verbose=False)) == pytest.approx(truth, rel=0.01)


def test_adjoints_onto_images_of_two_sizes_are_refused_with_both(ctx: DistributedContext) -> None:
    parts = [physics.Denoising(), physics.Downsampling(filter="gaussian", factor=2)]
    stack, x = distribute(parts, ctx), image(1, 1, 21, 24)
    with pytest.raises(InputError, match=r"\(1, 1, 21, 24\) and \(1, 1, 22, 24\).* Write img_size="):
        stack.A_adjoint(stack.A(x))


def nonlinear() -> list[Any]:
    return [physics.Physics(A=torch.square), physics.Physics(A=lambda x: x**3 + x)]


def test_a_nonlinear_stack_has_the_derivatives_of_its_operators(ctx: DistributedContext) -> None:
    stack, x = distribute(nonlinear(), ctx), image(2, 1, 20, 24)
    v = [x.flip(-1), x.flip(-2)]
    single = [part.A_vjp(x, each) for part, each in zip(nonlinear(), v, strict=True)]
    assert difference(stack.A_vjp(x, v), single[0] + single[1]) < NEAR
    assert difference(stack.A_vjp(x, v, reduce_op=None), single) < NEAR
    assert difference([one.A_vjp(x, each) for one, each in zip(stack, v, strict=True)], single) < NEAR


DERIVATIVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.flip(-1))[0],
    "grad": lambda f, x: torch.func.grad(lambda z: (f(z) ** 2).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(
        lambda z: (torch.func.grad(lambda w: (f(w) ** 3).sum())(z) ** 2).sum()
    )(x),
    "in inference mode": lambda f, x: torch.inference_mode()(lambda z: f(z + 0))(x),
}


@pytest.mark.parametrize("large", [False, True], ids=["by operators", "by blocks"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_torch_func_accepts_distributed_operators(
    ctx: DistributedContext, name: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("halotile.tasks.distributed.stacks.blockwise.LARGE", 100)
    plain, x = physics.StackedLinearPhysics(STACKS["circular blurs"]()), image(1, 1, 20, 24)
    found = [DERIVATIVES[name](each.A_adjoint_A, x) for each in (distribute(plain, ctx), plain)]
    assert difference(*found) < NEAR


def linear(held: Any = None) -> Any:
    """An identity with an attribute."""
    one = physics.LinearPhysics(A=lambda x, **_: x, A_adjoint=lambda y, **_: y)
    one.held = held
    return one


INVALID_INPUTS: dict[str, tuple[str, Callable[[Any, torch.Tensor], Any]]] = {
    "a batch for measurements": (r"one array of shape \(2, 1, 20, 24\) .* 2 operators", lambda p, x: p.A_adjoint(x)),
    "an array for measurements": ("one array of shape .* Write a list", lambda p, x: p.A_adjoint(x.numpy())),
    "a dask array for measurements": (
        "one array of shape .* Write a list",
        lambda p, x: p.A_adjoint(da.from_array(x.numpy())),
    ),
    "a batch for cotangents": ("one array of shape .* Write a list", lambda p, x: p.A_vjp(x, x)),
    "a batch for A_dagger": ("one array of shape .* Write a list", lambda p, x: p.A_dagger(x)),
    "a number for measurements": ("of type int was given as the measurements", lambda p, x: p.A_adjoint(3)),
    "numbers for measurements": ("of type int in the place of a tensor", lambda p, x: p.A_adjoint([1, 2])),
    "a list for an image": ("of type list in the place of a tensor", lambda p, x: p.A([x])),
    "a TensorList for an image": ("of type TensorList in the place of a tensor", lambda p, x: p.A_adjoint_A(p.A(x))),
    "a list for a norm": ("compute_sqnorm was given .* list", lambda p, x: p.compute_sqnorm([x])),
    "no images to solve for": (
        r"A_dagger was given an empty tensor of shape \(0, 1, 20, 24\)",
        lambda p, x: p.A_dagger([x[:0]] * 2),
    ),
}


@pytest.mark.parametrize("name", INVALID_INPUTS)
def test_invalid_images_and_measurements_are_refused(ctx: DistributedContext, name: str) -> None:
    message, call = INVALID_INPUTS[name]
    with pytest.raises(ConfigError, match=message):
        call(distribute([linear(), linear()], ctx), image(2, 1, 20, 24))


def test_an_object_that_cannot_be_sent_is_named_by_its_number(ctx: DistributedContext) -> None:
    lock = threading.Lock()
    with pytest.raises(WrongKind, match=r"operator 1: an object of type LinearPhysics cannot be sent .*lock"):
        distribute([linear(), linear(lock)], ctx)
    with pytest.raises(WrongKind, match=r"the factory and its shared values: .* cannot be sent .*lock"):
        distribute(linear, ctx, num_operators=2, type_object="physics", shared={"lock": lock})


@pytest.mark.parametrize("given", [None, (1, 2)], ids=["nothing", "a tuple"])
def test_an_operator_that_returns_no_tensor_is_named_by_its_number(ctx: DistributedContext, given: Any) -> None:
    stack = distribute([linear(), physics.Physics(A=lambda x: given)], ctx)
    with pytest.raises(TaskFailed, match=f"forward of operator 1 .*A returned .* {type(given).__name__},"):
        stack.A(image(1, 1, 20, 24))


def test_a_single_physics_takes_a_dask_array_as_its_measurement(ctx: DistributedContext) -> None:
    plain, x = STACKS["one"]()[0], image(2, 1, 20, 24)
    y = distribute(plain, ctx).A(da.from_array(x.numpy()))
    back = distribute(plain, ctx).A_adjoint(y)
    assert difference(torch.from_numpy(back.compute()), plain.A_adjoint_A(x)) < NEAR
