"""Results of each denoiser, compared with its formula or another program, and refusals of what cannot be built."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import nn

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.median import Median
from halotile.tasks.denoisers.nlm import NonLocalMeans
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.denoisers.tv import TotalVariation
from tests.tasks.denoising import NETWORK_DEPTH, NETWORK_WIDTH, Image, apply, dncnn_tensors, image, network, whole

pytestmark = pytest.mark.usefixtures("lab")


def test_gaussian_and_median_are_the_filters_of_scipy() -> None:
    for dims, (sigma, truncate) in itertools.product((2, 3), ((0.6, 4.0), (2.0, 4.0), (3.3, 2.5))):
        pixels = image(dims)
        result = whole(Gaussian(sigma=sigma, truncate=truncate), pixels)
        expected = scipy.ndimage.gaussian_filter(pixels.astype(float), sigma, mode="reflect", truncate=truncate)
        np.testing.assert_allclose(result, expected, atol=5e-7)
    for dims, size in ((2, 3), (2, 5), (2, 7), (2, 9), (3, 3), (3, 5)):
        pixels = np.round(image(dims), 2)  # with ties
        expected = scipy.ndimage.median_filter(pixels, size, mode="reflect")
        assert np.array_equal(whole(Median(size=size), pixels), expected), (dims, size)


def test_median_passes_a_missing_pixel_on_to_its_windows() -> None:
    pixels = image(2)
    pixels[60, 70] = np.nan
    for size in (3, 9):
        reach = size // 2
        expected = np.zeros(pixels.shape, bool)
        expected[60 - reach : 61 + reach, 70 - reach : 71 + reach] = True
        assert np.array_equal(np.isnan(whole(Median(size=size), pixels)), expected)


def test_tv_takes_the_steps_of_chambolle() -> None:
    from skimage.restoration import denoise_tv_chambolle

    for dims, steps in itertools.product((2, 3), (1, 20, 100)):
        pixels = image(dims)
        expected = denoise_tv_chambolle(pixels, weight=0.1, eps=0, max_num_iter=steps + 1)
        found = whole(TotalVariation(strength=0.1, iterations=steps), pixels)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def weighed_by_hand(pixels: Image, at: tuple[int, int], h: float, sigma: float) -> float:
    """One pixel of non-local means with patch 5 and distance 6, written out."""
    y, x = (i + 8 for i in at)
    around = np.pad(pixels.astype(float), 8, mode="symmetric")
    patch = around[y - 2 : y + 3, x - 2 : x + 3]
    total = weights = 0.0
    for dy, dx in itertools.product(range(-6, 7), repeat=2):
        other = around[y + dy - 2 : y + dy + 3, x + dx - 2 : x + dx + 3]
        weight = np.exp(-max(float(((patch - other) ** 2).mean()) - 2 * sigma**2, 0.0) / h**2)
        total, weights = total + weight * around[y + dy, x + dx], weights + weight
    return float(total / weights)


@pytest.mark.parametrize(("strength", "sigma"), [(0.3, None), (0.8, 0.2)])
def test_nlm_is_its_formula(strength: float, sigma: float | None) -> None:
    pixels = image(2)
    result = whole(NonLocalMeans(strength=strength, patch=5, distance=6, sigma=sigma), pixels)
    for at in ((0, 0), (60, 70), (136, 3), (7, 170)):
        expected = weighed_by_hand(pixels, at, strength * (sigma or 1.0), sigma or 0.0)
        assert result[at] == pytest.approx(expected, abs=2e-6), at


def test_nlm_denoises_about_as_well_as_scikit_image() -> None:
    from skimage.restoration import denoise_nl_means

    clean: Image = np.kron(np.indices((9, 9)).sum(0) % 2, np.ones((16, 16), np.float32))
    noisy = clean + 0.1 * np.random.default_rng(0).standard_normal(clean.shape).astype(np.float32)
    ours = whole(NonLocalMeans(strength=0.8, sigma=0.1), noisy)
    theirs = denoise_nl_means(noisy, patch_size=5, patch_distance=6, h=0.08, sigma=0.1, fast_mode=True)
    assert np.std(ours - clean) < 1.3 * np.std(theirs - clean) < 0.5 * np.std(noisy - clean)


DEEP = ["in_conv", *(f"conv_list.{i}" for i in range(12)), "out_conv"]
FLAT = [f"model.{2 * i}" for i in range(14)]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("keys", "sign"), [(DEEP, 1), (FLAT, -1), ([f"net.{k}" for k in FLAT], -1)])
def test_dncnn_reads_the_usual_layouts_in_order(tmp_path: Path, keys: list[str], sign: int, suffix: str) -> None:
    import safetensors.torch

    tensors = dncnn_tensors(keys, width=6)
    path = tmp_path / f"net{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(tensors, path)
    pixels = image(2)
    signal = torch.from_numpy(pixels)[None, None]
    for key in keys:
        signal = nn.functional.conv2d(signal, tensors[f"{key}.weight"], tensors[f"{key}.bias"], padding=1)
        signal = signal if key == keys[-1] else signal.relu()
    stack = signal[0, 0].numpy()
    denoiser = DnCNN(depth=14, width=6, weights=str(path))
    assert denoiser.files() == (path,)
    np.testing.assert_allclose(apply(denoiser, pixels), pixels + sign * stack, atol=1e-6)
    for word, factor in (("add", 1), ("subtract", -1)):
        changed = dataclasses.replace(denoiser, residual=word)  # type: ignore[arg-type]
        np.testing.assert_allclose(apply(changed, pixels), pixels + factor * stack, atol=1e-6)
    np.testing.assert_allclose(apply(dataclasses.replace(denoiser, residual="none"), pixels), stack, atol=1e-6)


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"depth": 6}, "5 convolutions instead of 6"),
    ({"width": 8}, r"model\.0\.weight is \(16, 1, 3, 3\) instead of \(8, 1, 3, 3\)"),
    ({"bias": False}, r"unexpected model\.0\.bias"),
    ({"channels": (3, 3)}, r"instead of \(16, 3, 3, 3\)"),
    ({"sha256": "0" * 64}, "it is another file"),
    ({"weights": "nowhere.pth"}, "cannot be opened"),
]


def test_weights_that_do_not_fit_dncnn_are_refused(dncnn_file: Path) -> None:
    fitting = DnCNN(depth=NETWORK_DEPTH, width=NETWORK_WIDTH, weights=str(dncnn_file))
    for options, message in MISFITS:
        with pytest.raises(WeightsError, match=message):
            dataclasses.replace(fitting, **options).build()


def test_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = dncnn_tensors(FLAT)
    del tensors["model.4.bias"]
    tensors["model.5.running_mean"] = torch.zeros(16)
    torch.save(tensors, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match=r"missing model\.4\.bias; unexpected model\.5\.running_mean"):
        DnCNN(depth=14, width=NETWORK_WIDTH, weights=str(tmp_path / "net.pth")).build()


def test_a_user_network_gets_its_own_weights(tmp_path: Path) -> None:
    other = network()
    nn.init.constant_(other.get_parameter("enter.bias"), 1.0)
    torch.save(other.state_dict(), tmp_path / "net.pth")
    denoiser = UserNetwork(import_="lab:network", weights=str(tmp_path / "net.pth"))
    with torch.inference_mode():
        expected = other(torch.from_numpy(image(2))[None, None, :136, :170])[0, 0].numpy()
    assert np.array_equal(apply(denoiser, image(2)[:136, :170]), expected)
    torch.save({"enter.weight": torch.zeros(1)}, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match="does not fit the network of lab:network"):
        denoiser.build()


def test_a_denoiser_that_cannot_be_built_is_refused_with_the_reason() -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("lab:not_a_network", {}, "returned a str"),
        ("lab:number", {}, "Write the name of a function"),
        ("lab:nothing", {}, "Write a name that the module defines"),
        ("no_such_lab:build", {}, "no module 'no_such_lab'"),
        ("lab:network", {"scal": 2}, "with options .* failed: TypeError"),
    ]
    for reference, options, message in rows:
        with pytest.raises(ConfigError, match=message):
            UserNetwork(import_=reference, options=options).build()
    calls: list[Any] = [lambda image: image[1:], lambda image: 3.0]
    for call in calls:
        with pytest.raises(ConfigError, match="returns an array of the shape of its input"):
            apply(GivenFunction(call=call, depth=1), image(2))


def test_a_function_may_work_in_place() -> None:
    def double(pixels: Image) -> Image:
        pixels *= 2
        return pixels

    pixels = image(2)
    before = pixels.copy()
    assert np.array_equal(apply(GivenFunction(call=double, depth=0), pixels), 2 * before)
    assert np.array_equal(pixels, before)


@pytest.mark.parametrize("given", ["number", "map", "strength alone"])
@pytest.mark.parametrize("kind", [TotalVariation, NonLocalMeans])
def test_the_unit_of_the_pixels_changes_no_bit(kind: Any, given: str) -> None:
    """As of fluxes in erg / s / cm², which are about 1e-17."""
    single = torch.rand((1, 1, 40, 50), generator=torch.Generator().manual_seed(0)) + 0.5

    def filtered(pixels: torch.Tensor, unit: float) -> torch.Tensor:
        sigma = 0.1 * unit if given == "number" else None
        strength = 0.1 * unit if given == "strength alone" else 1.0
        model: Any = kind(strength=strength, sigma=sigma).build()
        sides = {"sigma": torch.full_like(pixels, 0.1) * unit} if given == "map" else {}
        result: torch.Tensor = model(pixels * unit, **sides) / unit
        return result

    for pixels, exponents in ((single, (-90, -60, 60, 90)), (single.double(), (-500, -330, 330, 500))):
        expected = filtered(pixels, 1.0)
        for exponent in exponents:
            assert torch.equal(filtered(pixels, 2.0**exponent), expected), exponent


@pytest.mark.parametrize("kind", [TotalVariation, NonLocalMeans])
def test_a_huge_level_at_one_pixel_changes_no_other(kind: Any) -> None:
    """Bad pixels are marked so; the unit of a tile must not follow them."""
    pixels = torch.rand((1, 1, 60, 60), generator=torch.Generator().manual_seed(0))
    levels = torch.full_like(pixels, 0.3)
    levels[0, 0, 5, 5] = 1e15
    model: Any = kind(strength=1.0).build()
    whole, part = model(pixels, sigma=levels), model(pixels[..., 20:], sigma=levels[..., 20:])
    assert torch.equal(whole[..., 45:], part[..., 25:])


def test_a_tiny_strength_leaves_an_ordinary_image(tmp_path: Path) -> None:
    pixels = 1e6 * torch.rand((1, 1, 40, 40), generator=torch.Generator().manual_seed(0))
    for kind in (TotalVariation, NonLocalMeans):
        model: Any = kind(strength=1e-33).build()
        assert torch.equal(model(pixels), pixels)
