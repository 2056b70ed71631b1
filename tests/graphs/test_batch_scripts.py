"""Batch systems, only two of which can be run here: job scripts, what commands print about jobs, and attempts at a run whose output is held."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest

from halotile.errors import ClusterFailed, ConfigError, DamagedData, OutputInUse, Stopped
from halotile.graphs import submission, waiting
from halotile.graphs.clusters import htcondor, lsf, oar, pbs, sge, slurm
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common.security import Credentials
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_system import BatchSystem, job_script, launch_states, logs_of
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Input, Output, Run
from halotile.graphs.runs import claim
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import status_of
from halotile.graphs.submission import Submission, attend, submission_in
from halotile.graphs.waiting import patience_seconds
from halotile.graphs.watching.progress import Progress
from halotile.registry import names
from halotile.storage.run_directory.directory import BatchFiles, RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from tests.cases import thorough
from tests.faults import Scene

pytestmark = pytest.mark.filterwarnings("ignore:OAR Job memory")

SYSTEMS = {kind.SYSTEM.module: kind.SYSTEM for kind in (slurm, pbs, sge, lsf, oar, htcondor)}
SCRIPTS = Path(__file__).with_name("scripts")
LOGS = Path("/scratch/ada/x.run/workers")
PROLOGUE = ("module load cuda", "source env/bin/activate")
PLAIN = Cluster(interface="lo")
SITE = Cluster(
    interface="lo", queue="gpu", account="phys", walltime="04:00:00", cores=4, gpus=1, prologue=PROLOGUE,
    directives=("--constraint=v100",),
)  # fmt: skip
SITES = {
    "sge": replace(SITE, directives=("-pe smp 4", "-l h_vmem=2G")),
    "htcondor": Cluster(interface="lo", cores=4, gpus=1, prologue=PROLOGUE[:1], directives=("nice_user = True",)),
}  # fmt: skip
Command = Callable[[str, str], Path]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``command(name, lines)`` replaces a command by a shell script; returns the file of its calls."""

    def make(name: str, lines: str) -> Path:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{lines}\n')
        path.chmod(0o755)
        return tmp_path / "calls"

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


def worker_script(system: BatchSystem, choice: Cluster) -> str:
    """The script of a job, with the interpreter under one name."""
    order, security = Order(workers=2, memory_bytes=4 * 2**30, choice=choice), Credentials(LOGS / "tls-1").security
    text = job_script(system, order, address="tls://10.0.0.7:8786", logs=LOGS, security=security)
    return text.replace(sys.executable, "PYTHON")


