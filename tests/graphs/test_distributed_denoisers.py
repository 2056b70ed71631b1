"""Denoisers on tiles or on parts of a batch: results, gradients, random numbers and running statistics of the network in one process."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError, TaskFailed
from halotile.graphs.clusters.base import RunningCluster
from tests.cases import thorough
from tests.graphs.distributing import Patch, Smooth, difference, image, optim, physics, tiled

strategies = pytest.importorskip("deepinv.distributed.strategies.distributed_strategies")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

NEAR = {torch.float32: 1e-5, torch.float64: 1e-10}
SINGLE = NEAR[torch.float32]


def away_from_the_rim(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., 2:-2, 2:-2]


@pytest.mark.parametrize("size", [thorough((16, 16)), (15, 40), thorough((100, 100)), (51, 20), (17, 33)])
@pytest.mark.parametrize("options", [{}, {"blending": "hann", "overlap": 4}, {"max_batch_size": 1}], ids=str)
def test_tiles_of_any_size_give_the_whole_image(ctx: DistributedContext, size: tuple[int, int], options: Any) -> None:
    net, x = Smooth(), image(2, 1, *size)
    with torch.no_grad():
        if options.get("blending"):
            assert difference(tiled(ctx, torch.nn.Tanh(), **options)(x), torch.tanh(x)) < SINGLE
        found, whole = tiled(ctx, net, **{**options, "blending": None})(x), net(x)
    assert difference(away_from_the_rim(found), away_from_the_rim(whole)) < SINGLE
    if max(size) <= 16:
        assert torch.equal(found, whole)


def by_fours() -> torch.nn.Module:
    """A network that works on blocks of 4 pixels."""
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(16, 16, 3, padding=1), nn.PixelShuffle(4))


TILED: dict[str, tuple[Callable[[], Any], tuple[int, ...], dict[str, Any]]] = {
    **{f"default tiles, {rows}": (Smooth, (1, 1, rows, columns), {}) for rows, columns in ((100, 100), (512, 200), (256, 256))},
    "upscaling": (lambda: Smooth(scale=2), (1, 1, 40, 21), {"patch_size": 16, "overlap": 2}),
    "stride, 16": (by_fours, (2, 1, 60, 76), {"patch_size": 16, "overlap": 9}),
    "stride, 21": (by_fours, (2, 1, 60, 76), {"patch_size": 21, "overlap": 13}),
    "stride, oblong": (by_fours, (2, 1, 60, 76), {"patch_size": (18, 26), "overlap": (9, 10)}),
}  # fmt: skip


@pytest.mark.parametrize("name", TILED)
def test_tiles_of_all_kinds_of_networks_fit_together(ctx: DistributedContext, name: str) -> None:
    make, shape, options = TILED[name]
    net, x = make().requires_grad_(False), image(*shape)
    found, whole, rim = distribute(net, ctx, type_object="denoiser", **options)(x), net(x), 8 if "stride" in name else 4
    assert found.shape == whole.shape
    assert difference(*(each[..., rim:-rim, rim:-rim] for each in (found, whole))) < SINGLE


class Conditioned(torch.nn.Module):  # type: ignore[misc]
    """A network whose images come with a conditioning tensor for each of them."""

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        beside = torch.cat([x, given.flatten(1)[:, :2, None, None].expand(-1, -1, *x.shape[2:])], 1)
        return beside[:, :1] * beside[:, 1:2] + beside[:, 2:3]


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 1, 1), (4, 3, 5), (4, 1, 7, 9), (1, 2), (1, 2, 3)])
def test_the_conditioning_of_an_image_goes_with_its_tiles(ctx: DistributedContext, shape: tuple[int, ...]) -> None:
    x, given, net = image(shape[0], 1, 40, 20), image(*shape), Conditioned()
    for options in ({}, {"max_batch_size": 1}):
        assert difference(tiled(ctx, net, **options)(x, given), net(x, given)) < SINGLE
    x.requires_grad_()
    found = [torch.autograd.grad((f(x, given=given) ** 2).sum(), x)[0] for f in (tiled(ctx, net, overlap=0), net)]
    assert difference(*found) < SINGLE


def test_tiles_along_one_axis_or_three_or_by_a_users_strategy(ctx: DistributedContext) -> None:
    x = image(1, 2, 20, 9, 33)
    for options in ({"tiling_strategy": "basic"}, {"tiling_dims": 3, "patch_size": 4}, {"tiling_dims": (-1, -3)}):
        assert torch.equal(tiled(ctx, torch.nn.ReLU(), **options)(x), x.relu())
    x = image(1, 1, 40, 40)
    strategy = strategies.TilingStrategy(x.shape, tiling_dims=(-2, -1), patch_size=10, overlap=4)
    assert torch.equal(tiled(ctx, torch.nn.ReLU(), tiling_strategy=strategy)(x), x.relu())
    with pytest.raises(ConfigError, match=r"returned .* for tiles .*TilingStrategy.*'overlap_tiling'"):
        tiled(ctx, Smooth(scale=2), tiling_strategy=strategy)(x)


RESULTS: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("the processor returned an object of type NoneType", lambda x: None),
    ("the processor returned an object of type tuple", lambda x: (x, x)),
    ("the processor returned an object of type ndarray", lambda x: x.numpy()),
    (r"a tensor of shape \(\) for tiles of shape \(4, 1, 20, 20\)", lambda x: x.sum()),
    (r"a tensor of shape \(0, 1, 20, 20\)", lambda x: x[:0]),
]


def test_results_that_are_not_images_and_images_without_pixels_are_refused(ctx: DistributedContext) -> None:
    for message, processor in RESULTS:
        with pytest.raises(TaskFailed, match=f"denoise of tile 0 .*{message}"):
            tiled(ctx, processor)(image(1, 1, 24, 24))
    with pytest.raises(ConfigError, match=r"the shape \(0, 1, 24, 24\): there are no pixels"):
        tiled(ctx, Smooth())(torch.zeros(0, 1, 24, 24))
    with pytest.raises(ConfigError, match=r"not computed yet.* compute\(\)"):
        tiled(ctx, Smooth())(da.zeros((1, 1, 20, 24), dtype="float32"), torch.ones(1, 1, 20, 24))


def inside(x: torch.Tensor, net: Any) -> torch.Tensor:
    result: torch.Tensor = net(x)
    return result


def test_weights_without_gradients_and_running_statistics_are_reported_once(ctx: DistributedContext) -> None:
    net, x = torch.nn.Conv2d(1, 1, 3, padding=1), image(1, 1, 20, 20).requires_grad_()
    norm = torch.nn.Sequential(torch.nn.BatchNorm2d(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in (lambda z: net(z), net.forward, functools.partial(inside, net=net)):
            denoiser = tiled(ctx, function)
            with torch.no_grad():
                denoiser(x)
            with pytest.raises(UserWarning, match=r"weights that want gradients \((Conv2d|.*)\.\w+\)"):
                denoiser(x)
            denoiser(x)
        tiled(ctx, net)(x)
        denoiser = tiled(ctx, norm.eval(), unsafe=True)
        tiled(ctx, norm)(x)
        tiled(ctx, torch.nn.BatchNorm2d(1, track_running_stats=False).train(), unsafe=True)(x)
        denoiser(x)
        norm.train()
        with pytest.raises(UserWarning, match=r"layers with running statistics \(0\).* Write eval\(\)"):
            denoiser(x)
        denoiser(x)


class Normalised(torch.nn.Module):  # type: ignore[misc]
    """A normalisation over all pixels of an image, with a noise level."""

    def __init__(self) -> None:
        super().__init__()
        there, back = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Conv2d(4, 1, 3, padding=1)
        self.layers = torch.nn.Sequential(there, torch.nn.GroupNorm(2, 4), back)

    def forward(self, x: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * sigma
        return result


def attending(x: torch.Tensor) -> torch.Tensor:
    pixels = x.flatten(2).transpose(1, 2)
    return ((pixels @ pixels.transpose(1, 2)).softmax(-1) @ pixels).transpose(1, 2).reshape(x.shape)


def rows_alone(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


NOT_LOCAL = r"looks at the whole image.*unsafe=True"


GLOBAL = [
    (Normalised(), NOT_LOCAL),
    (attending, NOT_LOCAL),
    (rows_alone, NOT_LOCAL),
    (optim.PnP(Normalised()), NOT_LOCAL),
    (lambda x: x + torch.linspace(0, 1, x.shape[-1]), r"depends on the position of the tile.*unsafe=True"),
]


@pytest.mark.parametrize(("net", "words"), GLOBAL, ids=["norm", "attention", "rows", "prior", "position"])
def test_a_network_that_is_not_local_is_not_tiled(ctx: DistributedContext, net: Any, words: str) -> None:
    x = image(1, 1, 40, 40)
    denoiser = distribute(net, ctx, type_object="auto" if hasattr(net, "prox") else "denoiser", patch_size=16)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ConfigError, match=words):
            denoiser.prox(x, 1.0) if hasattr(net, "prox") else denoiser(x)


def test_it_is_refused_with_any_arguments_and_any_tiling_but_not_by_unsafe(ctx: DistributedContext) -> None:
    net, x = Normalised().requires_grad_(False), image(2, 1, 40, 40)
    strategy = strategies.TilingStrategy(x.shape, tiling_dims=(-2, -1), patch_size=10, overlap=4)
    calls: list[Callable[[], Any]] = [
        *(lambda s=s: tiled(ctx, net)(x, s) for s in (0.5, torch.tensor(0.5), x.abs(), torch.ones(2, 1, 1, 1))),
        lambda: tiled(ctx, net)(da.from_array(x.numpy())),
        lambda: tiled(ctx, net, tiling_strategy=strategy)(x),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="looks at the whole image"):
            call()
    assert difference(tiled(ctx, net, unsafe=True)(x), net(x)) > 0.01


def test_a_network_may_depend_on_the_whole_of_axes_that_are_not_cut(ctx: DistributedContext) -> None:
    """Each choice of cut axes is tried; a receptive field larger than the overlap is allowed."""
    rows = tiled(ctx, rows_alone, overlap=0)
    assert difference(rows(image(1, 1, 40, 16)), rows_alone(image(1, 1, 40, 16))) < SINGLE
    with pytest.raises(ConfigError, match="looks at the whole image"):
        rows(image(1, 1, 16, 40))
    assert rows(image(1, 1, 40, 16)).shape == (1, 1, 40, 16)
    net = Normalised().requires_grad_(False)
    assert difference(tiled(ctx, net, overlap=0)(image(1, 1, 16, 16)), net(image(1, 1, 16, 16))) < SINGLE
    assert tiled(ctx, torch.nn.AvgPool2d(41, 1, 20))(image(1, 1, 40, 40)).shape == (1, 1, 40, 40)


def test_a_network_that_fails_on_trial_windows_is_reported(ctx: DistributedContext) -> None:
    of_tiles = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 400), torch.nn.Unflatten(1, (1, 20, 20)))
    with torch.no_grad(), pytest.warns(UserWarning, match="fails on small windows"):
        tiled(ctx, of_tiles)(image(1, 1, 40, 40))


def test_a_tensor_deep_inside_an_argument_gets_no_gradient_in_silence(ctx: DistributedContext) -> None:
    scale: Callable[[torch.Tensor, Any], torch.Tensor] = lambda x, held: x * held["sigma"][0].sum()  # noqa: E731
    x, free, held = image(1, 1, 8, 8), {"sigma": [torch.ones(2)]}, {"sigma": [torch.ones(2, requires_grad=True)]}
    assert torch.equal(tiled(ctx, scale)(x, free), 2 * x)
    with torch.no_grad():
        assert torch.equal(tiled(ctx, scale)(x, held), 2 * x)
    with pytest.raises(ConfigError, match=r"shape \(2,\) wants a gradient inside another argument"):
        tiled(ctx, scale)(x, held)


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


# --- random numbers and state ---------------------------------------------------------------------


def test_a_generator_that_is_not_from_torch_is_reported(ctx: DistributedContext) -> None:
    rng, held = np.random.default_rng(0), torch.nn.Identity()
    held.rng = rng
    for drawing in (held, lambda x: x + rng.standard_normal()):
        with pytest.warns(UserWarning, match=r"numpy's Generator\) that is none of torch.* Write torch\.randn"):
            tiled(ctx, drawing, patch_size=8, overlap=1)(image(1, 1, 20, 20))


class Dropping(torch.nn.Module):  # type: ignore[misc]
    """Drops half of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("options", [{"overlap": 0}, {"max_batch_size": 1}, {"blending": "hann"}], ids=str)
