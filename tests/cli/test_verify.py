"""`verify` says what is damaged, and what to do about it; a run that was moved together with its output is resumed and repaired where it is."""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import zarr

from halotile.cli.screens.outcome_rows import remedy
from halotile.graphs.runs.verify import Verdict, verify
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.number_ranges import RangeSet
from tests.cli.engine import SMALL_CONFIG, MonkeyPatch, ask, printed, refused, save_job
from tests.faults import flip_bit
from tests.storage.test_overwrite import finished as written


def find(monkeypatch: MonkeyPatch, verdict: Verdict) -> None:
    """Have every check find this."""
    module = ModuleType("verify")
    module.verify = lambda output, **_: verdict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "halotile.graphs.runs.verify", module)


VERDICTS = [
    (Verdict(4, 4, (), 0), 0, "sound, 4 of 4 blocks checked"),
    (Verdict(1, 1, (), 0), 0, "sound, 1 of 1 block checked"),
    (Verdict(4, 4, ("block 2: checksum",), 0), 4, "block 2: checksum"),
    (Verdict(4, 4, ("block 2: checksum",), 1), 0, "1 problem repaired"),
    (Verdict(4, 3, (), 0, RangeSet([2])), 3, "1 block is not done: 2 (quarantined, or not yet run)"),
    (Verdict(9, 4, (), 0, RangeSet(range(4, 9))), 3, "5 blocks are not done: 4-8 (quar"),
    (Verdict(4, 3, ("block 0: cut",), 0, RangeSet([2])), 4, "1 block is not done: 2"),
]


@pytest.mark.parametrize(("verdict", "code", "words"), VERDICTS)
def test_damage_is_told(tmp_path: Path, monkeypatch: MonkeyPatch, verdict: Verdict, code: int, words: str) -> None:
    find(monkeypatch, verdict)
    result = ask("verify", tmp_path / "clean.zarr")
    assert result.exit_code == code
    assert words in result.stdout
    assert ("recon-cli resume" in result.stderr) == (code == 3)
    assert json.loads(ask("verify", tmp_path / "clean.zarr", "--json").stdout)["ok"] == (code == 0)


MISSING = "metadata: zarr.json is missing"
REPAIRS: list[tuple[tuple[str, ...], int, bool, str]] = [
    (("block 2: cut",), 0, False, "--repair` does the damaged blocks again, and discards edits. To keep edits, "),
    (("block 2: cut",), 0, True, "--repair` does all passes again, from the start, and writes the damaged blocks, and discards edits. To keep edits, "),
    ((MISSING,), 0, False, "--repair` restores the metadata."),
    ((MISSING,), 3, False, "--repair` restores the metadata and does the 3 blocks that are not done."),
    ((MISSING, "block 2: cut"), 1, False, "--repair` restores the metadata, does the damaged blocks again and does the 1 block that is not done, and discards edits. To keep edits, "),
]  # fmt: skip


