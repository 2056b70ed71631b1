"""Levels of exported TIFFs: means of two by two pixels, in bounded memory, taken from an output that has its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

from halotile.storage.arrays import open_source
from halotile.storage.grid import Grid, Region
from halotile.storage.images import tiff_export
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import NextLevel, write_tiff
from halotile.storage.sharded.output import Layout, ShardWriter, create_output
from tests.cases import in_folders

Pixels = NDArray[Any]
LIMIT_BYTES = 150 * 2**20
"""Memory, threads included, for an image of 396 million bytes."""


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiff_export, "LARGEST_TOP", 40)
    monkeypatch.setattr(tiff_export, "TILE", 16)
    monkeypatch.setattr(tiff_export, "WINDOW_BYTES", 3000)


def means(pixels: Pixels, nodata: float | None = None) -> Pixels:
    """Means of two by two pixels in double precision, without those that are holes, by the axes y and x at the end."""
    height, width = pixels.shape[-2:]
    values = pixels.astype(float)
    if nodata is not None:
        values[pixels == nodata] = np.nan
    edges = [(0, 0)] * (pixels.ndim - 2) + [(0, height % 2), (0, width % 2)]
    values = np.pad(values, edges, constant_values=np.nan)
    cells = values.reshape(*pixels.shape[:-2], -(-height // 2), 2, -(-width // 2), 2)
    valid = np.isfinite(cells)
    total, count = np.where(valid, cells, 0).sum((-3, -1)), valid.sum((-3, -1))
    empty = np.nan if nodata is None else nodata
    found = np.where(count > 0, total / np.maximum(count, 1), empty)
    return (np.rint(found) if pixels.dtype.kind in "iu" else found).astype(pixels.dtype)


def levels_of(path: Path) -> list[Pixels]:
    with tifffile.TiffFile(path) as file:
        return [level.asarray() for level in file.series[0].levels]


def image(shape: tuple[int, ...], dtype: str) -> Pixels:
    return (np.random.default_rng(0).random(shape) * 200).astype(dtype)


def test_each_pixel_is_the_mean_of_those_it_covers(tmp_path: Path) -> None:
    rows: list[tuple[str, tuple[int, ...]]] = [("yx", (151, 90)), ("tczyx", (2, 2, 2, 90, 37))]
    for folder, ((axes, shape), dtype) in in_folders(
        tmp_path, itertools.product(rows, ("uint8", "uint16", "int16", "uint32", "float32", "float64"))
    ):
        pixels = image(shape, dtype)
        np.save(folder / "a.npy", pixels)
        source = open_source(folder / "a.npy", axes=axes)
        write_tiff(folder / "a.tif", choose_planes(source, {}, None))
        assert [p.name for p in sorted(folder.iterdir())] == ["a.npy", "a.tif"], "scratch files are removed"
        found = levels_of(folder / "a.tif")
        assert len(found) == 3
        for finer, coarse in zip([pixels, *found[1:]], [*found[1:], None], strict=True):
            if coarse is not None:
                np.testing.assert_allclose(coarse, means(finer), rtol=1e-6)
        assert open_source(folder / "a.tif", level=2).shape == found[2].shape


def test_colours_are_averaged_one_by_one(tmp_path: Path) -> None:
    pixels = image((90, 70, 3), "uint8")
    np.save(tmp_path / "a.npy", pixels)
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.npy", axes="yxc"), {}, None))
    coarse = levels_of(tmp_path / "a.tif")[1]
    assert np.array_equal(coarse, np.moveaxis(means(np.moveaxis(pixels, 2, 0)), 0, 2))


def test_holes_are_left_out_of_every_mean(tmp_path: Path) -> None:
    rows: list[tuple[str, float | None]] = [("float32", None), ("float32", -9999), ("uint16", 0)]
    for folder, (dtype, nodata) in in_folders(tmp_path, rows):
        pixels = image((100, 90), dtype) + 1
        pixels[20:41, 30:61] = np.nan if nodata is None else nodata
        array = zarr.create_array(folder / "a.zarr", data=pixels, chunks=(32, 32))
        if nodata is not None:
            array.attrs["missing_value"] = nodata
        write_tiff(folder / "a.tif", choose_planes(open_source(folder / "a.zarr"), {}, None))
        first, second, third = levels_of(folder / "a.tif")
        for finer, coarse in ((first, second), (second, third)):
            np.testing.assert_allclose(coarse, means(finer, nodata), rtol=1e-6)
        if nodata is not None:
            assert (first == nodata).sum() == 21 * 31
            assert open_source(folder / "a.tif").nodata == nodata


def output(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Pixels:
    """An output of a run, with levels."""
    monkeypatch.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 100)
    monkeypatch.setattr("halotile.storage.sharded.layout.SMALLEST_SHARD", 4)
    axes, scale, units = ("c", "y", "x"), (1.0, 0.5, 0.5), (None, "micrometer", "micrometer")
    layout = Layout((2, 300, 170), "uint8", (1, 32, 32), (1, 8, 8), "lz4", axes, scale, units, True, **changes)
    layout = layout.in_levels((1, 128, 128))
    pixels = image(layout.shape, "uint8")
    create_output(path, layout)
    for block in Grid(layout.shape, layout.block, ((0, 0),) * 3):
        ShardWriter(path, layout).write(block.core, pixels[block.core.slices])
    return pixels


def test_the_levels_of_an_output_are_taken_and_further_ones_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output(tmp_path / "a.zarr", monkeypatch)
    made: list[tuple[int, int]] = []
    make = NextLevel.make

    def noted(level: NextLevel) -> None:
        made.append(level.planes.shape)
        make(level)

    monkeypatch.setattr(NextLevel, "make", noted)
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
    assert made == [(75, 43)], "of the coarsest stored level"
    found, group = levels_of(tmp_path / "a.tif"), zarr.open_group(tmp_path / "a.zarr", mode="r")
    for level in range(3):
        assert np.array_equal(found[level], np.asarray(group[str(level)]))
    assert np.array_equal(found[3], means(found[2]))

    made.clear()
    coarser = choose_planes(open_source(tmp_path / "a.zarr", level=1), {"c": 1}, None)
    write_tiff(tmp_path / "b.tif", coarser)
    assert made == [(75, 43)]
    assert all(np.array_equal(a[1], b) for a, b in zip(found[1:], levels_of(tmp_path / "b.tif"), strict=True))


def test_levels_of_other_programs_and_of_a_part_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = output(tmp_path / "a.zarr", monkeypatch)
    part = choose_planes(open_source(tmp_path / "a.zarr"), {}, Region((1, 0), (300, 170)))
    write_tiff(tmp_path / "a.tif", part)
    assert np.array_equal(levels_of(tmp_path / "a.tif")[1], means(pixels[:, 1:]))

    group = zarr.open_group(tmp_path / "b.zarr", mode="w")
    for n in range(2):
        group.create_array(str(n), data=pixels[0, :: 2**n, :: 2**n])
    scales = [{"type": "scale", "scale": [2.0**n, 2.0**n]} for n in range(2)]
    datasets = [{"path": str(n), "coordinateTransformations": [scale]} for n, scale in enumerate(scales)]
    axes = [{"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(tmp_path / "b.zarr"), {}, None))
    assert np.array_equal(levels_of(tmp_path / "b.tif")[1], means(pixels[0])), "not every second pixel"


def test_names_colours_and_the_time_step_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = {"start": 0.0, "end": 9.0, "min": 0.0, "max": 255.0}
    colours = {"DAPI": "0000FF", "GFP": "80FF00"}
    channels = [{"label": label, "color": colour, "window": window} for label, colour in colours.items()]
    output(tmp_path / "a.zarr", monkeypatch, omero={"channels": channels}, name="cells")
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
    back = open_source(tmp_path / "a.tif")
    assert [dict(one) for one in back.channels] == [{"label": n, "color": c} for n, c in colours.items()]
    assert (back.scale, back.units) == ((1, 0.5, 0.5), (None, "micrometer", "micrometer"))
    write_tiff(tmp_path / "b.tif", choose_planes(open_source(tmp_path / "a.zarr"), {"c": 1}, None))
    assert [channel["label"] for channel in open_source(tmp_path / "b.tif").channels] == ["GFP"]

    metadata = {"axes": "TYX", "TimeIncrement": 2.5, "TimeIncrementUnit": "ms"}
    tifffile.imwrite(tmp_path / "t.ome.tif", image((3, 20, 20), "uint8"), metadata=metadata)
    write_tiff(tmp_path / "t.tif", choose_planes(open_source(tmp_path / "t.ome.tif"), {}, None))
    movie = open_source(tmp_path / "t.tif")
    assert (movie.scale[0], movie.units[0]) == (2.5, "millisecond")


EXPORT_WITHIN_LIMIT = """
import resource
from pathlib import Path
import numpy as np
from halotile.storage.arrays import open_source
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import write_tiff

