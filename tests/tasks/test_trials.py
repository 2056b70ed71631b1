"""Trials on a worker before a run: how far networks look, whether they are pure, and tiles and batches of a device."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn
from torch.nn import functional

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.cutting import Halo, rehearsed
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.trials import gpu_trial
from halotile.tasks.trials.gpu_trial import TileTrial, TrialRequest, Tuned, tune
from halotile.tasks.trials.probe import check_purity, probe
from tests.cases import thorough
from tests.networks import unet
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr
from tests.tasks.denoising import Calls


def conv(into: int, out: int, size: int = 3, **options: Any) -> nn.Module:
    return nn.Conv2d(into, out, size, padding=options.pop("padding", size // 2), **options)


def conv_stack() -> nn.Module:
    return nn.Sequential(conv(1, 4), nn.ReLU(), conv(4, 4, 5), nn.ReLU(), conv(4, 1))


def halved_by_fft(batch: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(batch) * 0.5, s=tuple(batch.shape[2:]))


def by_mean(batch: torch.Tensor) -> torch.Tensor:
    return batch + batch.mean((2, 3), keepdim=True)


def by_position(batch: torch.Tensor) -> torch.Tensor:
    return batch * torch.linspace(0, 1, batch.shape[-1], dtype=batch.dtype)


def ahead(x: torch.Tensor) -> torch.Tensor:
    """The mean of the cell of a pixel and the 63 cells below it, and of it and those to the right; without a gradient."""
    cells = functional.avg_pool2d(x.detach(), 8)
    below = functional.avg_pool2d(functional.pad(cells, (0, 0, 0, 63)), (64, 1), 1)
    right = functional.avg_pool2d(functional.pad(cells, (0, 63)), (1, 64), 1)
    return functional.interpolate(below + right, scale_factor=8)


def mixing(batch: torch.Tensor) -> torch.Tensor:
    return batch.sum(0, keepdim=True) + batch.masked_fill(batch > 0.5, torch.inf)


class Warm(nn.Module):  # type: ignore[misc]
    """Starts from where the last call ended."""

    last: torch.Tensor | float = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.last = batch + 0.1 * self.last
        return self.last


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
    (lambda: nn.Sequential(Calls(torch.nan_to_num), conv_stack()), 2, (4, 1), {}),
    # A pooled or strided cell begins up to (stride - 1) pixels before the pixel it is asked about.
    (lambda: nn.Sequential(nn.MaxPool2d(2), conv(1, 2), nn.Upsample(scale_factor=2), conv(2, 1)), 2, (4, 2), {}),
    (unet, 2, (9, 4), {}),
    (lambda: nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, 3, padding=1)), 3, (2, 1), {}),
    (lambda: nn.Sequential(conv(1, 4, 5), nn.PixelShuffle(2)), 2, (2, 1), {"scale": 2}),
    (lambda: conv(3, 2), 2, (1, 1), {"channels": (3, 2)}),
]


def test_a_network_is_found_to_look_exactly_as_far_as_it_does(network: Use) -> None:
    random_numbers = torch.get_rng_state()
    for number, (build, dims, expected, options) in enumerate(LOOKS):
        assert probe(network(build, **options), dims) == expected, number
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_what_is_written_down_stays_when_the_rest_is_probed(network: Use) -> None:
    denoiser = network(unet, receptive_field_=32)
    assert denoiser.receptive_field() is None
    found = denoiser.probed(*probe(denoiser, 2))
    assert (found.receptive_field(), found.alignment) == (32, 4)


def test_a_network_over_the_whole_image_is_refused(network: Use) -> None:
    rows: list[Callable[[], nn.Module]] = [lambda: Calls(by_mean), lambda: Calls(halved_by_fft)]
    for build in (*rows, lambda: nn.Sequential(conv(1, 2), nn.InstanceNorm2d(2), conv(2, 1))):
        with pytest.raises(ConfigError, match="lab:build looks at the whole image"):
            probe(network(build), 2)
    assert probe(network(lambda: Calls(ahead)), 2) == (511, 8)  # half the longest window, on both axes


def test_a_network_that_cannot_be_tiled_is_refused_with_the_reason(network: Use) -> None:
    rows: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
        (lambda: Calls(by_position), {}, "depends on the position of the tile"),
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


def test_an_impure_network_is_refused(network: Use) -> None:
    for build, message in [
        (Warm, "lab:build returned two results for one tile"),
        (lambda: Calls(lambda x: x + torch.rand_like(x)), "lab:build returned two results for one tile"),
        (lambda: Calls(lambda x: x.mul_(0.5)), "lab:build changes its input"),
        (lambda: Calls(mixing), "another result where it is computed in one batch"),  # which infinity does not hide
    ]:
        with pytest.raises(ConfigError, match=message):
            check_purity(network(build), 2)
    pointwise = GivenFunction(call=lambda image: np.where(image > 0.5, np.float32(np.inf), image), depth=0)
    check_purity(pointwise, 2)  # it may give infinity
    check_purity(network(lambda: nn.Sequential(conv(1, 1), nn.Dropout(0.5))), 2)  # dropout is off


Image = NDArray[Any]


def above_noise(image: Image, times: float = 2.0) -> Image:
    return np.where(image > times * np.median(np.abs(image - np.median(image))), image, 0)


def logarithm(image: Image) -> Any:
    with np.errstate(invalid="ignore"):
        return np.log(image - 0.1)


def by_twos(image: Image) -> Image:
    for axis, length in enumerate(image.shape):
        image = image.take(range(0, length, 2), axis).repeat(2, axis).take(range(length), axis)
    return image


SOUND: dict[str, tuple[Callable[[Image], Image], int]] = {
    "running sums": (lambda image: ndimage.uniform_filter(image, 9), 4), "median": (lambda image: ndimage.median_filter(image, 5), 2),
    "gaussian": (lambda image: ndimage.gaussian_filter(image, 2, truncate=4), 8),
    "threshold": (lambda image: np.where(image > 0.25, image, 0), 0), "logarithm": (logarithm, 0), "zero": (lambda image: image * 0, 0),
}  # fmt: skip
WRONG: dict[str, tuple[Callable[[Image], Image], int]] = {
    "farther": (lambda image: ndimage.uniform_filter(image, 9), 3), "mean": (lambda image: image - image.mean(), 4),
    "least and most": (lambda image: (image - image.min()) / (image.max() - image.min()), 8), "noise level": (above_noise, 8),
    "three deviations": (lambda image: above_noise(image, 3 * 1.4826), 8), "by twos": (by_twos, 2),
    "bright": (lambda image: np.where(image > image.mean(), image, np.nan), 4), "large depth": (lambda image: image - image.mean(), 70),
}  # fmt: skip


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


class Small(Gpu):
    """A GPU on the CPU whose memory is simulated: a batch takes memory for its pixels."""

    def __init__(self, *, free: int = 10**9, most: int = 10**9, kind: str = "cpu", can_record: bool = False) -> None:
        super().__init__("cpu")
        self.free, self.most, self.kind, self.can_record = free, most, kind, can_record
        self.peak, self.batches = 0, list[tuple[int, ...]]()

    def changed(self, **options: Any) -> Any:
        """A copy with options set."""
        made = copy(self)
        vars(made).update(options)
        return made

    def with_precision(self, precision: str) -> Any:
        return self.changed(precision=precision)

    def with_recording(self) -> Any:
        return self.changed(records=True) if self.can_record else None

    def with_layout(self, channels_last: bool) -> Any:
        return self.changed(channels_last=channels_last)

    def free_bytes(self) -> int:
        return self.free

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = 0

    def run(self, model: Any, batch: Any, sides: Any) -> Any:
        """Take four bytes for each pixel, up to the limit."""
        self.batches.append(tuple(batch.shape))
        if batch.numel() * 4 > self.most:
            raise torch.OutOfMemoryError
        self.peak = max(self.peak, batch.numel() * 4)
        return super().run(model, batch, sides)


def task_of(folder: Path, name: str = "gaussian", dtype: str = "float32", **options: Any) -> DenoiseTask:
    """A job of four blocks of 128 pixels."""
    source = write_zarr(folder / "in.zarr", noisy_image((256, 256), dtype))
    options = options or {"sigma": 1}
    task: DenoiseTask = work_of(make_plan(job_of(source, folder / "out.zarr", name, options, tile={"block": 128}))).task
    return task


def small_net(folder: Path) -> dict[str, Any]:
    """Options of a small network."""
    return {"weights": str(dncnn_weights(folder / "w.safetensors", 3, 8)), "depth": 3, "width": 8}


def timed(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Times are those that a function of tile, batch and device gives."""

    def time(trial: Any, tile: Any, batch: int, device: Any = None) -> TileTrial:
        return TileTrial(tile, batch, seconds(tile, batch, device), 100 * batch)

    monkeypatch.setattr(gpu_trial._Trial, "time", time)


