"""PNG previews of planes of any size, and planes of rows and columns of images with any axes, in parts of a bounded size."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
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
from tests.cases import in_folders

Pixels = NDArray[Any]


def planes_of(folder: Path, pixels: Pixels, name: str = "a.npy", region: Region | None = None) -> Planes:
    np.save(folder / name, pixels)
    return choose_planes(open_source(folder / name), {}, region)


def drawn(folder: Path, *images: Pixels, edge: int | None = None, **options: Any) -> Pixels:
    planes = [planes_of(folder, pixels, f"{n}.npy") for n, pixels in enumerate(images)]
    write_png(folder / "a.png", planes, edge=edge, **options)
    return np.asarray(Image.open(folder / "a.png"))


@settings(deadline=None, max_examples=25)
@given(shape=st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3])), seed=st.integers(0, 2**32 - 1))
def test_the_file_holds_the_pixels(tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path_factory.mktemp("png") / "a.png"
    path.write_bytes(b"".join(encode_png(pixels)))
    with Image.open(path) as image:
        assert image.mode == {1: "L", 3: "RGB"}[shape[2]]
        assert np.array_equal(np.asarray(image).reshape(shape), pixels)


def test_pixels_are_averaged_over_whole_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = itertools.product((1, 300, 10**6), ((5, 7), (130, 40), (64, 64), (1, 300)))
    for folder, (window_bytes, shape) in in_folders(tmp_path, rows):
        monkeypatch.setattr(planes_module, "WINDOW_BYTES", window_bytes)
        pixels = np.random.default_rng(0).integers(0, 60000, shape, "u2")
        squares = Grid(shape, (9, 9), ((0, 0), (0, 0)))
        means = np.reshape([pixels[block.core.slices].mean() for block in squares], squares.counts)
        assert block_means(planes_of(folder, pixels), 9)[..., 0] == pytest.approx(means, rel=1e-6)


def test_values_are_drawn_with_a_contrast_that_ignores_outliers_units_and_what_is_not_finite(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = np.full((4, 8), 3.0, np.float32)
    pixels[:2, :2], pixels[0, 2], pixels[0, 4], pixels[2, 6] = np.nan, np.nan, np.inf, 5.0
    assert drawn(tmp_path, pixels, edge=4, values=(1, 3)).tolist() == [[0, 255, 255, 255], [255] * 4]
    for value, dtype in ((np.nan, np.float32), (0, np.uint8)):
        assert len(np.unique(drawn(tmp_path, np.full((4, 4), value, dtype)))) == 1, "no contrast"
    pixels = np.linspace(100, 200, 10_000).reshape(100, 100).astype(np.float32)
    pixels[50, 50], pixels[20, 20] = 1e9, -1e9
    shown = drawn(tmp_path, pixels)
    assert (shown[0, 0], shown[-1, -1]) == (0, 255)
    assert 120 < shown[50, 0] < 136
    doubles = random.random((20, 30))
    for factor in (1e-100, 1e100):
        assert np.array_equal(drawn(tmp_path, doubles * factor, edge=10), drawn(tmp_path, doubles, edge=10))
    colours = random.integers(0, 256, (20, 30, 4), np.uint8)
    assert np.array_equal(drawn(tmp_path, colours, values=(0, 255)), colours[..., :3]), "without opacity"
    both = drawn(tmp_path, np.zeros((20, 30), np.uint8), colours, values=(0, 255))  # grey beside colour
    assert np.array_equal(both[:, -30:], colours[..., :3])
    assert not both[:, :30].any()
    grey = random.integers(0, 256, (90, 70), np.uint8)
    part = planes_of(tmp_path, grey, region=Region((10, 20), (50, 41)))
    write_png(tmp_path / "a.png", [part], edge=None, values=(0, 255))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), grey[10:50, 20:41])


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


def test_a_part_too_large_for_a_png_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint8, (20_000, 20_000))
    planes = choose_planes(open_source(tmp_path / "a.npy"), {}, Region((0, 0), (20_000, 20_000)))
    with pytest.raises(ConfigError, match="Write a smaller --region"):
        write_png(tmp_path / "a.png", [planes], edge=None)
    monkeypatch.setattr(planes_module, "WINDOW_BYTES", 40)
    progress: list[float] = []
    drawn(tmp_path, *[np.zeros((8, 20), np.uint8)] * 2, tick=progress.append)
    assert progress == sorted(progress)
    assert (len(progress), progress[-1]) == (8, 1)


def saved(folder: Path, shape: tuple[int, ...], axes: str, dtype: str = "uint16", **options: Any) -> Planes:
    pixels = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    np.save(folder / "a.npy", pixels)
    return choose_planes(open_source(folder / "a.npy", axes=axes), options.get("at", {}), options.get("region"))


ROWS: list[tuple[str, tuple[int, ...], str, dict[str, int], tuple[str, ...], int]] = [
    ("yx", (5, 6), "uint16", {}, (), 1), ("xy", (6, 5), "uint16", {}, (), 1), ("zyx", (4, 5, 6), "uint16", {}, ("z",), 1),
    ("tczyx", (2, 3, 4, 5, 6), "uint16", {"t": 1}, ("c", "z"), 1), ("yxc", (5, 6, 3), "uint16", {}, (), 3), ("yxc", (5, 6, 4), "float32", {}, (), 4),
    ("yxc", (5, 6, 5), "uint8", {}, ("c",), 1), ("cyx", (3, 5, 6), "uint8", {}, (), 3), ("cyx", (3, 5, 6), "uint16", {}, ("c",), 1),
    ("yxc", (5, 6, 3), "uint8", {"c": 2}, (), 1),
]  # fmt: skip


def test_planes_are_rows_and_columns_whatever_the_order_of_the_axes(tmp_path: Path) -> None:
    for folder, (axes, shape, dtype, at, loops, samples) in in_folders(tmp_path, ROWS):
        planes = saved(folder, shape, axes, dtype, at=at)
        assert (planes.loops, planes.samples) == (loops, samples)
        index = tuple(n - 1 for n in planes.counts)
        places = at | dict(zip(loops, index, strict=True))
        pixels = np.load(folder / "a.npy")[tuple(places.get(axis, slice(None)) for axis in axes)]
        left = [axis for axis in axes if axis not in places]
        wanted = pixels.transpose([left.index(axis) for axis in "yxc" if axis in left])
        height, width = planes.shape
        assert np.array_equal(planes.read(index, Region((1, 2), (height, width))), wanted[1:, 2:])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_parts_cover_every_pixel_once_along_whole_chunks(data: st.DataObject) -> None:
    chunk = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    array = zarr.create_array(zarr.storage.MemoryStore(), shape=shape, chunks=tuple(map(min, chunk, shape)), dtype="u1")

    said: Any = {"axes": "yx", "chunks": array.chunks, "dtype": np.dtype("u1"), "shape": shape}
    source: Any = SimpleNamespace(**said, ome=None, channels=())
    planes = choose_planes(source, {}, Region(start, stop))
    limit = data.draw(st.integers(1, 500))
    seen = np.zeros(planes.shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes_module, "WINDOW_BYTES", limit)
        for part in planes.parts():
            seen[part.slices] += 1
            assert part.size <= max(limit, array.chunks[0] * array.chunks[1])
            for first, a, c in zip(start, part.start, array.chunks, strict=True):
                assert a == 0 or (first + a) % c == 0
    assert (seen == 1).all()


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, int], Region | None, str]] = [
        ({"t": 0}, None, "the image's axes are zyx. Write axes of z"),
        ({"y": 0}, None, "Write axes of z"),
        ({"z": 4}, None, "plane z=4: the image has 4 along z. Write 0 to 3"),
        ({}, Region((0, 0), (6, 6)), "region 0:6,0:6: the image has 5 rows and 6 columns"),
        ({}, Region((2, 2), (2, 5)), "region 2:2,2:5"),
    ]
    for folder, (at, region, words) in in_folders(tmp_path, rows):
        with pytest.raises(ConfigError, match=words):
            saved(folder, (4, 5, 6), "zyx", at=at, region=region)


def test_channels_with_colours_of_their_own_are_planes(tmp_path: Path) -> None:
    blue, green, red, white = "0000FF", "00FF00", "FF0000", "FFFFFF"
    bgr, rgb = [blue, green, red], [red, green, blue]
    for folder, colours in in_folders(tmp_path, (bgr, rgb, [*bgr, white], [*rgb, white])):
        group = zarr.create_group(folder / "a.zarr")
        group.create_array("0", data=np.zeros((len(colours), 4, 4), "uint8"))
        window = {"min": 0, "max": 255, "start": 0, "end": 255}
        group.attrs["ome"] = {
            "version": "0.5",
            "multiscales": [{"axes": ["c", "y", "x"], "datasets": [{"path": "0"}]}],
            "omero": {"channels": [{"label": name, "color": name, "window": window} for name in colours]},
        }
        planes, is_colour = choose_planes(open_source(folder / "a.zarr"), {}, None), colours == rgb
        assert (planes.colour, planes.loops) == (is_colour, () if is_colour else ("c",))
