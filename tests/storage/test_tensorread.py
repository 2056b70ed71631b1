"""Reads with tensorstore agree with zarr-python bit for bit, or report the damage."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from halotile.errors import DamagedData
from halotile.storage.arrays import open_source
from halotile.storage.formats.zarr import ZarrReader
from halotile.storage.grid import Region
from halotile.storage.sharded.local_reader import LocalArray
from halotile.storage.sharded.tensorstore_reader import TensorArray, open_tensor

TURN = TransposeCodec(order=(1, 0))
SHARD = (8, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "transposed": {"filters": [TURN], "compressors": None},
    "transposed, zstd, crc32c": {"filters": [TURN], "compressors": [ZstdCodec(), Crc32cCodec()]},
    "transposed, lz4": {"filters": [TURN], "compressors": [BloscCodec(cname="lz4", shuffle="bitshuffle")]},
    "transposed, gzip, big-endian": {
        "filters": [TURN],
        "serializer": BytesCodec(endian="big"),
        "compressors": [GzipCodec(level=1)],
    },
    "zstd, gzip": {"compressors": [ZstdCodec(), GzipCodec(level=1)]},
    "crc32c, zstd": {"compressors": [Crc32cCodec(), ZstdCodec()]},
    "shards of transposed chunks": {
        "serializer": ShardingCodec(chunk_shape=SHARD, codecs=[TURN, BytesCodec(), ZstdCodec()]),
        "compressors": None,
    },
    "shards in shards": {
        "serializer": ShardingCodec(chunk_shape=SHARD, codecs=[ShardingCodec(chunk_shape=(4, 4))]),
        "compressors": None,
    },
    "a big-endian index": {
        "serializer": ShardingCodec(
            chunk_shape=SHARD,
            codecs=[BytesCodec(), GzipCodec(level=1)],
            index_codecs=[BytesCodec(endian="big"), Crc32cCodec()],
            index_location="start",
        ),
        "compressors": None,
    },
}
V2: dict[str, Any] = {"zarr_format": 2, "order": "F", "filters": None}
LAYOUTS |= {
    "v2, F order": V2 | {"compressors": None},
    "v2, F order, zstd": V2 | {"compressors": numcodecs.Zstd(level=1)},
    "v2, F order, lz4": V2 | {"compressors": numcodecs.Blosc(cname="lz4", shuffle=1)},
}
CHECKED = ["transposed, zstd, crc32c", "transposed, gzip, big-endian", "zstd, gzip", "a big-endian index"]

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def create(folder: Path, layout: str, **options: Any) -> Any:
    usual = {"shape": (40, 30), "chunks": (16, 16), "dtype": "f4"}
    return zarr.create_array(folder, **usual | LAYOUTS[layout] | options)


def written(folder: Path, layout: str, **options: Any) -> Any:
    array = create(folder, layout, **options)
    pixels = np.random.default_rng(0).random(array.shape) * 99
    array[3:36, :14] = pixels.astype(array.dtype)[3:36, :14]
    return array


def reader(folder: Path) -> Any:
    return ZarrReader(str(folder), dataset=None, axes=None).local


def same(ours: Any, theirs: Any) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype.newbyteorder("="), theirs.shape)
    assert ours.tobytes() == np.ascontiguousarray(theirs, ours.dtype).tobytes()


DTYPES = ["uint8", "bool", "int16", "uint32", "float16", "float32", "float64"]


# zarr-python never writes a byte order for bool.
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES if dtype != "bool" or "endian" not in layout],
)
def test_bits_are_those_of_zarr(tmp_path: Path, layout: str, dtype: str) -> None:
    array = written(tmp_path, layout, dtype=dtype, fill_value=1)
    ours = reader(tmp_path)
    assert isinstance(ours, TensorArray)
    for region in (
        Region((0, 0), (40, 30)),
        Region((7, 5), (33, 17)),
        Region((39, 29), (40, 30)),
        Region((5, 5), (5, 9)),
    ):
        same(ours.read(region), np.asarray(array[region.slices]))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_shapes_and_windows_of_any_kind_have_the_bits_of_zarr(data: st.DataObject) -> None:
    axes = data.draw(st.integers(2, 4))
    chunk = tuple(data.draw(st.integers(1, 7)) for _ in range(axes))
    shape = tuple(data.draw(st.integers(1, 3 * c)) for c in chunk)
    order = tuple(data.draw(st.permutations(range(axes))))
    with tempfile.TemporaryDirectory() as name:
        array = zarr.create_array(
            name,
            shape=shape,
            chunks=chunk,
            dtype=data.draw(st.sampled_from(["uint16", "float32"])),
            filters=[TransposeCodec(order=order)],
            fill_value=data.draw(st.sampled_from([0, 7])),
            chunk_key_encoding={
                "name": data.draw(st.sampled_from(["default", "v2"])),
                "separator": data.draw(st.sampled_from(["/", "."])),
            },
        )
        box = tuple(slice(data.draw(st.integers(0, n)), None) for n in shape)
        array[box] = np.random.default_rng(0).integers(0, 999, array[box].shape)
        ours = reader(Path(name))
        assert isinstance(ours, TensorArray if order != tuple(range(axes)) else TensorArray | LocalArray)
        for _ in range(3):
            pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
            region = Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
            same(ours.read(region), np.asarray(array[region.slices]))


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, -0.0, 1e-45])
def test_unusual_fill_values(tmp_path: Path, fill: float) -> None:
    array = written(tmp_path, "transposed", fill_value=fill)
    same(reader(tmp_path).read(Region((0, 0), (40, 30))), np.asarray(array[...]))


def test_another_fill_value_than_zarr_has_is_left_to_zarr(tmp_path: Path) -> None:
    array = written(tmp_path, "transposed")
    assert open_tensor(tmp_path, array.shape, array.dtype, 0.0) is not None
    assert open_tensor(tmp_path, array.shape, array.dtype, -0.0) is None


@layouts
def test_a_truncated_chunk_is_damage(tmp_path: Path, layout: str) -> None:
    written(tmp_path, layout)
    chunk = tmp_path / ("0.0" if layout.startswith("v2") else "c/0/0")
    whole = chunk.read_bytes()
    for keep_bytes in (0, 1, 4, 16, 20, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:keep_bytes])
        with pytest.raises(DamagedData, match=f"{chunk.name}"):
            reader(tmp_path).read(Region((0, 0), (16, 16)))


@pytest.mark.parametrize("layout", CHECKED)
def test_every_flipped_bit_under_a_checksum_is_damage_or_harmless(tmp_path: Path, layout: str) -> None:
    array = written(tmp_path, layout)
    true = np.asarray(array[:16, :16])
    chunk = tmp_path / "c/0/0"
    whole = chunk.read_bytes()
    found = 0
    for place in range(0, len(whole), 7):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            same(reader(tmp_path).read(Region((0, 0), (16, 16))), true)
        except DamagedData:
            found += 1
    assert found > len(whole) // 7 * 0.9


@pytest.mark.parametrize("place", range(16))
def test_a_wrong_blosc_header_does_no_harm(tmp_path: Path, place: int) -> None:
    array = written(tmp_path, "transposed, lz4")
    true = np.asarray(array[:16, :16])
    chunk = tmp_path / "c/0/0"
    whole = bytearray(chunk.read_bytes())
    for bit in range(8):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        try:
            assert reader(tmp_path).read(Region((0, 0), (16, 16))).shape == true.shape
        except DamagedData:
            continue


def test_a_source_names_its_path_in_front_of_the_damage(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", "zstd, gzip")
    source = open_source(tmp_path / "a.zarr")
    (tmp_path / "a.zarr/c/0/0").write_bytes(b"x")
    with pytest.raises(DamagedData, match=r"a\.zarr: the pixels from \(0, 0\) to \(4, 4\) cannot be read"):
        source.read(Region((0, 0), (4, 4)))


@layouts
def test_a_source_reads_after_pickling(tmp_path: Path, layout: str) -> None:
    array = written(tmp_path, layout)
    source = pickle.loads(pickle.dumps(open_source(tmp_path)))
    same(source.read(Region((0, 0), (40, 30))), np.asarray(array[...]))


def test_a_change_on_disk_is_detected(tmp_path: Path) -> None:
    array = written(tmp_path, "transposed")
    ours = reader(tmp_path)
    ours.read(Region((0, 0), (40, 30)))
    array[...] = 5
    assert (ours.read(Region((0, 0), (40, 30))) == 5).all()


def test_an_array_that_vanished_is_not_fill_value(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", "transposed")
    ours = reader(tmp_path / "a.zarr")
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(DamagedData, match="is gone"):
        ours.read(Region((0, 0), (4, 4)))


def test_a_system_error_is_not_damage(tmp_path: Path) -> None:
    class Broken:
        def __getitem__(self, _: Any) -> Any:
            raise ValueError("RESOURCE_EXHAUSTED: Failed to open: too many open files")

    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(OSError, match="too many open files") as caught:
        TensorArray(tmp_path / "zarr.json", Broken()).read(Region((0, 0), (1, 1)))
    assert not isinstance(caught.value, DamagedData)


def test_simple_layouts_are_still_read_directly(tmp_path: Path) -> None:
    zarr.create_array(tmp_path, shape=(40, 30), chunks=(16, 16), dtype="f4")
    assert isinstance(reader(tmp_path), LocalArray)


@pytest.mark.parametrize("fill", [None, 0, 7, np.nan])
def test_fill_values_of_zarr_v2(tmp_path: Path, fill: Any) -> None:
    array = written(tmp_path, "v2, F order", dtype=">f4", fill_value=fill)
    ours = reader(tmp_path)
    assert isinstance(ours, TensorArray)
    same(ours.read(Region((0, 0), (40, 30))), np.asarray(array[...]))


@pytest.mark.parametrize(
    "options",
    [
        {"filters": [numcodecs.Delta(dtype="<f4")]},
        {"compressors": numcodecs.LZMA(), "order": "F"},
        {"compressors": numcodecs.BZ2(level=1), "order": "F"},
        {"compressors": numcodecs.Zlib(level=1), "order": "F"},
        {"compressors": numcodecs.GZip(level=1), "order": "F"},
    ],
)
def test_arrays_that_tensorstore_cannot_read_safely_are_left_to_zarr(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    array = zarr.create_array(
        tmp_path, **{"shape": (40, 30), "chunks": (16, 16), "dtype": "f4", "zarr_format": 2} | options
    )
    array[...] = 3
    assert reader(tmp_path) is None
    assert (open_source(tmp_path).read(Region((0, 0), (40, 30))) == 3).all()


def test_without_tensorstore_zarr_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = written(tmp_path, "transposed")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "tensorstore" else find_spec(name, *rest),
    )
    assert reader(tmp_path) is None
    same(open_source(tmp_path).read(Region((0, 0), (40, 30))), np.asarray(array[...]))


def test_metadata_that_tensorstore_does_not_know_are_left_to_zarr(tmp_path: Path) -> None:
    array = written(tmp_path, "transposed")
    document = json.loads((tmp_path / "zarr.json").read_text())
    document["unheard_of"] = {"must_understand": True}
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    assert open_tensor(tmp_path, array.shape, array.dtype, array.fill_value) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_left_to_zarr(tmp_path: Path) -> None:
    written(tmp_path, "transposed")
    source = open_source(tmp_path)
    wanted = source.read(Region((0, 0), (40, 30))).tobytes()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if source.read(Region((0, 0), (40, 30))).tobytes() == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
