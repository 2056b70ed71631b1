"""Levels that are added to an image: the bits of a job's, and the image complete at every moment, whatever happens meanwhile."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData, DiskRefused, InputError, OutputInUse, OutputRefused
from halotile.storage.arrays import find_image, open_source
from halotile.storage.disk.durable import Buffers, Disk
from halotile.storage.images import added_levels
from halotile.storage.images.added_levels import WORK, add_levels
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded import layout
from halotile.storage.sharded.output import open_output
from halotile.storage.sharded.ownership import remove_added_levels
from tests.cases import all_of, in_folders, thorough
from tests.storage.outputs import OME, image_of, stored_levels, written
from tests.support import job_of, noisy_image, run_inline

SHAPE = (150, 213)


FORMATS: dict[str, Any] = {f"v{n}": {"zarr_format": n, "chunks": 32} for n in (2, 3)}
FORMATS["shards"] = {"zarr_format": 3, "chunks": 16, "shards": 64}


TYPES, SPACE = {"t": "time", "c": "channel"}, {"type": "space", "unit": "micrometer"}


def save_image(
    path: Path, pixels: Any, form: str = "v3", *, axes: str = "yx", scale: Any = None, name: str = "0", **more: Any
) -> Path:
    """An OME-Zarr image with its finest level, as other programs write it."""
    options = dict(FORMATS[form])
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("zarr_format"))
    edges = {key: tuple(edge if axis in "yx" else 1 for axis in axes) for key, edge in options.items()}
    group.create_array(name, shape=pixels.shape, dtype=pixels.dtype, **more, **edges)[...] = pixels
    steps = [{"type": "scale", "scale": list(scale or [0.5] * len(axes))}]
    named = [{"name": a, "type": TYPES[a]} if a in TYPES else SPACE | {"name": a} for a in axes]
    image: dict[str, Any] = {"axes": named, "datasets": [{"path": name, "coordinateTransformations": steps}]}
    image |= {"name": "cells", "metadata": {"method": "mine"}}
    of_v2, of_v3 = {"multiscales": [{"version": "0.4", **image}]}, {"version": "0.5", "multiscales": [image]}
    group.attrs.update({"mine": [1, 2.5], **(of_v2 if form == "v2" else {"ome": of_v3})})
    return path


def tree(path: Path) -> dict[str, bytes]:
    """Every file, with its contents."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def check_equal(path: Path, expected: Sequence[NDArray[Any]]) -> None:
    found = stored_levels(path)
    assert len(found) == len(expected)
    for level, wanted in zip(found, expected, strict=True):
        assert level.dtype == wanted.dtype
        np.testing.assert_array_equal(level, wanted)


