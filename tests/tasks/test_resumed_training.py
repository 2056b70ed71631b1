"""The curve of a training that was killed and goes on is that of one that was not."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import CurveRow, read_curve
from halotile.tasks.groups.training.saved import read_content, state_in
from halotile.tasks.networks.unet import UNetNetwork
from halotile.tasks.training import trainer
from halotile.tasks.training.methods import PatchBatch
from halotile.tasks.training.recipe import Recipe
from halotile.tasks.training.trainer import Trainer
from tests.tasks.test_training import noisy_waves, recipe_of

STEPS, EVERY = 24, 4


class Killed(BaseException):
    """Ends a training as a signal does."""


def train(folder: Path, killed: int | None = None) -> Recipe:
    """Train from the checkpoint on, up to the end or a step in which it is killed."""
    folder.mkdir(exist_ok=True)
    network = UNetNetwork(width=2, levels=1)
    recipe = recipe_of(folder, network, noisy_waves()[1], steps=STEPS, every=EVERY)

    class Killing(Trainer):
        def draw(self, step: int, slot: int) -> PatchBatch:
            if step == killed:
                raise Killed
            return super().draw(step, slot)

    with suppress(Killed):
        Killing(recipe, "cpu").train(TorchGroup())
    return recipe


def rows_of(recipe: Recipe) -> list[CurveRow]:
    """The curve without its times."""
    return [{name: n for name, n in row.items() if name != "seconds"} for row in read_curve(recipe.curve)[1]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[CurveRow]]:
    """A training that nothing interrupts."""
    recipe = train(tmp_path_factory.mktemp("whole"))
    rows = rows_of(recipe)
    assert [row["iteration"] for row in rows] == list(range(EVERY, STEPS + 1, EVERY))
    return recipe, rows


@pytest.fixture(params=[0.0, math.inf], ids=["always", "seldom"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step; the curve written after every step, or only where it has to be."""
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "WRITE_SECONDS", request.param)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("kills", [(3,), (4,), (13, 14), (23,)], ids=str)
def test_the_curve_is_that_of_a_training_that_nothing_interrupts(
    whole: tuple[Recipe, list[CurveRow]], kills: tuple[int, ...], tmp_path: Path
) -> None:
    for step in kills:
        train(tmp_path, step)
    recipe = train(tmp_path)
    assert rows_of(recipe) == whole[1]
    expected, found = (state_in(read_content(each.checkpoint))["module"] for each in (whole[0], recipe))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rows_of_a_curve_that_is_lost_come_from_the_checkpoint(
    whole: tuple[Recipe, list[CurveRow]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    train(tmp_path, 13).curve.unlink()
    rows = rows_of(train(tmp_path))
    lost = [{name: n for name, n in row.items() if name != "validation"} for row in whole[1][:3]]
    assert rows == [*lost, *whole[1][3:]]


def test_rows_after_the_checkpoint_are_recorded_again(tmp_path: Path) -> None:
    """In the mode fast, with other workers, they may have other bits."""
    recipe = train(tmp_path, 13)
    assert not recipe.checkpoint.exists()
    assert [row["iteration"] for row in read_curve(recipe.curve)[1]] == [4, 8, 12]
    train(tmp_path, 1)
    assert read_curve(recipe.curve) == (1, [])
