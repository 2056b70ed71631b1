"""Workers on a real Slurm: a job for each, steps of an allocation, copies of a command; lost ones are replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from halotile.graphs.clusters.common.security import own_address, private_base
from tests.cases import thorough
from tests.faults import REPOSITORY
from tests.hpc import BLOCKS, HpcJob, finish, wait_for
from tests.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.cluster]


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
    seen = [
        str(process.pid)
        for process in psutil.process_iter(["cmdline"])
        if key in " ".join(process.info["cmdline"] or ())
    ]
    files = [path for path in job.run_directory.rglob("*") if path.is_file() and path.name != "key.pem"]
    return seen + [str(path) for path in files if key in path.read_text(errors="replace")]


def test_each_worker_is_a_job_and_nothing_is_left_of_them(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.2)
    running = job.start("run", "job.yaml", "--allow-import")
    wait_for(lambda: len(job.log()) > 4)
    assert len(slurm.jobs()) == 2
    certificates = list(job.run_directory.glob("workers/tls-*/*.pem"))
    assert len(certificates) == 2
    assert {path.stat().st_mode & 0o777 for path in certificates} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in certificates} == {0o700}
    assert listening(str(job.folder)) == {"127.0.0.1"}
    assert exposed_secrets(job) == []
    finish(running)
    assert len({process for _, process, *_ in job.log()}) == 2
    job.check_whole()
    wait_for(lambda: not slurm.jobs())


def test_between_machines_nothing_listens_but_on_the_address_of_this_one(job: HpcJob) -> None:
    job.config.write_text(job.config.read_text().replace('"interface": "lo"', '"interface": null'))
    job.set_pace(0.2)
    running = job.start("run", "job.yaml", "--allow-import")
    wait_for(lambda: len(job.log()) > 4)
    assert listening(str(job.folder)) <= {"127.0.0.1", own_address()}
    page = job.json_of("status", "out.zarr.run")["dashboard"]
    assert page.startswith("http://127.0.0.1:")
    with urlopen(page) as answer:
        assert answer.status == 200
    finish(running)
    job.check_whole()


@pytest.mark.thorough
def test_logs_lie_in_the_run_directory_wherever_that_is(slurm: Slurm, tmp_path: Path) -> None:
    job = HpcJob.create(tmp_path / "my scans (1)", slurm.environment, kind="slurm", interface="lo")
    job.call("run", "job.yaml", "--allow-import")
    job.check_whole()
    assert len(list(job.run_directory.glob("workers/*.err"))) == 2
    assert "== " in job.call("logs", "out.zarr.run", "--workers")
    assert [path for path in private_base().iterdir() if path.is_symlink()] == []


@pytest.mark.thorough
def test_a_worker_whose_job_is_cancelled_is_replaced(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.7)
    running = job.start("run", "job.yaml", "--allow-import")
    wait_for(lambda: len(job.log()) > 3)
    before = slurm.jobs()
    slurm.call("scancel", before[0])
    after = wait_for(lambda: {*slurm.jobs()} - {*before})
    finish(running)
    assert len(after) == 1
    assert len({process for _, process, *_ in job.log()}) == 3, "the new one has done nothing"
    job.check_whole()


@pytest.mark.thorough
def test_each_job_has_gpus_of_its_own(job: HpcJob) -> None:
    job.set_pace(0.1)
    job.call("run", "job.yaml", "--allow-import", "--set", "cluster.gpus=1", "--set", "run.device=cpu")
    assert sorted({(node, gpus) for _, _, node, gpus in job.log()}) == [("n1", "0"), ("n1", "1")]


@pytest.mark.thorough
def test_a_wrong_partition_is_told_in_slurms_words(job: HpcJob) -> None:
    output = job.call("run", "job.yaml", "--allow-import", "--set", "cluster.queue=fast", code=1, timeout=30)
    assert "Slurm refuses the job" in output
    assert "invalid partition specified: fast" in output
    assert "`sinfo` lists its queues" in output


@pytest.mark.thorough
def test_jobs_that_end_at_once_are_told_with_the_end_of_their_log(job: HpcJob, slurm: Slurm) -> None:
    prologue = 'cluster.prologue=["echo no module called cuda >&2", "exit 7"]'
    output = job.call("run", "job.yaml", "--allow-import", "--set", prologue, code=1)
    assert "4 workers one after the other ended before they did anything" in output
    assert "FAILED (NonZeroExitCode)" in output
    assert "The end of its log:\nno module called cuda" in output
    assert not slurm.jobs()


def allocate(job: HpcJob, slurm: Slurm, *words: str) -> subprocess.Popen[str]:
    """A run inside an allocation of both nodes."""
    settings = ("cluster.kind=auto", "run.device=cpu")
    command = job.command("run", "job.yaml", "--allow-import", *words, *(f"--set={each}" for each in settings))
    return subprocess.Popen(
        ["salloc", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=5000", *command],
        cwd=job.folder,
        env=slurm.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.thorough
def test_in_an_allocation_workers_are_steps_with_gpus_of_their_own(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.3)
    running = allocate(job, slurm, "--workers", "4")
    wait_for(lambda: len(job.log()) > 4)
    assert listening(str(job.folder)) == {"127.0.0.1"}
    assert "cluster: slurm-alloc, in the Slurm allocation" in finish(running)
    seen = {(node, gpus) for _, _, node, gpus in job.log()}
    assert seen == {("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")}
    job.check_whole()


@pytest.mark.thorough
@pytest.mark.parametrize(("gpus", "workers", "device"), [(2, 4, "cuda"), (1, 2, "cuda"), (2, 8, "cpu"), (0, 2, "cpu")])
def test_in_an_allocation_gpus_compute_where_each_worker_has_one(
    gpus: int, workers: int, device: str, slurm: Slurm
) -> None:
    code = "from halotile.graphs.plans.needs import device_of; from halotile.graphs.kinds.sections import Cluster, Run"
    command = [sys.executable, "-c", f"{code}; print(device_of(Run(workers={workers}), Cluster()))"]
    tasks = ["--nodes=2", f"--ntasks-per-node={gpus or 1}", f"--gres=gpu:{gpus}"]
    done = subprocess.run(
        ["salloc", *tasks, *command],
        cwd=REPOSITORY,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [device], done.stderr


@pytest.mark.thorough
def test_a_step_that_is_lost_is_replaced(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.7)
    process = allocate(job, slurm)
    wait_for(lambda: len(job.log()) > 3)
    (number,) = slurm.jobs()
    steps = [step for step in slurm.call("squeue", "--steps", "--noheader", "--format=%i").split() if "." in step]
    slurm.call("scancel", next(step for step in steps if step.split(".")[1].isdecimal()))
    finish(process)
    assert len({process for _, process, *_ in job.log()}) == 3
    job.check_whole()
    wait_for(lambda: number not in slurm.jobs())


@pytest.mark.thorough
def test_copies_of_a_command_become_its_workers(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.2)
    command = job.command("run", "job.yaml", "--allow-import", "--set", "cluster.kind=auto")
    running = subprocess.Popen(
        ["srun", "--ntasks=3", "--label", *command],
        cwd=job.folder,
        env=slurm.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: len(job.log()) > 4)
    assert listening(str(job.folder)) == {"127.0.0.1"}
    assert f"0:   blocks       {BLOCKS} of {BLOCKS} done" in finish(running)
    assert len({process for _, process, *_ in job.log()}) == 2
    job.check_whole()


AT_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.mark.thorough
def test_the_shell_of_an_interactive_step_has_the_allocation_to_itself(job: HpcJob, slurm: Slurm) -> None:
    (job.folder / "shell").write_text('[ "$SLURM_PROCID" = 0 ] && exec "$@"\n')
    command = job.command("run", "job.yaml", "--allow-import", "--set", "cluster.kind=auto")
    step = ["srun", "--ntasks=2", "--mem=5000", "--pty", "bash", "shell", *command]
    done = subprocess.run(
        [sys.executable, "-c", AT_A_TERMINAL, *step],
        cwd=job.folder,
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"{BLOCKS} of {BLOCKS} done" in done.stdout, done.stdout + done.stderr
    assert len({process for _, process, *_ in job.log()}) == 2


@pytest.mark.thorough
def test_jobs_of_a_driver_that_was_killed_end_by_themselves(job: HpcJob, slurm: Slurm) -> None:
    job.set_pace(0.3)
    with job.start("run", "job.yaml", "--allow-import") as running:
        wait_for(lambda: len(job.log()) > 4)
        running.kill()
    wait_for(lambda: not slurm.jobs())
    assert [*job.run_directory.glob("workers/tls-*")], "nobody was there to remove them"
    job.set_pace(0)
    job.call("resume", "out.zarr.run", "--allow-import", "--cluster", "local")
    job.check_whole()


SCRIPT = """
import torch
from halotile import DistributedContext, distribute

