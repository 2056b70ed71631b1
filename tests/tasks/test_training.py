"""Trainings on one rank: patches of stored images, the pixels that a method hides, networks and steps, killed and resumed too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import avg_pool2d

from halotile import registry
from halotile.errors import InputError
from halotile.storage.sharded.output import FileLayout
from halotile.tasks.block import BlockRunner, WriteFile
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.unet import UNet
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import CurveRow, read_curve
from halotile.tasks.groups.training.fit import read_content, state_in
from halotile.tasks.networks import base, dncnn, unet
from halotile.tasks.noise.estimate import UNKNOWN
from halotile.tasks.noise.photon_noise import noise_of_planes
from halotile.tasks.training import patches, trainer
from halotile.tasks.training.patches import PatchSource, Recipe, TrainingImage
from tests.cases import thorough
from tests.tasks.denoising import Counted


def source_of(pixels: NDArray[Any], patch: int = 16, **options: Any) -> PatchSource:
    return PatchSource((TrainingImage(Counted(pixels), (pixels.ndim - 2, pixels.ndim - 1), **options),), patch)


def numbered(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An image in which every pixel has another value."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_patches_are_parts_of_the_image_turned_and_flipped_that_follow_from_step_and_slot_alone() -> None:
    image = numbered((200, 300))
    source, again = source_of(image), source_of(image)
    later, first = source.draw(40, 1, 3).pixels, source.draw(0, 0, 3).pixels
    np.testing.assert_array_equal(again.draw(0, 0, 3).pixels, first)
    np.testing.assert_array_equal(again.draw(40, 1, 3).pixels, later)
    assert not np.array_equal(first, source.draw(0, 1, 3).pixels)
    assert not np.array_equal(first, source.draw(1, 0, 3).pixels)
    assert first.shape == (3, 1, 16, 16)
    for patch in (*first[:, 0], *later[:, 0]):
        row, column = divmod(int(patch.min()), 300)
        part = image[row : row + 16, column : column + 16]
        assert any(np.array_equal(np.rot90(flipped, n), patch) for n in range(4) for flipped in (part, part[::-1]))


def test_cells_that_are_held_out_are_in_no_patch_of_a_step() -> None:
    source = source_of(numbered((320, 320)))
    held_out, few = source.held_out(100), source.held_out(5)
    assert held_out is not None
    assert few is not None
    drawn = np.unique(np.concatenate([source.draw(16 * pool, 0, 8).pixels.ravel() for pool in range(40)]))
    assert not np.isin(held_out.pixels, drawn).any()
    assert sum(cell.pixels.size for number in range(source.cells) if (cell := source._cell(number))) == 320 * 320
    assert len(held_out.pixels) == patches.HELD_PATCHES * len(
        range(patches.HELD_FIRST, source.cells, patches.HELD_EVERY)
    )
    assert len(few.pixels) == 5
    tiny = source_of(numbered((20, 40)))
    assert tiny.held_out(16) is None
    assert tiny.draw(0, 0, 2).pixels.shape == (2, 1, 16, 16)


def test_several_images_planes_and_channels_are_drawn_from() -> None:
    one = TrainingImage(Counted(numbered((5, 3, 64, 64))), (2, 3), channel=1)
    source = PatchSource((one, TrainingImage(Counted(-1 - numbered((2, 3, 128, 40))), (2, 3), channel=1)), 16)
    patches = np.concatenate([source.draw(16 * pool, 0, 8).pixels for pool in range(30)])
    assert patches.shape[1:] == (3, 16, 16)
    np.testing.assert_array_equal(patches[:, 1] - patches[:, 0], np.where(patches[:, 0] < 0, -5120, 4096.0))
    assert {int(least) // (3 * 4096) for least in patches[:, 0].min((1, 2)) if least >= 0} == set(range(5))
    assert (patches < 0).any()


def test_holes_are_filled_saturated_areas_and_zeros_learned_from_and_hot_pixels_are_not() -> None:
    """The mean of pixels near the end of the range would be that of those below it alone; hot pixels would shift that of all."""
    image = np.full((64, 64), 7.0, np.float32)
    image[32:] = 9.0
    image[4:28:8, 4::8] = 9.0

    def whole(pixels: NDArray[Any], end: float) -> Any:
        return replace(source_of(pixels, values=UNKNOWN._replace(saturated=(end,))), patch=64).draw(0, 0, 1)

    patches = whole(image, 9.0)
    valid, hot = patches.valid[0, 0], 3 * 8
    assert valid.size - valid.sum() == hot
    assert (patches.pixels[0, 0] == 9).sum() == 32 * 64 + hot
    with pytest.raises(InputError, match="or all are saturated"):
        whole(np.full((64, 64), 9.0, np.float32), 9.0)
    dark = np.random.default_rng(0).poisson(3.0, (64, 64)).astype(np.float32)
    dark[:32] = 0  # without them dark pixels would be taken for brighter
    assert whole(dark, 0.0).valid.all()
    holed, sparse = np.full((64, 64), 7.0, np.float32), np.full((64, 256), np.nan, np.float32)
    holed[::4], sparse[:, :64] = np.nan, 1.0
    filled = source_of(holed).draw(0, 0, 4)
    assert (filled.pixels == 7).all()
    assert filled.valid.mean() == pytest.approx(0.75)
    assert source_of(sparse).draw(0, 0, 8).valid.all(), "places with little to learn from are left out"
    with pytest.raises(InputError, match="there is nothing to train on"):
        source_of(np.full((64, 64), np.nan, np.float32)).draw(0, 0, 1)


def test_values_are_mapped_to_a_range() -> None:
    rows: list[tuple[Any, float, float]] = [(np.uint8, 10, 110), (np.float16, -6e4, 6e4), (np.float32, -3e38, 3e38)]
    for dtype, low, high in rows:
        image = np.array([low, low / 2 + high / 2, high, high], dtype).repeat(1024).reshape(64, 64)
        source = replace(source_of(image, 32), values=(low, high))
        assert np.unique(source.draw(0, 0, 8).pixels) == pytest.approx([0, 0.5, 1], abs=1e-3)


def batch_of(pixels: torch.Tensor) -> trainer.PatchBatch:
    return trainer.PatchBatch(pixels, torch.ones_like(pixels), -pixels)


def test_pixels_that_count_are_hidden() -> None:
    """They have values of neighbours, so that no network can return them; all others are as they were."""
    for name in ("noise2void", "noise2self"):
        pixels = torch.from_numpy(numbered((3, 1, 32, 32))).repeat(1, 2, 1, 1)
        torch.manual_seed(1)
        blind = trainer.METHODS[name](batch_of(pixels))
        counted = blind.counted > 0
        assert 0 < counted.float().mean() < 0.1
        assert torch.equal(counted[:, 0], counted[:, 1]), "in all channels"
        assert torch.equal(blind.wanted, pixels)
        assert torch.equal(blind.given[~counted], pixels[~counted])
        moved = (blind.given - pixels)[counted]
        assert (moved != 0).all()
        rows, columns = torch.round(moved / 32), moved - 32 * torch.round(moved / 32)
        assert (rows.abs().max(), columns.abs().max()) == (2, 2)
        torch.manual_seed(2)
        assert not torch.equal(trainer.METHODS[name](batch_of(pixels)).counted, blind.counted)


def test_the_median_of_neighbours_stands_for_a_pixel() -> None:
    """As Noise2Void 2 does; for neighbours outside stand those of the other side."""
    pixels = torch.rand(2, 3, 32, 33)
    blind = trainer.METHODS["noise2void2"](batch_of(pixels))
    hidden = blind.counted > 0
    assert hidden.sum() == 2 * 3 * round(0.03 * 32 * 33)
    assert torch.equal(blind.given[~hidden], pixels[~hidden])
    rows, columns = pixels.shape[-2:]
    for patch, channel, row, column in torch.nonzero(hidden).tolist():
        y = [row - dy if not 0 <= row + dy < rows else row + dy for dy in range(-2, 3)]
        x = [column - dx if not 0 <= column + dx < columns else column + dx for dx in range(-2, 3)]
        window = np.delete(pixels[patch, channel].numpy()[np.ix_(y, x)], 12)
        assert blind.given[patch, channel, row, column] == np.sort(window)[11]


@pytest.mark.parametrize("method", ["noise2void", "noise2void2", "noise2self"])
@pytest.mark.parametrize("axis", ["y", "x"])
def test_a_line_through_a_hidden_pixel_has_values_of_other_lines(method: str, axis: patches.Structure) -> None:
    """Each pixel has the number of its line."""
    along, across = ("yx".index(axis), "xy".index(axis))
    lines = torch.arange(40.0).expand(40, 40)
    pixels = (lines if axis == "y" else lines.T)[None, None].repeat(2, 1, 1, 1)
    blind = trainer.METHODS[method](batch_of(pixels)._replace(structure=axis))
    assert torch.equal(blind.wanted, pixels)
    changed = (blind.given != pixels)[:, 0]
    for patch, *place in torch.nonzero(blind.counted[:, 0]).tolist():
        assert changed[patch].select(across, place[across])[max(0, place[along] - 4) : place[along] + 5].all()
    assert blind.counted.mean() < 0.07


def test_patches_keep_the_axis_along_which_noise_is_shared() -> None:
    rows = np.arange(128, dtype=np.float32)[:, None].repeat(128, 1)
    for structure in ("none", "x", "y"):
        drawn = replace(source_of(rows), structure=structure).draw(0, 0, 64).pixels
        assert (drawn == drawn[..., :1]).all() == (structure != "none")
        assert len(np.unique(drawn[:, 0, 0, 0] > drawn[:, 0, -1, 0])) == 2, "flipped"


def test_pixels_without_a_measurement_do_not_count_and_pairs_are_predicted_from_one_another() -> None:
    pixels = torch.rand(2, 1, 32, 32)
    valid = (torch.rand_like(pixels) > 0.5).float()
    for method in trainer.METHODS.values():
        blind = method(trainer.PatchBatch(pixels, valid, pixels))
        assert not blind.counted[valid == 0].any()
        nothing = blind._replace(counted=blind.counted * 0)
        assert float(trainer.mean_loss(torch.nn.Identity(), nothing, torch.ones(1))) == 0
    pair = trainer.METHODS["noise2noise"](batch_of(pixels))
    assert torch.equal(pair.given, pixels)
    assert torch.equal(pair.wanted, -pixels)
    assert pair.counted.all()


def recipe_of(folder: Path, network: base.Network, pixels: NDArray[Any], **options: Any) -> Recipe:
    usual: dict[str, Any] = {"steps": 60, "batch": 8, "slots": 2, "rate": 3e-3, "every": 20}
    paths: dict[str, Any] = {name: folder / name for name in ("checkpoint", "curve", "examples")}
    return Recipe(source_of(pixels, patch=32), network, **{"method": "noise2void", **usual, **options, **paths})


def noisy_waves(seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    y, x = np.mgrid[:256, :256]
    clean = (1000 + 200 * np.sin(y / 9) * np.cos(x / 7)).astype(np.float32)
    return clean, clean + (100 * np.random.default_rng(seed).standard_normal(clean.shape).astype(np.float32))


DENOISERS: dict[str, Callable[..., Any]] = {"unet": UNet, "dncnn": DnCNN}


UNET, DNCNN = unet.UNetNetwork(width=8, levels=2), dncnn.DnCNNNetwork(depth=4, width=12)


LEARNING = [(UNET, "noise2void"), (UNET, "noise2void2"), (DNCNN, "noise2self")]
SLOWER = [thorough(UNET, "noise2self"), thorough(DNCNN, "noise2void")]


@pytest.mark.parametrize(("network", "method"), [*LEARNING, *SLOWER])
def test_networks_learn_to_denoise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Any, method: str) -> None:
    monkeypatch.setattr(trainer, "SHARE", 1.0)
    clean, noisy = noisy_waves()
    recipe = recipe_of(tmp_path, network, noisy, method=method, noise=noise_of_planes([[noisy.astype(float)]]))
    trainer.Trainer(recipe, "cpu").train(TorchGroup())
    path = tmp_path / "weights.safetensors"
    BlockRunner(WriteFile(partial(trainer.encoded_weights, recipe), path, FileLayout(10**6))).run([0])
    with safe_open(path, "pt") as file:
        keys = json.loads(file.metadata()["halotile"])["denoiser"]
    model = DENOISERS[keys.pop("name")](**keys, weights=str(path)).build()
    with torch.no_grad():
        denoised = model(torch.from_numpy(noisy)[None, None])[0, 0].numpy()
    assert np.std(denoised - clean) < 0.5 * np.std(noisy - clean)
    done, rows = read_curve(recipe.curve)
    assert (done, [row["iteration"] for row in rows]) == (60, [20, 40, 60])
    assert rows[-1]["validation"] < 0.95, "better than the mean of the image"
    assert rows[-1]["error"] == pytest.approx(np.var(denoised - clean) / np.var(noisy - clean), abs=0.1)
    assert rows[-1]["rate"] == 0 < rows[0]["rate"] < 3e-3


def mean_of_nine(pixels: torch.Tensor) -> torch.Tensor:
    smoothed: torch.Tensor = avg_pool2d(pixels, 3, 1, 1, count_include_pad=False)
    return smoothed


@pytest.mark.parametrize("photons", [0.0, 20.0, 1000.0])
def test_errors_are_those_by_the_truth(photons: float) -> None:
    y, x = np.mgrid[:512, :512]
    clean, rng = 0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7), np.random.default_rng(1)
    noisy = rng.poisson(photons * clean) / photons if photons else clean + 0.2 * rng.standard_normal(clean.shape)
    hot = noisy.copy()
    hot[::16, ::16] = 40
    truth = np.square(mean_of_nine(torch.from_numpy(noisy)[None])[0].numpy() - clean).mean()
    truth /= np.square(noisy - clean).mean()
    for image in (noisy, hot):
        crop = source_of(image, patch=32).crop(96, 16)
        assert crop is not None
        assert crop.shape == (1, 96, 96)
        errors = trainer.HeldOutErrors(crop, noise_of_planes([[image]]), "cpu")
        assert errors.error(lambda pixels: pixels) == pytest.approx(1.0, abs=0.06)
        assert errors.error(mean_of_nine) == pytest.approx(truth, abs=0.06)
        assert errors.filters.keys() == {"tv", "nlm"}
        assert -0.03 < min(errors.filters.values()) < truth


def test_errors_are_shown_where_they_are_known_and_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = noisy_waves()[1]
    of_noisy = noise_of_planes([[noisy.astype(float)]])
    shown: list[list[float]] = []
    without = noise_of_planes([[0.0 * noisy.astype(float)]])
    for share, noise in ((1.2, of_noisy), (0.05, of_noisy), (1.2, None), (1.2, without)):
        monkeypatch.setattr(trainer, "SHARE", share)
        (folder := tmp_path / str(len(shown))).mkdir()
        recipe = recipe_of(folder, unet.UNetNetwork(width=2, levels=1), noisy, steps=12, every=1, noise=noise)
        trainer.Trainer(recipe, "cpu").train(TorchGroup())
        shown.append([row["iteration"] for row in rows_of(recipe) if "error" in row])
    assert shown == [[4, 8, 12], [], [], []]


class Restless(unet.UNetNetwork):
    """A network that computes otherwise in a training than in use."""

    def build(self, channels: int, mean: torch.Tensor, deviation: torch.Tensor) -> torch.nn.Module:
        """Build the network."""
        layers = torch.nn.Conv2d(channels, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Dropout()
        return torch.nn.Sequential(*layers, torch.nn.Conv2d(4, channels, 1))


def test_to_draw_and_to_validate_changes_no_bit_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, random_numbers = [], torch.get_rng_state()
    for name, seconds, every in (("watched", 0.0, 1), ("alone", math.inf, 100)):
        monkeypatch.setattr(trainer, "WRITE_SECONDS", seconds)
        monkeypatch.setattr(trainer, "DRAW_SECONDS", seconds)
        drawn: list[int] = []
        monkeypatch.setattr(trainer, "draw_examples", lambda *_, drawn=drawn: drawn.append(1) or [b""])
        (tmp_path / name).mkdir()
        recipe = recipe_of(tmp_path / name, Restless(), noisy_waves()[1], steps=5, every=every)
        trainer.Trainer(recipe, "cpu").train(TorchGroup())
        found.append(state_in(read_content(recipe.checkpoint))["module"])
        assert len(drawn) > 5 if seconds == 0 else len(drawn) == 2
    watched, alone = found
    assert all(torch.equal(watched[name], alone[name]) for name in alone)
    assert torch.equal(torch.get_rng_state(), random_numbers)


GAP = trainer.GAP_PIXELS


def test_patches_are_drawn_above_the_same_ones_denoised() -> None:
    for channels in (1, 2, 5):
        noisy = np.random.default_rng(0).normal(size=(5, channels, 80, 80)).astype(np.float32)
        scales = np.array([1.0, 10.0, 100.0, 1000.0, 1.0], np.float32).reshape(5, 1, 1, 1)
        scales = scales * np.array([1.0, 300.0, 20.0, 1.0, 1.0], np.float32)[:channels].reshape(-1, 1, 1)
        png = b"".join(trainer.draw_examples(scales * noisy, scales * np.clip(noisy, -1, 1)))
        drawn = np.asarray(PIL.Image.open(BytesIO(png)))
        assert drawn.shape == (2 * 64 + GAP, 4 * 64 + 3 * GAP, *([3] if channels == 5 else []))
        for number in range(4):
            part = slice(number * (64 + GAP), number * (64 + GAP) + 64)
            above, below = (drawn[rows, part].astype(int) for rows in (slice(0, 64), slice(-64, None)))
            for one, other in zip(np.atleast_3d(above).T, np.atleast_3d(below).T, strict=True):
                assert (one.min(), one.max()) == (0, 255), "black and white are those of a channel of the noisy patch"
                assert 60 < other.min() < other.max() < 200
                inside = (one > other.min()) & (one < other.max())
                np.testing.assert_array_equal(other[inside], one[inside])


@pytest.mark.parametrize("name", registry.names("networks"))
def test_weights_are_bounded_and_give_what_the_trained_network_gives(tmp_path: Path, name: str) -> None:
    """Normalisation is in the weights, and the values outside 0 to 1."""
    network, path = registry.find("networks", name).NETWORK(), tmp_path / "weights.safetensors"
    torch.manual_seed(0)
    for channels in (3, 1):
        module = network.build(channels, torch.full((channels,), 500.0), torch.full((channels,), 80.0))
        save_file(dict(network.weights(module)), path)
        assert path.stat().st_size <= network.weight_bytes(channels)
    image = 500 + 80 * torch.randn(1, 1, 40, 48)
    model = DENOISERS[name](**{k: v for k, v in network.denoiser(1).items() if k != "name"}, weights=str(path)).build()
    with torch.no_grad():
        assert torch.allclose(model(image), module(image), rtol=1e-4, atol=1e-2)


def test_steps_are_those_of_the_adam_of_torch_and_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Conv2d(3, 4, 3).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    unused = torch.nn.Parameter(torch.ones(2))
    adam = trainer.AdamOptimizer([*ours.parameters(), unused], lambda step: 1e-2 / (1 + step))
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 / (1 + step))
    for _ in range(30):
        pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        for module, optimizer in ((ours, adam), (theirs, reference)):
            optimizer.zero_grad()
            module(pixels).square().mean().backward()
            optimizer.step()
        schedule.step()
        copy = trainer.AdamOptimizer([*ours.parameters(), unused], adam.rate)
        copy.load_state_dict(adam.state_dict())
        adam = copy
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-13, atol=1e-15)
    assert unused.tolist() == [1, 1]


STEPS, EVERY = 24, 4


class Killed(BaseException):
    """Ends a training as a signal does."""


def train(folder: Path, killed: int | None = None) -> Recipe:
    """Train from the checkpoint on, up to the end or a step in which it is killed."""
    folder.mkdir(exist_ok=True)
    recipe = recipe_of(folder, unet.UNetNetwork(width=2, levels=1), noisy_waves()[1], steps=STEPS, every=EVERY)

    class Killing(trainer.Trainer):
        def draw(self, step: int, slot: int) -> trainer.PatchBatch:
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
def test_killed_trainings_have_the_curve_of_one_that_is_not(whole: Any, kills: tuple[int, ...], tmp_path: Path) -> None:
    for step in kills:
        train(tmp_path, step)
    recipe = train(tmp_path)
    assert rows_of(recipe) == whole[1]
    expected, found = (state_in(read_content(each.checkpoint))["module"] for each in (whole[0], recipe))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_lost_curve_comes_from_the_checkpoint(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = train(tmp_path / "fast", 13)  # in the mode fast, with other workers, they may have other bits
    assert not recipe.checkpoint.exists()
    assert [row["iteration"] for row in read_curve(recipe.curve)[1]] == [4, 8, 12]
    train(tmp_path / "fast", 1)
    assert read_curve(recipe.curve) == (1, [])
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    train(tmp_path, 13).curve.unlink()
    rows = rows_of(train(tmp_path))
    lost = [{name: n for name, n in row.items() if name != "validation"} for row in whole[1][:3]]
    assert rows == [*lost, *whole[1][3:]]
