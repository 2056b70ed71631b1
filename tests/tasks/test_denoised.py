"""Models of a prior in a worker: kept from sweep to sweep, looked at once, and gone from a GPU when another job comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from halotile.graphs.plans.make import make_plan
from halotile.tasks import denoised_image, step
from halotile.tasks.denoised_image import Denoised
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.step import StepTask, View
from tests.graphs.solving import denoised_by, scene
from tests.support import job_of, noisy_image, work_of, write_zarr


class Held(Gpu):
    """A GPU of the processor's that says it is none."""

    def __init__(self, *_: Any) -> None:
        super().__init__("cpu")
        self.kind = "card"
        self.forgotten = 0

    def forget_peak(self) -> None:
        """Anew."""
        self.forgotten += 1


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoised_image, "_runners", WeakValueDictionary())
    monkeypatch.setattr(denoised_image, "_kept", {})


def prior(sigma: float, device: str = "cuda") -> Denoised:
    """A denoised image."""
    return replace(denoised_by(Gaussian(sigma=sigma), scene(), 64, 32), device=device)


def sweep(*parts: Denoised) -> StepTask:
    """Of a solver that uses them."""
    grid = parts[0].grid if parts else prior(1.0).grid
    return StepTask(grid=grid, images=(), sums=(), stored=(), view=View(), denoised=parts, overlap=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that are made up."""
    monkeypatch.setattr(
        denoised_image, "open_device", lambda kind, *given: Held() if kind == "cuda" else Device("cpu")
    )


def kept() -> list[Any]:
    """Models that stay when nobody uses them."""
    return list(denoised_image._kept.values())


@pytest.mark.usefixtures("cards")
def test_what_an_earlier_job_left_on_a_card_goes_and_the_rest_stays() -> None:
    (here,) = sweep(prior(1.0, "cpu")).stages().runners
    (before,) = sweep(prior(1.0)).stages().runners
    assert sweep().stages().batch == 0
    assert kept() == [here, before], "a sweep that denoises nothing lies between two that do"
    (now,) = sweep(prior(2.0)).stages().runners
    assert kept() == [here, now], "of a CPU nothing has to go"
    (again,) = sweep(prior(2.0)).stages().runners
    assert again is now


@pytest.mark.usefixtures("cards")
def test_a_denoising_job_has_the_card_for_itself(tmp_path: Path) -> None:
    sweep(prior(1.0)).stages()
    source = write_zarr(tmp_path / "in.zarr", noisy_image((100, 90)))
    work_of(make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}))).task.stages()
    assert kept() == []
    assert not denoised_image._runners, "and nothing is left of it"


@pytest.mark.usefixtures("cards")
def test_two_jobs_at_work_side_by_side_keep_their_models() -> None:
    one, other = prior(1.0), prior(2.0)
    first, second = sweep(one).stages(), sweep(other).stages()
    assert one.runner() is first.runners[0]
    assert other.runner() is second.runners[0]


@pytest.mark.usefixtures("cards")
def test_the_memory_of_a_card_is_measured_anew() -> None:
    (runner,) = sweep(prior(1.0)).stages().runners
    assert isinstance(runner.device, Held)
    before = runner.device.forgotten
    sweep(prior(1.0)).stages()
    assert runner.device.forgotten == before + 1


def test_a_model_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(step, "check_purity", lambda denoiser, dims, model: looked.append(denoiser))
    for sigma in (1.0, 1.0, 2.0):
        sweep(prior(sigma, "cpu")).stages().check()
    assert [denoiser.sigma for denoiser in looked] == [1.0, 2.0]
