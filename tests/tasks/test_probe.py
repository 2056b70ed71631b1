"""Receptive field, alignment and purity of networks and functions, found by trying them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn
from torch.nn import functional

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.cutting import Halo, rehearsed
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.probe import check_purity, probe
from tests.cases import thorough


def conv(into: int, out: int, size: int = 3, **options: Any) -> nn.Module:
    return nn.Conv2d(into, out, size, padding=options.pop("padding", size // 2), **options)


def conv_stack() -> nn.Module:
    return nn.Sequential(conv(1, 4), nn.ReLU(), conv(4, 4, 5), nn.ReLU(), conv(4, 1))


def deaf_to_nan() -> nn.Module:
    class Deaf(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = conv_stack()

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers(torch.nan_to_num(batch))
            return result

    return Deaf()


class UNet(nn.Module):  # type: ignore[misc]
    """Two strided levels with a skip connection around each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = conv(1, 4), conv(4, 1)
        self.down = nn.ModuleList([nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 2, stride=2)])
        self.middle = conv(4, 4)
        self.up = nn.ModuleList([nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 4, 2, stride=2)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        top = self.enter(batch)
        half = torch.relu(self.down[0](top))
        quarter = self.middle(torch.relu(self.down[1](half)))
        signal: torch.Tensor = self.leave(top + self.up[0](half + self.up[1](quarter)))
        return signal


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(1, 1, batch_first=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        small = nn.functional.avg_pool2d(batch, 16)
        tokens = small.flatten(2).movedim(1, 2)
        mixed = self.mix(tokens, tokens, tokens)[0].movedim(2, 1).reshape(small.shape)
        return batch + nn.functional.interpolate(mixed, scale_factor=16)


class Fourier(nn.Module):  # type: ignore[misc]
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(batch) * 0.5, s=tuple(batch.shape[2:]))


class Positions(nn.Module):  # type: ignore[misc]
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * torch.linspace(0, 1, batch.shape[-1], dtype=batch.dtype)


class Warm(nn.Module):  # type: ignore[misc]
    """Starts from where the last call ended."""

    last: torch.Tensor | float = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.last = batch + 0.1 * self.last
        return self.last


class InPlace(nn.Module):  # type: ignore[misc]
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mul_(0.5)


Use = Callable[..., UserNetwork]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Use:
    """A job's network that an importable module builds, always with the same weights."""

    def use(build: Callable[[], nn.Module], **options: Any) -> UserNetwork:
        def seeded() -> nn.Module:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                return build()

        module = types.ModuleType("lab")
        module.build = seeded  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lab", module)
        return UserNetwork(import_="lab:build", **options)

    return use


LOOKS: list[tuple[Callable[[], nn.Module], int, tuple[int, int], dict[str, Any]]] = [
    (nn.Identity, 2, (0, 1), {}),
    (conv_stack, 2, (4, 1), {}),
    (lambda: nn.Sequential(conv(1, 2, dilation=4, padding=4), conv(2, 1, dilation=8, padding=8)), 2, (12, 1), {}),
    (lambda: nn.Conv2d(1, 1, (3, 9), padding=(1, 4)), 2, (4, 1), {}),
    (deaf_to_nan, 2, (4, 1), {}),
    # A pooled or strided cell begins up to (stride - 1) pixels before the pixel it is asked about.
    (lambda: nn.Sequential(nn.MaxPool2d(2), conv(1, 2), nn.Upsample(scale_factor=2), conv(2, 1)), 2, (4, 2), {}),
    (UNet, 2, (9, 4), {}),
    (lambda: nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, 3, padding=1)), 3, (2, 1), {}),
    (lambda: nn.Sequential(conv(1, 4, 5), nn.PixelShuffle(2)), 2, (2, 1), {"scale": 2}),
    (lambda: conv(3, 2), 2, (1, 1), {"channels": (3, 2)}),
]


def test_a_network_is_found_to_look_exactly_as_far_as_it_does(network: Use) -> None:
    for number, (build, dims, expected, options) in enumerate(LOOKS):
        assert probe(network(build, **options), dims) == expected, number


def test_what_is_written_down_stays_when_the_rest_is_probed(network: Use) -> None:
    denoiser = network(UNet, receptive_field_=32)
    assert denoiser.receptive_field() is None
    found = denoiser.probed(*probe(denoiser, 2))
    assert (found.receptive_field(), found.alignment) == (32, 4)


def test_a_network_over_the_whole_image_is_refused(network: Use) -> None:
    rows: list[Callable[[], nn.Module]] = [Attention, Fourier]
    for build in (*rows, lambda: nn.Sequential(conv(1, 2), nn.InstanceNorm2d(2), conv(2, 1))):
        with pytest.raises(ConfigError, match="lab:build looks at the whole image"):
            probe(network(build), 2)


def test_a_network_that_cannot_be_tiled_is_refused_with_the_reason(network: Use) -> None:
    rows: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (Positions, {}, "depends on the position of the tile"),
        (lambda: nn.Conv2d(1, 1, 3), {}, "loses pixels at its edges has to pad"),
        (lambda: nn.Upsample(scale_factor=2), {}, r"Write scale: 2\."),
        (nn.Identity, {"scale": 2}, r"Write scale: 1\."),
        (lambda: conv(1, 3), {}, r"Write channels: \[1, 3\]\."),
        (lambda: nn.Sequential(conv(1, 3), nn.Upsample(scale_factor=2)), {}, r"Write channels: \[1, 3\], and write scale: 2"),
        (lambda: nn.Upsample(scale_factor=(2, 1)), {}, "has to grow by the same whole number"),
        (lambda: conv(3, 3), {}, r"lab:build failed .* It takes 3 channels: write channels: \[3, 3\]\."),
        (nn.Flatten, {}, r"Return a tensor of shape \(tiles, channels, \*spatial\)"),
        (lambda: nn.Threshold(2.0, float("inf")), {}, "returns NaN or infinity"),
    ]  # fmt: skip
    for build, options, message in rows:
        with pytest.raises(ConfigError, match=message):
            probe(network(build, **options), 2)


