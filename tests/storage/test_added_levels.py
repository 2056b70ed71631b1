"""Levels that are added to an image: the bits of a job's, whatever happens meanwhile, and the image complete at every moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from halotile.errors import ConfigError, OutputRefused
from halotile.storage.arrays import open_source
from halotile.storage.images.added_levels import WORK, add_levels
from halotile.storage.images.image_groups import find_image
from halotile.storage.sharded import levels
from halotile.storage.sharded.output import open_output
from tests.cases import all_of
from tests.storage.adding import (
    FORMATS,
    SHAPE,
    check_equal,
    image_of,
    save_image,
    small_images,
    stored_levels,
    tree,
    with_holes,
)
from tests.storage.outputs import OME, written
from tests.support import job_of, noisy_image, run_inline


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    small_images(monkeypatch)


@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v2"]))
@pytest.mark.parametrize(
    ("pixels", "axes", "scale", "attributes"),
    [
        pytest.param(with_holes("float32"), "yx", None, {}, id="holes"),
        pytest.param(
            with_holes("uint16"),
            "yx",
            None,
            {"_FillValue": 7},
            id="nodata",
            marks=pytest.mark.thorough,
        ),
        pytest.param(noisy_image((2, 2, 1, 75, 90), "uint8"), "tczyx", (2, 1, 3, 0.5, 0.5), {}, id="tczyx"),
        pytest.param(
            noisy_image((25, 33, 71), "uint16"),
            "zyx",
            None,
            {},
            id="cubes",
            marks=pytest.mark.thorough,
        ),
        pytest.param(noisy_image((1, 150), "int16"), "yx", None, {}, id="line", marks=pytest.mark.thorough),
    ],
)
def test_levels_are_those_of_a_job(
    tmp_path: Path,
    form: str,
    pixels: NDArray[Any],
    axes: str,
    scale: Sequence[float] | None,
    attributes: Mapping[str, Any],
) -> None:
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
        assert (group["1"].chunks, group["1"].shards) == (
            group["0"].chunks[:3] + group["1"].chunks[3:],
            group["1"].shards,
        )
    assert not (path / WORK).exists()


def test_bool_pixels_go_by_the_majority(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((64, 64)) > 0.5
    path = save_image(tmp_path / "a.zarr", pixels)
    add_levels(path)
    means = pixels.reshape(32, 2, 32, 2).mean((1, 3))
    np.testing.assert_array_equal(stored_levels(path)[1], means > 0.5)


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
        assert added[2]["coordinateTransformations"] == [
            {"type": "scale", "scale": [2.0, 2.0]},
            {"type": "translation", "translation": [0.75, 0.75]},
        ]
        image = before.get("ome", before)["multiscales"][0]
        image["datasets"] = added
        assert after.attrs.asdict() == before == zarr.open_group(path, use_consolidated=False).attrs.asdict()


@pytest.mark.parametrize(
    ("name", "following"), [("s0", "s1"), ("scale0/image", "1"), ("0", "1"), ("full", "1")]
)
def test_levels_continue_the_names(tmp_path: Path, name: str, following: str) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE), name=name)
    add_levels(path)
    assert [entry["path"] for entry in image_of(path)["datasets"]][:2] == [name, following]
    assert open_source(path, level=3).shape == (19, 27)


def test_what_has_a_name_already_keeps_it(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    (path / "1").mkdir()
    (path / "1" / "notes.txt").write_text("mine")
    add_levels(path)
    assert [entry["path"] for entry in image_of(path)["datasets"]] == ["0", "2", "3", "4", "5"]
    assert (path / "1" / "notes.txt").read_text() == "mine"


def test_too_few_levels_are_continued_from_the_coarsest(tmp_path: Path) -> None:
    whole = save_image(tmp_path / "a.zarr", with_holes("float32"))
    add_levels(whole)
    expected, entries = stored_levels(whole), image_of(whole)["datasets"]
    for steps in (entries[1]["coordinateTransformations"], entries[1]["coordinateTransformations"][:1]):
        path = save_image(tmp_path / "b.zarr", with_holes("float32"))
        group = zarr.open_group(path)
        group.create_array("1", data=expected[1], chunks=(32, 32))
        attributes = group.attrs.asdict()
        attributes["ome"]["multiscales"][0]["datasets"].append(
            {"path": "1", "coordinateTransformations": steps}
        )
        group.attrs.put(attributes)
        assert add_levels(path)[0] == 5
        check_equal(path, expected)
        assert image_of(path)["datasets"][2:] == entries[2:]
    files = tree(whole)
    assert add_levels(whole) == (5, [(10, 14)])
    assert tree(whole) == files


def test_missing_chunks_have_the_fill_value(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", np.zeros(SHAPE, "uint16"))
    group = zarr.open_group(path)
    shutil.rmtree(path / "0")
    array = group.create_array("0", shape=SHAPE, chunks=(32, 32), dtype="uint16", fill_value=9)
    array[:32, :32] = 5
    add_levels(path)
    level = stored_levels(path)[1]
    assert (level[:16, :16] == 5).all()
    assert (level[16:] == 9).all()
    assert len(list((path / "1" / "c").rglob("*"))) < 4


def test_a_place_on_earth_is_that_of_each_level(tmp_path: Path) -> None:
    place = {"spatial:transform": [10.0, 0.0, 500.0, 0.0, -10.0, 900.0], "proj:code": "EPSG:32632"}
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE), attributes=place)
    add_levels(path)
    found = open_source(path, level=2).georeference
    assert found is not None
    assert found.transform == (40.0, 0.0, 500.0, 0.0, -40.0, 900.0)
    assert zarr.open_group(path)["2"].attrs["spatial:shape"] == [38, 54]


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputRefused, match="you may not write in"):
        add_levels(path)


def test_labels_and_unknown_versions_are_refused(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    group = zarr.open_group(path)
    attributes = group.attrs.asdict()
    group.attrs["ome"] = attributes["ome"] | {"image-label": {}}
    with pytest.raises(ConfigError, match="is a label image"):
        add_levels(path)
    group.attrs["ome"] = attributes["ome"] | {"version": "0.9"}
    with pytest.raises(ConfigError, match=r"is an OME-Zarr 0\.9 with 1 levels"):
        add_levels(path)


@pytest.mark.filterwarnings("ignore:Combining")
@pytest.mark.parametrize(
    ("inner", "filters"),
    [
        ([zarr.codecs.ShardingCodec(chunk_shape=(16, 16))], None),
        (None, [zarr.codecs.TransposeCodec(order=(1, 0))]),
    ],
)
def test_codecs_that_do_not_fit_smaller_levels_are_named(tmp_path: Path, inner: Any, filters: Any) -> None:
    path = save_image(tmp_path / "a.zarr", noisy_image(SHAPE))
    group = zarr.open_group(path)
    del group["0"]
    shards = zarr.codecs.ShardingCodec(chunk_shape=(32, 32), **({"codecs": inner} if inner else {}))
    group.create_array(
        "0", data=noisy_image(SHAPE), chunks=(64, 64), serializer=shards, compressors=None, filters=filters
    )
    with pytest.raises(ConfigError, match="has shards within shards, or other codecs before them"):
        add_levels(path)
    assert sorted(os.listdir(path)) == ["0", "zarr.json"]


def test_the_layout_of_an_output_is_known_with_levels_that_were_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "LARGEST_TOP", 4)
    written(tmp_path / "a.zarr", OME)
    add_levels(tmp_path / "a.zarr")
    assert len(stored_levels(tmp_path / "a.zarr")) == 4
    assert open_output(tmp_path / "a.zarr") == OME
    some = OME.in_levels((1, 1, 16, 16), 2)
    assert some.levels == 2
    written(tmp_path / "b.zarr", some)
    add_levels(tmp_path / "b.zarr")
    check_equal(tmp_path / "b.zarr", stored_levels(tmp_path / "a.zarr"))
    assert open_output(tmp_path / "b.zarr") == some


def test_the_image_in_a_zarr_is_found(tmp_path: Path) -> None:
    pixels = noisy_image(SHAPE)
    for form in ("v2", "v3"):
        root = tmp_path / form
        zarr.open_group(
            root, mode="w", zarr_format=FORMATS[form]["zarr_format"], attributes={"bioformats2raw.layout": 3}
        )
        image = save_image(root / "0", pixels, form)
        assert find_image(str(root)) == find_image(str(image)) == find_image(str(image / "0")) == image
        save_image(root / "1", pixels, form)
        with pytest.raises(
            ConfigError, match=rf"{form} contains several images: 0, 1\. Write the path of one, such as "
        ):
            find_image(str(root))
        assert find_image(str(root / "0" / "0" / "c")) is None
    assert find_image(str(tmp_path)) is None
    zarr.create_array(tmp_path / "bare.zarr", data=pixels)
    assert find_image(str(tmp_path / "bare.zarr")) is None
    assert find_image("s3://bucket/image.zarr") is None


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_image(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
import numpy, zarr
from halotile.storage.images import added_levels
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
group = zarr.create_group(sys.argv[1])
group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
array = group.create_array("0", shape=(12288, 12288), shards=(4096, 4096), chunks=(512, 512), dtype="uint16")
rows = numpy.arange(512 * 4096, dtype="uint32").astype("uint16").reshape(512, 4096)
small = group.create_array("small", shape=(2100, 2100), chunks=(512, 512), dtype="uint16")
for index in numpy.ndindex(24, 3):
    array[index[0] * 512:(index[0] + 1) * 512, index[1] * 4096:(index[1] + 1) * 4096] = rows
before = peak()
assert added_levels.add_levels(Path(sys.argv[1]))[0] == 5
print((peak() - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.zarr")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 100
