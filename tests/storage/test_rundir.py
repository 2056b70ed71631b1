"""The run directory: private, with a single driver, and without leftover writers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from halotile.errors import DamagedData, OutputRefused
from halotile.storage.disk.durable import Disk
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.locks import WorkerLock


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "a.zarr.run")


@contextmanager
def other_process(directory: RunDirectory, body: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs ``body`` and then waits."""
    code = (
        "import sys, pathlib; from halotile.storage.run_directory.directory import RunDirectory; from halotile.storage.run_directory.locks import WorkerLock\n"
        f"directory = RunDirectory(pathlib.Path(sys.argv[1]))\n{body}\nprint('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


LOCKS = "lock = directory.lock(); lock.__enter__()"
HOLDS = "WorkerLock(directory.path).hold()"


def test_only_the_owner_may_enter(directory: RunDirectory) -> None:
    with directory.lock():
        directory.write_job({"a": 1})
        directory.write_plan({"b": 2})
        directory.write_status({"c": 3})
        directory.append_event({"d": 4})
        WorkerLock(directory.path).hold()
    WorkerLock(directory.path).release()
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in directory.path.iterdir()}
    assert modes == dict.fromkeys(
        ("job.json", "plan.json", "status.json", "events.jsonl", "lock", "workers.lock"), 0o600
    )
    assert directory.path.stat().st_mode & 0o777 == 0o700


def test_records_can_be_read_back(directory: RunDirectory) -> None:
    assert directory.is_running() is None
    assert not directory.path.exists()
    assert directory.read_job() is directory.read_plan() is directory.read_status() is None
    assert list(directory.read_events()) == []
    with directory.lock():
        for number in range(3):
            directory.write_job({"job": number})
            directory.write_plan({"plan": number})
            directory.write_status({"status": number})
            directory.append_event({"event": number})
    assert directory.path.exists()
    assert directory.read_job() == {"job": 2}
    assert directory.read_plan() == {"plan": 2}
    assert directory.read_status() == {"status": 2}
    assert list(directory.read_events()) == [{"event": 0}, {"event": 1}, {"event": 2}]


def test_forgetting_a_run_preserves_the_job(directory: RunDirectory) -> None:
    with directory.lock():
        directory.write_job({"job": 1})
        directory.write_plan({})
        directory.write_status({})
        directory.append_event({})
        directory.journal_path.touch()
        directory.forget()
        assert {entry.name for entry in directory.path.iterdir()} == {"job.json", "lock"}


def test_a_damaged_or_changed_plan_is_an_error_and_a_damaged_status_is_none(directory: RunDirectory) -> None:
    directory.create()
    directory.write_plan({"block": [4, 4]})
    changed = directory.plan_path.read_bytes().replace(b"4", b"5")
    no_plans = (b"{}", b'{"fingerprint": "a"}', b'{"layout": {}, "block": [1]}')
    for content in (b"", b"{", b"[1]", b"\xff\xfe", changed, *no_plans):
        directory.plan_path.write_bytes(content)
        with pytest.raises(DamagedData, match=r"plan\.json is damaged"):
            directory.read_plan()
    assert directory.read_valid_plan() is None
    for content in (b"", b"{", b"[1]", b"\xff\xfe"):
        directory.status_path.write_bytes(content)
        assert directory.read_status() is None


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced by another"])
def test_a_run_whose_directory_disappears_is_stopped_with_advice(directory: RunDirectory, again: bool) -> None:
    def work() -> None:
        with directory.lock():
            shutil.rmtree(directory.path)
            if again:
                directory.create()
                (directory.path / "lock").touch()
            directory.disk.append(directory.journal_path, b"+1")

    with pytest.raises(OutputRefused, match=r"was moved or removed during its run.*output\.overwrite: true"):
        work()


def test_other_system_errors_pass_through_the_lock_and_release_it(directory: RunDirectory) -> None:
    with pytest.raises(FileNotFoundError), directory.lock():
        directory.disk.append(directory.journal_path, b"+1")
    assert directory.is_running() is None


class Full(Disk):
    """A disk without room for new files."""

    def _open(self, path: Path, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super()._open(path, flags, mode)


def test_the_status_can_report_a_full_disk(directory: RunDirectory) -> None:
    directory.create()
    directory.write_status({"state": "running", "message": "two of nine blocks are done"})
    full = RunDirectory(directory.path, Full())
    full.write_status({"state": "failed", "reason": "full"})
    assert directory.read_status() == {"state": "failed", "reason": "full"}


def test_events_of_many_threads_stay_whole_and_a_torn_one_is_left_out(directory: RunDirectory) -> None:
    directory.create()
    directory.append_event({"first": True})

    def append() -> None:
        for _ in range(50):
            directory.append_event({"text": "x" * 200})

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(append)
    with directory.events_path.open("ab") as file:
        file.write(b'{"event": ')
    assert len(list(directory.read_events())) == 201


def test_a_second_driver_is_refused_with_the_name_of_the_first(directory: RunDirectory) -> None:
    with other_process(directory, LOCKS) as first:
        with pytest.raises(OutputRefused, match=rf"in use: process {first.pid} on .*, started 2"), directory.lock():
            pass
        holder = directory.is_running()
        assert holder is not None
        assert holder["pid"] == first.pid
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert directory.is_running() is None
        with directory.lock():
            pass


def test_a_second_driver_in_the_same_process_is_refused(directory: RunDirectory) -> None:
    with directory.lock():
        with pytest.raises(OutputRefused, match=f"process {os.getpid()} on"), directory.lock():
            pass
        assert directory.is_running() is not None
    assert directory.is_running() is None


def test_a_driver_that_waited_takes_the_next_lock_of_a_directory_that_was_removed(directory: RunDirectory) -> None:
    taken, is_waiting = threading.Event(), threading.Event()

    def goes_on() -> bool:
        is_waiting.set()
        return False

    def wait() -> None:
        with directory.lock(30, cut_short=goes_on):
            taken.set()

    waiter = threading.Thread(target=wait)
    with directory.lock():
        waiter.start()
        assert is_waiting.wait(30)
        directory.remove()
    waiter.join()
    assert taken.is_set()


def test_checking_does_not_disturb_a_driver_that_starts(directory: RunDirectory) -> None:
    with directory.lock():
        pass
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.001):
            directory.is_running()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            with directory.lock():
                pass
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


