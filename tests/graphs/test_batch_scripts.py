"""Job scripts of all batch systems, compared to the letter: only two of the systems can be run here."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common.security import Credentials
from halotile.graphs.clusters.launches.batch_system import BatchSystem, job_script, logs_of
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Input, Output, Run
from halotile.graphs.submission import check_walltime, script_of, walltime_seconds
from halotile.registry import names
from tests.graphs.batch_systems import SYSTEMS

pytestmark = pytest.mark.filterwarnings("ignore:OAR Job memory")

SCRIPTS = Path(__file__).with_name("scripts")
LOGS = Path("/scratch/ada/x.run/workers")
PLAIN = Cluster(interface="lo")
SITE = Cluster(
    interface="lo",
    queue="gpu",
    account="phys",
    walltime="04:00:00",
    cores=4,
    gpus=1,
    prologue=("module load cuda", "source env/bin/activate"),
    directives=("--constraint=v100",),
)
SITES = {
    "sge": replace(SITE, directives=("-pe smp 4", "-l h_vmem=2G")),
    "htcondor": Cluster(
        interface="lo", cores=4, gpus=1, prologue=("module load cuda",), directives=("nice_user = True",)
    ),
}


def worker_script(system: BatchSystem, choice: Cluster) -> str:
    """The script of a job, with the interpreter under one name."""
    order = Order(workers=2, memory_bytes=4 * 2**30, choice=choice)
    security = Credentials(LOGS / "tls-1").security
    text = job_script(system, order, address="tls://10.0.0.7:8786", logs=LOGS, security=security)
    return text.replace(sys.executable, "PYTHON")


def driver_script(system: BatchSystem, choice: Cluster) -> str:
    """The script of a submitted run, likewise."""
    job = Denoising(
        input=Input(path="in.zarr"),
        output=Output(path="/scratch/ada/my scan.zarr"),
        denoiser=DenoiserChoice(name="tv"),
        run=Run(workers=8),
        cluster=choice,
    )
    text = script_of(system, job, Path("/scratch/ada/my scan.zarr.run"), 0o022)
    return text.replace(sys.executable, "PYTHON")


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("choice", ["plain", "site"])
def test_the_script_of_a_worker(name: str, choice: str) -> None:
    text = worker_script(SYSTEMS[name], PLAIN if choice == "plain" else SITES.get(name, SITE))
    assert text == (SCRIPTS / f"{name}-{choice}.txt").read_text()
    assert "PRIVATE" not in text
    assert f"--tls-key {LOGS}/tls-1/key.pem" in text


@pytest.mark.parametrize("script", ["submit-plain", "submit-site", "driver-pbs", "driver-sge", "driver-lsf"])
def test_the_script_of_a_submitted_run(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    kind, name = script.split("-")
    if kind == "submit":
        system, choice = "slurm", PLAIN if name == "plain" else SITE
    else:
        system, choice = name, replace(SITES.get(name, SITE), directives=(), kind=name)
    theirs = ["-theirs"] if kind == "driver" else []
    with dask.config.set({f"jobqueue.{system}.job-extra-directives": theirs}):
        text = driver_script(SYSTEMS[system], choice)
    assert text == (SCRIPTS / f"{script}.txt").read_text()


def test_every_batch_system_is_here() -> None:
    others = {"local", "local-cuda", "scheduler", "slurm-alloc", "ranks"}
    assert {*names("clusters")} == {*SYSTEMS} | others


USERS_COMMANDS = {
    "slurm": "sbatch scancel squeue sinfo scontrol",
    "pbs": "qsub qdel qstat",
    "sge": "qsub qdel qstat qconf",
    "lsf": "bsub bkill bjobs bqueues",
    "oar": "oarsub oardel oarstat oarnodes",
    "htcondor": "condor_submit condor_rm condor_q condor_status",
}
"""Commands of each system that its users may call, from its manual pages."""
LISTED = {"oar": "nodes", "htcondor": "machines"}
"""OAR shows its queues to administrators alone, and HTCondor has none."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_called_and_named_with_commands_that_it_has(name: str) -> None:
    system = SYSTEMS[name]
    named = re.fullmatch(r"`(.*)` lists its (\w+)", system.lists)
    assert named
    lines = (system.submits, system.cancels, system.states.command, named[1], system.requeues)
    assert {line.split()[0] for line in lines if line} <= {*USERS_COMMANDS[name].split()}
    assert named[2] == LISTED.get(name, "queues")
    job_class = system.cluster_class().job_cls
    assert (job_class.submit_command, job_class.cancel_command) == (system.submits, system.cancels)
    if system.driver is not None:  # the first number that it prints is that of the job
        assert job_class.job_id_regexp == r"(?P<job_id>\d+)"


