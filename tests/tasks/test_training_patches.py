"""What trainings are given: patches of stored images, and the pixels that a method hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import InputError
from halotile.tasks.noise.estimate import UNKNOWN
from halotile.tasks.training.patches import HELD_EVERY, HELD_FIRST, HELD_PATCHES, PatchSource, Structure, TrainingImage
from halotile.tasks.training.trainer import METHODS, PatchBatch, mean_loss
from tests.tasks.denoising import Counted
from tests.tasks.training_images import numbered, source_of


def test_patches_follow_from_step_and_slot_alone() -> None:
    source, again = source_of(numbered((200, 300))), source_of(numbered((200, 300)))
    later = source.draw(40, 1, 3).pixels
    first = source.draw(0, 0, 3).pixels
    np.testing.assert_array_equal(again.draw(0, 0, 3).pixels, first)
    np.testing.assert_array_equal(again.draw(40, 1, 3).pixels, later)
    assert not np.array_equal(first, source.draw(0, 1, 3).pixels)
    assert not np.array_equal(first, source.draw(1, 0, 3).pixels)
    assert first.shape == (3, 1, 16, 16)


def test_patches_are_parts_of_the_image_turned_and_flipped() -> None:
    image = numbered((200, 300))
    for patch in source_of(image).draw(3, 2, 6).pixels[:, 0]:
        row, column = divmod(int(patch.min()), 300)
        part = image[row : row + 16, column : column + 16]
        assert any(np.array_equal(np.rot90(flipped, n), patch) for n in range(4) for flipped in (part, part[::-1]))


def test_cells_that_are_held_out_are_in_no_patch_of_a_step() -> None:
    source = source_of(numbered((320, 320)))
    held_out = source.held_out(100)
    assert held_out is not None
    drawn = np.unique(np.concatenate([source.draw(16 * pool, 0, 8).pixels.ravel() for pool in range(40)]))
    assert not np.isin(held_out.pixels, drawn).any()
    cells = [cell.pixels.size for number in range(source.cells) if (cell := source._cell(number))]
    assert sum(cells) == 320 * 320
    assert len(held_out.pixels) == HELD_PATCHES * len(range(HELD_FIRST, source.cells, HELD_EVERY))
    few = source.held_out(5)
    assert few is not None
    assert len(few.pixels) == 5


def test_a_tiny_image_has_nothing_held_out() -> None:
    source = source_of(numbered((20, 40)))
    assert source.held_out(16) is None
    assert source.draw(0, 0, 2).pixels.shape == (2, 1, 16, 16)


def test_several_images_planes_and_channels_are_drawn_from() -> None:
    one = TrainingImage(Counted(numbered((5, 3, 64, 64))), (2, 3), channel=1)
    two = TrainingImage(Counted(-1 - numbered((2, 3, 128, 40))), (2, 3), channel=1)
    source = PatchSource((one, two), 16)
    patches = np.concatenate([source.draw(16 * pool, 0, 8).pixels for pool in range(30)])
    assert patches.shape[1:] == (3, 16, 16)
    np.testing.assert_array_equal(patches[:, 1] - patches[:, 0], np.where(patches[:, 0] < 0, -5120, 4096.0))
    planes = {int(least) // (3 * 4096) for least in patches[:, 0].min((1, 2)) if least >= 0}
    assert planes == set(range(5))
    assert (patches < 0).any()


def test_reads_are_shared_by_the_steps_of_a_pool() -> None:
    image = Counted(numbered((1024, 1024)))
    source = PatchSource((TrainingImage(image, (0, 1)),), 16)
    source.draw(0, 0, 4)
    read = sum(region.size for region in image.reads)
    for step in range(1, 16):
        source.draw(step, 0, 4)
    assert sum(region.size for region in image.reads) == read == 4 * 64 * 64


def test_holes_are_filled_and_not_valid() -> None:
    image = np.full((64, 64), 7.0, np.float32)
    image[::4] = np.nan
    patches = source_of(image).draw(0, 0, 4)
    assert (patches.pixels == 7).all()
    assert patches.valid.mean() == pytest.approx(0.75)


def test_saturated_areas_are_learned_from_and_hot_pixels_are_not() -> None:
    """The mean of pixels near the end of the range would be that of those below it alone; hot pixels would shift that of all."""
    image = np.full((64, 64), 7.0, np.float32)
    image[32:] = 9.0
    image[4:28:8, 4::8] = 9.0
    patches = replace(source_of(image, values=UNKNOWN._replace(saturated=(9.0,))), patch=64).draw(0, 0, 1)
    valid, hot = patches.valid[0, 0], 3 * 8
    assert valid.size - valid.sum() == hot
    assert (patches.pixels[0, 0] == 9).sum() == 32 * 64 + hot
    with pytest.raises(InputError, match="or all are saturated"):
        source_of(np.full((64, 64), 9.0, np.float32), values=UNKNOWN._replace(saturated=(9.0,))).draw(0, 0, 1)


def test_zeros_among_few_photons_are_learned_from() -> None:
    """Without them dark pixels would be taken for brighter."""
    image = np.random.default_rng(0).poisson(3.0, (64, 64)).astype(np.float32)
    image[:32] = 0
    assert replace(source_of(image, values=UNKNOWN._replace(saturated=(0.0,))), patch=64).draw(0, 0, 1).valid.all()


def test_places_with_little_to_learn_from_are_left_out() -> None:
    image = np.full((64, 256), np.nan, np.float32)
    image[:, :64] = 1.0
    assert source_of(image).draw(0, 0, 8).valid.all()
    with pytest.raises(InputError, match="there is nothing to train on"):
        source_of(np.full((64, 64), np.nan, np.float32)).draw(0, 0, 1)


def test_values_are_mapped_to_a_range() -> None:
    rows: list[tuple[Any, float, float]] = [(np.uint8, 10, 110), (np.float16, -6e4, 6e4), (np.float32, -3e38, 3e38)]
    for dtype, low, high in rows:
        image = np.array([low, low / 2 + high / 2, high, high], dtype).repeat(1024).reshape(64, 64)
        source = replace(source_of(image, 32), values=(low, high))
        assert np.unique(source.draw(0, 0, 8).pixels) == pytest.approx([0, 0.5, 1], abs=1e-3)


def batch_of(pixels: torch.Tensor) -> PatchBatch:
    return PatchBatch(pixels, torch.ones_like(pixels), -pixels)


def test_pixels_that_count_are_hidden() -> None:
    """They have values of neighbours, so that no network can return them; all others are as they were."""
    for name in ("noise2void", "noise2self"):
        pixels = torch.from_numpy(numbered((3, 1, 32, 32))).repeat(1, 2, 1, 1)
        torch.manual_seed(1)
        blind = METHODS[name](batch_of(pixels))
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
        assert not torch.equal(METHODS[name](batch_of(pixels)).counted, blind.counted)


def test_the_median_of_neighbours_stands_for_a_pixel() -> None:
    """As Noise2Void 2 does; for neighbours outside stand those of the other side."""
    pixels = torch.rand(2, 3, 32, 33)
    blind = METHODS["noise2void2"](batch_of(pixels))
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
def test_a_line_through_a_hidden_pixel_has_values_of_other_lines(method: str, axis: Structure) -> None:
    """Each pixel has the number of its line."""
    along, across = ("yx".index(axis), "xy".index(axis))
    lines = torch.arange(40.0).expand(40, 40)
    pixels = (lines if axis == "y" else lines.T)[None, None].repeat(2, 1, 1, 1)
    blind = METHODS[method](batch_of(pixels)._replace(structure=axis))
    assert torch.equal(blind.wanted, pixels)
    changed = (blind.given != pixels)[:, 0]
    for patch, *place in torch.nonzero(blind.counted[:, 0]).tolist():
        line = changed[patch].select(across, place[across])
        assert line[max(0, place[along] - 4) : place[along] + 5].all()
    assert blind.counted.mean() < 0.07


def test_patches_keep_the_axis_along_which_noise_is_shared() -> None:
    rows = np.arange(128, dtype=np.float32)[:, None].repeat(128, 1)
    for structure in ("none", "x", "y"):
        drawn = replace(source_of(rows), structure=structure).draw(0, 0, 64).pixels
        assert (drawn == drawn[..., :1]).all() == (structure != "none")
        assert len(np.unique(drawn[:, 0, 0, 0] > drawn[:, 0, -1, 0])) == 2, "flipped"


def test_pairs_are_predicted_from_one_another() -> None:
    pixels = torch.rand(2, 1, 8, 8)
    pair = METHODS["noise2noise"](batch_of(pixels))
    assert torch.equal(pair.given, pixels)
    assert torch.equal(pair.wanted, -pixels)
    assert pair.counted.all()


def test_pixels_without_a_measurement_do_not_count() -> None:
    for method in METHODS.values():
        pixels = torch.rand(2, 1, 32, 32)
        valid = (torch.rand_like(pixels) > 0.5).float()
        blind = method(PatchBatch(pixels, valid, pixels))
        assert not blind.counted[valid == 0].any()
        assert float(mean_loss(torch.nn.Identity(), blind._replace(counted=blind.counted * 0), torch.ones(1))) == 0
