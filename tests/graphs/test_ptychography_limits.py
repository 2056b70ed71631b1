"""Ptychography: mistakes in jobs, in files to begin with and in Python are refused with what to write, and a spoilt object is no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import halotile
from halotile import DistributedContext
from halotile.cli.main import app
from halotile.errors import ConfigError, Diverged, InputError, OutputRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.storage.scans import convert
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.formats import encode_cxi
from halotile.storage.scans.scan import open_scan
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.graphs.scans import begin_with, compute, job, opened, plan, words, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small scan, which stays as it is."""
    return write_small_scan(tmp_path_factory.mktemp("known"))


@pytest.fixture
def folder(known: Path, tmp_path: Path) -> Path:
    """A folder with that scan."""
    (tmp_path / "scan.zarr").symlink_to(known / "scan.zarr")
    return tmp_path


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
    (
        {"model": {"loss": "poisson_nll"}, "stages": [{**ONE, "solver": "rpie"}]},
        "is for loss: amplitude_mse, and the loss is poisson_nll",
    ),
    (
        {"model": {"refine": ["object"]}, "stages": [{**ONE, "lr_factors": {"probe": 1}}]},
        "names probe, which is not refined",
    ),
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
    (
        {"start": {"probe": np.ones((32, 32))}, "resolution": True},
        "whose halves would begin with the same object",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "said"), JOBS, ids=[said for _, said in JOBS])
def test_mistakes_are_told_with_what_to_write(folder: Path, parts: dict[str, Any], said: str) -> None:
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


def test_a_start_that_is_no_array_of_light_is_refused(folder: Path) -> None:
    for start, options, said in STARTS:
        path = folder / "start.h5"
        if isinstance(start, bytes):
            path.write_bytes(start)
        else:
            begin_with(folder, start)
        with pytest.raises(InputError, match=said):
            _ = opened(folder, path, **options).probe


def test_what_cannot_be_opened_is_refused(folder: Path) -> None:
    for options, said in (
        ({"import_": "own:build"}, "import is for a job"),
        ({"mode": 2}, "did you mean modes"),
        ({"window": 16}, "Write window: 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            opened(folder, **options)
    with pytest.raises(AttributeError, match="a scan has no objekt"):
        opened(folder).objekt = 1


SET: list[tuple[str, Callable[[Any], Any], str]] = [
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
    (folder / "scan.zarr").unlink()
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4 * 24 * 24 * 4)  # of four patterns
    halotile.ptychography.simulate(folder / "scan.zarr", raster=(5, 5), pattern=24, step=5.0)
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
    for name, said in (
        ("raw.cxi", "holds no result, and is not replaced"),
        ("truth.h5", "holds no result, and is not replaced"),
        ("empty.cxi", "holds no result, and is not replaced"),
        ("none/result.cxi", "is no folder"),
        ("result.npy", "does not end with .cxi"),
    ):
        with pytest.raises(ConfigError, match=said):
            scan.save(folder / name)
    for _ in range(2):
        scan.save(folder / "result.cxi")


SGD = {"solver": "sgd", "epochs": 1, "batch": 64}
FIRST = [{"epochs": 4, "lr": 0.02, "batch": 8}, {"epochs": 2, "lr": 0.01, "batch": 16}]
KEPT = "The 6 epochs of the stages before are kept"
SPOILT: list[tuple[list[dict[str, Any]], str]] = [
    ([{**SGD, "lr": 1000}], "Write a smaller lr in that stage"),
    # Though its loss is far below a thousand times that of the first guess.
    ([{"epochs": 10, "lr": 0.05, "batch": 8}, {**SGD, "lr": 1}], "after the last step of a stage, and was"),
    ([*FIRST, {**SGD, "lr": 1e3}, {"epochs": 3, "lr": 0.005, "batch": 8}], f"after the last step of a stage.* {KEPT}"),
    ([*FIRST, {**SGD, "lr": 1e3}], f"after the last step of a stage.* {KEPT}"),
    ([*FIRST, {"epochs": 5, "lr": 1, "batch": 12}], "at the end of a stage, and was"),
    ([{"solver": "rpie", "epochs": 2, "batch": 6, "lr": 30.0}], "Write a smaller lr"),
    # From the first step on, and no worse later.
    ([{"epochs": 2, "batch": 6, "lr": 100.0}], "Write a smaller lr"),
]


@pytest.mark.parametrize(("stages", "said"), SPOILT)
def test_a_step_too_far_is_no_result(
    folder: Path, cluster: RunningCluster, stages: list[dict[str, Any]], said: str
) -> None:
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


class Faint(SimulatedScan):
    """A scan whose counts are multiplied."""

    light = 1.0

    def __getitem__(self, index: Any) -> Any:
        return np.float32(self.light) * super().__getitem__(index)


@pytest.mark.parametrize(
    ("light", "factor", "error", "said"),
    [
        (1e-16, 1.0, InputError, "Multiply the patterns"),
        (0.0, 1.0, InputError, "no pattern has a count"),
        (1.0, 1e-6, ConfigError, r"the positions span only.*--position-unit"),
        (1.0, 1e3, ConfigError, r"they do not overlap.*--position-unit"),
    ],
)
def test_patterns_far_below_any_count_and_positions_in_another_unit_are_refused(
    tmp_path: Path, light: float, factor: float, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faint, "light", light)
    simulated = Faint(raster=(4, 4), pattern=24, step=3.0)
    scan = replace(simulated.scan, positions=factor * simulated.scan.positions)
    write_scan(str(tmp_path / "scan.zarr"), scan, simulated)
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
