"""Each error has its exit code and one message."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from halotile import errors
from halotile.cli import exits, info
from halotile.cli.exits import StoppedEarly, exit_code, message_of
from tests.cli.engine import MonkeyPatch, ask

CODES: list[tuple[type[BaseException], int]] = [
    (errors.ConfigError, 2), (errors.UnknownName, 2), (errors.OutputRefused, 2), (errors.OutputInUse, 2),
    (errors.ResumeRefused, 2),
    (errors.MissingPackage, 2), (errors.WeightsError, 2), (errors.WrongKind, 2),
    (errors.InputError, 4), (errors.DamagedData, 4), (errors.InputUnreadable, 4),
    (errors.Refused, 5), (errors.MemoryRefused, 5), (errors.DiskRefused, 5),
    (errors.BlockFailed, 1), (errors.BlockInputFailed, 4), (errors.Diverged, 1), (errors.Stalled, 1), (errors.TaskFailed, 1), (errors.ClusterFailed, 1),
    (errors.WorkerDied, 1), (errors.JobNotLoaded, 1), (errors.RankFailed, 1), (errors.PeerLost, 1),
    (errors.HalotileError, 1),
    (errors.Stopped, 75), (KeyboardInterrupt, 130),
    (RuntimeError, 1), (OSError, 1), (MemoryError, 5), (ValueError, 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "code"), CODES, ids=[kind.__name__ for kind, _ in CODES])
def test_an_error_has_its_exit_code(kind: type[BaseException], code: int) -> None:
    assert exit_code(kind("why")) == code


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_refusal_whoever_writes(monkeypatch: MonkeyPatch, number: int) -> None:
    full = OSError(number, os.strerror(number))
    monkeypatch.setattr(info, "describe", Mock(side_effect=full))
    result = ask("info", "a.tif")
    assert result.exit_code == exits.REFUSED
    assert f"error: the disk ran full: nothing more can be written ({full}). Free some space" in result.output


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in ("verify", "status", "levels"):
        result = ask(command, "a.zarr")
        assert (result.exit_code, "the working directory was removed" in result.output) == (2, True)


def test_every_error_of_the_tree_is_in_the_table() -> None:
    tree = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert tree <= {kind for kind, _ in CODES}


def test_the_docs_list_every_exit_code_and_those_of_verify() -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE))
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert set(map(int, table)) == codes
    assert "of `verify`: damaged" in table[str(exits.BAD_DATA)]
    assert "of `verify`: intact, with blocks not done" in table[str(exits.QUARANTINED)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.InputError("x is empty. Write y."), "error: x is empty. Write y."),
        (errors.Stopped("stopped on SIGTERM. Run again to go on."), "stopped on SIGTERM. Run again to go on."),
        (KeyboardInterrupt(), "stopped"),
        (StoppedEarly("stopped on SIGTERM"), "stopped on SIGTERM"),
        (
            ZeroDivisionError("division\nby zero"),
            "error: unexpected ZeroDivisionError: division by zero\nrun again with --debug for the traceback",
        ),
    ],
)
def test_an_error_becomes_one_message(error: BaseException, message: str) -> None:
    assert message_of(error) == message


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [("distributed: [1", "ValueError: A dask config file at"), ("distributed: {logging: 3}", "TypeError: ")],
    ids=["no YAML", "of another type"],
)
def test_settings_of_dask_that_cannot_be_read_are_named(settings: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(settings)
    result = subprocess.run(
        [sys.executable, "-m", "halotile", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"DASK_CONFIG": str(tmp_path)},
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: Dask cannot read its settings ({wrong}")
    assert result.stderr.endswith("Correct them: ~/.config/dask, variables DASK_...\n")


def test_what_can_be_gone_on_with_says_so() -> None:
    assert message_of(KeyboardInterrupt(), resumable=True) == "stopped; run again to resume"
    early = StoppedEarly("stopped on SIGTERM")
    assert message_of(early, resumable=True) == "stopped on SIGTERM; run again to resume"
