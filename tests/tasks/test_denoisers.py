"""What every denoiser has to keep, and what each one computes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import scipy.ndimage
import torch
from numpy.typing import NDArray
from torch import nn

from halotile.errors import ConfigError, WeightsError
from halotile.storage.grid import Grid
from halotile.storage.rim import Rim, read_window
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.function import Function, GivenFunction
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.median import Median
from halotile.tasks.denoisers.nlm import NonLocalMeans
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.probe import check_purity, probe

Picture = NDArray[Any]

NETWORK_DEPTH, NETWORK_WIDTH = 5, 16
SHAPES = {2: (138, 172), 3: (21, 33, 38)}
TILES = {2: ((49, 63), (137, 55), (31, 48)), 3: ((11, 17, 19),)}


def network(scale: int = 1, level: bool = False) -> nn.Module:
    """What the tables use as a user's own network."""

    class Lab(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv2d(1, 8, 3, padding=1)
            self.down = nn.Conv2d(8, 8, 2, stride=2)
            self.up = nn.ConvTranspose2d(8, 8 * scale**2, 2, stride=2)
            self.leave = nn.Sequential(
                nn.Conv2d(8 * scale**2, scale**2, 3, padding=1), nn.PixelShuffle(scale)
            )

        def forward(self, batch: torch.Tensor, sigma: Any = 1.0) -> torch.Tensor:
            result: torch.Tensor = self.leave(self.up(torch.relu(self.down(self.enter(batch * sigma)))))
            return result

    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Lab()


def sharpen(picture: Picture, amount: float = 0.5) -> Picture:
    """What the tables use as a user's own function; it looks 2 pixels far, in float64."""
    blurred = scipy.ndimage.gaussian_filter(picture.astype(float), 1.0, radius=2, mode="constant")
    sharp: Picture = picture + amount * (picture - blurred)
    return sharp


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own."""
    module = types.ModuleType("lab")
    vars(module).update(network=network, sharpen=sharpen, number=3, not_a_network=lambda: "text")
    monkeypatch.setitem(sys.modules, "lab", module)


def dncnn_tensors(keys: list[str], width: int = NETWORK_WIDTH, channels: int = 1) -> dict[str, torch.Tensor]:
    """Random weights of a DnCNN whose layers go by these names."""
    sizes = [channels] + [width] * (len(keys) - 1) + [channels]
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for key, into, out in zip(keys, sizes, sizes[1:], strict=False):
        tensors[f"{key}.weight"] = torch.randn((out, into, 3, 3), generator=generator) / (3 * into**0.5)
        tensors[f"{key}.bias"] = 0.1 * torch.randn(out, generator=generator)
    return tensors


@pytest.fixture(scope="session")
def dncnn_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "dncnn.pth"
    torch.save(dncnn_tensors([f"model.{2 * i}" for i in range(NETWORK_DEPTH)]), path)
    return path


# name -> (denoiser, numbers of axes to try); "dncnn" gets its weights from the fixture.
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gaussian": (lambda _: Gaussian(sigma=1.7), (2, 3)),
    "gaussian narrow": (lambda _: Gaussian(sigma=0.4, truncate=2.0), (2,)),
    "median 1": (lambda _: Median(size=1), (2,)),
    "median 3": (lambda _: Median(size=3), (2, 3)),
    "median 5": (lambda _: Median(size=5), (2,)),
    "median 9": (lambda _: Median(size=9), (2,)),
    "tv": (lambda _: TotalVariation(strength=0.1, iterations=13), (2, 3)),
    "tv in noise levels": (lambda _: TotalVariation(strength=1.5, iterations=4, sigma=0.1), (2,)),
    "nlm": (lambda _: NonLocalMeans(strength=0.2, patch=5, distance=3), (2,)),
    "nlm in noise levels": (lambda _: NonLocalMeans(strength=0.8, patch=3, distance=2, sigma=0.1), (2, 3)),
    "dncnn": (lambda file: DnCNN(depth=NETWORK_DEPTH, width=NETWORK_WIDTH, weights=str(file)), (2,)),
    "torch": (lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2), (2,)),
    "torch at a level": (
        lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2, sigma=0.5),
        (2,),
    ),
    "torch doubling": (
        lambda _: UserNetwork(
            import_="lab:network", options={"scale": 2}, receptive_field_=3, alignment_=2, scale=2
        ),
        (2,),
    ),
    "function": (lambda _: Function(import_="lab:sharpen", options={"amount": 0.3}, depth=2), (2, 3)),
    "given function": (lambda _: GivenFunction(call=sharpen, depth=2), (2,)),
}
EVERY = [
    pytest.param(make, dims, id=f"{name}-{dims}d") for name, (make, axes) in CASES.items() for dims in axes
]
every_denoiser = pytest.mark.parametrize(("make", "dims"), EVERY)


@dataclasses.dataclass(frozen=True)
class Stored:
    pixels: Picture

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.pixels.dtype)

    def read(self, region: Any) -> Picture:
        return np.ascontiguousarray(self.pixels[region.slices])


def picture(dims: int, dtype: str = "float32", seed: int = 0) -> Picture:
    return np.random.default_rng(seed).random(SHAPES[dims]).astype(dtype)


def apply(denoiser: Denoiser, pixels: Picture, **sides: Picture) -> Picture:
    """The model on one window."""
    tensors = {name: torch.from_numpy(side)[None, None] for name, side in sides.items()}
    with torch.inference_mode():
        result: Picture = denoiser.build()(torch.from_numpy(pixels)[None, None], **tensors)[0, 0].numpy()
    return result


def tiles(
    denoiser: Denoiser, pixels: Picture, tile: tuple[int, ...], **sides: Picture
) -> Iterator[tuple[tuple[slice, ...], Picture]]:
    """Denoise tile by tile: where each result goes, and the result."""
    reach = denoiser.receptive_field()
    assert reach is not None
    rim = Rim.everywhere(denoiser.boundary, pixels.ndim)
    depth, align = ((reach, reach),) * pixels.ndim, (denoiser.alignment,) * pixels.ndim
    for block in Grid(pixels.shape, tile, depth, align):
        cut = {
            name: read_window(Stored(side), block.window, rim) for name, side in {"": pixels, **sides}.items()
        }
        result = apply(denoiser, cut.pop(""), **cut)
        factor = (denoiser.scale,) * pixels.ndim
        start = rim.reach(block.window, pixels.shape)
        yield block.core.scale(factor).slices, result[block.core.relative_to(start).scale(factor).slices]


def whole(denoiser: Denoiser, pixels: Picture, **sides: Picture) -> Picture:
    """The result on the whole picture under the denoiser's own rim."""
    ((_, result),) = tiles(denoiser, pixels, pixels.shape, **sides)
    return result


@every_denoiser
def test_tiled_equals_whole_in_every_bit(make: Any, dims: int, dncnn_file: Path) -> None:
    denoiser = make(dncnn_file)
    pixels = picture(dims)
    expected = whole(denoiser, pixels)
    for tile in TILES[dims]:
        tile = tuple(-(-n // denoiser.alignment) * denoiser.alignment for n in tile)
        for place, result in tiles(denoiser, pixels, tile):
            assert result.tobytes() == expected[place].tobytes(), (tile, place)


@every_denoiser
def test_the_declared_receptive_field_is_the_true_one(make: Any, dims: int, dncnn_file: Path) -> None:
    denoiser = make(dncnn_file)
    assert (denoiser.receptive_field(), denoiser.alignment) == probe(denoiser, dims)


@every_denoiser
def test_every_denoiser_is_pure(make: Any, dims: int, dncnn_file: Path) -> None:
    check_purity(make(dncnn_file), dims)


@every_denoiser
def test_tiles_of_a_batch_do_not_see_each_other(make: Any, dims: int, dncnn_file: Path) -> None:
    model = make(dncnn_file).build()
    batch = torch.rand((3, 1) + (50,) * dims, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together, alone = model(batch), torch.cat([model(tile) for tile in batch.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@every_denoiser
def test_declarations_survive_pickling(make: Any, dims: int, dncnn_file: Path) -> None:
    denoiser = make(dncnn_file)
    assert pickle.loads(pickle.dumps(denoiser)) == denoiser
    assert dims in denoiser.dims
    assert denoiser.bytes_per_pixel() > 0


@pytest.mark.parametrize("name", ["gaussian", "median 3", "median 9", "tv", "nlm", "function"])
def test_double_precision_stays_double(name: str) -> None:
    denoiser = CASES[name][0](None)
    pixels = picture(2, "float64")
    result = whole(denoiser, pixels)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, whole(denoiser, pixels.astype(np.float32)), atol=2e-5)


@pytest.mark.parametrize(
    "name", ["tv", "tv in noise levels", "nlm", "nlm in noise levels", "torch at a level"]
)
@pytest.mark.parametrize("noise", ["even", "uneven"])
def test_a_noise_map_is_tiled_along(name: str, noise: str) -> None:
    denoiser = CASES[name][0](None)
    if denoiser.sigma is None:
        # Neither is a number in float32, nor in float64.
        denoiser = dataclasses.replace(denoiser, strength=1.7, sigma=0.13)
    pixels = picture(2)
    level = np.full_like(pixels, denoiser.sigma)
    if noise == "even":
        assert np.array_equal(whole(denoiser, pixels, sigma=level), whole(denoiser, pixels))
    level[:, ::3] *= 0.0
    expected = whole(denoiser, pixels, sigma=level)
    assert np.isfinite(expected).all()
    for place, result in tiles(denoiser, pixels, (50, 64), sigma=level):
        assert result.tobytes() == expected[place].tobytes()


@pytest.mark.parametrize("name", ["tv", "nlm"])
def test_a_noise_level_of_zero_keeps_the_pixel(name: str) -> None:
    denoiser = CASES[name][0](None)
    pixels = picture(2)
    np.testing.assert_allclose(whole(denoiser, pixels, sigma=np.zeros_like(pixels)), pixels, atol=1e-6)


@pytest.mark.parametrize(
    "denoiser",
    [
        TotalVariation(strength=1.5, sigma="auto"),
        NonLocalMeans(strength=0.8, sigma="auto"),
        UserNetwork(import_="lab:network", sigma="auto"),
    ],
)
def test_auto_waits_for_the_noise_level(denoiser: Any) -> None:
    assert denoiser.wants_noise_level
    assert "sigma" in denoiser.side_inputs
    with pytest.raises(ConfigError, match="nobody estimated the noise level"):
        apply(denoiser, picture(2))
    told = denoiser.with_noise_level(0.2)
    assert not told.wants_noise_level
    assert np.array_equal(
        apply(told, picture(2)), apply(dataclasses.replace(denoiser, sigma=0.2), picture(2))
    )


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("sigma", "truncate"), [(0.6, 4.0), (2.0, 4.0), (3.3, 2.5)])
def test_gaussian_is_the_filter_of_scipy(dims: int, sigma: float, truncate: float) -> None:
    pixels = picture(dims)
    expected = scipy.ndimage.gaussian_filter(pixels.astype(float), sigma, mode="reflect", truncate=truncate)
    np.testing.assert_allclose(whole(Gaussian(sigma=sigma, truncate=truncate), pixels), expected, atol=5e-7)


@pytest.mark.parametrize(("dims", "size"), [(2, 3), (2, 5), (2, 7), (2, 9), (3, 3), (3, 5)])
def test_median_is_the_filter_of_scipy(dims: int, size: int) -> None:
    pixels = np.round(picture(dims), 2)  # with ties
    expected = scipy.ndimage.median_filter(pixels, size, mode="reflect")
    assert np.array_equal(whole(Median(size=size), pixels), expected)


@pytest.mark.parametrize("size", [3, 9])
def test_median_passes_a_missing_pixel_on_to_its_windows(size: int) -> None:
    pixels = picture(2)
    pixels[60, 70] = np.nan
    reach = size // 2
    expected = np.zeros(pixels.shape, bool)
    expected[60 - reach : 61 + reach, 70 - reach : 71 + reach] = True
    assert np.array_equal(np.isnan(whole(Median(size=size), pixels)), expected)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("iterations", [1, 20, 100])
def test_tv_takes_the_steps_of_chambolle(dims: int, iterations: int) -> None:
    from skimage.restoration import denoise_tv_chambolle

    pixels = picture(dims)
    expected = denoise_tv_chambolle(pixels, weight=0.1, eps=0, max_num_iter=iterations + 1)
    np.testing.assert_allclose(
        whole(TotalVariation(strength=0.1, iterations=iterations), pixels), expected, atol=2e-6
    )


def weighed_by_hand(pixels: Picture, at: tuple[int, int], h: float, sigma: float) -> float:
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
@pytest.mark.parametrize("at", [(0, 0), (60, 70), (136, 3), (7, 170)])
def test_nlm_is_its_formula(strength: float, sigma: float | None, at: tuple[int, int]) -> None:
    pixels = picture(2)
    result = whole(NonLocalMeans(strength=strength, patch=5, distance=6, sigma=sigma), pixels)[at]
    expected = weighed_by_hand(pixels, at, strength * (sigma or 1.0), sigma or 0.0)
    assert result == pytest.approx(expected, abs=2e-6)


def test_nlm_denoises_about_as_well_as_scikit_image() -> None:
    from skimage.restoration import denoise_nl_means

    clean: Picture = np.kron(np.indices((9, 9)).sum(0) % 2, np.ones((16, 16), np.float32))
    noisy = clean + 0.1 * np.random.default_rng(0).standard_normal(clean.shape).astype(np.float32)
    ours = whole(NonLocalMeans(strength=0.8, sigma=0.1), noisy)
    theirs = denoise_nl_means(noisy, patch_size=5, patch_distance=6, h=0.08, sigma=0.1, fast_mode=True)
    assert np.std(ours - clean) < 1.3 * np.std(theirs - clean) < 0.5 * np.std(noisy - clean)


DEEP = ["in_conv", *(f"conv_list.{i}" for i in range(12)), "out_conv"]
FLAT = [f"model.{2 * i}" for i in range(14)]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("keys", "sign"), [(DEEP, 1), (FLAT, -1), ([f"net.{k}" for k in FLAT], -1)])
def test_dncnn_reads_the_usual_layouts_in_order(
    tmp_path: Path, keys: list[str], sign: int, suffix: str
) -> None:
    import safetensors.torch

    tensors = dncnn_tensors(keys, width=6)
    path = tmp_path / f"net{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(tensors, path)
    pixels = picture(2)
    signal = torch.from_numpy(pixels)[None, None]
    for key in keys:
        signal = nn.functional.conv2d(signal, tensors[f"{key}.weight"], tensors[f"{key}.bias"], padding=1)
        signal = signal if key == keys[-1] else signal.relu()
    stack = signal[0, 0].numpy()
    denoiser = DnCNN(depth=14, width=6, weights=str(path))
    assert denoiser.files() == (path,)
    np.testing.assert_allclose(apply(denoiser, pixels), pixels + sign * stack, atol=1e-6)
    for word, factor in (("add", 1), ("subtract", -1)):
        told = dataclasses.replace(denoiser, residual=word)  # type: ignore[arg-type]
        np.testing.assert_allclose(apply(told, pixels), pixels + factor * stack, atol=1e-6)
    np.testing.assert_allclose(
        apply(dataclasses.replace(denoiser, residual="none"), pixels), stack, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 6}, "5 convolutions where depth: 6 names 6"),
        ({"width": 8}, r"model\.0\.weight is \(16, 1, 3, 3\) where \(8, 1, 3, 3\) belongs"),
        ({"bias": False}, r"unexpected model\.0\.bias"),
        ({"channels": (3, 3)}, r"where \(16, 3, 3, 3\) belongs"),
        ({"sha256": "0" * 64}, "it is not the file that was meant"),
        ({"weights": "nowhere.pth"}, "cannot be opened"),
    ],
)
def test_weights_that_do_not_fit_dncnn_are_refused(
    dncnn_file: Path, options: dict[str, Any], message: str
) -> None:
    fitting = DnCNN(depth=NETWORK_DEPTH, width=NETWORK_WIDTH, weights=str(dncnn_file))
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
        expected = other(torch.from_numpy(picture(2))[None, None, :136, :170])[0, 0].numpy()
    assert np.array_equal(apply(denoiser, picture(2)[:136, :170]), expected)
    torch.save({"enter.weight": torch.zeros(1)}, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match="does not fit the network of lab:network"):
        denoiser.build()


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("lab:not_a_network", {}, "returned a str"),
        ("lab:number", {}, "Write the name of a function"),
        ("lab:nothing", {}, "Write a name that the module defines"),
        ("no_such_lab:build", {}, "no module 'no_such_lab'"),
        ("lab:network", {"scal": 2}, "with options .* failed: TypeError"),
    ],
)
def test_what_cannot_be_built_says_why(reference: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UserNetwork(import_=reference, options=options).build()


@pytest.mark.parametrize("call", [lambda picture: picture[1:], lambda picture: 3.0])
def test_a_function_that_makes_another_shape_is_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match="returns an array of the shape it was given"):
        apply(GivenFunction(call=call, depth=1), picture(2))