class RandomAlways(nn.Module):  # type: ignore[misc]
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + torch.rand_like(batch)


class Mixing(nn.Module):  # type: ignore[misc]
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum(0, keepdim=True) + batch.masked_fill(batch > 0.5, torch.inf)


def test_an_impure_network_is_refused(network: Use) -> None:
    rows: list[tuple[Callable[[], nn.Module], str]] = [
        (Warm, "lab:build returned two results for one tile"),
        (lambda: nn.Sequential(conv(1, 1), RandomAlways()), "lab:build returned two results for one tile"),
        (InPlace, "lab:build changes its input"),
        (Mixing, "another result where it is computed in one batch"),  # which infinity does not hide
    ]
    for build, message in rows:
        with pytest.raises(ConfigError, match=message):
            check_purity(network(build), 2)
    pointwise = GivenFunction(call=lambda image: np.where(image > 0.5, np.float32(np.inf), image), depth=0)
    check_purity(pointwise, 2)  # it may give infinity
    check_purity(network(lambda: nn.Sequential(conv(1, 1), nn.Dropout(0.5))), 2)  # dropout is off


def test_probing_leaves_the_global_random_numbers_alone(network: Use) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    probe(network(conv_stack), 2)
    assert torch.equal(torch.rand(3), expected)


class Ahead(nn.Module):  # type: ignore[misc]
    """The mean of the cell of a pixel and the 63 cells below it, and of it and those to the right; without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cells = functional.avg_pool2d(x.detach(), 8)
        below = functional.avg_pool2d(functional.pad(cells, (0, 0, 0, 63)), (64, 1), 1)
        right = functional.avg_pool2d(functional.pad(cells, (0, 63)), (1, 64), 1)
        return functional.interpolate(below + right, scale_factor=8)


def test_a_look_of_half_the_longest_window_is_found_on_both_axes(network: Use) -> None:
    assert probe(network(Ahead), 2) == (511, 8)


Image = NDArray[Any]


def above_noise(image: Image, times: float = 2.0) -> Image:
    level = np.median(np.abs(image - np.median(image)))
    return np.where(image > times * level, image, 0)


def logarithm(image: Image) -> Any:
    with np.errstate(invalid="ignore"):
        return np.log(image - 0.1)


def by_twos(image: Image) -> Image:
    for axis, length in enumerate(image.shape):
        every_other = image.take(range(0, length, 2), axis)
        image = every_other.repeat(2, axis).take(range(length), axis)
    return image


def stretched(image: Image) -> Any:
    return (image - image.min()) / (image.max() - image.min())


SOUND: dict[str, tuple[Callable[[Image], Image], int]] = {
    "running sums": (lambda image: ndimage.uniform_filter(image, 9), 4),
    "median": (lambda image: ndimage.median_filter(image, 5), 2),
    "gaussian": (lambda image: ndimage.gaussian_filter(image, 2, truncate=4), 8),
    "threshold": (lambda image: np.where(image > 0.25, image, 0), 0),
    "logarithm": (logarithm, 0),
    "zero": (lambda image: image * 0, 0),
}
WRONG: dict[str, tuple[Callable[[Image], Image], int]] = {
    "farther": (lambda image: ndimage.uniform_filter(image, 9), 3),
    "mean": (lambda image: image - image.mean(), 4),
    "least and most": (stretched, 8),
    "noise level": (above_noise, 8),
    "three deviations": (lambda image: above_noise(image, 3 * 1.4826), 8),
    "bright": (lambda image: np.where(image > image.mean(), image, np.nan), 4),
    "by twos": (by_twos, 2),
    "large depth": (lambda image: image - image.mean(), 70),
}


def tried(call: Callable[[Image], Image], depth: int, dims: int, tile: Tile | None = None) -> Halo:
    halo = Halo(((depth, depth),) * dims, 1, "given")
    return rehearsed(tile or Tile(), GivenFunction(call=call, depth=depth), halo, (500,) * dims)


@pytest.mark.parametrize("dims", [2, thorough(3)])
def test_a_function_with_the_right_depth_is_accepted(dims: int) -> None:
    for call, depth in SOUND.values():
        tried(call, depth, dims)


def test_a_depth_that_exceeds_the_memory_and_complex_numbers_are_refused_and_allowed_seams_taken() -> None:
    words = r"depth of 4000000: an image to check that on.*needs more memory than a worker has"
    with pytest.raises(ConfigError, match=words):
        tried(lambda image: image, 4_000_000, 2)
    with pytest.raises(ConfigError, match=r"returned complex numbers \(complex64\).*modulus"):
        tried(lambda image: image + 1j, 0, 2)
    tried(*WRONG["mean"], 2, Tile(seams="allow"))


@pytest.mark.parametrize("dims", [2, 3])
def test_one_that_looks_farther_is_refused(dims: int) -> None:
    for call, depth in WRONG.values():
        words = rf"looks farther than its depth of {depth}, or at the whole.*seams: allow"
        with pytest.raises(ConfigError, match=words):
            tried(call, depth, dims)