def test_a_driver_removes_partial_files_of_a_killed_one(directory: RunDirectory) -> None:
    directory.create()
    (directory.path / "status.json.0a1b2c3d.partial").touch()
    with directory.lock():
        assert os.listdir(directory.path) == ["lock"]


def test_the_lock_is_not_inherited_by_child_programs(directory: RunDirectory) -> None:
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with directory.lock():
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert directory.is_running() is None
        child.kill()


def test_a_driver_waits_for_the_workers_of_a_killed_one(directory: RunDirectory) -> None:
    directory.create()
    with other_process(directory, HOLDS) as worker, other_process(directory, HOLDS + "\n" + HOLDS) as other:
        with pytest.raises(OutputRefused, match=r"still hold .* after 0.1 s.*processes") as refused:
            WorkerLock(directory.path).wait_for_all(0.1)
        assert f"{worker.pid} on" in str(refused.value)
        assert f"{other.pid} on" in str(refused.value)
        worker.kill()
        threading.Timer(0.2, other.kill).start()
        WorkerLock(directory.path).wait_for_all(60)
        other.wait()
    assert (directory.path / "workers.lock").read_bytes() == b""


def test_a_worker_that_released_its_lock_is_not_waited_for(directory: RunDirectory) -> None:
    directory.create()
    lock = WorkerLock(directory.path)
    for _ in range(2):
        lock.hold()
        with pytest.raises(OutputRefused):
            lock.wait_for_all(0)
    for _ in range(2):
        lock.release()
        lock.wait_for_all(0)


@pytest.mark.parametrize("kind", ["file", "documents", "journal", "link"])
def test_a_directory_that_no_run_made_is_refused_and_unchanged(directory: RunDirectory, kind: str) -> None:
    theirs = directory.path.parent / "theirs"
    theirs.mkdir()
    (theirs / kind).touch()
    if kind == "file":
        directory.path.touch()
    elif kind == "link":
        directory.path.symlink_to(theirs)
    else:
        theirs.rename(directory.path)
    before = sorted(directory.path.parent.rglob("*"))
    with pytest.raises(OutputRefused, match="that no run made"), directory.lock():
        pass
    assert sorted(directory.path.parent.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what is another user's")
def test_a_directory_of_another_user_is_refused(directory: RunDirectory) -> None:
    directory.path.mkdir()
    (directory.path / "lock").touch()
    os.chown(directory.path, 65534, 65534)
    with pytest.raises(OutputRefused, match=r"another user \(number 65534\) made it"), directory.lock():
        pass
    assert directory.path.stat().st_mode & 0o777 != 0o700, "it is left as it is"


CLOSED = """
import os, pathlib, sys
import halotile.cli.screens.outcome_rows, halotile.cli.screens.progress_report, halotile.cli.config.loading, halotile.graphs.runs.verify  # imported now, because later imports may lack permission
from halotile.cli.commands.looking import verify
from halotile.cli.status import find_run
from halotile.errors import OutputRefused
from halotile.storage.run_directory.directory import RunDirectory
directory = RunDirectory(pathlib.Path(sys.argv[1]))
output = directory.path.with_suffix("")
os.setuid(65534)
asked = (directory.claims_output, directory.check_place, directory.read_valid_plan, directory.read_status)
for ask in (*asked, lambda: find_run(directory.path), lambda: find_run(output), lambda: verify.__wrapped__(output)):
    try:
        ask()
    except OutputRefused as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_directory_that_is_closed_to_this_user_is_refused_with_its_owner() -> None:
    with TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o755)
        directory = RunDirectory(Path(folder, "a.zarr.run"))
        directory.create()
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, str(directory.path)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == 7 * (
        f"{directory.path} is closed to user 65534: user 0 made it. Ask that user, or write another output.path.\n"
    )


def test_an_empty_directory_may_become_a_run_directory(directory: RunDirectory) -> None:
    directory.path.mkdir(mode=0o755)
    with directory.lock():
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert set(json.loads((directory.path / "lock").read_bytes())) == {"pid", "host", "started"}


def test_workers_see_that_they_are_to_stop_until_the_next_run(directory: RunDirectory) -> None:
    directory.create()
    assert not directory.is_stopping()
    directory.request_stop()
    assert directory.is_stopping()
    with directory.lock():
        directory.clear_stop()
    assert not directory.is_stopping()


@pytest.mark.parametrize("name", ["job.json", "plan.json", "journal"])
def test_any_file_of_a_run_claims_its_output(directory: RunDirectory, name: str) -> None:
    directory.create()
    directory.write_status({})
    assert not directory.claims_output()
    (directory.path / name).touch()
    assert directory.claims_output()
