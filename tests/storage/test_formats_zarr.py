"""Zarr arrays, plain groups, OME-Zarr 0.4 and 0.5 images with their levels, axes, scale and units, in folders, .zip stores and URLs."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.storage
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from tests.cases import in_folders

PICTURE: NDArray[np.generic] = np.random.default_rng(1).random((40, 50)).astype("float32")


XARRAY = {"_ARRAY_DIMENSIONS": ["y", "x"]}


def _create(store: Any, **options: Any) -> Any:
    """Write a 40 x 50 array."""
    array = zarr.create_array(store, **{"shape": (40, 50), "chunks": (16, 16), "dtype": "float32"} | options)
    array[...] = PICTURE
    return array


def test_axes_come_from_dimension_names(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"dimension_names": ["Y", "X"]}, ("y", "x")),
        ({"dimension_names": ["x", "y"]}, ("x", "y")),
        ({"zarr_format": 2, "attributes": {"_ARRAY_DIMENSIONS": ["x", "y"]}}, ("x", "y")),
        ({"dimension_names": ["lat", "lon"]}, ("y", "x")),
    ]
    for folder, (options, axes) in in_folders(tmp_path, rows):
        _create(folder / "a.zarr", **options)
        assert open_source(folder / "a.zarr").axes == axes


def test_the_fill_value_of_xarray_is_that_of_holes(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], float | None]] = [
        ({"zarr_format": 2, "fill_value": -32768}, XARRAY, -32768), ({"zarr_format": 2, "fill_value": 0}, XARRAY, 0),
        ({"zarr_format": 2, "fill_value": 0}, {}, None), ({"zarr_format": 2, "fill_value": None}, XARRAY, None),
        ({"zarr_format": 2, "fill_value": False, "dtype": "bool"}, XARRAY, None),
        ({"zarr_format": 2, "fill_value": np.nan, "dtype": "float32"}, {**XARRAY, "missing_value": -1}, -1),
        ({"fill_value": -5, "dimension_names": ["y", "x"]}, {}, None),
        ({}, {"_FillValue": -5}, -5), ({}, {"missing_value": [-7, -8]}, -7),
    ]  # fmt: skip
    for folder, (options, attributes, nodata) in in_folders(tmp_path, rows):
        whole = {"shape": (40, 50), "dtype": "int16", "chunks": (16, 16)} | options
        zarr.create_array(folder / "a.zarr", attributes=attributes, **whole)
        source = open_source(folder / "a.zarr", axes="yx")
        assert source.nodata == nodata
        assert ("-7 is taken as one, -8 as measured" in "".join(source.remarks)) == (nodata == -7)


@pytest.mark.parametrize(("zarr_format", "place"), [(2, "group"), (3, "array"), (2, "zip"), (3, "zip")])
def test_coordinates_of_xarray_have_a_note(tmp_path: Path, zarr_format: Any, place: str) -> None:
    xarray = pytest.importorskip("xarray")
    lat, time = (("y", "x"), np.zeros((40, 50))), np.datetime64("2026-01-01", "ns")
    data, path = dict.fromkeys("tu", (("y", "x"), PICTURE)), tmp_path / "a.zarr"
    stored = xarray.Dataset(data, {"x": np.linspace(0, 9, 50), "lat": lat, "time": time})
    stored.to_zarr(path, zarr_format=zarr_format, consolidated=False)
    packed = shutil.make_archive(str(tmp_path / "b"), "zip", path) if place == "zip" else path
    (remark,) = (open_source(path / "t") if place == "array" else open_source(packed, dataset="t")).remarks
    found = re.match(r"its coordinates (.*) are not written to the output", remark)
    assert found
    assert sorted(found[1].split(", ")) == ["lat", "time", "x"]


def test_numbers_that_are_stored_with_another_sign_are_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=PICTURE.astype("int8"), attributes={"_Unsigned": "true"})
    with pytest.raises(InputError, match=r"_Unsigned says that .*int8 are unsigned\. Write it again as uint8"):
        open_source(tmp_path / "a.zarr")


def test_the_only_array_of_a_group_is_read_and_several_are_listed(tmp_path: Path) -> None:
    rows: list[tuple[list[str], str | None, str, str]] = [
        (["deep/only", "top"], None, "top", ""),
        (["deep/only", "top"], "deep/only", "deep/only", ""),
        (["a/b/c"], None, "a/b/c", ""),
        (["a/b/c", "a/d"], None, "", r"holds 2 arrays.*one of a/b/c, a/d\.$"),
        ([], None, "", "the group holds no arrays at all"),
    ]
    others = (None, "c", "deep", "../a.zarr", "a/../../a.zarr", "/")
    rows += [(["a", "b", "deep/c"], name, "", r"Write dataset: one of a, b, deep/c\.$") for name in others]
    for folder, (names, dataset, found, said) in in_folders(tmp_path, rows):
        _create(folder / "a.zarr")
        group = zarr.open_group(folder / "g.zarr", mode="w")
        for name in names:
            group.create_array(name, data=PICTURE)
        if found:
            assert open_source(folder / "g.zarr", dataset=dataset).fingerprint()["array"] == found
            continue
        with pytest.raises(InputError, match=said):
            open_source(folder / "g.zarr", dataset=dataset)


LAYOUTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3 shards": {"chunks": (8, 8), "shards": (16, 16)},
    "v3, in one directory": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3, names as in v2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v3, in directories as in v2": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2": {"zarr_format": 2},
    "v2, in directories": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
}


def test_a_chunk_written_over_in_place_changes_the_fingerprint(tmp_path: Path) -> None:
    for folder, options in in_folders(tmp_path, LAYOUTS.values()):
        _create(folder / "a.zarr", **options)
        source = open_source(folder / "a.zarr")
        # The unit of decode is the inner chunk of a shard.
        assert (source.format, source.chunks) == ("zarr", options.get("chunks", (16, 16)))
        assert np.array_equal(source.read(Region((3, 4), (39, 50))), PICTURE[3:39, 4:50])
        files = (file for file in (folder / "a.zarr").rglob("*") if file.is_file())
        chunk = max(file for file in files if file.name[-1].isdigit())
        whole, before = chunk.read_bytes(), source.fingerprint()
        with chunk.open("r+b") as file:
            file.write(bytes([whole[0] ^ 1]))
        os.utime(chunk, ns=(0, 12345))  # as if time had passed
        assert open_source(folder / "a.zarr").fingerprint() != before


@pytest.mark.parametrize("limit", ["_MOST_FILES", "_MOST_DIRECTORIES"])
def test_of_many_chunks_directories_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    _create(tmp_path / "a.zarr")
    monkeypatch.setattr(f"halotile.storage.formats.zarr.{limit}", 2)
    chunk, before = tmp_path / "a.zarr" / "c" / "1" / "1", open_source(tmp_path / "a.zarr").fingerprint()
    os.utime(chunk, ns=(0, 12345))
    # Few chunks are all checked in any number of directories.
    assert (open_source(tmp_path / "a.zarr").fingerprint() == before) is (limit == "_MOST_FILES")
    shutil.copy(chunk, chunk.with_name("new"))
    chunk.with_name("new").replace(chunk)
    assert open_source(tmp_path / "a.zarr").fingerprint() != before


def test_broken_metadata_and_more_pixels_than_any_disk_holds_are_refused(tmp_path: Path) -> None:
    _create(tmp_path / "a.zarr")
    document = tmp_path / "a.zarr" / "zarr.json"
    metadata = json.loads(document.read_text())
    metadata["codecs"].append({"name": "wavelet9000"})
    for text in ["{", "", '{"zarr_format": 3}', '{"zarr_format": 3, "node_type": "array"}', json.dumps(metadata)]:
        document.write_text(text)
        with pytest.raises(InputError, match=r"a\.zarr.*wavelet9000" if "wavelet" in text else r"a\.zarr"):
            open_source(tmp_path / "a.zarr")
    for folder, edge in in_folders(tmp_path, (2**40, 2**62)):
        zarr.create_array(folder / "a.zarr", shape=(edge, edge), chunks=(2**20, 2**20), dtype="f4")
        with pytest.raises(InputError, match="no disk holds so many pixels"):
            open_source(folder / "a.zarr")


def test_an_unreadable_url_is_refused_in_one_line() -> None:
    rows = {"odd://here/a.zarr": "recognise URL", "http://127.0.0.1:9/a.zarr": "error sending request"}
    for url, words in rows.items():
        pytest.importorskip("obstore")
        with pytest.raises(InputError, match=f"^{url}: the store cannot be read: .*{words}.*credentials") as refused:
            open_source(url)
        assert "\n" not in str(refused.value)


SPACE = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
CYX = [{"name": "c", "type": "channel"}, *SPACE[1:]]


LEVELS = [np.random.default_rng(level).integers(0, 999, (2, 64 >> level, 48 >> level), "u2") for level in range(3)]


def _write_ome(store: Any, version: str, axes: list[Any] = CYX, **more: Any) -> None:
    """An image of three levels, each with half the resolution of the previous one."""
    group = _group(store, version, "w")
    entries = []
    for level, pixels in enumerate(LEVELS):
        group.create_array(f"s{level}", data=pixels, chunks=(1, 16, 16))
        step = {"type": "scale", "scale": [1, 2**level, 2**level]}
        shift = {"type": "translation", "translation": [0, 5, 5]}
        entries.append({"path": f"s{level}", "coordinateTransformations": [step, shift]})
    image = {"axes": axes, "datasets": entries, **more}
    group.attrs.update(_said(version, {"multiscales": [image | ({"version": "0.4"} if version == "0.4" else {})]}))


def _said(version: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes where this version of OME-Zarr has them."""
    return attributes if version == "0.4" else {"ome": {"version": "0.5", **attributes}}


