"""Outputs on disks and in object stores: existing data stay unless they are a Zarr that may be overwritten; lost shards are errors; and images at URLs."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zarr

from halotile.errors import DamagedData, InputError, InputUnreadable, OutputRefused
from halotile.graphs.plans.choices import check_whole
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import ObjectPath, OutputPath, files_below, path_of, store_errors
from halotile.storage.disk.place import check_place, local_lock_reason
from halotile.storage.formats import zarr as formats_zarr
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded import ownership
from halotile.storage.sharded.output import UNREADABLE, Layout, ShardWriter, check_block, create_output, open_output
from tests.cases import in_folders
from tests.storage.outputs import OME, PLAIN, noise, write_blocks, written
from tests.storage.test_added_levels import Killed, MortalDisk
from tests.stores import BUCKET, BUSY, DENIED, ObjectServer, contents, delete, failing, put
from tests.support import noisy_image


def test_anything_that_is_not_a_zarr_stays(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    for name in ("file", "documents/letter.txt"):
        (tmp_path / name).write_bytes(b"mine")
    written(tmp_path / "theirs", PLAIN)
    for name, target in {"dangling link": "gone", "link to a zarr": "theirs"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "documents", "/dev/null", "dangling link", "link to a zarr"):
        said = []
        for overwrite in (False, True):
            with pytest.raises(OutputRefused) as refusal:
                create_output(tmp_path / name, PLAIN, overwrite=overwrite)
            said.append(str(refusal.value))
        assert said[0] == said[1], "overwriting is offered only where it would be done"
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("homeless")
def test_a_zarr_stays_unless_it_is_to_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    written(path, OME)
    with pytest.raises(OutputRefused, match=r"output\.overwrite: true"):
        create_output(path, PLAIN)
    assert open_output(path) == OME
    create_output(path, PLAIN, overwrite=True)
    assert (open_output(path), os.listdir(path)) == (PLAIN, ["zarr.json"])
    zarr.create_array(tmp_path / "old.zarr", shape=(4, 4), dtype="uint8", chunks=(2, 2), zarr_format=2)[:] = 1
    create_output(tmp_path / "old.zarr", PLAIN, overwrite=True)
    for variable in ("cwd", "HOME"):
        (path / "c").mkdir(exist_ok=True)
        monkeypatch.chdir(path / "c" if variable == "cwd" else tmp_path)
        if variable == "HOME":
            monkeypatch.setenv("HOME", str(path / "c"))
        with pytest.raises(OutputRefused, match="and is not removed"):
            create_output(path, PLAIN, overwrite=True)
    monkeypatch.delenv("HOME")
    (path / "c" / "9").symlink_to(tmp_path)
    with pytest.raises(OutputRefused, match="c/9 is a symlink"):
        create_output(path, PLAIN, overwrite=True)
    assert (path / "c" / "9").is_symlink()


def test_a_path_that_cannot_be_made_or_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    (tmp_path / "far" / "deep").mkdir(parents=True)
    for name, target in {"loop": "loop", "nowhere": "gone", "link": "far/deep"}.items():
        (tmp_path / name).symlink_to(target)
    zarr.create_array(tmp_path / "array.zarr", shape=(4,), dtype="uint8")
    zarr.create_array(tmp_path / "old.zarr", shape=(4,), dtype="uint8", zarr_format=2)
    zarr.create_group(tmp_path / "group.zarr")
    check_place(tmp_path / "group.zarr" / "clean", overwrite=False)
    before = sorted(tmp_path.rglob("*"))
    closed = ("a.txt/x.zarr", "a.txt/deep/x.zarr", "loop/x.zarr", "nowhere/x")
    rows = dict.fromkeys(closed, "so nothing can be made in it")
    rows |= {"loop": "a symlink to loop", "link/../a.zarr": "behind a symlink", "/": "the path names no output"}
    arrays = ("array.zarr", "old.zarr")
    rows |= {f"{name}/x.zarr": f"{name} is a Zarr array, .*Write a path beside it" for name in arrays}
    for name, words in rows.items():
        with pytest.raises(OutputRefused, match=words):
            create_output(f"{tmp_path}/{name}" if name != "/" else name, PLAIN, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("layout", [replace(PLAIN, shape=(8, 13)), replace(OME, shape=(1, 1, 8, 13))])
def test_parts_of_an_output_can_be_overwritten(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "a.zarr"
    for steps in itertools.count():
        create_output(path, layout, overwrite=True)
        ShardWriter(path, layout).write(Region.whole(layout.shape), noise(layout.shape, layout.dtype))
        try:
            create_output(path, layout, MortalDisk(steps), overwrite=True)
            break
        except Killed:
            create_output(path, layout, overwrite=True)
            assert open_output(path) == layout
    assert steps > 5


UNWRITABLE = """
import os, sys
from halotile.errors import OutputRefused
from halotile.storage.disk.place import check_path
os.getuid() or os.setuid(65534)
try:
    check_path(sys.argv[1])
except OutputRefused as error:
    print(error, end="")