def export(name):
    write_tiff(Path(name + ".tif"), choose_planes(open_source(name + ".npy"), {}, None))

np.save("small.npy", np.zeros((999, 999), "u1"))
export("small")  # imports what is needed
np.lib.format.open_memmap("large.npy", "w+", "u1", (18_000, 22_000))
used = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))
limit = int(used) * 1024 + MORE_BYTES
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
export("large")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory work on Linux")
def test_an_image_far_larger_than_the_memory_is_written(tmp_path: Path) -> None:
    code = EXPORT_WITHIN_LIMIT.replace("MORE_BYTES", str(LIMIT_BYTES))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tifffile.TiffFile(tmp_path / "large.tif") as file:
        assert [level.shape for level in file.series[0].levels][:2] == [(18_000, 22_000), (9_000, 11_000)]
        assert len(file.series[0].levels) == 7


def test_holes_of_bool_are_written_as_the_pixels_are(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr", data=np.random.default_rng(0).random((600, 700)) > 0.5, chunks=(64, 64)
    )
    array.attrs["_FillValue"] = True
    write_tiff(tmp_path / "a.tif", choose_planes(open_source(tmp_path / "a.zarr"), {}, None))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert file.pages[0].tags[42113].value.strip("\0") == "255"
        assert file.series[0].levels[1].asarray().max() == 255