def _group(place: Any, version: str, mode: Any = "a") -> Any:
    return zarr.open_group(place, mode=mode, zarr_format=2 if version == "0.4" else 3)


both = pytest.mark.parametrize("version", ["0.4", "0.5"])


@both
def test_a_level_reads_with_its_scale_and_a_missing_one_is_refused(tmp_path: Path, version: str) -> None:
    _write_ome(tmp_path / "a.zarr", version)
    for level, pixels in enumerate(LEVELS):
        source = open_source(tmp_path / "a.zarr", level=level)
        assert (source.format, source.axes, source.chunks) == ("ome", ("c", "y", "x"), (1, 16, 16))
        assert source.scale == (1.0, 2.0**level, 2.0**level)
        assert source.units == (None, "micrometer", "micrometer")
        assert np.array_equal(source[...], pixels)
        assert np.array_equal(pickle.loads(pickle.dumps(source))[...], pixels)
    with pytest.raises(InputError, match=r"level is 3.*0 \('s0'\), 1 \('s1'\), 2 \('s2'\)"):
        open_source(tmp_path / "a.zarr", level=3)
    shutil.rmtree(tmp_path / "a.zarr" / "s1")
    with pytest.raises(InputError, match="'s1'"):
        open_source(tmp_path / "a.zarr", level=1)


