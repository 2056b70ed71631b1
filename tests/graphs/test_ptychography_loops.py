"""Ptychography from Python: loops over epochs that end early, go on, and give the bits of a job."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import halotile
from halotile.errors import ConfigError, Diverged
from halotile.storage.scans.convert import write_scan
from halotile.tasks.ptychography import opened
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.graphs.scans import STAGES, job, run, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def test_a_loop_in_python_gives_the_bits_of_the_job(folder: Path) -> None:
    assert run(job(folder), "--workers", "1").exit_code == 0
    scan = halotile.ptychography.open(folder / "scan.zarr")
    losses: list[float] = []
    with halotile.ptychography.Adam(scan, workers=2) as adam:
        for stage in STAGES:
            epochs, rate, batch = stage.values()
            losses += adam.optimize(int(epochs), lr=rate, batch_size=int(batch))
    assert losses == scan.losses
    scan.save(folder / "loop.cxi")
    assert (folder / "loop.cxi").read_bytes() == (folder / "result.cxi").read_bytes()


def test_a_loop_may_end_early_and_go_on_with_other_values(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr", refine=("object",))
    assert scan.report() == "no epoch yet"
    with halotile.ptychography.Adam(scan, workers=1) as adam:
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
        with pytest.raises(ConfigError, match="shape"):
            scan.object = np.ones((3, 3))
        for unusable in (0 * first, np.full_like(first, np.nan)):
            with pytest.raises(ConfigError, match=r"0 everywhere|has NaN"):
                scan.probe = unusable
        with pytest.raises(ConfigError, match=r"stages.*epochs"):
            list(adam.optimize(0))
        with pytest.raises(ConfigError, match="subset names 64"):
            list(adam.optimize(1, subset=[64]))
        other = halotile.ptychography.open(folder / "scan.zarr")
        list(halotile.ptychography.SGD(other, context=adam.context).optimize(1, lr=0.001, subset=[0]))
        changed = np.argwhere(other.object != 1)
        assert len(changed)
        assert (np.ptp(changed, axis=0) <= 32).all()
    with pytest.raises(ConfigError, match="slots=9"):
        halotile.ptychography.SGD(scan, workers=9)
    with pytest.raises(ConfigError, match="import is for a job"):
        halotile.ptychography.open(folder / "scan.zarr", import_="own:build")
    with pytest.raises(ConfigError, match="did you mean modes"):
        halotile.ptychography.open(folder / "scan.zarr", mode=2)


def test_the_resolution_is_that_of_the_positions_that_were_used(folder: Path) -> None:
    """Each loop over some of them is one stage of a job with a subset."""
    stages: list[dict[str, Any]] = [
        {"epochs": epochs, "lr": 0.05, "batch": 6, "subset": list(range(first, last))}
        for epochs, first, last in ((3, 0, 56), (2, 2, 60))
    ]
    assert run(job(folder, resolution=True, stages=stages)).exit_code == 0
    scan = halotile.ptychography.open(folder / "scan.zarr", resolution=True)
    with halotile.ptychography.Adam(scan) as adam:
        for stage in stages:
            list(adam.optimize(stage["epochs"], lr=0.05, batch_size=6, subset=stage["subset"]))
    assert scan.report().startswith(f"epoch 5: loss {scan.losses[-1]:.4g}, resolution ")
    assert scan.report().endswith("More epochs tell")
    scan.save(folder / "loop.cxi")
    assert (folder / "loop.cxi").read_bytes() == (folder / "result.cxi").read_bytes()
    with h5py.File(folder / "result.cxi") as file:
        found = file["entry_1/process_1/resolution"][()]
    assert scan.rings is not None
    assert scan.rings.resolution == found


def test_a_loop_sees_each_epoch_and_positions_move_late(folder: Path) -> None:
    """With the defaults of a call, or as it says; later calls hold none."""
    scan = halotile.ptychography.open(folder / "scan.zarr")
    start = scan.positions
    with halotile.ptychography.Adam(scan) as adam:
        calls: list[tuple[dict[str, Any], int]] = [({}, 2), ({}, 0), ({"hold_positions": 3}, 3)]
        for options, held in calls:
            moved, objects = [], [scan.object]
            for _ in adam.optimize(4, **options):
                moved.append(not np.array_equal(scan.positions, start))
                objects.append(scan.object)
                start = scan.positions
            assert moved == [epoch >= held for epoch in range(4)]
            assert all((one != other).any() for one, other in itertools.pairwise(objects))


def test_a_worker_that_fails_after_a_loop_was_left_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with halotile.ptychography.Adam(scan) as adam:
        run_ranks = adam.context.run_torch

        def fail_at_the_end(program: Any, **options: Any) -> None:
            run_ranks(program, **options)
            raise RuntimeError("a worker was lost")

        monkeypatch.setattr(adam.context, "run_torch", fail_at_the_end)
        loop = adam.optimize(10_000)
        next(loop)
        with pytest.warns(UserWarning, match="the epoch at hand was lost: a worker was lost"):
            loop.close()
        with pytest.raises(RuntimeError, match="a worker was lost"):
            list(adam.optimize(1))
        scan.object = scan.object


def test_a_loop_that_is_left_open_ends_with_its_solver(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with halotile.ptychography.Adam(scan) as adam:
        left = adam.optimize(np.int64(10))  # type: ignore[arg-type]  # NumPy's are taken
        next(left)
        next(left)
    assert len(scan.losses) == 2
    scan.probe = 2 * scan.probe
    with pytest.raises(ConfigError, match="the solver was closed"):
        next(left)
    with halotile.ptychography.Adam(scan) as adam:
        left = adam.optimize(10, lr=np.float32(0.02), batch_size=np.int32(16))  # type: ignore[arg-type]  # as well
        next(left)
    left.close()
    assert len(scan.losses) == 3


def test_the_first_guess_of_a_probe_is_as_far_out_of_focus_as_the_sample(tmp_path: Path) -> None:
    path = str(tmp_path / "scan.zarr")
    truth = SimulatedScan(raster=(8, 8), pattern=64, step=5.0, defocus=2.0)
    write_scan(path, truth.scan, truth)
    wavelength = truth.scan.wavelength
    pixel = wavelength * truth.scan.distance / (64 * truth.scan.pixel[0])
    distance = 2.0 * 64 * pixel**2 / wavelength

    def likeness(**model: Any) -> float:
        guess = halotile.ptychography.open(path, **model).probe
        return float(abs(np.vdot(guess, truth.probe)) / np.linalg.norm(guess) / np.linalg.norm(truth.probe))

    assert likeness(focus=f"-{1e6 * distance} um") > 0.8
    assert max(likeness(), likeness(focus=f"{1e6 * distance} um")) < 0.4
    write_scan(path, replace(truth.scan, probe=truth.probe), truth, overwrite=True)
    with pytest.raises(ConfigError, match="has a probe"):
        halotile.ptychography.open(path, focus="1 um")


def test_an_epoch_that_diverges_is_told_as_such_and_the_ones_before_stay(folder: Path) -> None:
    scan = halotile.ptychography.open(folder / "scan.zarr")
    with pytest.raises(AttributeError, match="a scan has no objekt"):
        scan.objekt = scan.object
    with halotile.ptychography.SGD(scan) as descent:
        list(descent.optimize(2, lr=1e-3))
        with pytest.raises(Diverged, match="Write a smaller lr"):
            list(descent.optimize(1, lr=1e5))
        assert len(scan.losses) == 2


def test_options_of_a_call_that_could_not_begin_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for is_full in (False, True):
        scan = halotile.ptychography.open(folder / "scan.zarr")
        with halotile.ptychography.Adam(scan) as adam:
            if is_full:
                with monkeypatch.context() as patch:
                    patch.setattr(opened, "write_state", Mock(side_effect=OSError("no space")))
                    with pytest.raises(OSError, match="no space"):
                        list(adam.optimize(3, lr=0.1, batch_size=32))
            losses.append(list(adam.optimize(3, lr=0.005, batch_size=16)))
    assert losses[0] == losses[1]
