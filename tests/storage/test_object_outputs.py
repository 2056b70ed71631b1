"""Outputs in object stores: the same bytes as on a disk, checked, restored and replaced by the same rules."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halotile.errors import InputUnreadable, OutputRefused
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import ObjectPath, files_below, store_errors
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import UNREADABLE, Layout, ShardWriter, check_block, create_output, open_output
from halotile.storage.sharded.ownership import find_foreign_entry, metadata_problems, restore_metadata
from tests.storage.outputs import OME, PLAIN, noise, written
from tests.stores import BUCKET, BUSY, DENIED, ObjectServer, contents, delete, failing, put

pytest.importorskip("obstore")
WHOLE = Region.whole(PLAIN.shape)


@pytest.fixture
def place(object_store: ObjectServer, tmp_path: Path) -> ObjectPath:
    """A place of its own for each test."""
    object_store.trouble = lambda *_: None
    object_store.requests.clear()
    return ObjectPath(f"s3://{BUCKET}/{tmp_path.name}/a.zarr")


@pytest.mark.parametrize("layout", [PLAIN, OME], ids=["plain", "ome"])
def test_the_objects_are_the_files_of_a_disk(place: ObjectPath, layout: Layout, tmp_path: Path) -> None:
    pixels = written(tmp_path / "a.zarr", layout)
    create_output(place, layout)
    writer: ShardWriter = pickle.loads(pickle.dumps(ShardWriter(place, layout)))
    digest = writer.write(Region.whole(layout.shape), pixels).digest
    expected = {name: (tmp_path / "a.zarr" / name).read_bytes() for name in files_below(tmp_path / "a.zarr")}
    assert contents(place) == expected
    assert open_output(place) == layout
    np.testing.assert_array_equal(open_source(str(place))[...], pixels)
    for thorough in (False, True):
        assert check_block(place, layout, Region.whole(layout.shape), digest, thorough=thorough) == []


def test_a_cheap_check_asks_twice_for_each_shard(place: ObjectPath, object_store: ObjectServer) -> None:
    written(place, PLAIN)
    object_store.requests.clear()
    assert check_block(place, PLAIN, WHOLE, thorough=False) == []
    assert len(object_store.requests) == 2 * PLAIN.files


def test_a_copy_that_has_lost_its_digest_is_checked_by_its_checksums(place: ObjectPath) -> None:
    create_output(place, PLAIN)
    digest = ShardWriter(place, PLAIN).write(WHOLE, noise(PLAIN.shape, PLAIN.dtype)).digest
    put(place / "c/0/0", (place / "c/0/0").read_bytes())
    assert check_block(place, PLAIN, WHOLE, digest, thorough=False) == []


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-40], "checksum of the index"),
        (lambda content: content[:20], "cut short"),
        (lambda _: b"", "cut short"),
        (None, "missing"),
        ("c/1/1", "another place or time"),
    ],
)
def test_damage_is_found(place: ObjectPath, damage: object, words: str, thorough: bool) -> None:
    create_output(place, PLAIN)
    digest = ShardWriter(place, PLAIN).write(WHOLE, noise(PLAIN.shape, PLAIN.dtype)).digest
    shard = place / "c/0/0"
    if damage is None:
        delete(shard)
    else:
        put(shard, damage(shard.read_bytes()) if callable(damage) else (place / str(damage)).read_bytes())
    (problem,) = check_block(place, PLAIN, WHOLE, digest, thorough=thorough)
    assert problem.startswith(f"{shard}")
    assert words in problem


def test_a_store_that_does_not_answer_is_no_damage(place: ObjectPath, object_store: ObjectServer) -> None:
    written(place, PLAIN)
    object_store.trouble = failing(99, DENIED, "GET", "c/0/0")
    for thorough in (False, True):
        problems = check_block(place, PLAIN, WHOLE, thorough=thorough)
        assert problems == [f"{place}/c/0/0: the shard {UNREADABLE}: Access Denied"]
    object_store.trouble = failing(99, DENIED, "GET", "zarr.json")
    with pytest.raises(InputUnreadable, match="Access Denied"):
        metadata_problems(place, PLAIN)


def test_a_put_that_the_store_is_too_busy_for_is_repeated(place: ObjectPath, object_store: ObjectServer) -> None:
    object_store.trouble = failing(3, BUSY, "PUT", "c/")
    written(place, PLAIN)
    assert check_block(place, PLAIN, WHOLE) == []


def test_a_put_that_is_refused_is_an_error_of_the_system(place: ObjectPath, object_store: ObjectServer) -> None:
    object_store.trouble = failing(1, DENIED, "PUT", "c/0/1")
    with pytest.raises(PermissionError, match=f"Access Denied: '{place}/c/0/1'"):
        written(place, PLAIN)


def test_no_key_is_in_an_error() -> None:
    class GenericError(Exception):
        """As obstore raises where a request has its key in the address."""

    GenericError.__module__ = "obstore.exceptions"
    said = pytest.raises(OSError, match=r"https://host/scans/a\.zarr to it: 'az://scans/a\.zarr'")
    with said as told, store_errors(ObjectPath("az://scans/a.zarr")):
        raise GenericError("error sending PUT https://host/scans/a.zarr?sv=1&sig=KEY to it")
    assert "KEY" not in "".join(traceback.format_exception(told.value))


def test_metadata_are_restored_and_what_the_user_added_stays(place: ObjectPath) -> None:
    written(place, PLAIN)
    before = contents(place)
    delete(place / "zarr.json")
    assert metadata_problems(place, PLAIN) == [f"metadata: {place}/zarr.json is missing"]
    restore_metadata(place, PLAIN)
    assert contents(place) == before
    assert find_foreign_entry(place, PLAIN) == ""
    put(place / "notes.txt", b"mine")
    assert find_foreign_entry(place, PLAIN) == f"no run wrote {place}/notes.txt"


def test_only_a_zarr_is_overwritten_and_nothing_beside_it(place: ObjectPath) -> None:
    written(place, OME)
    neighbours = [place.with_name(f"a.zarr{end}") for end in ("2/zarr.json", "2/c/0", ".run/claim.json", "x")]
    for neighbour in neighbours:
        put(neighbour, b"theirs")
    with pytest.raises(OutputRefused, match=r"something stands there.*output\.overwrite: true"):
        create_output(place, PLAIN)
    create_output(place, PLAIN, overwrite=True)
    assert list(place.objects()) == ["zarr.json"]
    assert [neighbour.read_bytes() for neighbour in neighbours] == [b"theirs"] * 4


def test_a_half_removed_output_is_recognized_by_its_metadata(place: ObjectPath, object_store: ObjectServer) -> None:
    written(place, OME)
    deletions = iter([None, DENIED])
    object_store.trouble = lambda method, _: next(deletions, None) if method == "POST" else None
    with pytest.raises(PermissionError):
        create_output(place, PLAIN, overwrite=True)
    assert list(place.objects()) == ["zarr.json"]
    create_output(place, PLAIN, overwrite=True)


@pytest.mark.parametrize(("inside", "words"), [("", "it is a file"), ("letter.txt", "it is no Zarr")])
def test_anything_else_stays(place: ObjectPath, inside: str, words: str) -> None:
    put(place / inside, b"mine")
    with pytest.raises(OutputRefused, match=words):
        create_output(place, PLAIN, overwrite=True)
    assert (place / inside).read_bytes() == b"mine"


def test_nothing_is_written_into_an_array(place: ObjectPath) -> None:
    written(place, PLAIN)
    with pytest.raises(OutputRefused, match="is a Zarr array, and everything in its folder belongs to it"):
        create_output(place / "inner" / "b.zarr", replace(PLAIN, dtype="uint8"))


def test_the_run_directory_of_a_place_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (ObjectPath("s3://scans/day 1/clean.zarr"), ObjectPath("gs://b/c"), tmp_path / "clean.zarr"):
        run = RunDirectory.beside(place)
        assert run.path.parent == tmp_path
        assert run.output == place
    assert RunDirectory(Path("s3+scans+clean.zarr")).output == Path("s3+scans+clean.zarr")
