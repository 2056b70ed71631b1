"""Zarr arrays, plain groups, .zip stores and URLs."""

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

from halotile.errors import DamagedData, InputError
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


def test_both_versions_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"zarr_format": 2}, {"zarr_format": 3}, {"chunks": (8, 8), "shards": (32, 32)}]
    for folder, options in in_folders(tmp_path, rows):
        _create(folder / "a.zarr", **options)
        source = open_source(folder / "a.zarr")
        # The unit of decode is the inner chunk of a shard.
        assert (source.format, source.chunks) == ("zarr", options.get("chunks", (16, 16)))
        assert np.array_equal(source.read(Region((3, 4), (39, 50))), PICTURE[3:39, 4:50])


def test_missing_chunks_read_as_fill_value(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(40, 50), chunks=(16, 16), dtype="float32", fill_value=7)
    assert (open_source(tmp_path / "a.zarr").read(Region((3, 4), (20, 21))) == 7).all()


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
        ({"zarr_format": 2, "fill_value": -32768}, XARRAY, -32768),
        ({"zarr_format": 2, "fill_value": 0}, XARRAY, 0),
        ({"zarr_format": 2, "fill_value": 0}, {}, None),
        ({"zarr_format": 2, "fill_value": None}, XARRAY, None),
        ({"zarr_format": 2, "fill_value": False, "dtype": "bool"}, XARRAY, None),
        ({"zarr_format": 2, "fill_value": np.nan, "dtype": "float32"}, {**XARRAY, "missing_value": -1}, -1),
        ({"fill_value": -5, "dimension_names": ["y", "x"]}, {}, None),
        ({}, {"_FillValue": -5}, -5),
        ({}, {"missing_value": [-7, -8]}, -7),
    ]
    for folder, (options, attributes, nodata) in in_folders(tmp_path, rows):
        whole = {"shape": (40, 50), "dtype": "int16", "chunks": (16, 16)} | options
        zarr.create_array(folder / "a.zarr", attributes=attributes, **whole)
        source = open_source(folder / "a.zarr", axes="yx")
        assert source.nodata == nodata
        assert ("-7 is taken as one, -8 as measured" in "".join(source.remarks)) == (nodata == -7)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("place", ["group", "array", "zip"])
def test_coordinates_of_xarray_have_a_note(tmp_path: Path, zarr_format: Any, place: str) -> None:
    xarray = pytest.importorskip("xarray")
    coordinates = {
        "x": np.linspace(0, 9, 50),
        "lat": (("y", "x"), np.zeros((40, 50))),
        "time": np.datetime64("2026-01-01", "ns"),
    }
    data = {"t": (("y", "x"), PICTURE), "u": (("y", "x"), PICTURE)}
    path = tmp_path / "a.zarr"
    xarray.Dataset(data, coordinates).to_zarr(path, zarr_format=zarr_format, consolidated=False)
    if place == "array":
        source = open_source(path / "t")
    else:
        packed = path if place == "group" else shutil.make_archive(str(tmp_path / "b"), "zip", path)
        source = open_source(packed, dataset="t")
    (remark,) = source.remarks
    found = re.match(r"its coordinates (.*) are not written to the output", remark)
    assert found
    assert sorted(found[1].split(", ")) == ["lat", "time", "x"]


def test_numbers_that_are_stored_with_another_sign_are_refused(tmp_path: Path) -> None:
    pixels = PICTURE.astype("int8")
    zarr.create_array(tmp_path / "a.zarr", data=pixels, attributes={"_Unsigned": "true"})
    said = r"_Unsigned says that .*int8 are unsigned\. Write it again as uint8"
    with pytest.raises(InputError, match=said):
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
        before = open_source(folder / "a.zarr").fingerprint()
        files = (file for file in (folder / "a.zarr").rglob("*") if file.is_file())
        chunk = max(file for file in files if file.name[-1].isdigit())
        whole = chunk.read_bytes()
        with chunk.open("r+b") as file:
            file.write(bytes([whole[0] ^ 1]))
        os.utime(chunk, ns=(0, 12345))  # as if time had passed
        assert open_source(folder / "a.zarr").fingerprint() != before