def test_verify_says_what_a_repair_would_do(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    output = tmp_path / "clean.zarr"
    for problems, undone, iterates, words in REPAIRS:
        find(monkeypatch, Verdict(9, 9 - undone, problems, 0, RangeSet(range(undone)), iterates=iterates))
        edited, keep = (", or was edited after the run", f"move {output}.run away.") if "edits" in words else ("", "")
        said = f"{output} is damaged{edited}. `recon-cli verify {output} {words}{keep}\n"
        assert refused("verify", output, code=4).endswith(said)


@pytest.mark.parametrize("ome", [False, True])
def test_an_edited_output_is_kept_by_following_the_advice(tmp_path: Path, ome: bool) -> None:
    output = tmp_path / "clean.zarr"
    layout = written(output, ome=ome)
    file = output / ("0/zarr.json" if ome else "zarr.json")
    array = zarr.open_array(file.parent)
    array[:16, :16] = array[:32, 32:] = 0  # zarr leaves out a chunk, and a shard
    lost = verify(output)
    assert [line.split(": ", 2)[2] for line in lost.problems] == [
        "chunk (0, 0) is not in the file",
        "the shard is missing",
    ]
    with_run = remedy(output, replace(lost, repairable=True), at_work=False)
    unmark = f'remove "complete" from "halotile" in the attributes of {file}'
    assert f"discards edits. To keep edits, move {output}.run away, and {unmark}" in with_run
    assert f"If another program wrote pixels of the fill value, {unmark}" in refused("verify", output, code=4)
    for number in range(len(layout.arrays)):
        marked = output / str(number) / "zarr.json" if ome else file
        document = json.loads(marked.read_text())
        del document["attributes"]["halotile"]["complete"]
        marked.write_text(json.dumps(document))
    assert printed("verify", output).endswith("; where a chunk is missing, its pixels have the fill value\n")
    flip_bit(output / ("0/c/1/1" if ome else "c/1/1"))
    assert ask("verify", output).exit_code == 4


def test_advice_allows_imports_where_the_job_needs_them(config: Path, monkeypatch: MonkeyPatch) -> None:
    output = config.with_name("clean.zarr")
    directory = save_job(config, output)
    for allowed in (False, True):
        job = json.loads((directory / "job.json").read_text())
        (directory / "job.json").write_text(json.dumps(job | {"allow_import": allowed}))
        find(monkeypatch, Verdict(4, 4, ("block 2: cut",), 0))
        assert (f"recon-cli verify {output} --repair --allow-import`" in ask("verify", directory).stderr) == allowed


def test_verify_without_a_run_says_what_is_not_checked(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    output = tmp_path / "clean.zarr"
    for verdict, said in [
        (Verdict(4, 4, (), 0, repairable=False), f"{output}: checksums are right, 4 of 4 blocks checked"),
        (Verdict(4, 4, ("shard 2: cut",), 0, repairable=False), "shard 2: cut"),
    ]:
        find(monkeypatch, verdict)
        result = ask("verify", output)
        assert result.stdout.splitlines() == [
            said,
            f"no run directory {output}.run: checked against its checksums only, not whether each shard is in its place; "
            "where a chunk is missing, its pixels have the fill value",
        ]
        assert "--repair" not in result.stderr
        assert json.loads(ask("verify", output, "--json").stdout)["checked_against"] == "checksums"
    find(monkeypatch, Verdict(4, 4, (), 0))
    assert "no run directory" not in ask("verify", output).stdout
    assert json.loads(ask("verify", output, "--json").stdout)["checked_against"] == "journal"


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
def test_verify_of_a_run_at_work_says_to_wait(tmp_path: Path, monkeypatch: MonkeyPatch, host: str) -> None:
    output = tmp_path / "clean.zarr"
    directory = RunDirectory(tmp_path / "clean.zarr.run")
    directory.create()
    directory.write_job({})
    directory.write_status({"state": "running", "host": host, "updated": time.time()})
    with directory.lock() if host != "elsewhere" else nullcontext():
        find(monkeypatch, Verdict(4, 3, (), 0, RangeSet([2])))
        result = refused("verify", output, code=3)
        assert "is not complete: a run is still writing it. Wait until that is over" in result
        assert "resume" not in result
        find(monkeypatch, Verdict(4, 3, ("block 0: cut",), 0, RangeSet([2])))
        assert (
            "is damaged, or was edited after the run. A run is still writing it: when that is over, `recon-cli"
            in refused("verify", output, code=4)
        )
    directory.write_status({"state": "stopped"})
    find(monkeypatch, Verdict(4, 3, (), 0, RangeSet([2])))
    assert "recon-cli resume" in refused("verify", output, code=3)


def move(folder: Path, before: str, after: str) -> Path:
    """The output and what lies beside it; the first shard is lost on the way."""
    for name in (f"{before}.zarr", f"{before}.zarr.run"):
        (folder / name).rename(folder / name.replace(before, after))
    output = folder / f"{after}.zarr"
    (output / "0/c/0/0").unlink()
    return output


@pytest.mark.cluster
def test_a_moved_run_is_resumed_and_repaired_where_it_is(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    np.save(tmp_path / "noisy.npy", np.random.default_rng(0).random((64, 64), np.float32))
    (tmp_path / "config.yaml").write_text(SMALL_CONFIG)
    printed("run", str(tmp_path / "config.yaml"), "--no-dashboard", "-q")
    whole = (tmp_path / "clean.zarr/0/c/0/0").read_bytes()
    moved = move(tmp_path, "clean", "moved")
    monkeypatch.chdir(tmp_path)
    for run in ("moved.zarr.run", f"{moved}.run"):
        printed("resume", run, "--no-dashboard", "-q")
    assert verify(moved).problems == ()
    assert json.loads((tmp_path / "moved.zarr.run/job.json").read_text())["output"]["path"] == str(moved)
    again = move(tmp_path, "moved", "again")
    printed("verify", str(again), "--repair", "-q")
    assert verify(again).problems == ()
    assert (again / "0/c/0/0").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.glob("*.zarr*")) == ["again.zarr", "again.zarr.run"]
