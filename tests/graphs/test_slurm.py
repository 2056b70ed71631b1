"""Workers on a real Slurm: a job for each, steps of an allocation, copies of a command; lost ones are replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from halotile.graphs.clusters.common.security import own_address, private_base
from tests.batch_systems import Slurm
from tests.cases import thorough
from tests.faults import REPOSITORY
from tests.hpc import BLOCKS, HpcJob, finish, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.cluster]

RUN = ("run", "job.yaml", "--allow-import")
ALLOCATED = ("salloc", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=5000")


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> HpcJob:
    """A job whose workers are Slurm jobs."""
    return HpcJob.create(tmp_path, slurm.environment, kind="slurm", interface="lo")


def listening(marker: str) -> set[str]:
    """The addresses on which Python listens, in processes with a marker in their environment or command line."""
    found = set()
    for process in psutil.process_iter():
        try:
            known = [*process.cmdline(), *process.environ().values()]
            ours = "python" in process.name() and any(marker in word for word in known)
            connections = process.net_connections(kind="inet") if ours else []
        except psutil.Error:
            continue
        found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def exposed_secrets(job: HpcJob) -> list[str]:
    """Places where a key can be seen: the arguments of processes, scripts and logs."""
    key = next(job.run_directory.glob("workers/tls-*/key.pem")).read_text().splitlines()[1]
    running = psutil.process_iter(["cmdline"])
    seen = [str(process.pid) for process in running if key in " ".join(process.info["cmdline"] or ())]
    files = [path for path in job.run_directory.rglob("*") if path.is_file() and path.name != "key.pem"]
    return seen + [str(path) for path in files if key in path.read_text(errors="replace")]


def begun(job: HpcJob, pace: float, *words: str) -> subprocess.Popen[str]:
    """A run that is at work, by the command or by one that starts it."""
    job.set_pace(pace)
    command = job.command(*RUN)
    if words:
        command = [*words, *command, "--set=cluster.kind=auto", "--set=run.device=cpu"]
    running = job.start_of(command)
    wait_for(lambda: len(job.log()) > 4)
    return running


def workers_of(job: HpcJob) -> int:
    return len({process for _, process, *_ in job.log()})


def test_workers_are_jobs_that_leave_nothing_and_listen_between_machines_only(job: HpcJob, slurm: Slurm) -> None:
    job.config.write_text(job.config.read_text().replace('"interface": "lo"', '"interface": null'))
    running = begun(job, 0.2)
    assert len(slurm.jobs()) == 2
    certificates = list(job.run_directory.glob("workers/tls-*/*.pem"))
    assert [path.stat().st_mode & 0o777 for path in certificates] == [0o600] * 2
    assert {path.parent.stat().st_mode & 0o777 for path in certificates} == {0o700}
    assert listening(str(job.folder)) <= {"127.0.0.1", own_address()}
    assert exposed_secrets(job) == []
    page = job.status()["dashboard"]
    assert page.startswith("http://127.0.0.1:")
    with urlopen(page) as answer:
        assert answer.status == 200
    finish(running)
    assert workers_of(job) == 2
    job.check_whole()
    wait_for(lambda: not slurm.jobs())


@pytest.mark.thorough
def test_logs_are_in_the_run_directory_and_each_job_has_its_own_gpus(slurm: Slurm, tmp_path: Path) -> None:
    job = HpcJob.create(tmp_path / "my scans (1)", slurm.environment, kind="slurm", interface="lo", gpus=1)
    job.set_pace(0.1)
    job.call(*RUN, "--set", "run.device=cpu")
    job.check_whole()
    assert sorted({(node, gpus) for _, _, node, gpus in job.log()}) == [("n1", "0"), ("n1", "1")]
    assert len(list(job.run_directory.glob("workers/*.err"))) == 2
    assert "== " in job.call("logs", "out.zarr.run", "--workers")
    assert [path for path in private_base().iterdir() if path.is_symlink()] == []


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [(), ALLOCATED], ids=["job", "step of an allocation"])
def test_a_worker_that_is_cancelled_is_replaced(launcher: tuple[str, ...], job: HpcJob, slurm: Slurm) -> None:
    running = begun(job, 0.7, *launcher)
    before = slurm.jobs()
    steps = [step for step in slurm.call("squeue", "--steps", "--noheader", "--format=%i").split() if "." in step]
    slurm.call("scancel", next(step for step in steps if step.split(".")[1].isdecimal()) if launcher else before[0])
    after = launcher or wait_for(lambda: {*slurm.jobs()} - {*before})
    finish(running)
    assert launcher or len(after) == 1
    assert workers_of(job) == 3, "the new one has done nothing"
    job.check_whole()
    wait_for(lambda: before[0] not in slurm.jobs())


@pytest.mark.thorough
def test_jobs_that_are_refused_or_end_at_once_are_told_in_slurms_words(job: HpcJob, slurm: Slurm) -> None:
    for setting, said in {
        "cluster.queue=fast": ("Slurm refuses the job", "invalid partition specified: fast", "`sinfo` lists its queues"),
        'cluster.prologue=["echo no module called cuda >&2", "exit 7"]': (
            "4 workers in a row ended before doing any work", "FAILED (NonZeroExitCode)", "The end of its log:\nno module called cuda",
        ),
    }.items():  # fmt: skip
        output = job.call(*RUN, "--set", setting, code=1)
        assert [words for words in said if words not in output] == []
        assert not slurm.jobs()


ALL_GPUS = {("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launcher", "words", "count"),
    [
        (ALLOCATED, "cluster: slurm-alloc, in the Slurm allocation", 4),
        (("srun", "--ntasks=3", "--label"), f"0:   blocks       {BLOCKS} of {BLOCKS} done", 2),
    ],
    ids=["steps of an allocation", "copies of a command"],
)
def test_workers_of_an_allocation_have_gpus_of_their_own(job: HpcJob, launcher: Any, words: str, count: int) -> None:
    job.config.write_text(job.config.read_text().replace('"workers": 2', f'"workers": {count}'))
    running = begun(job, 0.3, *launcher)
    assert listening(str(job.folder)) == {"127.0.0.1"}
    assert words in finish(running)
    assert workers_of(job) == count
    assert count == 2 or {(node, gpus) for _, _, node, gpus in job.log()} == ALL_GPUS
    job.check_whole()


@pytest.mark.thorough
def test_jobs_of_a_driver_that_was_killed_end_by_themselves(job: HpcJob, slurm: Slurm) -> None:
    with begun(job, 0.3) as running:
        running.kill()
    wait_for(lambda: not slurm.jobs())
    assert [*job.run_directory.glob("workers/tls-*")], "nobody was there to remove them"
    job.set_pace(0)
    job.call("resume", "out.zarr.run", "--allow-import", "--cluster", "local")
    job.check_whole()


@pytest.mark.parametrize("words", [thorough(()), ("--nodes=2",)], ids=["one node", "two nodes"])
def test_copies_of_a_script_that_srun_starts_are_ranks(words: tuple[str, ...], slurm: Slurm, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/torch.md").read_text()
    found = re.search(r"```\w+\n(# everywhere.py\n.*?)```", page, re.DOTALL)
    assert found
    (tmp_path / "script.py").write_text(found[1])
    environment = slurm.environment | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ("srun", "-n", "2", *words, sys.executable, "script.py")
    said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=120)
    counted = [f"rank {rank} of 2 counts 2" for rank in range(2)]
    assert sorted(line for line in said.splitlines() if "rank" in line) == counted
    assert [*(tmp_path / "cache/halotile/ranks").iterdir()] == []
