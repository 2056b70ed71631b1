"""Models of a prior in a worker: cached from pass to pass, checked once, and dropped from a GPU for another job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest

from halotile.graphs.plans.plan import make_plan
from halotile.tasks import image_task
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.image_task import Denoised, ImageTask, View
from tests.graphs.solving import denoised_by, scene
from tests.support import job_of, noisy_image, work_of, write_zarr


class FakeGpu(Gpu):
    """A device of the kind ``gpu`` that computes on the CPU."""

    def __init__(self, *_: Any) -> None:
        super().__init__("cpu")
        self.kind = "gpu"
        self.resets = 0

    def reset_peak(self) -> None:
        """Count the resets."""
        self.resets += 1


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_task, "_runners", WeakValueDictionary())
    monkeypatch.setattr(image_task, "_cached", {})


def prior(sigma: float, device: str = "cuda") -> Denoised:
    """A denoised image."""
    return replace(denoised_by(Gaussian(sigma=sigma), scene(), 64, 32), device=device)


def solver_step(*parts: Denoised) -> ImageTask:
    """A step of a solver that uses these denoised images."""
    grid = parts[0].grid if parts else prior(1.0).grid
    return ImageTask(grid=grid, images=(), sums=(), stored=(), view=View(), denoised=parts, overlap=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace GPUs by :class:`FakeGpu`."""
    monkeypatch.setattr(image_task, "open_device", lambda kind, *given: FakeGpu() if kind == "cuda" else Device("cpu"))


def kept() -> list[Any]:
    """Models that stay in the cache."""
    return list(image_task._cached.values())


@pytest.mark.usefixtures("gpus")
def test_what_an_earlier_job_left_on_a_gpu_goes_and_the_rest_stays() -> None:
    (here,) = solver_step(prior(1.0, "cpu")).stages().runners
    (before,) = solver_step(prior(1.0)).stages().runners
    assert not solver_step().stages().runners
    assert kept() == [here, before], "a step without a denoiser drops nothing"
    (now,) = solver_step(prior(2.0)).stages().runners
    assert kept() == [here, now], "models on a CPU are not dropped"
    (again,) = solver_step(prior(2.0)).stages().runners
    assert again is now


@pytest.mark.usefixtures("gpus")
def test_a_denoising_job_has_the_gpu_for_itself(tmp_path: Path) -> None:
    solver_step(prior(1.0)).stages()
    source = write_zarr(tmp_path / "in.zarr", noisy_image((100, 90)))
    work_of(make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}))).task.stages()
    assert kept() == []
    assert not image_task._runners, "and nothing is left in memory"


@pytest.mark.usefixtures("gpus")
def test_two_jobs_at_work_side_by_side_keep_their_models() -> None:
    one, other = prior(1.0), prior(2.0)
    first, second = solver_step(one).stages(), solver_step(other).stages()
    assert one.runner() is first.runners[0]
    assert other.runner() is second.runners[0]


@pytest.mark.usefixtures("gpus")
def test_the_memory_of_a_gpu_is_measured_anew() -> None:
    (runner,) = solver_step(prior(1.0)).stages().runners
    assert isinstance(runner.device, FakeGpu)
    before = runner.device.resets
    solver_step(prior(1.0)).stages()
    assert runner.device.resets == before + 1


def test_a_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(image_task, "check_purity", lambda denoiser, dims, model, dtype: checked.append(denoiser))
    for sigma in (1.0, 1.0, 2.0):
        solver_step(prior(sigma, "cpu")).stages().check()
    assert [denoiser.sigma for denoiser in checked] == [1.0, 2.0]