def test_batches_grow_and_the_fastest_tile_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed(monkeypatch, lambda tile, batch, _: 1.0 if batch >= 2 else 2.0)
    found = tune(task_of(tmp_path), TrialRequest(tiles=((32, 32), (16, 16))), Small())
    assert [each.batch for each in found.tried if each.tile == (32, 32)] == [1, 2, 4, 8]
    assert (found.tile, found.batch) == ((32, 32), 2), "of those alike, the one that needs least memory"
    task = task_of(tmp_path / "2", "median", size=3)
    for fastest in ((64, 64), (16, 16)):
        timed(monkeypatch, lambda tile, batch, _, best=fastest: 1.0 if tile == best else 3.0)
        assert tune(task, TrialRequest(tiles=((64, 64), (32, 32), (16, 16))), Small()).tile == fastest


def test_faster_layouts_and_recordings_that_pay_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task, tiles = task_of(tmp_path, "dncnn", **small_net(tmp_path)), ((32, 32),)
    for seconds, chosen in ((0.5, True), (0.99, False)):
        timed(monkeypatch, lambda tile, batch, device, s=seconds: s if device and device.channels_last else 1.0)
        assert tune(task, TrialRequest(tiles=tiles, layouts=True), Small(kind="gpu")).channels_last == chosen
        assert not tune(task, TrialRequest(tiles=tiles), Small(kind="gpu")).channels_last, "it was not to be tried"
    task = task_of(tmp_path / "2")
    for seconds, pays in ((0.05, True), (0.099, False), (0.2, False)):
        timed(monkeypatch, lambda tile, batch, device, s=seconds: s if device and device.records else 0.1)
        found = tune(task, TrialRequest(tiles=tiles), Small(can_record=True))
        assert (found.records, found.megapixels_per_second > 128 * 128 / 1e5) == (pays, pays)


