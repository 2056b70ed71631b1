"""Ptychography that goes on: loops in Python that give the bits of a job, and runs whose stages change where they have not begun."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import halotile
from halotile import DistributedContext
from halotile.cli.main import app
from halotile.errors import ConfigError, Diverged, HalotileError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.iterations.rank_programs import ProgramFiles
from halotile.graphs.kinds.base import RankProgram
from halotile.graphs.runs.passes.cluster_passes import ENDED
from halotile.graphs.runs.records import OpenRecords, open_records
from halotile.ptychography import SGD, Adam
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans.convert import write_scan
from halotile.tasks.block import ONE_BLOCK
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import read_curve
from halotile.tasks.ptychography import opened as opened_scans
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.faults import until
from tests.graphs.scans import STAGES, compute, job, opened, plan, words, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def test_a_loop_in_python_gives_the_bits_of_the_job(folder: Path, cluster: RunningCluster) -> None:
    expected = compute(job(folder), cluster)
    scan = opened(folder)
    losses: list[float] = []
    with Adam(scan, workers=2) as adam:
        for stage in STAGES:
            epochs, rate, batch = stage.values()
            losses += adam.optimize(int(epochs), lr=rate, batch_size=int(batch))
    assert losses == scan.losses
    scan.save(folder / "loop.cxi")
    assert (folder / "loop.cxi").read_bytes() == expected


def test_a_loop_may_end_early_and_go_on_with_other_values(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder, refine=("object",))
    assert scan.report() == "no epoch yet"
    with Adam(scan, context=ctx) as adam:
        for seen, _ in enumerate(adam.optimize(10_000), 1):
            if seen == 3:
                break
        done = len(scan.losses)
        assert done == len(scan.state.losses) == 3, "none is computed that the loop did not ask for"
        first = scan.probe.copy()
        scan.object = np.ones_like(scan.object)
        scan.probe = 2 * scan.probe
        (loss,) = adam.optimize(1, lr=1e-9)
        assert np.allclose(scan.probe, 2 * first, rtol=1e-5, atol=0)
        assert np.allclose(scan.object, 1, atol=1e-6)
        assert scan.report() == f"epoch {done + 1}: loss {loss:.4g}"
        unfinished = adam.optimize(10_000)
        next(unfinished)
        with pytest.raises(ConfigError, match="End the loop"):
            next(adam.optimize(1))
        with pytest.raises(ConfigError, match="cannot be set while"):
            scan.object = scan.object
        unfinished.close()
    other = opened(folder)
    list(SGD(other, context=ctx).optimize(1, lr=0.001, subset=[0]))
    changed = np.argwhere(other.object != 1)
    assert len(changed)
    assert (np.ptp(changed, axis=0) <= 32).all()


def test_the_resolution_is_that_of_the_used_positions(
    folder: Path, cluster: RunningCluster, ctx: DistributedContext
) -> None:
    """Each loop over some of them is one stage of a job with a subset."""
    stages: list[dict[str, Any]] = [
        {"epochs": epochs, "lr": 0.05, "batch": 6, "subset": list(range(first, last))}
        for epochs, first, last in ((3, 0, 56), (2, 2, 60))
    ]
    expected = compute(job(folder, resolution=True, stages=stages), cluster)
    scan = opened(folder, resolution=True)
    with Adam(scan, context=ctx) as adam:
        for stage in stages:
            list(adam.optimize(stage["epochs"], lr=0.05, batch_size=6, subset=stage["subset"]))
    assert scan.report().startswith(f"epoch 5: loss {scan.losses[-1]:.4g}, resolution ")
    assert scan.report().endswith("More epochs tell")
    scan.save(folder / "loop.cxi")
    assert (folder / "loop.cxi").read_bytes() == expected
    with h5py.File(folder / "result.cxi") as file:
        found = file["entry_1/process_1/resolution"][()]
    assert scan.rings.resolution == found


def test_a_loop_sees_each_epoch_and_positions_move_late(folder: Path, ctx: DistributedContext) -> None:
    """With the defaults of a call, or as it says; later calls hold none."""
    scan = opened(folder)
    start = scan.positions
    with Adam(scan, context=ctx) as adam:
        calls: list[tuple[dict[str, Any], int]] = [({}, 2), ({}, 0), ({"hold_positions": 3}, 3)]
        for options, held in calls:
            moved, objects = [], [scan.object]
            for _ in adam.optimize(4, **options):
                moved.append(not np.array_equal(scan.positions, start))
                objects.append(scan.object)
                start = scan.positions
            assert moved == [epoch >= held for epoch in range(4)]
            assert all((one != other).any() for one, other in itertools.pairwise(objects))


def test_positions_and_background_that_are_set_are_begun_with(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder)
    moved = scan.positions + np.array([0.25, -0.5])
    counts = np.arange(32 * 32, dtype=float).reshape(32, 32)
    scan.positions, scan.background = moved, counts
    for is_computed in (False, True):
        if is_computed:
            next(Adam(scan, context=ctx).optimize(1, lr_factors={"positions": 0.0, "background": 0.0}))
        assert np.abs(scan.positions - moved).max() < 1e-5
        assert np.allclose(scan.background, counts, rtol=1e-5, atol=1e-5)
        assert scan.background[0, 0] > 0  # at 0 there is no slope


def test_a_failure_after_a_loop_was_left_is_told(
    folder: Path, ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = opened(folder)
    run_ranks = ctx.run_torch

    def fail_at_the_end(program: Any, **options: Any) -> None:
        run_ranks(program, **options)
        raise RuntimeError("a worker was lost")

    monkeypatch.setattr(ctx, "run_torch", fail_at_the_end)
    adam = Adam(scan, context=ctx)
    loop = adam.optimize(10_000)
    next(loop)
    with pytest.warns(UserWarning, match="the epoch at hand was lost: a worker was lost"):
        loop.close()
    with pytest.raises(RuntimeError, match="a worker was lost"):
        list(adam.optimize(1))
    scan.object = scan.object


def test_a_loop_that_is_left_open_ends_with_its_solver(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder)
    with Adam(scan, context=ctx) as adam:
        left = adam.optimize(np.int64(10))  # type: ignore[arg-type]  # NumPy's are taken
        next(left)
        next(left)
    assert len(scan.losses) == 2
    scan.probe = 2 * scan.probe
    with pytest.raises(ConfigError, match="the solver was closed"):
        next(left)
    with Adam(scan, context=ctx) as adam:
        left = adam.optimize(10, lr=np.float32(0.02), batch_size=np.int32(16))  # type: ignore[arg-type]  # as well
        next(left)
    left.close()
    assert len(scan.losses) == 3


def test_workers_without_a_slot_have_nothing_to_do(folder: Path, ctx: DistributedContext) -> None:
    losses = list(Adam(opened(folder, slots=1), context=ctx).optimize(2, lr=0.02))
    assert losses[1] < losses[0]


def test_a_good_start_does_not_count_as_diverged(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder)
    with Adam(scan, context=ctx) as adam:
        list(adam.optimize(30, lr=0.05, batch_size=8))
        scan.save(folder / "good.cxi")
        again = opened(folder, folder / "good.cxi", loss="intensity_mse")
        losses = list(Adam(again, context=ctx).optimize(2, lr=0.005))
    assert losses[1] < losses[0]


def test_an_epoch_that_diverges_is_told_as_such_and_the_ones_before_stay(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder)
    descent = SGD(scan, context=ctx)
    list(descent.optimize(2, lr=1e-3))
    with pytest.raises(Diverged, match="Write a smaller lr"):
        list(descent.optimize(1, lr=1e5))
    assert len(scan.losses) == 2
    # What is set has another loss, and is no fault of a stage, which answers for its own steps alone.
    scan = opened(folder, refine=("object", "probe"))
    adam = Adam(scan, context=ctx)
    (good,) = adam.optimize(1, lr=0.02, batch_size=8)
    scan.object = 3 * scan.object
    (bad,) = adam.optimize(1, lr=1e-6)
    assert bad > 50 * good
    next(adam.optimize(3, lr=1))
    assert len(list(adam.optimize(1, lr=0.02))) == 1


def test_a_call_that_cannot_begin_is_forgotten(
    folder: Path, ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for is_full in (False, True):
        adam = Adam(opened(folder), context=ctx)
        if is_full:
            with monkeypatch.context() as patch:
                patch.setattr(opened_scans, "write_state", Mock(side_effect=OSError("no space")))
                with pytest.raises(OSError, match="no space"):
                    list(adam.optimize(3, lr=0.1, batch_size=32))
        losses.append(list(adam.optimize(3, lr=0.005, batch_size=16)))
    assert losses[0] == losses[1]


def test_the_first_guess_of_a_probe_is_as_far_out_of_focus_as_the_sample(tmp_path: Path) -> None:
    path = str(tmp_path / "scan.zarr")
    truth = SimulatedScan(raster=(8, 8), pattern=64, step=5.0, defocus=2.0)
    write_scan(path, truth.scan, truth)
    wavelength = truth.scan.wavelength
    pixel = wavelength * truth.scan.distance / (64 * truth.scan.pixel[0])
    distance = 2.0 * 64 * pixel**2 / wavelength

    def likeness(**model: Any) -> float:
        guess = opened(tmp_path, **model).probe
        return float(abs(np.vdot(guess, truth.probe)) / np.linalg.norm(guess) / np.linalg.norm(truth.probe))

    assert likeness(focus=f"-{1e6 * distance} um") > 0.8
    assert max(likeness(), likeness(focus=f"{1e6 * distance} um")) < 0.4
    write_scan(path, replace(truth.scan, probe=truth.probe), truth, overwrite=True)
    with pytest.raises(ConfigError, match="has a probe"):
        opened(tmp_path, focus="1 um")


FIRST = [{"epochs": 4, "lr": 0.02, "batch": 8}, {"epochs": 2, "lr": 0.01, "batch": 16}]
DIVERGING = {"solver": "sgd", "epochs": 3, "lr": 1e4, "batch": 8}
LAST = {"epochs": 3, "lr": 0.005, "batch": 8}


def test_a_stage_that_diverges_is_replaced_and_those_before_are_kept(folder: Path, cluster: RunningCluster) -> None:
    def stages(*given: dict[str, Any], name: str = "mended.cxi") -> Path:
        return job(folder, name, stages=given, model={"modes": 2})

    whole = compute(stages(*FIRST, LAST, name="whole.cxi"), cluster)
    with pytest.raises(Diverged, match="The 6 epochs of the stages before are kept"):
        compute(stages(*FIRST, DIVERGING), cluster)
    for changed, said in (
        ([FIRST[0] | {"lr": 0.03}, FIRST[1], LAST], r"stages\[0\]\.lr was 0\.02, is 0\.03"),
        ([FIRST[1]], r"stages was \["),
    ):
        with pytest.raises(HalotileError, match=rf"belongs to a different job:\s+{said}"):
            compute(stages(*changed), cluster)
    path = stages(*FIRST, LAST)
    assert "goes on from what that computed of the first 2 stages" in words(plan(path))
    assert compute(path, cluster, 2) == whole
    directory = RunDirectory(folder / "mended.cxi.run")
    computed = ["seconds" in row for row in directory.read_output_iterations()]
    assert computed == 6 * [False] + 3 * [True]
    assert (directory.read_job() or {})["stages"][-1]["solver"] == "adam"
    with pytest.raises(HalotileError, match=r"belongs to a different job:\s+stages was"):
        compute(stages(*FIRST, LAST, LAST), cluster)
    assert compute(stages(*FIRST, LAST), cluster) == whole


def begun(folder: Path, stages: list[dict[str, Any]]) -> Iterator[tuple[RankProgram, OpenRecords]]:
    """The program of a run in a folder, with its records."""
    planned = halotile.plan(job(folder, stages=stages))
    directory = RunDirectory(planned.run_directory)
    view: Any = SimpleNamespace(
        directory=directory, fingerprint=planned.fingerprint, report=print, report_row=lambda rows, total: None
    )
    program = next(planned.work.run(view))
    assert isinstance(program, RankProgram)
    with open_records(program.records, ONE_BLOCK, planned.fingerprint) as records:
        yield program, records


def finish(folder: Path, stages: list[dict[str, Any]], epochs: int) -> None:
    """Compute the epochs that are left, as a run does that is killed before it writes its result."""
    for program, records in begun(folder, stages):
        assert not records.journal.done, "of other stages"
        program.program(TorchGroup())
        assert program.look() == epochs
        records.ledger.enter({0: {}})
        records.journal.mark({0: ENDED})
    assert [list(records.journal.done) for _, records in begun(folder, stages)] == [[0]]


def test_ranks_that_ended_have_not_for_other_stages(folder: Path) -> None:
    (folder / "result.cxi.run").mkdir()
    for stages, epochs in ((FIRST, 6), ([*FIRST, LAST], 9), (FIRST, 6), (FIRST[:1], 4)):
        finish(folder, stages, epochs)


def test_a_result_is_that_of_its_stages_whenever_its_run_is_killed(folder: Path, cluster: RunningCluster) -> None:
    """Between the last epoch and the end: with the result written, marked, and its plan lost."""
    stages, others = [*FIRST, LAST], [*FIRST, LAST | {"lr": 0.001}]
    content = compute(job(folder, stages=stages), cluster)
    directory, result = RunDirectory(folder / "result.cxi.run"), folder / "result.cxi"
    journal = directory.journal_path.read_bytes()
    directory.state_path.mkdir()
    finish(folder, stages, 9)
    for marked in (journal, journal.splitlines(keepends=True)[0]):
        directory.journal_path.write_bytes(marked)
        result.write_bytes(content)
        with pytest.raises(HalotileError, match=r"belongs to a different job:\s+stages\[2\]\.lr was 0\.005, is 0\.001"):
            compute(job(folder, stages=others), cluster)
    assert compute(job(folder, stages=stages), cluster) == content
    directory.plan_path.unlink()
    with pytest.raises(HalotileError, match="1 block of another job"):
        compute(job(folder, stages=others), cluster)


def test_epochs_of_a_stage_that_is_left_out_do_not_count(folder: Path, cluster: RunningCluster) -> None:
    long = job(folder, stages=[FIRST[0], DIVERGING | {"epochs": 300, "lr": 1e-3}])
    process = subprocess.Popen([sys.executable, "-m", "halotile", "run", str(long), "--quiet"])
    curve = folder / "result.cxi.run" / "state" / "curve.json"
    try:
        until(lambda: process.poll() is not None or read_curve(curve)[0] > 20, seconds=60)
    finally:
        process.kill()
        process.wait()
    compute(job(folder, stages=[FIRST[0], LAST]), cluster)
    events = list(RunDirectory(folder / "result.cxi.run").read_events())
    assert [event["resumed"] for event in events if event["event"] == "begin"] == [0, 0]
    status = words(CliRunner().invoke(app, ["status", str(folder / "result.cxi")]))
    assert [said for said in ("7 of 7", "(4 resumed)", "curve ", "drawing") if said not in status] == []


def test_checkpoints_of_several_stages_are_kept_and_returned_to(tmp_path: Path) -> None:
    files = ProgramFiles(tmp_path, tmp_path / "abc.checkpoint")
    first, second = tmp_path / "abc-1.checkpoint", tmp_path / "abc-2.checkpoint"

    def replaced(file: Path, text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    for file, text in ((first, "2 epochs"), (first, "4 epochs"), (second, "5 epochs")):
        replaced(file, text)
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
