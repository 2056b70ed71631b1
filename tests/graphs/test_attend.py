"""Attempts at a submitted run whose output is held by a lost machine, or by another driver at work."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from halotile.errors import DamagedData, OutputInUse, Stopped
from halotile.graphs import waiting
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.runs import claim
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import status_of
from halotile.graphs.submission import DRAIN_AT, SILENCE_SECONDS, Submission, attend, check_not_waiting, submission_in
from halotile.graphs.waiting import patience_seconds
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import BatchFiles, RunDirectory
from halotile.storage.run_directory.locks import WorkerLock
from tests.cases import thorough
from tests.faults import Scene

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
    monkeypatch.setenv(DRAIN_AT, str(int(time.time()) + 3))

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
    (SILENCE_SECONDS + 60, {}, False, True),  # for ever
    (60, {"state": "running"}, False, False),  # another driver is at work
    (SILENCE_SECONDS + 60, THREE_DONE, True, False),  # of several images, others were done
    (SILENCE_SECONDS + 60, TWO_DONE, False, True),
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


class Torn(BaseException):
    """The error of the command when a signal comes outside of a run."""


def _tear(number: int, _: FrameType | None) -> NoReturn:
    raise Torn(signal.Signals(number).name)


@pytest.fixture
def signals_while_waiting(monkeypatch: Patch) -> Iterator[list[signal.Signals]]:
    """The signal that comes while the command waits for a lock, as long as a batch job does."""
    requested: list[signal.Signals] = []
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    monkeypatch.setattr(claim, "log_line", lambda _: os.kill(os.getpid(), requested[0]))
    monkeypatch.setenv("PBS_JOBID", "7")
    before = {number: signal.signal(number, _tear) for number in (signal.SIGUSR1, signal.SIGTERM)}
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
    with ExitStack() as held:
        if holder == "driver":
            held.enter_context(scene.directory.lock())
        else:
            scene.directory.create()
            (lock := WorkerLock(scene.directory.path)).hold()
            held.callback(lock.release)
        with pytest.raises(Stopped, match=NUMBERS[number]):
            attend(made, lambda *_: scene.run())
    assert requested == ["7"] * (number == signal.SIGUSR1)
    assert BatchFiles(made).failure() is None
    assert not scene.output.exists()


def test_a_submission_that_cannot_be_understood_is_damaged(run: MakeRun) -> None:
    directory = run(0.0)
    BatchFiles(directory).write({})
    with pytest.raises(DamagedData, match=r"the record of its submission is damaged\. Submit it again"):
        submission_in(directory)
    check_not_waiting(directory)


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
