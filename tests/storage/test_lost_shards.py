"""Shards that are missing from an image that a run has finished: an error that names them, never fill values."""

from __future__ import annotations

import pickle
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from halotile.errors import DamagedData
from halotile.graphs.plans.choices import check_whole
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import ObjectPath, OutputPath, path_of
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output import ShardWriter, create_output
from halotile.storage.sharded.ownership import find_foreign_entry, is_marked, mark_complete, metadata_problems
from tests.cases import in_folders
from tests.stores import BUCKET, ObjectServer, delete
from tests.support import noisy_image

PIXELS = noisy_image((64, 64), "uint8")
WORDS = r"chunk file c/0/1: it is missing, although the run wrote every chunk.*remove \"complete\""


def written(place: str | OutputPath, *, ome: bool = False, complete: bool = True) -> Layout:
    """An image of 2 x 2 shards; as an OME-Zarr with a second level of 2 x 2."""
    layout = Layout((64, 64), "uint8", (32, 32), (16, 16), "lz4", ("y", "x"), (1.0, 1.0), (None, None), ome)
    layout = replace(layout, levels=2, factor=(2, 2), block=(32, 32)) if ome else layout
    create_output(place, layout)
    writer = ShardWriter(place, layout)
    for block in layout.grid:
        writer.write(block.core, PIXELS[block.core.slices])
    if complete:
        mark_complete(place, layout)
    return layout


def test_a_shard_that_is_lost_while_the_image_is_open_is_an_error_in_every_level(tmp_path: Path) -> None:
    for folder, level in in_folders(tmp_path, (0, 1)):
        layout = written(folder / "a.zarr", ome=True)
        assert len(layout.arrays) == 2
        source = pickle.loads(pickle.dumps(open_source(folder / "a.zarr", level=level)))
        whole = source[:, :]
        (folder / f"a.zarr/{level}/c/0/1").unlink()
        with pytest.raises(DamagedData, match=rf"a\.zarr: .*{WORDS}.*a\.zarr/{level}/zarr\.json"):
            source[:, :]
        np.testing.assert_array_equal(source[:16, :16], whole[:16, :16])