def driver_script(system: BatchSystem, choice: Cluster) -> str:
    """The script of a submitted run, likewise."""
    output = "/scratch/ada/my scan.zarr"
    job = Denoising(
        input=Input(path="in.zarr"), output=Output(path=output), denoiser=DenoiserChoice(name="tv"),
        run=Run(workers=8), cluster=choice,
    )  # fmt: skip
    return submission.script_of(system, job, Path(f"{output}.run"), 0o022).replace(sys.executable, "PYTHON")


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.iterdir()))
def test_a_script_is_the_expected_one_to_the_letter(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    name, choice = script.split("-")
    if name == "driver":
        section = replace(SITES.get(choice, SITE), directives=(), kind=choice)
        SYSTEMS[choice].cluster_class()  # its import makes the default settings known
        with dask.config.set({f"jobqueue.{choice}.job-extra-directives": ["-theirs"]}):
            text = driver_script(SYSTEMS[choice], section)
    elif name == "submit":
        text = driver_script(SYSTEMS["slurm"], PLAIN if choice == "plain" else SITE)
    else:
        text = worker_script(SYSTEMS[name], PLAIN if choice == "plain" else SITES.get(name, SITE))
        assert f"--tls-key {LOGS}/tls-1/key.pem" in text
    assert text == (SCRIPTS / f"{script}.txt").read_text()
    assert "PRIVATE" not in text


def test_every_batch_system_is_here() -> None:
    assert {*names("clusters")} == {*SYSTEMS, "local", "local-cuda", "scheduler", "slurm-alloc", "ranks"}
    workers = {f"{name}-{choice}" for name in SYSTEMS for choice in ("plain", "site")}
    assert workers < {path.stem for path in SCRIPTS.iterdir()}
    for system in SYSTEMS.values():
        job_class = system.cluster_class().job_cls
        assert (job_class.submit_command, job_class.cancel_command) == (system.submits, system.cancels)


THEIRS = {"job-extra-directives": ["--nice"], "worker-extra-args": ["--lifetime", "25m"]}
OF_GPU = {
    "slurm": "#SBATCH --nice\n|--gres=gpu:1", "pbs": "--nice|ngpus=1", "sge": "--nice|-l gpu=1", "lsf": '--nice|-gpu "num=1"',
    "oar": "--nice|/nodes=1/gpu=1", "htcondor": "theirs|request_gpus = 1",
}  # fmt: skip
"""What a directive of the user becomes, and what asks for a GPU: they stand beside each other."""
OF_CONDOR = THEIRS | {"job-extra-directives": {"+Project": "theirs"}}
LINES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("slurm", {"directives_skip": ("--mem=",)}, {}, "", "--mem="),
    ("lsf", {"directives_skip": ("rusage",)}, {}, "", "rusage"),
    ("sge", {"directives_skip": ("mem_free",)}, {}, "", "mem_free"),
    ("oar", {"directives_skip": ("-O ",)}, {}, "", "-O "),
    # The user's own configuration of dask-jobqueue counts, but for what the job says.
    ("slurm", {"account": "phys"}, {"queue": "theirs"}, "#SBATCH -p theirs\n|#SBATCH -A phys\n", ""),
    ("slurm", {"queue": "fast"}, {"queue": "theirs"}, "#SBATCH -p fast\n", "theirs"),
    *(
        (name, {"gpus": 1}, OF_CONDOR if name == "htcondor" else THEIRS, f"{lines}|--lifetime 25m|--memory-limit", "")
        for name, lines in OF_GPU.items()
    ),
    # What the job requests itself is not requested twice.
    ("sge", {"directives": ("-pe mpi 4",), "cores": 4}, {}, "#$ -pe mpi 4\n|#$ -l mem_free=4608M\n", ""),
    ("sge", {"directives": ("-l h_vmem=6G -pe mpi 4",), "cores": 4}, {}, "#$ -l h_vmem=6G -pe mpi 4\n", ""),
    *(
        ("sge", {"directives": (f"-l {memory}",)}, {}, f"#$ -l {memory}\n", "4608M")
        for memory in ("h_vmem=6G", "m_mem_free=6G", "mem_free=6G,gpu=1", "h_rss=6G")
    ),
    ("sge", {"directives": ("-S /usr/bin/bash",)}, {}, "#$ -S /usr/bin/bash\n", "-S /bin/bash"),
    ("lsf", {"directives": ('-R "rusage[mem=9GB]"',)}, {}, "rusage[mem=9GB]", "rusage[mem=4608MB]"),
    ("oar", {"gpus": 1, "options": {"resource_spec": "/nodes=1/gpu=1/core=4"}}, {}, "#OAR -l /nodes=1/gpu=1/core=4,walltime=", ""),
    # Commands of a prologue are the shell's, and no macros of HTCondor.
    (
        "htcondor", {"prologue": ("export SITE=$(hostname)", "cd ${HOME}/$(date +%F)")}, {},
        "export SITE=$(DOLLAR)(hostname); cd ${HOME}/$(DOLLAR)(date +%F); PYTHON", "",
    ),
]  # fmt: skip
"""System, its cluster section, the user's configuration, what the script of a worker has, separated by bars, and what it has not."""


@pytest.mark.parametrize(("name", "section", "configured", "present", "absent"), LINES)
def test_scripts_have_what_users_say(name: str, section: Any, configured: Any, present: str, absent: str) -> None:
    with dask.config.set({f"jobqueue.{name}.{key}": value for key, value in configured.items()}):
        text = worker_script(SYSTEMS[name], replace(PLAIN, **section))
    assert [part for part in present.split("|") if part not in text] == []
    assert not absent or absent not in text
    assert "directives_skip" not in section or absent in worker_script(SYSTEMS[name], PLAIN)


