"""Tiles whose last bits differ from those of the whole image are found out where the plan is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import MemoryRefused
from halotile.graphs.plans.make import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.graphs.runs.claim import claim
from halotile.tasks.trials import rehearsal
from halotile.tasks.trials.rehearsal import tile_difference
from tests import networks
from tests.cases import thorough
from tests.support import dncnn_weights, job_of, noisy_image, run_inline, work_of, write_zarr


def difference(tmp_path: Path, shape: tuple[int, ...], network: str, tile: Any, **options: Any) -> float:
    source = write_zarr(tmp_path / "in.zarr", np.zeros(shape, np.float32), axes="zyx"[-len(shape) :])
    named = {"import": f"tests.networks:{network}", "options": options}
    return tile_difference(
        work_of(make_plan(job_of(source, tmp_path / "out.zarr", "torch", named, tile=tile))).task
    )


@pytest.mark.parametrize(
    ("shape", "length", "longer"),
    [
        ((192, 160), 150, (True, True)),
        thorough((700, 900), 150, (True, True)),
        ((40, 9000), 600, (False, True)),
    ],
    ids=["an image of few tiles", "a larger image", "a long one"],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_network_that_rounds_by_the_length_of_an_axis_is_found_out(
    tmp_path: Path, shape: tuple[int, int], length: int, longer: tuple[bool, bool], axis: int
) -> None:
    found = difference(tmp_path, shape, "rounding_by_length", {"size": 64}, axis=axis - 2, length=length)
    assert (found > 0) == longer[axis]
    assert found < 1e-5


@pytest.mark.parametrize("shape", [(700, 900), thorough((192, 160))])
def test_a_network_whose_bits_do_not_depend_on_the_window_is_not_suspected(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    assert difference(tmp_path, shape, "convolutions", {"size": 64}) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "shape", "tile"),
    [
        thorough("volumes", (40, 72, 66), {"size": 24, "axes": "zyx"}),
        thorough("wide_kernels", (300, 260), {"size": 100}),
        ("unet", (96, 80), {"size": 32}),
        thorough("unet", (192, 160), {"size": 64}),
    ],
)
def test_every_difference_from_torch_on_the_whole_image_is_reported(
    tmp_path: Path, network: str, shape: tuple[int, ...], tile: dict[str, Any]
) -> None:
    pixels = noisy_image(shape)
    source = write_zarr(tmp_path / "in.zarr", pixels, chunk=32, axes="zyx"[-len(shape) :])
    job = job_of(source, tmp_path / "out.zarr", "torch", {"import": f"tests.networks:{network}"}, tile=tile)
    module = getattr(networks, network)().eval()
    whole = torch.from_numpy(pixels)[None, None]
    if len(shape) == 2:
        module = module.to(memory_format=torch.channels_last)
        whole = whole.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        wanted = module(whole)[0, 0].numpy()
    made, notes = run_inline(job), make_plan(job).notes
    if not np.array_equal(made, wanted):
        assert any("differ from" in note for note in notes), (np.abs(made - wanted).max(), notes)
        np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("size", [thorough(32), 50, thorough(64)])
def test_an_image_of_many_tiles_is_tried_in_one_of_each_kind(tmp_path: Path, size: int) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.zeros((300, 420), np.float32), axes="yx")
    named = {"import": "tests.networks:convolutions"}
    task = work_of(make_plan(job_of(source, tmp_path / "out.zarr", "torch", named, tile={"size": size}))).task
    every = list(rehearsal._tiles(task))
    some = rehearsal._representatives(every)
    assert len(some) <= len(every) / 4
    for window, core in [(tile.reach, tile.core) for tile in every]:
        assert window.shape in {tile.reach.shape for tile in some}
        for axis in range(2):
            place = core.start[axis] - window.start[axis], core.shape[axis], window.shape[axis]
            assert place in {
                (t.core.start[axis] - t.reach.start[axis], t.core.shape[axis], t.reach.shape[axis])
                for t in some
            }


def built_in(tmp_path: Path) -> Any:
    source = tmp_path / "in.zarr"
    if not source.exists():
        write_zarr(source, np.zeros((700, 900), np.float32))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    return job_of(source, tmp_path / "out.zarr", "dncnn", options, tile={"size": 200})


@pytest.mark.parametrize(("found", "words"), [(0.0, ""), (3e-7, "differ from the whole image by 3e-07")])
def test_the_built_in_network_is_tried_as_users_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: float, words: str
) -> None:
    monkeypatch.setattr(denoiser_trials, "bounded", lambda *_: found)
    assert words in " ".join(make_plan(built_in(tmp_path)).notes)
    assert bool(make_plan(built_in(tmp_path)).notes) == bool(words)


def test_a_job_that_fits_is_not_refused_for_want_of_memory_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryRefused("too large")

    monkeypatch.setattr(denoiser_trials, "bounded", refuse)
    assert "tiles were not compared with larger windows: too large" in make_plan(built_in(tmp_path)).notes


def test_what_does_not_fit_at_once_is_computed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []

    def bounded(call: Any, *_: object) -> Any:
        requested.append(call.keywords["at_once"])
        if requested[-1]:
            raise MemoryRefused("too large")
        return call()

    monkeypatch.setattr(denoiser_trials, "bounded", bounded)
    assert not make_plan(built_in(tmp_path)).notes
    assert requested == [True, False]


def test_a_resumed_run_reports_what_was_found_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoiser_trials, "bounded", lambda *_: 3e-7)
    plan = make_plan(built_in(tmp_path))
    with claim(plan):
        pass
    again = make_plan(built_in(tmp_path))
    assert again.resumes
    assert again.notes == plan.notes
