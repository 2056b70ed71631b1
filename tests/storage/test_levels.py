"""Resolution levels that blocks write: means of two by two pixels, the same whatever the blocks are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Grid, Region
from halotile.storage.sharded import layout
from halotile.storage.sharded.layout import halve
from halotile.storage.sharded.output import Layout, ShardWriter, check_block, create_output, halve_to, open_output
from halotile.storage.sharded.ownership import find_foreign_entry, metadata_problems
from tests.cases import in_folders, thorough
from tests.support import noisy_image

SHAPE = (150, 213)


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGEST_TOP", 20)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)


def layout_of(dtype: str = "float32", **changes: Any) -> Layout:
    units = ("micrometer", "micrometer")
    plain = Layout(SHAPE, dtype, (32, 32), (8, 8), "lz4", ("y", "x"), (0.5, 0.5), units, ome=True)
    return replace(plain, **changes)


def write_in_blocks(path: Path, layout: Layout, pixels: NDArray[Any], block: tuple[int, ...]) -> Layout:
    """Write an image block by block, and return its layout with levels."""
    layout = layout.in_levels(block)
    create_output(path, layout)
    writer = ShardWriter(path, layout)
    for part in Grid(layout.shape, block, ((0, 0),) * len(block)):
        writer.write(part.core, pixels[part.core.slices])
    return layout


def stored_levels(path: Path) -> list[NDArray[Any]]:
    group = zarr.open_group(path, mode="r")
    return [group[str(n)][...] for n in range(len(list(group.array_keys())))]


def slow_halves(pixels: NDArray[Any]) -> NDArray[Any]:
    """Means window by window, in double precision."""
    rows, columns = (-(-n // 2) for n in pixels.shape)
    result = np.full((rows, columns), np.nan)
    for y, x in np.ndindex(rows, columns):
        window = pixels[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float)
        if np.isfinite(window).any():
            result[y, x] = window[np.isfinite(window)].mean()
    return result


def test_a_level_holds_the_means_of_the_one_before(tmp_path: Path) -> None:
    for folder, dtype in in_folders(tmp_path, ("uint8", "int16", "uint32", "float16", "float32", "float64")):
        pixels = noisy_image(SHAPE, dtype)
        write_in_blocks(folder / "a.zarr", layout_of(dtype), pixels, (64, 64))
        stored = stored_levels(folder / "a.zarr")
        assert [level.shape for level in stored] == [(150, 213), (75, 107), (38, 54), (19, 27), (10, 14)]
        np.testing.assert_array_equal(stored[0], pixels)
        for finer, level in itertools.pairwise(stored):
            means = slow_halves(finer)
            wanted = np.rint(means) if pixels.dtype.kind in "iu" else means
            tolerance = {"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-12)
            np.testing.assert_allclose(level, wanted, rtol=tolerance)
            assert level.dtype == pixels.dtype


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("block", [(32, 32), thorough((96, 64)), (160, 224)])
def test_levels_do_not_depend_on_the_blocks(tmp_path: Path, dtype: str, block: tuple[int, int]) -> None:
    pixels = noisy_image(SHAPE, dtype)
    if dtype == "float32":
        pixels[20:61, 30:77] = np.nan
        pixels[100, ::3] = np.nan
        pixels[140:, 200:] = 3e38  # a sum of two is beyond the type
    write_in_blocks(tmp_path / "a.zarr", layout_of(dtype), pixels, block)
    write_in_blocks(tmp_path / "b.zarr", layout_of(dtype), pixels, SHAPE)
    found, whole = stored_levels(tmp_path / "a.zarr"), stored_levels(tmp_path / "b.zarr")
    for level, expected in zip(found, whole, strict=False):
        np.testing.assert_array_equal(level, expected)
    assert len(found) >= 4


def test_holes_are_left_out() -> None:
    pixels = np.array([[1, -9, -9, -9], [3, 5, -9, -9]], "int16")
    np.testing.assert_array_equal(halve(pixels, (2, 2), -9), [[3, np.nan]])
    floats = np.array([[1, np.nan, np.nan, np.nan], [3, 5, np.nan, np.nan]], "float32")
    np.testing.assert_array_equal(halve(floats, (2, 2), None), [[3, np.nan]])
    np.testing.assert_array_equal(halve(np.full((2, 2), 3e38, "float32"), (2, 2), None), [[np.float32(3e38)]])


def test_a_mean_that_is_no_hole_does_not_get_the_value_of_one() -> None:
    pixels = np.array([[-3, 3, 0, 0, -1, 0], [3, -3, 0, 0, 0, 1]], "int16")
    assert halve_to(pixels, (2, 2), "int16", 0).tolist() == [[1, 0, 1]]
    assert halve_to(np.array([[254, 255]], "uint8"), (1, 2), "uint8", 255).tolist() == [[254]]
    floats = halve_to(np.array([[-1.0, 1.0, 0.0, np.nan]], "float32"), (1, 2), "float32", 0)
    assert floats[0, 0] > 0
    assert floats[0, 1] == 0


def test_z_is_halved_where_voxels_are_cubes(tmp_path: Path) -> None:
    shape, um = (40, 40, 48), ("micrometer",) * 3
    cubes = Layout(shape, "uint8", (8, 16, 16), (8, 8, 8), "none", tuple("zyx"), (0.2,) * 3, um, True)
    flat = replace(cubes, scale=(0.5, 0.2, 0.2))
    pixels = noisy_image((40, 40, 48), "uint8")
    write_in_blocks(tmp_path / "a.zarr", cubes, pixels, (16, 16, 16))
    write_in_blocks(tmp_path / "b.zarr", flat, pixels, (16, 16, 16))
    assert [level.shape for level in stored_levels(tmp_path / "a.zarr")][:2] == [(40, 40, 48), (20, 20, 24)]
    assert [level.shape for level in stored_levels(tmp_path / "b.zarr")][:2] == [(40, 40, 48), (40, 20, 24)]
    eighths = pixels.reshape(20, 2, 20, 2, 24, 2).mean((1, 3, 5))
    np.testing.assert_array_equal(stored_levels(tmp_path / "a.zarr")[1], np.rint(eighths))


def test_metadata_give_the_size_and_the_centre_of_a_pixel(tmp_path: Path) -> None:
    placed = layout_of(translation=(10.0, 0.0))
    layout = write_in_blocks(tmp_path / "a.zarr", placed, noisy_image(SHAPE), (64, 64))
    image = zarr.open_group(tmp_path / "a.zarr", mode="r").attrs["ome"]["multiscales"][0]
    assert image["datasets"][2]["coordinateTransformations"] == [
        {"type": "scale", "scale": [2.0, 2.0]},
        {"type": "translation", "translation": [10.75, 0.75]},
    ]
    assert open_output(tmp_path / "a.zarr") == layout
    assert Layout.from_json(layout.to_json()) == layout


def test_a_lost_or_foreign_shard_of_a_level_is_found(tmp_path: Path) -> None:
    pixels = noisy_image(SHAPE)
    layout = layout_of().in_levels((64, 64))
    create_output(tmp_path / "a.zarr", layout)
    writer, grid = ShardWriter(tmp_path / "a.zarr", layout), layout.grid
    written = {part.number: writer.write(part.core, pixels[part.core.slices]) for part in grid}
    assert sum(1 for _ in (tmp_path / "a.zarr").rglob("c/*/*")) == layout.files
    assert not find_foreign_entry(tmp_path / "a.zarr", layout)
    for part in grid:
        assert not check_block(tmp_path / "a.zarr", layout, part.core, written[part.number].digest)
    one, other = (tmp_path / "a.zarr" / "2" / "c" / "0" / n for n in "01")
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    (problem,) = check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core, written[0].digest)
    assert "a shard of another place or time" in problem
    one.unlink()
    assert check_block(tmp_path / "a.zarr", layout, grid.block_at(0).core) == [f"{one}: the shard is missing"]
    (tmp_path / "a.zarr" / "1" / "zarr.json").unlink()
    problems = list(metadata_problems(tmp_path / "a.zarr", layout, lambda: True))
    assert problems == [f"metadata: {tmp_path}/a.zarr/1/zarr.json is missing"]
    with pytest.raises(ConfigError, match="not a whole number of shards"):
        writer.write(Region((32, 0), (64, 64)), np.zeros((32, 64), "float32"))


def test_a_bare_array_and_a_small_image_have_one_level() -> None:
    assert layout_of(ome=False).in_levels((64, 64)).levels == 1
    assert layout_of(shape=(20, 20)).in_levels((32, 32)).levels == 1
    assert layout_of().in_levels((64, 64), 2).levels == 2
