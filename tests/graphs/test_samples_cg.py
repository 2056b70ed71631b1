"""Posterior samples by conjugate gradients on the whole image: for operators that see far, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.errors import ConfigError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.jobs.samples.job import Sampling
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.priors.matern import Matern
from tests.cases import thorough
from tests.graphs.sampling import (
    FAR,
    PRIOR,
    SIGMA,
    computed,
    job_in,
    kernel,
    killed,
    reported,
    same,
    scene,
    started,
    whole_image,
)
from tests.support import read_zarr


@pytest.fixture(autouse=True, scope="module")
def _as_in_workers() -> Iterator[None]:
    with torch_threads():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement with a hole."""
    place = tmp_path_factory.mktemp("samples")
    scene(place)
    return place


def test_conjugate_gradients_have_the_same_bits_for_any_workers_and_after_kills(
    tmp_path: Path, cluster: RunningCluster
) -> None:
    scene(tmp_path, 40)
    posterior = {"tol": 0.5, "halo": "auto", "count": 1, "method": "cg"}
    prior = {"range": 2.0}

    def at(name: str) -> Sampling:
        place = {"path": f"{name}.zarr", "std": f"{name}s.zarr", "samples": f"{name}d"}
        job = job_in(tmp_path, {"posterior": posterior, "prior": prior, "output": place})
        return FAR["circular"](job, tmp_path)  # type: ignore[no-any-return]

    expected = computed(at("0"))
    with local.start(Order(workers=3, memory_bytes=4 * 2**30)) as three:
        for name, workers in (("2", cluster), ("3", three)):
            plan = make_plan(at(name))
            outcome = run(plan, cluster=workers)
            assert same(tuple(read_zarr(output.path) for output in plan.outputs), expected)
            assert len(outcome.inspection.figures["residuals"]) == 2
            assert max(outcome.inspection.figures["residuals"]) < 1e-2
    start, state = started(tmp_path, at("1"), posterior), tmp_path / "mean.zarr.run" / "state"
    killed(start, lambda: (state / "draw-0" / "checkpoint").exists())
    assert not (state / "mean").exists()
    with start() as process:
        assert process.wait(120) == 0, process.communicate()[1]
    names = ("mean", "std", "d-000")
    assert same(tuple(read_zarr(tmp_path / f"{name}.zarr") for name in names), expected)
    assert not state.exists()


@pytest.mark.parametrize(
    ("name", "tol"),
    [
        ("reflect", 1e-3),
        ("circular", 1e-2),
        thorough("crop", 1e-2),
        ("line", 1e-1),
        thorough("reflect", 1e-2),
        thorough("whole", 1e-2),
        thorough("negative", 1e-2),
    ],
)
def test_conjugate_gradients_on_disk_agree_with_the_whole_image_in_memory(
    tmp_path: Path, name: str, tol: float
) -> None:
    scene(tmp_path, 48)
    place, tile = {"samples": "d", "shard": 64}, {"block": 64}
    posterior = {"tol": tol, "halo": "auto", "count": 1, "method": "cg"}
    job = FAR[name](
        job_in(tmp_path, {"output": place, "posterior": posterior, "prior": {"range": 3.0}, "tile": tile}), tmp_path
    )
    found, reports = reported(job)
    exact, deviation = whole_image(job, tol / 30)
    error = np.abs((np.stack(found) - exact) / deviation)
    assert error.max() <= tol
    assert len(reports) == 2
    assert reports[1].startswith("draw-0: a residual of ")


def test_the_map_of_a_periodic_blur_is_that_of_fourier_transforms(tmp_path: Path) -> None:
    n, edge = 64, 12
    scene(tmp_path, n, hole=False)
    posterior = {"tol": 0.1, "halo": "auto", "count": 2}
    parts: dict[str, Any] = {
        "posterior": posterior,
        "prior": {"range": 3.0},
        "tile": {"block": 64},
        "output": {"shard": 64},
    }
    job = FAR["circular"](job_in(tmp_path, parts), tmp_path)
    (_, std) = computed(job)
    response = np.square(np.abs(np.fft.fft2(kernel(), (n, n))))
    prior = Matern(**{**PRIOR, "range": 3.0}).spectrum((n, n))
    exact = np.sqrt(np.mean(1 / (1 / prior + response / SIGMA**2)))
    # Some 180 pixels are independent, each with an error of a third in its variance.
    assert np.sqrt(np.mean(np.square(std[edge:-edge, edge:-edge]))) == pytest.approx(exact, rel=0.06)


def test_auto_takes_conjugate_gradients_where_no_halo_will_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.jobs.samples.plan.HALOS", (2, 4))
    plan = make_plan(job_in(folder, {"posterior": {"halo": "auto"}}))
    assert plan.figures["method"] == "cg"
    assert plan.figures["halo_from"].startswith("no halo of up to 4 pixels keeps the error below posterior.tol")
    with pytest.raises(ConfigError, match=r"no halo of up to 4 pixels .* or posterior\.method: cg"):
        make_plan(job_in(folder, {"posterior": {"halo": "auto", "method": "blocks"}}))