def _root(folder: Path, version: str, images: list[str]) -> Path:
    """A Zarr of images as bioformats2raw writes it, or a plate where they have a row, a column and a field."""
    root = folder / "root.zarr"
    group = _group(root, version, "w")
    (root / "notes.txt").write_text("a file of another program")
    attributes: dict[str, Any] = {"bioformats2raw.layout": 3}
    if "/" in images[0]:
        attributes["plate"] = {"wells": [{"path": image[:-2]} for image in images] + [{"path": "H/9"}]}
    else:
        group.create_group("OME")
    group.attrs.update(_said(version, attributes))
    for image in images:
        _write_ome(root / image, version)
        if "/" in image:
            _group(root / image[:-2], version).attrs.update(_said(version, {"well": {"images": [{"path": image[-1]}]}}))
    return root


@both
@pytest.mark.parametrize("image", ["0", "A/1/0"])
def test_the_only_image_of_a_root_or_plate_is_opened(tmp_path: Path, version: str, image: str) -> None:
    pytest.importorskip("obstore")
    root = _root(tmp_path, version, [image])
    alone = open_source(root / image, level=1)
    for path in (root, shutil.make_archive(str(tmp_path / "a"), "zip", root), f"file://{root}"):
        source = pickle.loads(pickle.dumps(open_source(path, level=1)))
        assert (source.format, source.axes, source.scale) == ("ome", ("c", "y", "x"), (1.0, 2.0, 2.0))
        assert (source.units, source.ome) == (alone.units, alone.ome)
        assert np.array_equal(source[...], LEVELS[1])