def with_holes(dtype: str) -> NDArray[Any]:
    pixels = noisy_image(SHAPE, dtype)
    hole = np.nan if pixels.dtype.kind == "f" else 7
    pixels[20:61, 30:77] = hole
    pixels[100, ::3] = hole
    return pixels


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels, shards and parts of small images."""
    monkeypatch.setattr(layout, "LARGEST_TOP", 20)
    monkeypatch.setattr(layout, "SMALLEST_SHARD", 4)
    monkeypatch.setattr(added_levels, "PART_BYTES", 4096)
    monkeypatch.setattr(added_levels, "SHARD_BYTES", 4096)


class Killed(Exception):
    """End of the program."""


class MortalDisk(Disk):
    """A disk on which the program is killed before a write operation, or in the middle of a write."""

    def __init__(self, last: int, end: Exception | None = None) -> None:
        self.left, self.end = last, end or Killed()

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.end

    def _write(self, fd: int, buffers: Buffers) -> int:
        if self.left == 0:
            super()._write(fd, [memoryview(buffers[0])[:3]])
        self._count()
        return super()._write(fd, buffers)

    def _replace(self, old: Path, new: Path) -> None:
        self._count()
        super()._replace(old, new)

    def _mkdir(self, path: Path, mode: int) -> None:
        self._count()
        super()._mkdir(path, mode)

    def _unlink(self, path: Path) -> None:
        if self.left > 0 or not path.name.endswith(".partial"):
            self._count()
            super()._unlink(path)  # a killed program removes nothing

    def _rmdir(self, path: Path) -> None:
        self._count()
        super()._rmdir(path)


@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v2"]))
@pytest.mark.parametrize(
    ("pixels", "axes", "scale", "attributes"),
    [
        pytest.param(with_holes("float32"), "yx", None, {}, id="holes"),
        thorough(with_holes("uint16"), "yx", None, {"_FillValue": 7}),
        pytest.param(noisy_image((2, 2, 1, 75, 90), "uint8"), "tczyx", (2, 1, 3, 0.5, 0.5), {}, id="tczyx"),
        thorough(noisy_image((25, 33, 71), "uint16"), "zyx", None, {}),
        thorough(noisy_image((1, 150), "int16"), "yx", None, {}),
    ],
)
def test_levels_are_as_in_a_job(tmp_path: Path, form: str, pixels: Any, axes: str, scale: Any, attributes: Any) -> None:
    path = save_image(tmp_path / "a.zarr", pixels, form, axes=axes, scale=scale, attributes=attributes)
    tile = {"block": 32, "axes": "zyx"} if axes == "zyx" else {"block": 64}
    run_inline(job_of(path, tmp_path / "b.zarr", "none", shard=64 if axes == "yx" else 8, chunk=4, tile=tile))
    expected = stored_levels(tmp_path / "b.zarr")
    assert len(expected) >= 3
    count, shapes = add_levels(path)
    check_equal(path, expected)
    assert (count, shapes) == (len(expected), [level.shape for level in expected])
    ours, others = image_of(path)["datasets"], image_of(tmp_path / "b.zarr")["datasets"]
    assert ours[1:] == others[1:]
    group = zarr.open_group(path, mode="r")
    assert group.metadata.zarr_format == group["1"].metadata.zarr_format == FORMATS[form]["zarr_format"]
    assert group["1"].attrs.asdict() == group["0"].attrs.asdict()
    assert group["1"].compressors == group["0"].compressors
    if axes == "tczyx":
        assert group["1"].chunks[:3] == group["0"].chunks[:3]
    assert not (path / WORK).exists()


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_every_other_key_stays_also_in_consolidated_metadata(tmp_path: Path) -> None:
    for form, file in (("v2", ".zmetadata"), ("v3", "zarr.json")):
        path = save_image(tmp_path / form, with_holes("float32"), form)
        zarr.consolidate_metadata(path)
        before = zarr.open_consolidated(path).attrs.asdict()
        add_levels(path)
        after = zarr.open_consolidated(path)
        assert "1" in after
        assert after["1"][0, 0] == stored_levels(path)[1][0, 0]
        assert '"1' in json.dumps(json.loads((path / file).read_text()))
        added = image_of(path)["datasets"]
        assert [entry["path"] for entry in added] == ["0", "1", "2", "3", "4"]
        scale, place = added[2]["coordinateTransformations"]
        assert scale == {"type": "scale", "scale": [2.0, 2.0]}
        assert place == {"type": "translation", "translation": [0.75, 0.75]}
        before.get("ome", before)["multiscales"][0]["datasets"] = added
        assert after.attrs.asdict() == before == zarr.open_group(path, use_consolidated=False).attrs.asdict()


def test_levels_continue_the_names_with_the_fill_value_of_missing_chunks_and_a_place_each(tmp_path: Path) -> None:
    place = {"spatial:transform": [10.0, 0.0, 500.0, 0.0, -10.0, 900.0], "proj:code": "EPSG:32632"}
    rows = [("s0", "s1"), ("scale0/image", "1"), ("0", "2"), ("full", "1")]
    for folder, (name, following) in in_folders(tmp_path, rows):
        path = save_image(folder / "a.zarr", np.zeros(SHAPE, "uint16"), name=name)
        shutil.rmtree(path / name)
        options: Any = {"shape": SHAPE, "chunks": (32, 32), "dtype": "uint16", "fill_value": 9, "attributes": place}
        zarr.open_group(path).create_array(name, **options)[:32, :32] = 5
        if name == "0":  # what has a name already keeps it
            (path / "1").mkdir()
            (path / "1" / "notes.txt").write_text("mine")
        add_levels(path)
        assert [entry["path"] for entry in image_of(path)["datasets"]][:2] == [name, following]
        source, level = open_source(path, level=3), stored_levels(path)[1]
        assert source.shape == (19, 27)
        assert source.georeference is not None
        assert source.georeference.transform == (80.0, 0.0, 500.0, 0.0, -80.0, 900.0)
        assert (level[:16, :16] == 5).all()
        assert (level[16:] == 9).all()
        assert len(list((path / following / "c").rglob("*"))) < 4
    assert (tmp_path / "2/a.zarr/1/notes.txt").read_text() == "mine"
    pixels = np.random.default_rng(0).random((64, 64)) > 0.5  # bool goes by the majority
    path = save_image(tmp_path / "b.zarr", pixels)
    add_levels(path)
    np.testing.assert_array_equal(stored_levels(path)[1], pixels.reshape(32, 2, 32, 2).mean((1, 3)) > 0.5)


def test_too_few_levels_are_continued_from_the_coarsest(tmp_path: Path) -> None:
    whole = save_image(tmp_path / "a.zarr", with_holes("float32"))
    add_levels(whole)
    expected, entries = stored_levels(whole), image_of(whole)["datasets"]
    for steps in (entries[1]["coordinateTransformations"], entries[1]["coordinateTransformations"][:1]):
        path = save_image(tmp_path / "b.zarr", with_holes("float32"))
        group = zarr.open_group(path)
        group.create_array("1", data=expected[1], chunks=(32, 32))
        attributes = group.attrs.asdict()
        attributes["ome"]["multiscales"][0]["datasets"].append({"path": "1", "coordinateTransformations": steps})
        group.attrs.put(attributes)
        assert add_levels(path)[0] == 5
        check_equal(path, expected)
        assert image_of(path)["datasets"][2:] == entries[2:]
    files = tree(whole)
    assert (add_levels(whole), tree(whole)) == ((5, [(10, 14)]), files)


def test_labels_odd_versions_and_closed_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    group = zarr.open_group(path)
    attributes: Any = group.attrs.asdict()["ome"]
    odd = {"is a label image": {"image-label": {}}, r"is an OME-Zarr 0\.9 with 1 levels": {"version": "0.9"}}
    for words, change in odd.items():
        group.attrs["ome"] = attributes | change
        with pytest.raises(ConfigError, match=words):
            add_levels(path)
    group.attrs["ome"] = attributes
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(OutputRefused, match="you may not write in"):
            add_levels(path)
    in_use = pytest.raises(OutputInUse, match=r"a\.zarr/\.levels is in use: process \d+ on .*\. Wait")
    with RunDirectory(path / WORK).lock(), in_use:
        add_levels(path)


@pytest.mark.filterwarnings("ignore:Combining")
def test_codecs_that_do_not_fit_smaller_levels_are_named(tmp_path: Path) -> None:
    turn, inside = zarr.codecs.TransposeCodec(order=(1, 0)), zarr.codecs.ShardingCodec(chunk_shape=(16, 16))
    rows: list[tuple[Any, Any]] = [([inside], None), (None, [turn])]
    for folder, (inner, filters) in in_folders(tmp_path, rows):
        path = save_image(folder / "a.zarr", noisy_image(SHAPE))
        group = zarr.open_group(path)
        del group["0"]
        shards = zarr.codecs.ShardingCodec(chunk_shape=(32, 32), **({"codecs": inner} if inner else {}))
        codecs: Any = {"serializer": shards, "compressors": None, "filters": filters}
        group.create_array("0", data=noisy_image(SHAPE), chunks=(64, 64), **codecs)
        with pytest.raises(ConfigError, match="has shards within shards, or other codecs before them"):
            add_levels(path)
        assert sorted(os.listdir(path)) == ["0", "zarr.json"]


def test_the_layout_of_an_output_is_known_with_added_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGEST_TOP", 4)
    some, found = OME.in_levels((1, 1, 16, 16), 2), []
    assert some.levels == 2
    for path, made in ((tmp_path / "a.zarr", OME), (tmp_path / "b.zarr", some)):
        written(path, made)
        add_levels(path)
        found.append(stored_levels(path))
        assert open_output(path) == made
    assert len(found[0]) == 4
    check_equal(tmp_path / "b.zarr", found[0])


def test_the_image_in_a_zarr_is_found(tmp_path: Path) -> None:
    pixels = noisy_image(SHAPE)
    for form in ("v2", "v3"):
        root = tmp_path / form
        version, attributes = FORMATS[form]["zarr_format"], {"bioformats2raw.layout": 3}
        zarr.open_group(root, mode="w", zarr_format=version, attributes=attributes)
        image = save_image(root / "0", pixels, form)
        assert find_image(str(root)) == find_image(str(image)) == find_image(str(image / "0")) == image
        save_image(root / "1", pixels, form)
        several = rf"{form} contains several images: 0, 1\. Write the path of one, such as "
        with pytest.raises(ConfigError, match=several):
            find_image(str(root))
        assert find_image(str(root / "0" / "0" / "c")) is None
    assert find_image(str(tmp_path)) is None
    zarr.create_array(tmp_path / "bare.zarr", data=pixels)
    assert find_image(str(tmp_path / "bare.zarr")) is None
    assert find_image("s3://bucket/image.zarr") is None


@pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:Object at")
@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v2"]))
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(tmp_path: Path, form: str) -> None:
    whole = save_image(tmp_path / "whole.zarr", noisy_image((70, 50), "uint8"), form)
    if form != "shards":
        zarr.consolidate_metadata(whole)
    shutil.copytree(whole, tmp_path / "first.zarr")
    before = stored_levels(whole)
    add_levels(whole)
    expected, files = stored_levels(whole), tree(whole)
    for last in itertools.count():
        path = tmp_path / f"{last}.zarr"
        shutil.copytree(tmp_path / "first.zarr", path)
        try:
            add_levels(path, disk=MortalDisk(last))
        except Killed:
            check_equal(path, expected if len(stored_levels(path)) > 1 else before)
            check_equal(path, [open_source(path, level=n)[...] for n in range(len(stored_levels(path)))])
            add_levels(path)
            check_equal(path, expected)
            assert tree(path) == files
            shutil.rmtree(path)
        else:
            break
    assert last > 20


class BeforeMetadata(Disk):
    """A disk on which the program is killed before the metadata of the group are replaced."""

    def _replace(self, old: Path, new: Path) -> None:
        if old.parent.name == "state" and old.suffix == ".json":
            raise Killed
        super()._replace(old, new)


def interrupted(path: Path) -> list[Path]:
    """Levels of which some shards are written when the disk is full; returns their files."""
    full = MortalDisk(40, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DiskRefused, match=r"the disk ran full: .*\. Free some space and run again"):
        add_levels(path, disk=full)
    assert len(stored_levels(path)) == 1
    files = (path / WORK / "state" / "1" / "c").rglob("*")
    shards = sorted(file for file in files if file.is_file() and not file.name.endswith(".partial"))
    assert len(shards) > 2
    return shards


def test_shards_that_are_done_are_kept_and_damaged_ones_are_not(tmp_path: Path) -> None:
    path, whole = (save_image(tmp_path / name, noisy_image(SHAPE)) for name in ("a.zarr", "b.zarr"))
    chunk = whole / "0" / "c" / "2" / "3"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:50])
    files = tree(whole)

    with pytest.raises(DamagedData, match="chunk file c/2/3"):
        add_levels(whole)
    assert tree(whole) == files
    chunk.write_bytes(content)
    add_levels(whole)
    kept, damaged, *_ = interrupted(path)
    moment = kept.stat().st_mtime_ns
    damaged.write_bytes(damaged.read_bytes()[:20])
    add_levels(path)
    assert (path / "1" / kept.relative_to(path / WORK / "state" / "1")).stat().st_mtime_ns == moment
    check_equal(path, stored_levels(whole))


def test_levels_of_an_image_that_has_changed_since_are_made_anew(tmp_path: Path) -> None:
    whole = save_image(tmp_path / "whole.zarr", noisy_image(SHAPE, seed=1))
    add_levels(whole)
    for moved in (False, True):
        path = save_image(tmp_path / f"{moved}.zarr", noisy_image(SHAPE))
        if not moved:
            interrupted(path)
        else:  # moved, and not yet named
            with pytest.raises(Killed):
                add_levels(path, disk=BeforeMetadata())
            assert (path / "4").exists()
            assert len(stored_levels(path)) == 1
        zarr.open_group(path)["0"][...] = noisy_image(SHAPE, seed=1)
        add_levels(path)
        check_equal(path, stored_levels(whole))
        assert sorted(os.listdir(path)) == ["0", "1", "2", "3", "4", "zarr.json"]


def test_an_image_that_changes_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))

    def change(done: float) -> None:
        if done > 0.9:
            zarr.open_group(path)["0"][:5] = 0

    with pytest.raises(InputError, match="was written to while its levels were made"):
        add_levels(path, change)
    assert (sorted(os.listdir(path)), len(stored_levels(path))) == (["0", "zarr.json"], 1)


def test_without_room_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    needed, usage = 4 * (75 * 107 + 38 * 54 + 19 * 27 + 10 * 14), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(DiskRefused, match=rf"levels take up to {needed:,} bytes, and {needed - 1:,} are free"):
        add_levels(path)
    assert len(stored_levels(path)) == 1
    assert (path / WORK).exists()  # what an interrupted call has written is kept
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert add_levels(path)[0] == 5


def test_names_that_lead_elsewhere_remove_nothing_there(tmp_path: Path) -> None:
    for folder, name in in_folders(tmp_path, ("..", ".", "0", "../beside", "link", "/", "")):
        output, beside = folder / "a.zarr", folder / "beside"
        written(output, OME)
        beside.mkdir()
        (beside / "kept.txt").write_text("kept")
        (output / "link").symlink_to(beside)
        document = json.loads((output / "zarr.json").read_text())
        document["attributes"]["ome"]["multiscales"][0]["datasets"].append({"path": name})
        (output / "zarr.json").write_text(json.dumps(document))
        before = tree(output / "0")
        assert (remove_added_levels(output, OME), (beside / "kept.txt").read_text()) == (1, "kept")
        assert tree(output / "0") == before
        assert f'"path": "{name}"' not in (output / "zarr.json").read_text() or name == "0"
