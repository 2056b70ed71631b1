"""The order of patterns: each once an epoch, by seed and epoch alone, and no more in memory than a window needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halotile.storage.scans import convert
from halotile.storage.scans.scan import open_scan
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.patterns import Patterns, steps_of
from halotile.tasks.ptychography.recipe import Optics, ScanRecipe, SolverStage

SLOTS = 3


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScanRecipe:
    """53 patterns in chunks of 4."""
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4 * 16 * 16 * 4)
    simulated = SimulatedScan(raster=(53, 1), pattern=16, step=2.0)
    convert.write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    scan, patterns = open_scan(str(tmp_path / "scan.zarr"))
    optics = Optics.of(scan, (16, 16), "far", None)
    stages = (SolverStage(epochs=3, lr=0.1, batch=7),)
    return ScanRecipe(scan, patterns, optics, "amplitude_mse", 1, ("object",), stages, SLOTS, 5, 2)


def test_each_pattern_is_used_once_an_epoch_in_another_order(recipe: ScanRecipe) -> None:
    for window in (0, 4, 8):
        recipe = replace(recipe, window=window)
        orders = []
        for epoch in (0, 1, 0):
            steps = steps_of(recipe, epoch)
            assert all(len(parts) == SLOTS and sum(map(len, parts)) <= 7 for parts in steps)
            orders.append(np.concatenate([part for parts in steps for part in parts]).tolist())
            assert sorted(orders[-1]) == list(range(53))
            last = [part.tolist() for part in list(steps)[-1]]
            assert [part.tolist() for part in steps[-1]] == last
        assert orders[0] == orders[2] != orders[1]
        other = steps_of(replace(recipe, seed=6), 0)
        assert orders[0] != np.concatenate([part for parts in other for part in parts]).tolist()


def test_a_batch_of_all_patterns_is_one_step(recipe: ScanRecipe) -> None:
    for batch in (53, 100):
        stages = (replace(recipe.stages[0], batch=batch),)
        for window in (0, 4):
            (parts,) = steps_of(replace(recipe, window=window, stages=stages), 0)
            assert sorted(np.concatenate(parts).tolist()) == list(range(53))


def test_no_step_of_windows_is_left_with_a_few_patterns(recipe: ScanRecipe) -> None:
    sizes = [sum(map(len, parts)) for parts in steps_of(replace(recipe, window=4), 0)]
    assert max(sizes) - min(sizes) <= SLOTS


def test_the_halves_share_the_patterns_of_a_stage(recipe: ScanRecipe) -> None:
    for window in (0, 4):
        chosen = tuple(range(3, 40))
        stages = (replace(recipe.stages[0], subset=chosen),)
        recipe = replace(recipe, window=window, stages=stages)
        halves = []
        for half in (0, 1):
            steps = steps_of(recipe, 1, half)
            numbers = np.concatenate([part for parts in steps for part in parts])
            halves.append(recipe.scan.numbers[numbers].tolist())
            assert not np.any(np.diff(np.sort(numbers)) == 1)
        assert abs(len(halves[0]) - len(halves[1])) == 1
        assert sorted(halves[0] + halves[1]) == list(chosen)


def test_a_rank_holds_the_windows_of_its_slots_alone(recipe: ScanRecipe) -> None:
    for ranks in (1, 3):
        recipe = replace(recipe, window=4)
        slots = range(SLOTS) if ranks == 1 else range(1)
        patterns, whole = Patterns(recipe, len(slots)), recipe.patterns[:]
        for parts in steps_of(recipe, 0):
            for slot in slots:
                if len(parts[slot]):
                    read = patterns.read(parts[slot], "cpu").numpy()
                    assert np.array_equal(np.fft.fftshift(read, (-2, -1)), whole[parts[slot]].astype(np.float32))
            assert len(patterns.chunks) <= 3 * len(slots)
        assert recipe.chunks == 14
