"""What a trial of a GPU decides for a run: kept, gone on with, and told where there was none."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs import waiting
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Run
from halotile.graphs.plans.needs import PROCESS
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.plans.trials import gpu_trials
from halotile.graphs.plans.trials.gpu_trials import NotTried, tuned_for
from halotile.graphs.runs.driver import run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.trials.gpu_trial import Tuned
from tests.cases import thorough
from tests.graphs.trials import FOUND, answering, finding, out_of_memory_once
from tests.support import dncnn_weights, footprint_of, job_of, noisy_image, work_of, write_zarr

NO_CHOICE: Any = None
"""What tiles of a CPU would have to heed, if there were any to choose from."""


def job(folder: Path, device: Literal["cpu", "cuda"] = "cuda", **tile: Any) -> Denoising:
    """A job of four blocks."""
    source = folder / "in.zarr"
    if not source.exists():
        write_zarr(source, noisy_image((256, 256)))
    given = job_of(source, folder / "out.zarr", "gaussian", {"sigma": 1}, tile={"block": 128} | tile)
    return replace(given, run=Run(device=device, workers=1), cluster=Cluster(kind="local"))


def test_a_plan_takes_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested = finding(monkeypatch, FOUND)
    plan = make_plan(job(tmp_path))
    assert (work_of(plan).task.tiling.tile, work_of(plan).task.tiling.batch) == ((32, 48), 6)
    assert (plan.identity["tile"], plan.identity["batch"]) == ([32, 48], 6)
    assert plan.summary()["device_memory_bytes"] == 5_000_000
    written = plan.documents.resolved["tile"]
    assert (written["size"], written["batch"], written["channels_last"]) == ([32, 48], 6, True)
    assert (work_of(plan).task.records, work_of(plan).task.channels_last) == (True, True)
    assert footprint_of(plan)[PROCESS] == 800 * 2**20, "as it was measured"
    assert requested[0].tiles == ((128, 128),), "no tile is larger than a block"
    assert requested[0].batch is None


def test_what_is_written_is_what_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested = finding(monkeypatch, FOUND)
    make_plan(job(tmp_path, size=64, batch=3))
    assert (requested[0].tiles, requested[0].batch, requested[0].layouts) == (((64, 64),), 3, False)
    make_plan(replace(job(tmp_path), run=Run(device="cuda", workers=3)))
    assert [each.sharing for each in requested] == [1, 3], "three workers of this machine use one card"


def test_nothing_is_tried_for_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested = finding(monkeypatch, FOUND)
    plan = make_plan(job(tmp_path, "cpu"))
    assert (requested, work_of(plan).tuned, plan.summary()["tuned"]) == ([], None, None)
    plan = make_plan(job(tmp_path, "cpu"), probe=True)
    assert (requested[0].tiles, requested[0].batch, requested[0].compare) == (
        (work_of(plan).task.tiling.tile,),
        1,
        True,
    )
    assert work_of(plan).task.tiling.tile != FOUND.tile, "a processor's tile is by rule"


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_trial_that_takes_a_while_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float) -> None:
    monkeypatch.setattr(waiting, "SECONDS", seconds)
    finding(monkeypatch, FOUND)

    def slow(*_: Any) -> Tuned:
        time.sleep(0.5)
        return FOUND

    monkeypatch.setattr(gpu_trials, "_in_a_process_of_its_own", slow)
    said: list[str] = []
    make_plan(job(tmp_path), report=said.append)
    assert ("trying gaussian on a GPU" in said) == (not seconds)


def test_the_driver_does_not_begin_with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begun_with() -> None:
        raise AssertionError("a process that has begun with CUDA holds some of the GPU, and cannot be forked")

    finding(monkeypatch, FOUND)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begun_with)
    monkeypatch.setattr(torch._C, "_cuda_init", begun_with, raising=False)
    make_plan(job(tmp_path), probe=True)


def test_where_no_card_is_at_hand_that_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_trials, "gpus_here", lambda: Gpus(why_none="NVML finds none"))
    plan = make_plan(replace(job(tmp_path), cluster=Cluster(kind="slurm", gpus=1)))
    assert work_of(plan).tuned is None
    assert "tile and batch are by rule: there is no GPU here to try them on (NVML finds none)" in plan.notes
    finding(monkeypatch, NotTried("a trial broke: it fell over"))
    assert "tile and batch are by rule: a trial broke: it fell over" in make_plan(job(tmp_path)).notes


def test_what_does_not_fit_on_the_card_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, MemoryRefused("no room"))
    with pytest.raises(MemoryRefused, match="no room"):
        make_plan(job(tmp_path))


def begun(plan: Any) -> RunDirectory:
    """A run of the plan that is just begun."""
    from halotile.graphs.runs.claim import claim

    directory = RunDirectory(plan.run_directory)
    with claim(plan) as claimed:
        claimed.held[0].journal.mark({0: b"some"})
    return directory


def test_a_run_goes_on_with_what_was_found_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested = finding(monkeypatch, FOUND)
    begun(make_plan(job(tmp_path)))
    again = make_plan(job(tmp_path))
    assert len(requested) == 1
    assert (again.resumes, work_of(again).tuned, work_of(again).task.tiling.tile) == (True, FOUND, (32, 48))
    make_plan(job(tmp_path), probe=True)
    assert (requested[1].tiles, requested[1].batch) == (((32, 48),), 6), (
        "a probe of a run that has begun changes nothing"
    )
    make_plan(job(tmp_path), fresh=True)
    assert requested[2].tiles == ((128, 128),)


@pytest.mark.parametrize("edge", [256, 512])
@pytest.mark.parametrize("options", [{}, {"size": 512}, {"channels_last": True}, {"size": 64, "batch": 3}])
@pytest.mark.parametrize("name", ["gaussian", "dncnn"])
def test_a_job_that_is_as_it_was_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edge: int, options: dict[str, Any], name: str
) -> None:
    answering(monkeypatch)

    def given(**tile: Any) -> Denoising:
        made = job(tmp_path, **{"block": edge} | tile)
        if name == "gaussian":
            return made
        weights = tmp_path / "w.safetensors"
        if not weights.exists():
            dncnn_weights(weights, 3, 8)
        return replace(
            made, denoiser=DenoiserChoice(name="dncnn", options={"weights": str(weights), "depth": 3, "width": 8})
        )

    plan = make_plan(given(**options))
    begun(plan)
    assert make_plan(given(**options)).earlier.differs == ()
    resolved = plan.documents.resolved["tile"]
    sizes = {key: resolved[key] for key in ("size", "batch", "channels_last")}
    assert make_plan(given(**sizes | {"size": tuple(sizes["size"])})).earlier.differs == ()


@pytest.mark.parametrize("breaks", [False, True])
def test_smaller_blocks_fit_by_the_larger_of_two_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: bool
) -> None:
    source = write_zarr(tmp_path / "large.zarr", np.zeros((8192, 8192), "uint8"), chunk=512)
    given = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, shard=512, chunk=256, tile={})
    run = Run(device="cuda", workers=1, memory_per_worker="3000MiB")
    finding(monkeypatch, FOUND)
    told = [2950, 2955]

    def again(*_: Any) -> Tuned:
        if breaks and len(told) == 1:
            raise NotTried("a trial broke")
        return replace(FOUND, host_bytes=told.pop(0) * 2**20)

    monkeypatch.setattr(gpu_trials, "_in_a_process_of_its_own", again)
    plan = make_plan(replace(given, run=run, cluster=Cluster(kind="local")), refuse=False)
    assert len(told) == breaks
    assert footprint_of(plan)[PROCESS] == (2950 if breaks else 2955) * 2**20
    assert work_of(plan).task.tiling.tile == FOUND.tile
    assert not any("by rule" in note for note in plan.notes)


@pytest.mark.parametrize("shape", [(300, 300), (300, 1500)])
@pytest.mark.parametrize("options", [{}, {"size": 512}])
def test_a_small_picture_goes_on_by_rule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    finding(monkeypatch, NotTried("a trial broke"))
    source = write_zarr(tmp_path / "in.zarr", noisy_image(shape))
    given = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, shard="auto", chunk="auto", tile=options)
    given = replace(given, run=Run(device="cuda", workers=1), cluster=Cluster(kind="local"))
    begun(make_plan(given))
    assert make_plan(given).earlier.differs == ()


def test_a_batch_that_the_rule_does_not_grant_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finding(monkeypatch, NotTried("a trial broke"))
    source = write_zarr(tmp_path / "in.zarr", noisy_image((100, 90)))
    network = {"weights": str(dncnn_weights(tmp_path / "w.safetensors", depth=3, width=8))}
    tiles = {"size": 64, "batch": 3}
    given = job_of(source, tmp_path / "out.zarr", "dncnn", network | {"depth": 3, "width": 8}, tile=tiles)
    given = replace(given, run=Run(device="cuda", workers=1), cluster=Cluster(kind="local"))
    plan = make_plan(given)
    assert work_of(plan).task.tiling.batch == 1  # of images this small
    begun(plan)
    assert make_plan(given).earlier.differs == ()


def test_a_probe_of_a_run_that_began_by_rule_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, NotTried("a trial broke"))
    plan = make_plan(job(tmp_path))
    begun(plan)
    requested = finding(monkeypatch, FOUND)
    probed = make_plan(job(tmp_path), probe=True)
    assert (probed.earlier.differs, work_of(probed).task.tiling) == ((), work_of(plan).task.tiling)
    assert (requested[0].tiles, requested[0].batch) == (
        (work_of(plan).task.tiling.tile,),
        work_of(plan).task.tiling.batch,
    )


def test_a_probe_that_fails_says_what_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, FOUND)
    begun(make_plan(job(tmp_path)))
    finding(monkeypatch, NotTried("a trial broke"))
    (note,) = (note for note in make_plan(job(tmp_path), probe=True).notes if "trial" in note)
    assert note == "tile and batch are as they were found, and not tried again: a trial broke"


def test_what_a_card_found_is_nothing_to_a_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, FOUND)
    begun(make_plan(job(tmp_path)))
    requested = finding(monkeypatch, FOUND)
    assert work_of(make_plan(job(tmp_path, "cpu"))).tuned is None
    probed = make_plan(job(tmp_path, "cpu"), probe=True)
    assert (requested[0].tiles, requested[0].batch) == (
        (work_of(probed).task.tiling.tile,),
        work_of(probed).task.tiling.batch,
    )
    assert work_of(probed).task.tiling.tile != FOUND.tile
    assert probed.earlier.differs == ('run.device was "cuda", is "cpu"',)


def test_a_run_that_began_by_rule_goes_on_by_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, NotTried("a trial broke"))
    begun(make_plan(job(tmp_path)))
    requested = finding(monkeypatch, FOUND)
    assert make_plan(job(tmp_path)).resumes
    assert requested == []


def test_a_run_that_came_down_to_a_smaller_batch_goes_on_with_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finding(monkeypatch, FOUND)
    directory = begun(make_plan(job(tmp_path)))
    directory.update_plan(batch=3)
    again = make_plan(job(tmp_path))
    assert again.resumes, "it is the same job"
    assert (work_of(again).task.tiling.batch, again.identity["batch"]) == (3, 6)


def test_a_run_may_go_on_with_a_smaller_batch_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding(monkeypatch, FOUND)
    begun(make_plan(job(tmp_path)))
    fewer = make_plan(job(tmp_path, batch=2))
    assert (fewer.resumes, work_of(fewer).task.tiling.batch, work_of(fewer).task.tiling.tile) == (True, 2, (32, 48))
    assert make_plan(job(tmp_path, batch=8)).earlier.differs == ("tile.batch was 6, is 8",)
    assert make_plan(job(tmp_path, size=64)).earlier.differs == ("tile.size was [32, 48], is [64, 64]",)


def test_blocks_are_smaller_where_libraries_of_a_card_keep_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_zarr(tmp_path / "large.zarr", np.zeros((8192, 8192), "uint8"), chunk=512)
    given = job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}, shard=512, chunk=256, tile={})
    run = Run(device="cuda", workers=1, memory_per_worker="3000MiB")
    given = replace(given, run=run, cluster=Cluster(kind="local"))
    blocks = []
    for host_bytes in (800, 2960):
        requested = finding(monkeypatch, replace(FOUND, host_bytes=host_bytes * 2**20))
        plan = make_plan(given)
        assert plan.memory_bytes <= 3000 * 2**20
        blocks.append(math.prod(plan.grid.block))
    assert len(requested) == 2, "the smaller block is tried too"
    assert blocks[1] < blocks[0]


@pytest.mark.cluster
def test_a_worker_that_runs_out_of_memory_is_told_of_and_remembered(tmp_path: Path) -> None:
    """The way of the message from a worker's tiles to the driver's reports and the next run."""
    said: list[str] = []
    given = replace(job(tmp_path, "cpu", size=32, batch=4), denoiser=out_of_memory_once(tmp_path))
    plan = make_plan(given)
    outcome = run(plan, observer=lambda progress: said.append(progress.message))
    assert outcome.done == 4
    assert any("memory ran out on a worker: 2 tiles at once there, in place of 4" in line for line in said)
    kept = RunDirectory(plan.run_directory).read_valid_plan()
    assert kept is not None
    assert kept["batch"] == 2


def test_a_trial_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The model is a script's own, and the process is told where its imports are."""
    here = os.getpid()

    def told(image: Any) -> Any:
        assert os.getpid() != here
        return image * 2

    requested = job(tmp_path, "cpu")
    task = replace(work_of(make_plan(requested)).task, denoiser=GivenFunction(call=told, depth=1))
    found = tuned_for(requested, task, NO_CHOICE, compare=True)
    assert found.device == "this CPU"
    assert [each.name for each in found.precisions] == ["float32", "tf32", "float16", "bfloat16"]
    assert found.precisions[0].error == 0
    assert found.host_bytes > 2**27