def test_what_a_system_lacks_is_refused() -> None:
    for name, choice, words in (
        ("htcondor", replace(PLAIN, queue="gpu"), r"cluster\.queue is gpu, but HTCondor has no such setting"),
        ("sge", replace(PLAIN, cores=4), r'cluster\.cores is 4.*directives: \["-pe smp 4"\]'),
    ):
        with pytest.raises(ConfigError, match=words):
            worker_script(SYSTEMS[name], choice)


DIRECTIVES = [
    (["-pe smp 4"], []), (["  -pe mpi 2-4 ", "-R y"], ["-R y"]), (["-pe smp 4 -P my-pe"], ["-P my-pe"]),
    (["-l h_vmem=6G -pe smp 4 -R y"], ["-l h_vmem=6G -R y"]),
]  # fmt: skip


@pytest.mark.parametrize(("written", "kept"), DIRECTIVES)
def test_a_driver_takes_one_slot_of_a_grid_engine(written: list[str], kept: list[str]) -> None:
    for source in ("job", "configuration", "options"):
        given = {source: written}
        options = {"job_extra_directives": written} if source == "options" else {}
        choice = Cluster(kind="sge", cores=4, directives=tuple(given.get("job", ())), options=options)
        with dask.config.set({"jobqueue.sge.job-extra-directives": given.get("configuration", [])}):
            text = driver_script(SYSTEMS["sge"], choice)
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "-pe " not in text.replace("my-pe", "")
        assert "#$" not in lines
        assert [line for line in kept if f"#$ {line}" not in lines] == []


WALLTIMES = [
    ("pbs", "3600", 3600), ("pbs", "30:00", 1800), ("sge", "01:00:00", 3600), ("lsf", "00:30", 1800), ("lsf", "45", 2700),
]  # fmt: skip


def test_a_walltime_that_the_user_has_configured_is_that_of_the_system() -> None:
    for name, written, seconds in WALLTIMES:
        SYSTEMS[name].cluster_class()  # its import makes the default settings known
        with dask.config.set({f"jobqueue.{name}.walltime": written}):
            assert submission.walltime_seconds(SYSTEMS[name], PLAIN) == seconds
    for name, walltime in (("pbs", "4"), ("lsf", None)):
        with (
            dask.config.set({"jobqueue.lsf.walltime": "0:04"}),
            pytest.raises(ConfigError, match=r"cluster\.walltime is 240 s, and a run drains 120 s before"),
        ):
            submission.check_walltime(Cluster(walltime=walltime), SYSTEMS[name])


SUBMITTED: list[tuple[str, str | None, int | str]] = [
    ("slurm", 'echo "Submitted batch job 123"', 123),
    ("pbs", "echo 123.server", 123),
    ("sge", "echo 'Your job 123 (\"batch.sh\") has been submitted'", 123),
    ("lsf", 'grep -q "BSUB -W 4:00" && echo "Job <123> is submitted to queue <normal>."', 123),
    ("pbs", "echo 'qsub: Unknown Queue' >&2; exit 1", "qsub: Unknown Queue"),
    ("slurm", "true", "sbatch printed no job number: nothing"),
    ("slurm", None, "sbatch is not installed here: this machine is not part of a Slurm cluster. Write"),
]
"""What the command that submits does, and the job's number, or the error."""


