"""Answers of batch systems about jobs: for the supervisor of workers, and for the state of a submitted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_system import launch_states
from tests.graphs.batch_systems import SYSTEMS

JOB: Any = type("Job", (), {"job_id": "7"})()
WAITS = LaunchState(False, "in the queue")
GONE = LaunchState(True, "not in the queue any more")
ANSWERS: dict[tuple[str, str], LaunchState] = {
    ("slurm", "7 PENDING (Resources)"): LaunchState(False, "PENDING (Resources)"),
    ("slurm", "7 PENDING (BeginTime)\n70 FAILED (None)"): LaunchState(False, "PENDING (BeginTime)"),
    ("slurm", "7 PENDING ((null))"): LaunchState(False, "PENDING"),
    ("slurm", "7 RUNNING (None)"): LaunchState(False, "RUNNING"),
    ("slurm", "7 FAILED (NonZeroExitCode)"): LaunchState(True, "FAILED (NonZeroExitCode)"),
    ("slurm", "7 NODE_FAIL (None)"): LaunchState(True, "NODE_FAIL"),
    ("slurm", "7 SPECIAL_EXIT (held)"): LaunchState(True, "SPECIAL_EXIT (held)"),
    ("slurm", "70 RUNNING (None)"): GONE,
    ("slurm", ""): GONE,
    ("pbs", "Job id    Name\n--------  ----\n7.server  halotile"): WAITS,
    ("pbs", "7.server  halotile  ada  0 Q batch\n70.server  halotile  ada  00:10:02 C batch"): WAITS,
    ("pbs", "7.server  halotile  ada  00:10:02 C batch\n70.server  halotile  ada  0 Q batch"): LaunchState(
        True, "over (C)"
    ),
    ("sge", "=====\njob_number:                 7\nowner: ada"): WAITS,
    (
        "sge",
        "=====\njob_number:                 7\nowner: ada\nerror reason    1:          11/29/2026 10:00:00 [0:12]: can't chdir to /x",
    ): LaunchState(True, "Eqw (11/29/2026 10:00:00 [0:12]: can't chdir to /x)"),
    (
        "sge",
        "=====\njob_number:   7\nowner: ada\n=====\njob_number:   8\nerror reason    1:   can't chdir to /x",
    ): WAITS,
    ("lsf", "7 PEND\n70 EXIT"): WAITS,
    ("lsf", "7 EXIT"): LaunchState(True, "EXIT"),
    ("oar", "7: Terminated"): LaunchState(True, "Terminated"),
    ("oar", "7: Waiting\n70: Error"): WAITS,
    ("htcondor", "7.0 5 no such file"): LaunchState(True, "held (no such file)"),
    ("htcondor", "7.0 2 undefined\n8.0 5 no such file"): WAITS,
    ("htcondor", ""): GONE,
}
"""The state of job 7 by what a system prints."""
ERRORS = {
    ("slurm", "slurm_load_jobs error: Invalid job id specified"): GONE,
    ("pbs", "qstat: Unknown Job Id 7.server"): GONE,
    ("pbs", "qstat: 7.server Job has finished, use -x or -H to obtain historical job information"): GONE,
    ("sge", "Following jobs do not exist:\n7"): GONE,
    ("lsf", "Job <7> is not found"): GONE,
    ("slurm", "slurm_load_jobs error: Unable to contact slurm controller"): None,
    ("slurm", ""): None,
    ("pbs", "qstat: cannot connect to server pbs1: host not found"): None,
    ("pbs", "cannot connect to server pbs (errno=111)"): None,
    ("sge", "cannot connect to server pbs (errno=111)"): None,
}
"""The state of job 7 by the error that a system prints; None where that is no answer."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``command(name, lines)`` replaces the command that a system is asked with by a shell script; returns the file of its calls."""

    def make(name: str, lines: str) -> Path:
        path = tmp_path / SYSTEMS[name].states.command.split()[0]
        path.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{lines}\n')
        path.chmod(0o755)
        return tmp_path / "calls"

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_a_state_is_what_the_batch_system_prints(name: str, answer: str, command: Any) -> None:
    command(name, f"cat << 'END'\n{answer}\nEND")
    system, state = SYSTEMS[name], ANSWERS[name, answer]
    assert system.states(["7"]) == {"7": state}
    stays = state.text.startswith(("Eqw", "SPECIAL_EXIT"))
    assert system.state_of("7") == (state.text if stays or not state.over else None)


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_only_an_error_that_names_the_job_means_that_it_is_over(name: str, error: str, command: Any) -> None:
    command(name, f"cat >&2 << 'END'\n{error}\nEND\nexit 153")
    system = SYSTEMS[name]
    if (state := ERRORS[name, error]) is not None:
        assert launch_states(system, [JOB]) == {JOB: state}
        assert system.state_of("7") is None
        return
    assert launch_states(system, [JOB]) == {}
    words = " ".join(error.split()) or "squeue ended with exit code 153"
    with pytest.raises(ClusterFailed) as failed:
        system.state_of("7")
    assert str(failed.value) == f"{system.title} did not report the state of job 7: {words}"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("fault", ["is not installed here", "does not start"])
def test_a_command_that_does_not_run_has_lost_no_job(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setenv("PATH", str(tmp_path))
    if fault == "does not start":
        monkeypatch.setattr("halotile.graphs.clusters.launches.batch_system.subprocess.run", refuse)
    assert launch_states(SYSTEMS[name], [JOB]) == {}
    with pytest.raises(ClusterFailed, match=f"did not report the state of job 7: .* {fault}"):
        SYSTEMS[name].state_of("7")


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
def test_a_system_is_asked_for_all_jobs_at_once(name: str, command: Any) -> None:
    calls = command(name, ONE_CALL[name])
    states = SYSTEMS[name].states

    def over(*ids: str) -> dict[str, bool]:
        return {job: state.over for job, state in states(ids).items()}

    assert over("7", "70") == {"7": False, "70": False}
    (call,) = calls.read_text().splitlines()
    assert name != "slurm" or {"--states=all", "--jobs=7,70"} < {*call.split()}
    assert over("7", "8", "70") == {"7": False, "8": True, "70": False}