"""


def test_a_folder_that_this_user_may_not_write_in_is_refused() -> None:
    with TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o555)
        path = f"{folder}/a.zarr"
        shown = subprocess.check_output([sys.executable, "-c", UNWRITABLE, path], text=True, timeout=60)
        Path(folder).chmod(0o755)
    assert shown == f"output.path is {path}: you may not write in {folder}. Write a path in a folder of your own."


MOUNTED = {
    "lustre rw,flock": None, "lustre rw,localflock": "localflock: mount it with flock",
    "nfs rw,vers=3,nolock,proto=tcp": "mounted with nolock", "nfs rw,vers=3,local_lock=all": "local_lock=all",
    "nfs rw,vers=3,local_lock=flock": "local_lock=flock", "nfs rw,vers=3,local_lock=posix": None,
    "nfs4 rw,vers=4.2,local_lock=none": None, "gpfs rw": None,
    "beegfs rw,cfgFile={folder}/default.conf": "tuneUseGlobalFileLocks = true",
    "beegfs rw,cfgFile={folder}/global.conf": None, "beegfs rw": "tuneUseGlobalFileLocks = true",
}  # fmt: skip


def test_locks_that_other_machines_do_not_see_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts: list[Any] = []
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    for folder, mounted in in_folders(tmp_path, MOUNTED):
        (folder / "default.conf").write_text("# tuneUseGlobalFileLocks = true\ntuneUseGlobalFileLocks = false\n")
        (folder / "global.conf").write_text("tuneUseGlobalFileLocks    = true\n")
        kind, options = mounted.format(folder=folder).split(" ")
        mounts[:] = [SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw,relatime")]
        mounts.append(SimpleNamespace(mountpoint=f"{folder}/data", fstype=kind, opts=options))
        why, wanted = local_lock_reason(folder / "data" / "out.zarr"), MOUNTED[mounted]
        assert (why is None) if wanted is None else (wanted in str(why))
        assert local_lock_reason(folder) is None
    mounts.append(SimpleNamespace(mountpoint="/", fstype="nfs", opts="rw,nolock"))
    assert "nolock" in str(local_lock_reason(tmp_path)), "the last mount at a mount point counts"


def test_a_file_system_without_locks_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, code in in_folders(tmp_path, (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, os.strerror(code))))
        refused = pytest.raises(OutputRefused, match=r"x\.run/lock cannot be locked .*Lustre: -o flock")
        with refused, RunDirectory(folder / "x.run").lock():
            pass


PIXELS = noisy_image((64, 64), "uint8")


WORDS = r"chunk file c/0/1: it is missing, although the run wrote every chunk.*remove \"complete\""


def finished(place: str | OutputPath, *, ome: bool = False, complete: bool = True) -> Layout:
    """An image of 2 x 2 shards; as an OME-Zarr with a second level of 2 x 2."""
    layout = Layout((64, 64), "uint8", (32, 32), (16, 16), "lz4", ("y", "x"), (1.0, 1.0), (None, None), ome)
    layout = replace(layout, levels=2, factor=(2, 2), block=(32, 32)) if ome else layout
    write_blocks(place, layout, PIXELS)
    if complete:
        ownership.mark_complete(place, layout)
    return layout


@pytest.mark.parametrize("level", [0, 1])
def test_a_lost_shard_is_an_error_in_every_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    path = tmp_path / "a.zarr"
    layout = finished(path, ome=True)
    assert ownership.is_marked(path)
    before = (path / "zarr.json").stat().st_mtime_ns
    ownership.mark_complete(path, layout)
    assert (path / "zarr.json").stat().st_mtime_ns == before
    assert (ownership.metadata_problems(path, layout), ownership.find_foreign_entry(path, layout)) == ([], ""), (
        "the mark is the run's own"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: pytest.fail(f"{path} is looked for, although its end was read"))
        check_whole(str(path))
        check_whole(str(path / "1"))
    source = pickle.loads(pickle.dumps(open_source(path, level=level)))
    whole = source[:, :]
    (path / f"{level}/c/0/1").unlink()
    with pytest.raises(DamagedData, match=rf"a\.zarr: .*{WORDS}.*a\.zarr/{level}/zarr\.json"):
        source[:, :]
    np.testing.assert_array_equal(source[:16, :16], whole[:16, :16])
    with pytest.raises(DamagedData, match=rf"a\.zarr/{level}/c/0/1: the shard is missing; 1 of the 8 shards") as lost:
        check_whole(str(path))
    assert "Restore them from a copy, write the image again, or let" in str(lost.value)
    assert "scan" not in str(lost.value)


@pytest.mark.parametrize("kind", ["zip", "zip of an OME-Zarr", "in a group", "with attributes", "as chunks"])
def test_any_copy_that_lacks_a_shard_is_refused_before_a_job_begins(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / ("group.zarr/image" if kind == "in a group" else "a.zarr")
    if kind == "in a group":
        zarr.create_group(tmp_path / "group.zarr")
    finished(folder, ome="OME" in kind)
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


@pytest.mark.parametrize(
    ("where", "said"),
    [("a file", "decompressing data|Bad CRC-32"), ("its header", "Bad magic number"), ("the list", "Bad magic")],
)
def test_a_damaged_zip_is_refused(tmp_path: Path, where: str, said: str) -> None:
    finished(tmp_path / "a.zarr", ome=True)
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
    layout, zeros = finished(place, complete=False), np.zeros((32, 32), "uint8")
    ShardWriter(place, layout).write(layout.grid.block_at(0).core, zeros)
    ownership.mark_complete(place, layout)
    source = open_source(str(place))
    np.testing.assert_array_equal(source[:, 32:], PIXELS[:, 32:])
    assert not source[:32, :32].any(), "zeros that were written are read"
    delete(place / "c/0/1")
    for one in (source, open_source(str(place))):
        with pytest.raises(DamagedData, match=WORDS):
            one[:, :]
        np.testing.assert_array_equal(one[32:, :32], PIXELS[32:, :32])


def test_what_another_program_appends_or_leaves_out_can_be_read(tmp_path: Path) -> None:
    finished(tmp_path / "a.zarr")
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


WHOLE = Region.whole(PLAIN.shape)


@pytest.fixture
def place(object_store: ObjectServer, tmp_path: Path) -> ObjectPath:
    """A place of its own for each test."""
    pytest.importorskip("obstore")
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
    assert (contents(place), open_output(place)) == (expected, layout)
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
        ownership.metadata_problems(place, PLAIN)


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
    assert ownership.metadata_problems(place, PLAIN) == [f"metadata: {place}/zarr.json is missing"]
    ownership.restore_metadata(place, PLAIN)
    assert (contents(place), ownership.find_foreign_entry(place, PLAIN)) == (before, "")
    put(place / "notes.txt", b"mine")
    assert ownership.find_foreign_entry(place, PLAIN) == f"no run wrote {place}/notes.txt"


def test_only_a_zarr_is_overwritten_and_nothing_beside_it(place: ObjectPath) -> None:
    written(place, OME)
    neighbours = [place.with_name(f"a.zarr{end}") for end in ("2/zarr.json", "2/c/0", ".run/claim.json", "x")]
    for neighbour in neighbours:
        put(neighbour, b"theirs")
    with pytest.raises(OutputRefused, match=r"it already exists.*output\.overwrite: true"):
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
        assert (run.path.parent, run.output) == (tmp_path, place)
    assert RunDirectory(Path("s3+scans+clean.zarr")).output == Path("s3+scans+clean.zarr")


SCENE = noisy_image((150, 130), "uint16")


class Quiet(SimpleHTTPRequestHandler):
    """A web server without a log."""

    def log_message(self, *_: Any) -> None:
        return None


@contextmanager
def serving(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """The address of an image in a folder that a web server shows."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.zarr"
        server.shutdown()


