"""The status of a run is told from its directory, whether or not its driver lives."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from skimage.data import camera

from halotile.cli import batch, running
from halotile.cli.config import loading
from halotile.cli.config.loading import load_job
from halotile.cli.exits import StoppedEarly
from halotile.cli.screens.progress_report import Lines
from halotile.cli.status import SILENCE_SECONDS, read_status, watch
from halotile.errors import ClusterFailed, ConfigError
from halotile.graphs.clusters.base import ADDRESS, ATTENDED, VARIABLE
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.graphs.submission import Submission
from halotile.storage.run_directory.directory import BatchFiles, RunDirectory
from tests.cli.engine import MonkeyPatch, ask, printed, refused


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "clean.zarr.run")
    made.create()
    return made


def record(directory: RunDirectory, **changed: Any) -> None:
    status = {
        "state": "running", "phase": "denoise", "done": 150, "resumed": 100, "total": 400, "seconds": 10.0,
        "pixels_done": 50_000_000, "pixels_total": 400_000_000, "workers": 2, "pid": os.getpid(),
        "host": socket.gethostname(), "updated": time.time() - 3, "output": "/data/clean.zarr", "reason": "", "message": "said before",
    }  # fmt: skip
    directory.write_status(status | changed)


def test_a_running_run_tells_how_far_it_is(directory: RunDirectory) -> None:
    with directory.lock():
        record(directory)
        result = ask("status", directory.path)
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    shown = dict(row.split(maxsplit=1) for row in rows)
    assert head == "running"
    assert shown["done"] == "150 of 400 blocks (100 resumed), 37.5 %"
    assert shown["left"] == "50 s"
    assert shown["rate"] == "5 Mpix/s, 0 MB/s over 10 s"


def test_several_runs_have_a_row_each(directory: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other.zarr.run")
    other.create()
    record(other, state="failed", done=400, reason="the disk is full\nmore")
    with directory.lock():
        record(directory)
        result = ask("status", directory.path, other.path, tmp_path)
        as_json = json.loads(ask("status", directory.path, tmp_path, "--json").stdout)
    assert (result.exit_code, [line.split(maxsplit=1) for line in result.stdout.splitlines()]) == (
        0,
        [
            ["3", "runs"],
            ["running", f"{directory.path}: 150 of 400 blocks (100 resumed), 38 %, 50 s left"],
            ["failed", f"{other.path}: 400 of 400 blocks (100 resumed), 100 %: the disk is full"],
            ["no", f"run   {tmp_path}"],
        ],
    )
    assert [one and one["state"] for one in as_json["runs"].values()] == ["running", None]
    assert "--watch follows one run" in ask("status", directory.path, other.path, "--watch").stderr


def test_the_noise_is_that_of_the_plan_and_of_settings_that_are_tried(tmp_path: Path) -> None:
    pixels = camera()[:256, :256] + 15 * np.random.default_rng(0).standard_normal((256, 256))
    np.save(tmp_path / "a.npy", pixels.clip(0, 255).astype("u1"))
    job = tmp_path / "job.yaml"
    places = f"input: {{path: {tmp_path / 'a.npy'}}}\noutput: {{path: {tmp_path / 'o.zarr'}}}\n"
    job.write_text(f"version: 1\njob: denoise\n{places}denoiser: {{name: tv, strength: 1.0, sigma: auto}}\n")
    level = json.loads(ask("try", job, "--json").stdout)["noise_level"]
    relative = f"noise level {level:.4g} ({level / 255:.4g} of the range), estimated from the whole image"
    shown = {name: " ".join(printed(name, job).split()) for name in ("try", "plan")}
    run = RunDirectory.beside(tmp_path / "o.zarr")
    run.create()
    record(run, state="finished")
    run.write_plan(kept_of(make_plan(load_job(job), fresh=True)))
    shown["status"] = " ".join(printed("status", run.path).split())
    assert f"noise noise level {level:.4g} " in shown["try"]
    assert relative in shown["plan"]
    assert f"noise {relative}" in shown["status"]


def test_what_was_held_of_a_card_is_told(directory: RunDirectory) -> None:
    record(directory, peak_memory_bytes=2**30, device_peak_bytes=3 * 2**30)
    shown = ask("status", directory.path).stdout
    assert "GPU memory" in shown
    assert "3 GiB at the peak in one worker" in shown


@pytest.mark.parametrize("state", ["planned", "running", "draining"])
def test_a_run_without_its_driver_is_interrupted(directory: RunDirectory, state: str) -> None:
    record(directory, state=state, pid=123)
    result = ask("status", directory.path)
    assert result.stdout.startswith("interrupted\n")
    last = result.stdout.splitlines()[-1]
    driver = f"pid 123 on {socket.gethostname()}"
    assert last == f"interrupted: the driver ({driver}) is gone; run `recon-cli resume {directory.path}`"


@pytest.mark.parametrize(("silent_seconds", "state"), [(3, "running"), (SILENCE_SECONDS + 5, "interrupted")])
def test_a_driver_elsewhere_is_given_time(directory: RunDirectory, silent_seconds: float, state: str) -> None:
    record(directory, host="elsewhere", updated=time.time() - silent_seconds)
    assert read_status(directory.path).state == state


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_a_run_that_is_over_is_not_called_interrupted(directory: RunDirectory, state: str) -> None:
    record(directory, state=state)
    status = read_status(directory.path)
    assert (status.state, status.over, status.driver_gone) == (state, True, False)


def test_a_run_that_ends_between_two_looks_has_finished(directory: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    record(directory)

    def end(self: RunDirectory) -> None:
        record(directory, state="finished", done=400)

    monkeypatch.setattr(RunDirectory, "is_running", end)
    assert read_status(directory.path).state == "finished"


def stale(monkeypatch: MonkeyPatch, times: int) -> None:
    """Files of the run that another machine replaces while they are read, so many times."""
    read = Path.read_bytes
    left = iter(range(times))

    def read_bytes(path: Path) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr("halotile.cli.status.STALE_SECONDS", 0.0)


def test_a_file_that_is_replaced_is_looked_at_again(directory: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    record(directory, state="finished")
    stale(monkeypatch, 3)
    assert ask("status", directory.path, "--watch").exit_code == 0


def test_files_that_stay_stale_are_told_in_words(directory: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    record(directory)
    stale(monkeypatch, 1000)
    assert "its file system says that the files there are stale" in refused("status", directory.path)


def test_the_output_leads_to_the_run_beside_it(directory: RunDirectory) -> None:
    record(directory, state="finished")
    result = ask("status", directory.path.with_name("clean.zarr"), "--json")
    found = json.loads(result.stdout)
    assert found["run_directory"] == str(directory.path)
    assert (found["state"], found["percent"], found["output"]) == ("finished", 37.5, "/data/clean.zarr")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]"])
def test_a_status_that_cannot_be_read_is_a_message(directory: RunDirectory, content: bytes | None) -> None:
    directory.write_job({})
    if content is not None:
        directory.status_path.write_bytes(content)
    with pytest.raises(ConfigError, match="recon-cli resume"):
        read_status(directory.path)


def test_a_path_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "no run here" in refused("status", tmp_path)


def test_a_run_killed_before_its_first_block_has_no_rate(directory: RunDirectory) -> None:
    record(directory, done=100, seconds=0.0, pixels_done=0, pid=123)
    text = shown_by_status(directory)
    assert "100 of 400 blocks (100 resumed), 25.0 %" in text
    assert "rate" not in text
    record(directory, done=100, resumed=0, seconds=0.0, pixels_done=0, pid=123)
    assert "rate" not in shown_by_status(directory), "no time has passed"


def test_programs_are_given_whole_paths(directory: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    record(directory, state="finished")
    monkeypatch.chdir(directory.path.parent)
    found = json.loads(ask("status", directory.path.name, "--json").stdout)
    assert found["run_directory"] == str(directory.path)


def give_up(directory: RunDirectory, *numbers: int, error: str = "ValueError: poisoned\n  by hand") -> None:
    for number in numbers:
        event = {"event": "bad block", "block": number, "index": [0, number], "error": error}
        directory.append_event(event | {"traceback": "x"})


def shown_by_status(directory: RunDirectory, *words: str) -> str:
    return printed("status", directory.path, *words)


@pytest.mark.parametrize(
    ("state", "failed", "done", "words"),
    [
        ("finished", 1, 399, "finished, except 1 bad block: once the cause is fixed, run `{}`; only this one is"),
        ("finished", 2, 398, "finished, except 2 bad blocks: once the cause is fixed, run `{}`; only these are"),
        ("failed", 2, 398, "failed with 2 bad blocks: once the cause is fixed, run `{}`; only these are redone"),
        ("failed", 2, 100, "failed with 2 bad blocks: once the cause is fixed, run `{}`; what is done stays done"),
        ("failed", 0, 100, "failed: once the cause is fixed, run `{}`"),
    ],
)  # fmt: skip
def test_bad_blocks_are_named(directory: RunDirectory, state: str, failed: int, done: int, words: str) -> None:
    give_up(directory, 300)
    directory.append_event({"event": "begin"})
    give_up(directory, *range(7, 7 + failed)[::-1])
    record(directory, state=state, failed=failed, done=done, resumed=0)
    text = shown_by_status(directory)
    last = text.splitlines()[-1]
    assert last.startswith(words.format(f"recon-cli resume {directory.path}"))
    assert ("block 7 (index (0, 7)): ValueError: poisoned\n" in text) == bool(failed)
    assert "block 300" not in text, "an earlier run gave it up, and it was tried again since"
    bad = json.loads(shown_by_status(directory, "--json"))["bad_blocks"]
    assert [block["number"] for block in bad] == list(range(7, 7 + failed))
    assert all(block["error"] == "ValueError: poisoned\n  by hand" for block in bad)


def test_of_many_bad_blocks_the_first_five_are_named(directory: RunDirectory) -> None:
    give_up(directory, *range(9))
    record(directory, state="finished", failed=9, done=391)
    text = shown_by_status(directory)
    assert text.count("ValueError: poisoned") == 5
    assert "and 4 more, in events.jsonl" in text


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("DamagedData: noisy.zarr/c/0/0 is cut short", "the image"),
        ("InputError: the side input sigma holds NaN or infinity in row 3.", "input.sides.sigma"),
    ],
)
def test_what_has_to_be_repaired_is_named(directory: RunDirectory, error: str, cause: str) -> None:
    give_up(directory, 7, 8, error=error)
    record(directory, state="finished", failed=2, done=398)
    words = f"once {cause} is repaired, run `recon-cli resume {directory.path} --same-input`"
    assert words in shown_by_status(directory)


@pytest.mark.parametrize("line", [b"", b"{", b"[1]\n", b"7\n", b'{"event": "bad block"}\n'])
def test_bad_blocks_whose_events_are_lost_are_counted(directory: RunDirectory, line: bytes) -> None:
    directory.events_path.write_bytes(line)
    record(directory, state="finished", failed=2, done=398)
    assert "finished, except 2 bad blocks: " in shown_by_status(directory)


PENDING, RUNNING, OVER = "PENDING (BeginTime)", "RUNNING", None
NO_ANSWER = "no answer"


@pytest.mark.parametrize(
    ("recorded", "job", "locked", "shown"),
    [
        ({"state": "stopped"}, RUNNING, False, "queued"),  # drained, and not put back yet
        ({"state": "stopped"}, "COMPLETING", False, "queued"),
        ({"state": "stopped"}, PENDING, False, "queued"),
        ({"state": "stopped", "updated": 0.0}, RUNNING, False, "queued"),  # the next attempt begins
        ({"state": "stopped", "updated": 0.0, "pid": 1}, RUNNING, True, "planned"),
        (None, RUNNING, True, "planned"),
        (None, RUNNING, False, "queued"),
        ({"state": "stopped", "reason": "stopped on SIGUSR1 with"}, NO_ANSWER, False, "queued"),
        ({"state": "stopped", "reason": "stopped on SIGTERM with"}, NO_ANSWER, False, "stopped"),
        ({"state": "stopped"}, OVER, False, "stopped"),
        ({"state": "finished"}, "COMPLETING", False, "finished"),
        ({"state": "failed"}, RUNNING, False, "failed"),
    ],
)
def test_a_submitted_run_is_not_over_between_two_attempts(
    directory: RunDirectory,
    monkeypatch: MonkeyPatch,
    recorded: dict[str, Any] | None,
    job: str | None,
    locked: bool,
    shown: str,
) -> None:
    def state_of(*_: object) -> str | None:
        if job == NO_ANSWER:
            raise ClusterFailed("Slurm does not answer")
        return job

    monkeypatch.setattr(BatchSystem, "state_of", state_of)
    BatchFiles(directory).write(
        {"number": "7", "attempts": 2, "submitted": time.time() - 100, "began": time.time() - 50,
         "job": {}, "options": {}, "submitted_from": "login"}
    )  # fmt: skip
    with directory.lock() if locked else nullcontext():
        if recorded is not None:
            record(directory, **recorded)
        now = read_status(directory.path)
    assert (now.state, now.over) == (shown, shown in ("stopped", "failed", "finished"))


def test_a_walltime_too_short_to_plan_is_told(directory: RunDirectory, monkeypatch: MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise StoppedEarly("stopped on SIGUSR1")

    monkeypatch.setattr(running, "go", stopped)
    monkeypatch.setattr(loading, "check_saved_job", lambda *_: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in (ATTENDED, VARIABLE, ADDRESS):  # which an attempt changes
        monkeypatch.setenv(name, "")
    options = {"fresh": False, "same_input": False, "allow_import": True}
    Submission(job={}, options=options, submitted_from="", submitted=0, number="7").keep(BatchFiles(directory))
    with pytest.raises(ClusterFailed, match=r"write a longer cluster\.walltime"):
        batch.attend(directory.path)
    assert "write a longer cluster.walltime" in str(BatchFiles(directory).failure())


def test_a_run_that_begins_anew_is_planned_until_it_reports(directory: RunDirectory) -> None:
    with directory.lock():
        record(directory, state="stopped", pid=1)
        assert read_status(directory.path).state == "planned"
        record(directory, state="stopped")
        assert read_status(directory.path).state == "stopped"


def test_watching_ends_with_the_run(directory: RunDirectory) -> None:
    written: list[str] = []
    with directory.lock():
        record(directory)
        moments: Iterator[dict[str, Any]] = iter([{"done": 200}, {"done": 400, "state": "finished", "phase": "stop"}])
        now = watch(directory.path, Lines(written.append), sleep=lambda _: record(directory, **next(moments)))
    assert now.state == "finished"
    assert [text.split("  ")[0] for text in written] == ["denoise", "done"]
