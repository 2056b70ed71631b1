"""Ptychography where an option meets another, and where a result would be wrong: halves, last steps, supports, records."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.errors import ConfigError, InputError
from halotile.graphs.iterations.rank_programs import Curve
from halotile.graphs.jobs.ptychography.plan import SentRecipe, photon_loss, photon_loss_of
from halotile.storage.scans.convert import write_scan
from halotile.tasks.groups.training.curve import read_curve, write_curve
from halotile.tasks.ptychography import result
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.recipe import SolverStage
from tests.graphs.scans import job, run, words, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def test_a_position_stays_in_its_half_whatever_subset_a_stage_uses(folder: Path) -> None:
    recipe = halotile.ptychography.open(folder / "scan.zarr", resolution=True).recipe
    whole = SolverStage(epochs=1, lr=0.1, batch=8)
    others = tuple(int(n) for n in recipe.scan.numbers[1:])
    recipe = replace(recipe, stages=(whole, replace(whole, subset=others)))
    for half in (0, 1):
        before, after = (set(np.flatnonzero(recipe.used(epoch, half))) for epoch in (0, 1))
        assert after == before - {0}


def test_a_half_without_patterns_is_refused(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr", resolution=True)
    every_second = [int(n) for n in scan.recipe.scan.numbers[::2]]
    with pytest.raises(ConfigError, match="a larger subset"):
        next(halotile.ptychography.Adam(scan).optimize(1, subset=every_second))


def test_a_last_step_that_went_too_far_is_no_result(folder: Path) -> None:
    done = run(job(folder, stages=[{"solver": "sgd", "epochs": 1, "lr": 1000, "batch": 64}]), "--workers", "1")
    assert done.exit_code != 0
    assert "Write a smaller lr in that stage" in words(done)
    assert not (folder / "result.cxi").exists() or (folder / "result.cxi").stat().st_size == 0


def test_a_last_stage_that_destroys_the_object_is_no_result(folder: Path) -> None:
    """Though its loss is far below a thousand times that of the first guess."""
    stages = [{"epochs": 10, "lr": 0.05, "batch": 8}, {"solver": "sgd", "epochs": 1, "lr": 1, "batch": 64}]
    done = run(job(folder, stages=stages), "--workers", "1")
    assert done.exit_code != 0
    assert "after the last step of a stage, and was" in words(done)


def test_a_good_start_does_not_count_as_diverged(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with halotile.ptychography.Adam(scan) as adam:
        list(adam.optimize(30, lr=0.05, batch_size=8))
        scan.save(folder / "good.cxi")
        again = halotile.ptychography.open(folder / "scan.zarr", start=folder / "good.cxi", loss="intensity_mse")
        losses = list(halotile.ptychography.Adam(again, context=adam.context).optimize(2, lr=0.005))
    assert losses[1] < losses[0]


def test_what_a_run_began_with_may_go_once_it_has_begun(folder: Path) -> None:
    start = folder / "start.h5"
    with h5py.File(start, "w") as file:
        file["probe"] = np.ones((32, 32))
    recipe = halotile.ptychography.open(folder / "scan.zarr", start=start).recipe
    recipe = replace(recipe, checkpoint=folder / "checkpoint")
    sent = SentRecipe.of(recipe, str(start))
    assert sent.opened().start is not None
    start.unlink()
    with pytest.raises(InputError):
        sent.opened()
    recipe.checkpoints[0].touch()
    assert sent.opened().start is None


def test_of_the_modes_to_begin_with_the_strongest_are_taken_with_the_light_of_the_counts(folder: Path) -> None:
    beam = np.array(halotile.ptychography.open(folder / "scan.zarr").probe[0])
    with h5py.File(folder / "start.h5", "w") as file:
        file["probe"] = 1e-3 * np.stack([0.1 * beam[::-1], beam])
    scan = halotile.ptychography.open(folder / "scan.zarr", start=folder / "start.h5")
    np.testing.assert_allclose(scan.probe[0], beam, rtol=1e-4, atol=1e-4 * np.abs(beam).max())


@pytest.mark.parametrize("wider", [30, -4])
def test_the_obj_of_another_program_is_begun_with_wherever_its_margins_end(folder: Path, wider: int) -> None:
    usual = halotile.ptychography.open(folder / "scan.zarr")
    rows, columns = (n + 2 * wider for n in usual.object.shape)
    obj = np.arange(1.0, rows * columns + 1).reshape(rows, columns) * 1j
    with h5py.File(folder / "start.h5", "w") as file:
        file["obj"], file["probe"] = obj, 2 * usual.probe
    scan = halotile.ptychography.open(folder / "scan.zarr", start=folder / "start.h5")
    if wider > 0:
        np.testing.assert_array_equal(scan.object, obj[wider:-wider, wider:-wider].astype(np.complex64))
    else:
        np.testing.assert_array_equal(scan.object[4:-4, 4:-4], obj.astype(np.complex64))
        assert (scan.object[:4] == 1).all()
    np.testing.assert_allclose(scan.probe, 2 * usual.probe, rtol=1e-5, atol=1e-5 * np.abs(scan.probe).max())


@pytest.mark.parametrize(("light", "warns"), [(1e-3, True), (0.1, False)])
def test_a_mode_that_has_next_to_no_light_is_warned_of(folder: Path, light: float, warns: bool) -> None:
    beam = np.array(halotile.ptychography.open(folder / "scan.zarr").probe[0])
    with h5py.File(folder / "start.h5", "w") as file:
        file["probe"] = np.stack([beam, np.sqrt(light) * np.roll(beam, 16, 0)])
    path = job(folder, model={"modes": 2, "refine": ["object"]}, stages=[{"epochs": 1, "lr": 0.01}])
    content = json.loads(path.read_text())
    content["input"]["start"] = str(folder / "start.h5")
    path.write_text(json.dumps(content))
    said = words(CliRunner().invoke(app, ["run", str(path), "--workers", "1"]))
    assert ("Write fewer modes, or give the modes as input.start" in said) is warns
    assert ("a mode of the probe has" in said) is warns


def test_a_recording_is_not_replaced_by_a_result(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
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


def test_workers_without_a_slot_have_nothing_to_do(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr", slots=1)
    with halotile.DistributedContext(workers=2) as ctx:
        losses = list(halotile.ptychography.Adam(scan, context=ctx).optimize(2, lr=0.02))
    assert losses[1] < losses[0]


def test_a_loop_does_not_go_on_with_another_scan(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    _ = scan.object
    other = SimulatedScan(raster=(8, 8), pattern=32, step=3.0, phase=2.0)
    write_scan(str(folder / "scan.zarr"), other.scan, other, overwrite=True)
    with pytest.raises(InputError, match="was written to since the scan was opened"):
        next(halotile.ptychography.Adam(scan).optimize(1))


def test_a_probe_that_is_0_within_its_support_is_refused(folder: Path) -> None:
    corner = np.zeros((32, 32), complex)
    corner[0, 0] = 1
    scan = halotile.ptychography.open(folder / "scan.zarr", support=5.0)
    with pytest.raises(ConfigError, match="probe is 0 everywhere"):
        scan.probe = corner[None]
    with h5py.File(folder / "start.h5", "w") as file:
        file["probe"] = corner
    with pytest.raises(InputError, match="0 everywhere within its support"):
        _ = halotile.ptychography.open(folder / "scan.zarr", support=5.0, start=folder / "start.h5").probe


@pytest.mark.parametrize("content", ["group", "text"])
def test_a_start_that_is_no_array_is_refused(folder: Path, content: str) -> None:
    with h5py.File(folder / "start.h5", "w") as file:
        if content == "group":
            file["probe/data"] = np.ones((32, 32))
        else:
            file["probe"] = "round"
    with pytest.raises(InputError, match=r"neither an object nor a probe|no array of numbers"):
        halotile.ptychography.open(folder / "scan.zarr", start=folder / "start.h5")


@pytest.mark.parametrize(
    ("name", "values"),
    [("probe", None), ("object", [[1], [1, 2]]), ("background", "dark"), ("positions", np.full((64, 2), 1j))],
)
def test_what_is_no_array_cannot_be_set(folder: Path, name: str, values: Any) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with pytest.raises(ConfigError, match=f"{name} is no array of"):
        setattr(scan, name, values)


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_factors_of_a_rate_are_finite_and_not_below_0(folder: Path, factor: float) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with pytest.raises(ConfigError, match="write 0 or more"):
        next(halotile.ptychography.Adam(scan).optimize(1, lr_factors={"object": factor}))


@pytest.mark.parametrize(("light", "said"), [(1e-16, "Multiply the patterns"), (0, "no pattern has a count")])
def test_patterns_far_below_any_count_are_refused(tmp_path: Path, light: float, said: str) -> None:
    class Faint(SimulatedScan):
        def __getitem__(self, index: Any) -> Any:
            return np.float32(light) * super().__getitem__(index)

    faint = Faint(raster=(4, 4), pattern=16, step=2.0)
    write_scan(str(tmp_path / "faint.zarr"), faint.scan, faint)
    with pytest.raises(InputError, match=said):
        _ = halotile.ptychography.open(tmp_path / "faint.zarr").object


def test_a_start_that_is_no_hdf5_file_is_no_damaged_one(folder: Path) -> None:
    (folder / "start.h5").write_text("a probe")
    with pytest.raises(InputError, match="is no HDF5 file"):
        halotile.ptychography.open(folder / "scan.zarr", start=folder / "start.h5")


def test_a_probe_that_is_set_is_0_outside_of_its_support(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr", support=5.0)
    scan.probe = np.ones_like(scan.probe)
    assert abs(scan.probe[0, 16, 16]) > 0
    assert scan.probe[0, 0, 0] == 0


def test_positions_and_background_that_are_set_are_begun_with(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    moved = scan.positions + np.array([0.25, -0.5])
    scan.positions = moved
    counts = np.arange(32 * 32, dtype=float).reshape(32, 32)
    scan.background = counts
    assert np.abs(scan.positions - moved).max() < 1e-5
    assert scan.background[0, 0] > 0  # at 0 there is no slope
    assert np.allclose(scan.background, counts, rtol=1e-5, atol=1e-5)
    with halotile.ptychography.Adam(scan) as adam:
        next(adam.optimize(1, lr_factors={"positions": 0.0, "background": 0.0}))
        assert np.abs(scan.positions - moved).max() < 1e-5
        assert np.allclose(scan.background, counts, rtol=1e-5, atol=1e-5)
        with pytest.raises(ConfigError, match=r"integers \(pattern numbers\)"):
            next(adam.optimize(1, subset=[0.5]))  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="64 of 64 positions would be beyond the object"):
        scan.positions = moved + 100
    with pytest.raises(ConfigError, match="needs \\[64, 2\\]"):
        scan.positions = moved[:3]
    with pytest.raises(ConfigError, match="Write 0 or more"):
        scan.background = -counts


@pytest.mark.parametrize(
    ("stage", "words_of_it"),
    [
        ({"momentum": 0.9}, "stages[0].momentum: is for solver: sgd, and the solver is adam; leave it out"),
        ({"solver": "sgd", "lr": 0.1, "betas": [0.5, 0.9]}, "is for solver: adam or rpie"),
        ({"alpha": 0.5}, "is for solver: rpie"),
        ({"betas": [0.9, 1.0]}, "write two numbers, each 0 or more and less than 1"),
    ],
)
def test_options_are_for_solvers_that_have_them(folder: Path, stage: dict[str, Any], words_of_it: str) -> None:
    done = run(job(folder, stages=[{"epochs": 1, **stage}]))
    assert done.exit_code == 2
    assert words_of_it in words(done)


def test_arrays_of_a_scan_cannot_be_written_into(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    for array in (scan.object, scan.probe, scan.positions, scan.background):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 5
        own = array.copy()
        own[...] = 5
    assert not (scan.object == 5).any()
    scan.object = 2 * scan.object
    assert np.all(scan.object == 2)


def test_more_slots_than_chunks_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Write window: 0"):
        halotile.ptychography.open(folder / "scan.zarr", window=16)


def test_disk_for_checkpoints_is_that_of_the_solvers(folder: Path) -> None:
    needed = {}
    for solvers in (["adam"], ["lbfgs"], ["adam", "lbfgs"]):
        stages = [{"solver": solver, "epochs": 1} for solver in solvers]
        path = job(folder, stages=stages)
        needed["+".join(solvers)] = halotile.plan(path).scratch_bytes
    assert needed["lbfgs"] == 5 * needed["adam"]
    assert needed["adam+lbfgs"] > needed["lbfgs"]


def test_a_start_of_zeros_is_refused(folder: Path) -> None:
    with h5py.File(folder / "start.h5", "w") as file:
        file["probe"] = np.zeros((32, 32))
    with pytest.raises(InputError, match="its probe is 0 everywhere"):
        halotile.ptychography.open(folder / "scan.zarr", start=folder / "start.h5")


def test_a_plan_shows_the_focus(folder: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(job(folder, model={"focus": "-2 um"}))])
    assert "far field, -2 um from the focus, 1 mode" in words(done)


def test_a_curve_is_written_while_checkpoints_take_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("halotile.tasks.ptychography.result.time.monotonic", lambda: now[0])
    monkeypatch.setattr(result, "write_state", lambda *_: now.__setitem__(0, now[0] + 31))
    scan = halotile.ptychography.open(folder / "scan.zarr")
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


@pytest.mark.parametrize("arriving", [1, 3, 4, 7])
def test_rows_that_come_many_at_a_time_are_reported(tmp_path: Path, arriving: int) -> None:
    reports: list[str] = []

    class View:
        class directory:  # noqa: N801 - as of a run
            write_iterations = staticmethod(lambda rows: None)

        report_row = staticmethod(lambda rows, steps: None)
        report = staticmethod(reports.append)

    class Files:
        curve = tmp_path / "curve.json"

    curve = Curve(View(), Files(), 1000, "epoch")  # type: ignore[arg-type]
    for count in range(arriving, 50, arriving):
        write_curve(Files.curve, count, [{"iteration": n + 1, "loss": 1.0} for n in range(count)])
        curve.look()
    assert len(reports) == min(49 // arriving, (49 // arriving) * arriving // 5)


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


def test_messages_to_workers_have_no_arrays(folder: Path) -> None:
    """They read the values to begin with themselves, and see where these have changed."""
    recipe = halotile.ptychography.open(folder / "scan.zarr").recipe
    content = {"object": np.ones(recipe.shape, np.complex64), "probe": np.ones((1, 32, 32), np.complex64)}
    with h5py.File(folder / "start.h5", "w") as file:
        for name, values in content.items():
            file[name] = values
    start = str(folder / "start.h5")
    begun = halotile.ptychography.open(folder / "scan.zarr", start=start).recipe
    sent = SentRecipe.of(begun, start)
    assert len(pickle.dumps(sent)) < 10_000
    opened = sent.opened()
    assert opened.start is not None
    assert opened.start.object is not None
    assert np.array_equal(opened.start.object, content["object"])
    assert np.array_equal(opened.scan.positions, begun.scan.positions)
    with h5py.File(start, "r+") as file:
        file["object"][3, 3] = 2
    with pytest.raises(InputError, match="has changed since it was opened"):
        sent.opened()
