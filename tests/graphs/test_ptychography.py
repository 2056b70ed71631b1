"""Ptychography: the object of a known scan, the same bits for any number of workers and after a kill, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
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
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.scans import convert
from halotile.storage.scans.scan import export_result
from halotile.tasks.groups.training.curve import read_curve
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.cases import thorough
from tests.faults import until
from tests.graphs.scans import STAGES, job, run, small_scan, write_small_scan

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
def test_the_object_of_a_known_scan_is_found(folder: Path, stages: list[dict[str, Any]]) -> None:
    done = run(job(folder, stages=stages, model={"refine": ["object", "probe"]}), "--workers", "2")
    assert done.exit_code == 0, done.output
    assert object_error(folder / "result.cxi", small_scan()) < 0.05


@pytest.mark.thorough
def test_the_result_has_the_same_bits_for_any_number_of_workers(folder: Path) -> None:
    results = []
    for workers in (1, 2, 3, 4):
        done = run(job(folder, f"{workers}.cxi"), "--workers", str(workers))
        assert done.exit_code == 0, done.output
        results.append((folder / f"{workers}.cxi").read_bytes())
    assert all(result == results[0] for result in results)
    with h5py.File(folder / "1.cxi") as file:
        losses = file["loss"][:]
        assert file["entry_1/image_1"].attrs["pixel_size"] == pytest.approx(2 * [1e-10 / (32 * 5e-5)])
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 3


def test_patterns_beyond_memory_give_the_same_bits_for_any_number_of_workers(folder: Path) -> None:
    """A chunk of these patterns has all of them: the scan is written again with chunks of four."""
    shutil.rmtree(folder / "scan.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "CHUNK_BYTES", 4 * 32 * 32 * 4)
        write_small_scan(folder)
    results = []
    stages = [*STAGES, {"solver": "lbfgs", "epochs": 4}]
    for workers in (1, 2, 3):
        done = run(job(folder, f"{workers}.cxi", window=4, stages=stages, held_out=0.1), "--workers", str(workers))
        assert done.exit_code == 0, done.output
        results.append((folder / f"{workers}.cxi").read_bytes())
    assert all(result == results[0] for result in results)
    with h5py.File(folder / "1.cxi") as file:
        assert file["loss"][-1] < file["loss"][0] / 3


def test_the_probe_stays_in_its_support(folder: Path) -> None:
    assert run(job(folder, model={"support": 9, "modes": 2}), "--workers", "1").exit_code == 0
    with h5py.File(folder / "result.cxi") as file:
        light = np.abs(file["probe"][:]).sum(0)
    row, column = np.indices(light.shape) - 16
    inside = np.hypot(row, column) <= 9
    assert np.array_equal(light > 1e-6 * light.max(), inside)


def test_a_result_is_exported_as_images(folder: Path) -> None:
    assert run(job(folder, stages=STAGES[:1], model={"modes": 2}), "--workers", "1").exit_code == 0
    result, images = str(folder / "result.cxi"), folder / "images.zarr"
    done = CliRunner().invoke(app, ["export", result, str(images), "--unwrap"])
    assert done.exit_code == 0, done.output
    with h5py.File(result) as file:
        found, probe = file["object"][:], file["probe"][:]
    modulus = halotile.open_source(images / "object_modulus")
    assert np.array_equal(modulus[:], np.abs(found).astype(np.float32))
    assert modulus.scale == pytest.approx(2 * [1e6 * 1e-10 / (32 * 5e-5)])
    assert modulus.units == ("micrometer", "micrometer")
    phase: NDArray[Any] = halotile.open_source(images / "object_phase")[:]
    assert np.allclose(np.exp(1j * phase), found / np.abs(found), atol=1e-5)
    assert np.array_equal(halotile.open_source(images / "probe_phase")[:], np.angle(probe))
    assert CliRunner().invoke(app, ["export", result, str(images)]).exit_code != 0
    for options in ((str(images), "--level", "1"), (str(folder / "a.tif"), "--unwrap")):
        refused = CliRunner().invoke(app, ["export", result, *options, "--overwrite"])
        assert refused.exit_code == 2
        assert "eave" in refused.output
    assert CliRunner().invoke(app, ["export", result, str(images), "--overwrite"]).exit_code == 0


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
def test_the_resolution_is_that_of_two_halves(folder: Path) -> None:
    stages = [{"epochs": 40, "lr": 0.03, "batch": 8}, {"epochs": 10, "lr": 0.003, "batch": 16}]
    done = run(job(folder, "both.cxi", stages=stages, resolution=True), "--workers", "2")
    assert done.exit_code == 0, done.output
    assert run(job(folder, "one.cxi", stages=stages), "--workers", "1").exit_code == 0
    with h5py.File(folder / "both.cxi") as both, h5py.File(folder / "one.cxi") as one:
        assert np.array_equal(both["object"][:], one["object"][:])
        assert np.array_equal(both["loss"][:], one["loss"][:])
        resolution = float(both["entry_1/process_1/resolution"][()])
        pixel = both["entry_1/image_1"].attrs["pixel_size"][0]
    assert pixel < resolution < 3 * pixel
    last = RunDirectory(folder / "both.cxi.run").read_output_iterations()[-1]
    assert last["resolution"] == pytest.approx(resolution)
    assert "resolution" in CliRunner().invoke(app, ["status", str(folder / "both.cxi")]).output
    sheet = str(folder / "sheet.png")
    for _ in range(2):
        done = CliRunner().invoke(app, ["export", str(folder / "both.cxi"), sheet])
    assert "--overwrite" in done.output
    assert CliRunner().invoke(app, ["export", str(folder / "one.cxi"), sheet, "--overwrite"]).exit_code == 0
    with h5py.File(folder / "both.cxi", "a") as damaged:
        del damaged["entry_1/process_1/ring_threshold"]
    without = CliRunner().invoke(app, ["export", str(folder / "both.cxi"), sheet, "--overwrite"])
    assert without.exit_code == 0, without.output
    assert Path(sheet).read_bytes()[1:4] == b"PNG"


@pytest.mark.thorough
@pytest.mark.parametrize("epochs", [100, thorough(240)])
def test_a_killed_rank_and_a_killed_run_go_on_to_the_same_bits(folder: Path, epochs: int) -> None:
    stages, more = [{"epochs": epochs, "lr": 0.02, "batch": 6}], {"resolution": True, "held_out": 0.05}
    assert run(job(folder, "whole.cxi", stages=stages, **more), "--workers", "2").exit_code == 0
    path = job(folder, "killed.cxi", stages=stages, **more)
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
    assert run(path, "--workers", "1").exit_code == 0
    assert (folder / "killed.cxi").read_bytes() == (folder / "whole.cxi").read_bytes()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"stages": []}, "stages: is empty"),
        ({"stages": [{"epochs": 0}]}, r"stages\[0\].epochs: 0 is too small"),
        ({"stages": [{"epochs": 1, "alpha": 0}]}, "write more than 0, such as 0.1"),
        ({"stages": [{"epochs": 1, "lr_factors": {"objekt": 1.0}}]}, "names objekt"),
        ({"stages": [{"epochs": 1, "solver": "sgd"}]}, "begin with 0.001"),
        ({"stages": [{"epochs": 1, "solver": "rpie", "amsgrad": True}]}, "is for solver: adam, and"),
        ({"held_out": 0.7}, "write 0, or a share up to 0.5"),
        (
            {"held_out": 0.05, "model": {"import": "fancy:Fancy"}},
            "held_out: is for the model of halotile; leave it out",
        ),
        ({"stages": [{"epochs": 1, "solver": "lbfgs", "batch": 20}]}, "uses all patterns at once; leave it out"),
        ({"stages": [{"epoch": 1}]}, "did you mean epochs"),
        (
            {"model": {"loss": "poisson_nll"}, "stages": [{"epochs": 1, "solver": "rpie"}]},
            "is for loss: amplitude_mse, and the loss is poisson_nll",
        ),
        (
            {"model": {"refine": ["object"]}, "stages": [{"epochs": 1, "lr_factors": {"probe": 1}}]},
            "names probe, which is not refined",
        ),
        ({"model": {"field": "near", "focus": "-3 mm"}}, "a beam in a near field diverges"),
        ({"model": {"field": "near", "focus": "3 parsnip"}}, "such as 3.65 mm"),
        ({"model": {"refine": ["probe"]}}, "does not name the object"),
        ({"stages": [{"epochs": 1, "subset": [0, 99]}]}, "subset names 99, and the scan has patterns 0 to 63"),
        ({"stages": [{"epochs": 1, "subset": []}]}, "subset names no pattern"),
        ({"stages": [{"epochs": 1, "subset": [7]}], "resolution": True}, "Write resolution: false"),
        ({"window": 4, "stages": [{"epochs": 1, "batch": 3}]}, "Write a batch of 4 or more"),
        ({"run": {"workers": 5}}, "a batch has 4 parts"),
        ({"run": {"memory_per_worker": "100MiB"}}, "Write run.memory_per_worker"),
    ],
)
def test_mistakes_are_told_with_what_to_write(folder: Path, parts: dict[str, Any], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", str(job(folder, **parts))])
    assert done.exit_code in (2, 5)
    assert re.search(said, done.output), done.output


def test_a_file_that_is_no_scan_is_refused(folder: Path) -> None:
    path = job(folder)
    path.write_text(path.read_text().replace("scan.zarr", "scan.zarr/patterns"))
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code == 4
    assert "recon-cli convert" in done.output


def first_and_last_loss(path: Path) -> tuple[float, float]:
    """Losses of the first and of the last epoch of a result."""
    with h5py.File(path) as file:
        losses = file["loss"][()]
    return float(losses[0]), float(losses[-1])


def test_a_reconstruction_begins_with_the_result_of_another(folder: Path) -> None:
    model = {"modes": 2, "refine": ["object", "probe", "background", "positions", "intensities"]}
    assert run(job(folder, "first.cxi", model=model)).exit_code == 0
    _, reached = first_and_last_loss(folder / "first.cxi")
    with h5py.File(folder / "first.cxi") as first, h5py.File(folder / "probe.h5", "w") as file:
        file["probe"] = first["probe"][()]
    for name, start in (("again.cxi", "first.cxi"), ("light.cxi", "probe.h5")):
        path = job(folder, name, model=model, stages=[{"epochs": 1, "lr": 0.001, "batch": 16}])
        content = json.loads(path.read_text())
        content["input"]["start"] = str(folder / start)
        path.write_text(json.dumps(content))
        done = run(path)
        assert done.exit_code == 0, done.output
        with h5py.File(folder / name) as file, h5py.File(folder / "first.cxi") as first:
            before, after = first["probe"][()], file["probe"][()]
        if start == "probe.h5":  # of any unit
            after *= np.linalg.norm(before) / np.linalg.norm(after)
        assert np.abs(after - before).max() < 0.02 * np.abs(before).max()
    begun, _ = first_and_last_loss(folder / "again.cxi")
    assert 0.5 * reached < begun < reached  # the loss of a pattern is that before its step
    scan = halotile.ptychography.open(folder / "scan.zarr", modes=2, start=folder / "first.cxi")
    with h5py.File(folder / "first.cxi") as first:
        np.testing.assert_array_equal(scan.object, first["object"][()])
        np.testing.assert_allclose(scan.positions, first["entry_1/process_1/first_pixel"][()], atol=1e-5)


@pytest.mark.thorough
def test_a_beam_that_varies_is_begun_with_and_a_result_is_not_written_over_its_start(folder: Path) -> None:
    model: dict[str, Any] = {"variations": 1, "refine": ["object", "probe"]}
    assert run(job(folder, "first.cxi", model=model)).exit_code == 0
    scan = halotile.ptychography.open(folder / "scan.zarr", start=folder / "first.cxi", **model)
    scan.save(folder / "same.cxi")
    with h5py.File(folder / "first.cxi") as first, h5py.File(folder / "same.cxi") as same:
        for name in ("object", "probe", "entry_1/process_1/probe_variations", "entry_1/process_1/probe_shares"):
            np.testing.assert_allclose(same[name][()], first[name][()], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="its variations has shape"):
        halotile.ptychography.open(folder / "scan.zarr", start=folder / "first.cxi", **model | {"variations": 2})
    path = job(folder, "first.cxi", model=model)
    content = json.loads(path.read_text())
    content["input"]["start"], content["output"]["overwrite"] = content["output"]["path"], True
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["plan", str(path), "--fresh"])
    assert done.exit_code != 0
    assert "that is the input" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("start", "parts", "said"),
    [
        ({"object": np.ones((3, 3))}, {}, "its object has shape [3, 3], and this reconstruction has"),
        ({"object": np.ones((2, 61, 61))}, {}, "its object has shape [2, 61, 61]"),
        ({"obj": np.ones((2, 61, 61))}, {}, "its obj has shape [2, 61, 61], and a start is one object"),
        ({"probe": np.ones((2, 8, 8))}, {}, "its probe has shape [2, 8, 8]"),
        ({"probe": np.full((32, 32), np.nan)}, {}, "its probe has values that are not finite"),
        ({"image": np.ones((3, 3))}, {}, "has neither an object nor a probe to begin with"),
        ({"probe": np.ones((32, 32))}, {"resolution": True}, "whose halves would begin with the same object"),
    ],
)
def test_what_cannot_be_begun_with_is_refused(folder: Path, start: Any, parts: Any, said: str) -> None:
    with h5py.File(folder / "start.h5", "w") as file:
        for name, values in start.items():
            file[name] = values
    path = job(folder, **parts)
    content = json.loads(path.read_text())
    content["input"]["start"] = str(folder / "start.h5")
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code in (2, 3, 4)
    assert said in " ".join(done.output.split())
