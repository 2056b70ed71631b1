"""PNG previews of planes of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from halotile.errors import ConfigError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Grid, Region
from halotile.storage.images import planes as planes_module
from halotile.storage.images.planes import Planes, choose_planes
from halotile.storage.images.png import block_means, encode_png, write_png

Pixels = NDArray[Any]


def planes_of(folder: Path, pixels: Pixels, name: str = "a.npy", region: Region | None = None) -> Planes:
    np.save(folder / name, pixels)
    return choose_planes(open_source(folder / name), {}, region)


def drawn(folder: Path, *images: Pixels, edge: int | None = None, **options: Any) -> Pixels:
    planes = [planes_of(folder, pixels, f"{n}.npy") for n, pixels in enumerate(images)]
    write_png(folder / "a.png", planes, edge=edge, **options)
    return np.asarray(Image.open(folder / "a.png"))


@settings(deadline=None, max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3])),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_file_holds_the_pixels(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path_factory.mktemp("png") / "a.png"
    path.write_bytes(b"".join(encode_png(pixels)))
    with Image.open(path) as image:
        assert image.mode == {1: "L", 3: "RGB"}[shape[2]]
        assert np.array_equal(np.asarray(image).reshape(shape), pixels)


@pytest.mark.parametrize("shape", [(5, 7), (130, 40), (64, 64), (1, 300)])
@pytest.mark.parametrize("window_bytes", [1, 300, 10**6])
def test_pixels_are_averaged_over_whole_squares_whatever_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], window_bytes: int
) -> None:
    monkeypatch.setattr(planes_module, "WINDOW_BYTES", window_bytes)
    pixels = np.random.default_rng(0).integers(0, 60000, shape, "u2")
    squares = Grid(shape, (9, 9), ((0, 0), (0, 0)))
    means = np.reshape([pixels[block.core.slices].mean() for block in squares], squares.counts)
    assert block_means(planes_of(tmp_path, pixels), 9)[..., 0] == pytest.approx(means, rel=1e-6)


def test_non_finite_pixels_are_ignored_and_squares_without_finite_pixels_are_black(tmp_path: Path) -> None:
    pixels = np.full((4, 8), 3.0, np.float32)
    pixels[:2, :2], pixels[0, 2], pixels[0, 4], pixels[2, 6] = np.nan, np.nan, np.inf, 5.0
    assert drawn(tmp_path, pixels, edge=4, values=(1, 3)).tolist() == [[0, 255, 255, 255], [255] * 4]


@pytest.mark.parametrize("pixels", [np.full((4, 4), np.nan, np.float32), np.zeros((4, 4), np.uint8)])
def test_an_image_without_contrast_is_drawn(tmp_path: Path, pixels: Pixels) -> None:
    assert len(np.unique(drawn(tmp_path, pixels))) == 1


def test_the_contrast_ignores_a_few_outliers(tmp_path: Path) -> None:
    pixels = np.linspace(100, 200, 10_000).reshape(100, 100).astype(np.float32)
    pixels[50, 50], pixels[20, 20] = 1e9, -1e9
    image = drawn(tmp_path, pixels)
    assert (image[0, 0], image[-1, -1]) == (0, 255)
    assert 120 < image[50, 0] < 136


def test_a_region_is_drawn_pixel_by_pixel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70), np.uint8)
    planes = planes_of(tmp_path, pixels, region=Region((10, 20), (50, 41)))
    write_png(tmp_path / "a.png", [planes], edge=None, values=(0, 255))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), pixels[10:50, 20:41])


def test_colour_is_preserved_and_opacity_ignored(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    assert np.array_equal(drawn(tmp_path, pixels, values=(0, 255)), pixels[..., :3])


def test_two_images_are_drawn_side_by_side_with_one_contrast(tmp_path: Path) -> None:
    clean = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (40, 1))
    noisy = clean + np.random.default_rng(0).normal(0, 0.5, clean.shape).astype(np.float32)
    image = drawn(tmp_path, noisy, clean)
    both = tuple(np.percentile(np.stack([noisy, clean]), [0.1, 99.9]))
    assert np.array_equal(image[:, -64:], drawn(tmp_path, clean, values=both))
    assert np.array_equal(image[:, :64], drawn(tmp_path, noisy, values=both))
    assert (image[:, 64:-64] == 255).all()
    grey = drawn(tmp_path, noisy, clean, values=(0, 1))[:, :64]
    assert np.array_equal(grey, (np.clip(noisy.astype(np.float64), 0, 1) * 255).round().astype(np.uint8))


def test_grey_beside_colour_is_drawn_in_colour(tmp_path: Path) -> None:
    grey, colour = np.zeros((12, 12), np.uint8), np.full((12, 12, 3), 200, np.uint8)
    image = drawn(tmp_path, grey, colour, values=(0, 255))
    assert (image[:, :12] == 0).all()
    assert (image[:, -12:] == 200).all()


def test_a_part_too_large_for_a_png_is_refused_before_it_is_read(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (20_000, 20_000))
    planes = choose_planes(open_source(tmp_path / "a.npy"), {}, Region((0, 0), (20_000, 20_000)))
    with pytest.raises(ConfigError, match="Write a smaller --region"):
        write_png(tmp_path / "a.png", [planes], edge=None)


def test_progress_increases_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes_module, "WINDOW_BYTES", 40)
    progress: list[float] = []
    drawn(tmp_path, *[np.zeros((8, 20), np.uint8)] * 2, tick=progress.append)
    assert progress == sorted(progress)
    assert len(progress) == 8
    assert progress[-1] == 1
