"""Output paths: existing data are preserved, unless they are a Zarr that may be overwritten; mounts whose locks hold on one machine only are reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zarr

from halotile.errors import OutputRefused
from halotile.storage.disk.durable import Disk
from halotile.storage.disk.place import check_place, local_lock_reason
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import Layout, ShardWriter, check_block, create_output, open_output
from tests.cases import in_folders
from tests.storage.outputs import OME, PLAIN, noise, written


def test_anything_that_is_not_a_zarr_stays(tmp_path: Path) -> None:
    for folder, kind in in_folders(tmp_path, ("file", "documents", "device", "dangling link", "link to a zarr")):
        path, theirs = folder / "a.zarr", folder / "theirs"
        if kind == "device":
            path = Path("/dev/null")
        elif kind == "file":
            path.write_bytes(b"mine")
        elif kind == "documents":
            path.mkdir()
            (path / "letter.txt").write_bytes(b"mine")
        elif kind == "dangling link":
            path.symlink_to(theirs)
        else:
            written(theirs, PLAIN)
            path.symlink_to(theirs)
        before, said = sorted(folder.rglob("*")), []
        for overwrite in (False, True):
            with pytest.raises(OutputRefused) as refusal:
                create_output(path, PLAIN, overwrite=overwrite)
            said.append(str(refusal.value))
        assert said[0] == said[1], "overwriting is offered only where it would be done"
        assert sorted(folder.rglob("*")) == before


def test_a_zarr_stays_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    written(path, OME)
    with pytest.raises(OutputRefused, match=r"output\.overwrite: true"):
        create_output(path, PLAIN)
    assert open_output(path) == OME
    create_output(path, PLAIN, overwrite=True)
    assert open_output(path) == PLAIN
    assert os.listdir(path) == ["zarr.json"]


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_can_overwrite_an_old_zarr(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(4, 4), dtype="uint8", chunks=(2, 2), zarr_format=2)[:] = 1
    create_output(tmp_path / "a.zarr", PLAIN, overwrite=True)
    assert open_output(tmp_path / "a.zarr") == PLAIN


def test_a_zarr_with_a_symlink_inside_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    written(path, PLAIN)
    (tmp_path / "theirs").mkdir()
    (path / "c" / "9").symlink_to(tmp_path / "theirs")
    with pytest.raises(OutputRefused, match="c/9 is a symlink"):
        create_output(path, PLAIN, overwrite=True)
    assert check_block(path, PLAIN, Region.whole(PLAIN.shape)) == []


@pytest.mark.parametrize("variable", ["HOME", "cwd"])
def test_the_home_and_working_directories_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    path = tmp_path / "a.zarr"
    create_output(path, PLAIN)
    (path / "inside").mkdir()
    if variable == "HOME":
        monkeypatch.setenv("HOME", str(path / "inside"))
    else:
        monkeypatch.chdir(path / "inside")
    with pytest.raises(OutputRefused, match="and is not removed"):
        create_output(path, PLAIN, overwrite=True)
    assert (path / "inside").exists()


def test_a_path_whose_parent_is_no_folder_is_refused(tmp_path: Path) -> None:
    for folder, name in in_folders(tmp_path, ("a.txt/x.zarr", "a.txt/deep/x.zarr", "loop/x.zarr", "nowhere/x.zarr")):
        (folder / "a.txt").write_text("mine")
        (folder / "loop").symlink_to("loop")
        (folder / "nowhere").symlink_to("gone")
        with pytest.raises(OutputRefused, match="so nothing can be made in it"):
            create_output(folder / name, PLAIN, overwrite=True)
        assert (folder / "a.txt").read_text() == "mine"


def test_loops_and_dots_behind_a_symlink_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputRefused, match="a symlink to loop"):
        create_output(tmp_path / "loop", PLAIN, overwrite=True)
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    with pytest.raises(OutputRefused, match="behind a symlink"):
        create_output(tmp_path / "link" / ".." / "a.zarr", PLAIN)
    assert os.listdir(tmp_path / "far") == ["deep"]


@pytest.mark.parametrize("layout", [replace(PLAIN, shape=(8, 13)), replace(OME, shape=(1, 1, 8, 13))])
def test_a_partly_created_or_removed_output_can_be_overwritten(tmp_path: Path, layout: Layout) -> None:
    class Dying(Disk):
        left = 0

    def dying(name: str) -> Any:
        def step(disk: Any, *arguments: Any) -> None:
            disk.left -= 1
            if disk.left < 0:
                raise KeyboardInterrupt
            getattr(Disk, name)(disk, *arguments)

        return step

    for name in ("_mkdir", "_replace", "_unlink", "_rmdir"):
        setattr(Dying, name, dying(name))

    path = tmp_path / "a.zarr"
    deaths = 0
    for steps in range(1000):
        create_output(path, layout, overwrite=True)
        ShardWriter(path, layout).write(Region.whole(layout.shape), noise(layout.shape, layout.dtype))
        disk = Dying()
        disk.left = steps
        try:
            create_output(path, layout, disk, overwrite=True)
            break
        except KeyboardInterrupt:
            deaths += 1
        create_output(path, layout, overwrite=True)
        assert open_output(path) == layout
    assert deaths > 5


def test_an_output_inside_an_array_is_refused_and_inside_a_group_is_not(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "group.zarr")
    zarr.create_array(tmp_path / "array.zarr", shape=(4,), dtype="uint8")
    zarr.create_array(tmp_path / "old.zarr", shape=(4,), dtype="uint8", zarr_format=2)
    check_place(tmp_path / "group.zarr" / "clean", overwrite=False)
    for name in ("array.zarr", "old.zarr"):
        with pytest.raises(OutputRefused, match=f"{name} is a Zarr array, .*Write a path beside it"):
            check_place(tmp_path / name / "clean.zarr", overwrite=True)


def test_the_root_is_no_output() -> None:
    with pytest.raises(OutputRefused, match="the path names no output"):
        check_place("/", overwrite=True)


UNWRITABLE = """
import os, sys
from halotile.errors import OutputRefused
from halotile.storage.disk.place import check_path
os.getuid() or os.setuid(65534)
try:
    check_path(sys.argv[1])
