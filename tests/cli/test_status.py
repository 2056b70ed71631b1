"""The status of a run is told from its directory, whether or not its driver lives, whatever its files hold and a batch system answers meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from skimage.data import camera

from halotile.cli import batch, running, status
from halotile.cli.config import loading
from halotile.cli.config.loading import load_job
from halotile.cli.exits import BAD_DATA, USAGE, StoppedEarly
from halotile.cli.screens.progress_report import Lines
from halotile.cli.status import SILENCE_SECONDS, BatchJob, advice, read_status, watch
from halotile.errors import ClusterFailed, ConfigError, DamagedData, OutputInUse
from halotile.graphs.clusters.base import ADDRESS, ATTENDED, VARIABLE
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import kept_of
from halotile.graphs.runs.signals import Signals, drains_within, run_child
from halotile.graphs.submission import Submission
from halotile.storage.run_directory.directory import BATCH, BatchFiles, RunDirectory
from halotile.storage.run_directory.journal import VERSION
from halotile.storage.run_directory.json_files import with_checksum
from halotile.storage.run_directory.locks import LOCK
from tests.cli.engine import SMALL_CONFIG, MonkeyPatch, ask, printed, refused
from tests.storage.outputs import PLAIN, written


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
    stale(monkeypatch, 1000)
    assert "its file system says that the files there are stale" in refused("status", directory.path)


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_an_output_leads_to_the_run_beside(directory: RunDirectory, monkeypatch: MonkeyPatch, state: str) -> None:
    record(directory, state=state, peak_memory_bytes=2**30, device_peak_bytes=3 * 2**30)
    monkeypatch.chdir(directory.path.parent)
    found = json.loads(printed("status", "clean.zarr", "--json"))
    assert (found["run_directory"], found["output"]) == (str(directory.path), "/data/clean.zarr")
    assert (found["state"], found["percent"]) == (state, 37.5)
    status = read_status(directory.path)
    assert (status.state, status.over, status.driver_gone) == (state, True, False)
    assert re.search(r"GPU memory +3 GiB at the peak in one worker", printed("status", "clean.zarr"))


def test_a_run_killed_before_its_first_block_has_no_rate(directory: RunDirectory) -> None:
    record(directory, done=100, seconds=0.0, pixels_done=0, pid=123)
    text = printed("status", directory.path)
    assert "100 of 400 blocks (100 resumed), 25.0 %" in text
    assert "rate" not in text
    record(directory, done=100, resumed=0, seconds=0.0, pixels_done=0, pid=123)
    assert "rate" not in printed("status", directory.path), "no time has passed"


def give_up(directory: RunDirectory, *numbers: int, error: str = "ValueError: poisoned\n  by hand") -> None:
    for number in numbers:
        event = {"event": "bad block", "block": number, "index": [0, number], "error": error}
        directory.append_event(event | {"traceback": "x"})


BAD_BLOCKS = [
    ("finished", 1, 399, "finished, except 1 bad block: once the cause is fixed, run `{}`; only this one is"),
    ("finished", 2, 398, "finished, except 2 bad blocks: once the cause is fixed, run `{}`; only these are"),
    ("failed", 2, 398, "failed with 2 bad blocks: once the cause is fixed, run `{}`; only these are redone"),
    ("failed", 2, 100, "failed with 2 bad blocks: once the cause is fixed, run `{}`; what is done stays done"),
    ("failed", 0, 100, "failed: once the cause is fixed, run `{}`"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "failed", "done", "words"), BAD_BLOCKS)
def test_bad_blocks_are_named(directory: RunDirectory, state: str, failed: int, done: int, words: str) -> None:
    give_up(directory, 300)
    directory.append_event({"event": "begin"})
    give_up(directory, *range(7, 7 + failed)[::-1])
    record(directory, state=state, failed=failed, done=done, resumed=0)
    text = printed("status", directory.path)
    assert text.splitlines()[-1].startswith(words.format(f"recon-cli resume {directory.path}"))
    assert ("block 7 (index (0, 7)): ValueError: poisoned\n" in text) == bool(failed)
    assert "block 300" not in text, "an earlier run gave it up, and it was tried again since"
    bad = json.loads(printed("status", directory.path, "--json"))["bad_blocks"]
    assert [block["number"] for block in bad] == list(range(7, 7 + failed))
    assert all(block["error"] == "ValueError: poisoned\n  by hand" for block in bad)


CAUSES = [
    ("DamagedData: noisy.zarr/c/0/0 is cut short", "the image"),
    ("InputError: the side input sigma holds NaN or infinity in row 3.", "input.sides.sigma"),
]


@pytest.mark.parametrize(("error", "cause"), CAUSES)
def test_what_has_to_be_repaired_is_named(directory: RunDirectory, error: str, cause: str) -> None:
    give_up(directory, 7, 8, error=error)
    record(directory, state="finished", failed=2, done=398)
    words = f"once {cause} is repaired, run `recon-cli resume {directory.path} --same-input`"
    assert words in printed("status", directory.path)


def test_lost_events_are_counted_and_of_many_the_first_five_are_named(directory: RunDirectory) -> None:
    record(directory, state="finished", failed=2, done=398)
    for line in (b"", b"{", b"[1]\n", b"7\n", b'{"event": "bad block"}\n'):
        directory.events_path.write_bytes(line)
        assert "finished, except 2 bad blocks: " in printed("status", directory.path)
    directory.events_path.unlink()
    give_up(directory, *range(9))
    record(directory, state="finished", failed=9, done=391)
    text = printed("status", directory.path)
    assert text.count("ValueError: poisoned") == 5
    assert "and 4 more, in events.jsonl" in text


PENDING, RUNNING, OVER, NO_ANSWER = "PENDING (BeginTime)", "RUNNING", None, "no answer"


BETWEEN_ATTEMPTS = [
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
]


@pytest.mark.parametrize(("recorded", "job", "locked", "shown"), BETWEEN_ATTEMPTS)
def test_a_submitted_run_is_not_over_between_two_attempts(
    directory: RunDirectory, monkeypatch: MonkeyPatch, recorded: Any, job: str | None, locked: bool, shown: str
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


def test_watching_ends_with_the_run(directory: RunDirectory) -> None:
    written: list[str] = []
    with directory.lock():
        record(directory)
        moments: Iterator[dict[str, Any]] = iter([{"done": 200}, {"done": 400, "state": "finished", "phase": "stop"}])
        now = watch(directory.path, Lines(written.append), sleep=lambda _: record(directory, **next(moments)))
    assert now.state == "finished"
    assert [text.split("  ")[0] for text in written] == ["denoise", "done"]


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
def fake_slurm(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder of fake Slurm commands: jobs end after two queries."""
    for name, lines in {
        "squeue": f'[ -e "{tmp_path}/asked" ] && exit; touch "{tmp_path}/asked"; echo "7 COMPLETING (None)"',
        "scancel": f'touch "{tmp_path}/cancelled"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def count_queries(folder: Path, lines: str) -> Path:
    """Replace squeue by lines that know as ``$n`` how often it was asked before; return the file of the number."""
    asked = folder / "n"
    counting = f'n=$(cat "{asked}" 2> /dev/null || echo 0); echo $((n + 1)) > "{asked}"'
    (folder / "squeue").write_text(f"#!/bin/sh\n{counting}\n{lines}\n")
    return asked


def test_a_finished_run_cannot_be_cancelled_and_others_are_marked(submitted: RunDirectory, fake_slurm: Path) -> None:
    BatchFiles(submitted).mark_end(None)
    with pytest.raises(ConfigError, match="the run has finished"):
        batch.cancel(submitted.path)
    assert BatchFiles(submitted).finished
    assert not (fake_slurm / "cancelled").exists()
    (submitted.path / "finished").unlink()
    (fake_slurm / "asked").unlink(missing_ok=True)
    assert "job 7 is cancelled" in batch.cancel(submitted.path)
    assert BatchFiles(submitted).failure() == "cancelled"
    assert (fake_slurm / "cancelled").exists()
    (fake_slurm / "asked").unlink()
    (fake_slurm / "scancel").write_text("#!/bin/sh\necho 'no such job' >&2; exit 1\n")
    assert "job 7 is cancelled" in batch.cancel(submitted.path), "it ended before"


def test_a_batch_job_that_stays_in_the_queue_has_failed() -> None:
    job = BatchJob("7", 0, 0.0, 0.0, "Eqw (can't chdir to /x)", known=True, failure=None, stays=True)
    state, reason = job.corrected({}) or ("", "")
    assert state == "failed"
    assert "stays in the queue: Eqw (can't chdir to /x). Remove it with `recon-cli cancel`" in reason


def test_waiting_images_are_queued(submitted: RunDirectory, fake_slurm: Path, monkeypatch: MonkeyPatch) -> None:
    folder = submitted.path.parent
    for name in "ab":
        np.save(folder / f"{name}.npy", np.zeros((8, 8), "f4"))
    job = {"version": 1, "job": "denoise", "input": {"path": "*.npy"}, "denoiser": {"name": "none"}}
    (folder / "many.yaml").write_text(json.dumps(job | {"output": {"path": "{stem}.zarr"}}))
    submitted.path.rename(folder / "{stem}.zarr.run")
    monkeypatch.setattr(status, "QUEUE_SECONDS", 0.01)
    asked = count_queries(fake_slurm, '[ $n -lt 3 ] && echo "7 PENDING (Resources)"; true')
    looked = ask("status", folder / "many.yaml").stdout
    assert "2 queued" in looked
    assert "job 7: PENDING (Resources)" in looked
    ask("status", folder / "many.yaml", "--watch")
    assert int(asked.read_text()) > 3, "it followed the job until it was over"


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


KILLED = "its driver was killed (SIGKILL), for memory perhaps"


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, KILLED), (signal.SIGSEGV, "(SIGSEGV): `recon-cli"), (signal.SIGTERM, "None")]
)
def test_only_what_kills_without_being_asked_is_told(
    number: signal.Signals, words: str, submitted: RunDirectory, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("halotile.graphs.runs.signals.run_child", lambda *_: -number)
    assert batch.look_after(submitted.path) == 128 + number
    assert words in str(BatchFiles(submitted).failure())


def test_a_run_that_never_began_is_not_to_be_resumed(submitted: RunDirectory, fake_slurm: Path) -> None:
    (fake_slurm / "asked").touch()
    BatchFiles(submitted).mark_end("cancelled")
    text = advice(read_status(submitted.path))
    assert "`recon-cli submit` of the same configuration" in text
    assert "resume" not in text


def test_watching_shows_a_queue(submitted: RunDirectory, fake_slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count_queries(fake_slurm, '[ $n -lt 3 ] && echo "7 PENDING (Resources)"; true')
    assert watch(submitted.path, Lines(print), lambda _: None).over
    assert capsys.readouterr().err == "job 7: PENDING (Resources), 0 attempts so far\n"


def test_a_second_signal_and_a_drain_that_takes_too_long_hurry_and_the_first_signal_counts() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # the same, by another way
        assert (signals.requested, signals.hurried, signals.name) == (True, False, "SIGUSR1")
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.hurried, signals.name) == (True, "SIGUSR1")
    with drains_within(0.05), Signals() as signals:
        assert not signals.hurried
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert signals.hurried


def test_silence_of_slurm_ends_no_cancel(submitted: RunDirectory, fake_slurm: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "POLL_SECONDS", 0.01)
    asked = count_queries(fake_slurm, '[ $n = 0 ] && echo "7 COMPLETING (None)"; [ $n != 1 ]')
    assert "job 7 is cancelled" in batch.cancel(submitted.path)
    assert BatchFiles(submitted).failure() == "cancelled"
    assert asked.read_text().strip() == "3"


DEEP = "[" * 100_000


@pytest.fixture
def run(directory: RunDirectory) -> RunDirectory:
    """That of an output which is whole."""
    written(directory.path.with_suffix(""), PLAIN)
    directory.write_job({})
    return directory


@pytest.mark.parametrize("text", [DEEP, "3", '{"a": ' * 100_000])
def test_a_status_that_is_no_object_is_none(run: RunDirectory, text: str) -> None:
    run.status_path.write_text(text)
    assert "or status.json is damaged" in refused("status", str(run.path), code=USAGE)
    printed("verify", run.path, "-q")


@pytest.mark.parametrize("holder", [DEEP, [], {"pid": 1}])
def test_a_lock_that_does_not_say_whose_it_is_is_another_runs(run: RunDirectory, holder: Any) -> None:
    with run.lock():
        (run.path / LOCK).write_text(holder if isinstance(holder, str) else json.dumps(holder))
        with pytest.raises(OutputInUse, match="is in use: another run is writing this output"):
            run.check_free()
        assert "its driver is process None on None" in refused("cancel", str(run.path), code=USAGE)


def test_a_batch_job_that_is_no_object_is_damaged(run: RunDirectory) -> None:
    run.write_status({"state": "finished"})
    (run.path / BATCH).write_text("[]")
    assert "Remove it, and submit" in refused("status", str(run.path), code=BAD_DATA)
    assert "Remove it, and submit" in refused("cancel", str(run.path), code=BAD_DATA)
    with pytest.raises(DamagedData):
        BatchFiles(run).read()


@pytest.mark.parametrize("sizes", [{"total": 2**70}, {"total": 2**62}, {"total": 10**11}, {"images": 2**62}], ids=str)
def test_a_journal_of_odd_sizes_is_damaged(directory: RunDirectory, tmp_path: Path, sizes: dict[str, int]) -> None:
    run = directory
    run.write_job({})
    (run.path / LOCK).touch()
    np.save(tmp_path / "noisy.npy", np.zeros((64, 64), np.float32))
    (tmp_path / "config.yaml").write_text(SMALL_CONFIG)
    owner = {"journal": VERSION, "fingerprint": "ab", "total": 4, "images": 1} | sizes
    run.journal_path.write_bytes(with_checksum(json.dumps(owner).encode()))
    config, output = str(tmp_path / "config.yaml"), str(tmp_path / "clean.zarr")
    damaged = f"{run.journal_path}: its first line is damaged"
    assert damaged in refused("plan", config, code=BAD_DATA)
    assert damaged in refused("run", config, "-q", "--no-dashboard", code=BAD_DATA)
    refused("verify", output, code=USAGE)
    refused("status", str(run.path), code=USAGE)
    run.plan_path.write_text("{}")
    assert damaged in refused("verify", output, code=BAD_DATA)
