"""Ptychography: the object of a known scan, the same bits for any number of workers and after a kill, and what a run begins with."""

from __future__ import annotations

import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.errors import InputError, MissingPackage
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.ptychography.plan import SentRecipe, photon_loss, photon_loss_of
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans import convert
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import export_result
from halotile.tasks.groups.training.curve import read_curve
from halotile.tasks.ptychography import result
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.recipe import SolverStage
from tests.cases import thorough
from tests.faults import until
from tests.graphs.scans import STAGES, begin_with, compute, job, opened, plan, run, small_scan, words, write_small_scan

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


@pytest.mark.parametrize(
    "stages",
    [
        [{"epochs": 60, "lr": 0.03, "batch": 8}, {"epochs": 20, "lr": 0.003, "batch": 16}],
        thorough([{"solver": "rpie", "epochs": 60, "batch": 4}]),
    ],
    ids=["adam", "rpie"],
)
def test_the_object_of_a_known_scan_is_found(folder: Path, cluster: RunningCluster, stages: Any) -> None:
    compute(job(folder, stages=stages, model={"refine": ["object", "probe"]}), cluster, 2)
    assert object_error(folder / "result.cxi", small_scan()) < 0.05


def test_the_result_has_the_same_bits_for_any_number_of_workers(
    folder: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, and beyond it: a chunk of these patterns has all of them, and the scan is written again with chunks of four."""
    results = [compute(job(folder, f"{workers}.cxi"), cluster, workers) for workers in (1, 2)]
    assert results[0] == results[1]
    with h5py.File(folder / "1.cxi") as file:
        assert file["entry_1/image_1"].attrs["pixel_size"] == pytest.approx(2 * [1e-10 / (32 * 5e-5)])
        assert len(file["loss"]) == 12
        assert file["loss"][-1] < file["loss"][0] / 3
    shutil.rmtree(folder / "scan.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "CHUNK_BYTES", 4 * 32 * 32 * 4)
        write_small_scan(folder)
    windows: dict[str, Any] = {
        "window": 4, "stages": [*STAGES, {"solver": "lbfgs", "epochs": 4}], "held_out": 0.1,
    }  # fmt: skip
    results = [compute(job(folder, f"{workers} of 4.cxi", **windows), cluster, workers) for workers in (1, 2)]
    done = run(job(folder, "3 of 4.cxi", **windows), "--workers", "3")
    assert done.exit_code == 0, done.output
    assert [*results, (folder / "3 of 4.cxi").read_bytes()] == [results[0]] * 3
    with h5py.File(folder / "1 of 4.cxi") as file:
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


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_resolution_is_that_of_two_halves(folder: Path, cluster: RunningCluster) -> None:
    stages = [{"epochs": 40, "lr": 0.03, "batch": 8}, {"epochs": 10, "lr": 0.003, "batch": 16}]
    compute(job(folder, "both.cxi", stages=stages, resolution=True), cluster, 2)
    compute(job(folder, "one.cxi", stages=stages), cluster)
    with h5py.File(folder / "both.cxi") as both, h5py.File(folder / "one.cxi") as one:
        assert np.array_equal(both["object"][:], one["object"][:])
        assert np.array_equal(both["loss"][:], one["loss"][:])
        resolution = float(both["entry_1/process_1/resolution"][()])
        pixel = both["entry_1/image_1"].attrs["pixel_size"][0]
    assert pixel < resolution < 3 * pixel
    last = RunDirectory(folder / "both.cxi.run").read_output_iterations()[-1]
    assert last["resolution"] == pytest.approx(resolution)
    assert "resolution" in CliRunner().invoke(app, ["status", str(folder / "both.cxi")]).output

    def export(name: str, *options: str) -> Any:
        return CliRunner().invoke(app, ["export", str(folder / name), str(folder / "sheet.png"), *options])

    export("both.cxi")
    assert "--overwrite" in export("both.cxi").output
    assert export("one.cxi", "--overwrite").exit_code == 0
    with h5py.File(folder / "both.cxi", "a") as damaged:
        del damaged["entry_1/process_1/ring_threshold"]
    without = export("both.cxi", "--overwrite")
    assert without.exit_code == 0, without.output
    assert (folder / "sheet.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.thorough
@pytest.mark.parametrize("epochs", [100, thorough(240)])
def test_a_killed_rank_and_run_go_on_to_the_same_bits(folder: Path, cluster: RunningCluster, epochs: int) -> None:
    parts: dict[str, Any] = {
        "stages": [{"epochs": epochs, "lr": 0.02, "batch": 6}], "resolution": True, "held_out": 0.05,
    }  # fmt: skip
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
    assert 30 < read_curve(curve)[0] < epochs
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


@pytest.mark.thorough
def test_a_beam_that_varies_is_begun_with_and_a_start_not_written_over(folder: Path, cluster: RunningCluster) -> None:
    model: dict[str, Any] = {"variations": 1, "refine": ["object", "probe"]}
    compute(job(folder, "first.cxi", model=model), cluster)
    opened(folder, start=folder / "first.cxi", **model).save(folder / "same.cxi")
    with h5py.File(folder / "first.cxi") as first, h5py.File(folder / "same.cxi") as same:
        for name in ("object", "probe", "entry_1/process_1/probe_variations", "entry_1/process_1/probe_shares"):
            np.testing.assert_allclose(same[name][()], first[name][()], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="its variations has shape"):
        opened(folder, start=folder / "first.cxi", **model | {"variations": 2})
    path = job(folder, "first.cxi", folder / "first.cxi", model=model, output={"overwrite": True})
    done = plan(path, "--fresh")
    assert done.exit_code != 0
    assert "that is the input" in words(done)


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
    sent = SentRecipe.of(begun, str(folder / "start.h5"))
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


def test_a_curve_is_written_while_checkpoints_take_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("halotile.tasks.ptychography.result.time.monotonic", lambda: now[0])
    monkeypatch.setattr(result, "write_state", lambda *_: now.__setitem__(0, now[0] + 31))
    scan = opened(folder)
    stages = (SolverStage(epochs=300, lr=0.1, batch=8),)
    recipe = replace(scan.recipe, stages=stages, checkpoint=folder / "checkpoint", curve=folder / "curve.json")
    kept = result.Record(recipe, scan.state, lambda: (scan.object, np.ones(scan.object.shape)))
    seen, gaps, last = 0, [], 0.0
    for _ in range(200):
        now[0] += 1
        scan.state.losses.append(1.0)
        kept.epoch_ended(1.0, is_last=False)
        if (step := read_curve(recipe.curve)[0]) != seen:
            gaps.append(now[0] - last)
            seen, last = step, now[0]
    assert max(gaps) < 35


def test_noise_of_photons_has_the_loss_that_draws_have() -> None:
    rng = np.random.default_rng(0)
    for mean in (0.01, 0.3, 1.0, 4.0, 50.0):
        drawn = np.square(np.sqrt(rng.poisson(mean, 400_000)) - np.sqrt(mean)).mean()
        assert photon_loss(np.array([mean])) == pytest.approx(drawn, rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"photons": 1e3, "phase": 1.0},
        {"photons": 1e3, "phase": 5.0},
        {"photons": 3e4, "phase": 5.0},
        {"photons": 1e6, "step": 5.0},
    ],
)
def test_the_true_object_has_about_the_loss_that_a_run_ends_with(options: dict[str, Any], tmp_path: Path) -> None:
    known = {"raster": (8, 8), "pattern": 64, **options}
    counted, expected = SimulatedScan(**known), SimulatedScan(**{**known, "photons": None})
    write_scan(str(tmp_path / "scan.zarr"), counted.scan, counted)
    numbers = np.arange(64)
    light = expected.patterns(numbers) * (options["photons"] / 1e6)
    true = np.square(np.sqrt(counted.patterns(numbers)) - np.sqrt(light)).mean()
    assert photon_loss_of(str(tmp_path / "scan.zarr")) == pytest.approx(true, rel=0.06)
