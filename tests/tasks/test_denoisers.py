"""Properties that every denoiser must have, and checks of its options."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import ConfigError
from halotile.graphs.rules.keys import build, faults_in, keys_of
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.function import Function, GivenFunction
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.median import Median
from halotile.tasks.denoisers.nlm import NonLocalMeans
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.denoisers.tv import Proximal, TotalVariation
from halotile.tasks.trials.probe import check_purity, probe
from tests.tasks.denoising import NETWORK_DEPTH, NETWORK_WIDTH, TILES, apply, image, sharpen, tiles, whole

pytestmark = pytest.mark.usefixtures("lab")

# name -> (denoiser, numbers of axes to try); "dncnn" gets its weights from the fixture.
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gaussian": (lambda _: Gaussian(sigma=1.7), (2, 3)),
    "gaussian narrow": (lambda _: Gaussian(sigma=0.4, truncate=2.0), (2,)),
    "median 1": (lambda _: Median(size=1), (2,)),
    "median 3": (lambda _: Median(size=3), (2, 3)),
    "median 5": (lambda _: Median(size=5), (2,)),
    "median 9": (lambda _: Median(size=9), (2,)),
    "tv": (lambda _: TotalVariation(strength=0.1, iterations=13), (2, 3)),
    "tv as a prior": (lambda _: Proximal(strength=0.1, iterations=13), (2, 3)),
    "tv in noise levels": (lambda _: TotalVariation(strength=1.5, iterations=4, sigma=0.1), (2,)),
    "nlm": (lambda _: NonLocalMeans(strength=0.2, patch=5, distance=3), (2,)),
    "nlm in noise levels": (lambda _: NonLocalMeans(strength=0.8, patch=3, distance=2, sigma=0.1), (2, 3)),
    "dncnn": (lambda file: DnCNN(depth=NETWORK_DEPTH, width=NETWORK_WIDTH, weights=str(file)), (2,)),
    "torch": (lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2), (2,)),
    "torch at a level": (lambda _: UserNetwork(import_="lab:network", receptive_field_=3, alignment_=2, sigma=0.5), (2,)),
    "torch doubling": (lambda _: UserNetwork(import_="lab:network", options={"scale": 2}, receptive_field_=3, alignment_=2, scale=2), (2,)),
    "function": (lambda _: Function(import_="lab:sharpen", options={"amount": 0.3}, depth=2), (2, 3)),
    "given function": (lambda _: GivenFunction(call=sharpen, depth=2), (2,)),
}  # fmt: skip
EVERY = [pytest.param(make, dims, id=f"{name}-{dims}d") for name, (make, axes) in CASES.items() for dims in axes]


@pytest.mark.parametrize(("make", "dims"), EVERY)
def test_a_denoiser_keeps_every_promise(make: Any, dims: int, dncnn_file: Path) -> None:
    """Tiles have the bits of the whole, it looks as far as it declares, is pure, keeps tiles of a batch apart, and travels."""
    denoiser = make(dncnn_file)
    pixels = image(dims)
    expected = whole(denoiser, pixels)
    for tile in TILES[dims]:
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


def test_double_precision_stays_double() -> None:
    for name in ("gaussian", "median 3", "median 9", "tv", "nlm", "function"):
        denoiser = CASES[name][0](None)
        pixels = image(2, "float64")
        result = whole(denoiser, pixels)
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, whole(denoiser, pixels.astype(np.float32)), atol=2e-5)


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


def test_a_noise_level_of_zero_keeps_the_pixel() -> None:
    pixels = image(2)
    for name in ("tv", "nlm"):
        kept = whole(CASES[name][0](None), pixels, sigma=np.zeros_like(pixels))
        np.testing.assert_allclose(kept, pixels, atol=1e-6)


def test_auto_waits_for_the_noise_level() -> None:
    rows: list[Any] = [
        TotalVariation(strength=1.5, sigma="auto"),
        NonLocalMeans(strength=0.8, sigma="auto"),
        UserNetwork(import_="lab:network", sigma="auto"),
    ]
    for denoiser in rows:
        assert denoiser.wants_noise_level
        assert "sigma" in denoiser.side_inputs
        with pytest.raises(ConfigError, match="the noise level of the image was not estimated"):
            apply(denoiser, image(2))
        leveled = denoiser.with_noise_level(0.2)
        assert not leveled.wants_noise_level
        assert np.array_equal(apply(leveled, image(2)), apply(dataclasses.replace(denoiser, sigma=0.2), image(2)))


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
    (DnCNN, {"weights": "w.pth", "sha256": "abc"}, "sha256 is 'abc': it must have 64 hexadecimal digits"),
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


def test_a_bad_option_is_refused_with_what_to_write() -> None:
    for kind, options, message in BAD_OPTIONS:
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


def test_options_are_read_from_a_job_file() -> None:
    for kind, options in JOB_OPTIONS:
        keys = keys_of(kind)
        assert faults_in(keys, options) == {}
        built, faults = build(kind, keys, options, {})
        assert isinstance(built, kind)
        assert faults == {}
        assert list(faults_in(keys, {**options, "stranger": 1})) == [("stranger",)]
        assert not any(key.endswith("_") for key in keys)
