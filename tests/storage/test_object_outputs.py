"""Outputs and images in object stores and at URLs: the same bytes as on a disk, checked, restored and replaced by the same rules; changes are noticed."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.errors import InputError, InputUnreadable, OutputRefused
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import ObjectPath, files_below, store_errors
from halotile.storage.formats import zarr as formats_zarr
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.output import UNREADABLE, Layout, ShardWriter, check_block, create_output, open_output
from halotile.storage.sharded.ownership import find_foreign_entry, metadata_problems, restore_metadata
from tests.storage.outputs import OME, PLAIN, noise, written
from tests.stores import BUCKET, BUSY, DENIED, ObjectServer, contents, delete, failing, put
from tests.support import job_of, noisy_image, read_zarr, run_inline

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


def test_damage_is_found(place: ObjectPath) -> None:
    create_output(place, PLAIN)
    digest = ShardWriter(place, PLAIN).write(WHOLE, noise(PLAIN.shape, PLAIN.dtype)).digest
    shard = place / "c/0/0"
    whole = shard.read_bytes()
    rows = [(whole[:-40], "checksum of the index"), (whole[:20], "cut short"), (b"", "cut short"), (None, "missing")]
    for content, words in [*rows, ((place / "c/1/1").read_bytes(), "another place or time")]:
        delete(shard) if content is None else put(shard, content)
        for thorough in (False, True):
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


def test_a_busy_store_is_asked_again_and_a_check_asks_twice(place: ObjectPath, object_store: ObjectServer) -> None:
    object_store.trouble = failing(1, DENIED, "PUT", "c/0/1")
    with pytest.raises(PermissionError, match=f"Access Denied: '{place}/c/0/1'"):
        written(place, PLAIN)
    object_store.trouble = failing(3, BUSY, "PUT", "c/")
    create_output(place, PLAIN, overwrite=True)
    digest = ShardWriter(place, PLAIN).write(WHOLE, noise(PLAIN.shape, PLAIN.dtype)).digest
    object_store.requests.clear()
    assert check_block(place, PLAIN, WHOLE, thorough=False) == []
    assert len(object_store.requests) == 2 * PLAIN.files
    put(place / "c/0/0", (place / "c/0/0").read_bytes())  # a copy that has lost its digest
    assert check_block(place, PLAIN, WHOLE, digest, thorough=False) == []


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


def test_the_run_directory_of_a_place_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (ObjectPath("s3://scans/day 1/clean.zarr"), ObjectPath("gs://b/c"), tmp_path / "clean.zarr"):
        run = RunDirectory.beside(place)
        assert run.path.parent == tmp_path
        assert run.output == place
    assert RunDirectory(Path("s3+scans+clean.zarr")).output == Path("s3+scans+clean.zarr")


pytest.importorskip("obstore")


PIXELS = noisy_image((150, 130), "uint16")


class Quiet(SimpleHTTPRequestHandler):
    """A web server without a log."""

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture(params=["s3", "http"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """The URL of an array of nine chunks, and the array as it can be written."""
    if request.param == "s3":
        from obstore.store import from_url

        request.getfixturevalue("object_store")
        url = f"s3://{BUCKET}/{tmp_path.name}/a.zarr"
        yield url, zarr.create_array(zarr.storage.ObjectStore(from_url(url)), data=PIXELS, chunks=(64, 64))
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        array = zarr.create_array(tmp_path / "a.zarr", data=PIXELS, chunks=(64, 64))
        yield f"http://127.0.0.1:{server.server_port}/a.zarr", array
        server.shutdown()


def test_a_job_reads_it_as_from_a_disk(stored: tuple[str, Any], tmp_path: Path) -> None:
    url, array = stored
    np.save(tmp_path / "a.npy", PIXELS)
    options = {"strength": 0.1}
    expected = run_inline(job_of(tmp_path / "a.npy", tmp_path / "expected.zarr", "tv", options))
    np.testing.assert_array_equal(run_inline(job_of(url, tmp_path / "out.zarr", "tv", options)), expected)
    assert read_zarr(tmp_path / "out.zarr").shape == array.shape


def test_a_dataset_is_an_image_of_a_root_or_a_level_of_one(stored: tuple[str, Any]) -> None:
    url, array = stored
    for name, size in (("", 0), ("0", 1), ("1", 2)):
        group = zarr.create_group(array.store, path=name, overwrite=not name)
        entry = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [size, size]}]}
        image = {"multiscales": [{"axes": ["y", "x"], "datasets": [entry]}]}
        group.attrs["ome"] = {"version": "0.5", **(image if size else {"bioformats2raw.layout": 3})}
        if size:
            group.create_array("0", data=PIXELS, chunks=(64, 64))
    for dataset in ("1", "1/0"):
        source = open_source(url, dataset=dataset)
        assert (source.format, source.axes, source.scale) == ("ome", ("y", "x"), (2, 2))
        assert np.array_equal(source[:9, :9], PIXELS[:9, :9])
    with pytest.raises(InputError, match="Write dataset: one of 0, 1"):
        open_source(url, dataset="2")
    if url.startswith("s3"):
        with pytest.raises(InputError, match=r"^s3://nothing/a\.zarr: no Zarr array or group is there"):
            open_source("s3://nothing/a.zarr")


@pytest.mark.parametrize("limit", [None, 4])
def test_a_chunk_that_is_written_to_is_noticed(stored: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    if limit:
        monkeypatch.setattr(formats_zarr, "MOST_OBJECTS", limit)
    url, array = stored
    source = open_source(url)
    before = source.fingerprint()
    assert source.change() == ""
    array[70, 70] = array[70, 70] + 1
    if chunk := getattr(array.store, "root", None):  # a web server gives times in whole seconds
        os.utime(chunk / "c/1/1", (0, 0))
    assert source.change() == "was written to"
    assert open_source(url).fingerprint() != before
    if limit is None:
        monkeypatch.setattr(formats_zarr, "MOST_OBJECTS", 0)
        array[:64, :64] = 0  # the fill value, which zarr does not write
        assert not open_source(url)[:64, :64].any()
        assert open_source(url).change() == ""


@pytest.mark.parametrize("denied", [403, 503])
def test_a_store_that_only_lets_read_is_read_and_one_that_fails_is_no_damage(tmp_path: Path, denied: int) -> None:
    class OnlyGet(Quiet):
        def do_HEAD(self) -> None:
            self.send_error(denied)

    zarr.create_array(tmp_path / "a.zarr", data=PIXELS, chunks=(64, 64))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(OnlyGet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.zarr"
        if denied == 403:
            source = open_source(url)
            np.testing.assert_array_equal(source[:9, :9], PIXELS[:9, :9])
        else:
            with pytest.raises(InputUnreadable, match="does not answer"):
                open_source(url)
        server.shutdown()
    if denied == 403:
        with pytest.raises(InputUnreadable, match="the store cannot be read"):
            source.change()