THEIRS = {"job-extra-directives": ["--nice"], "worker-extra-args": ["--lifetime", "25m"]}
LINES: list[tuple[str, Mapping[str, Any], Mapping[str, Any], list[str], list[str]]] = [
    ("slurm", {"directives_skip": ("--mem=",)}, {}, [], ["--mem="]),
    ("lsf", {"directives_skip": ("rusage",)}, {}, [], ["rusage"]),
    ("sge", {"directives_skip": ("mem_free",)}, {}, [], ["mem_free"]),
    ("oar", {"directives_skip": ("-O ",)}, {}, [], ["-O "]),
    # The user's own configuration of dask-jobqueue counts, but for what the job says.
    ("slurm", {"account": "phys"}, {"queue": "theirs"}, ["#SBATCH -p theirs\n", "#SBATCH -A phys\n"], []),
    ("slurm", {"queue": "fast"}, {"queue": "theirs"}, ["#SBATCH -p fast\n"], ["theirs"]),
    # Directives of the user stand beside those for GPUs.
    ("slurm", {"gpus": 1}, THEIRS, ["#SBATCH --nice\n", "--gres=gpu:1", "--lifetime 25m", "--memory-limit"], []),
    ("pbs", {"gpus": 1}, THEIRS, ["--nice", "ngpus=1", "--lifetime 25m", "--memory-limit"], []),
    ("sge", {"gpus": 1}, THEIRS, ["--nice", "-l gpu=1", "--lifetime 25m", "--memory-limit"], []),
    ("lsf", {"gpus": 1}, THEIRS, ["--nice", '-gpu "num=1"', "--lifetime 25m", "--memory-limit"], []),
    ("oar", {"gpus": 1}, THEIRS, ["--nice", "/nodes=1/gpu=1", "--lifetime 25m", "--memory-limit"], []),
    (
        "htcondor",
        {"gpus": 1},
        THEIRS | {"job-extra-directives": {"+Project": "theirs"}},
        ["theirs", "request_gpus = 1", "--lifetime 25m", "--memory-limit"],
        [],
    ),
    # What the job requests itself is not requested twice.
    ("sge", {"directives": ("-pe mpi 4",), "cores": 4}, {}, ["#$ -pe mpi 4\n", "#$ -l mem_free=4608M\n"], []),
    ("sge", {"directives": ("-l h_vmem=6G -pe mpi 4",), "cores": 4}, {}, ["#$ -l h_vmem=6G -pe mpi 4\n"], []),
    ("sge", {"directives": ("-l h_vmem=6G",)}, {}, ["#$ -l h_vmem=6G\n"], ["4608M"]),
    ("sge", {"directives": ("-l m_mem_free=6G",)}, {}, ["#$ -l m_mem_free=6G\n"], ["4608M"]),
    ("sge", {"directives": ("-l mem_free=6G,gpu=1",)}, {}, ["#$ -l mem_free=6G,gpu=1\n"], ["4608M"]),
    ("sge", {"directives": ("-l h_rss=6G",)}, {}, ["#$ -l h_rss=6G\n"], ["4608M"]),
    ("sge", {"directives": ("-S /usr/bin/bash",)}, {}, ["#$ -S /usr/bin/bash\n"], ["-S /bin/bash"]),
    ("lsf", {"directives": ('-R "rusage[mem=9GB]"',)}, {}, ["rusage[mem=9GB]"], ["rusage[mem=4608MB]"]),
    (
        "oar",
        {"gpus": 1, "options": {"resource_spec": "/nodes=1/gpu=1/core=4"}},
        {},
        ["#OAR -l /nodes=1/gpu=1/core=4,walltime="],
        [],
    ),
    # Commands of a prologue are the shell's, and no macros of HTCondor.
    (
        "htcondor",
        {"prologue": ("export SITE=$(hostname)", "cd ${HOME}/$(date +%F)")},
        {},
        ["export SITE=$(DOLLAR)(hostname); cd ${HOME}/$(DOLLAR)(date +%F); PYTHON"],
        [],
    ),
]
"""System, its cluster section, the user's configuration, and what the script of a worker has and has not."""


