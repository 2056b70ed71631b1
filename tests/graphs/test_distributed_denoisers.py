"""Denoisers on tiles give the result of the whole image."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, TaskFailed
from tests.cases import thorough
from tests.graphs.distributing import NEAR, Smooth, away_from_the_rim, difference, image, tiled

physics = pytest.importorskip("deepinv.physics")
optim = pytest.importorskip("deepinv.optim")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("size", [thorough((16, 16)), (15, 40), thorough((100, 100)), (51, 20), (17, 33)])
@pytest.mark.parametrize("options", [{}, {"blending": "hann", "overlap": 4}, {"max_batch_size": 1}], ids=str)
def test_tiles_of_any_size_give_the_result_of_the_whole_image(
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
    level = {"pixel": image(3, 1, 40, 20).abs(), "sample": torch.tensor([0.1, 0.5, 2.0]), "scalar": torch.tensor(0.3)}[
        sigma
    ]
    with torch.no_grad():
        found = tiled(ctx, net)(x, sigma=level)
        assert difference(away_from_the_rim(found), away_from_the_rim(net(x, level))) < NEAR
        assert torch.equal(found, tiled(ctx, net)(x, level))


class Conditioned(torch.nn.Module):  # type: ignore[misc]
    """A network whose images come with a conditioning tensor for each of them."""

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        beside = torch.cat([x, given.flatten(1)[:, :2, None, None].expand(-1, -1, *x.shape[2:])], 1)
        return beside[:, :1] * beside[:, 1:2] + beside[:, 2:3]


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 1, 1), (4, 3, 5), (4, 1, 7, 9), (1, 2), (1, 2, 3)])
def test_the_conditioning_of_an_image_goes_with_its_tiles(ctx: DistributedContext, shape: tuple[int, ...]) -> None:
    x, given, net = image(shape[0], 1, 40, 20), image(*shape), Conditioned()
    for options in ({}, {"max_batch_size": 1}):
        assert difference(tiled(ctx, net, **options)(x, given), net(x, given)) < NEAR
    x.requires_grad_()
    found = [torch.autograd.grad((f(x, given=given) ** 2).sum(), x)[0] for f in (tiled(ctx, net, overlap=0), net)]
    assert difference(*found) < NEAR


def test_a_processor_may_upscale(ctx: DistributedContext) -> None:
    net, x = Smooth(scale=2), image(1, 1, 40, 21)
    with torch.no_grad():
        found = tiled(ctx, net)(x)
        assert found.shape == (1, 1, 80, 42)
        assert difference(away_from_the_rim(found, 2), away_from_the_rim(net(x), 2)) < NEAR


def test_tiles_without_overlap_and_along_one_axis_or_three(ctx: DistributedContext) -> None:
    double: Callable[[torch.Tensor], torch.Tensor] = lambda x: 2 * x  # noqa: E731
    x = image(1, 2, 20, 9, 33)
    for options in ({"tiling_strategy": "basic"}, {"tiling_dims": 3, "patch_size": 4}, {"tiling_dims": (-1, -3)}):
        assert torch.equal(tiled(ctx, double, **options)(x), 2 * x)


class Halves:
    """A user's strategy: the left and the right half."""

    def get_num_patches(self) -> int:
        return 2

    def get_local_patches(self, x: torch.Tensor, numbers: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [(number, x.chunk(2, -1)[number]) for number in numbers]

    def apply_batching(self, patches: list[torch.Tensor], max_batch_size: int | None = None) -> list[torch.Tensor]:
        return patches

    def unpack_batched_results(self, batches: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        return batches

    def reduce_patches(self, out: torch.Tensor, pairs: list[tuple[int, torch.Tensor]]) -> None:
        out.copy_(torch.cat([patch for _, patch in pairs], -1))


def test_a_users_strategy_cuts_and_joins(ctx: DistributedContext) -> None:
    x = image(1, 1, 8, 12)
    assert torch.equal(tiled(ctx, torch.nn.ReLU(), tiling_strategy=Halves())(x), x.relu())


@pytest.mark.parametrize("kind", ["pixel", "one for all images", "sample", "scalar"])
def test_a_noise_level_goes_with_the_tiles_of_a_strategy(ctx: DistributedContext, kind: str) -> None:
    tiling = pytest.importorskip("deepinv.distributed.strategies.distributed_strategies").TilingStrategy
    net, x = Smooth(), image(3, 1, 40, 20)
    level = {
        "pixel": image(3, 1, 40, 20).abs(),
        "one for all images": image(1, 1, 40, 20).abs(),
        "sample": torch.tensor([0.1, 0.5, 2.0]),
        "scalar": torch.tensor(0.3),
    }[kind]
    for size in (None, 1, 2):
        strategy = tiling(x.shape, tiling_dims=(-2, -1), patch_size=10, overlap=4)
        found = tiled(ctx, net, tiling_strategy=strategy, max_batch_size=size)(x, level)
        assert difference(away_from_the_rim(found), away_from_the_rim(net(x, level))) < NEAR


def test_results_that_a_users_strategy_cannot_join_are_refused(ctx: DistributedContext) -> None:
    with pytest.raises(ConfigError, match=r"returned \(1, 1, 16, 12\) for tiles .*Halves.*'overlap_tiling'"):
        tiled(ctx, Smooth(scale=2), tiling_strategy=Halves())(image(1, 1, 8, 12))


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


def test_a_prior_keeps_its_type_and_denoises_by_tiles(ctx: DistributedContext) -> None:
    denoisers = pytest.importorskip("deepinv.models")
    prior = optim.PnP(denoisers.MedianFilter(3))
    shared = distribute(prior, ctx, patch_size=16, overlap=2)
    x = image(1, 1, 40, 30)
    assert type(shared) is type(prior)
    assert prior.denoiser is not shared.denoiser
    assert torch.equal(away_from_the_rim(shared.prox(x, 0.1)), away_from_the_rim(prior.prox(x, 0.1)))


RESULTS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "nothing": ("the processor returned an object of type NoneType", lambda x: None),
    "a tuple": ("the processor returned an object of type tuple", lambda x: (x, x)),
    "an array": ("the processor returned an object of type ndarray", lambda x: x.numpy()),
    "a number": (r"a tensor of shape \(\) for tiles of shape \(4, 1, 20, 20\)", lambda x: x.sum()),
    "no images": (r"a tensor of shape \(0, 1, 20, 20\)", lambda x: x[:0]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_not_images_are_reported_with_their_type(ctx: DistributedContext, name: str) -> None:
    message, processor = RESULTS[name]
    with pytest.raises(TaskFailed, match=f"denoise of tile 0 .*{message}"):
        tiled(ctx, processor)(image(1, 1, 24, 24))


def test_an_image_without_pixels_is_refused(ctx: DistributedContext) -> None:
    with pytest.raises(ConfigError, match=r"the shape \(0, 1, 24, 24\): there are no pixels"):
        tiled(ctx, Smooth())(torch.zeros(0, 1, 24, 24))


def test_weights_without_gradients_are_reported_once(ctx: DistributedContext) -> None:
    net, x = torch.nn.Conv2d(1, 1, 3, padding=1), image(1, 1, 20, 20).requires_grad_()
    for function in (lambda z: net(z), net.forward, functools.partial(inside, net=net)):
        denoiser = tiled(ctx, function)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                denoiser(x)
            with pytest.raises(UserWarning, match=r"weights that want gradients \((Conv2d|.*)\.\w+\)"):
                denoiser(x)
            denoiser(x)
            tiled(ctx, net)(x)


def inside(x: torch.Tensor, net: Any) -> torch.Tensor:
    result: torch.Tensor = net(x)
    return result


def test_layers_with_running_statistics_are_reported_in_training_mode(ctx: DistributedContext) -> None:
    net, x = torch.nn.Sequential(torch.nn.BatchNorm2d(1)), image(1, 1, 20, 20)
    denoiser = tiled(ctx, net, unsafe=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.eval()
        tiled(ctx, net)(x)
        tiled(ctx, torch.nn.BatchNorm2d(1, track_running_stats=False).train(), unsafe=True)(x)
        denoiser(x)
        net.train()
        with pytest.raises(UserWarning, match=r"layers with running statistics \(0\).* Write eval\(\)"):
            denoiser(x)
        denoiser(x)


@pytest.mark.parametrize("held", ["closure", "attribute"])
def test_a_generator_that_is_not_from_torch_is_reported(ctx: DistributedContext, held: str) -> None:
    class Drawing(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rng.standard_normal()

    rng = np.random.default_rng(0)
    drawing = Drawing() if held == "attribute" else lambda x: x + rng.standard_normal()
    with pytest.warns(UserWarning, match=r"numpy's Generator\) that is none of torch.* Write torch\.randn"):
        distribute(drawing, ctx, type_object="denoiser", patch_size=8, overlap=1)(image(1, 1, 20, 20))


class Normalised(torch.nn.Module):  # type: ignore[misc]
    """A normalisation over all pixels of an image, with a noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.GroupNorm(2, 4), torch.nn.Conv2d(4, 1, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * sigma
        return result


class Attending(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        return ((pixels @ pixels.transpose(1, 2)).softmax(-1) @ pixels).transpose(1, 2).reshape(x.shape)


class Rows(torch.nn.Module):  # type: ignore[misc]
    """A network that depends on rows alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)


def strategy_of(x: torch.Tensor) -> Any:
    module = pytest.importorskip("deepinv.distributed.strategies.distributed_strategies")
    return module.TilingStrategy(x.shape, tiling_dims=(-2, -1), patch_size=10, overlap=4)


@pytest.mark.parametrize(
    "make", [Normalised, Attending, Rows, lambda: optim.PnP(Normalised())], ids=["norm", "attention", "rows", "prior"]
)
def test_a_network_that_depends_on_the_whole_image_is_not_tiled(ctx: DistributedContext, make: Any) -> None:
    net, x = make(), image(1, 1, 40, 40)
    denoiser = distribute(net, ctx, type_object="auto" if hasattr(net, "prox") else "denoiser", patch_size=16)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ConfigError, match=r"looks at the whole image.*unsafe=True"):
            denoiser.prox(x, 1.0) if hasattr(net, "prox") else denoiser(x)


def test_each_choice_of_cut_axes_is_tried(ctx: DistributedContext) -> None:
    rows = tiled(ctx, Rows(), overlap=0)
    assert rows(image(1, 1, 40, 16)).shape == (1, 1, 40, 16)
    with pytest.raises(ConfigError, match="looks at the whole image"):
        rows(image(1, 1, 16, 40))
    assert rows(image(1, 1, 40, 16)).shape == (1, 1, 40, 16)


class Shuffled(torch.nn.Module):  # type: ignore[misc]
    """A network that works on blocks of 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fold = torch.nn.functional
        return x + fold.pixel_shuffle(self.inner(fold.pixel_unshuffle(x, 4)), 4)


@pytest.mark.parametrize(("patch", "overlap"), [(16, 9), (21, 13), ((18, 26), (9, 10))])
def test_tiles_of_a_network_with_a_stride_begin_on_multiples_of_it(
    ctx: DistributedContext, patch: Any, overlap: Any
) -> None:
    net, x = Shuffled().requires_grad_(False), image(2, 1, 60, 76)
    made = distribute(net, ctx, type_object="denoiser", patch_size=patch, overlap=overlap)(x)
    inner = (..., slice(8, -8), slice(8, -8))
    assert difference(made[inner], net(x)[inner]) < NEAR


class Placed(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(0, 1, x.shape[-1])


def test_a_position_dependent_network_is_not_tiled(ctx: DistributedContext) -> None:
    with pytest.raises(ConfigError, match=r"depends on the position of the tile.*unsafe=True"):
        tiled(ctx, Placed())(image(1, 1, 40, 40))


def test_it_is_refused_with_any_arguments_and_any_tiling(ctx: DistributedContext) -> None:
    net, x = Normalised(), image(2, 1, 40, 40)
    for sigma in (0.5, torch.tensor(0.5), x.abs(), torch.ones(2, 1, 1, 1)):
        with pytest.raises(ConfigError, match="looks at the whole image"):
            tiled(ctx, net)(x, sigma)
    da = pytest.importorskip("dask.array")
    with pytest.raises(ConfigError, match="looks at the whole image"):
        tiled(ctx, net)(da.from_array(x.numpy()))
    with pytest.raises(ConfigError, match="looks at the whole image"):
        tiled(ctx, net, tiling_strategy=strategy_of(x))(x)


def test_unsafe_tiles_it_nevertheless(ctx: DistributedContext) -> None:
    net, x = Normalised().requires_grad_(False), image(1, 1, 40, 40)
    assert difference(tiled(ctx, net, unsafe=True)(x), net(x)) > 0.01


def test_a_network_may_depend_on_the_whole_of_axes_that_are_not_cut(ctx: DistributedContext) -> None:
    for net, x in ((Normalised().requires_grad_(False), image(1, 1, 16, 16)), (Rows(), image(1, 1, 40, 16))):
        assert difference(tiled(ctx, net, overlap=0)(x), net(x)) < NEAR


def test_a_receptive_field_larger_than_the_overlap_is_allowed(ctx: DistributedContext) -> None:
    wide = torch.nn.AvgPool2d(41, 1, 20)
    assert tiled(ctx, wide)(image(1, 1, 40, 40)).shape == (1, 1, 40, 40)


def test_a_network_that_fails_on_trial_windows_is_reported(ctx: DistributedContext) -> None:
    of_tiles = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 400), torch.nn.Unflatten(1, (1, 20, 20)))
    with torch.no_grad(), pytest.warns(UserWarning, match="fails on small windows"):
        tiled(ctx, of_tiles)(image(1, 1, 40, 40))


class NoiseLevel:
    """A tensor that is held by an object of the user's."""

    def __init__(self, wants_gradient: bool) -> None:
        self.sigma = torch.ones(2).requires_grad_(wants_gradient)


def test_a_tensor_deep_inside_an_argument_gets_no_gradient_in_silence(ctx: DistributedContext) -> None:
    scale: Callable[[torch.Tensor, NoiseLevel], torch.Tensor] = lambda x, level: x * level.sigma.sum()  # noqa: E731
    x = image(1, 1, 8, 8)
    assert torch.equal(tiled(ctx, scale)(x, NoiseLevel(False)), 2 * x)
    with torch.no_grad():
        assert torch.equal(tiled(ctx, scale)(x, NoiseLevel(True)), 2 * x)
    with pytest.raises(ConfigError, match=r"shape \(2,\) wants a gradient inside another argument"):
        tiled(ctx, scale)(x, NoiseLevel(True))


CELL = """
import torch

def scale():
    return {factor}

class Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scale() * x

class Inner(torch.nn.Module):
    def forward(self, x):
        return Pointwise.apply(x)

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, sigma=None):
        return self.inner(x)
"""


@pytest.mark.parametrize("module", ["__main__", "of_no_file"])
def test_a_network_of_a_notebook_is_that_of_the_cell_that_ran_last(ctx: DistributedContext, module: str) -> None:
    namespace: dict[str, Any] = {"__name__": module}
    x = image(1, 1, 40, 16)
    for number, factor in enumerate((2.0, 3.0)):
        exec(compile(CELL.format(factor=factor), f"<ipython-input-{number}>", "exec"), namespace)
        assert torch.equal(tiled(ctx, namespace["Network"]())(x), factor * x)