def test_a_function_may_work_in_place() -> None:
    def double(pixels: Picture) -> Picture:
        pixels *= 2
        return pixels

    pixels = picture(2)
    before = pixels.copy()
    assert np.array_equal(apply(GivenFunction(call=double, depth=0), pixels), 2 * before)
    assert np.array_equal(pixels, before)


NAN = float("nan")
BAD_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (Gaussian, {"sigma": 0}, "sigma is 0"),
    (Gaussian, {"sigma": NAN}, "sigma is nan"),
    (Gaussian, {"sigma": 1.0, "truncate": -1}, "truncate is -1"),
    (Median, {"size": 4}, "Write 3 or 5"),
    (Median, {"size": -3}, "size is -3"),
    (Median, {"size": 3.0}, "size is 3.0"),
    (TotalVariation, {"strength": -0.1}, "strength is -0.1"),
    (TotalVariation, {"strength": 0.1, "iterations": 0}, "iterations is 0"),
    (TotalVariation, {"strength": 0.1, "iterations": True}, "iterations is True"),
    (TotalVariation, {"strength": 0.1, "sigma": "guess"}, "sigma is 'guess'"),
    (TotalVariation, {"strength": 0.1, "sigma": 0.0}, "sigma is 0.0"),
    (NonLocalMeans, {"strength": float("inf")}, "strength is inf"),
    (NonLocalMeans, {"strength": 1.0, "patch": 2}, "Write 1 or 3"),
    (NonLocalMeans, {"strength": 1.0, "distance": 0}, "distance is 0"),
    (DnCNN, {"weights": "w.pth", "depth": 1}, "depth is 1"),
    (DnCNN, {"weights": "w.pth", "width": 0}, "width is 0"),
    (DnCNN, {"weights": "w.pth", "channels": (1, 3)}, r"Write \[1, 1\]"),
    (DnCNN, {"weights": "w.pth", "residual": "both"}, "residual is 'both'"),
    (DnCNN, {"weights": "w.pth", "sha256": "abc"}, "sha256 is 'abc': it has 64 hexadecimal digits"),
    (DnCNN, {"weights": "https://x.y/z.pth"}, "weights is 'https://x.y/z.pth': .*local files"),
    (UserNetwork, {"import_": "a:b", "weights": "w.pth", "sha256": "g" * 64}, "64 hexadecimal digits"),
    (UserNetwork, {"import_": "a:b", "weights": "s3://x/z.pth"}, "local files"),
    (UserNetwork, {"import_": "package.module"}, "package.module:build"),
    (UserNetwork, {"import_": "os:system('x')"}, "does not name a Python object"),
    (UserNetwork, {"import_": "a:b", "channels": (0, 1)}, "channels is"),
    (UserNetwork, {"import_": "a:b", "scale": 0}, "scale is 0"),
    (UserNetwork, {"import_": "a:b", "receptive_field_": -1}, "receptive_field is -1"),
    (UserNetwork, {"import_": "a:b", "alignment_": 0}, "alignment is 0"),
    (UserNetwork, {"import_": "a:b", "sha256": "0" * 64}, "without weights"),
    (Function, {"import_": "a b", "depth": 1}, "import is 'a b'"),
    (Function, {"import_": "a:b", "depth": -1}, "depth is -1"),
    (GivenFunction, {"call": 3, "depth": 1}, "call is 3"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused_with_what_to_write(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


JOB_OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (Gaussian, {"sigma": 2}),
    (Median, {"size": 3}),
    (TotalVariation, {"strength": 0.1, "sigma": "auto"}),
    (NonLocalMeans, {"strength": 0.1, "sigma": 0.2}),
    (DnCNN, {"weights": "w.pth", "channels": [3, 3]}),
    (UserNetwork, {"import": "a:b", "options": {"depth": 3}, "receptive_field": 7, "bytes_per_pixel": 100}),
    (Function, {"import": "a:b", "depth": 2}),
]


@pytest.mark.parametrize(("kind", "options"), JOB_OPTIONS)
def test_options_are_read_from_a_job_file_and_described(kind: Any, options: dict[str, Any]) -> None:
    reader: Any = pydantic.TypeAdapter(kind)
    assert isinstance(reader.validate_python(options), kind)
    with pytest.raises(pydantic.ValidationError, match="stranger"):
        reader.validate_python({**options, "stranger": 1})
    properties = reader.json_schema()["properties"]
    assert options.keys() <= properties.keys()
    assert all(entry.get("description") for entry in properties.values())
    assert not any(key.endswith("_") for key in json.loads(json.dumps(properties)))


def test_declarations_do_not_import_torch() -> None:
    rooms = ["gaussian", "median", "tv", "nlm", "dncnn", "torch", "function"]
    lines = [f"import halotile.tasks.denoisers.{room} as {room}_" for room in rooms]
    lines += ["import sys, halotile.tasks.noise, halotile.tasks.weights, halotile.tasks.probe"]
    lines += ["assert median_.DENOISER(size=3).receptive_field() == 1", "assert 'torch' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
