"""Certificates are made for one run, for their owner alone, and do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halotile.errors import ConfigError
from halotile.graphs.clusters.common.security import credentials, private_base, remove_stale
from tests.faults import REPOSITORY


def test_files_are_for_their_owner_and_gone_afterwards(tmp_path: Path) -> None:
    with credentials(tmp_path) as made:
        assert made.folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o600}
        assert "PRIVATE KEY" in Path(made.paths[1]).read_text()
    assert [*tmp_path.iterdir()] == []


def test_each_run_has_its_own(tmp_path: Path) -> None:
    with credentials(tmp_path) as first, credentials(tmp_path) as second:
        assert first.folder != second.folder
        assert Path(first.paths[1]).read_text() != Path(second.paths[1]).read_text()


def test_encryption_is_required_of_every_role(tmp_path: Path) -> None:
    with credentials(tmp_path) as made:
        for role in ("scheduler", "worker", "client"):
            assert made.security.get_connection_args(role)["require_encryption"]


def test_the_environment_names_files_and_holds_no_secret(tmp_path: Path) -> None:
    with credentials(tmp_path) as made:
        values = made.environment().values()
        assert set(values) == {*made.paths, "true"}


HOLDER = """
import sys, time
from pathlib import Path
from halotile.graphs.clusters.common.security import credentials
with credentials(Path(sys.argv[1])) as made:
    print(made.folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_run_left_behind_is_swept_and_what_lives_stays(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout
        left = Path(holder.stdout.readline().strip())
        remove_stale(tmp_path)
        assert (left / "key.pem").exists(), "its owner lives"
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    with credentials(tmp_path) as made:
        assert not left.exists()
        assert [*tmp_path.iterdir()] == [made.folder]


@pytest.mark.usefixtures("homeless")
def test_without_a_home_there_is_no_folder_of_ones_own() -> None:
    with pytest.raises(ConfigError, match=r"HOME is unset.*Set HOME or XDG_CACHE_HOME"):
        private_base()


def test_the_users_own_folder_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert private_base().stat().st_mode & 0o777 == 0o700
