"""Mount options reveal file locks that hold on one machine only."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from halotile.errors import OutputRefused
from halotile.storage.disk import place
from halotile.storage.disk.place import local_lock_reason, mount_of
from halotile.storage.run_directory.directory import RunDirectory

ROOT = "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
MOUNTED = {
    "lustre 1 rw,flock": None,
    "lustre 1 rw,localflock": "localflock: mount it with flock",
    "nfs 1 rw,vers=3,nolock,proto=tcp": "mounted with nolock",
    "nfs 1 rw,vers=3,local_lock=all": "local_lock=all",
    "nfs 1 rw,vers=3,local_lock=flock": "local_lock=flock",
    "nfs 1 rw,vers=3,local_lock=posix": None,
    "nfs4 1 rw,vers=4.2,local_lock=none": None,
    "gpfs 1 rw": None,
    "beegfs 1 rw,cfgFile={folder}/default.conf": "tuneUseGlobalFileLocks = true",
    "beegfs 1 rw,cfgFile={folder}/global.conf": None,
    "beegfs 1 rw": "tuneUseGlobalFileLocks = true",
}


@pytest.mark.parametrize("mounted", MOUNTED)
def test_locks_that_other_machines_do_not_see_are_reported(
    mounted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "default.conf").write_text(
        "# tuneUseGlobalFileLocks = true\ntuneUseGlobalFileLocks = false\n"
    )
    (tmp_path / "global.conf").write_text("tuneUseGlobalFileLocks    = true\n")
    table = tmp_path / "mountinfo"
    line = f"36 21 0:50 / {tmp_path}/data rw shared:2 - {mounted.format(folder=tmp_path)}"
    table.write_text(f"{ROOT}\n{line}\nrubbish\n")
    monkeypatch.setattr(place, "MOUNTS", table)
    why, wanted = local_lock_reason(tmp_path / "data" / "out.zarr"), MOUNTED[mounted]
    assert (why is None) if wanted is None else (wanted in str(why))
    assert local_lock_reason(tmp_path) is None


def test_the_last_mount_at_a_mount_point_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"{ROOT}\n36 21 0:50 / / rw shared:2 - nfs 1 rw,nolock\n")
    monkeypatch.setattr(place, "MOUNTS", table)
    assert "nolock" in str(local_lock_reason(tmp_path))


def test_this_machine_has_a_mount(tmp_path: Path) -> None:
    found = mount_of(tmp_path)
    assert found is not None
    assert tmp_path.is_relative_to(found.point)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused_with_advice(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(OutputRefused, match=r"x\.run/lock cannot be locked .*Lustre: -o flock"),
        RunDirectory(tmp_path / "x.run").lock(),
    ):
        pass