def test_gradients_of_a_stochastic_denoiser_match_its_value(ctx: DistributedContext, options: Any) -> None:
    net, x = Dropping(), torch.ones(1, 1, 64, 64, requires_grad=True)
    value = tiled(ctx, net, **options)(x)
    by_image, by_weight = torch.autograd.grad(value.sum(), [x, net.weight])
    assert bool((value == 0).any())
    assert difference(by_weight, value.sum().reshape(1)) < SINGLE
    assert difference(by_image.sum(), value.sum()) < SINGLE
    if options.get("overlap") == 0:  # otherwise pixels near a seam are in several windows
        assert torch.equal(by_image, value)


def test_random_numbers_follow_from_seed_call_and_tile_or_from_a_generator(cluster: RunningCluster) -> None:
    found, noises, x = [], [], torch.ones(1, 1, 64, 64)
    for seed in (8, 8, 9):
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=seed) as opened:
            denoiser, other = (tiled(opened, Dropping(), overlap=0, max_batch_size=1) for _ in range(2))
            with torch.no_grad():
                found.append([denoiser(x), denoiser(x), other(x)])
            drawn = [physics.GaussianNoise(0.1, rng=torch.Generator().manual_seed(k)) for k in range(3)]
            stack = distribute([physics.Denoising(noise) for noise in drawn], opened)
            noises.append([each for _ in range(4) for each in stack(torch.zeros(1, 1, 9, 9))])
    assert difference(*found[:2]) == 0
    assert difference(*found[1:]) > 0
    tiles = torch.stack([value.reshape(4, 16, 4, 16).transpose(1, 2) for value in found[0]])
    assert len({tuple(tile.flatten().tolist()) for tile in tiles.reshape(-1, 16, 16)}) == 3 * 16
    assert difference(*noises[1:]) == 0, "a generator has its own seed"
    assert len({float(each.sum()) for each in noises[0]}) == 12


