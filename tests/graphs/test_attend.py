"""An attempt at a submitted run that finds its output held: by a machine that was lost, or by another driver at work."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halotile.errors import DamagedData, OutputInUse, Stopped
from halotile.graphs import claim, patience
from halotile.graphs.patience import patience_seconds
from halotile.graphs.submission import slurm
from halotile.graphs.submission.attend import (
    SILENCE_SECONDS,
    Submission,
    attend,
    check_not_waiting,
    submission_in,
)
from halotile.storage.batchfiles import BatchFiles
from halotile.storage.rundir import RunDirectory
from halotile.storage.runfiles import WRITTEN
from tests.faults import Scene


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that are put back into the queue."""
    numbers: list[str] = []
    monkeypatch.setattr(slurm, "requeue", numbers.append)
    monkeypatch.setattr("halotile.graphs.submission.attend.ignore_signals", lambda: None)
    return numbers


@pytest.fixture
def run(tmp_path: Path) -> Callable[[float], RunDirectory]:
    """A run that was submitted so many seconds ago as job 7."""

    def make(seconds: float) -> RunDirectory:
        made = RunDirectory(tmp_path / "out.zarr.run")
        made.create()
        given = {"fresh": False, "same_input": False, "allow_import": False}
        when = time.time() - seconds
        submitted = Submission(
            job={}, options=given, submitted_from="here", submitted=when, number="7", notice_seconds=20
        )
        BatchFiles(made).write(dataclasses.asdict(submitted))
        return made

    return make


def test_an_output_that_a_lost_machine_holds_is_asked_for_again(
    run: Callable[[float], RunDirectory], asked: list[str]
) -> None:
    made = run(60)

    def held(*_: object) -> None:
        raise OutputInUse("in use.")

    with pytest.raises(
        Stopped, match=r"in use\. Nothing has been heard of it, so this job is asked for again"
    ):
        attend(made, held)
    assert asked == ["7"]
    assert BatchFiles(made).failure() is None


def test_not_for_ever(run: Callable[[float], RunDirectory], asked: list[str]) -> None:
    made = run(SILENCE_SECONDS + 60)

    def held(*_: object) -> None:
        raise OutputInUse("in use.")

    with pytest.raises(OutputInUse):
        attend(made, held)
    assert not asked
    assert "in use" in str(BatchFiles(made).failure())


def test_another_driver_at_work_has_the_run_to_itself(
    run: Callable[[float], RunDirectory], asked: list[str]
) -> None:
    made = run(60)

    def held(*_: object) -> None:
        made.write_status({"state": "running", "updated": time.time() + 1})
        raise OutputInUse("in use.")

    with pytest.raises(OutputInUse):
        attend(made, held)
    assert not asked
    assert BatchFiles(made).failure() is None


@pytest.mark.parametrize("name", [*patience.BATCH_JOB, "HOME"])
def test_locks_are_waited_for_in_batch_jobs_alone(name: str) -> None:
    assert patience_seconds(0.5, {name: "7"}) == (0.5 if name == "HOME" else patience.LEASE_SECONDS)


def test_what_is_waited_for_is_told_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")  # a cluster that was started silences every handler, and for good
    scene = Scene.create(tmp_path)
    monkeypatch.setattr(patience, "SECONDS", 0.05)
    monkeypatch.setattr(claim, "patience_seconds", lambda _: 0.3)
    with scene.directory.lock(), pytest.raises(OutputInUse):
        scene.run()
    assert f"waiting for whoever holds {scene.directory.path}" in caplog.text


def test_a_submission_that_cannot_be_understood_is_damaged(run: Callable[[float], RunDirectory]) -> None:
    directory = run(0.0)
    BatchFiles(directory).write({})
    with pytest.raises(DamagedData, match=r"what it was submitted as is damaged\. Submit it again"):
        submission_in(directory)
    check_not_waiting(directory)


@pytest.mark.parametrize("rows", [3, [3], [{}], {"iteration": 3}])
def test_odd_words_of_iterations_are_none(run: Callable[[float], RunDirectory], rows: Any) -> None:
    directory = run(0.0)
    directory.write_written([{"iteration": 3}])
    assert directory.read_written() == [{"iteration": 3}]
    (directory.path / WRITTEN).write_text(json.dumps({"iterations": rows}))
    assert directory.read_written() == []
