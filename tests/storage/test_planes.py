"""Planes of rows and columns of images with any axes, in parts of a bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from halotile.errors import ConfigError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from halotile.storage.images import planes as module
from halotile.storage.images.planes import Planes, choose_planes


def saved(folder: Path, shape: tuple[int, ...], axes: str, dtype: str = "uint16", **options: Any) -> Planes:
    pixels = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    np.save(folder / "a.npy", pixels)
    return choose_planes(
        open_source(folder / "a.npy", axes=axes), options.get("at", {}), options.get("region")
    )


@pytest.mark.parametrize(
    ("axes", "shape", "dtype", "at", "loops", "samples"),
    [
        ("yx", (5, 6), "uint16", {}, (), 1),
        ("xy", (6, 5), "uint16", {}, (), 1),
        ("zyx", (4, 5, 6), "uint16", {}, ("z",), 1),
        ("tczyx", (2, 3, 4, 5, 6), "uint16", {"t": 1}, ("c", "z"), 1),
        ("yxc", (5, 6, 3), "uint16", {}, (), 3),
        ("yxc", (5, 6, 4), "float32", {}, (), 4),
        ("yxc", (5, 6, 5), "uint8", {}, ("c",), 1),
        ("cyx", (3, 5, 6), "uint8", {}, (), 3),
        ("cyx", (3, 5, 6), "uint16", {}, ("c",), 1),
        ("yxc", (5, 6, 3), "uint8", {"c": 2}, (), 1),
    ],
)
def test_planes_are_rows_and_columns_whatever_the_order_of_the_axes(
    tmp_path: Path, axes: str, shape: tuple[int, ...], dtype: str, at: dict[str, int], loops: tuple[str, ...],
    samples: int,
) -> None:  # fmt: skip
    planes = saved(tmp_path, shape, axes, dtype, at=at)
    assert (planes.loops, planes.samples) == (loops, samples)
    index = tuple(n - 1 for n in planes.counts)
    places = at | dict(zip(loops, index, strict=True))
    pixels = np.load(tmp_path / "a.npy")[tuple(places.get(axis, slice(None)) for axis in axes)]
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
    array = zarr.create_array(
        zarr.storage.MemoryStore(), shape=shape, chunks=tuple(map(min, chunk, shape)), dtype="u1"
    )

    class Source:
        axes, chunks, dtype, path, format = ("y", "x"), array.chunks, np.dtype("u1"), "", ""
        scale, units, mapped, ome, shards = (1.0, 1.0), (None, None), False, None, None
        remarks, nodata, channels, order, keeps_chunk = (), None, (), (0, 1), False
        georeference = mask = None
        attributes: Mapping[str, Any] = {}

        def __init__(self) -> None:
            self.shape = shape

        def read(self, region: Region) -> Any:
            raise AssertionError

        __getitem__ = read

        def fingerprint(self) -> dict[str, Any]:
            return {}

        def change(self) -> str:
            return ""

        def one_of_many(self) -> Any:
            raise AssertionError

        def with_sizes(self, sizes: object) -> Any:
            raise AssertionError

        in_order = with_sizes

    planes = choose_planes(Source(), {}, Region(start, stop))
    limit = data.draw(st.integers(1, 500))
    seen = np.zeros(planes.shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_BYTES", limit)
        for part in planes.parts():
            seen[part.slices] += 1
            assert part.size <= max(limit, array.chunks[0] * array.chunks[1])
            for first, a, c in zip(start, part.start, array.chunks, strict=True):
                assert a == 0 or (first + a) % c == 0
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("at", "region", "words"),
    [
        ({"t": 0}, None, "the image's axes are zyx. Write axes of z"),
        ({"y": 0}, None, "Write axes of z"),
        ({"z": 4}, None, "plane z=4: the image has 4 along z. Write 0 to 3"),
        ({}, Region((0, 0), (6, 6)), "region 0:6,0:6: the image has 5 rows and 6 columns"),
        ({}, Region((2, 2), (2, 5)), "region 2:2,2:5"),
    ],
)
def test_a_missing_part_is_refused(
    tmp_path: Path, at: dict[str, int], region: Region | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        saved(tmp_path, (4, 5, 6), "zyx", at=at, region=region)


@pytest.mark.parametrize(
    ("colours", "is_colour"),
    [
        (["0000FF", "00FF00", "FF0000"], False),
        (["FF0000", "00FF00", "0000FF"], True),
        (["0000FF", "00FF00", "FF0000", "FFFFFF"], False),
        (["FF0000", "00FF00", "0000FF", "FFFFFF"], False),
    ],
)
def test_channels_with_colours_of_their_own_are_planes(
    tmp_path: Path, colours: list[str], is_colour: bool
) -> None:
    group = zarr.create_group(tmp_path / "a.zarr")
    group.create_array("0", data=np.zeros((len(colours), 4, 4), "uint8"))
    axes = [{"name": "c", "type": "channel"}, {"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    scale = [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    group.attrs["ome"] = {
        "version": "0.5",
        "multiscales": [{"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}],
        "omero": {"channels": [{"label": name, "color": name, "window": window} for name in colours]},
    }
    planes = choose_planes(open_source(tmp_path / "a.zarr"), {}, None)
    assert (planes.colour, planes.loops) == (is_colour, () if is_colour else ("c",))
