"""Runs as batch jobs of a real Slurm: submitted, drained when their time is up, resumed, cancelled."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr

from tests.batch_systems import Slurm
from tests.hpc import BLOCKS, HpcJob, wait_for
from tests.support import read_zarr

pytestmark = [pytest.mark.slurm, pytest.mark.cluster]


SUBMIT = ("submit", "job.yaml", "--allow-import")


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> HpcJob:
    """A job that may take ten minutes."""
    return HpcJob.create(tmp_path, slurm.environment, interface="lo", walltime="10")


def end_time(slurm: Slurm, number: str) -> None:
    """Send the signal that Slurm sends before the time of a job is up."""
    slurm.call("scancel", "--signal=USR1", "--batch", number)


def go_on(job: HpcJob, slurm: Slurm, number: str) -> None:
    """Begin the next attempt, and wait for the end of the run."""
    job.set_pace(0)
    begin_now(slurm, number)
    job.wait_finished()


def begin_now(slurm: Slurm, number: str) -> None:
    """Restart a requeued job at once, for which Slurm would wait two minutes: its node refuses it in the second in which it ended."""

    def state() -> str:
        return slurm.call("squeue", "--noheader", f"--jobs={number}", "--format=%T %r")

    wait_for(lambda: "BeginTime" in state())
    time.sleep(4)
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_for(lambda: "BeginTime" not in state())


def submitted(job: HpcJob, *words: str) -> str:
    """The number of the batch job."""
    return str(job.json_of(*SUBMIT, *words)["job"])


def check_private(job: HpcJob, output: str) -> None:
    """Assert that others can read the output as the umask says, and nothing of the run, which keeps no key."""
    run = job.folder / f"{output}.run"
    assert run.stat().st_mode & 0o777 == 0o700
    umask = os.umask(0o077)
    os.umask(umask)
    assert (job.folder / output / "zarr.json").stat().st_mode & 0o777 == 0o666 & ~umask
    own = [path for path in run.iterdir() if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in own} == {0}
    assert all("PRIVATE KEY" not in path.read_text(errors="replace") for path in own)


def at_work(job: HpcJob, pace: float, *words: str) -> str:
    """The number of the batch job of a run that has done some blocks; of one with four workers, on both nodes."""
    job.set_pace(pace)
    number = submitted(job, *words)
    nodes = {"n1", "n2"} if "--workers" in words else {"n1"}
    wait_for(lambda: len(job.log()) > 6 and nodes <= {node for _, _, node, _ in job.log()})
    return number


@pytest.mark.thorough
def test_a_node_that_dies_takes_its_own_workers_and_no_others(job: HpcJob, slurm: Slurm) -> None:
    number = at_work(job, 0.5, "--workers", "4")
    with slurm.lost("n2"):
        wait_for(lambda: "going on with 2 of 4" in (job.run_directory / "batch.log").read_text(), 90)
        job.set_pace(0)
        wait_for((job.run_directory / "finished").exists)
    assert job.status()["batch"] == {"job": number, "state": None, "attempts": 1, "failure": None}
    job.check_whole()


@pytest.mark.thorough
def test_a_driver_whose_node_dies_is_asked_for_again(job: HpcJob, slurm: Slurm) -> None:
    number = at_work(job, 0.5, "--workers", "4")
    done = job.status()["done"]
    with slurm.lost("n1"):
        wait_for(lambda: "BeginTime" in slurm.call("squeue", "--noheader", f"--jobs={number}", "--format=%r"), 150)
    go_on(job, slurm, number)
    assert job.status()["batch"]["attempts"] == 2
    assert len(job.log()) - BLOCKS < BLOCKS - done
    job.check_whole()


@pytest.mark.thorough
def test_blocks_for_which_no_time_is_left_are_done_in_another_attempt(job: HpcJob, slurm: Slurm) -> None:
    number = at_work(job, 0.3, "--set", 'cluster.directives=["--signal=B:USR1@8"]')
    job.set_pace(300)
    begun = len(job.log())
    wait_for(lambda: len(job.log()) == begun + 2)
    end_time(slurm, number)
    wait_for(lambda: job.status()["state"] == "queued")
    assert "no time is left for the blocks in flight" in (job.run_directory / "batch.log").read_text()
    go_on(job, slurm, number)
    assert job.record()["attempts"] == 2
    job.check_whole()


@pytest.mark.thorough
def test_a_run_that_may_not_be_put_back_is_submitted_again(job: HpcJob, slurm: Slurm) -> None:
    number = at_work(job, 0.3)
    slurm.call("scontrol", "update", f"JobId={number}", "Requeue=0")
    job.set_pace(0)
    end_time(slurm, number)
    wait_for((job.run_directory / "finished").exists)
    record = job.record()
    assert (record["attempts"], record["number"] == number) == (2, False)
    job.check_whole()


@pytest.mark.thorough
def test_an_attempt_that_did_nothing_is_the_last(job: HpcJob, slurm: Slurm) -> None:
    number = submitted(job, "--set", 'cluster.prologue=["sleep 1"]')
    log = job.run_directory / "batch.log"
    wait_for(lambda: "cluster: slurm-alloc" in log.read_text())
    end_time(slurm, number)
    reason = wait_for((job.run_directory / "failed").exists) and (job.run_directory / "failed").read_text()
    assert "its time was up before anything was done, so no other job is requested" in reason
    wait_for(lambda: not slurm.jobs())
    assert job.status()["state"] == "failed"
    assert "its time was up before anything was done" in job.call("status", "out.zarr.run")


@pytest.mark.thorough
def test_a_cancelled_run_leaves_no_process_and_can_be_gone_on_with(job: HpcJob, slurm: Slurm) -> None:
    number = at_work(job, 0.3)
    assert f"job {number} is cancelled" in job.call("cancel", "out.zarr.run")
    here = str(job.folder)
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if here in " ".join(p.info["cmdline"] or ())] == []
    assert not slurm.jobs()
    done = job.status()["done"]
    assert job.status()["state"] == "stopped"
    job.set_pace(0)
    job.call("resume", "out.zarr.run", "--allow-import")
    assert job.status()["state"] == "finished"
    assert not (job.run_directory / "failed").exists()
    assert len(job.log()) >= BLOCKS
    assert done < BLOCKS
    job.check_whole()


@pytest.mark.thorough
def test_what_slurm_refuses_is_told_and_leaves_everything_as_it_was(job: HpcJob) -> None:
    refused = (*SUBMIT, "--set", "cluster.queue=fast")
    assert "invalid partition specified: fast" in job.call(*refused, code=1)
    assert not job.run_directory.exists()
    submitted(job)
    wait_for((job.run_directory / "finished").exists)
    wait_for(lambda: job.status()["batch"]["state"] is None)
    kept = ("finished", "batch.sh", "batch.json", "batch.log")
    before = [(job.run_directory / name).read_bytes() for name in kept]
    assert "invalid partition specified: fast" in job.call(*refused, code=1)
    assert [(job.run_directory / name).read_bytes() for name in kept] == before
    assert job.status()["state"] == "finished"


def test_a_job_that_ends_before_the_run_begins_is_told(job: HpcJob, slurm: Slurm) -> None:
    submitted(job, "--set", 'cluster.prologue=["echo no module called cuda >&2", "exit 7"]')
    wait_for(lambda: not slurm.jobs())
    assert job.status()["state"] == "failed"
    assert "its batch job ended before the run began" in job.call("status", "out.zarr.run")
    assert "no module called cuda" in job.call("logs", "out.zarr.run")


@pytest.mark.thorough
def test_fresh_begins_once_and_counts_what_it_does_itself(job: HpcJob, slurm: Slurm) -> None:
    job.call("run", "job.yaml", "--allow-import", "--cluster", "local")
    (job.folder / "log").write_text("")
    job.set_pace(0.3)
    number = submitted(job, "--fresh")
    assert job.status()["state"] == "queued", "what stands there is of the run before"
    wait_for(lambda: len(job.log()) > 4)
    end_time(slurm, number)
    go_on(job, slurm, number)
    assert sorted(int(block) for block, *_ in job.log()) == list(range(1, BLOCKS + 1))
    job.check_whole()


def test_many_images_go_on_in_another_attempt_without_finished_ones(job: HpcJob, slurm: Slurm) -> None:
    names = ("a", "b", "c")
    for name in names:
        shutil.copytree(job.folder / "in.zarr", job.folder / f"scans/{name}.zarr")
    job.config.write_text(
        job.config.read_text().replace("in.zarr", "scans/*.zarr").replace("out.zarr", "clean/{stem}.zarr")
    )
    job.set_pace(0.1)
    assert "#SBATCH --signal=B:USR1@120" in job.call(*SUBMIT, "--dry-run")
    assert not slurm.jobs()
    number = submitted(job, "--fresh")
    batch = job.folder / "clean/{stem}.zarr.run"
    first = job.folder / "clean/a.zarr.run/status.json"
    wait_for(lambda: first.exists() and json.loads(first.read_text())["state"] == "finished")
    begun = wait_for(lambda: job.log()[BLOCKS + 2 :]) and first.stat().st_mtime
    job.set_pace(1)  # the others are not done before the signal
    assert f"job {number}: RUNNING, 1 attempt so far" in job.call("status", str(batch))
    end_time(slurm, number)
    wait_for(lambda: job.json_of("status", str(batch))["state"] == "queued")
    stand = job.json_of("status", str(batch))
    assert BLOCKS < stand["done"] == len(job.log()) < 3 * BLOCKS
    assert stand["total"] == 3 * BLOCKS
    job.set_pace(0)
    begin_now(slurm, number)
    wait_for((batch / "finished").exists)
    assert sorted(int(block) for block, *_ in job.log()) == sorted(3 * [*range(1, BLOCKS + 1)])
    assert first.stat().st_mtime == begun
    wait_for(lambda: job.json_of("status", str(batch))["state"] == "finished")
    assert "3 of 3 images finished" in job.call("status", "job.yaml")
    assert "SIGUSR1: finishing the blocks in flight" in job.call("logs", str(batch))
    check_private(job, "clean/a.zarr")
    given = zarr.open_array(job.folder / "in.zarr", mode="r")[...]
    for name in names:
        np.testing.assert_array_equal(read_zarr(job.folder / f"clean/{name}.zarr"), given * 2)
