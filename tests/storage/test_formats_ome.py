"""OME-Zarr 0.4 and 0.5 images: the requested level, with its axes, scale and units."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.errors import InputError
from halotile.storage.arrays import open_source
from halotile.storage.grid import Region
from tests.cases import in_folders

AXES = [
    {"name": "c", "type": "channel"},
    {"name": "y", "type": "space", "unit": "micrometer"},
    {"name": "x", "type": "space", "unit": "micrometer"},
]
LEVELS = [np.random.default_rng(level).integers(0, 999, (2, 64 >> level, 48 >> level), "u2") for level in range(3)]


def _write(store: Any, version: str, axes: list[Any] = AXES, **more: Any) -> None:
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
    _write(tmp_path / "a.zarr", version)
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
        _write(root / image, version)
        if "/" in image:
            well = _group(root / image[:-2], version)
            well.attrs.update(_said(version, {"well": {"images": [{"path": image[-1]}]}}))
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
def test_one_of_several_images_has_to_be_named(tmp_path: Path, version: str, images: list[str]) -> None:
    root = _root(tmp_path, version, images)
    named = f"several images: {', '.join(images)}"
    with pytest.raises(InputError, match=f"{named}. Write the path of one, such as {root}/{images[0]}"):
        open_source(root)
    assert open_source(root / images[1]).format == "ome"
    packed = shutil.make_archive(str(tmp_path / "a"), "zip", root)
    with pytest.raises(InputError, match=rf"{named}\. Write dataset: one of {', '.join(images)}\.$"):
        open_source(packed)
    with pytest.raises(InputError, match=rf"'9', .* Write dataset: one of {', '.join(images)}\.$"):
        open_source(root, dataset="9")


@both
@pytest.mark.parametrize("images", [["0", "1"], ["A/1/0", "B/2/0"]])
@pytest.mark.parametrize("place", ["folder", "zip", "url"])
def test_a_dataset_is_the_image_of_a_root_or_plate_or_a_level_of_one(
    tmp_path: Path, version: str, images: list[str], place: str
) -> None:
    root = _root(tmp_path, version, images)
    path = {"folder": str(root), "url": f"file://{root}"}.get(place, "")
    if place == "url":
        pytest.importorskip("obstore")
    path = path or shutil.make_archive(str(tmp_path / "a"), "zip", root)
    alone = open_source(root / images[1], level=1)
    of_image = open_source(path, dataset=images[1], level=1)
    of_level = open_source(path, dataset=f"{images[1]}/s1")
    for source in (of_image, of_level, pickle.loads(pickle.dumps(of_level))):
        assert (source.axes, source.scale, source.units) == (alone.axes, alone.scale, alone.units)
        assert (source.ome, source.remarks) == (alone.ome, ())
        assert np.array_equal(source.read(Region.whole(source.shape)), LEVELS[1])
    if place == "folder":
        assert of_image.fingerprint() == of_level.fingerprint() == alone.fingerprint()
    with pytest.raises(InputError, match="level is 2, but dataset s1 is level 1 itself"):
        open_source(path, dataset=f"{images[1]}/s1", level=2)


@both
def test_each_of_two_multiscales_has_its_own_axes_scale_and_name(tmp_path: Path, version: str) -> None:
    group = _group(tmp_path / "a.zarr", version, "w")
    images: list[Any] = []
    for name, size, pixels in (("a", 0.5, LEVELS[0][0]), ("b", 3, LEVELS[1]), ("deep/0", 4, LEVELS[2])):
        group.create_array(name, data=pixels)
        steps = [{"type": "scale", "scale": [size] * pixels.ndim}]
        entries = [{"path": name, "coordinateTransformations": steps}]
        images.append({"name": f"image {name}", "axes": AXES[-pixels.ndim :], "datasets": entries})
    group.create_array("other", data=LEVELS[0])
    group.attrs.update(_said(version, {"multiscales": images}))
    first = open_source(tmp_path / "a.zarr")
    assert first.remarks == (
        "it has 3 multiscales, and this is the first: for another, write input.dataset: one of b, deep/0",
    )
    expected = {"a": ("yx", 0.5, "a"), "b": ("cyx", 3, "b"), "deep/0": ("cyx", 4, "deep/0")}
    for dataset, (axes, size, name) in (expected | {"deep": expected["deep/0"]}).items():
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
    _write(tmp_path / "a.zarr", version)
    source = open_source(tmp_path / "a.zarr" / "s1", axes="cyx")
    assert (source.format, source.scale) == ("zarr", (1.0, 1.0, 1.0))
    assert source.remarks == (
        "it is read without the pixel sizes and channels of its OME-Zarr: for these, write "
        f"input.path: {tmp_path}/a.zarr and input.dataset: s1",
    )


def test_the_default_fill_value_says_nothing_of_the_pixels(tmp_path: Path) -> None:
    rows: list[tuple[int, float | None]] = [(0, None), (7, 7)]
    for folder, (fill, nodata) in in_folders(tmp_path, rows):
        _write(folder / "a.zarr", "0.4")
        level = zarr.create_array(
            folder / "a.zarr" / "s0", data=LEVELS[0], fill_value=fill, zarr_format=2, overwrite=True
        )
        level.attrs["_ARRAY_DIMENSIONS"] = ["c", "y", "x"]
        source = open_source(folder / "a.zarr")
        assert source.nodata == nodata
        assert ("input.nodata: 0" in "".join(source.remarks)) == (fill == 0)


@both
def test_the_position_of_the_first_pixel_follows_the_transformations_of_the_image(tmp_path: Path, version: str) -> None:
    _write(tmp_path / "a.zarr", version)
    assert place_of(tmp_path / "a.zarr") == (0.0, 5.0, 5.0)
    whole = [{"type": "scale", "scale": [1, 0.5, 2]}, {"type": "translation", "translation": [0, 100, 0]}]
    _write(tmp_path / "b.zarr", version, coordinateTransformations=whole)
    assert place_of(tmp_path / "b.zarr") == (0.0, 102.5, 10.0)
    assert open_source(tmp_path / "b.zarr", level=1).scale == (1.0, 1.0, 4.0)


def place_of(path: Path) -> tuple[float, ...]:
    ome = open_source(path, level=1).ome
    assert ome is not None
    return ome.translation


CHANNEL = {"color": "00FF00", "label": "GFP", "window": {"start": 0, "end": 90, "min": 0, "max": 999}}


@both
def test_the_name_and_valid_channels_are_read(tmp_path: Path, version: str) -> None:
    _write(tmp_path / "a.zarr", version, name="cells")
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


@both
def test_a_zip_store_and_a_url_read(tmp_path: Path, version: str) -> None:
    pytest.importorskip("obstore")
    _write(tmp_path / "a.zarr", version)
    for path in (shutil.make_archive(str(tmp_path / "a.ome"), "zip", tmp_path / "a.zarr"), f"file://{tmp_path}/a.zarr"):
        source = open_source(path, level=2)
        assert (source.format, source.scale) == ("ome", (1.0, 4.0, 4.0))
        assert np.array_equal(source.read(Region((0, 3, 4), (2, 15, 11))), LEVELS[2][:, 3:15, 4:11])


def test_axes_of_older_or_unusual_images(tmp_path: Path) -> None:
    rows: list[tuple[list[Any], str]] = [
        (["z", "y", "x"], "zyx"),
        ([{"name": "lambda", "type": "channel"}, {"name": "y"}, {"name": "x"}], "cyx"),
        ([{"name": "angle"}, {"name": "y"}, {"name": "x"}], "qyx"),
        ([{"name": "y"}], "qyx"),
        ([], "qyx"),
    ]
    for folder, (axes, letters) in in_folders(tmp_path, rows):
        _write(folder / "a.zarr", "0.4", axes=axes)
        assert "".join(open_source(folder / "a.zarr").axes) == letters


SPACE = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]


def _plane(path: Path, axes: list[Any], scale: list[float]) -> Path:
    """A plane of one level with contradictory metadata."""
    group = zarr.open_group(path, mode="w")
    group.create_array("0", data=LEVELS[0][0])
    steps = [{"type": "scale", "scale": scale}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    return path


@pytest.mark.parametrize(
    ("axes", "scale", "remark", "sizes", "units"),
    [
        (SPACE, [2, 3], "names the axes z, y, x for an array of 2: taken as yx. If not, write input.axes", (2.0, 3.0), (None, None)),
        ([SPACE[1], SPACE[1]], [2, 3], "names the axes y, y: taken as yx", (2.0, 3.0), ("micrometer",) * 2),
        (SPACE[1:], [9, 2, 3], "has a scale of 3 numbers for 2 axes, which is left out: the size is taken", (1.0, 1.0), (None, None)),
        (SPACE[1:], [2, -1], "has -1 as the size along x, which is none: the size is taken", (2.0, 1.0), ("micrometer", None)),
        (SPACE[1:], [0, 3], "has 0 as the size along y, which is none: the size is taken", (1.0, 3.0), (None, "micrometer")),
        ([SPACE[1], {"name": "x", "unit": "parsnip"}], [2, 3], "has 'parsnip' as the unit along x", (2.0, 3.0), ("micrometer", None)),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_meant_are_remarked_on_and_not_taken_over(
    tmp_path: Path,
    axes: list[Any],
    scale: list[float],
    remark: str,
    sizes: tuple[float, ...],
    units: tuple[str | None, ...],
) -> None:
    source = open_source(_plane(tmp_path / "a.zarr", axes, scale))
    (said,) = source.remarks
    assert said.startswith((f"its OME-Zarr {remark}", f"the file {remark}"))
    assert (source.axes, source.scale, source.units) == (("y", "x"), sizes, units)


def test_units_of_space_and_time_have_no_remark_and_their_names_in_ome_zarr(tmp_path: Path) -> None:
    for unit, name in {"um": "micrometer", "yottasecond": "yottasecond", "angstrom": "angstrom"}.items():
        source = open_source(_plane(tmp_path / "a.zarr", [SPACE[1], {"name": "x", "unit": unit}], [2, 3]))
        assert (source.remarks, source.units) == ((), ("micrometer", name))


def test_axes_that_the_user_names_have_no_remark(tmp_path: Path) -> None:
    assert open_source(_plane(tmp_path / "a.zarr", SPACE, [2, 3]), axes="yx").remarks == ()


@both
def test_a_dataset_of_the_image_opens_as_that_level(tmp_path: Path, version: str) -> None:
    _write(tmp_path / "a.zarr", version)
    source = open_source(tmp_path / "a.zarr", dataset="s1", axes="zyx")
    assert (source.format, source.axes, source.scale) == ("ome", ("z", "y", "x"), (1.0, 2.0, 2.0))


def test_attributes_that_describe_no_image_leave_a_plain_group(tmp_path: Path) -> None:
    rows: list[Any] = ["hello", {"multiscales": []}, {"plate": {}}, None]
    for folder, ome in in_folders(tmp_path, rows):
        group = zarr.open_group(folder / "a.zarr", mode="w")
        group.attrs["ome"] = ome
        group.create_array("only", data=LEVELS[0])
        assert open_source(folder / "a.zarr").format == "zarr"


def test_broken_attributes_are_an_input_error(tmp_path: Path) -> None:
    rows: list[Any] = [["text"], [{"datasets": "s0"}], [{"datasets": [{"name": "s0"}]}], {"a": 1}]
    for folder, broken in in_folders(tmp_path, rows):
        group = zarr.open_group(folder / "a.zarr", mode="w")
        group.attrs["ome"] = {"version": "0.5", "multiscales": broken}
        with pytest.raises(InputError, match=r"a\.zarr"):
            open_source(folder / "a.zarr")