def test_what_breaks_beside_the_best_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds(tile: Any, batch: int, device: Any) -> float:
        if device is not None or max(tile) > 40:
            raise RuntimeError("input tensor must fit into 32-bit index math")
        return 0.01

    timed(monkeypatch, seconds)
    task = task_of(tmp_path, "median", size=3)
    found = tune(task, TrialRequest(tiles=((64, 64), (32, 32)), layouts=True), Small(kind="gpu"))
    assert (found.tile, found.records) == ((32, 32), False)
    with pytest.raises(RuntimeError, match="32-bit index math"):
        tune(task, TrialRequest(tiles=((64, 64),)), Small(kind="gpu"))


def test_tiles_with_much_halo_are_tried_as_a_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = task_of(tmp_path, sigma=8)  # looks 32 pixels far
    tiles = ((16, 16), (32, 32), (128, 128), (112, 112))
    timed(monkeypatch, lambda *_: 1.0)
    assert {each.tile for each in tune(task, TrialRequest(tiles=tiles), Small()).tried} == {(128, 128)}
    monkeypatch.setattr(gpu_trial._Trial, "_fits", lambda trial, tried, sharing: max(tried.tile) < 100)
    assert {each.tile for each in tune(task, TrialRequest(tiles=tiles), Small()).tried} == {(32, 32)}