@both
@pytest.mark.parametrize("images", [["0", "1"], ["A/1/0", "B/2/0"]])
def test_one_of_several_images_or_a_level_of_it_is_named(tmp_path: Path, version: str, images: list[str]) -> None:
    pytest.importorskip("obstore")
    root = _root(tmp_path, version, images)
    packed = shutil.make_archive(str(tmp_path / "a"), "zip", root)
    named, one = f"several images: {', '.join(images)}", rf"Write dataset: one of {', '.join(images)}\.$"
    advice = f"{named}. Write the path of one, such as {root}/{images[0]}"
    rows: list[Any] = [(root, None, advice), (packed, None, rf"{named}\. {one}"), (root, "9", f"'9', .* {one}")]
    for path, dataset, said in rows:
        with pytest.raises(InputError, match=said):
            open_source(path, dataset=dataset)
    alone = open_source(root / images[1], level=1)
    for path in (root, packed, f"file://{root}"):
        of_image = open_source(path, dataset=images[1], level=1)
        of_level = open_source(path, dataset=f"{images[1]}/s1")
        for source in (of_image, of_level, pickle.loads(pickle.dumps(of_level))):
            assert (source.axes, source.scale, source.units) == (alone.axes, alone.scale, alone.units)
            assert (source.ome, source.remarks) == (alone.ome, ())
            assert np.array_equal(source.read(Region.whole(source.shape)), LEVELS[1])
        if path is root:
            assert of_image.fingerprint() == of_level.fingerprint() == alone.fingerprint()
        with pytest.raises(InputError, match="level is 2, but dataset s1 is level 1 itself"):
            open_source(path, dataset=f"{images[1]}/s1", level=2)


@both
def test_each_of_several_multiscales_has_its_own_axes_scale_and_name(tmp_path: Path, version: str) -> None:
    group = _group(tmp_path / "a.zarr", version, "w")
    images: list[Any] = []
    for name, size, pixels in (("a", 0.5, LEVELS[0][0]), ("b", 3, LEVELS[1]), ("deep/0", 4, LEVELS[2])):
        group.create_array(name, data=pixels)
        entries = [{"path": name, "coordinateTransformations": [{"type": "scale", "scale": [size] * pixels.ndim}]}]
        images.append({"name": f"image {name}", "axes": CYX[-pixels.ndim :], "datasets": entries})
    group.create_array("other", data=LEVELS[0])
    group.attrs.update(_said(version, {"multiscales": images}))
    said = "it has 3 multiscales, and this is the first: for another, write input.dataset: one of b, deep/0"
    assert open_source(tmp_path / "a.zarr").remarks == (said,)
    named = {"a": ("yx", 0.5, "a"), "b": ("cyx", 3, "b"), **dict.fromkeys(("deep/0", "deep"), ("cyx", 4, "deep/0"))}
    for dataset, (axes, size, name) in named.items():
        source = open_source(tmp_path / "a.zarr", dataset=dataset)
        assert ("".join(source.axes), source.scale) == (axes, (size,) * len(axes))
        assert source.units[-2:] == ("micrometer", "micrometer")
        assert (source.ome and source.ome.name, source.remarks) == (f"image {name}", ())
    # Two images share their finest array.
    images[1]["datasets"].insert(0, {**images[1]["datasets"][0], "path": "a"})
    group.attrs.update(_said(version, {"multiscales": images}))
    assert "one of b, deep/0" in open_source(tmp_path / "a.zarr").remarks[0]
    bare = open_source(tmp_path / "a.zarr", dataset="other", axes="cyx")
    assert (bare.format, bare.scale) == ("zarr", (1.0, 1.0, 1.0))


