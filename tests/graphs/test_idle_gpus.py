"""GPUs that a job has nothing for: left alone where nobody asked for them, told of where somebody did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halotile.errors import ConfigError
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.reconstruct.job import PriorChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, simulation_of
from halotile.graphs.kinds.sections import Cluster, Run
from halotile.graphs.plans.plan import make_plan
from halotile.tasks.denoisers.function import GivenFunction
from tests.graphs.trials import FOUND, GAUSSIAN, deblurring, finding
from tests.support import job_of, noisy_image, write_zarr

ALONE = "GPUs are left alone: nothing of this job computes on them"
ASKED = "nothing of this job computes on GPUs, and cluster local-cuda has one worker for each"
ONE_EACH = "operators and solver compute on CPUs, one for each GPU on cluster local-cuda"
L1 = PriorChoice(name="l1")


@pytest.mark.parametrize(
    ("prior", "cluster", "run", "where", "workers", "said"),
    [
        (GAUSSIAN, Cluster(), Run(workers=5), "auto", 2, ONE_EACH),
        (L1, Cluster(), Run(workers=5), "local", 5, ALONE),
        (GAUSSIAN, Cluster(), Run(workers=5, device="cpu"), "local", 5, ALONE),
        (L1, Cluster(kind="local-cuda"), Run(workers=5), "local-cuda", 2, ASKED),
        (L1, Cluster(kind="local"), Run(workers=5), "local", 5, ""),
    ],
)
def test_gpus_that_nobody_asked_for_are_left_alone_where_they_have_nothing_to_do(
    requested: list[Any], tmp_path: Path, prior: Any, cluster: Any, run: Any, where: str, workers: int, said: str
) -> None:
    plan = make_plan(deblurring(tmp_path, prior=prior, cluster=cluster, run=run))
    assert (plan.cluster.kind, plan.run.workers) == (where, workers)
    assert [note[: len(said)] for note in plan.notes if "GPU" in note] == [said][: len(said)]
    assert plan.documents.asked["cluster"]["kind"] == cluster.kind, "the next run may find itself elsewhere"


def test_measurements_are_made_on_processors(requested: list[Any], tmp_path: Path) -> None:
    write_zarr(tmp_path / "truth.zarr", noisy_image((256, 256), "float32"), 64)
    given = replace(deblurring(tmp_path), reference=str(tmp_path / "truth.zarr"), cluster=Cluster(), run=Run(workers=5))
    made = [replace(each, data=str(tmp_path / "made.zarr")) for each in given.operators]
    plan = make_plan(simulation_of(replace(given, operators=tuple(made)), NoiseChoice(name="none")))
    assert (plan.cluster.kind, plan.run.workers) == ("local", 5)


def test_a_function_of_arrays_leaves_gpus_alone(requested: list[Any], tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    given = job_of(source, tmp_path / "out.zarr", "median", {"size": 3})
    plan = make_plan(replace(given, denoiser=GivenFunction(call=lambda image: image, depth=1)))
    assert plan.cluster.kind == "local"
    assert ALONE in plan.notes
    assert make_plan(given).cluster.kind == "auto"


def test_what_is_asked_of_no_denoiser_is_told(requested: list[Any], tmp_path: Path) -> None:
    run = Run(device="cuda", precision="bfloat16", workers=1)
    notes = make_plan(deblurring(tmp_path, prior=L1, run=run)).notes
    assert "run.precision is bfloat16, which is for networks: this job has none" in notes
    assert "run.device is cuda, and nothing of this job computes on GPUs" in notes


def test_what_has_no_denoiser_has_the_precision_that_was_asked_for(tmp_path: Path) -> None:
    """Runs that began so go on."""
    plan = make_plan(deblurring(tmp_path, "cpu", prior=L1, run=Run(precision="bfloat16", workers=1)))
    assert plan.identity["precision"] == "bfloat16"


@pytest.mark.parametrize("prior", [GAUSSIAN, L1])
def test_a_cluster_of_gpus_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prior: PriorChoice
) -> None:
    finding(monkeypatch, FOUND, Gpus(why_none="NVML finds none"))
    given = deblurring(tmp_path, prior=prior, cluster=Cluster(kind="local-cuda"), run=Run(workers=1))
    with pytest.raises(ConfigError, match=r"cluster\.kind is local-cuda, .* Write kind: local"):
        make_plan(given)