def test_what_is_given_is_all_that_is_tried_and_workers_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    found, shared = (tune(task, TrialRequest(tiles=((32, 32),), batch=3, sharing=n), Small()) for n in (1, 3))
    assert [(each.tile, each.batch) for each in found.tried] == [((32, 32), 3)]
    assert found.tried[0].seconds > 0
    assert found.megapixels_per_second == pytest.approx(128 * 128 / 1e6 / found.tried[0].seconds)
    assert found.free_bytes is not None
    assert shared.free_bytes == found.free_bytes // 3
    assert Tuned.from_json(found.to_json()) == found
    assert replace(found, batch=9) != found


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_is_planned_than_there_is_room_for(overlap: bool, tmp_path: Path) -> None:
    free = 200_000
    device = Small(free=free)
    found = tune(replace(task_of(tmp_path), overlap=overlap), TrialRequest(tiles=((64, 64), (32, 32))), device)
    planned_with = int(0.9 * free)
    assert found.free_bytes == planned_with
    results = 2 * 128 * 128 * 4
    assert found.device_bytes == results + max(t.batch_bytes for t in found.tried if t.batch == found.batch)
    assert all(results + each.batch_bytes <= planned_with for each in found.tried)
    largest = max(shape[0] * shape[2] * shape[3] * 4 for shape in device.batches)
    assert largest + results > planned_with, "larger were tried"


def test_a_batch_that_runs_out_of_memory_is_not_taken(tmp_path: Path) -> None:
    window = (32 + 8) * (32 + 8) * 4
    found = tune(task_of(tmp_path), TrialRequest(tiles=((32, 32),)), Small(most=5 * window))
    assert max(each.batch for each in found.tried) == 4
    with pytest.raises(MemoryRefused, match=r"no memory for one tile of 32 × 32 pixels\. Write a smaller"):
        tune(task_of(tmp_path / "2"), TrialRequest(tiles=((32, 32),)), Small(most=window // 2))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_damaged_block_is_tried_with_random_pixels(tmp_path: Path, dtype: str) -> None:
    task = task_of(tmp_path, dtype=dtype)
    for chunk in (tmp_path / "in.zarr").glob("c/*/*"):
        chunk.write_bytes(b"damaged")
    assert tune(task, TrialRequest(tiles=((32, 32),), batch=1), Small()).tried


class Overflowing(Device):
    """A device on which float16 overflows."""

    def run(self, model: Any, batch: Any, sides: Any) -> Any:
        return super().run(model, batch, sides) * (math.inf if self.precision == "float16" else 1)


@pytest.mark.parametrize("device", [Device, Small, Overflowing])
def test_each_precision_of_a_network_is_held_against_float32(tmp_path: Path, device: Any) -> None:
    task = task_of(tmp_path, "dncnn", **small_net(tmp_path))
    found = {each.name: each for each in tune(task, TrialRequest(tiles=((64, 64),), compare=True), device()).precisions}
    assert list(found) == list(gpu_trial.PRECISIONS)
    float32, bfloat16, float16 = (found[name].error for name in ("float32", "bfloat16", "float16"))
    assert float32 is not None
    assert float32 < 1e-6
    assert found["tf32"].error is None
    assert bfloat16 is not None
    assert 1e-5 < bfloat16 < 0.1
    assert found["float16"].seconds is not None
    if device is Overflowing:
        assert (float16, found["float16"].why_not) == (None, "some pixels are NaN or infinite")
    filtered = tune(task_of(tmp_path / "2"), TrialRequest(tiles=((64, 64),), compare=True))
    assert [each.name for each in filtered.precisions if each.seconds is not None] == ["float32"]
    assert filtered.precisions[2].why_not == "for networks only: this denoiser computes in float32"