except OutputRefused as error:
    print(error, end="")
"""


def test_a_folder_that_this_user_may_not_write_in_is_refused() -> None:
    with TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o555)
        path = f"{folder}/a.zarr"
        done = subprocess.run(
            [sys.executable, "-c", UNWRITABLE, path], capture_output=True, text=True, timeout=60, check=True
        )
        Path(folder).chmod(0o755)
    said = f"output.path is {path}: you may not write in {folder}. Write a path in a folder of your own."
    assert done.stdout == said


MOUNTED = {
    "lustre rw,flock": None,
    "lustre rw,localflock": "localflock: mount it with flock",
    "nfs rw,vers=3,nolock,proto=tcp": "mounted with nolock",
    "nfs rw,vers=3,local_lock=all": "local_lock=all",
    "nfs rw,vers=3,local_lock=flock": "local_lock=flock",
    "nfs rw,vers=3,local_lock=posix": None,
    "nfs4 rw,vers=4.2,local_lock=none": None,
    "gpfs rw": None,
    "beegfs rw,cfgFile={folder}/default.conf": "tuneUseGlobalFileLocks = true",
    "beegfs rw,cfgFile={folder}/global.conf": None,
    "beegfs rw": "tuneUseGlobalFileLocks = true",
}


def test_locks_that_other_machines_do_not_see_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts: list[Any] = []
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    for folder, mounted in in_folders(tmp_path, MOUNTED):
        (folder / "default.conf").write_text("# tuneUseGlobalFileLocks = true\ntuneUseGlobalFileLocks = false\n")
        (folder / "global.conf").write_text("tuneUseGlobalFileLocks    = true\n")
        kind, options = mounted.format(folder=folder).split(" ")
        mounts[:] = [
            SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw,relatime"),
            SimpleNamespace(mountpoint=f"{folder}/data", fstype=kind, opts=options),
        ]
        why, wanted = local_lock_reason(folder / "data" / "out.zarr"), MOUNTED[mounted]
        assert (why is None) if wanted is None else (wanted in str(why))
        assert local_lock_reason(folder) is None
    mounts.append(SimpleNamespace(mountpoint="/", fstype="nfs", opts="rw,nolock"))
    assert "nolock" in str(local_lock_reason(tmp_path)), "the last mount at a mount point counts"


def test_a_file_system_without_locks_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, code in in_folders(tmp_path, (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, os.strerror(code))))
        refused = pytest.raises(OutputRefused, match=r"x\.run/lock cannot be locked .*Lustre: -o flock")
        with refused, RunDirectory(folder / "x.run").lock():
            pass