@both
def test_the_array_of_a_level_is_bare_with_a_note_of_its_image(tmp_path: Path, version: str) -> None:
    _write_ome(tmp_path / "a.zarr", version)
    source = open_source(tmp_path / "a.zarr" / "s1", axes="cyx")
    assert (source.format, source.scale) == ("zarr", (1.0, 1.0, 1.0))
    without = "it is read without the pixel sizes and channels of its OME-Zarr: for these, write "
    assert source.remarks == (f"{without}input.path: {tmp_path}/a.zarr and input.dataset: s1",)
    if version == "0.5":
        return
    for fill, nodata in ((0, None), (7, 7)):  # the default fill value says nothing of the pixels
        store = tmp_path / "a.zarr" / "s0"
        level = zarr.create_array(store, data=LEVELS[0], fill_value=fill, zarr_format=2, overwrite=True)
        level.attrs["_ARRAY_DIMENSIONS"] = ["c", "y", "x"]
        source = open_source(tmp_path / "a.zarr")
        assert (source.nodata, "input.nodata: 0" in "".join(source.remarks)) == (nodata, fill == 0)


@both
def test_the_position_of_the_first_pixel_follows_the_transformations_of_the_image(tmp_path: Path, version: str) -> None:
    whole = [{"type": "scale", "scale": [1, 0.5, 2]}, {"type": "translation", "translation": [0, 100, 0]}]
    rows: list[Any] = [({}, (0.0, 5.0, 5.0), (1.0, 2.0, 2.0))]
    rows += [({"coordinateTransformations": whole}, (0.0, 102.5, 10.0), (1.0, 1.0, 4.0))]
    for folder, (more, place, scale) in in_folders(tmp_path, rows):
        _write_ome(folder / "a.zarr", version, **more)
        source = open_source(folder / "a.zarr", level=1)
        assert (source.ome and source.ome.translation, source.scale) == (place, scale)


CHANNEL = {"color": "00FF00", "label": "GFP", "window": {"start": 0, "end": 90, "min": 0, "max": 999}}


@both
def test_the_name_and_valid_channels_are_read(tmp_path: Path, version: str) -> None:
    _write_ome(tmp_path / "a.zarr", version, name="cells")
    group = zarr.open_group(tmp_path / "a.zarr", mode="r+")
    two, named = {"channels": [CHANNEL, CHANNEL]}, {"channels": [CHANNEL], "rdefs": {"model": "color"}}
    odd: list[Any] = [{}, CHANNEL | {"color": "green"}, CHANNEL | {"window": {"start": 0}}, {"color": "00FF00"}]
    rows: list[tuple[Any, Any]] = [(two | {"version": "0.4"}, two), (named, named), ("text", None)]
    rows += [({"channels": []}, None), *(({"channels": [channel]}, None) for channel in odd)]
    for omero, kept in rows:
        said = dict(group.attrs)
        group.attrs.update(_said(version, {**(said if version == "0.4" else said["ome"]), "omero": omero}))
        ome = open_source(tmp_path / "a.zarr").ome
        assert ome is not None
        assert (ome.name, ome.omero) == ("cells", kept)


def test_axes_of_older_or_unusual_images(tmp_path: Path) -> None:
    rows: list[tuple[list[Any], str]] = [
        (["z", "y", "x"], "zyx"),
        ([{"name": "lambda", "type": "channel"}, {"name": "y"}, {"name": "x"}], "cyx"),
        ([{"name": "angle"}, {"name": "y"}, {"name": "x"}], "qyx"),
        ([{"name": "y"}], "qyx"),
        ([], "qyx"),
    ]
    for folder, (axes, letters) in in_folders(tmp_path, rows):
        _write_ome(folder / "a.zarr", "0.4", axes=axes)
        assert "".join(open_source(folder / "a.zarr").axes) == letters


