"""Ptychography: stages of a run that is not finished may change where it has not begun them, and give the bits of one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.graphs.iterations.rank_programs import ProgramFiles
from halotile.graphs.kinds.base import RankProgram
from halotile.graphs.runs.passes.cluster_passes import ENDED
from halotile.graphs.runs.records import OpenRecords, open_records
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.block import ONE_BLOCK
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import read_curve
from tests.faults import until
from tests.graphs.scans import job, run, words, write_small_scan

pytestmark = [pytest.mark.cluster]

FIRST = [{"epochs": 4, "lr": 0.02, "batch": 8}, {"epochs": 2, "lr": 0.01, "batch": 16}]
DIVERGING = {"solver": "sgd", "epochs": 3, "lr": 1e4, "batch": 8}
LAST = {"epochs": 3, "lr": 0.005, "batch": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def test_a_stage_that_diverges_is_replaced_and_those_before_are_kept(folder: Path) -> None:
    model = {"modes": 2}
    assert run(job(folder, "whole.cxi", stages=[*FIRST, LAST], model=model), "--workers", "1").exit_code == 0
    failed = run(job(folder, "mended.cxi", stages=[*FIRST, DIVERGING], model=model), "--workers", "1")
    assert failed.exit_code != 0
    assert "The 6 epochs of the stages before are kept" in words(failed)

    for stages, said in (
        ([FIRST[0] | {"lr": 0.03}, FIRST[1], LAST], "stages[0].lr was 0.02, is 0.03"),
        ([FIRST[1]], "stages was ["),
    ):
        refused = run(job(folder, "mended.cxi", stages=stages, model=model))
        assert f"belongs to a different job: {said}" in words(refused)

    path = job(folder, "mended.cxi", stages=[*FIRST, LAST], model=model)
    planned = CliRunner().invoke(app, ["plan", str(path)])
    assert "goes on from what that computed of the first 2 stages" in words(planned)
    done = run(path, "--workers", "2")
    assert done.exit_code == 0, done.output
    assert (folder / "mended.cxi").read_bytes() == (folder / "whole.cxi").read_bytes()
    directory = RunDirectory(folder / "mended.cxi.run")
    computed = ["seconds" in row for row in directory.read_output_iterations()]
    assert computed == 6 * [False] + 3 * [True]
    assert (directory.read_job() or {})["stages"][-1]["solver"] == "adam"

    longer = job(folder, "mended.cxi", stages=[*FIRST, LAST, LAST], model=model)
    refused = run(longer)
    assert refused.exit_code != 0
    assert "belongs to a different job: stages was" in words(refused)
    assert run(job(folder, "mended.cxi", stages=[*FIRST, LAST], model=model)).exit_code == 0


def begun(folder: Path, stages: list[dict[str, Any]]) -> Iterator[tuple[RankProgram, OpenRecords]]:
    """The program of a run in a folder, with its records."""
    plan = halotile.plan(job(folder, stages=stages))
    view: Any = SimpleNamespace(
        directory=RunDirectory(plan.run_directory),
        fingerprint=plan.fingerprint,
        report=print,
        report_row=lambda rows, total: None,
    )
    program = next(plan.work.run(view))
    assert isinstance(program, RankProgram)
    with open_records(program.records, ONE_BLOCK, plan.fingerprint) as opened:
        yield program, opened


def finish(folder: Path, stages: list[dict[str, Any]], epochs: int) -> None:
    """Compute the epochs that are left, as a run does that is killed before it writes its result."""
    for program, opened in begun(folder, stages):
        assert not opened.journal.done, "of other stages"
        program.program(TorchGroup())
        assert program.look() == epochs
        opened.ledger.enter({0: {}})
        opened.journal.mark({0: ENDED})
    assert [list(opened.journal.done) for _, opened in begun(folder, stages)] == [[0]]


def test_ranks_that_ended_have_not_for_other_stages(folder: Path) -> None:
    (folder / "result.cxi.run").mkdir()
    finish(folder, FIRST, 6)
    finish(folder, [*FIRST, LAST], 9)
    finish(folder, FIRST, 6)
    finish(folder, FIRST[:1], 4)


def test_a_result_is_that_of_its_stages_whenever_its_run_is_killed(folder: Path) -> None:
    """Between the last epoch and the end: with the result written, marked, and its plan lost."""
    stages, others = [*FIRST, LAST], [*FIRST, LAST | {"lr": 0.001}]
    assert run(job(folder, stages=stages), "--workers", "1").exit_code == 0
    directory, result = RunDirectory(folder / "result.cxi.run"), folder / "result.cxi"
    content, journal = result.read_bytes(), directory.journal_path.read_bytes()
    directory.state_path.mkdir()
    finish(folder, stages, 9)
    empty = journal.splitlines(keepends=True)[0]
    for marked, written in ((journal, content), (empty, content)):
        directory.journal_path.write_bytes(marked)
        result.write_bytes(written)
        refused = run(job(folder, stages=others), "--workers", "1")
        assert "belongs to a different job: stages[2].lr was 0.005, is 0.001" in words(refused)
    assert run(job(folder, stages=stages), "--workers", "1").exit_code == 0
    assert result.read_bytes() == content
    directory.plan_path.unlink()
    refused = run(job(folder, stages=others), "--workers", "1")
    assert "1 block of another job" in words(refused)


def test_the_end_of_a_stage_that_its_last_step_spoils_is_not_kept(folder: Path) -> None:
    spoiling = {"solver": "sgd", "epochs": 1, "lr": 1e3, "batch": 64}
    for stages in ([*FIRST, spoiling, LAST], [*FIRST, spoiling]):
        done = run(job(folder, stages=stages), "--workers", "1")
        assert done.exit_code != 0
        assert "after the last step of a stage" in words(done)
        assert "The 6 epochs of the stages before are kept" in words(done)


def test_epochs_of_a_stage_that_is_left_out_do_not_count(folder: Path) -> None:
    long = job(folder, stages=[FIRST[0], DIVERGING | {"epochs": 300, "lr": 1e-3}])
    process = subprocess.Popen([sys.executable, "-m", "halotile", "run", str(long), "--quiet"])
    curve = folder / "result.cxi.run" / "state" / "curve.json"
    try:
        until(lambda: process.poll() is not None or read_curve(curve)[0] > 20, seconds=60)
    finally:
        process.kill()
        process.wait()
    done = run(job(folder, stages=[FIRST[0], LAST]), "--workers", "1")
    assert done.exit_code == 0, done.output
    events = list(RunDirectory(folder / "result.cxi.run").read_events())
    resumed = [event["resumed"] for event in events if event["event"] == "begin"]
    assert resumed == [0, 0]
    status = CliRunner().invoke(app, ["status", str(folder / "result.cxi")])
    assert "7 of 7" in words(status)
    assert "(4 resumed)" in words(status)
    assert "curve " in words(status)
    assert "drawing" in words(status)


def test_a_stage_that_ends_far_worse_than_it_began_is_no_result(folder: Path) -> None:
    done = run(job(folder, stages=[*FIRST, {"epochs": 5, "lr": 1, "batch": 12}]), "--workers", "1")
    assert done.exit_code != 0
    assert "at the end of a stage, and was" in words(done)
    scan = halotile.ptychography.open(folder / "scan.zarr", refine=("object", "probe"))
    with halotile.ptychography.Adam(scan) as adam:
        (good,) = adam.optimize(1, lr=0.02, batch_size=8)
        scan.object = 3 * scan.object  # what is set has another loss, and is no fault of a stage
        (bad,) = adam.optimize(1, lr=1e-6)
        assert bad > 50 * good
        next(adam.optimize(3, lr=1))
        assert len(list(adam.optimize(1, lr=0.02))) == 1, "a stage answers for its own steps alone"


def test_a_likelihood_that_rises_a_little_is_no_fault(folder: Path) -> None:
    stages = [{"epochs": 20, "lr": 0.005}, {"epochs": 4, "lr": 0.05}, {"epochs": 4, "lr": 0.005}]
    done = run(job(folder, stages=stages, model={"loss": "poisson_nll"}), "--workers", "1")
    assert done.exit_code == 0, done.output


def test_checkpoints_of_several_stages_are_kept_and_returned_to(tmp_path: Path) -> None:
    files = ProgramFiles(tmp_path, tmp_path / "abc.checkpoint")
    first, second = tmp_path / "abc-1.checkpoint", tmp_path / "abc-2.checkpoint"

    def replaced(file: Path, text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    replaced(first, "2 epochs")
    files.keep()
    replaced(first, "4 epochs")
    files.keep()
    replaced(second, "5 epochs")
    files.keep()
    replaced(second, "6 epochs")
    files.revert()
    assert {path.name: path.read_text() for path in tmp_path.glob("abc*")} == {first.name: "4 epochs"}
    replaced(second, "5 epochs")
    files.keep()
    first.unlink()
    files.keep()
    assert {path.suffix for path in tmp_path.glob("abc-1*")} == set()
    files.revert()
    assert second.read_text() == "5 epochs"
