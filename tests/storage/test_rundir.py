"""The run directory, private, with a single driver and without leftover writers; and what is made beside its place, never by halves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest

from halotile.errors import DamagedData, DiskRefused, OutputInUse, OutputRefused
from halotile.storage.disk.durable import Disk
from halotile.storage.run_directory.directory import RunDirectory, replacing
from halotile.storage.run_directory.locks import WorkerLock
from halotile.storage.scans.convert import convert_scan
from halotile.storage.scans.scan import open_scan
from tests.cases import in_folders
from tests.storage.test_scans import COUNT, write_cxi


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
    command = [sys.executable, "-c", code, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_records_are_private_can_be_read_back_and_are_forgotten_except_the_job(directory: RunDirectory) -> None:
    assert directory.is_running() is None
    assert not directory.path.exists()
    assert directory.read_job() is directory.read_plan() is directory.read_status() is None
    assert list(directory.read_events()) == []
    directory.path.mkdir(mode=0o755)  # an empty directory may become one
    (directory.path / "status.json.0a1b2c3d.partial").touch()
    with directory.lock():
        assert os.listdir(directory.path) == ["lock"]
        assert set(json.loads((directory.path / "lock").read_bytes())) == {"pid", "host", "started"}
        directory.write_status({})
        assert not directory.claims_output()
        for number in range(3):
            directory.write_job({"job": number})
            directory.write_plan({"plan": number})
            directory.write_status({"status": number})
            directory.append_event({"event": number})
        WorkerLock(directory.path).hold()
        assert directory.claims_output()
        directory.request_stop()
        assert directory.is_stopping()
        directory.clear_stop()
        assert not directory.is_stopping()
    WorkerLock(directory.path).release()
    assert (directory.read_job(), directory.read_plan()) == ({"job": 2}, {"plan": 2})
    assert directory.read_status() == {"status": 2}
    assert list(directory.read_events()) == [{"event": 0}, {"event": 1}, {"event": 2}]
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in directory.path.iterdir()}
    files = ("job.json", "plan.json", "status.json", "events.jsonl", "lock", "workers.lock")
    assert (modes, directory.path.stat().st_mode & 0o777) == (dict.fromkeys(files, 0o600), 0o700)
    with directory.lock():
        directory.journal_path.touch()
        directory.forget()
        assert {entry.name for entry in directory.path.iterdir()} == {"job.json", "lock", "workers.lock"}
    for name in ("plan.json", "journal"):
        (directory.path / "job.json").rename(directory.path / name)
        assert directory.claims_output(), "any file of a run does"
        (directory.path / name).rename(directory.path / "job.json")


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
    refused = pytest.raises(OutputRefused, match=r"was moved or removed during its run.*output\.overwrite: true")
    with refused, directory.lock():
        shutil.rmtree(directory.path)
        if again:
            directory.create()
            (directory.path / "lock").touch()
        directory.disk.append(directory.journal_path, b"+1")


def test_the_status_can_report_a_full_disk(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.create()
    directory.write_status({"state": "running", "message": "two of nine blocks are done"})
    opened = Disk._open

    def full(disk: Disk, path: Path, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(disk, path, flags, mode)

    monkeypatch.setattr(Disk, "_open", full)
    directory.write_status({"state": "failed", "reason": "full"})
    assert directory.read_status() == {"state": "failed", "reason": "full"}


def test_events_of_many_threads_stay_whole_and_a_torn_one_is_left_out(directory: RunDirectory) -> None:
    directory.create()
    directory.append_event({"first": True})
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(directory.append_event, [{"text": "x" * 200}] * 200))
    with directory.events_path.open("ab") as file:
        file.write(b'{"event": ')
    assert len(list(directory.read_events())) == 201


def test_a_second_driver_is_refused_with_the_name_of_the_first(directory: RunDirectory) -> None:
    with directory.lock():
        with pytest.raises(OutputRefused, match=f"process {os.getpid()} on"), directory.lock():
            pass
        assert directory.is_running() is not None
    with pytest.raises(FileNotFoundError), directory.lock():  # other errors of the system release it
        directory.disk.append(directory.journal_path, b"+1")
    assert directory.is_running() is None
    with other_process(directory, "lock = directory.lock(); lock.__enter__()") as first:
        with pytest.raises(OutputRefused, match=rf"in use: process {first.pid} on .*, started 2"), directory.lock():
            pass
        assert (directory.is_running() or {})["pid"] == first.pid
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert directory.is_running() is None
        with directory.lock():
            pass


def test_a_driver_that_waited_takes_the_next_lock_of_a_directory_that_was_removed(directory: RunDirectory) -> None:
    is_waiting = threading.Event()

    def goes_on() -> bool:
        is_waiting.set()
        return False

    def wait() -> bool:
        with directory.lock(30, cut_short=goes_on):
            return True

    with ThreadPoolExecutor(1) as threads:
        with directory.lock():
            taken = threads.submit(wait)
            assert is_waiting.wait(30)
            directory.remove()
        assert taken.result()


def test_checking_does_not_disturb_a_driver_that_starts(directory: RunDirectory) -> None:
    directory.create()
    (directory.path / "lock").touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.001):
            directory.is_running()

    with ThreadPoolExecutor(3) as lookers:
        for _ in range(3):
            lookers.submit(look)
        try:
            for _ in range(200):
                with directory.lock():
                    pass
        finally:
            stop.set()


def test_the_lock_is_not_inherited_by_child_programs(directory: RunDirectory) -> None:
    with directory.lock():
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with child:
        assert directory.is_running() is None
        child.kill()


def test_a_driver_waits_for_the_workers_of_a_killed_one(directory: RunDirectory) -> None:
    directory.create()
    lock = WorkerLock(directory.path)
    for _ in range(2):
        lock.hold()
        with pytest.raises(OutputRefused):
            lock.wait_for_all(0)
    for _ in range(2):
        lock.release()
        lock.wait_for_all(0)
    holds = "WorkerLock(directory.path).hold()\n"
    with other_process(directory, holds) as worker, other_process(directory, 2 * holds) as other:
        with pytest.raises(OutputRefused, match=r"still hold .* after 0.1 s.*processes") as refused:
            lock.wait_for_all(0.1)
        assert f"{worker.pid} on" in str(refused.value)
        assert f"{other.pid} on" in str(refused.value)
        worker.kill()
        threading.Timer(0.2, other.kill).start()
        lock.wait_for_all(60)
        other.wait()
    assert (directory.path / "workers.lock").read_bytes() == b""


@pytest.mark.parametrize("kind", ["file", "documents", "journal", "link", "of another user"])
def test_a_directory_that_no_run_made_is_refused_and_unchanged(directory: RunDirectory, kind: str) -> None:
    if kind == "of another user" and os.getuid() != 0:
        pytest.skip("only root can make what is another user's")
    theirs, words = directory.path.parent / "theirs", "that no run made"
    theirs.mkdir()
    (theirs / kind).touch()
    if kind == "file":
        directory.path.touch()
    elif kind == "link":
        directory.path.symlink_to(theirs)
    else:
        theirs.rename(directory.path)
    if kind == "of another user":
        (directory.path / kind).rename(directory.path / "lock")
        os.chown(directory.path, 65534, 65534)
        words = r"another user \(number 65534\) made it"
    before = [(path, path.lstat().st_mode) for path in sorted(directory.path.parent.rglob("*"))]
    with pytest.raises(OutputRefused, match=words), directory.lock():
        pass
    assert [(path, path.lstat().st_mode) for path in sorted(directory.path.parent.rglob("*"))] == before


CLOSED = """
import os, pathlib, sys
import halotile.cli.screens.outcome_rows, halotile.cli.screens.progress_report, halotile.cli.config.loading, halotile.graphs.runs.verify  # imported now, because later imports may lack permission
from halotile.cli.commands.images import verify
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
        shown = subprocess.check_output([sys.executable, "-c", CLOSED, directory.path], text=True, timeout=60)
    said = "is closed to user 65534: user 0 made it. Ask that user, or write another output.path."
    assert shown == 7 * f"{directory.path} {said}\n"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("is_folder", [False, True])
