"""Ptychography: the object of a known scan, the same bits for any workers, after a kill and in a loop in Python, and runs whose stages change."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import halotile
from halotile import DistributedContext
from halotile.cli.main import app
from halotile.errors import ConfigError, Diverged, HalotileError, InputError, MissingPackage
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.iterations.rank_programs import ProgramFiles
from halotile.graphs.jobs.ptychography.plan import SentRecipe, photon_loss_of
from halotile.graphs.kinds.base import RankProgram
from halotile.graphs.runs.passes.cluster_passes import ENDED
from halotile.graphs.runs.records import OpenRecords, open_records
from halotile.ptychography import SGD, Adam
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans import convert
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import export_result
from halotile.tasks.block import ONE_BLOCK
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import read_curve
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.cases import thorough
from tests.faults import until
from tests.graphs.sampling import killed
from tests.graphs.scans import STAGES, begin_with, compute, job, opened, plan, run, small_scan, words, write_small_scan

Patch = pytest.MonkeyPatch

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def object_error(path: Path, truth: SimulatedScan) -> float:
    """Relative error of the object where it was scanned, but for a factor and a phase ramp, which no pattern knows."""
    with h5py.File(path) as file:
        found: NDArray[Any] = file["object"][:]
        places = file["entry_1/process_1/first_pixel"][:]
    shift = np.round(np.median(places - truth.places, axis=0)).astype(int)
    rows, columns = (slice(truth.pattern // 2, n - truth.pattern // 2) for n in truth.image.shape)
    expected = truth.image[rows, columns]
    found = found[rows.start + shift[0] : rows.stop + shift[0], columns.start + shift[1] : columns.stop + shift[1]]
    # The ramp is the peak of the spectrum of the quotient.
    peak = np.unravel_index(np.abs(np.fft.fft2(found * expected.conj(), (1024, 1024))).argmax(), (1024, 1024))
    row, column = np.indices(found.shape)
    found = found * np.exp(-2j * np.pi * (peak[0] * row + peak[1] * column) / 1024)
    factor = (found.conj() * expected).sum() / (np.abs(found) ** 2).sum()
    return float(np.linalg.norm(factor * found - expected) / np.linalg.norm(expected))


BY_ADAM = [{"epochs": 60, "lr": 0.03, "batch": 8}, {"epochs": 20, "lr": 0.003, "batch": 16}]


@pytest.mark.parametrize("stages", [BY_ADAM, thorough([{"solver": "rpie", "epochs": 60, "batch": 4}])])
def test_the_object_of_a_known_scan_is_found(folder: Path, cluster: RunningCluster, stages: Any) -> None:
    compute(job(folder, stages=stages, model={"refine": ["object", "probe"]}), cluster)
    assert object_error(folder / "result.cxi", small_scan()) < 0.05


def test_any_number_of_workers_gives_the_same_bits(folder: Path, cluster: RunningCluster, monkeypatch: Patch) -> None:
    """Beyond memory: the scan is written again with chunks of four."""
    shutil.rmtree(folder / "scan.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "CHUNK_BYTES", 4 * 32 * 32 * 4)
        write_small_scan(folder)
    stages = [*STAGES, {"solver": "lbfgs", "epochs": 4}]
    windows: dict[str, Any] = {"window": 4, "stages": stages, "held_out": 0.1}
    results = [compute(job(folder, f"{workers}.cxi", **windows), cluster, workers) for workers in (1, 2)]
    done = run(job(folder, "3.cxi", **windows), "--workers", "3")
    assert done.exit_code == 0, done.output
    assert [*results, (folder / "3.cxi").read_bytes()] == [results[0]] * 3
    with h5py.File(folder / "1.cxi") as file:
        assert file["entry_1/image_1"].attrs["pixel_size"] == pytest.approx(2 * [1e-10 / (32 * 5e-5)])
        assert len(file["loss"]) == 16
        assert file["loss"][-1] < file["loss"][0] / 3


def test_a_result_is_exported_and_its_probe_stays_in_its_support(folder: Path, cluster: RunningCluster) -> None:
    compute(job(folder, stages=STAGES[:1], model={"modes": 2, "support": 9}), cluster)
    source, images = str(folder / "result.cxi"), folder / "images.zarr"
    with h5py.File(source) as file:
        found, probe = file["object"][:], file["probe"][:]
    light = np.abs(probe).sum(0)
    row, column = np.indices(light.shape) - 16
    assert np.array_equal(light > 1e-6 * light.max(), np.hypot(row, column) <= 9)

    def export(*options: str) -> Any:
        return CliRunner().invoke(app, ["export", source, *options])

    done = export(str(images), "--unwrap")
    assert done.exit_code == 0, done.output
    modulus = halotile.open_source(images / "object_modulus")
    assert np.array_equal(modulus[:], np.abs(found).astype(np.float32))
    assert modulus.scale == pytest.approx(2 * [1e6 * 1e-10 / (32 * 5e-5)])
    assert modulus.units == ("micrometer", "micrometer")
    phase: NDArray[Any] = halotile.open_source(images / "object_phase")[:]
    assert np.allclose(np.exp(1j * phase), found / np.abs(found), atol=1e-5)
    assert np.array_equal(halotile.open_source(images / "probe_phase")[:], np.angle(probe))
    assert export(str(images)).exit_code != 0
    for options in ((str(images), "--level", "1"), (str(folder / "a.tif"), "--unwrap")):
        refused = export(*options, "--overwrite")
        assert refused.exit_code == 2
        assert "eave" in refused.output
    assert export(str(images), "--overwrite").exit_code == 0


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    source, images = tmp_path / "result.cxi", str(tmp_path / "images.zarr")
    with h5py.File(source, "w") as file:
        file["object"], file["probe"] = np.ones((8, 8), "c8"), np.ones((1, 4, 4), "c8")
    with pytest.raises(InputError, match="no result of a job"):
        export_result(str(source), images)
    assert list(tmp_path.iterdir()) == [source]
    monkeypatch.setitem(sys.modules, "skimage.restoration", None)
    with pytest.raises(MissingPackage, match="pip install scikit-image"):
        export_result(str(source), images, unwrap=True)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.thorough
def test_a_killed_rank_and_run_go_on_to_the_same_bits(folder: Path, cluster: RunningCluster) -> None:
    stages = [{"epochs": 100, "lr": 0.02, "batch": 6}]
    parts: dict[str, Any] = {"stages": stages, "resolution": True, "held_out": 0.05}
    whole = compute(job(folder, "whole.cxi", **parts), cluster, 2)
    path = job(folder, "killed.cxi", **parts)
    command = [sys.executable, "-m", "halotile", "run", str(path), "--quiet", "--workers", "2"]
    curve = folder / "killed.cxi.run" / "state" / "curve.json"
    with subprocess.Popen(command, start_new_session=True) as driver:

        def reached(epoch: int) -> None:
            until(lambda: driver.poll() is not None or read_curve(curve)[0] > epoch, seconds=90)
            assert driver.poll() is None

        try:
            reached(10)
            server = max(psutil.Process(driver.pid).children(), key=lambda child: len(child.children()))
            server.children()[0].kill()
            reached(read_curve(curve)[0] + 20)
        finally:
            driver.kill()
    assert driver.returncode == -signal.SIGKILL
    assert 30 < read_curve(curve)[0] < 100
    assert compute(path, cluster) == whole


def test_a_reconstruction_begins_with_the_result_of_another(folder: Path, cluster: RunningCluster) -> None:
    model = {"modes": 2, "refine": ["object", "probe", "background", "positions", "intensities"]}
    compute(job(folder, "first.cxi", model=model), cluster)
    with h5py.File(folder / "first.cxi") as first:
        image, before, reached = first["object"][()], first["probe"][()], first["loss"][-1]
        places = first["entry_1/process_1/first_pixel"][()]
    once = [{"epochs": 1, "lr": 0.001, "batch": 16}]
    for name, start in (("again.cxi", folder / "first.cxi"), ("light.cxi", begin_with(folder, {"probe": before}))):
        compute(job(folder, name, start, model=model, stages=once), cluster)
        with h5py.File(folder / name) as file:
            after, (begun,) = file["probe"][()], file["loss"][()]
        if name == "light.cxi":  # of any unit
            after *= np.linalg.norm(before) / np.linalg.norm(after)
        else:
            assert 0.5 * reached < begun < reached  # the loss of a pattern is that before its step
        assert np.abs(after - before).max() < 0.02 * np.abs(before).max()
    scan = opened(folder, modes=2, start=folder / "first.cxi")
    np.testing.assert_array_equal(scan.object, image)
    np.testing.assert_allclose(scan.positions, places, atol=1e-5)
    own = job(folder, "first.cxi", folder / "first.cxi", model=model, output={"overwrite": True})
    assert "that is the input" in words(plan(own, "--fresh"))


def test_of_the_modes_to_begin_with_the_strongest_are_taken_with_the_light_of_the_counts(folder: Path) -> None:
    beam = np.array(opened(folder).probe[0])
    scan = opened(folder, {"probe": 1e-3 * np.stack([0.1 * beam[::-1], beam])})
    np.testing.assert_allclose(scan.probe[0], beam, rtol=1e-4, atol=1e-4 * np.abs(beam).max())


@pytest.mark.parametrize("wider", [30, -4])
def test_the_obj_of_another_program_is_begun_with_wherever_its_margins_end(folder: Path, wider: int) -> None:
    usual = opened(folder)
    rows, columns = (n + 2 * wider for n in usual.object.shape)
    obj = np.arange(1.0, rows * columns + 1).reshape(rows, columns) * 1j
    scan = opened(folder, {"obj": obj, "probe": 2 * usual.probe})
    if wider > 0:
        np.testing.assert_array_equal(scan.object, obj[wider:-wider, wider:-wider].astype(np.complex64))
    else:
        np.testing.assert_array_equal(scan.object[4:-4, 4:-4], obj.astype(np.complex64))
        assert (scan.object[:4] == 1).all()
    np.testing.assert_allclose(scan.probe, 2 * usual.probe, rtol=1e-5, atol=1e-5 * np.abs(scan.probe).max())


@pytest.mark.parametrize(("light", "warns"), [(1e-3, True), (0.1, False)])
def test_a_mode_that_has_next_to_no_light_is_warned_of(folder: Path, light: float, warns: bool) -> None:
    beam = np.array(opened(folder).probe[0])
    start = begin_with(folder, {"probe": np.stack([beam, np.sqrt(light) * np.roll(beam, 16, 0)])})
    model = {"modes": 2, "refine": ["object"]}
    path = job(folder, start=start, model=model, stages=[{"epochs": 1, "lr": 0.01}])
    said = words(CliRunner().invoke(app, ["run", str(path), "--workers", "1"]))
    assert ("Write fewer modes, or give the modes as input.start" in said) is warns
    assert ("a mode of the probe has" in said) is warns


def test_messages_to_workers_have_no_arrays(folder: Path) -> None:
    """They read the values to begin with themselves, see where these have changed, and need none once a checkpoint is there."""
    recipe = opened(folder).recipe
    content = {"object": np.ones(recipe.shape, np.complex64), "probe": np.ones((1, 32, 32), np.complex64)}
    begun = replace(opened(folder, content).recipe, checkpoint=folder / "checkpoint")
    sent = SentRecipe.from_recipe(begun, str(folder / "start.h5"))
    assert len(pickle.dumps(sent)) < 10_000
    received = sent.opened()
    assert received.start is not None
    assert received.start.object is not None
    assert np.array_equal(received.start.object, content["object"])
    assert np.array_equal(received.scan.positions, begun.scan.positions)
    with h5py.File(folder / "start.h5", "r+") as file:
        file["object"][3, 3] = 2
    with pytest.raises(InputError, match="has changed since it was opened"):
        sent.opened()
    (folder / "start.h5").unlink()
    with pytest.raises(InputError):
        sent.opened()
    begun.checkpoints[0].touch()
    assert sent.opened().start is None


def test_the_true_object_has_about_the_loss_that_a_run_ends_with(tmp_path: Path) -> None:
    path, numbers = str(tmp_path / "scan.zarr"), np.arange(64)
    options: Any = ((1e3, {"phase": 1.0}), (1e3, {"phase": 5.0}), (3e4, {"phase": 5.0}), (1e6, {"step": 5.0}))
    for photons, more in options:
        make = partial(SimulatedScan, raster=(8, 8), pattern=64, **more)
        counted = make(photons=photons)
        write_scan(path, counted.scan, counted, overwrite=True)
        light = make(photons=None).patterns(numbers) * (photons / 1e6)
        true = np.square(np.sqrt(counted.patterns(numbers)) - np.sqrt(light)).mean()
        assert photon_loss_of(path) == pytest.approx(true, rel=0.06)


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


def test_a_loop_in_python_gives_the_bits_of_the_job_and_the_resolution_of_the_used_positions(
    folder: Path, cluster: RunningCluster, ctx: DistributedContext
) -> None:
    """Each loop over some of them is one stage of a job with a subset, and gives its bits."""
    usual: dict[str, Any] = {"lr": 0.05, "batch": 6}
    stages = [usual | {"epochs": 3, "subset": [*range(56)]}, usual | {"epochs": 2, "subset": [*range(2, 60)]}]
    expected = compute(job(folder, resolution=True, stages=stages), cluster)
    scan = opened(folder, resolution=True)
    with Adam(scan, context=ctx) as adam:
        for stage in stages:
            list(adam.optimize(stage["epochs"], lr=0.05, batch_size=6, subset=stage["subset"]))
    assert scan.report().startswith(f"epoch 5: loss {scan.losses[-1]:.4g}, resolution ")
    assert scan.report().endswith("More epochs will show it")
    scan.save(folder / "loop.cxi")
    assert (folder / "loop.cxi").read_bytes() == expected
    with h5py.File(folder / "result.cxi") as file:
        assert scan.rings.resolution == file["entry_1/process_1/resolution"][()]


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


def test_a_failure_after_a_loop_was_left_is_told(folder: Path, ctx: DistributedContext, monkeypatch: Patch) -> None:
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


def test_a_good_start_is_no_divergence_and_workers_may_be_without_a_slot(folder: Path, ctx: DistributedContext) -> None:
    scan = opened(folder)
    list(Adam(scan, context=ctx).optimize(30, lr=0.05, batch_size=8))
    scan.save(folder / "good.cxi")
    again = opened(folder, folder / "good.cxi", loss="intensity_mse", slots=1)
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
    changed = [FIRST[0] | {"lr": 0.03}, FIRST[1], LAST]
    for other, said in ((changed, r"stages\[0\]\.lr was 0\.02, is 0\.03"), ([FIRST[1]], r"stages was \[")):
        with pytest.raises(HalotileError, match=rf"belongs to a different job:\s+{said}"):
            compute(stages(*other), cluster)
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
    view: Any = Mock(directory=directory, fingerprint=planned.fingerprint)
    program = next(planned.work.run(view))
    assert isinstance(program, RankProgram)
    with open_records(program.records, ONE_BLOCK, planned.fingerprint) as records:
        yield program, records


def finish(folder: Path, stages: list[dict[str, Any]], epochs: int) -> None:
    """Compute the epochs that are left, as a run does that is killed before it writes its result."""
    for program, records in begun(folder, stages):
        assert not records.journal.done, "of other stages"
        program.program(TorchGroup())
        assert program.steps_done() == epochs
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
    command = [sys.executable, "-m", "halotile", "run", str(long), "--quiet"]
    curve = folder / "result.cxi.run" / "state" / "curve.json"
    killed(partial(subprocess.Popen, command, stderr=subprocess.PIPE, text=True), lambda: read_curve(curve)[0] > 8)
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
        files.keep_checkpoint()
    replaced(second, "6 epochs")
    files.restore_checkpoint()
    assert {path.name: path.read_text() for path in tmp_path.glob("abc*")} == {first.name: "4 epochs"}
    replaced(second, "5 epochs")
    for _ in range(2):
        files.keep_checkpoint()
    first.unlink()
    files.keep_checkpoint()
    assert {path.suffix for path in tmp_path.glob("abc-1*")} == set()
    files.restore_checkpoint()
    assert second.read_text() == "5 epochs"


@pytest.mark.parametrize("loss", ["amplitude_mse", "poisson_nll"])
def test_a_run_that_fits_the_noise_is_warned_of(tmp_path: Path, loss: str) -> None:
    known = SimulatedScan(raster=(3, 3), pattern=32, step=14.0, photons=1000, phase=2.0)
    write_scan(str(tmp_path / "scan.zarr"), known.scan, known)
    stages = [{"epochs": 60, "lr": 0.05}]
    path = job(tmp_path, model={"loss": loss}, held_out=0, stages=stages)
    said = words(CliRunner().invoke(app, ["run", str(path), "--workers", "1"]))
    assert "below that of photons alone: the object follows noise. Write held_out: 0.05" in said


RATES: list[tuple[float | None, str, dict[str, Any], str, bool]] = [
    (100, "amplitude_mse", {}, "0.01", True),
    (100, "poisson_nll", {}, "0.02", True),
    (100, "poisson_nll", {"held_out": 0}, "0.005", False),  # small steps where no pixel is held out
    (1e5, "amplitude_mse", {}, "0.02", False),
    (1e5, "poisson_nll", {}, "0.005", False),
    (None, "amplitude_mse", {}, "0.02", False),
]


@pytest.mark.parametrize(("photons", "loss", "parts", "rate", "holds_out"), RATES)
def test_the_rate_and_the_pixels_held_out_follow_from_loss_and_counts(
    tmp_path: Path, photons: float | None, loss: str, parts: dict[str, Any], rate: str, holds_out: bool
) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=32, step=3.0, photons=photons)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    places = {"input": {"path": str(tmp_path / "scan.zarr")}, "output": {"path": str(tmp_path / "result.cxi")}}
    whole = {"version": 1, "job": "ptychography", **places, "model": {"loss": loss}, **parts}
    (tmp_path / "job.yaml").write_text(json.dumps(whole))
    done = plan(tmp_path / "job.yaml")
    assert done.exit_code == 0
    assert f"150 epochs of adam, lr {rate}," in words(done)
    assert ("5% of the pixels of each pattern are held out" in words(done)) is holds_out
