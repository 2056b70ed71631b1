"""Job scripts of all batch systems, compared to the letter: only one of the systems can be run here."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest

from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters import htcondor, lsf, oar, pbs, sge, slurm
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common.security import Credentials
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_jobs import job_script, logs_of
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.queue_answers import JobRows
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Input, Output, Run
from halotile.graphs.submission.queues import queue_of
from halotile.graphs.submission.script import batch_script, check_walltime, walltime_seconds
from halotile.graphs.submission.script import script_of as script_of_run
from halotile.registry import names

pytestmark = pytest.mark.filterwarnings("ignore:OAR Job memory")

SCRIPTS = Path(__file__).with_name("scripts")
SYSTEMS = {
    "slurm": slurm.SYSTEM,
    "pbs": pbs.SYSTEM,
    "sge": sge.SYSTEM,
    "lsf": lsf.SYSTEM,
    "oar": oar.SYSTEM,
    "htcondor": htcondor.SYSTEM,
}
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


def script_of(system: BatchSystem, choice: Cluster) -> str:
    """The script of a job, with the interpreter under one name."""
    order = Order(workers=2, memory_bytes=4 * 2**30, choice=choice)
    security = Credentials(LOGS / "tls-1").security
    text = job_script(system, order, address="tls://10.0.0.7:8786", logs=LOGS, security=security)
    return text.replace(sys.executable, "PYTHON")


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("how", ["plain", "site"])
def test_the_script_of_a_worker(name: str, how: str) -> None:
    choice = PLAIN if how == "plain" else SITES.get(name, SITE)
    assert script_of(SYSTEMS[name], choice) == (SCRIPTS / f"{name}-{how}.txt").read_text()


def test_every_batch_system_is_here() -> None:
    others = {"local", "local-cuda", "scheduler", "slurm-alloc", "ranks"}
    assert {*names("clusters")} == {*SYSTEMS} | others


@pytest.mark.parametrize("name", SYSTEMS)
def test_jobs_are_submitted_with_the_command_of_dask_jobqueue(name: str) -> None:
    dask_jobqueue = pytest.importorskip("dask_jobqueue", reason="the extra hpc is not installed")
    system = SYSTEMS[name]
    assert getattr(dask_jobqueue, system.cluster).job_cls.submit_command == system.submits


USERS_COMMANDS = {
    "slurm": "sbatch scancel squeue sinfo",
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
    asked = system.states.command if isinstance(system.states, JobRows) else "squeue"
    cancelled = system.cluster_class().job_cls.cancel_command
    called = [line.split()[0] for line in (system.submits, cancelled, asked, named[1])]
    assert set(called) <= set(USERS_COMMANDS[name].split())
    assert named[2] == LISTED.get(name, "queues")


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_script_holds_a_secret(name: str) -> None:
    text = script_of(SYSTEMS[name], PLAIN)
    assert "PRIVATE" not in text
    assert f"--tls-key {LOGS}/tls-1/key.pem" in text


def test_directives_are_left_out_by_what_they_contain() -> None:
    assert "--mem" not in script_of(
        slurm.SYSTEM, Cluster(interface="lo", directives_skip=("--mem=",))
    ).replace("--memory", "")


def test_what_a_system_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.queue is gpu, and HTCondor has nothing of the kind"):
        script_of(htcondor.SYSTEM, Cluster(interface="lo", queue="gpu"))


def test_the_users_own_configuration_of_dask_jobqueue_counts() -> None:
    import dask

    with dask.config.set(
        {"jobqueue.slurm.queue": "theirs", "jobqueue.slurm.job-extra-directives": ["--nice"]}
    ):
        ours = script_of(slurm.SYSTEM, Cluster(interface="lo", account="phys"))
        assert "#SBATCH -p theirs\n" in ours
        assert "#SBATCH --nice\n" in ours
        assert "#SBATCH -p fast\n" in script_of(slurm.SYSTEM, Cluster(interface="lo", queue="fast"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_users_own_directives_stand_beside_those_for_gpus(name: str) -> None:
    import dask

    theirs: Any = {"+Project": "theirs"} if name == "htcondor" else ["--comment=theirs"]
    settings = {
        f"jobqueue.{name}.job-extra-directives": theirs,
        f"jobqueue.{name}.worker-extra-args": ["--lifetime", "25m"],
    }
    with dask.config.set(settings):
        text = script_of(SYSTEMS[name], Cluster(interface="lo", gpus=1))
    assert "theirs" in text
    assert "gpu" in text.replace("--gpus", "")
    assert "--lifetime 25m" in text
    assert "--memory-limit" in text


@pytest.mark.parametrize("how", ["plain", "site"])
def test_the_script_of_a_whole_run(how: str) -> None:
    job = Denoising(
        input=Input(path="in.zarr"),
        output=Output(path="/scratch/ada/my scan.zarr"),
        denoiser=DenoiserChoice(name="tv"),
        run=Run(workers=8),
        cluster=PLAIN if how == "plain" else SITE,
    )
    text = batch_script(job, Path("/scratch/ada/my scan.zarr.run"), umask=0o022).replace(
        sys.executable, "PYTHON"
    )
    assert text == (SCRIPTS / f"submit-{how}.txt").read_text()


@pytest.mark.parametrize("name", ["pbs", "sge", "lsf"])
def test_the_script_of_a_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    monkeypatch.chdir("/")
    choice = replace(SITES.get(name, SITE), directives=(), kind=name)
    job = Denoising(
        input=Input(path="in.zarr"),
        output=Output(path="/scratch/ada/my scan.zarr"),
        denoiser=DenoiserChoice(name="tv"),
        run=Run(workers=8),
        cluster=choice,
    )
    with dask.config.set({f"jobqueue.{name}.job-extra-directives": ["-theirs"]}):
        text = script_of_run(SYSTEMS[name], job, Path("/scratch/ada/my scan.zarr.run"), 0o022)
    text = text.replace(sys.executable, "PYTHON")
    assert text == (SCRIPTS / f"driver-{name}.txt").read_text()


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (["-pe smp 4"], []),
        (["  -pe mpi 2-4 ", "-R y"], ["-R y"]),
        (["-l h_vmem=6G -pe smp 4 -R y"], ["-l h_vmem=6G -R y"]),
        (["-pe smp 4 -P my-pe"], ["-P my-pe"]),
    ],
)
@pytest.mark.parametrize("where", ["job", "configuration", "options"])
def test_a_driver_takes_one_slot_of_a_grid_engine(where: str, written: list[str], kept: list[str]) -> None:
    import dask

    job = Denoising(
        input=Input(path="in.zarr"),
        output=Output(path="/scratch/ada/scan.zarr"),
        denoiser=DenoiserChoice(name="tv"),
        cluster=Cluster(
            kind="sge",
            cores=4,
            directives=tuple(written) if where == "job" else (),
            options={"job_extra_directives": written} if where == "options" else {},
        ),
    )
    configured = written if where == "configuration" else []
    with dask.config.set({"jobqueue.sge.job-extra-directives": configured}):
        text = script_of_run(sge.SYSTEM, job, Path("/scratch/ada/scan.zarr.run"), 0o022)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "-pe " not in text.replace("my-pe", "")
    assert "#$" not in lines
    assert [line for line in kept if f"#$ {line}" not in lines] == []


@pytest.mark.parametrize(("name", "walltime"), [("pbs", "4"), ("lsf", None)])
def test_a_driver_needs_time_before_it_drains(name: str, walltime: str | None) -> None:
    import dask

    with (
        dask.config.set({"jobqueue.lsf.walltime": "0:04"}),
        pytest.raises(ConfigError, match=r"cluster\.walltime is 240 s, and a run drains 120 s before"),
    ):
        check_walltime(Cluster(walltime=walltime), SYSTEMS[name])


def test_lsf_reads_a_script_from_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "bsub", "Job <123> is submitted to queue <normal>.\n")
    (tmp_path / "bsub").write_text(
        f'#!/bin/sh\ncat > "{tmp_path}/given"\necho "Job <123> is submitted to queue <normal>."\n'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "batch.sh").write_text("#BSUB -W 4:00\n")
    assert queue_of("lsf").submit(tmp_path / "batch.sh") == "123"
    assert (tmp_path / "given").read_text() == "#BSUB -W 4:00\n"


def test_a_system_that_refuses_a_driver_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qsub").write_text("#!/bin/sh\necho 'qsub: Unknown queue' >&2; exit 1\n")
    (tmp_path / "qsub").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "batch.sh").write_text("")
    with pytest.raises(ClusterFailed, match="Unknown queue"):
        queue_of("pbs").submit(tmp_path / "batch.sh")
    with pytest.raises(ClusterFailed, match=r"PBS did not report the state of job 7"):
        queue_of("pbs").state_of("7")


def test_sge_gives_cores_by_a_name_that_only_the_site_knows() -> None:
    with pytest.raises(ConfigError, match=r'cluster\.cores is 4.*directives: \["-pe smp 4"\]'):
        script_of(sge.SYSTEM, Cluster(interface="lo", cores=4))
    text = script_of(sge.SYSTEM, Cluster(interface="lo", cores=4, directives=("-pe mpi 4",)))
    assert "#$ -pe mpi 4\n" in text
    own = "-l h_vmem=6G -pe mpi 4"
    assert f"#$ {own}\n" in script_of(sge.SYSTEM, Cluster(interface="lo", cores=4, directives=(own,)))
    assert "#$ -l mem_free=4608M\n" in text


def test_cores_of_a_gpu_can_be_asked_for() -> None:
    own = {"resource_spec": "/nodes=1/gpu=1/core=4"}
    assert "#OAR -l /nodes=1/gpu=1/core=4,walltime=" in script_of(oar.SYSTEM, replace(SITE, options=own))


@pytest.mark.parametrize(
    "directive", ["-l h_vmem=6G", "-l m_mem_free=6G", "-l mem_free=6G,gpu=1", "-l h_rss=6G"]
)
def test_the_sites_own_name_for_memory_counts(directive: str) -> None:
    text = script_of(sge.SYSTEM, Cluster(interface="lo", directives=(directive,)))
    assert f"#$ {directive}\n" in text
    assert "4608M" not in text


def test_memory_is_set_aside_once() -> None:
    own = Cluster(interface="lo", directives=('-R "rusage[mem=9GB]"',))
    assert script_of(lsf.SYSTEM, own).count("rusage") == 1


@pytest.mark.parametrize(("name", "skip"), [("lsf", "rusage"), ("sge", "mem_free"), ("oar", "-O ")])
def test_what_is_added_can_be_left_out(name: str, skip: str) -> None:
    assert skip in script_of(SYSTEMS[name], PLAIN)
    assert skip not in script_of(SYSTEMS[name], replace(PLAIN, directives_skip=(skip,)))


@pytest.mark.parametrize(
    "name", ["1234.pbs.OU", "halotile.o1234", "halotile-0-1234.err", "worker-1234.0.out"]
)
def test_the_log_of_a_job_is_found_by_its_number(name: str, tmp_path: Path) -> None:
    for other in (name, name.replace("1234", "12345"), name.replace("1234", "71234")):
        (tmp_path / other).touch()
    assert logs_of(tmp_path, "1234.pbs-server") == [tmp_path / name]


def test_htcondor_leaves_commands_of_a_prologue_to_the_shell() -> None:
    prologue = ("export SITE=$(hostname)", "cd ${HOME}/$(date +%F)")
    text = script_of(SYSTEMS["htcondor"], replace(PLAIN, prologue=prologue))
    assert "export SITE=$(DOLLAR)(hostname); cd ${HOME}/$(DOLLAR)(date +%F); PYTHON" in text


def test_a_shell_of_the_user_replaces_that_of_sge() -> None:
    text = script_of(SYSTEMS["sge"], replace(PLAIN, directives=("-S /usr/bin/bash",)))
    assert text.count("#$ -S") == text.count("#$ -S /usr/bin/bash") == 1


ANSWERS = {
    ("slurm", "7|PENDING|Resources\n"): LaunchState(False, "PENDING (Resources)"),
    ("slurm", "7|FAILED|NonZeroExitCode\n"): LaunchState(True, "FAILED (NonZeroExitCode)"),
    ("slurm", "7|NODE_FAIL|None\n"): LaunchState(True, "NODE_FAIL"),
    ("slurm", ""): LaunchState(True, "over"),
    ("pbs", "Job id    Name\n--------  ----\n7.server  halotile\n"): LaunchState(False, "in the queue"),
    ("pbs", "7.server  halotile  ada  0 Q batch\n70.server  halotile  ada  00:10:02 C batch\n"): LaunchState(
        False, "in the queue"
    ),
    ("pbs", "7.server  halotile  ada  00:10:02 C batch\n70.server  halotile  ada  0 Q batch\n"): LaunchState(
        True, "over (C)"
    ),
    ("sge", "=====\njob_number:                 7\nowner: ada\n"): LaunchState(False, "in the queue"),
    (
        "sge",
        "=====\njob_number:                 7\nowner: ada\nerror reason    1:          11/29/2026 10:00:00 [0:12]: can't chdir to /x\n",
    ): LaunchState(True, "Eqw (11/29/2026 10:00:00 [0:12]: can't chdir to /x)"),
    (
        "sge",
        "=====\njob_number:   7\nowner: ada\n=====\njob_number:   8\nerror reason    1:   can't chdir to /x\n",
    ): LaunchState(False, "in the queue"),
    ("lsf", "7 PEND\n70 EXIT\n"): LaunchState(False, "in the queue"),
    ("lsf", "7 EXIT\n"): LaunchState(True, "EXIT"),
    ("oar", "7: Terminated\n"): LaunchState(True, "Terminated"),
    ("oar", "7: Waiting\n70: Error\n"): LaunchState(False, "in the queue"),
    ("htcondor", "7.0 5 no such file\n"): LaunchState(True, "held (no such file)"),
    ("htcondor", "7.0 2 undefined\n8.0 5 no such file\n"): LaunchState(False, "in the queue"),
    ("htcondor", ""): LaunchState(True, "not in the queue any more"),
}
COMMANDS = {
    "slurm": "squeue",
    "pbs": "qstat",
    "sge": "qstat",
    "lsf": "bjobs",
    "oar": "oarstat",
    "htcondor": "condor_q",
}


def pretend(folder: Path, name: str, answer: str, code: int = 0) -> None:
    """Write a fake command of a batch system, which always gives the same answer."""
    (folder / "answer").write_text(answer)
    (folder / name).write_text(f'#!/bin/sh\ncat "{folder}/answer"\nexit {code}\n')
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_what_a_batch_system_says_of_a_job(
    name: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, COMMANDS[name], answer)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SYSTEMS[name].states(["7"]) == {"7": ANSWERS[name, answer]}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("pbs", "qstat: Unknown Job Id 7.server"),
        ("pbs", "qstat: 7.server Job has finished, use -x or -H to obtain historical job information"),
        ("sge", "Following jobs do not exist:\n7"),
        ("lsf", "Job <7> is not found"),
    ],
)
def test_a_job_that_the_system_has_forgotten_is_over(
    name: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, COMMANDS[name], answer, code=153)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SYSTEMS[name].states(["7"]) == {"7": LaunchState(True, "not in the queue any more")}


def test_a_server_that_is_not_found_says_nothing_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, "qstat", "qstat: cannot connect to server pbs1: host not found", code=1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SYSTEMS["pbs"].states(["7"]) == {}


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
def test_a_walltime_that_the_user_has_configured_is_that_of_the_system(
    name: str, written: str, seconds: int
) -> None:
    SYSTEMS[name].cluster_class()  # its import makes the default settings known
    with dask.config.set({f"jobqueue.{name}.walltime": written}):
        assert walltime_seconds(SYSTEMS[name], PLAIN) == seconds


ONE_CALL = {
    "pbs": """
        echo "7.server  halotile"
        echo "70.server  halotile"
        case "$*" in *8*) echo "qstat: Unknown Job Id 8.server" >&2; exit 153;; esac
    """,
    "sge": """
        for each in $(echo $2 | tr , " "); do [ $each = 8 ] || echo "job_number:    $each"; done
        case "$2" in *8*) echo "Following jobs do not exist: 8" >&2; exit 1;; esac
    """,
    "oar": """
        case "$*" in *8*) [ $# = 3 ] && echo "8: Terminated"; [ $# = 3 ] || exit 5;; esac
        echo "7: Running"; echo "70: Waiting"
    """,
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_jobs_are_asked_for_all_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / COMMANDS[name]
    command.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{ONE_CALL[name]}')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert {key: state.over for key, state in SYSTEMS[name].states(["7", "70"]).items()} == {
        "7": False,
        "70": False,
    }
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert {key: state.over for key, state in SYSTEMS[name].states(["7", "8", "70"]).items()} == {
        "7": False,
        "8": True,
        "70": False,
    }


@pytest.mark.parametrize("name", ["pbs", "sge"])
def test_a_server_that_cannot_be_reached_tells_nothing_of_a_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, COMMANDS[name], "cannot connect to server pbs (errno=111)", code=255)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SYSTEMS[name].states(["7"]) == {}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_that_does_not_answer_has_lost_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SYSTEMS[name].states(["7"]) == {}