def test_files_and_folders_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool) -> None:
    place, unlink, removed = tmp_path / "out", Disk._unlink, list[str]()
    (tmp_path / "out.run").touch()  # a file in place of the directory of a run is no obstacle

    def recorded(disk: Disk, path: Path) -> None:
        removed.append(path.name)
        unlink(disk, path)

    monkeypatch.setattr(Disk, "_unlink", recorded)
    for content in ("old", "new"):
        with replacing(place) as made:
            assert made.parents[1].stat().st_mode & 0o777 == 0o700
            for name in "abcdefgh":
                (made.parent / name).write_text("a")
                (made.parent.parent / name).touch()
            if is_folder:
                made.mkdir()
            (made / content if is_folder else made).write_text(content)
        assert removed[-1] == "lock"
    assert names(tmp_path) == ["out", "out.run"]
    assert (names(place) == ["new"]) if is_folder else (place.read_text() == "new")
    (tmp_path / "usual").mkdir() if is_folder else (tmp_path / "usual").touch()
    assert place.stat().st_mode == (tmp_path / "usual").stat().st_mode


def write(path: Path, *, error: Exception | None = None, check: Callable[[], None] = lambda: None) -> None:
    with replacing(path, check) as made:
        made.write_text("half")
        if error:
            raise error


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(ValueError, match="odd"):
        write(out, error=ValueError("odd"))
    with pytest.raises(DiskRefused, match=r"the disk ran full: .*out cannot be written"):
        write(out, error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OutputRefused):
        write(out, check=Mock(side_effect=[None, OutputRefused("it already exists")]))
    assert (names(tmp_path), out.read_text()) == (["out"], "old")