def _plane(path: Path, axes: list[Any], scale: list[float]) -> Path:
    """A plane of one level with contradictory metadata."""
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=LEVELS[0][0])
    steps = [{"type": "scale", "scale": scale}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    return path


MEANT: list[tuple[list[Any], list[float], str, tuple[float, ...], tuple[str | None, ...]]] = [
    (SPACE, [2, 3], "names the axes z, y, x for an array of 2: taken as yx. If not, write input.axes", (2.0, 3.0), (None, None)),
    ([SPACE[1], SPACE[1]], [2, 3], "names the axes y, y: taken as yx", (2.0, 3.0), ("micrometer",) * 2),
    (SPACE[1:], [9, 2, 3], "has a scale of 3 numbers for 2 axes, which is left out: the size is taken", (1.0, 1.0), (None, None)),
    (SPACE[1:], [2, -1], "has -1 as the size along x, which is none: the size is taken", (2.0, 1.0), ("micrometer", None)),
    (SPACE[1:], [0, 3], "has 0 as the size along y, which is none: the size is taken", (1.0, 3.0), (None, "micrometer")),
    ([SPACE[1], {"name": "x", "unit": "parsnip"}], [2, 3], "has 'parsnip' as the unit along x", (2.0, 3.0), ("micrometer", None)),
    ([SPACE[1], {"name": "x", "unit": "um"}], [2, 3], "", (2.0, 3.0), ("micrometer", "micrometer")),
    ([SPACE[1], {"name": "x", "unit": "yottasecond"}], [2, 3], "", (2.0, 3.0), ("micrometer", "yottasecond")),
    ([SPACE[1], {"name": "x", "unit": "angstrom"}], [2, 3], "", (2.0, 3.0), ("micrometer", "angstrom")),
]  # fmt: skip


def test_metadata_that_cannot_be_meant_are_remarked_on_and_not_taken_over(tmp_path: Path) -> None:
    for folder, (axes, scale, remark, sizes, units) in in_folders(tmp_path, MEANT):
        source = open_source(_plane(folder / "a.zarr", axes, scale))
        assert len(source.remarks) == bool(remark)
        assert all(said.startswith((f"its OME-Zarr {remark}", f"the file {remark}")) for said in source.remarks)
        assert (source.axes, source.scale, source.units) == (("y", "x"), sizes, units)
        if axes is SPACE:
            assert open_source(folder / "a.zarr", axes="yx").remarks == (), "the user has named them"


def test_attributes_that_describe_no_image_leave_a_plain_group_and_broken_ones_are_an_error(tmp_path: Path) -> None:
    nothing: list[Any] = ["hello", {"multiscales": []}, {"plate": {}}, None]
    broken: list[Any] = [["text"], [{"datasets": "s0"}], [{"datasets": [{"name": "s0"}]}], {"a": 1}]
    for folder, ome in in_folders(tmp_path, nothing + [{"version": "0.5", "multiscales": one} for one in broken]):
        group = zarr.open_group(folder / "a.zarr", mode="w")
        group.attrs["ome"] = ome
        group.create_array("only", data=LEVELS[0])
        if ome in nothing:
            assert open_source(folder / "a.zarr").format == "zarr"
            continue
        with pytest.raises(InputError, match=r"a\.zarr"):
            open_source(folder / "a.zarr")


def test_an_invalid_channel_costs_no_other_its_name(tmp_path: Path) -> None:
    whole = {"label": "DAPI", "color": "0000FF", "window": {"start": 0, "end": 9, "min": 0, "max": 9}}
    channels = [whole, {"label": "GFP"}, {"label": 3, "color": "red", "window": {"start": 9, "end": 0}}]
    image = {"axes": ["c", "y", "x"], "datasets": [{"path": "0"}]}
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    group.create_array("0", shape=(3, 4, 5), dtype="u1")
    group.attrs.update({"multiscales": [image, image], "omero": {"channels": channels}})
    source = open_source(tmp_path / "a.zarr")
    assert source.channels == ({"label": "DAPI", "color": "0000FF", "window": (0, 9)}, {"label": "GFP"}, {})
    assert any("omero attribute is not valid" in remark for remark in source.remarks)
    assert any("2 multiscales" in remark for remark in source.remarks)
    assert not any("describes" in remark for remark in source.remarks)
    group.attrs["omero"] = {"channels": [whole]}
    remark = "its omero attribute describes 1 of 3 channels"
    assert remark in open_source(tmp_path / "a.zarr").remarks