@pytest.mark.parametrize(
    ("broken", "limit", "said"),
    [
        thorough(lambda image: os._exit(7), 60.0, "a trial ended its process with exit code 7"),
        thorough(lambda image: 1 / 0, 60.0, "a trial broke: ZeroDivisionError: division by zero"),
        (lambda image: time.sleep(60), 5.0, "a trial took longer than 5 s"),
    ],
)
def test_a_trial_that_breaks_says_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Callable[[Any], Any], limit: float, said: str
) -> None:
    monkeypatch.setattr(gpu_trials, "LIMIT_SECONDS", limit)
    requested = job(tmp_path, "cpu")
    task = replace(work_of(make_plan(requested)).task, denoiser=GivenFunction(call=broken, depth=1))
    with pytest.raises(NotTried, match=said):
        tuned_for(requested, task, NO_CHOICE, compare=False)


def test_what_is_wrong_with_the_job_is_said_as_a_run_says_it(tmp_path: Path) -> None:
    requested = job(tmp_path, "cpu")
    task = replace(work_of(make_plan(requested)).task, denoiser=GivenFunction(call=lambda image: image[1:], depth=1))
    with pytest.raises(ConfigError, match="returns an array of the shape of its input"):
        tuned_for(requested, task, NO_CHOICE, compare=False)
