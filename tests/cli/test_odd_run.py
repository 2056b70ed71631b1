"""Files of a run directory with odd content are damaged or none, in words: whole lines and whole JSON need not make sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.cli.exits import BAD_DATA, OK, USAGE
from halotile.errors import DamagedData, OutputInUse
from halotile.storage.run_directory.directory import BATCH, BatchFiles, RunDirectory
from halotile.storage.run_directory.journal import VERSION
from halotile.storage.run_directory.json_files import with_checksum
from halotile.storage.run_directory.locks import LOCK
from tests.cli.engine import ask
from tests.storage.outputs import PLAIN, written

DEEP = "[" * 100_000
SUBMITTED = {"number": "", "attempts": 1, "submitted": 1.0, "began": 2.0, "submitted_from": "here"}
CONFIG = """\
version: 1
job: denoise
input: {path: noisy.npy}
output: {path: clean.zarr, shard: 32, chunk: 16}
denoiser: {name: gaussian, sigma: 1}
tile: {size: 32, block: 32}
run: {workers: 1}
cluster: {kind: local}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """That of an output which is whole."""
    written(tmp_path / "clean.zarr", PLAIN)
    made = RunDirectory(tmp_path / "clean.zarr.run")
    made.create()
    made.write_job({})
    return made


def said(*words: str, code: int) -> str:
    """What a command says that ends with this code."""
    result = ask(*words)
    assert result.exit_code == code, result.output
    assert "unexpected" not in result.output
    return result.output


@pytest.mark.parametrize("text", [DEEP, "3", '{"a": ' * 100_000])
def test_a_status_that_is_no_object_is_none(run: RunDirectory, text: str) -> None:
    run.status_path.write_text(text)
    assert "or status.json is damaged" in said("status", str(run.path), code=USAGE)
    said("verify", str(run.path), "-q", code=OK)


def test_events_that_are_none_are_left_out(run: RunDirectory) -> None:
    run.write_status({"state": "finished", "done": 3, "total": 4, "failed": 1})
    bad = {"event": "bad block", "block": 7, "index": [0, 1], "error": "E"}
    run.events_path.write_text("\n".join([DEEP, *map(json.dumps, ([], 3, {"event": []}, bad))]))
    assert "block 7 (index (0, 1)): E" in said("status", str(run.path), code=OK)


@pytest.mark.parametrize("holder", [DEEP, [], {"pid": 1}])
def test_a_lock_that_does_not_say_whose_it_is_is_another_runs(run: RunDirectory, holder: Any) -> None:
    with run.lock():
        (run.path / LOCK).write_text(holder if isinstance(holder, str) else json.dumps(holder))
        with pytest.raises(OutputInUse, match="is in use: another run is writing this output"):
            run.check_free()
        assert "its driver is process None on None" in said("cancel", str(run.path), code=USAGE)


def test_a_batch_job_that_is_no_object_is_damaged(run: RunDirectory) -> None:
    run.write_status({"state": "finished"})
    (run.path / BATCH).write_text("[]")
    assert "Remove it, and submit" in said("status", str(run.path), code=BAD_DATA)
    assert "Remove it, and submit" in said("cancel", str(run.path), code=BAD_DATA)
    with pytest.raises(DamagedData):
        BatchFiles(run).read()


@pytest.mark.parametrize("sizes", [{"total": 2**70}, {"total": 2**62}, {"total": 10**11}, {"images": 2**62}], ids=str)
def test_a_journal_of_odd_sizes_is_damaged(tmp_path: Path, sizes: dict[str, int]) -> None:
    run = RunDirectory(tmp_path / "clean.zarr.run")
    run.create()
    run.write_job({})
    (run.path / LOCK).touch()
    np.save(tmp_path / "noisy.npy", np.zeros((64, 64), np.float32))
    (tmp_path / "config.yaml").write_text(CONFIG)
    owner = {"journal": VERSION, "fingerprint": "ab", "total": 4, "images": 1} | sizes
    run.journal_path.write_bytes(with_checksum(json.dumps(owner).encode()))
    config, output = str(tmp_path / "config.yaml"), str(tmp_path / "clean.zarr")
    damaged = f"{run.journal_path}: its first line is damaged"
    assert damaged in said("plan", config, code=BAD_DATA)
    assert damaged in said("run", config, "-q", "--no-dashboard", code=BAD_DATA)
    said("verify", output, code=USAGE)
    said("status", str(run.path), code=USAGE)
    run.plan_path.write_text("{}")
    assert damaged in said("verify", output, code=BAD_DATA)