@pytest.mark.parametrize(("name", "section", "configured", "present", "absent"), LINES)
def test_a_script_has_what_the_job_and_the_user_say(
    name: str, section: dict[str, Any], configured: dict[str, Any], present: list[str], absent: list[str]
) -> None:
    default = worker_script(SYSTEMS[name], PLAIN)
    with dask.config.set({f"jobqueue.{name}.{key}": value for key, value in configured.items()}):
        text = worker_script(SYSTEMS[name], replace(PLAIN, **section))
    assert [part for part in present if part not in text] == []
    assert [part for part in absent if part in text] == []
    assert "directives_skip" not in section or absent[0] in default


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("htcondor", {"queue": "gpu"}, r"cluster\.queue is gpu, and HTCondor has nothing of the kind"),
        ("sge", {"cores": 4}, r'cluster\.cores is 4.*directives: \["-pe smp 4"\]'),
    ],
)
def test_what_a_system_lacks_is_refused(name: str, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_script(SYSTEMS[name], replace(PLAIN, **section))


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["-pe smp 4"], []),
        (["  -pe mpi 2-4 ", "-R y"], ["-R y"]),
        (["-l h_vmem=6G -pe smp 4 -R y"], ["-l h_vmem=6G -R y"]),
        (["-pe smp 4 -P my-pe"], ["-P my-pe"]),
    ],
)
@pytest.mark.parametrize("source", ["job", "configuration", "options"])
def test_a_driver_takes_one_slot_of_a_grid_engine(source: str, written: list[str], kept: list[str]) -> None:
    choice = Cluster(
        kind="sge",
        cores=4,
        directives=tuple(written) if source == "job" else (),
        options={"job_extra_directives": written} if source == "options" else {},
    )
    configured = written if source == "configuration" else []
    with dask.config.set({"jobqueue.sge.job-extra-directives": configured}):
        text = driver_script(SYSTEMS["sge"], choice)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "-pe " not in text.replace("my-pe", "")
    assert "#$" not in lines
    assert [line for line in kept if f"#$ {line}" not in lines] == []


@pytest.mark.parametrize(
    ("name", "written", "seconds"),
    [
        ("pbs", "3600", 3600),
        ("pbs", "30:00", 1800),
        ("sge", "01:00:00", 3600),
        ("lsf", "00:30", 1800),
        ("lsf", "45", 2700),
    ],
)
def test_a_walltime_that_the_user_has_configured_is_that_of_the_system(name: str, written: str, seconds: int) -> None:
    SYSTEMS[name].cluster_class()  # its import makes the default settings known
    with dask.config.set({f"jobqueue.{name}.walltime": written}):
        assert walltime_seconds(SYSTEMS[name], PLAIN) == seconds


@pytest.mark.parametrize(("name", "walltime"), [("pbs", "4"), ("lsf", None)])
def test_a_driver_needs_time_before_it_drains(name: str, walltime: str | None) -> None:
    with (
        dask.config.set({"jobqueue.lsf.walltime": "0:04"}),
        pytest.raises(ConfigError, match=r"cluster\.walltime is 240 s, and a run drains 120 s before"),
    ):
        check_walltime(Cluster(walltime=walltime), SYSTEMS[name])


SUBMITTED = [
    ("slurm", 'echo "Submitted batch job 123"', 123),
    ("pbs", "echo 123.server", 123),
    ("sge", "echo 'Your job 123 (\"batch.sh\") has been submitted'", 123),
    ("lsf", 'grep -q "BSUB -W 4:00" && echo "Job <123> is submitted to queue <normal>."', 123),
    ("pbs", "echo 'qsub: Unknown Queue' >&2; exit 1", "qsub: Unknown Queue"),
    ("slurm", "true", "sbatch printed no job number: nothing"),
    ("slurm", None, "sbatch is not installed here: this machine is not part of a Slurm cluster. Write"),
]
"""What the command that submits does, and the job's number, or the error."""


@pytest.mark.parametrize(("name", "command", "expected"), SUBMITTED)
def test_a_script_is_submitted(
    name: str, command: str | None, expected: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, script = SYSTEMS[name], tmp_path / "batch.sh"
    script.write_text("#BSUB -W 4:00\n")
    if command is not None:
        (tmp_path / system.submits).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / system.submits).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if command is not None else str(tmp_path))
    if isinstance(expected, int):
        assert system.submit(script) == str(expected)
        return
    with pytest.raises(ClusterFailed, match=re.escape(expected)):
        system.submit(script)


@pytest.mark.parametrize("name", ["1234.pbs.OU", "halotile.o1234", "halotile-0-1234.err", "worker-1234.0.out"])
def test_the_log_of_a_job_is_found_by_its_number(name: str, tmp_path: Path) -> None:
    for other in (name, name.replace("1234", "12345"), name.replace("1234", "71234")):
        (tmp_path / other).touch()
    assert logs_of(tmp_path, "1234.pbs-server") == [tmp_path / name]
