"""The share of the light that is found in a further mode of the probe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import open_scan
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.program import Refinement
from halotile.tasks.ptychography.recipe import Optics, ScanRecipe, SolverStage
from halotile.tasks.ptychography.result import shown_probe
from halotile.tasks.ptychography.solvers import begin_epoch
from halotile.tasks.ptychography.state import FOLLOWED, FURTHER, ReconstructionState

STAGES = (SolverStage(epochs=100, lr=0.02, batch=20), SolverStage(epochs=20, lr=0.005, batch=50))


@dataclass(frozen=True)
class TwoModes(SimulatedScan):
    """A scan whose second mode has a given share of the light."""

    share: float = 0.15

    @cached_property
    def probe(self) -> NDArray[np.complex64]:
        """The modes of the probe, in roots of counts."""
        modes = SimulatedScan(pattern=self.pattern, modes=2, photons=self.photons).probe
        light = (np.abs(modes) ** 2).sum((1, 2))
        scale = np.sqrt(np.array([1 - self.share, self.share]) * light.sum() / light)
        return np.asarray(scale[:, None, None] * modes, np.complex64)


def recipe_of(simulated: SimulatedScan, folder: Path, refined: tuple[str, ...]) -> ScanRecipe:
    write_scan(str(folder / "scan.zarr"), simulated.scan, simulated)
    scan, patterns = open_scan(str(folder / "scan.zarr"))
    optics = Optics.of(scan, (simulated.pattern, simulated.pattern), "far", None)
    return ScanRecipe(scan, patterns, optics, "amplitude_mse", 2, refined, STAGES, 4, 0, 4)


def share_of(state: ReconstructionState) -> float:
    light = shown_probe(state).abs().square().sum((1, 2))
    return float(light[1:].sum() / light.sum())


@pytest.mark.parametrize(("true", "least", "most"), [(0.15, 0.1, 0.2), (0.0, 0.0, 0.05)])
def test_the_share_of_a_second_mode_is_found_with_a_weak_object(
    true: float, least: float, most: float, tmp_path: Path
) -> None:
    simulated = TwoModes(raster=(12, 12), pattern=32, step=1.5, modes=2, photons=1e6, share=true)
    work = Refinement(recipe_of(simulated, tmp_path, ("object", "probe")), TorchGroup())
    state = work.first_state()
    for epoch in range(work.recipe.epochs):
        state.losses.append(work.epoch(state, epoch))
    assert least <= share_of(state) <= most


def test_further_modes_follow_the_first_one_until_they_are_set_or_the_epochs_are_over(tmp_path: Path) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=16, step=2.0, modes=2)
    recipe = replace(recipe_of(simulated, tmp_path, ("object", "probe")), support=5)
    for is_set in (False, True):
        state = Refinement(recipe, TorchGroup()).first_state()
        outside = state.probe[0] == 0
        assert outside.any()
        begin_epoch(state, STAGES[0], 0)
        light = state.probe.abs().square().sum((1, 2))
        assert float(light[1] / light.sum()) == pytest.approx(FURTHER, rel=1e-4)
        assert not state.probe[1][outside].any()
        if is_set:
            state.begin_with("probe", torch.ones_like(state.probe))
        else:
            for epoch in range(1, FOLLOWED + 1):
                begin_epoch(state, STAGES[0], epoch)
            state.parameters["probe"] = torch.ones_like(state.probe)
        state.follow_first()
        assert torch.equal(state.parameters["probe"], torch.ones_like(state.probe))


@pytest.mark.parametrize(("refined", "photons"), [(("object",), None), (("object", "probe"), 200.0)])
def test_modes_that_are_not_refined_or_not_told_by_the_counts_do_not_follow(
    tmp_path: Path, refined: tuple[str, ...], photons: float | None
) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=16, step=2.0, modes=2, photons=photons)
    work = Refinement(recipe_of(simulated, tmp_path, refined), TorchGroup())
    assert not work.first_state().moments


def test_a_plane_wave_that_has_no_derivative_keeps_its_light_and_its_further_modes() -> None:
    probe = torch.ones(3, 16, 16, dtype=torch.complex64)
    probe[1:] *= 0.1
    state = ReconstructionState({"probe": probe.clone()}, 1.0, moments={"following": {"probe": torch.tensor(9)}})
    for _ in range(3):
        state.follow_first()
    torch.testing.assert_close(state.parameters["probe"], probe)