@pytest.mark.parametrize(("name", "lines", "job"), SUBMITTED)
def test_a_script_is_submitted(name: str, lines: Any, job: Any, tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    system, script = SYSTEMS[name], tmp_path / "batch.sh"
    script.write_text("#BSUB -W 4:00\n")
    if lines is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        command(system.submits, lines)
    if isinstance(job, int):
        assert system.submit(script) == str(job)
        return
    with pytest.raises(ClusterFailed, match=re.escape(job)):
        system.submit(script)


@pytest.mark.parametrize("name", ["1234.pbs.OU", "halotile.o1234", "halotile-0-1234.err", "worker-1234.0.out"])
def test_the_log_of_a_job_is_found_by_its_number(name: str, tmp_path: Path) -> None:
    for other in (name, name.replace("1234", "12345"), name.replace("1234", "71234")):
        (tmp_path / other).touch()
    assert logs_of(tmp_path, "1234.pbs-server") == [tmp_path / name]


JOB: Any = type("Job", (), {"job_id": "7"})()
WAITS = LaunchState(False, "in the queue")
GONE = LaunchState(True, "not in the queue any more")
EQW = "error reason    1:   "
ANSWERS: list[tuple[str, str, LaunchState]] = [
    ("slurm", "7 PENDING (Resources)", LaunchState(False, "PENDING (Resources)")),
    ("slurm", "7 PENDING (BeginTime)\n70 FAILED (None)", LaunchState(False, "PENDING (BeginTime)")),
    ("slurm", "7 PENDING ((null))", LaunchState(False, "PENDING")),
    ("slurm", "7 RUNNING (None)", LaunchState(False, "RUNNING")),
    ("slurm", "7 FAILED (NonZeroExitCode)", LaunchState(True, "FAILED (NonZeroExitCode)")),
    ("slurm", "7 NODE_FAIL (None)", LaunchState(True, "NODE_FAIL")),
    ("slurm", "7 SPECIAL_EXIT (held)", LaunchState(True, "SPECIAL_EXIT (held)")),
    ("slurm", "70 RUNNING (None)", GONE),
    ("slurm", "", GONE),
    ("pbs", "Job id    Name\n--------  ----\n7.server  halotile", WAITS),
    ("pbs", "7.server  halotile  ada  0 Q batch\n70.server  halotile  ada  00:10:02 C batch", WAITS),
    ("pbs", "7.server  halotile  ada  00:10:02 C batch\n70.server  x  ada  0 Q batch", LaunchState(True, "over (C)")),
    ("sge", "=====\njob_number:                 7\nowner: ada", WAITS),
    (
        "sge", f"=====\njob_number:    7\nowner: ada\n{EQW}       11/29/2026 10:00:00 [0:12]: can't chdir to /x",
        LaunchState(True, "Eqw (11/29/2026 10:00:00 [0:12]: can't chdir to /x)"),
    ),
    ("sge", f"=====\njob_number:   7\nowner: ada\n=====\njob_number:   8\n{EQW}can't chdir to /x", WAITS),
    ("lsf", "7 PEND\n70 EXIT", WAITS),
    ("lsf", "7 EXIT", LaunchState(True, "EXIT")),
    ("oar", "7: Terminated", LaunchState(True, "Terminated")),
    ("oar", "7: Waiting\n70: Error", WAITS),
    ("htcondor", "7.0 5 no such file", LaunchState(True, "held (no such file)")),
    ("htcondor", "7.0 2 undefined\n8.0 5 no such file", WAITS),
    ("htcondor", "", GONE),
]  # fmt: skip
"""The state of job 7 by what a system prints."""
NO_SERVER = "cannot connect to server pbs (errno=111)"
ERRORS: list[tuple[str, str, LaunchState | None]] = [
    ("slurm", "slurm_load_jobs error: Invalid job id specified", GONE),
    ("pbs", "qstat: Unknown Job Id 7.server", GONE),
    ("pbs", "qstat: 7.server Job has finished, use -x or -H to obtain historical job information", GONE),
    ("sge", "Following jobs do not exist:\n7", GONE),
    ("lsf", "Job <7> is not found", GONE),
    ("slurm", "slurm_load_jobs error: Unable to contact slurm controller", None),
    ("slurm", "", None),
    ("pbs", "qstat: cannot connect to server pbs1: host not found", None),
    ("pbs", NO_SERVER, None),
    ("sge", NO_SERVER, None),
]
"""The state of job 7 by the error that a system prints; None where that is no answer."""


def asked(name: str) -> str:
    return str(SYSTEMS[name].states.command.split()[0])


@pytest.mark.parametrize(("name", "answer", "state"), ANSWERS)
def test_a_state_is_what_the_batch_system_prints(name: str, answer: str, state: LaunchState, command: Command) -> None:
    command(asked(name), f"cat << 'END'\n{answer}\nEND")
    assert SYSTEMS[name].states(["7"]) == {"7": state}
    stays = state.text.startswith(("Eqw", "SPECIAL_EXIT"))
    assert SYSTEMS[name].state_of("7") == (state.text if stays or not state.over else None)


@pytest.mark.parametrize(("name", "error", "state"), ERRORS)
def test_an_error_that_names_a_job_ends_it(name: str, error: str, state: LaunchState | None, command: Command) -> None:
    command(asked(name), f"cat >&2 << 'END'\n{error}\nEND\nexit 153")
    system = SYSTEMS[name]
    if state is not None:
        assert launch_states(system, [JOB]) == {JOB: state}
        assert system.state_of("7") is None
        return
    assert launch_states(system, [JOB]) == {}
    words = " ".join(error.split()) or "squeue ended with exit code 153"
    with pytest.raises(ClusterFailed) as failed:
        system.state_of("7")
    assert str(failed.value) == f"{system.title} did not report the state of job 7: {words}"


@pytest.mark.parametrize("fault", ["is not installed here", "does not start"])
def test_a_command_that_does_not_run_loses_no_job(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setenv("PATH", str(tmp_path))
    if fault == "does not start":
        monkeypatch.setattr("halotile.graphs.clusters.launches.batch_system.subprocess.run", refuse)
    for system in SYSTEMS.values():
        assert launch_states(system, [JOB]) == {}
        with pytest.raises(ClusterFailed, match=f"did not report the state of job 7: .* {fault}"):
            system.state_of("7")


ONE_CALL = {
    "slurm": 'printf "7 RUNNING (None)\\n70 PENDING (None)\\n"',
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
def test_a_system_is_asked_for_all_jobs_at_once(name: str, command: Command) -> None:
    calls = command(asked(name), ONE_CALL[name])

    def over(*ids: str) -> dict[str, bool]:
        return {job: state.over for job, state in SYSTEMS[name].states(ids).items()}

    assert over("7", "70") == {"7": False, "70": False}
    (call,) = calls.read_text().splitlines()
    assert name != "slurm" or {"--states=all", "--jobs=7,70"} < {*call.split()}
    assert over("7", "8", "70") == {"7": False, "8": True, "70": False}


# --- attempts at a submitted run whose output is held by a lost machine, or by another driver at work

Patch = pytest.MonkeyPatch

MakeRun = Callable[[float], RunDirectory]
NOTHING = Progress("start", 0, 0, 3, 0, 0, 0.0)


@pytest.fixture
def requested(monkeypatch: Patch) -> list[str]:
    """The jobs that are requeued."""
    numbers: list[str] = []
    monkeypatch.setattr(BatchSystem, "requeue", lambda _, job: numbers.append(job))
    monkeypatch.setattr("halotile.graphs.submission.ignore_signals", lambda: None)
    return numbers


@pytest.fixture
def run(tmp_path: Path) -> MakeRun:
    """A run that was submitted as job 7, some seconds ago."""

    def make(seconds: float) -> RunDirectory:
        made = RunDirectory(tmp_path / "out.zarr.run")
        made.create()
        options = {"fresh": False, "same_input": False, "allow_import": False}
        submitted = {"submitted_from": "here", "submitted": time.time() - seconds, "number": "7", "notice_seconds": 20}
        BatchFiles(made).write(dataclasses.asdict(Submission(job={}, options=options, **submitted)))  # type: ignore[arg-type]
        return made

    return make


def test_a_driver_sends_itself_a_signal(run: MakeRun, requested: list[str], monkeypatch: Patch) -> None:
    made = run(60)
    monkeypatch.setenv(submission.DRAIN_AT, str(int(time.time()) + 3))

    def go(*_: object) -> None:
        with Signals() as signals:
            while not signals.requested:
                time.sleep(0.01)
        made.write_status(status_of(replace(NOTHING, done=1), "stopped", "", output="out"))
        raise Stopped("stopped", signals.name)

    with pytest.raises(Stopped):
        attend(made, go)
    assert requested == ["7"]


# The status of this driver, which found two blocks done.
TWO_DONE, THREE_DONE = (status_of(replace(NOTHING, done=n, resumed=2), "failed", "", output="out") for n in (2, 3))
HELD: list[tuple[float, Any, bool, bool]] = [
    (60, {}, True, False),  # a lost machine holds it
    (submission.SILENCE_SECONDS + 60, {}, False, True),  # for ever
    (60, {"state": "running"}, False, False),  # another driver is at work
    (submission.SILENCE_SECONDS + 60, THREE_DONE, True, False),  # of several images, others were done
    (submission.SILENCE_SECONDS + 60, TWO_DONE, False, True),
]


@pytest.mark.parametrize(("seconds", "status", "is_requested", "has_failed"), HELD)
def test_an_output_that_is_held_is_asked_for_again_for_a_while(
    seconds: float, status: Any, is_requested: bool, has_failed: bool, run: MakeRun, requested: list[str]
) -> None:
    made = run(seconds)

    def held(*_: object) -> None:
        if status:
            made.write_status(status | {"updated": time.time() + 1})
        raise OutputInUse("in use.")

    message = r"in use\. Its holder has been silent, so this job is requested again"
    with pytest.raises(Stopped, match=message) if is_requested else pytest.raises(OutputInUse):
        attend(made, held)
    assert requested == ["7"] * is_requested
    assert ("in use." in str(BatchFiles(made).failure())) is has_failed


def test_locks_are_waited_for_in_jobs(tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    patience = {name: patience_seconds(0.5, {name: "7"}) for name in (*waiting.BATCH_JOB, "HOME")}
    assert patience == dict.fromkeys(waiting.BATCH_JOB, waiting.LEASE_SECONDS) | {"HOME": 0.5}
    caplog.set_level("WARNING")  # a cluster that was started silences every handler, and for good
    scene = Scene.create(tmp_path)
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    monkeypatch.setattr(claim, "patience_seconds", lambda _: 0.3)
    with scene.directory.lock(), pytest.raises(OutputInUse):
        scene.run()
    assert f"waiting for whoever holds {scene.directory.path}" in caplog.text


@pytest.fixture
def signals_while_waiting(monkeypatch: Patch) -> Iterator[list[signal.Signals]]:
    """The signal that comes while the command waits for a lock, as long as a batch job does."""
    requested: list[signal.Signals] = []
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    monkeypatch.setattr(claim, "log_line", lambda _: os.kill(os.getpid(), requested[0]))
    monkeypatch.setenv("PBS_JOBID", "7")
    before = {number: signal.signal(number, lambda *_: sys.exit(1)) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield requested
    for number, handler in before.items():
        signal.signal(number, handler)


NUMBERS = {signal.SIGUSR1: "Its holder has been silent, so this job is requested again", signal.SIGTERM: "stopped on SIGTERM while it waited"}  # fmt: skip
WAITING = [("driver", signal.SIGUSR1), ("worker", signal.SIGUSR1), thorough("worker", signal.SIGTERM)]


@pytest.mark.parametrize(("holder", "number"), WAITING)
def test_a_job_whose_time_is_up_while_it_waits_is_asked_for_again(
    holder: str, number: Any, tmp_path: Path, signals_while_waiting: Any, run: MakeRun, requested: Any
) -> None:
    made, scene = run(60), Scene.create(tmp_path)
    signals_while_waiting.append(number)

    def go(*_: object) -> None:
        scene.run()

    with ExitStack() as held:
        if holder == "driver":
            held.enter_context(scene.directory.lock())
        else:
            scene.directory.create()
            (lock := WorkerLock(scene.directory.path)).hold()
            held.callback(lock.release)
        with pytest.raises(Stopped, match=NUMBERS[number]):
            attend(made, go)
    assert requested == ["7"] * (number == signal.SIGUSR1)
    assert BatchFiles(made).failure() is None
    assert not scene.output.exists()


def test_a_submission_that_cannot_be_understood_is_damaged(run: MakeRun) -> None:
    directory = run(0.0)
    BatchFiles(directory).write({})
    with pytest.raises(DamagedData, match=r"the record of its submission is damaged\. Submit it again"):
        submission_in(directory)
    submission.check_not_waiting(directory)


def test_a_job_that_begins_before_its_number_is_stored(run: MakeRun, monkeypatch: Patch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    files = BatchFiles(made := run(1))
    submitting = replace(submission_in(made), system="sge", number="")
    submitting.keep(files)
    storing = threading.Timer(0.5, lambda: replace(submission_in(made), number="12").keep(files))
    storing.start()
    seen: list[str] = []
    attend(made, lambda submission, _: seen.append(submission.number))
    storing.join()
    assert seen == [submission_in(made).number] == ["12"]
    assert submission_in(made).attempts == 1
