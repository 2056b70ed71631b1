"""Measured patterns beside those that a reconstruction expects: from Python, in the result, on the sheet, in the outcome, and by CDTools."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.cli.screens import scan_views
from halotile.errors import ConfigError
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import read_result
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.graphs.scans import job, small_scan, words, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def begun_with_truth(folder: Path, truth: SimulatedScan, **model: Any) -> Any:
    """A scan that is opened with its true object, probe and positions; patterns begin 4 pixels from the rim of either object."""
    with h5py.File(folder / "start.h5", "w") as file:
        rows, columns = halotile.ptychography.open(folder / "scan.zarr", margin=4, **model).object.shape
        image = np.ones((rows, columns), np.complex64)
        known = truth.image[: rows - 2, : columns - 2]
        image[2 : 2 + len(known), 2 : 2 + len(known[0])] = known
        file["object"], file["probe"] = image, truth.probe
    return halotile.ptychography.open(folder / "scan.zarr", margin=4, start=folder / "start.h5", **model)


@pytest.mark.parametrize("field", ["far", "near"])
def test_patterns_of_the_true_object_are_the_measured_ones(tmp_path: Path, field: Any) -> None:
    """But for the faint background of the first guess."""
    truth = SimulatedScan(field=field, raster=(4, 4), pattern=32, step=3.0, modes=2)
    write_scan(str(tmp_path / "scan.zarr"), truth.scan, truth)
    found = begun_with_truth(tmp_path, truth, field=field, modes=2).compare([11, 3])
    assert found.numbers.tolist() == [11, 3]
    assert np.array_equal(found.measured, truth.patterns(np.array([11, 3])))
    assert np.abs(found.simulated - found.measured).max() < 2e-3 * found.measured.max()
    assert found.loss.max() < 1e-3 * found.measured.mean()


def test_the_losses_of_all_patterns_are_that_of_the_next_epoch(folder: Path) -> None:
    """Of one batch, before its step; and some at a time give the values of all at once."""
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with pytest.raises(ConfigError, match=r"Write numbers such as \[0, 1\]"):
        scan.compare()
    before = scan.compare(range(64))
    alone = scan.compare([63])
    assert np.allclose(before.simulated[63], alone.simulated[0], rtol=1e-5)
    with halotile.ptychography.SGD(scan) as sgd:
        (loss,) = sgd.optimize(1, lr=1e-9, batch_size=64)
    assert loss == pytest.approx(before.loss.mean(), rel=1e-5)
    order = before.loss.argsort()
    assert np.array_equal(scan.compare().numbers, order[[0, 32, 63]])
    with pytest.raises(ConfigError, match=r"no pattern 64\. Write some of its 64, which are from 0 to 63"):
        scan.compare([3, 64])


def test_pixels_that_do_not_count_are_nan_and_without_loss(folder: Path) -> None:
    mask = np.ones((32, 32), bool)
    mask[5, 7] = False
    scan = replace(small_scan().scan, mask=mask)
    write_scan(str(folder / "scan.zarr"), scan, small_scan(), overwrite=True)
    found = halotile.ptychography.open(folder / "scan.zarr").compare([0])
    assert np.argwhere(np.isnan(found.measured[0])).tolist() == [[5, 7]]
    expected = np.square(np.sqrt(found.measured) - np.sqrt(found.simulated))
    assert found.loss[0] == pytest.approx(np.nanmean(expected), rel=1e-4)


def test_a_result_has_the_patterns_that_tell_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best, the median and the worst: on the sheet, and the worst ones in the outcome; with one that was spoilt as the worst."""
    patterns = small_scan().patterns(np.arange(64))
    patterns[27] = patterns[27, ::-1]
    write_scan(str(folder / "scan.zarr"), small_scan().scan, patterns, overwrite=True)
    path = str(job(folder, model={"modes": 2}))
    done = CliRunner().invoke(app, ["run", path, "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert "worst patterns 27, " in words(done)
    result = read_result(str(folder / "result.cxi"))
    with h5py.File(folder / "result.cxi") as file:
        losses = file["entry_1/process_1/pattern_loss"][:]
    assert losses.argmax() == 27
    assert result.compared is not None
    assert result.compared.numbers.tolist() == losses.argsort(kind="stable")[[0, 32, 63]].tolist()
    scan = halotile.ptychography.open(folder / "scan.zarr", modes=2, start=folder / "result.cxi")
    again = scan.compare(result.compared.numbers.tolist())
    assert np.allclose(again.simulated, result.compared.simulated, rtol=1e-3, atol=1e-3 * again.simulated.max())
    drawn: list[Any] = []
    monkeypatch.setattr(scan_views, "_comparison", lambda axes, result, n: drawn.append(axes.get_title()))
    sheet = CliRunner().invoke(app, ["export", str(folder / "result.cxi"), str(folder / "sheet.png")])
    assert sheet.exit_code == 0, sheet.output
    assert drawn[2].startswith("pattern 27, largest amplitude_mse: ")


def test_compared_patterns_stand_apart_with_their_names_and_scales(folder: Path) -> None:
    path = str(job(folder))
    done = CliRunner().invoke(app, ["run", path, "--workers", "1"])
    assert done.exit_code == 0, done.output
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    scan_views._comparison(axes, read_result(str(folder / "result.cxi")), 0)
    edges = [image.get_extent()[:2] for image in axes.images]
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(edges))
    names = {label.get_text(): label.get_position()[0] for label in axes.get_xticklabels()}
    assert list(names) == ["measured", "simulated", "difference"]
    assert list(names.values()) == [sum(both) / 2 for both in edges]
    assert [bar.get_xlabel() for bar in axes.child_axes] == ["root of counts", "photon noise"]


@pytest.mark.parametrize(
    ("field", "model"),
    [("far", {"modes": 2}), ("far", {"oversampling": 2}), ("near", {}), ("far", {"variations": 1})],
    ids=["far", "oversampled", "near", "variations"],
)
def test_cdtools_opens_a_result(tmp_path: Path, field: Any, model: dict[str, Any]) -> None:
    """Its model expects the same patterns, and sees the same positions; that of a probe which varies is not there."""
    data, models = (pytest.importorskip(f"cdtools.{name}") for name in ("tools.data", "models"))
    truth = SimulatedScan(field=field, raster=(4, 4), pattern=32, step=3.0, photons=1e4)
    mask = np.ones((32, 32), bool)
    mask[5, 7] = False
    write_scan(str(tmp_path / "scan.zarr"), replace(truth.scan, mask=mask), truth)
    scan = halotile.ptychography.open(
        tmp_path / "scan.zarr",
        field=field,
        refine=["object", "probe", "background", "positions", "intensities"],
        **model,
    )
    with halotile.ptychography.Adam(scan) as adam:
        list(adam.optimize(4, lr=0.02, batch_size=8))
    scan.save(tmp_path / "result.cxi")
    found = data.h5_to_nested_dict(str(tmp_path / "result.cxi"))
    assert np.array_equal(found["obj"], scan.object)
    assert np.array_equal(found["probe"], scan.probe)
    assert np.array_equal(found["background"], scan.background)
    pixels = np.linalg.pinv(found["obj_basis"]) @ (found["translations"] - found["original_translations"]).T
    moved = scan.positions - halotile.ptychography.open(tmp_path / "scan.zarr", field=field, **model).positions
    assert np.allclose(pixels.T, moved, atol=1e-5)
    assert np.abs(moved).max() > 1e-3
    assert ("state_dict" in found) == ("variations" not in model)
    if "variations" in model:
        return
    opened = models.FancyPtycho.from_results_h5(str(tmp_path / "result.cxi"))
    numbers = torch.arange(16)
    with torch.no_grad():
        simulated = opened(numbers, opened.original_translations[numbers]).numpy()
    expected = scan.compare(range(16)).simulated
    assert np.allclose(simulated, expected, rtol=1e-3, atol=1e-4 * expected.max())
    assert np.array_equal(opened.mask.numpy(), mask)
    again = halotile.ptychography.open(tmp_path / "scan.zarr", field=field, start=tmp_path / "result.cxi", **model)
    assert np.array_equal(again.object, scan.object)


@pytest.mark.parametrize("loss", ["amplitude_mse", "intensity_mse", "poisson_nll"])
def test_the_worst_pattern_is_the_one_that_fits_least_however_bright_it_is(tmp_path: Path, loss: Any) -> None:
    truth = SimulatedScan(raster=(4, 4), pattern=32, step=3.0)
    light = np.geomspace(0.01, 10, 16)
    patterns = np.random.default_rng(0).poisson(truth.patterns(np.arange(16)) * light[:, None, None])
    patterns[2] = np.roll(patterns[2], 1, 0)
    # Light that the true probe has: intensities are relative to their mean.
    write_scan(
        str(tmp_path / "scan.zarr"), replace(truth.scan, intensities=light), (patterns / light.mean()).astype("float32")
    )
    scan = begun_with_truth(tmp_path, truth, loss=loss)
    with halotile.ptychography.SGD(scan) as sgd:
        list(sgd.optimize(1, lr=1e-12, batch_size=16))
    found = scan.compare()
    assert found.numbers[2] == 2
    assert np.array_equal(scan.compare(range(16)).loss.argsort()[[0, 8, 15]], found.numbers)