def test_of_two_writers_the_second_is_refused(tmp_path: Path) -> None:
    source, path = write_cxi(tmp_path / "scan.cxi"), tmp_path / "scan.zarr"
    seen = []

    def second(done: int, count: int) -> None:
        with pytest.raises(OutputInUse, match=rf"scan\.zarr\.partial is in use: process {os.getpid()} on "):
            convert_scan(source, str(path))
        seen.append(done)

    convert_scan(source, str(path), report=second)
    assert seen == [COUNT]
    assert open_scan(str(path))[1][...].any(axis=(1, 2)).all()
    assert names(tmp_path) == ["scan.cxi", "scan.zarr"]
    with RunDirectory.beside(path).lock(), pytest.raises(OutputInUse, match=r"scan\.zarr\.run is in use"):
        convert_scan(source, str(path), overwrite=True)


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from halotile.storage.run_directory.directory import replacing\n"
        "with replacing(Path('a')) as made, replacing(Path('a.tif')) as other:\n"
        "    made.write_text('half'); other.mkdir(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.call([sys.executable, "-c", code], cwd=tmp_path) == -signal.SIGKILL
    assert names(tmp_path) == [".a.partial", ".a.tif.partial"]
    write(tmp_path / "a")
    assert names(tmp_path) == [".a.tif.partial", "a"]
    write(tmp_path / "a.tif")
    assert names(tmp_path) == ["a", "a.tif"]


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    plants: list[Callable[[Path], object]] = [
        lambda folder: (folder / ".out.partial").symlink_to("theirs"),
        lambda folder: (folder / ".out.partial").hardlink_to(folder / "theirs" / "kept"),
        lambda folder: shutil.copytree(folder / "theirs", folder / ".out.partial"),
    ]
    for folder, plant in in_folders(tmp_path, plants):
        (folder / "theirs").mkdir()
        (folder / "theirs" / "kept").touch()
        plant(folder)
        with pytest.raises(OutputRefused, match=r"\.out\.partial .*Move it away, or write another path"):
            write(folder / "out")
        assert (names(folder), names(folder / "theirs")) == ([".out.partial", "theirs"], ["kept"])


@pytest.mark.parametrize("fails", ["the move", "the sync after it"])
def test_a_folder_comes_back_where_its_move_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    out, move, sync = tmp_path / "out", Disk.move, Disk.sync_directory
    out.mkdir()
    (out / "old").touch()

    def moved(disk: Disk, source: Path, target: Path) -> None:
        if source.name == "made" and fails == "the move":
            raise OSError(errno.EIO, "the disk is broken")
        move(disk, source, target)

    def synced(disk: Disk, folder: Path) -> None:
        if (folder / "replaced").exists() and folder.name == "state" and fails != "the move":
            raise KeyboardInterrupt
        sync(disk, folder)

    monkeypatch.setattr(Disk, "move", moved)
    monkeypatch.setattr(Disk, "sync_directory", synced)
    with pytest.raises((OSError, KeyboardInterrupt)), replacing(out) as made:
        made.mkdir()
    assert (names(tmp_path), names(out)) == (["out"], ["old"])


def test_what_a_killed_call_moved_away_comes_back_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    code = (
        "import os, signal; from pathlib import Path; from halotile.storage.disk.durable import Disk\n"
        "from halotile.storage.run_directory.directory import replacing\n"
        "move = Disk.move\n"
        "def killed(disk, source, target):\n"
        "    if source.name == 'made': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    move(disk, source, target)\n"
        "Disk.move = killed\n"
        "with replacing(Path('out')) as made: made.mkdir()\n"
    )
    assert subprocess.call([sys.executable, "-c", code], cwd=tmp_path) == -signal.SIGKILL
    assert names(tmp_path) == [".out.partial"]
    full = Mock(side_effect=OSError(errno.ENOSPC, "no space left"))
    with monkeypatch.context() as patch:
        patch.setattr("halotile.storage.run_directory.locks.write_holder", full)
        with pytest.raises(DiskRefused), replacing(out):
            pass
    assert names(tmp_path) == [".out.partial"]

    def check() -> None:
        if out.exists():
            raise OutputRefused("it already exists")

    with pytest.raises(OutputRefused), replacing(out, check):
        pytest.fail("the work began")
    assert (names(tmp_path), names(out)) == (["out"], ["old"])
