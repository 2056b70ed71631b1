"""The state of a reconstruction between two steps: what is forgotten, when it is kept, and when it is no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halotile.errors import Diverged
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import StepRequests
from halotile.tasks.groups.training.fit import read_content, state_in
from halotile.tasks.ptychography.program import Refinement
from halotile.tasks.ptychography.recipe import PARTS, ScanRecipe, SolverStage
from halotile.tasks.ptychography.solvers import PatternBatch, adam
from halotile.tasks.ptychography.state import ReconstructionState
from tests.tasks.pattern_recipes import small_recipe

BATCH = PatternBatch([], 1.0, 0.1, SolverStage(epochs=1, lr=0.1, batch=1))


@pytest.fixture
def recipe(tmp_path: Path) -> ScanRecipe:
    """36 patterns of 24 pixels, of which everything is refined."""
    return small_recipe(tmp_path, PARTS[:5], SolverStage(epochs=3, lr=0.02, batch=9))


def test_a_step_changes_the_pixel_whose_gradient_it_is_however_an_image_lies_in_memory() -> None:
    image = torch.arange(6.0).reshape(2, 3).T  # as one of MATLAB, or orthogonal modes
    kept = {"means": torch.zeros(3, 2), "squares": torch.zeros(3, 2), "counts": torch.zeros(())}
    moments = {name: {"object": tensor} for name, tensor in kept.items()}
    state = ReconstructionState.of(ReconstructionState({"object": image}, 1.0, moments=moments).content(), "cpu")
    gradient = torch.zeros(3, 2)
    gradient[0, 1] = 1
    adam(state, {"object": gradient}, {"object": 0.1}, BATCH)
    torch.testing.assert_close(state.parameters["object"] - image, -0.1 * gradient)


def test_a_part_that_is_set_begins_without_what_was_kept_of_it() -> None:
    state = ReconstructionState({"object": torch.zeros(2), "probe": torch.zeros(2)}, 1.0)
    adam(state, {name: torch.ones(2) for name in state.parameters}, {"object": 0.1, "probe": 0.1}, BATCH)
    state.begin_with("object", torch.ones(2))
    assert state.parameters["object"].tolist() == [1, 1]
    assert all(list(state.moments[name]) == ["probe"] for name in ("means", "squares", "counts"))


def test_curvature_is_not_that_of_positions_which_begin_to_move(recipe: ScanRecipe) -> None:
    stages = (SolverStage(solver="lbfgs", epochs=5, lr=0.1, batch=36, hold_positions=3),)
    work = Refinement(replace(recipe, stages=stages), TorchGroup())
    state = work.first_state()
    pairs = []
    for epoch in range(5):
        state.losses.append(work.epoch(state, epoch))
        pairs.append(sum(name.startswith("step ") for name in state.moments["lbfgs"]))
    assert pairs == [0, 1, 2, 0, 1]


def test_a_last_epoch_that_is_refused_loses_no_other(recipe: ScanRecipe, tmp_path: Path) -> None:
    spoiling = SolverStage(solver="sgd", epochs=1, lr=1000.0, batch=36)
    recipe = replace(recipe, stages=(*recipe.stages, spoiling), requests=tmp_path / "requests")
    StepRequests(tmp_path / "requests").ask(4)
    with pytest.raises(Diverged):
        Refinement(recipe, TorchGroup()).run()
    newest = recipe.newest_checkpoint
    assert newest is not None
    assert len(state_in(read_content(newest))["losses"]) == 3


def test_a_step_that_spoils_a_tenth_of_the_amplitude_is_no_result() -> None:
    rows: list[tuple[float, float, str, bool]] = [
        (0.25, 2.0, "amplitude_mse", False),
        (0.25, 150.0, "amplitude_mse", True),
        (50.0, 400.0, "amplitude_mse", False),
        (float("nan"), 1.0, "amplitude_mse", True),
        (-36e3, -35e3, "poisson_nll", False),
        (-36e3, -20e3, "poisson_nll", True),
    ]
    for before, after, kind, is_spoilt in rows:
        assert ReconstructionState({}, 1.0, scale=1e4).is_spoilt(before, after, kind) == is_spoilt


def test_modes_still_follow_the_first_one_in_the_next_stage() -> None:
    """What the solver keeps of later epochs is forgotten; the losses of patterns alone are no later state."""
    state = ReconstructionState({"object": torch.zeros(2), "pattern_loss": torch.zeros(3)}, 1.0)
    state.moments |= {"following": {"probe": torch.tensor(7)}, "means": {"object": torch.ones(2)}}
    state.keep_best(0, 1.0)
    state.parameters["pattern_loss"] += 1
    state.return_to_best()
    assert state.moments.keys() == {"following", "means"}
    state.keep_best(1, 0.9)
    state.parameters["object"] += 1
    state.return_to_best()
    assert state.moments == {"following": {"probe": torch.tensor(7)}}
    assert not state.parameters["object"].any()