site = {"kind": "slurm", "interface": "lo"}
with DistributedContext(workers=2, cluster=site, memory_per_worker="1GiB", device_mode="cpu") as ctx:
    smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
    print(ctx.world_size, tuple(smooth(torch.ones(1, 1, 20, 20)).shape), ctx.folder)
"""


@pytest.mark.thorough
def test_a_context_has_jobs_for_workers_and_its_folder_where_they_see_it(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=slurm.environment | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith(f"2 (1, 1, 20, 20) {tmp_path}/cache/halotile/halotile-"), done.stderr
    assert [*(tmp_path / "cache/halotile").iterdir()] == []
    wait_for(lambda: not slurm.jobs())


def in_docs(page: str, name: str) -> str:
    """The script of this name in a page of the documentation."""
    found = re.search(rf"```\w+\n(# {name}\n.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)
    assert found
    return found[1]


def call_in(folder: Path, slurm: Slurm, *command: str) -> subprocess.Popen[str]:
    """Begin a command in a folder with a cache of its own, whose output goes to a file there."""
    environment = slurm.environment | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")}
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )


@pytest.mark.parametrize("words", [thorough(()), ("--nodes=2",)], ids=["one node", "two nodes"])
def test_copies_of_a_script_that_srun_starts_are_ranks(words: tuple[str, ...], slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "everywhere.py").write_text(in_docs("torch.md", "everywhere.py"))
    running = call_in(tmp_path, slurm, "srun", "-n", "2", *words, sys.executable, "everywhere.py")
    assert running.wait(timeout=120) == 0
    counted = [f"rank {rank} of 2 counts 2" for rank in range(2)]
    assert sorted(line for line in (tmp_path / "output").read_text().splitlines() if "rank" in line) == counted
    assert [*(tmp_path / "cache/halotile/ranks").iterdir()] == []


@pytest.mark.thorough
def test_ranks_of_a_script_wait_until_the_queue_has_let_all_in(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(in_docs("torch.md", "train.py"))
    (tmp_path / "site.yaml").write_text("cluster: {kind: slurm, interface: lo}")
    held = slurm.call("sbatch", "--parsable", "--ntasks=3", "--mem=200", "--output=/dev/null", "--wrap=sleep 600")
    wait_for(lambda: slurm.call("squeue", "--noheader", "--job", held, "--format=%T") == "RUNNING")
    options = ("--torch", "train.py", "--workers", "2", "--memory", "1GiB", "--config", "site.yaml")
    command = Path(sys.executable).with_name("recon-cli")
    running = call_in(tmp_path, slurm, str(command), "exec", *options)
    output = tmp_path / "output"
    wait_for(lambda: "waiting for 2 workers: 1 PENDING (Resources)" in output.read_text())
    slurm.call("scancel", held)
    assert running.wait(timeout=120) == 0, output.read_text()
    printed = sorted(line for line in output.read_text().splitlines() if line.startswith("["))
    assert printed == ["[0] 0 of 2", "[1] 1 of 2"]
    wait_for(lambda: not slurm.jobs())
