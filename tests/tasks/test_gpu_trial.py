"""The trial of a device before a run: tiles and batches, the choice among them, and their memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from halotile.errors import MemoryRefused
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.trials import gpu_trial
from halotile.tasks.trials.gpu_trial import TileTrial, TrialRequest, Tuned, tune
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr


class Small(Gpu):
    """A GPU on the CPU whose memory is simulated: a batch takes memory for its pixels."""

    def __init__(self, free: int = 10**9, most: int = 10**9, precision: str = "float32") -> None:
        super().__init__("cpu", precision)
        self.free, self.most = free, most
        self.peak = 0
        self.batches: list[tuple[int, ...]] = []

    def with_precision(self, precision: str) -> Self:
        """A copy with the precision set."""
        return type(self)(self.free, self.most, precision)

    def with_recording(self) -> Any:
        """None: it cannot record."""
        return None

    def free_bytes(self) -> int:
        """The simulated free memory."""
        return self.free

    def allocated_bytes(self) -> int:
        """0: nothing stays allocated."""
        return 0

    def peak_bytes(self) -> int:
        """The largest batch."""
        return self.peak

    def reset_peak(self) -> None:
        """Start anew."""
        self.peak = 0

    def run(self, model: Any, batch: Any, sides: Any) -> Any:
        """Take four bytes for each pixel, up to the limit."""
        self.batches.append(tuple(batch.shape))
        if batch.numel() * 4 > self.most:
            raise torch.OutOfMemoryError
        self.peak = max(self.peak, batch.numel() * 4)
        return super().run(model, batch, sides)


class Recording(Small):
    """A device that can record."""

    def with_recording(self) -> Self:
        """A copy with the option set."""
        made = type(self)(self.free, self.most, self.precision)
        made.records = True
        return made


def task_of(folder: Path, name: str = "gaussian", dtype: str = "float32", **options: Any) -> DenoiseTask:
    """A job of four blocks of 128 pixels."""
    source = write_zarr(folder / "in.zarr", noisy_image((256, 256), dtype))
    options = options or {"sigma": 1}
    plan = make_plan(job_of(source, folder / "out.zarr", name, options, tile={"block": 128}))
    task: DenoiseTask = work_of(plan).task
    return task


def network(folder: Path) -> dict[str, Any]:
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


class LaidOut(Small):
    """A device that is not a CPU, and has a memory layout."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kind = "gpu"

    def with_layout(self, channels_last: bool) -> Self:
        """A copy with the option set."""
        made = type(self)(self.free, self.most, self.precision)
        made.channels_last = channels_last
        return made


def test_faster_layouts_and_recordings_that_pay_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task, tiles = task_of(tmp_path, "dncnn", **network(tmp_path)), ((32, 32),)
    for seconds, chosen in ((0.5, True), (0.99, False)):
        timed(monkeypatch, lambda tile, batch, device, s=seconds: s if device and device.channels_last else 1.0)
        assert tune(task, TrialRequest(tiles=tiles, layouts=True), LaidOut()).channels_last == chosen
        assert not tune(task, TrialRequest(tiles=tiles), LaidOut()).channels_last, "it was not to be tried"
    task = task_of(tmp_path / "2")
    for seconds, pays in ((0.05, True), (0.099, False), (0.2, False)):
        timed(monkeypatch, lambda tile, batch, device, s=seconds: s if device and device.records else 0.1)
        found = tune(task, TrialRequest(tiles=tiles), Recording())
        assert (found.records, found.megapixels_per_second > 128 * 128 / 1e5) == (pays, pays)


def test_what_breaks_beside_the_best_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds(tile: Any, batch: int, device: Any) -> float:
        if device is not None or max(tile) > 40:
            raise RuntimeError("input tensor must fit into 32-bit index math")
        return 0.01

    timed(monkeypatch, seconds)
    task = task_of(tmp_path, "median", size=3)
    found = tune(task, TrialRequest(tiles=((64, 64), (32, 32)), layouts=True), LaidOut())
    assert (found.tile, found.records) == ((32, 32), False)
    with pytest.raises(RuntimeError, match="32-bit index math"):
        tune(task, TrialRequest(tiles=((64, 64),)), LaidOut())


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
    task = replace(task_of(tmp_path), overlap=overlap)
    found = tune(task, TrialRequest(tiles=((64, 64), (32, 32))), device)
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
    task = task_of(tmp_path, "dncnn", **network(tmp_path))
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
