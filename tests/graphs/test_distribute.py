"""Distributed stacks, denoisers and fidelities give what the plain ones give, whatever goes in."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch
import zarr
from distributed import LocalCluster

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, TaskFailed, WrongKind
from halotile.graphs.clusters.base import Cluster
from tests.support import noisy_picture, write_zarr

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

NEAR = 1e-5


@pytest.fixture(scope="module")
def ctx(cluster: Cluster) -> Iterator[DistributedContext]:
    """A context on the cluster of the tests."""
    with DistributedContext(cluster=cluster, device_mode="cpu", seed=3) as opened:
        yield opened


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def kernel(edge: int) -> torch.Tensor:
    return torch.rand(1, 1, edge, edge, generator=torch.Generator().manual_seed(edge)) / edge**2


def masks(count: int) -> list[Any]:
    number = torch.arange(20 * 24).reshape(1, 20, 24) % count
    return [physics.Inpainting(mask=(number == k).float(), img_size=(1, 20, 24)) for k in range(count)]


STACKS: dict[str, Callable[[], list[Any]]] = {
    "circular blurs": lambda: [physics.Blur(filter=kernel(n), padding="circular") for n in (3, 5, 7, 9)],
    "other rims": lambda: [
        physics.Blur(filter=kernel(5), padding="reflect"),
        physics.Blur(filter=kernel(3), padding="valid"),
    ],
    "complementary masks": lambda: masks(3),
    "other sizes": lambda: [
        physics.Downsampling(img_size=(1, 20, 24), filter="gaussian", factor=2, padding="circular"),
        physics.Denoising(),
        physics.BlurFFT(img_size=(1, 20, 24), filter=kernel(5)),
    ],
    "one": lambda: [physics.Blur(filter=kernel(3), padding="circular")],
    "seven": lambda: [physics.Blur(filter=kernel(3 + n % 2 * 2), padding="circular") for n in range(7)],
}


def difference(left: Any, right: Any) -> float:
    if isinstance(left, torch.Tensor):
        return float((left - right).abs().max() / right.abs().max())
    assert len(left) == len(right)
    return max(difference(a, b) for a, b in zip(left, right, strict=True))


OPERATIONS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "A": lambda p, x, y: p.A(x),
    "A_adjoint": lambda p, x, y: p.A_adjoint(y),
    "A_vjp": lambda p, x, y: p.A_vjp(x, y),
    "A_adjoint_A": lambda p, x, y: p.A_adjoint_A(x),
    "A_A_adjoint": lambda p, x, y: p.A_A_adjoint(y),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", STACKS)
def test_an_operation_is_that_of_the_plain_stack(ctx: DistributedContext, name: str, operation: str) -> None:
    plain = physics.StackedLinearPhysics(STACKS[name]())
    x = image(2, 1, 20, 24)
    y = plain.A(x)
    run = OPERATIONS[operation]
    assert difference(run(distribute(plain, ctx), x, y), run(plain, x, y)) < NEAR


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["circular blurs", "other sizes"])
def test_gradients_are_those_of_the_plain_stack(ctx: DistributedContext, name: str, operation: str) -> None:
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


@pytest.mark.parametrize("kind", ["circular", "reflect", "constant"])
def test_large_images_run_by_blocks(
    ctx: DistributedContext, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.pieces.LARGE", 100)
    monkeypatch.setattr("halotile.tasks.distributed.pieces.BLOCK", 32)
    plain = physics.StackedLinearPhysics([physics.Blur(filter=kernel(n), padding=kind) for n in (3, 7)])
    stack = distribute(plain, ctx)
    x = image(1, 2, 70, 50).requires_grad_()
    y = plain.A(x.detach())
    for run in OPERATIONS.values():
        assert difference(run(stack, x.detach(), y), run(plain, x.detach(), y)) < NEAR
    assert stack._local() is not None
    grads = [torch.autograd.grad(sum(part.square().sum() for part in s.A(x)), x)[0] for s in (stack, plain)]
    assert difference(*grads) < NEAR


def test_squares_of_large_images_are_added_up_by_blocks(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.tasks.distributed.pieces.BLOCK", 32)
    parts = [physics.Blur(filter=kernel(n), padding="circular") for n in (3, 7)]
    stack, fidelity = distribute(parts, ctx), distribute(optim.L2(sigma=0.5), ctx)
    x = image(2, 1, 70, 50).requires_grad_()
    y = [part.A(x.detach().flip(-1)).requires_grad_() for part in parts]
    found = []
    for large in (100, 10**9):
        monkeypatch.setattr("halotile.tasks.distributed.pieces.LARGE", large)
        slope = fidelity.grad(x, y, stack)
        found.append([slope.detach(), *torch.autograd.grad(slope.square().sum(), [x, *y])])
        found[-1].append(fidelity.fn(x.detach(), [part.detach() for part in y], stack))
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
def test_reduce_op_says_how_contributions_become_one(ctx: DistributedContext, reduce_op: str | None) -> None:
    parts = STACKS["circular blurs"]()
    x = image(1, 1, 20, 24)
    single = [part.A_adjoint_A(x) for part in parts]
    wanted = {"sum": sum(single), "mean": sum(single) / len(single), None: single}[reduce_op]
    assert difference(distribute(parts, ctx).A_adjoint_A(x, reduce_op=reduce_op), wanted) < NEAR


def test_sums_have_the_same_bits_on_one_worker_and_on_two(ctx: DistributedContext) -> None:
    parts, x = STACKS["seven"](), image(1, 3, 160, 90)
    with DistributedContext(workers=1, device_mode="cpu") as alone:
        assert torch.equal(distribute(parts, alone).A_adjoint_A(x), distribute(parts, ctx).A_adjoint_A(x))


def test_of_many_operators_few_partial_images_are_alive(cluster: Cluster) -> None:
    with DistributedContext(cluster=cluster, device_mode="cpu", accumulate="float64") as fresh:
        stack = distribute([physics.Blur(filter=kernel(3), padding="circular")] * 256, fresh)
        x = image(1, 1, 160, 160)
        single = physics.Blur(filter=kernel(3), padding="circular").A_adjoint_A(x)
        assert difference(stack.A_adjoint_A(x), 256 * single) < 1e-6
        assert fresh.most_alive <= 12


def test_noise_is_drawn_from_the_seed_wherever_it_runs(cluster: Cluster) -> None:
    parts = [physics.Denoising(noise_model=physics.GaussianNoise(0.1)) for _ in range(3)]
    drawn = []
    for _ in range(2):
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=8) as opened:
            stack = distribute(parts, opened)
            drawn.append([*stack(torch.zeros(1, 1, 9, 9)), *stack(torch.zeros(1, 1, 9, 9))])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert len({float(part.sum()) for part in drawn[0]}) == 6


def test_a_factory_is_called_on_the_workers_with_what_is_shared(ctx: DistributedContext) -> None:
    def make(index: int, device: torch.device, shared: dict[str, Any]) -> Any:
        return physics.Blur(filter=shared["kernels"][index], padding="circular", device=device)

    shared = {"kernels": [kernel(n) for n in (3, 5, 7, 9)], "driver": os.getpid()}
    plain = physics.StackedLinearPhysics(STACKS["circular blurs"]())
    given: list[dict[str, Any]] = [{"shared": shared}, {"factory_kwargs": shared}]
    for words in given:
        stack = distribute(make, ctx, num_operators=4, type_object="linear_physics", **words)
        assert (
            difference(stack.A_adjoint_A(image(1, 1, 16, 16)), plain.A_adjoint_A(image(1, 1, 16, 16))) < NEAR
        )


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


# Denoisers


class Smooth(torch.nn.Module):  # type: ignore[misc]
    """A network that sees two pixels far, with a noise level for each pixel or image."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.nn.Parameter(torch.randn(2, 1, 3, 3, generator=generator) / 3)
        self.second = torch.nn.Parameter(torch.randn(1, 2, 3, 3, generator=generator) / 3)
        self.scale = scale

    def forward(self, x: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
        if isinstance(sigma, torch.Tensor) and sigma.dim() == 1:
            sigma = sigma[:, None, None, None]
        functional = torch.nn.functional
        hidden = torch.relu(functional.conv2d(x * sigma, self.first, padding=1))
        return functional.interpolate(
            functional.conv2d(hidden, self.second, padding=1), scale_factor=self.scale
        )


def tiled(ctx: DistributedContext, net: Any, **options: Any) -> Any:
    return distribute(net, ctx, type_object="denoiser", **{"patch_size": 16, "overlap": 2, **options})


def away_from_the_rim(tensor: torch.Tensor, scale: int = 1) -> torch.Tensor:
    return tensor[..., 2 * scale : -2 * scale, 2 * scale : -2 * scale]


@pytest.mark.parametrize("size", [(16, 16), (15, 40), (100, 100), (51, 20), (17, 33)])
@pytest.mark.parametrize("options", [{}, {"blending": "hann", "overlap": 4}, {"max_batch_size": 1}], ids=str)
def test_any_size_is_denoised_as_the_whole(
    ctx: DistributedContext, size: tuple[int, int], options: Any
) -> None:
    net, x = Smooth(), image(2, 1, *size)
    with torch.no_grad():
        if options.get("blending"):
            found, whole = tiled(ctx, torch.nn.Tanh(), **options)(x), torch.tanh(x)
            assert difference(found, whole) < NEAR
        found, whole = tiled(ctx, net, **{**options, "blending": None})(x), net(x)
    assert difference(away_from_the_rim(found), away_from_the_rim(whole)) < NEAR
    if max(size) <= 16:
        assert torch.equal(found, whole)


@pytest.mark.parametrize("size", [(100, 100), (512, 200), (256, 256)])
def test_the_default_tiles_take_any_image(ctx: DistributedContext, size: tuple[int, int]) -> None:
    net, x = Smooth(), image(1, 1, *size)
    with torch.no_grad():
        found = distribute(net, ctx, type_object="denoiser")(x)
        assert difference(away_from_the_rim(found), away_from_the_rim(net(x))) < NEAR


@pytest.mark.parametrize("sigma", ["pixel", "sample", "scalar"])
def test_a_noise_level_goes_with_its_pixels_and_images(ctx: DistributedContext, sigma: str) -> None:
    net, x = Smooth(), image(3, 1, 40, 20)
    level = {
        "pixel": image(3, 1, 40, 20).abs(),
        "sample": torch.tensor([0.1, 0.5, 2.0]),
        "scalar": torch.tensor(0.3),
    }[sigma]
    with torch.no_grad():
        found = tiled(ctx, net)(x, sigma=level)
        assert difference(away_from_the_rim(found), away_from_the_rim(net(x, level))) < NEAR
        assert torch.equal(found, tiled(ctx, net)(x, level))


def test_a_processor_may_upscale(ctx: DistributedContext) -> None:
    net, x = Smooth(scale=2), image(1, 1, 40, 21)
    with torch.no_grad():
        found = tiled(ctx, net)(x)
        assert found.shape == (1, 1, 80, 42)
        assert difference(away_from_the_rim(found, 2), away_from_the_rim(net(x), 2)) < NEAR


def test_tiles_without_overlap_and_along_one_axis_or_three(ctx: DistributedContext) -> None:
    double: Callable[[torch.Tensor], torch.Tensor] = lambda x: 2 * x  # noqa: E731
    x = image(1, 2, 20, 9, 33)
    for options in (
        {"tiling_strategy": "basic"},
        {"tiling_dims": 3, "patch_size": 4},
        {"tiling_dims": (-1, -3)},
    ):
        assert torch.equal(tiled(ctx, double, **options)(x), 2 * x)


class Halves:
    """A strategy of one's own: left and right."""

    def get_num_patches(self) -> int:
        return 2

    def get_local_patches(self, x: torch.Tensor, numbers: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [(number, x.chunk(2, -1)[number]) for number in numbers]

    def apply_batching(
        self, patches: list[torch.Tensor], max_batch_size: int | None = None
    ) -> list[torch.Tensor]:
        return patches

    def unpack_batched_results(self, batches: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        return batches

    def reduce_patches(self, out: torch.Tensor, pairs: list[tuple[int, torch.Tensor]]) -> None:
        out.copy_(torch.cat([patch for _, patch in pairs], -1))


def test_a_strategy_of_ones_own_cuts_and_joins(ctx: DistributedContext) -> None:
    x = image(1, 1, 8, 12)
    assert torch.equal(tiled(ctx, torch.nn.ReLU(), tiling_strategy=Halves())(x), x.relu())


def test_gradients_of_a_denoiser_reach_image_and_weights(ctx: DistributedContext) -> None:
    found = []
    for distributed in (True, False):
        net, x = Smooth(), image(1, 1, 16, 40).requires_grad_()
        y = tiled(ctx, net)(x) if distributed else net(x)
        wanted = [x, net.first, net.second]
        found.append(torch.autograd.grad((y[..., 4:-4, 4:-4] ** 2).sum(), wanted))
    assert difference(*found) < NEAR


def test_a_network_that_was_trained_in_between_is_sent_again(ctx: DistributedContext) -> None:
    net, x = torch.nn.Conv2d(1, 1, 1), image(1, 1, 20, 20)
    denoiser = tiled(ctx, net)
    with torch.no_grad():
        denoiser(x)
        net.weight.fill_(3.0)
        assert torch.equal(denoiser(x), net(x))


def test_a_prior_keeps_its_kind_and_denoises_by_tiles(ctx: DistributedContext) -> None:
    denoisers = pytest.importorskip("deepinv.models")
    prior = optim.PnP(denoisers.MedianFilter(3))
    shared = distribute(prior, ctx, patch_size=16, overlap=2)
    x = image(1, 1, 40, 30)
    assert type(shared) is type(prior)
    assert prior.denoiser is not shared.denoiser
    assert torch.equal(away_from_the_rim(shared.prox(x, 0.1)), away_from_the_rim(prior.prox(x, 0.1)))


# Types


def test_numpy_in_is_numpy_out(ctx: DistributedContext) -> None:
    parts, x = STACKS["circular blurs"](), image(1, 1, 20, 24)
    stack, pixels = distribute(parts, ctx), x.numpy()
    y = stack.A(pixels)
    assert all(isinstance(part, np.ndarray) for part in y)
    np.testing.assert_array_equal(stack.A_adjoint(y), stack.A_adjoint(stack.A(x)).numpy())
    found = tiled(ctx, torch.nn.Tanh())(pixels)
    np.testing.assert_array_equal(found, torch.tanh(x).numpy())
    slope = distribute(optim.L2(), ctx).grad(pixels, y, stack)
    assert isinstance(slope, np.ndarray)


def test_a_dask_array_in_is_a_lazy_one_out(ctx: DistributedContext) -> None:
    parts, x = STACKS["circular blurs"](), image(1, 1, 40, 24)
    stack, lazy = distribute(parts, ctx), da.from_array(x.numpy(), chunks=(1, 1, 16, 16))
    y = stack.A(lazy)
    assert all(isinstance(part, da.Array) for part in y)
    np.testing.assert_allclose(stack.A_adjoint(y).compute(), stack.A_adjoint_A(x).numpy(), atol=1e-5)
    with torch.no_grad():
        for net in (Smooth(), Smooth(scale=2)):
            denoised = tiled(ctx, net)(lazy)
            assert isinstance(denoised, da.Array)
            np.testing.assert_allclose(denoised.compute(), tiled(ctx, net)(x).numpy(), atol=1e-5)


def test_what_iterates_wants_numbers(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
    lazy = da.zeros((1, 1, 20, 24), dtype="float32")
    refused: list[Callable[[], Any]] = [
        lambda: stack.A_dagger(stack.A(lazy)),
        lambda: stack.compute_sqnorm(lazy),
        lambda: stack.prox_l2(lazy, stack.A(lazy), 1.0),
        lambda: tiled(ctx, Smooth())(lazy, torch.ones(1, 1, 20, 24)),
    ]
    for run in refused:
        with pytest.raises(ConfigError, match=r"not computed yet.* compute\(\)"):
            run()


def test_a_path_in_is_a_path_out(ctx: DistributedContext, tmp_path: Path) -> None:
    parts, pixels = STACKS["circular blurs"](), noisy_picture((1, 1, 40, 24))
    source = write_zarr(tmp_path / "x.zarr", pixels)
    stack = distribute(parts, ctx)
    y = stack.A(source)
    back = zarr.open_array(stack.A_adjoint(y), mode="r")
    np.testing.assert_allclose(back[...], stack.A_adjoint_A(pixels), atol=1e-5)
    found = zarr.open_array(tiled(ctx, torch.nn.Tanh())(str(source)), mode="r")
    np.testing.assert_allclose(found[...], np.tanh(pixels), atol=1e-6)


def spectrum(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.fft.fft2(x.to(torch.complex64))


def back(y: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.fft.ifft2(y, norm="forward").real


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_numbers_keep_their_type(ctx: DistributedContext, dtype: torch.dtype) -> None:
    x = image(1, 1, 12, 12, dtype=dtype)
    stack = distribute([physics.Denoising(), physics.LinearPhysics(A=spectrum, A_adjoint=back)], ctx)
    y = stack.A(x)
    assert [part.dtype for part in y] == [dtype, torch.complex64]
    torch.testing.assert_close(y[1], spectrum(x))
    assert stack.A_adjoint(y).dtype == torch.promote_types(dtype, torch.float32)
    assert tiled(ctx, torch.nn.ReLU(), patch_size=8)(x).dtype == dtype


# The context


def test_a_context_joins_the_cluster_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as running:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", running.scheduler_address)
        with DistributedContext(device_mode="cpu") as joined:
            assert joined.world_size == 1
            assert torch.equal(
                tiled(joined, torch.nn.ReLU())(image(1, 1, 20, 20)), image(1, 1, 20, 20).relu()
            )


def test_an_error_names_its_operator_and_leaves_the_cluster_usable(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
    x = image(1, 1, 20, 24)
    y = list(stack.A(x))
    with pytest.raises(TaskFailed, match=r"adjoint of operator 2 failed on a worker: \w+"):
        stack.A_adjoint([*y[:2], torch.ones(3), y[3]])
    assert len(stack.A(x)) == 4


def test_an_error_names_its_tile(ctx: DistributedContext) -> None:
    def refuse(batch: torch.Tensor) -> torch.Tensor:
        if batch.max() > 8:
            raise ValueError("too bright")
        return batch

    x = torch.zeros(1, 1, 40, 16)
    x[..., 20, 8] = 9
    with pytest.raises(TaskFailed, match="denoise of tile 1 failed on a worker: ValueError: too bright"):
        tiled(ctx, refuse, max_batch_size=1, overlap=0)(x)


def test_a_worker_that_dies_is_an_error_at_once() -> None:
    def die(batch: torch.Tensor) -> torch.Tensor:
        os._exit(3)

    with (
        DistributedContext(workers=1, device_mode="cpu") as fresh,
        pytest.raises(TaskFailed, match=r"the worker that had task denoise-.* died"),
    ):
        tiled(fresh, die)(torch.zeros(1, 1, 20, 20))


def test_the_folder_is_private_and_goes_with_the_context(cluster: Cluster, tmp_path: Path) -> None:
    with DistributedContext(cluster=cluster, scratch=tmp_path, device_mode="cpu") as opened:
        folder = opened.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        stack = distribute(STACKS["one"](), opened)
        before = sorted(folder.rglob("*"))
        stack.A_adjoint_A(image(1, 1, 20, 24))
        assert sorted(folder.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="not open"):
        stack.A(image(1, 1, 20, 24))


def test_one_driver_has_nobody_to_talk_to(ctx: DistributedContext) -> None:
    x = torch.ones(2)
    assert (ctx.rank, ctx.world_size, ctx.use_dist, ctx.get_backend()) == (0, 2, False, "dask")
    assert ctx.local_indices(5) == [0, 1, 2, 3, 4]
    assert ctx.all_reduce(x) is x
    assert ctx.broadcast(x) is x
    assert ctx.all_gather(x).shape == (1, 2)


@pytest.mark.parametrize(
    ("thing", "options", "message"),
    [
        (3, {}, "the object is a int"),
        (lambda x: x, {}, "that can be called: what it is for is not clear"),
        ([], {}, "holds nothing"),
        ([torch.nn.ReLU(), 3], {}, "holds ReLU, int"),
        (torch.nn.ReLU(), {}, "Cannot auto-detect generic torch.nn.Module: ReLU"),
        (lambda *_: None, {"type_object": "physics"}, "num_operators is None"),
        (torch.nn.ReLU(), {"type_object": "what"}, "type_object is 'what'"),
        (
            torch.nn.ReLU(),
            {"type_object": "denoiser", "tiling_strategy": "smart"},
            "tiling_strategy is 'smart'",
        ),
        (torch.nn.ReLU(), {"type_object": "denoiser", "blending": "cubic"}, "blending is 'cubic'"),
        (torch.nn.ReLU(), {"type_object": "denoiser", "pach_size": 3}, "no keyword 'pach_size'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_was_seen(
    ctx: DistributedContext, thing: Any, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        distribute(thing, ctx, **options)(torch.ones(1, 1, 4, 4))


def test_operators_of_another_kind_are_refused(ctx: DistributedContext) -> None:
    with pytest.raises(WrongKind, match="holds int"):
        distribute([3], ctx, type_object="physics")
    stack = distribute(lambda *_: 3, ctx, type_object="linear_physics", num_operators=1)
    with pytest.raises(TaskFailed, match="must return LinearPhysics"):
        stack.A(image(1, 1, 8, 8))