# --- parts of a batch -----------------------------------------------------------------------------


class Normed(torch.nn.Module):  # type: ignore[misc]
    """A network with batch norms of all kinds, used in another order than they are held in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = torch.nn.BatchNorm2d(3, affine=False, momentum=None)
        self.first = torch.nn.BatchNorm2d(4, momentum=0.3)
        self.middle = torch.nn.BatchNorm2d(3, track_running_stats=False)
        sizes = (1, 4), (4, 3), (3, 3), (3, 1)
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.unused = torch.nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, four = self.convolutions
        x = torch.relu(self.first(one(x)))
        x = torch.tanh(self.middle(two(x)))
        return four(self.last(three(x)))


def spread(ctx: DistributedContext, net: Any, images: int = 2, **options: Any) -> Any:
    return tiled(ctx, net, patch_size=64, images_per_task=images, **options)


def gradients(net: Any, call: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    result = call(*inputs)
    found = torch.autograd.grad((result * result).sum(), [*net.parameters(), *inputs], allow_unused=True)
    return [result.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("patch", [64, 16], ids=["whole images", "tiles"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (5, 1, 30, 28), (1, 1, 30, 28)], ids=str)
def test_images_with_what_goes_with_each_equal_the_network(ctx: Any, shape: Any, dtype: Any, patch: int) -> None:
    net = Smooth().to(dtype)
    x = image(5, 1, 30, 28, dtype=dtype).requires_grad_()
    level = (image(*shape, dtype=dtype).abs() + 0.5).requires_grad_()
    call = tiled(ctx, net, patch_size=patch, images_per_task=2)
    # At the rim of the image tiles are mirrored, and the network pads with zeros.
    truth = net if patch == 64 else tiled(ctx, net, patch_size=patch)
    assert difference(gradients(net, call, [x, level]), gradients(net, truth, [x, level])) < NEAR[dtype]
    strategy = strategies.TilingStrategy(x.shape, tiling_dims=(-2, -1), patch_size=10, overlap=4)
    with torch.no_grad():
        assert difference(call(x, sigma=level), truth(x, level)) < NEAR[dtype]
        for size in (None, 1, 2) if patch == 16 else ():
            found = tiled(ctx, net, tiling_strategy=strategy, max_batch_size=size)(x, level)
            assert difference(away_from_the_rim(found), away_from_the_rim(net(x, level))) < NEAR[dtype]


@pytest.mark.parametrize(
    ("images", "dtype"),
    [(2, torch.float32), *(thorough(n, dtype) for n in (1, 5) for dtype in NEAR), thorough(2, torch.float64)],
)
def test_training_with_batch_norm_follows_one_process(ctx: DistributedContext, images: int, dtype: torch.dtype) -> None:
    x, y = image(5, 1, 12, 14, dtype=dtype), image(5, 1, 12, 14, dtype=dtype).flip(-1)
    plain = Normed().to(dtype)
    ours = copy.deepcopy(plain)
    losses = []
    for net, call in ((ours, spread(ctx, ours, images)), (plain, plain)):
        steps = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for _ in range(4):
            steps.zero_grad()
            loss = (call(x) - y).square().mean()
            loss.backward()
            steps.step()
            losses.append(loss.detach())
    assert difference(losses[:4], losses[4:]) < NEAR[dtype]
    for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        # A bias before a layer that takes the mean away has no gradient but rounding.
        assert float((found - expected).abs().max()) < 10 * NEAR[dtype], name
    assert (int(ours.first.num_batches_tracked), int(ours.unused.num_batches_tracked)) == (4, 0)
    with torch.no_grad():
        assert difference(spread(ctx, ours.eval(), images)(x), plain.eval()(x)) < 10 * NEAR[dtype]


def test_batches_have_the_same_bits_on_any_workers(counts: list[DistributedContext], monkeypatch: Patch) -> None:
    monkeypatch.setattr("halotile.graphs.tree_sum.SMALL_BYTES", 0)  # a task for each batch
    found = []
    for each in counts:
        net, x = Normed().requires_grad_(), image(9, 1, 12, 14).requires_grad_()
        found.append([*gradients(net, spread(each, net, 1), [x]), *net.buffers()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_statistics_keep_their_digits_where_images_are_far_from_zero(ctx: DistributedContext) -> None:
    """As counts on a pedestal are: sums of squares would lose twice the digits."""
    x = image(5, 1, 12, 14, dtype=torch.float64) + 1e4
    plain = torch.nn.BatchNorm2d(1).double()
    ours = copy.deepcopy(plain)
    assert difference(spread(ctx, ours)(x).detach(), plain(x).detach()) < 1e-10
    assert difference(ours.running_var, plain.running_var) < 1e-10


class Forked(torch.nn.Module):  # type: ignore[misc]
    """A network whose way depends on its image."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(torch.nn.BatchNorm2d(1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.ways[int(x.mean() > 0)](x)