def test_an_image_that_is_not_finished_reads_as_the_fill_value_where_nothing_is_written(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", complete=False)
    (tmp_path / "a.zarr/c/0/1").unlink()
    assert not open_source(tmp_path / "a.zarr")[:32, 32:].any()


def test_a_copy_is_refused_before_a_job_begins(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", ome=True)
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    check_whole(str(tmp_path / "b.zarr/0"))
    (tmp_path / "b.zarr/1/c/1/1").unlink()
    said = r"b\.zarr/1/c/1/1: the shard is missing; 1 of the 8 shards"
    with pytest.raises(DamagedData, match=said) as lost:
        check_whole(str(tmp_path / "b.zarr"))
    assert "Restore them from a copy, write the image again, or let" in str(lost.value)
    assert "scan" not in str(lost.value)


def test_a_zip_of_it_misses_no_shard_either(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr")
    whole = shutil.make_archive(str(tmp_path / "whole"), "zip", tmp_path / "a.zarr")
    np.testing.assert_array_equal(open_source(whole)[:, :], PIXELS)
    (tmp_path / "a.zarr/c/0/1").unlink()
    source = open_source(shutil.make_archive(str(tmp_path / "b"), "zip", tmp_path / "a.zarr"))
    with pytest.raises(DamagedData, match=WORDS):
        source[:, :]


@pytest.mark.parametrize("kind", ["zip", "zip of an OME-Zarr", "in a group", "with attributes", "as chunks"])
def test_any_copy_that_lacks_a_shard_is_refused_before_a_job_begins(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / ("group.zarr/image" if kind == "in a group" else "a.zarr")
    if kind == "in a group":
        zarr.create_group(tmp_path / "group.zarr")
    written(folder, ome="OME" in kind)
    array = folder / "1" if "OME" in kind else folder
    if kind == "with attributes":
        zarr.open_array(folder).attrs["stain"] = "H&E"
    if kind == "as chunks":
        array = folder = tmp_path / "chunks.zarr"
        attributes = zarr.open_array(tmp_path / "a.zarr").attrs.asdict()
        zarr.create_array(folder, data=PIXELS, chunks=(32, 32), attributes=attributes)

    def copied() -> str:
        if "zip" in kind:
            return shutil.make_archive(str(tmp_path / "zipped.zarr"), "zip", folder)
        return str(folder.parent if kind == "in a group" else folder)

    check_whole(copied())
    (array / "c/0/1").unlink()
    place = rf"{copied()}.*c/0/1: it is missing, although .* of {copied()}.*zarr\.json\. Otherwise restore"
    with pytest.raises(DamagedData, match=place):
        check_whole(copied())


def test_a_shard_whose_end_was_read_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.zarr", ome=True)
    monkeypatch.setattr(Path, "exists", lambda path: pytest.fail(f"{path} is looked for"))
    check_whole(str(tmp_path / "a.zarr"))
    check_whole(str(tmp_path / "a.zarr/1"))


@pytest.mark.parametrize(
    ("where", "said"),
    [("a file", "decompressing data|Bad CRC-32"), ("its header", "Bad magic number"), ("the list", "Bad magic")],
)
def test_a_damaged_zip_is_refused(tmp_path: Path, where: str, said: str) -> None:
    written(tmp_path / "a.zarr", ome=True)
    path = Path(shutil.make_archive(str(tmp_path / "b.zarr"), "zip", tmp_path / "a.zarr"))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        header = archive.getinfo("1/zarr.json").header_offset
        place = {"a file": header + 100, "its header": header, "the list": archive.start_dir}[where]
    content[place : place + 4] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(DamagedData, match=rf"^{path}: it cannot be read: .*({said}).* restore this file"):
        check_whole(str(path))


def test_an_object_that_is_lost_is_an_error(tmp_path: Path, object_store: ObjectServer) -> None:
    place = path_of(f"s3://{BUCKET}/{tmp_path.name}/a.zarr")
    assert isinstance(place, ObjectPath)
    written(place)
    source = open_source(str(place))
    np.testing.assert_array_equal(source[:, :], PIXELS)
    delete(place / "c/0/1")
    for one in (source, open_source(str(place))):
        with pytest.raises(DamagedData, match=WORDS):
            one[:, :]
        np.testing.assert_array_equal(one[:, :32], PIXELS[:, :32])


def test_zeros_that_were_written_are_read(tmp_path: Path, object_store: ObjectServer) -> None:
    place = path_of(f"s3://{BUCKET}/{tmp_path.name}/zeros.zarr")
    layout = written(place, complete=False)
    for block in layout.grid:
        ShardWriter(place, layout).write(block.core, np.zeros((32, 32), "uint8"))
    mark_complete(place, layout)
    assert not open_source(str(place))[:, :].any()


def test_what_another_program_appends_or_leaves_out_can_be_read(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr")
    array = zarr.open_array(tmp_path / "a.zarr")
    array[:16, 32:48] = 0  # an inner chunk, and then a shard, of the fill value: zarr removes them
    with pytest.raises(DamagedData, match=r"chunk file c/0/1: inner chunk \(0, 0\): it is missing"):
        open_source(tmp_path / "a.zarr")[:, :]
    array[:32, 32:] = 0
    with pytest.raises(DamagedData, match=WORDS):
        open_source(tmp_path / "a.zarr")[:, :]
    own = array.attrs["halotile"]
    array.attrs["halotile"] = {name: value for name, value in own.items() if name != "complete"}
    assert not open_source(tmp_path / "a.zarr")[:32, 32:].any()
    check_whole(str(tmp_path / "a.zarr"))
    array.attrs["halotile"] = own
    array.resize((96, 64))
    assert not open_source(tmp_path / "a.zarr")[64:, :].any()


def test_the_mark_is_the_runs_own(tmp_path: Path) -> None:
    for folder, ome in in_folders(tmp_path, (False, True)):
        layout = written(folder / "a.zarr", ome=ome)
        assert is_marked(folder / "a.zarr")
        before = (folder / "a.zarr/zarr.json").stat().st_mtime_ns
        mark_complete(folder / "a.zarr", layout)
        assert (folder / "a.zarr/zarr.json").stat().st_mtime_ns == before
        assert metadata_problems(folder / "a.zarr", layout) == []
        assert find_foreign_entry(folder / "a.zarr", layout) == ""
        assert re.search("complete", (folder / ("a.zarr/1" if ome else "a.zarr") / "zarr.json").read_text())
