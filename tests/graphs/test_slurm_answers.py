"""States of Slurm jobs from the answers of `squeue`: for workers and for whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from halotile.errors import ClusterFailed
from halotile.graphs.clusters import slurm
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.slurm_jobs import queued, state_of

GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake `squeue`, whose script is still to be written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "squeue"
    path.touch(mode=0o755)
    return path


def test_it_is_asked_once_for_all_jobs(squeue: Path) -> None:
    squeue.write_text(
        f'#!/bin/sh\necho "$*" >> {squeue}.calls\necho "7|PENDING|(a|b)"\necho "8|RUNNING|None"\n'
    )
    assert queued(["7", "8", "9"], "--states=all") == {"7": ("PENDING", "(a|b)"), "8": ("RUNNING", "None")}
    (call,) = Path(f"{squeue}.calls").read_text().splitlines()
    assert call.split()[1:] == ["--jobs=7,8,9", "--format=%A|%T|%r", "--states=all"]


@pytest.mark.parametrize(
    ("lines", "of_worker", "of_run"),
    [
        ('echo "7|PENDING|BeginTime"', LaunchState(False, "PENDING (BeginTime)"), "PENDING (BeginTime)"),
        ('echo "7|RUNNING|None"', LaunchState(False, "RUNNING"), "RUNNING"),
        ('case "$*" in *all*) echo "7|FAILED|None";; esac', LaunchState(True, "FAILED"), None),
        ("", LaunchState(True, "over"), None),
        (GONE, LaunchState(True, "over"), None),
    ],
)
def test_a_job_stands_the_same_for_a_worker_and_for_a_run(
    lines: str, of_worker: LaunchState, of_run: str | None, squeue: Path
) -> None:
    squeue.write_text(f"#!/bin/sh\n{lines}\n")
    assert slurm.states(["7"]) == {"7": of_worker}
    assert state_of("7") == of_run


def test_that_one_job_is_forgotten_tells_nothing_of_the_others(squeue: Path) -> None:
    squeue.write_text(f'#!/bin/sh\necho "7|RUNNING|None"\n{GONE}\n')
    assert slurm.states(["7", "8"]) == {"7": LaunchState(False, "RUNNING"), "8": LaunchState(True, "over")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"#!/bin/sh\n{DOWN}\n", "Unable to contact slurm controller"),
        ("#!/bin/sh\nexit 3\n", "squeue ended with exit code 3"),
        ("#!/no/such/shell\n", "squeue is not installed here"),
    ],
)
def test_a_slurm_that_does_not_answer_has_lost_no_job(text: str, words: str, squeue: Path) -> None:
    squeue.write_text(text)
    assert slurm.states(["7"]) == {}
    with pytest.raises(ClusterFailed, match=words):
        state_of("7")


def test_a_command_that_may_not_start_has_lost_no_job(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("halotile.graphs.clusters.launches.queue_answers.subprocess.run", refuse)
    assert slurm.states(["7"]) == {}
    with pytest.raises(ClusterFailed, match="squeue does not start"):
        state_of("7")