def test_statistics_that_would_not_be_those_of_the_batch_are_refused(ctx: DistributedContext) -> None:
    x, norm = image(3, 1, 20, 20), torch.nn.BatchNorm2d(1)
    by_tiles = r"training mode.*normalise by all pixels of a batch.*eval\(\).*GroupNorm"
    held = functools.partial(inside, net=torch.nn.BatchNorm2d(1, affine=False))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: tiled(ctx, torch.nn.Sequential(norm))(x), by_tiles),
        (lambda: spread(ctx, torch.nn.InstanceNorm2d(1, track_running_stats=True))(x), by_tiles),
        (lambda: spread(ctx, held)(x), by_tiles),
        (lambda: spread(ctx, norm)(da.from_array(x.numpy())), by_tiles),
        (lambda: spread(ctx, Forked(), 1)(torch.stack([x[0] - 9, x[1] + 9])), r"different layers of batch norm.*eval\(\)"),
        (lambda: spread(ctx, norm)(x[:1, :, :1, :1]), r"single pixel has no statistics"),
        (lambda: spread(ctx, norm, 0), r"images_per_task is 0.*Write 1 or more"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises(ConfigError, match=words):
            call()
    with pytest.raises(TaskFailed, match=r"used twice in a call.*two layers, or eval\(\)"):
        spread(ctx, torch.nn.Sequential(norm, torch.nn.Tanh(), norm))(x)
    assert int(norm.num_batches_tracked) == 0
    with torch.no_grad():
        assert difference(spread(ctx, norm.eval())(x), x / (1 + 1e-5) ** 0.5) < 1e-5
