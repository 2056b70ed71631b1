"""Runs as batch jobs of systems that are not here, whose commands are replaced."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from halotile.cli import batch, exits
from halotile.graphs.clusters import sge
from tests.batch_systems import GridEngine
from tests.cli.engine import MonkeyPatch, printed, refused
from tests.faults import REPOSITORY
from tests.hpc import BLOCKS, HpcJob, pretended_pbs, wait_for

SLEEPY = '''
import time
from pathlib import Path


def sleepy(pixels, folder):
    """The same pixels, after a while."""
    with open(Path(folder) / "log", "a") as log:
        log.write("called\\n")
    time.sleep(60)
    return pixels
'''


@pytest.mark.parametrize("pattern", ["in.zarr", "*n.zarr"])
def test_a_function_is_tried_for_seconds_at_submission(pattern: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    job = HpcJob.create(tmp_path, walltime="60", kind="slurm")
    (tmp_path / "noting.py").write_text(SLEEPY.replace("sleepy", "noted"))
    job.config.write_text(job.config.read_text().replace("in.zarr", pattern).replace("out.zarr", "{stem}-clean.zarr"))
    monkeypatch.setattr(batch, "TRIAL_SECONDS", 3.0)
    began = time.monotonic()
    words = ("--allow-import", "--dry-run", "--json", "--set", "run.workers=3")
    shown = json.loads(printed("submit", job.config, *words))
    assert time.monotonic() - began < 50
    assert len(job.log()) == 1
    assert shown["plan"]["notes"] == [
        "trying noting:noted takes longer than the 3 s allowed on this machine; the batch job will plan the run"
    ]
    assert "#SBATCH --ntasks=3\n" in shown["script"]


@pytest.fixture
def job(tmp_path: Path) -> HpcJob:
    """A job whose PBS is three commands that start scripts on this machine."""
    return HpcJob.create(tmp_path / "job", pretended_pbs(tmp_path / "pbs"), kind="pbs", interface="lo", walltime="60")


SUBMIT = ("submit", "job.yaml", "--allow-import")


CORES = "cluster.kind=sge --set cluster.cores=4"
NO_ENVIRONMENT = "cluster.cores is 4, and SGE gives a job several cores by a parallel environment"
REFUSED = [
    *((SUBMIT, f"cluster.kind={kind}", f"cluster.kind is {kind}, and submit is for Slurm, PBS, SGE and LSF") for kind in ("oar", "local")),
    *((words, CORES, NO_ENVIRONMENT) for words in (SUBMIT, (*SUBMIT, "--dry-run"), ("run", *SUBMIT[1:], "--dry-run"))),
]  # fmt: skip


def test_other_kinds_of_clusters_and_cores_of_sge_without_a_parallel_environment_are_refused(config: Path) -> None:
    before = sorted(config.parent.iterdir())
    for (command, _, *options), sets, said in REFUSED:
        assert said in refused(command, config, *options, "--set", *sets.split(), code=exits.USAGE)
        assert sorted(config.parent.iterdir()) == before


@pytest.mark.cluster
def test_a_driver_whose_time_is_up_submits_itself_again(job: HpcJob) -> None:
    job.set_pace(1)
    assert job.json_of(*SUBMIT)["job"] == "1"
    assert "job 1 of this run is in the queue" in job.call(*SUBMIT, code=2)
    wait_for(lambda: len(job.log()) > 4)
    os.kill(job.status()["pid"], signal.SIGUSR1)
    wait_for(lambda: job.record()["number"] != "1")
    number, begun = job.record()["number"], len(job.log())
    assert 4 < begun < BLOCKS
    assert f"job {number}: in the queue, 1 attempt so far" in job.call("status", "out.zarr.run")
    job.wait_finished()
    assert sorted(int(block) for block, *_ in job.log()) == list(range(1, BLOCKS + 1)), "a block twice"
    after = job.record()
    assert (after["attempts"], after["number"], after["system"]) == (2, number, "pbs")
    assert "finishing the blocks in flight" in job.call("logs", "out.zarr.run")
    wait_for(lambda: job.status()["batch"]["state"] is None)
    assert job.status()["state"] == "finished"
    job.check_whole()


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_real_grid_engine_starts_workers_and_drivers(grid_engine: GridEngine, tmp_path: Path) -> None:
    module = [f"export {name}={shlex.quote(value)}" for name, value in grid_engine.settings.items()]
    job = HpcJob.create(
        tmp_path / "job", dict(os.environ) | grid_engine.settings, kind="sge", interface="lo",
        walltime="60", cores=2, directives=["-pe smp 2"], prologue=[*module, f"export PYTHONPATH={REPOSITORY}"],
    )  # fmt: skip
    job.call("run", "job.yaml", "--allow-import")
    assert len({process for _, process, *_ in job.log()}) == 2
    job.check_whole()
    wait_for(lambda: not grid_engine.jobs())
    (job.folder / "log").write_text("")
    job.set_pace(1)
    number = job.json_of(*SUBMIT, "--fresh")["job"]
    assert grid_engine.jobs() == [number]
    assert "parallel environment" not in grid_engine.call("qstat", "-j", number)
    wait_for(lambda: len(job.log()) > 4)
    os.kill(job.status()["pid"], signal.SIGUSR1)
    wait_for(lambda: job.record()["number"] != number)
    job.wait_finished()
    assert sorted(int(block) for block, *_ in job.log()) == list(range(1, BLOCKS + 1)), "a block twice"
    job.check_whole()
    wait_for(lambda: not grid_engine.jobs())


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_real_grid_engine_explains_errors(grid_engine: GridEngine, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for name, value in grid_engine.settings.items():
        monkeypatch.setenv(name, value)
    script, queue = tmp_path / "batch.sh", sge.SYSTEM
    script.write_text("#$ -S /bin/bash\n#$ -o /no/such/folder/log\ntrue\n")
    number = queue.submit(script)
    assert "Eqw" in wait_for(lambda: (state := queue.state_of(number)) != "in the queue" and state)
    assert "/no/such/folder" in str(queue.state_of(number))
    states = queue.states([number, "999999"])
    assert {job: state.over for job, state in states.items()} == {number: True, "999999": True}
    queue.cancel(number)
    wait_for(lambda: queue.state_of(number) is None)