def test_of_too_many_chunks_only_the_directories_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _create(tmp_path / "a.zarr")
    monkeypatch.setattr("halotile.storage.formats.zarr._MOST_FILES", 3)
    chunk = tmp_path / "a.zarr" / "c" / "1" / "1"
    before = open_source(tmp_path / "a.zarr").fingerprint()
    os.utime(chunk, ns=(0, 12345))
    assert open_source(tmp_path / "a.zarr").fingerprint() == before
    shutil.copy(chunk, chunk.with_name("new"))
    chunk.with_name("new").replace(chunk)
    assert open_source(tmp_path / "a.zarr").fingerprint() != before


def test_few_chunks_are_all_checked_in_any_number_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _create(tmp_path / "a.zarr")
    monkeypatch.setattr("halotile.storage.formats.zarr._MOST_DIRECTORIES", 2)
    before = open_source(tmp_path / "a.zarr").fingerprint()
    os.utime(tmp_path / "a.zarr" / "c" / "1" / "1", ns=(0, 12345))
    assert open_source(tmp_path / "a.zarr").fingerprint() != before


def test_a_zip_store_and_a_url_read(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        _create(store)
    _create(tmp_path / "a.zarr")
    for path in (str(tmp_path / "a.zip"), f"file://{tmp_path}/a.zarr"):
        source = pickle.loads(pickle.dumps(open_source(path)))
        assert source.path == path
        assert np.array_equal(source.read(Region((3, 4), (39, 50))), PICTURE[3:39, 4:50])


def test_broken_metadata_are_an_input_error(tmp_path: Path) -> None:
    _create(tmp_path / "a.zarr")
    document = tmp_path / "a.zarr" / "zarr.json"
    metadata = json.loads(document.read_text())
    metadata["codecs"].append({"name": "wavelet9000"})
    texts = ["{", "", '{"zarr_format": 3}', '{"zarr_format": 3, "node_type": "array"}', json.dumps(metadata)]
    for text in texts:
        document.write_text(text)
        with pytest.raises(InputError, match=r"a\.zarr.*wavelet9000" if "wavelet" in text else r"a\.zarr"):
            open_source(tmp_path / "a.zarr")


CODECS: list[dict[str, Any]] = [
    {"compressors": [zarr.codecs.BloscCodec(cname="lz4"), zarr.codecs.Crc32cCodec()]},
    {"compressors": [zarr.codecs.ZstdCodec()]},
    {"compressors": [zarr.codecs.GzipCodec()]},
    {"compressors": None},
    {"compressors": [zarr.codecs.Crc32cCodec()], "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    {"compressors": [zarr.codecs.Crc32cCodec()], "chunks": (8, 8), "shards": (16, 16)},
]


@pytest.mark.parametrize("options", CODECS)
def test_a_truncated_chunk_and_a_flipped_bit_under_a_checksum_are_damage(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    _create(tmp_path / "a.zarr", **options)
    source = open_source(tmp_path / "a.zarr")
    chunk = tmp_path / "a.zarr" / "c" / "1" / "1"
    whole = chunk.read_bytes()
    for keep in (0.0, 0.5, 0.99):
        chunk.write_bytes(whole[: int(len(whole) * keep)])
        with pytest.raises(DamagedData, match=r"a\.zarr: the pixels from \(10, 10\) to \(30, 30\)"):
            source.read(Region((10, 10), (30, 30)))
        assert np.array_equal(source.read(Region((0, 0), (16, 50))), PICTURE[:16])
    for place in range(0, len(whole), len(whole) // 20) if "Crc32c" in str(options) else ():
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedData):
            source.read(Region((16, 16), (32, 32)))


def test_an_unreadable_url_is_refused_in_one_line() -> None:
    rows: list[tuple[str, str]] = [
        ("odd://here/a.zarr", "recognise URL"),
        ("http://127.0.0.1:9/a.zarr", "error sending request"),
    ]
    for url, words in rows:
        pytest.importorskip("obstore")
        said = f"^{url}: the store cannot be read: .*{words}.*credentials"
        with pytest.raises(InputError, match=said) as refused:
            open_source(url)
        assert "\n" not in str(refused.value)
