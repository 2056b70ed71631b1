"""Zarr images at URLs: read as from a disk, and changes of their objects are noticed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.errors import InputError, InputUnreadable
from halotile.storage.arrays import open_source
from halotile.storage.formats import zarr as formats_zarr
from tests.stores import BUCKET, ObjectServer
from tests.support import job_of, noisy_image, read_zarr, run_inline

pytest.importorskip("obstore")
PIXELS = noisy_image((150, 130), "uint16")


class Quiet(SimpleHTTPRequestHandler):
    """A web server without a log."""

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture(params=["s3", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """The URL of an array of nine chunks, and the array as it can be written."""
    if request.param == "s3":
        from obstore.store import from_url

        request.getfixturevalue("object_store")
        url = f"s3://{BUCKET}/{tmp_path.name}/a.zarr"
        store = zarr.storage.ObjectStore(from_url(url))
        yield url, zarr.create_array(store, data=PIXELS, chunks=(64, 64))
        return
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        array = zarr.create_array(tmp_path / "a.zarr", data=PIXELS, chunks=(64, 64))
        yield f"http://127.0.0.1:{server.server_port}/a.zarr", array
        server.shutdown()


def test_a_job_reads_it_as_from_a_disk(place: tuple[str, Any], tmp_path: Path) -> None:
    url, array = place
    np.save(tmp_path / "a.npy", PIXELS)
    options = {"strength": 0.1}
    expected = run_inline(job_of(tmp_path / "a.npy", tmp_path / "expected.zarr", "tv", options))
    found = run_inline(job_of(url, tmp_path / "out.zarr", "tv", options))
    np.testing.assert_array_equal(found, expected)
    assert read_zarr(tmp_path / "out.zarr").shape == array.shape


def test_a_dataset_is_an_image_of_a_root_or_a_level_of_one(place: tuple[str, Any]) -> None:
    url, array = place
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


def test_a_chunk_that_is_written_to_is_noticed(place: tuple[str, Any]) -> None:
    url, array = place
    source = open_source(url)
    before = source.fingerprint()
    assert source.change() == ""
    array[70, 70] = array[70, 70] + 1
    if chunk := getattr(array.store, "root", None):  # a web server gives times in whole seconds
        os.utime(chunk / "c/1/1", (0, 0))
    assert source.change() == "was written to"
    assert open_source(url).fingerprint() != before


def test_of_many_objects_some_are_looked_at(place: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_zarr, "MOST_OBJECTS", 4)
    test_a_chunk_that_is_written_to_is_noticed(place)


def test_chunks_that_are_not_stored_are_allowed(place: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_zarr, "MOST_OBJECTS", 0)
    url, array = place
    array[:64, :64] = 0  # the fill value, which zarr does not write
    assert not open_source(url)[:64, :64].any()
    assert open_source(url).change() == ""


def test_a_bucket_that_is_missing_is_told(object_store: ObjectServer) -> None:
    with pytest.raises(InputError, match=r"^s3://nothing/a\.zarr: no Zarr array or group is there"):
        open_source("s3://nothing/a.zarr")


@pytest.mark.parametrize(("denied", "words"), [(403, None), (503, "does not answer")])
def test_a_store_that_only_lets_read_is_read_and_one_that_fails_is_no_damage(
    tmp_path: Path, denied: int, words: str | None
) -> None:
    class OnlyGet(Quiet):
        def do_HEAD(self) -> None:
            self.send_error(denied)

    zarr.create_array(tmp_path / "a.zarr", data=PIXELS, chunks=(64, 64))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(OnlyGet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.zarr"
        if words is None:
            source = open_source(url)
            np.testing.assert_array_equal(source[:9, :9], PIXELS[:9, :9])
        else:
            with pytest.raises(InputUnreadable, match=words):
                open_source(url)
        server.shutdown()
    if words is None:
        with pytest.raises(InputUnreadable, match="the store cannot be read"):
            source.change()
