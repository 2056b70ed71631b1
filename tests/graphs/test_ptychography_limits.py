"""Ptychography: mistakes are refused with what to write; and measured patterns beside those that a model expects, of halotile, CDTools or a user."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halotile
from halotile import DistributedContext
from halotile.cli.main import app
from halotile.cli.screens import scan_views
from halotile.errors import ConfigError, Diverged, HalotileError, InputError, OutputRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.storage.scans import convert
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.formats import encode_cxi
from halotile.storage.scans.scan import open_scan, read_result
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography import program
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.faults import REPOSITORY
from tests.graphs.scans import begin_with, compute, job, opened, plan, small_scan, words, write_small_scan

pytestmark = [pytest.mark.cluster]


ONE = {"epochs": 1}
OWN = {"import": "fancy:Fancy"}
JOBS: list[tuple[dict[str, Any], str]] = [
    ({"stages": []}, "stages: is empty"),
    ({"stages": [{"epochs": 0}]}, "stages[0].epochs: 0 is too small"),
    ({"stages": [{**ONE, "alpha": 0}]}, "write more than 0, such as 0.1"),
    ({"stages": [{**ONE, "lr_factors": {"objekt": 1.0}}]}, "names objekt"),
    ({"stages": [{**ONE, "solver": "sgd"}]}, "begin with 0.001"),
    ({"stages": [{**ONE, "solver": "rpie", "amsgrad": True}]}, "is for solver: adam, and"),
    ({"stages": [{**ONE, "momentum": 0.9}]}, "stages[0].momentum: is for solver: sgd, and the solver is adam; leave it out"),
    ({"stages": [{**ONE, "solver": "sgd", "lr": 0.1, "betas": [0.5, 0.9]}]}, "is for solver: adam or rpie"),
    ({"stages": [{**ONE, "alpha": 0.5}]}, "is for solver: rpie"),
    ({"stages": [{**ONE, "betas": [0.9, 1.0]}]}, "write two numbers, each 0 or more and less than 1"),
    ({"held_out": 0.7}, "write 0, or a share up to 0.5"),
    ({"held_out": 0.05, "model": OWN}, "held_out: is for the model of halotile; leave it out"),
    ({"model": OWN | {"modes": 2}}, "write it in options"),
    ({"model": OWN, "stages": [{**ONE, "solver": "rpie"}]}, "write adam"),
    ({"model": OWN, "stages": [{**ONE, "smoothness": 0.1}]}, "smoothness: is for the model of halotile; leave it out"),
    ({"model": OWN, "resolution": True}, "is not there for a model of your own"),
    ({"model": OWN}, "add --allow-import"),
    ({"stages": [{**ONE, "solver": "lbfgs", "batch": 20}]}, "uses all patterns at once; leave it out"),
    ({"stages": [{"epoch": 1}]}, "did you mean epochs"),
    ({"model": {"loss": "poisson_nll"}, "stages": [{**ONE, "solver": "rpie"}]}, "is for loss: amplitude_mse, and the"),
    ({"model": {"refine": ["object"]}, "stages": [{**ONE, "lr_factors": {"probe": 1}}]}, "names probe, which is not"),
    ({"model": {"field": "near", "focus": "-3 mm"}}, "a beam in a near field diverges"),
    ({"model": {"field": "near", "focus": "3 parsnip"}}, "such as 3.65 mm"),
    ({"model": {"refine": ["probe"]}}, "does not name the object"),
    ({"stages": [{**ONE, "subset": [0, 99]}]}, "subset names 99, but the scan has patterns with numbers up to 63"),
    ({"stages": [{**ONE, "subset": []}]}, "subset names no pattern"),
    ({"stages": [{**ONE, "subset": [7]}], "resolution": True}, "Write resolution: false"),
    ({"window": 4, "stages": [{**ONE, "batch": 3}]}, "Write a batch of 4 or more"),
    ({"run": {"workers": 5}}, "a batch has 4 parts"),
    ({"run": {"memory_per_worker": "100MiB"}}, "Write run.memory_per_worker"),
    ({"start": {"object": np.ones((3, 3))}}, "its object has shape [3, 3], and this reconstruction has"),
    ({"start": {"object": np.ones((2, 61, 61))}}, "its object has shape [2, 61, 61]"),
    ({"start": {"obj": np.ones((2, 61, 61))}}, "its obj has shape [2, 61, 61], and a start is one object"),
    ({"start": {"probe": np.ones((2, 8, 8))}}, "its probe has shape [2, 8, 8]"),
    ({"start": {"probe": np.full((32, 32), np.nan)}}, "its probe has values that are not finite"),
    ({"start": {"image": np.ones((3, 3))}}, "has neither an object nor a probe to begin with"),
    ({"start": {"probe": np.ones((32, 32))}, "resolution": True}, "whose halves would begin with the same object"),
]  # fmt: skip


def test_mistakes_are_told_with_what_to_write(folder: Path) -> None:
    for parts, said in JOBS:
        start = begin_with(folder, parts["start"]) if "start" in parts else None
        done = plan(job(folder, **parts | {"start": start}))
        assert done.exit_code in (2, 3, 4, 5)
        assert said in words(done)
    assert not (folder / "result.cxi.run").exists()


def test_a_plan_shows_the_focus_and_needs_disk_for_checkpoints_of_its_solvers(folder: Path) -> None:
    assert "far field, -2 um from the focus, 1 mode" in words(plan(job(folder, model={"focus": "-2 um"})))
    needed = {}
    for solvers in ("adam", "lbfgs", "adam lbfgs"):
        stages = [{"solver": solver, "epochs": 1} for solver in solvers.split()]
        needed[solvers] = halotile.plan(job(folder, stages=stages)).scratch_bytes
    assert needed["lbfgs"] == 5 * needed["adam"]
    assert needed["adam lbfgs"] > needed["lbfgs"]


STARTS: list[tuple[dict[str, Any] | bytes, dict[str, Any], str]] = [
    ({"probe/data": np.ones((32, 32))}, {}, "no array of numbers: it is a group"),
    ({"probe": "round"}, {}, "neither an object nor a probe|no array of numbers"),
    ({"probe": np.zeros((32, 32))}, {}, "its probe is 0 everywhere"),
    ({"probe": np.pad([[1.0]], (0, 31))}, {"support": 5.0}, "0 everywhere within its support"),
    (b"a probe", {}, "is no HDF5 file"),
]


def test_a_start_that_is_no_array_of_light_and_what_cannot_be_opened_are_refused(folder: Path) -> None:
    for (name, value), said in zip(OPENED.items(), REFUSED, strict=True):
        with pytest.raises(ConfigError, match=said):
            opened(folder, **{name: value})
    for start, options, said in STARTS:
        path = folder / "start.h5"
        if isinstance(start, bytes):
            path.write_bytes(start)
        else:
            begin_with(folder, start)
        with pytest.raises(InputError, match=said):
            _ = opened(folder, path, **options).probe


OPENED: dict[str, Any] = {"import_": "own:build", "mode": 2, "window": 16}
REFUSED = ("import is for a job", "did you mean modes", "Write window: 0")


SET: list[tuple[str, Any, str]] = [
    ("probe", lambda old: None, "probe is no array of"),
    ("probe", lambda old: 0 * old, "0 everywhere"),
    ("probe", lambda old: np.full_like(old, np.nan), "has NaN"),
    ("probe", lambda old: np.pad([[[1]]], ((0, 0), (0, 31), (0, 31))), "probe is 0 everywhere"),
    ("object", lambda old: [[1], [1, 2]], "object is no array of"),
    ("object", lambda old: np.ones((3, 3)), "shape"),
    ("background", lambda old: "dark", "background is no array of"),
    ("background", lambda old: -1 - old, "Write 0 or more"),
    ("positions", lambda old: old * 1j, "positions is no array of"),
    ("positions", lambda old: old + 100, "64 of 64 positions would be beyond the object"),
    ("positions", lambda old: old[:3], r"needs \[64, 2\]"),
]


def test_what_is_set_has_to_fit_and_arrays_cannot_be_written_into(folder: Path) -> None:
    scan = opened(folder, support=5.0)
    with pytest.raises(AttributeError, match="a scan has no objekt"):
        scan.objekt = 1
    for name, value, said in SET:
        with pytest.raises(ConfigError, match=said):
            setattr(scan, name, value(getattr(scan, name)))
    scan.probe = np.ones_like(scan.probe)
    assert abs(scan.probe[0, 16, 16]) > 0
    assert scan.probe[0, 0, 0] == 0, "outside of its support"
    for array in (scan.object, scan.probe, scan.positions, scan.background):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 5
        own = array.copy()
        own[...] = 5
    assert not (scan.object == 5).any()
    scan.object = 2 * scan.object
    assert np.all(scan.object == 2)


LOOPS: list[tuple[dict[str, Any], str]] = [
    *(({"lr_factors": {"object": factor}}, "write 0 or more") for factor in (-1.0, float("nan"), float("inf"))),
    ({"subset": [0.5]}, r"integers \(pattern numbers\)"),
    ({"subset": [64]}, "subset names 64"),
    ({"epochs": 0}, r"stages.*epochs"),
]


def test_what_cannot_be_optimized_is_told(
    folder: Path, ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = opened(folder)
    for options, said in LOOPS:
        with pytest.raises(ConfigError, match=said):
            next(halotile.ptychography.Adam(scan, context=ctx).optimize(**({"epochs": 1} | options)))
    with pytest.raises(ConfigError, match="slots=9"):
        halotile.ptychography.SGD(scan, workers=9)
    halves = opened(folder, resolution=True)
    even = [int(n) for n in halves.recipe.scan.numbers[::2]]
    with pytest.raises(ConfigError, match="a larger subset"):
        next(halotile.ptychography.Adam(halves, context=ctx).optimize(1, subset=even))
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4 * 24 * 24 * 4)  # of four patterns
    halotile.ptychography.simulate(folder / "scan.zarr", overwrite=True, raster=(5, 5), pattern=24, step=5.0)
    with pytest.raises(InputError, match="was written to since the scan was opened"):
        next(halotile.ptychography.Adam(scan, context=ctx).optimize(1))
    scan = opened(folder, loss="poisson_nll", window=4, resolution=True, refine=("object", "probe"))
    for solver, options, said in (
        (halotile.ptychography.RPIE, {}, "for loss: amplitude_mse"),
        (halotile.ptychography.Adam, {"batch_size": 2}, "Write a batch of 4 or more"),
        (halotile.ptychography.Adam, {"lr_factors": {"positions": 0.5}}, "which is not refined"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(solver(scan, context=ctx).optimize(1, **options))
    with pytest.raises(ConfigError, match="its halves would begin with the same"):
        scan.object = scan.object


def test_a_recording_is_not_replaced_by_a_result(folder: Path) -> None:
    scan = opened(folder)
    with h5py.File(folder / "raw.cxi", "w") as file:
        file["entry_1/data_1/data"] = np.ones((2, 2))
    with h5py.File(folder / "truth.h5", "w") as file:
        file["object"], file["probe"] = np.ones((2, 2)), np.ones((2, 2))
    (folder / "empty.cxi").touch()
    said = dict.fromkeys(("raw.cxi", "truth.h5", "empty.cxi"), "holds no result, and is not replaced")
    for name, words_of in (said | {"none/result.cxi": "is no folder", "result.npy": "does not end with .cxi"}).items():
        with pytest.raises(ConfigError, match=words_of):
            scan.save(folder / name)
    for _ in range(2):
        scan.save(folder / "result.cxi")


SGD = {"solver": "sgd", "epochs": 1, "batch": 64}
FIRST = [{"epochs": 4, "lr": 0.02, "batch": 8}, {"epochs": 2, "lr": 0.01, "batch": 16}]
SPOILT: list[tuple[list[dict[str, Any]], str]] = [
    ([{**SGD, "lr": 1000}], "Write a smaller lr in that stage"),
    # Though its loss is far below a thousand times that of the first guess.
    ([{"epochs": 10, "lr": 0.05, "batch": 8}, {**SGD, "lr": 1}], "after the last step of a stage, and was"),
    ([*FIRST, {"epochs": 5, "lr": 1, "batch": 12}], "at the end of a stage, and was"),
    ([{"solver": "rpie", "epochs": 2, "batch": 6, "lr": 30.0}], "Write a smaller lr"),
    # From the first step on, and no worse later.
    ([{"epochs": 2, "batch": 6, "lr": 100.0}], "Write a smaller lr"),
]


@pytest.mark.parametrize(("stages", "said"), SPOILT)
def test_a_step_too_far_is_no_result(folder: Path, cluster: RunningCluster, stages: Any, said: str) -> None:
    with pytest.raises(Diverged, match=said):
        compute(job(folder, stages=stages), cluster)
    assert not (folder / "result.cxi").exists() or (folder / "result.cxi").stat().st_size == 0


def test_a_likelihood_that_rises_a_little_is_no_fault(folder: Path, cluster: RunningCluster) -> None:
    stages = [{"epochs": 20, "lr": 0.005}, {"epochs": 4, "lr": 0.05}, {"epochs": 4, "lr": 0.005}]
    assert compute(job(folder, stages=stages, model={"loss": "poisson_nll"}), cluster)


@pytest.mark.parametrize("field", ["far", "near"])
def test_a_simulated_scan_is_that_of_its_truth(tmp_path: Path, field: Any) -> None:
    path = tmp_path / "scan.zarr"
    simulate = partial(halotile.ptychography.simulate, path, raster=(5, 4), pattern=24)
    truth = simulate(field=field, step=3.0, position_error=0.5)
    scan, patterns = open_scan(str(path))
    assert patterns.shape == (20, 24, 24)
    written = np.empty_like(truth.patterns(np.arange(20)))
    written[scan.numbers] = patterns[:]
    assert np.array_equal(written, truth.patterns(np.arange(20)))
    difference = opened(tmp_path, field=field, margin=2).positions - truth.places
    assert 0.2 < np.std(difference - difference.mean(0)) < 1.0
    with pytest.raises(OutputRefused):
        simulate()


SIMULATED: list[tuple[dict[str, Any], str]] = [
    ({"field": "middle"}, "far or near"),
    ({"raster": (0, 4)}, "such as"),
    ({"pattern": 4}, "8 or more"),
    ({"step": 0.0}, "above 0"),
    ({"modes": 5}, "1 to 4"),
    ({"photons": 0}, "or None"),
    ({"position_error": -1.0}, "at least 0"),
    ({"phase": -1.0}, "in radians"),
    ({"fotons": 3}, "did you mean photons"),
    ({"quality": 3}, "write one of field, raster"),
    ({"photons": "many"}, 'photons: "many" is not a number'),
]


def test_a_scan_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for options, said in SIMULATED:
        with pytest.raises(ConfigError, match=said):
            halotile.ptychography.simulate(tmp_path / "known.zarr", **options)
        assert not (tmp_path / "known.zarr").exists()


UNLIKELY: list[tuple[float, float, type[Exception], str]] = [
    (1e-16, 1.0, InputError, "Multiply the patterns"),
    (0.0, 1.0, InputError, "no pattern has a count"),
    (1.0, 1e-6, ConfigError, r"the positions span only.*--position-unit"),
    (1.0, 1e3, ConfigError, r"they do not overlap.*--position-unit"),
]


def test_patterns_far_below_any_count_and_positions_in_another_unit_are_refused(tmp_path: Path) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=24, step=3.0)
    for light, factor, error, said in UNLIKELY:
        scan = replace(simulated.scan, positions=factor * simulated.scan.positions)
        patterns = np.float32(light) * simulated.patterns(np.arange(16))
        write_scan(str(tmp_path / "scan.zarr"), scan, patterns, overwrite=True)
        with pytest.raises(error, match=said):
            _ = opened(tmp_path).object


@pytest.mark.parametrize("away", [0.5, 5, 1e6])
def test_a_position_far_from_all_others_is_named(tmp_path: Path, away: float) -> None:
    """So many sizes of a pattern away from where it belongs."""
    simulated = SimulatedScan(raster=(6, 6), pattern=32, step=3.0)
    scan = simulated.scan
    positions = scan.positions.copy()
    positions[17, 1] += away * 32 * scan.wavelength * scan.distance / (32 * scan.pixel[0])
    write_scan(str(tmp_path / "scan.zarr"), replace(scan, positions=positions), simulated)
    done = plan(job(tmp_path))
    assert (done.exit_code == 0) == (away < 2)
    expected = ["36 patterns"] if away < 2 else ["pattern 17 overlaps no other", "Correct its position"]
    assert [said for said in expected if said not in words(done)] == []


def test_scans_and_results_are_not_taken_for_each_other_or_for_images(folder: Path) -> None:
    star, out, scan = str(folder / "star.cxi"), str(folder / "out.cxi"), str(folder / "scan.zarr")
    arrays = {"image_1/data": np.ones((9, 9), complex), "image_2/data": np.ones((1, 4, 4), complex)}
    links = {"object": "image_1/data", "probe": "image_2/data"}
    Path(star).write_bytes(encode_cxi({**arrays, "process_1/first_pixel": np.zeros((4, 2))}, {}, links))
    for command, said in (
        (["info", star], "stored as a CXI file"),
        (["preview", star, out], "stored as a CXI file"),
        (["export", star, out], "stored as a CXI file"),
        (["preview", scan, "out.png"], f"recon-cli export {scan} FILE"),
        (["export", scan, str(folder / "out.tif")], f"recon-cli export {scan} FILE"),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert said in words(done)
    path = job(folder)
    text = path.read_text()
    for source, said in ((star, f"recon-cli convert {star} star.zarr"), (f"{scan}/patterns", "recon-cli convert")):
        path.write_text(text.replace(scan, source))
        done = plan(path)
        assert done.exit_code == 4
        assert said in words(done).replace("- ", "-")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def begun_with_truth(folder: Path, truth: SimulatedScan, **model: Any) -> Any:
    """A scan that is opened with its true object, probe and positions; patterns begin 4 pixels from the rim of either object."""
    rows, columns = opened(folder, margin=4, **model).object.shape
    image = np.ones((rows, columns), np.complex64)
    known = truth.image[: rows - 2, : columns - 2]
    image[2 : 2 + len(known), 2 : 2 + len(known[0])] = known
    return opened(folder, {"object": image, "probe": truth.probe}, margin=4, **model)


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
    scan = opened(folder)
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
    found = opened(folder).compare([0])
    assert np.argwhere(np.isnan(found.measured[0])).tolist() == [[5, 7]]
    expected = np.square(np.sqrt(found.measured) - np.sqrt(found.simulated))
    assert found.loss[0] == pytest.approx(np.nanmean(expected), rel=1e-4)


def test_a_result_has_the_patterns_that_tell_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best, the median and the worst: on the sheet, and the worst ones in the outcome; with one that was spoilt as the worst."""
    patterns = small_scan().patterns(np.arange(64))
    patterns[27] = patterns[27, ::-1]
    write_scan(str(folder / "scan.zarr"), small_scan().scan, patterns, overwrite=True)
    path = str(job(folder, model={"modes": 2}))
    done = CliRunner().invoke(app, ["run", path, "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "worst patterns 27, " in words(done)
    result = read_result(str(folder / "result.cxi"))
    with h5py.File(folder / "result.cxi") as file:
        losses = file["entry_1/process_1/pattern_loss"][:]
    assert losses.argmax() == 27
    assert result.compared is not None
    assert result.compared.numbers.tolist() == losses.argsort(kind="stable")[[0, 32, 63]].tolist()
    scan = opened(folder, modes=2, start=folder / "result.cxi")
    again = scan.compare(result.compared.numbers.tolist())
    assert np.allclose(again.simulated, result.compared.simulated, rtol=1e-3, atol=1e-3 * again.simulated.max())
    drawn: list[Any] = []
    monkeypatch.setattr(scan_views, "_comparison", lambda axes, result, n: drawn.append(axes.get_title()))
    sheet = CliRunner().invoke(app, ["export", str(folder / "result.cxi"), str(folder / "sheet.png")])
    assert sheet.exit_code == 0, sheet.output
    assert drawn[2].startswith("pattern 27, largest amplitude_mse: ")


RESULTS: list[Any] = [("far", {"modes": 2}), ("far", {"oversampling": 2}), ("near", {}), ("far", {"variations": 1})]


@pytest.mark.parametrize(("field", "model"), RESULTS)
def test_cdtools_opens_a_result(tmp_path: Path, field: Any, model: dict[str, Any]) -> None:
    """Its model expects the same patterns, and sees the same positions; that of a probe which varies is not there."""
    data, models = (pytest.importorskip(f"cdtools.{name}") for name in ("tools.data", "models"))
    truth = SimulatedScan(field=field, raster=(4, 4), pattern=32, step=3.0, photons=1e4)
    mask = np.ones((32, 32), bool)
    mask[5, 7] = False
    write_scan(str(tmp_path / "scan.zarr"), replace(truth.scan, mask=mask), truth)
    scan = opened(tmp_path, field=field, refine=["object", "probe", "background", "positions", "intensities"], **model)
    with halotile.ptychography.Adam(scan) as adam:
        list(adam.optimize(4, lr=0.02, batch_size=8))
    scan.save(tmp_path / "result.cxi")
    found = data.h5_to_nested_dict(str(tmp_path / "result.cxi"))
    assert np.array_equal(found["obj"], scan.object)
    assert np.array_equal(found["probe"], scan.probe)
    assert np.array_equal(found["background"], scan.background)
    pixels = np.linalg.pinv(found["obj_basis"]) @ (found["translations"] - found["original_translations"]).T
    moved = scan.positions - opened(tmp_path, field=field, **model).positions
    assert np.allclose(pixels.T, moved, atol=1e-5)
    assert np.abs(moved).max() > 1e-3
    assert ("state_dict" in found) == ("variations" not in model)
    if "variations" in model:
        return
    theirs = models.FancyPtycho.from_results_h5(str(tmp_path / "result.cxi"))
    numbers = torch.arange(16)
    with torch.no_grad():
        simulated = theirs(numbers, theirs.original_translations[numbers]).numpy()
    expected = scan.compare(range(16)).simulated
    assert np.allclose(simulated, expected, rtol=1e-3, atol=1e-4 * expected.max())
    assert np.array_equal(theirs.mask.numpy(), mask)
    again = opened(tmp_path, field=field, start=tmp_path / "result.cxi", **model)
    assert np.array_equal(again.object, scan.object)


@pytest.mark.parametrize("loss", ["amplitude_mse", "intensity_mse", "poisson_nll"])
def test_the_worst_pattern_is_the_one_that_fits_least_however_bright_it_is(tmp_path: Path, loss: Any) -> None:
    truth = SimulatedScan(raster=(4, 4), pattern=32, step=3.0)
    light = np.geomspace(0.01, 10, 16)
    patterns = np.random.default_rng(0).poisson(truth.patterns(np.arange(16)) * light[:, None, None])
    patterns[2] = np.roll(patterns[2], 1, 0)
    # Light that the true probe has: intensities are relative to their mean.
    patterns = (patterns / light.mean()).astype("float32")
    write_scan(str(tmp_path / "scan.zarr"), replace(truth.scan, intensities=light), patterns)
    scan = begun_with_truth(tmp_path, truth, loss=loss)
    with halotile.ptychography.SGD(scan) as sgd:
        list(sgd.optimize(1, lr=1e-12, batch_size=16))
    found = scan.compare()
    assert found.numbers[2] == 2
    assert np.array_equal(scan.compare(range(16)).loss.argsort()[[0, 8, 15]], found.numbers)


MODULES = '''
import torch

class Own(torch.nn.Module):
    """A far field by automatic differentiation, at whole pixels."""

    def __init__(self, scan, patterns, scale=1.0):
        super().__init__()
        count, rows, columns = patterns.shape
        pixel = [scan.wavelength * scan.distance / (n * p) for n, p in zip((rows, columns), scan.pixel)]
        places = torch.from_numpy((scan.positions - scan.positions.min(0)) / pixel).round().long()
        self.register_buffer("places", places)
        self.image = torch.nn.Parameter(torch.ones(*(places.amax(0) + torch.tensor([rows, columns])), dtype=torch.complex64))
        mean = torch.from_numpy(patterns[:].mean(0)).float()
        light = torch.fft.fftshift(torch.fft.ifft2(torch.fft.ifftshift(mean.sqrt()), norm="ortho"))
        self.norm = float(light.abs().max())
        self.beam = torch.nn.Parameter((scale * light / self.norm)[None].to(torch.complex64))
        self.frame = rows, columns

    def forward(self, numbers):
        rows, columns = self.frame
        seen = torch.stack([self.image[r : r + rows, c : c + columns] for r, c in self.places[numbers].tolist()])
        wave = torch.fft.fft2(self.probe[None] * seen[:, None], norm="ortho")
        return torch.fft.fftshift(wave.abs().square().sum(1), (-2, -1))

    @property
    def object(self):
        return self.image

    @property
    def probe(self):
        return self.norm * self.beam

def build(scan, patterns, **options):
    return Own(scan, patterns, **options)

class wrong(Own):
    def forward(self, numbers):
        return super().forward(numbers)[:, :, :-1]

class flat(Own):
    @property
    def probe(self):
        return super().probe[0]

def none(scan, patterns):
    return torch.nn.Linear(2, 2)
'''
FANCY = re.search(r"```text\n(# fancy\.py\n.*?)```", (REPOSITORY / "docs/pattern-models.md").read_text(), re.DOTALL)
STAGES: list[dict[str, Any]] = [{"epochs": 20, "lr": 0.03, "batch": 8}]


@pytest.fixture
def with_modules(tmp_path: Path) -> Path:
    """A folder with a far field of a small raster, on whole pixels, and modules of a user."""
    simulated = SimulatedScan(raster=(6, 6), pattern=24, step=3.0)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    (tmp_path / "own.py").write_text(MODULES)
    assert FANCY
    (tmp_path / "fancy.py").write_text(FANCY[1])
    return tmp_path


def of_module(folder: Path, name: str, module: str, options: Any = None, **parts: Any) -> Path:
    """A job with a module of one's own."""
    return job(folder, name, **{"stages": STAGES, "model": {"import": module, "options": options or {}}} | parts)


def test_a_module_is_refined_to_the_same_bits_by_any_workers(with_modules: Path, cluster: RunningCluster) -> None:
    folder, stages = with_modules, [*STAGES, {"solver": "lbfgs", "epochs": 3}]
    first, second = (
        compute(of_module(folder, f"{n}.cxi", "own:build", {"scale": 0.9}, stages=stages), cluster, n) for n in (1, 2)
    )
    assert first == second
    with h5py.File(folder / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        parameters = file["entry_1/process_1/parameters"]
        assert np.array_equal(parameters["image"][:], file["object"][:])
        assert sorted(parameters) == ["beam", "image"]
    assert (folder / "1.cxi.run" / "examples.png").exists()
    assert CliRunner().invoke(app, ["export", str(folder / "1.cxi"), str(folder / "sheet.png")]).exit_code == 0
    done = plan(folder / "1.cxi.yaml", "--allow-import")
    assert done.exit_code == 0, done.output


def test_a_module_is_spoilt_by_the_light_of_its_patterns(with_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "built_module", lambda recipe: torch.nn.Linear(2, 2))
    mean = SimulatedScan(raster=(6, 6), pattern=24, step=3.0).patterns(np.arange(36)).mean()
    for loss, power in (("amplitude_mse", 1), ("intensity_mse", 2)):
        recipe = opened(with_modules, loss=loss).recipe
        scale = program.ModuleRefinement(recipe, TorchGroup()).first_state().scale
        assert scale == pytest.approx(mean**power, rel=1e-4)


@pytest.mark.thorough
def test_a_model_of_cdtools_is_refined(with_modules: Path, cluster: RunningCluster) -> None:
    pytest.importorskip("cdtools")
    given = {"n_modes": 2, "n_obj_modes": 2, "probe_fourier_crop": 4, "obj_padding": 10}
    first, second = (compute(of_module(with_modules, f"{n}.cxi", "fancy:Fancy", given), cluster, n) for n in (1, 2))
    assert first == second
    with h5py.File(with_modules / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        assert file["entry_1/process_1/parameters/model.probe"].shape == (2, 16, 16)
        assert file["entry_1/process_1/parameters/model.obj"].shape[0] == 2


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("own:wrong", {}, r"and \[8, 24, 24\] were counted"),
    ("own:build", {"stages": [{"epochs": 1, "lr_factors": {"probe": 2}}]}, "are image, beam. Write some of them"),
    ("own:none", {}, "the object of own:none is missing"),
    ("own:flat", {}, r"the probe of own:flat is of shape \[24, 24\]"),
    ("own:missing", {}, "Write a name that the module defines"),
]


def test_a_module_that_does_not_fit_is_told(with_modules: Path, cluster: RunningCluster) -> None:
    for number, (module, parts, said) in enumerate(MISFITS):
        with pytest.raises(HalotileError, match=said):
            compute(of_module(with_modules, f"{number}.cxi", module, slots=1, **parts), cluster)
