"""The marks of a submitted run record its end, whatever Slurm answers meanwhile; here Slurm is a fake."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from halotile.cli import batch, status
from halotile.cli.main import app
from halotile.cli.screens.progress_report import Lines
from halotile.cli.status import BatchJob, advice, read_status, watch
from halotile.errors import ConfigError
from halotile.graphs.runs.signals import Signals, drains_within, run_child
from halotile.graphs.submission import Submission
from halotile.storage.run_directory.directory import BatchFiles, RunDirectory
from tests.cli.engine import MonkeyPatch


@pytest.fixture
def submitted(tmp_path: Path) -> RunDirectory:
    """A run that was submitted as job 7."""
    run = RunDirectory(tmp_path / "out.zarr.run")
    run.create()
    BatchFiles(run).write(
        dataclasses.asdict(Submission(job={}, options={}, submitted_from="here", submitted=time.time(), number="7"))
    )
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder of fake Slurm commands: jobs end after two queries."""
    for name, lines in {
        "squeue": f'[ -e "{tmp_path}/asked" ] && exit; touch "{tmp_path}/asked"; echo "7 COMPLETING (None)"',
        "scancel": f'touch "{tmp_path}/cancelled"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_run_that_has_finished_cannot_be_cancelled(submitted: RunDirectory, slurm: Path) -> None:
    BatchFiles(submitted).mark_end(None)
    with pytest.raises(ConfigError, match="the run has finished"):
        batch.cancel(submitted.path)
    assert BatchFiles(submitted).finished
    assert not (slurm / "cancelled").exists()


def test_a_job_that_ends_before_its_cancel_is_cancelled(submitted: RunDirectory, slurm: Path) -> None:
    (slurm / "scancel").write_text("#!/bin/sh\necho 'no such job' >&2; exit 1\n")
    assert "job 7 is cancelled" in batch.cancel(submitted.path)


def test_a_batch_job_that_stays_in_the_queue_has_failed() -> None:
    job = BatchJob("7", 0, 0.0, 0.0, "Eqw (can't chdir to /x)", known=True, failure=None, stays=True)
    state, reason = job.corrected({}) or ("", "")
    assert state == "failed"
    assert "stays in the queue: Eqw (can't chdir to /x). Remove it with `recon-cli cancel`" in reason


def test_the_images_of_a_batch_job_that_waits_are_queued(
    submitted: RunDirectory, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = submitted.path.parent
    for name in "ab":
        np.save(folder / f"{name}.npy", np.zeros((8, 8), "f4"))
    job = {"version": 1, "job": "denoise", "input": {"path": "*.npy"}, "denoiser": {"name": "none"}}
    (folder / "many.yaml").write_text(json.dumps(job | {"output": {"path": "{stem}.zarr"}}))
    submitted.path.rename(folder / "{stem}.zarr.run")
    monkeypatch.setattr(status, "QUEUE_SECONDS", 0.01)
    answers = f'n=$(cat "{slurm}/n" || echo 0); echo $((n + 1)) > "{slurm}/n"'
    pending = '[ $n -lt 3 ] && echo "7 PENDING (Resources)"'
    (slurm / "squeue").write_text(f"#!/bin/sh\n{answers} 2> /dev/null\n{pending}\nexit 0\n")
    looked = CliRunner().invoke(app, ["status", str(folder / "many.yaml")])
    assert "2 queued" in looked.stdout
    assert "job 7: PENDING (Resources)" in looked.stdout
    CliRunner().invoke(app, ["status", str(folder / "many.yaml"), "--watch"])
    assert int((slurm / "n").read_text()) > 3, "it followed the job until it was over"


def test_one_that_has_not_is_marked(submitted: RunDirectory, slurm: Path) -> None:
    assert "job 7 is cancelled" in batch.cancel(submitted.path)
    assert BatchFiles(submitted).failure() == "cancelled"
    assert (slurm / "cancelled").exists()


def test_a_driver_that_is_killed_is_told(submitted: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.runs.signals.run_child", lambda *_: -signal.SIGKILL)
    assert batch.look_after(submitted.path) == 128 + signal.SIGKILL
    assert "its driver was killed (SIGKILL), for memory perhaps" in str(BatchFiles(submitted).failure())


@pytest.mark.parametrize("begins_first", [False, True])
def test_a_signal_at_the_beginning_is_passed_on(monkeypatch: MonkeyPatch, begins_first: bool) -> None:
    class Beginning(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if begins_first:
                super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGTERM)
            if not begins_first:
                super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Beginning)
    assert run_child(["sleep", "5"]) == -signal.SIGTERM


@pytest.mark.parametrize(("number", "words"), [(signal.SIGSEGV, "(SIGSEGV): `recon-cli"), (signal.SIGTERM, "None")])
def test_only_what_kills_without_being_asked_is_told(
    number: signal.Signals, words: str, submitted: RunDirectory, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.graphs.runs.signals.run_child", lambda *_: -number)
    assert batch.look_after(submitted.path) == 128 + number
    assert words in str(BatchFiles(submitted).failure())


def test_a_run_that_never_began_is_not_to_be_resumed(submitted: RunDirectory, slurm: Path) -> None:
    (slurm / "asked").touch()
    BatchFiles(submitted).mark_end("cancelled")
    text = advice(read_status(submitted.path))
    assert "`recon-cli submit` of the same configuration" in text
    assert "resume" not in text


def test_watching_shows_what_a_run_waits_for(
    submitted: RunDirectory, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "squeue").write_text(f'#!/bin/sh\n[ -e "{slurm}/asked" ] && exit; echo "7 PENDING (Resources)"\n')
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (slurm / "asked").touch()

    assert watch(submitted.path, Lines(print), wait).over
    assert capsys.readouterr().err == "job 7: PENDING (Resources), 0 attempts so far\n"


def test_a_second_signal_hurries_and_the_first_one_counts() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # the same, by another way
        assert (signals.requested, signals.hurried, signals.name) == (True, False, "SIGUSR1")
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.hurried, signals.name) == (True, "SIGUSR1")


def test_a_drain_that_takes_too_long_hurries() -> None:
    with drains_within(0.05), Signals() as signals:
        assert not signals.hurried
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert signals.hurried


def test_a_question_that_slurm_leaves_unanswered_does_not_end_a_cancel(
    submitted: RunDirectory, slurm: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "POLL_SECONDS", 0.01)
    answers = f'n=$(cat "{slurm}/n" || echo 0); echo $((n + 1)) > "{slurm}/n"'
    (slurm / "squeue").write_text(
        f'#!/bin/sh\n{answers} 2> /dev/null\n[ $n = 0 ] && echo "7 COMPLETING (None)"\n[ $n != 1 ]\n'
    )
    assert "job 7 is cancelled" in batch.cancel(submitted.path)
    assert BatchFiles(submitted).failure() == "cancelled"
    assert (slurm / "n").read_text().strip() == "3"
