"""Every denoiser: properties that all have, options, weights files, and results compared with a formula or another program."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import scipy.ndimage
import torch
from safetensors.torch import save_file
from torch import nn

from halotile.errors import ConfigError, WeightsError
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.rules.keys import build, faults_in, keys_of
from halotile.tasks.denoisers import dncnn, function, gaussian, median, nlm, tv, unet
from halotile.tasks.denoisers.common.layers import BlindUNet
from halotile.tasks.denoisers.common.weights import file_sha256, load_weights
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.trials.probe import check_purity, probe
from tests.support import job_of, noisy_image, run_inline, whole_picture, work_of, write_zarr
from tests.tasks import denoising
from tests.tasks.denoising import Image, apply, image, network, sharpen, tiles, whole

pytestmark = pytest.mark.usefixtures("lab")


# name -> (denoiser, numbers of axes to try); "dncnn" gets its weights from the fixture.
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gaussian": (lambda _: gaussian.Gaussian(sigma=1.7), (2, 3)),
    "gaussian narrow": (lambda _: gaussian.Gaussian(sigma=0.4, truncate=2.0), (2,)),
    "median 1": (lambda _: median.Median(size=1), (2,)),
    "median 3": (lambda _: median.Median(size=3), (2, 3)),
    "median 5": (lambda _: median.Median(size=5), (2,)),
    "median 9": (lambda _: median.Median(size=9), (2,)),
    "tv": (lambda _: tv.TotalVariation(strength=0.1, iterations=13), (2, 3)),
    "tv as a prior": (lambda _: tv.Proximal(strength=0.1, iterations=13), (2, 3)),
    "tv in noise levels": (lambda _: tv.TotalVariation(strength=1.5, iterations=4, sigma=0.1), (2,)),
    "nlm": (lambda _: nlm.NonLocalMeans(strength=0.2, patch=5, distance=3), (2,)),
    "nlm in noise levels": (lambda _: nlm.NonLocalMeans(strength=0.8, patch=3, distance=2, sigma=0.1), (2, 3)),
    "dncnn": (lambda file: dncnn.DnCNN(depth=denoising.NETWORK_DEPTH, width=denoising.NETWORK_WIDTH, weights=str(file)), (2,)),
    "torch": (lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2), (2,)),
    "torch at a level": (lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2, sigma=0.5), (2,)),
    "torch doubling": (lambda _: UserNetwork(import_="lab:network", options={"scale": 2}, receptive_field_=3, alignment_=2, scale=2), (2,)),
    "function": (lambda _: function.Function(import_="lab:sharpen", options={"amount": 0.3}, depth=2), (2, 3)),
    "given function": (lambda _: function.GivenFunction(call=sharpen, depth=2), (2,)),
}  # fmt: skip


EVERY = [pytest.param(make, dims, id=f"{name}-{dims}d") for name, (make, axes) in CASES.items() for dims in axes]


@pytest.mark.parametrize(("make", "dims"), EVERY)
def test_a_denoiser_keeps_every_promise(make: Any, dims: int, dncnn_file: Path) -> None:
    """Tiles have the bits of the whole, it looks as far as it declares, is pure, keeps tiles of a batch apart, and travels."""
    denoiser, pixels = make(dncnn_file), image(dims)
    expected = whole(denoiser, pixels)
    for tile in denoising.TILES[dims]:
        tile = tuple(-(-n // denoiser.alignment) * denoiser.alignment for n in tile)
        for place, result in tiles(denoiser, pixels, tile):
            assert result.tobytes() == expected[place].tobytes(), (tile, place)
    assert (denoiser.receptive_field(), denoiser.alignment) == probe(denoiser, dims)
    check_purity(denoiser, dims)
    model = denoiser.build()
    batch = torch.rand((3, 1) + (50,) * dims, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together, alone = model(batch), torch.cat([model(tile) for tile in batch.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert pickle.loads(pickle.dumps(denoiser)) == denoiser
    assert dims in denoiser.dims
    assert denoiser.bytes_per_pixel() > 0


def test_double_precision_stays_double_and_a_noise_level_of_zero_keeps_the_pixel() -> None:
    for name in ("gaussian", "median 3", "median 9", "tv", "nlm", "function"):
        denoiser, pixels = CASES[name][0](None), image(2, "float64")
        result = whole(denoiser, pixels)
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, whole(denoiser, pixels.astype(np.float32)), atol=2e-5)
    for name in ("tv", "nlm"):
        kept = whole(CASES[name][0](None), image(2), sigma=np.zeros_like(image(2)))
        np.testing.assert_allclose(kept, image(2), atol=1e-6)


@pytest.mark.parametrize("name", ["tv", "tv in noise levels", "nlm", "nlm in noise levels", "torch at a level"])
def test_a_noise_map_is_tiled_along(name: str) -> None:
    denoiser = CASES[name][0](None)
    if denoiser.sigma is None:
        # Neither is a number in float32, nor in float64.
        denoiser = dataclasses.replace(denoiser, strength=1.7, sigma=0.13)
    pixels = image(2)
    level = np.full_like(pixels, denoiser.sigma)
    assert np.array_equal(whole(denoiser, pixels, sigma=level), whole(denoiser, pixels))
    level[:, ::3] *= 0.0
    expected = whole(denoiser, pixels, sigma=level)
    assert np.isfinite(expected).all()
    for place, result in tiles(denoiser, pixels, (50, 64), sigma=level):
        assert result.tobytes() == expected[place].tobytes()


def test_auto_waits_for_the_noise_level() -> None:
    rows: list[Any] = [kind(strength=0.8, sigma="auto") for kind in (tv.TotalVariation, nlm.NonLocalMeans)]
    rows += [UserNetwork(import_="lab:network", sigma="auto")]
    for denoiser in rows:
        assert denoiser.wants_noise_level
        assert "sigma" in denoiser.side_inputs
        with pytest.raises(ConfigError, match="the noise level of the image was not estimated"):
            apply(denoiser, image(2))
        leveled = denoiser.with_noise_level(0.2)
        assert not leveled.wants_noise_level
        assert np.array_equal(apply(leveled, image(2)), apply(dataclasses.replace(denoiser, sigma=0.2), image(2)))


BAD_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (gaussian.Gaussian, {"sigma": 0}, "sigma is 0"), (gaussian.Gaussian, {"sigma": float("nan")}, "sigma is nan"),
    (gaussian.Gaussian, {"sigma": 1.0, "truncate": -1}, "truncate is -1"),
    (median.Median, {"size": 4}, "Write 3 or 5"), (median.Median, {"size": -3}, "size is -3"), (median.Median, {"size": 3.0}, "size is 3.0"),
    (tv.TotalVariation, {"strength": -0.1}, "strength is -0.1"),
    (tv.TotalVariation, {"strength": 0.1, "iterations": 0}, "iterations is 0"),
    (tv.TotalVariation, {"strength": 0.1, "iterations": True}, "iterations is True"),
    (tv.TotalVariation, {"strength": 0.1, "sigma": "guess"}, "sigma is 'guess'"),
    (tv.TotalVariation, {"strength": 0.1, "sigma": 0.0}, "sigma is 0.0"),
    (nlm.NonLocalMeans, {"strength": float("inf")}, "strength is inf"),
    (nlm.NonLocalMeans, {"strength": 1.0, "patch": 2}, "Write 1 or 3"),
    (nlm.NonLocalMeans, {"strength": 1.0, "distance": 0}, "distance is 0"),
    (dncnn.DnCNN, {"weights": "w.pth", "depth": 1}, "depth is 1"), (dncnn.DnCNN, {"weights": "w.pth", "width": 0}, "width is 0"),
    (dncnn.DnCNN, {"weights": "w.pth", "channels": (1, 3)}, r"Write \[1, 1\]"),
    (dncnn.DnCNN, {"weights": "w.pth", "residual": "both"}, "residual is 'both'"),
    (dncnn.DnCNN, {"weights": "w.pth", "sha256": "abc"}, "sha256 is 'abc': it must have 64 hexadecimal digits"),
    (dncnn.DnCNN, {"weights": "https://x.y/z.pth"}, "weights is 'https://x.y/z.pth': .*local files"),
    (UserNetwork, {"import_": "a:b", "weights": "w.pth", "sha256": "g" * 64}, "64 hexadecimal digits"),
    (UserNetwork, {"import_": "a:b", "weights": "s3://x/z.pth"}, "local files"),
    (UserNetwork, {"import_": "package.module"}, "package.module:build"),
    (UserNetwork, {"import_": "os:system('x')"}, "does not name a Python object"),
    (UserNetwork, {"import_": "a:b", "channels": (0, 1)}, "channels is"),
    (UserNetwork, {"import_": "a:b", "scale": 0}, "scale is 0"),
    (UserNetwork, {"import_": "a:b", "receptive_field_": -1}, "receptive_field is -1"),
    (UserNetwork, {"import_": "a:b", "alignment_": 0}, "alignment is 0"),
    (UserNetwork, {"import_": "a:b", "sha256": "0" * 64}, "without weights"),
    (function.Function, {"import_": "a b", "depth": 1}, "import is 'a b'"),
    (function.Function, {"import_": "a:b", "depth": -1}, "depth is -1"), (function.GivenFunction, {"call": 3, "depth": 1}, "call is 3"),
]  # fmt: skip


def test_options_are_read_from_a_job_file_and_a_bad_one_is_refused_with_what_to_write() -> None:
    for kind, options in JOB_OPTIONS:
        keys = keys_of(kind)
        assert faults_in(keys, options) == {}
        built, faults = build(kind, keys, options, {})
        assert isinstance(built, kind)
        assert (faults, list(faults_in(keys, {**options, "stranger": 1}))) == ({}, [("stranger",)])
        assert not any(key.endswith("_") for key in keys)
    for kind, options, message in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=message):
            kind(**options)


JOB_OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (gaussian.Gaussian, {"sigma": 2}), (median.Median, {"size": 3}), (tv.TotalVariation, {"strength": 0.1, "sigma": "auto"}),
    (nlm.NonLocalMeans, {"strength": 0.1, "sigma": 0.2}), (dncnn.DnCNN, {"weights": "w.pth", "channels": [3, 3]}),
    (UserNetwork, {"import": "a:b", "options": {"depth": 3}, "receptive_field": 7, "bytes_per_pixel": 100}),
    (function.Function, {"import": "a:b", "depth": 2}),
]  # fmt: skip


def test_gaussian_and_median_are_the_filters_of_scipy() -> None:
    for dims, (sigma, truncate) in itertools.product((2, 3), ((0.6, 4.0), (2.0, 4.0), (3.3, 2.5))):
        pixels = image(dims)
        result = whole(gaussian.Gaussian(sigma=sigma, truncate=truncate), pixels)
        expected = scipy.ndimage.gaussian_filter(pixels.astype(float), sigma, mode="reflect", truncate=truncate)
        np.testing.assert_allclose(result, expected, atol=5e-7)
    for dims, size in ((2, 3), (2, 5), (2, 7), (2, 9), (3, 3), (3, 5)):
        pixels = np.round(image(dims), 2)  # with ties
        expected = scipy.ndimage.median_filter(pixels, size, mode="reflect")
        assert np.array_equal(whole(median.Median(size=size), pixels), expected), (dims, size)
    pixels = image(2)
    pixels[60, 70] = np.nan  # a missing pixel passes on to its windows
    for size, reach in ((3, 1), (9, 4)):
        missing = np.zeros(pixels.shape, bool)
        missing[60 - reach : 61 + reach, 70 - reach : 71 + reach] = True
        assert np.array_equal(np.isnan(whole(median.Median(size=size), pixels)), missing)


def test_tv_takes_the_steps_of_chambolle() -> None:
    from skimage.restoration import denoise_tv_chambolle

    for dims, steps in itertools.product((2, 3), (1, 20, 100)):
        pixels = image(dims)
        expected = denoise_tv_chambolle(pixels, weight=0.1, eps=0, max_num_iter=steps + 1)
        found = whole(tv.TotalVariation(strength=0.1, iterations=steps), pixels)
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
    result = whole(nlm.NonLocalMeans(strength=strength, patch=5, distance=6, sigma=sigma), pixels)
    for at in ((0, 0), (60, 70), (136, 3), (7, 170)):
        expected = weighed_by_hand(pixels, at, strength * (sigma or 1.0), sigma or 0.0)
        assert result[at] == pytest.approx(expected, abs=2e-6), at


DEEP = ["in_conv", *(f"conv_list.{i}" for i in range(12)), "out_conv"]


FLAT = [f"model.{2 * i}" for i in range(14)]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("keys", "sign"), [(DEEP, 1), (FLAT, -1), ([f"net.{k}" for k in FLAT], -1)])
def test_dncnn_reads_the_usual_layouts_in_order(tmp_path: Path, keys: list[str], sign: int, suffix: str) -> None:
    import safetensors.torch

    tensors, path = denoising.dncnn_tensors(keys, width=6), tmp_path / f"net{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(tensors, path)
    pixels = image(2)
    signal = torch.from_numpy(pixels)[None, None]
    for key in keys:
        signal = nn.functional.conv2d(signal, tensors[f"{key}.weight"], tensors[f"{key}.bias"], padding=1)
        signal = signal if key == keys[-1] else signal.relu()
    stack, denoiser = signal[0, 0].numpy(), dncnn.DnCNN(depth=14, width=6, weights=str(path))
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


def test_weights_that_do_not_fit_dncnn_are_refused(dncnn_file: Path, tmp_path: Path) -> None:
    fitting = dncnn.DnCNN(depth=denoising.NETWORK_DEPTH, width=denoising.NETWORK_WIDTH, weights=str(dncnn_file))
    for options, message in MISFITS:
        with pytest.raises(WeightsError, match=message):
            dataclasses.replace(fitting, **options).build()
    tensors = denoising.dncnn_tensors(FLAT)
    del tensors["model.4.bias"]
    tensors["model.5.running_mean"] = torch.zeros(16)
    torch.save(tensors, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match=r"missing model\.4\.bias; unexpected model\.5\.running_mean"):
        dncnn.DnCNN(depth=14, width=denoising.NETWORK_WIDTH, weights=str(tmp_path / "net.pth")).build()


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


def test_a_denoiser_that_cannot_be_built_is_refused_with_the_reason_and_a_function_may_work_in_place() -> None:
    for reference, options, message in [
        ("lab:not_a_network", {}, "returned a str"),
        ("lab:number", {}, "Write the name of a function"),
        ("lab:nothing", {}, "Write a name that the module defines"),
        ("no_such_lab:build", {}, "no module 'no_such_lab'"),
        ("lab:network", {"scal": 2}, "with options .* failed: TypeError"),
    ]:
        with pytest.raises(ConfigError, match=message):
            UserNetwork(import_=reference, options=options).build()
    calls: list[Any] = [lambda image: image[1:], lambda image: 3.0]
    for call in calls:
        with pytest.raises(ConfigError, match="returns an array of the shape of its input"):
            apply(function.GivenFunction(call=call, depth=1), image(2))
    pixels, doubling = image(2), function.GivenFunction(call=lambda x: np.multiply(x, 2, out=x), depth=0)
    assert np.array_equal(apply(doubling, pixels), 2 * image(2))
    assert np.array_equal(pixels, image(2))


@pytest.mark.parametrize("given", ["number", "map", "strength alone"])
@pytest.mark.parametrize("kind", [tv.TotalVariation, nlm.NonLocalMeans])
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


@pytest.mark.parametrize("kind", [tv.TotalVariation, nlm.NonLocalMeans])
def test_a_huge_level_at_one_pixel_changes_no_other_and_a_tiny_strength_none(kind: Any) -> None:
    """Bad pixels are marked so; the unit of a tile must not follow them."""
    pixels = torch.rand((1, 1, 60, 60), generator=torch.Generator().manual_seed(0))
    levels = torch.full_like(pixels, 0.3)
    levels[0, 0, 5, 5] = 1e15
    model: Any = kind(strength=1.0).build()
    whole, part = model(pixels, sigma=levels), model(pixels[..., 20:], sigma=levels[..., 20:])
    assert torch.equal(whole[..., 45:], part[..., 25:])
    tiny: Any = kind(strength=1e-33).build()
    assert torch.equal(tiny(1e6 * pixels), 1e6 * pixels)


def saved(path: Path, channels: int = 1, width: int = 4, levels: int = 2) -> Path:
    torch.manual_seed(levels)
    network = BlindUNet(channels, width, levels)
    network.mean.fill_(0.4)
    network.deviation.fill_(0.2)
    save_file(network.state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("shape", "axes", "channels"), [((203, 187), "yx", 1), ((3, 90, 101), "tyx", 1), ((2, 131, 90), "cyx", 2)]
)
def test_tiles_of_a_unet_have_the_bits_of_the_whole(tmp_path: Path, shape: Any, axes: str, channels: int) -> None:
    """The network pads with zeros, which are pixels of the mean brightness: at the rim it sees the image continued instead."""
    options = {"weights": str(saved(tmp_path / "w.safetensors", channels))}
    even = np.full(shape, 5, np.float32)
    for number, pixels in enumerate((noisy_image(shape, "float32"), even)):
        source = write_zarr(tmp_path / f"in-{number}.zarr", pixels, axes=axes)
        results = []
        for tile in (48, 64, 256) if pixels is not even else (64,):
            job = job_of(source, (tmp_path / f"{tile}-{number}.zarr"), "unet", options, tile={"size": tile}, shard=64)
            results.append(run_inline(job))
        assert all(np.array_equal(result, results[0]) for result in results)
        if pixels is even:
            assert np.ptp(results[0], axis=(-2, -1)).max() < 1e-5
        elif channels == 1:
            expected = whole_picture(job, pixels, work_of(make_plan(job)).task.tiling.depth[0][0])
            assert np.array_equal(results[0], expected)


def test_training_has_the_numbers_of_its_use() -> None:
    for levels in (1, 2, 3):
        network = BlindUNet(2, 4, levels).double()
        image, weights = torch.randn(2, 3, 2, 21, 18, dtype=torch.float64)
        results = []
        for training in (True, False):
            network.train(training)
            part = image.clone().requires_grad_()
            result = network(part)
            results.append([result, *torch.autograd.grad(result, [part, *network.parameters()], weights)])
        for trained, used in zip(*results, strict=True):
            assert torch.allclose(trained, used, rtol=0, atol=1e-12 * float(used.detach().abs().max()))


def test_weights_of_another_network_are_refused_and_a_file_says_how_wide_and_deep_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    assert unet.UNet(weights=str(saved(path, channels=3, width=6, levels=3))).architecture == unet.Architecture(3, 6, 3)
    rows: list[Any] = [("conv.weight", (3, 1, 3, 3), r"it has no 'last\.weight'")]
    rows += [("last.weight", (1, 4), r"last\.weight is \(1, 4\)")]
    for name, shape, why in (*rows, ("last.weight", (1, 4, 1, 1), r"it has no 'up\.0\.0\.weight'")):
        save_file({name: torch.zeros(shape)}, path)
        with pytest.raises(WeightsError, match=why):
            unet.UNet(weights=str(path)).check()
    save_file(BlindUNet(1, 4, 2).state_dict() | {"down.0.0.weight": torch.zeros(5, 1, 3, 3)}, path)
    with pytest.raises(WeightsError, match=r"down.0.0.weight is \(5, 1, 3, 3\) instead of \(4, 1, 3, 3\)"):
        unet.UNet(weights=str(path)).build()
    with pytest.raises(WeightsError, match="cannot be opened"):
        _ = unet.UNet(weights=str(tmp_path / "none.safetensors")).channels


TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def save(path: Path, content: Any = None) -> Path:
    content = TENSORS if content is None else content
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def test_tensors_come_back_as_they_were_saved_and_the_checksum_is_compared(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".pth", ".pt"):
        path, wrong = save(tmp_path / f"net{suffix}"), "0" * 64
        right = hashlib.sha256(path.read_bytes()).hexdigest()
        assert file_sha256(path) == right
        for checksum in (None, right.upper()):
            loaded = load_weights(path, checksum)
            assert loaded.keys() == TENSORS.keys()
            assert all(torch.equal(loaded[key], tensor) for key, tensor in TENSORS.items())
        with pytest.raises(WeightsError, match=rf"(?s){wrong}.*{right}"):
            load_weights(path, wrong)
    for wrapper in ("state_dict", "params"):
        path = save(tmp_path / "net.pth", {wrapper: TENSORS, "epoch": 7})
        assert load_weights(path).keys() == TENSORS.keys()


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    rows: list[Any] = [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))]
    for write in rows:
        path, mark = tmp_path / "net.pth", tmp_path / "mark"
        write({"a.weight": Malicious(mark)}, path)
        words = r"holds pickled code, which is not run\. Save only the tensors"
        with pytest.raises(WeightsError, match=words) as failed:
            load_weights(path)
        assert "weights_only" not in str(failed.value)
        assert not mark.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_beyond_memory_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    path = save(tmp_path / f"w{suffix}")
    monkeypatch.setattr(safetensors.torch, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(MemoryError):
        load_weights(path)


def test_what_is_not_a_weights_file_is_refused(tmp_path: Path) -> None:
    for name, target in {"a.pth": "b.pth", "b.pth": "a.pth"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    for name in ("folder.pth", "unfinished.safetensors.run"):
        (tmp_path / name).mkdir()
    for name in ("cut.pth", "cut.safetensors"):
        path = save(tmp_path / name)
        path.write_bytes(path.read_bytes()[:-20])
    for name in ("net.npz", "unfinished.safetensors"):
        (tmp_path / name).touch()
    contents: dict[str, Any] = {"list.pth": [1, 2], "empty.pth": {}, "numbers.pth": {"lr": 0.1}}
    for name, content in contents.items():
        save(tmp_path / name, content)
    no_files = {
        "nowhere.pth": "cannot be opened .*No such file", "a.pth": "cannot be opened .*symbolic links",
        "folder.pth": "cannot be opened .Is a directory.*Write the path of a weights file",
    }  # fmt: skip
    rows = no_files | {
        "cut.pth": "damaged", "cut.safetensors": "not a complete safetensors", "list.pth": "no state dictionary",
        "unfinished.safetensors": r"in .*/unfinished.safetensors.run has not written it yet", "empty.pth": "no state dictionary",
        "numbers.pth": "not tensors: lr", "net.npz": "ends with one of .safetensors",
    }  # fmt: skip
    for name, message in rows.items():
        with pytest.raises(WeightsError, match=message):
            load_weights(tmp_path / name)
    for name in no_files:
        with pytest.raises(WeightsError, match="Write the path"):
            file_sha256(tmp_path / name)