@pytest.fixture(params=["s3", "http"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """The URL of an array of nine chunks, and the array as it can be written."""
    pytest.importorskip("obstore")
    if request.param == "s3":
        from obstore.store import from_url

        request.getfixturevalue("object_store")
        url = f"s3://{BUCKET}/{tmp_path.name}/a.zarr"
        yield url, zarr.create_array(zarr.storage.ObjectStore(from_url(url)), data=SCENE, chunks=(64, 64))
        return
    with serving(tmp_path) as url:
        yield url, zarr.create_array(tmp_path / "a.zarr", data=SCENE, chunks=(64, 64))


def test_a_dataset_is_an_image_of_a_root_or_a_level_of_one(stored: tuple[str, Any]) -> None:
    url, array = stored
    for name, size in (("", 0), ("0", 1), ("1", 2)):
        group = zarr.create_group(array.store, path=name, overwrite=not name)
        entry = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [size, size]}]}
        image = {"multiscales": [{"axes": ["y", "x"], "datasets": [entry]}]}
        group.attrs["ome"] = {"version": "0.5", **(image if size else {"bioformats2raw.layout": 3})}
        if size:
            group.create_array("0", data=SCENE, chunks=(64, 64))
    for dataset in ("1", "1/0"):
        source = open_source(url, dataset=dataset)
        assert (source.format, source.axes, source.scale) == ("ome", ("y", "x"), (2, 2))
        assert np.array_equal(source[:9, :9], SCENE[:9, :9])
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
def test_a_store_that_only_lets_read_is_read_and_one_that_fails_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: int
) -> None:
    few = partial(pytest.importorskip("obstore.store").from_url, retry_config={"max_retries": 2})
    monkeypatch.setattr("obstore.store.from_url", few)

    class OnlyGet(Quiet):
        def do_HEAD(self) -> None:
            self.send_error(denied)

    zarr.create_array(tmp_path / "a.zarr", data=SCENE, chunks=(64, 64))
    with serving(tmp_path, OnlyGet) as url:
        if denied == 503:
            with pytest.raises(InputUnreadable, match="does not answer"):
                open_source(url)
            return
        source = open_source(url)
        np.testing.assert_array_equal(source[:9, :9], SCENE[:9, :9])
    with pytest.raises(InputUnreadable, match="the store cannot be read"):
        source.change()
