"""The status of a run is told from its directory, whether or not its driver lives."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.cli.report import Lines
from halotile.cli.status import SILENCE_SECONDS, read_status, watch
from halotile.errors import ConfigError
from halotile.storage.rundir import RunDirectory

RUNNER = CliRunner()


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
        result = RUNNER.invoke(app, ["status", str(directory.path)])
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    shown = dict(row.split(maxsplit=1) for row in rows)
    assert head == "running"
    assert shown["done"] == "150 of 400 blocks (100 resumed), 37.5 %"
    assert shown["left"] == "50 s"
    assert shown["rate"] == "5 Mpix/s, 0 MB/s over 10 s"


@pytest.mark.parametrize("state", ["planned", "running", "draining"])
def test_a_run_without_its_driver_is_interrupted(directory: RunDirectory, state: str) -> None:
    record(directory, state=state, pid=123)
    result = RUNNER.invoke(app, ["status", str(directory.path)])
    assert result.stdout.startswith("interrupted\n")
    last = result.stdout.splitlines()[-1]
    driver = f"pid 123 on {socket.gethostname()}"
    assert last == f"interrupted: the driver ({driver}) is gone; run `recon-cli resume {directory.path}`"


@pytest.mark.parametrize(("silent_seconds", "state"), [(3, "running"), (SILENCE_SECONDS + 5, "interrupted")])
def test_a_driver_on_another_host_is_given_time(
    directory: RunDirectory, silent_seconds: float, state: str
) -> None:
    record(directory, host="elsewhere", updated=time.time() - silent_seconds)
    assert read_status(directory.path).state == state


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_a_run_that_is_over_is_not_called_interrupted(directory: RunDirectory, state: str) -> None:
    record(directory, state=state)
    status = read_status(directory.path)
    assert (status.state, status.over, status.driver_gone) == (state, True, False)


def test_a_run_that_ends_between_two_looks_is_not_called_interrupted(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(directory)

    def end(self: RunDirectory) -> None:
        record(directory, state="finished", done=400)

    monkeypatch.setattr(RunDirectory, "is_running", end)
    assert read_status(directory.path).state == "finished"


def test_the_output_leads_to_the_run_beside_it(directory: RunDirectory) -> None:
    record(directory, state="finished")
    result = RUNNER.invoke(app, ["status", str(directory.path.with_name("clean.zarr")), "--json"])
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
    result = RUNNER.invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 2
    assert "no run here" in result.stderr


def test_watching_ends_with_the_run(directory: RunDirectory) -> None:
    written: list[str] = []
    with directory.lock():
        record(directory)
        moments: Iterator[dict[str, Any]] = iter(
            [{"done": 200}, {"done": 400, "state": "finished", "phase": "stop"}]
        )
        now = watch(directory.path, Lines(written.append), sleep=lambda _: record(directory, **next(moments)))
    assert now.state == "finished"
    assert [text.split("  ")[0] for text in written] == ["denoise", "done"]
