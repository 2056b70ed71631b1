"""Bare arrays become OME-Zarr groups in place: no pixel is copied, and a killed command goes on."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import halotile
from halotile.errors import ConfigError, OutputInUse, OutputRefused
from halotile.storage.disk.durable import DISK, Disk
from halotile.storage.disk.place import is_array
from halotile.storage.images.added_levels import WORK, add_levels
from halotile.storage.images.array_groups import ArrayGroup
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from tests.cases import all_of
from tests.storage.adding import (
    FORMATS,
    SHAPE,
    Killed,
    MortalDisk,
    check_equal,
    image_of,
    small_images,
    stored_levels,
    tree,
    with_holes,
)
from tests.support import job_of, noisy_image, run_inline


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    small_images(monkeypatch)


def save_array(
    path: Path,
    pixels: NDArray[Any],
    form: str = "v3",
    *,
    names: tuple[str | None, ...] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Path:
    options = dict(FORMATS[form])
    version, stated = options.pop("zarr_format"), dict(attributes or {})
    if version == 2 and names:
        stated["_ARRAY_DIMENSIONS"] = names
    edges = {key: (1,) * (pixels.ndim - 2) + (edge,) * 2 for key, edge in options.items()}
    array = zarr.create_array(
        path,
        shape=pixels.shape,
        dtype=pixels.dtype,
        zarr_format=version,
        dimension_names=names if version == 3 else None,
        attributes=stated,
        **edges,
    )
    array[...] = pixels
    return path


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.group")


def make(path: Path, disk: Disk = DISK) -> None:
    array = ArrayGroup.of(str(path), disk)
    assert array
    assert array.obstacle() == ""
    array.make()
    add_levels(path, disk=disk)


def chunks(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file with pixels."""
    return {
        str(file.relative_to(folder)): (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith((".z", "zarr.json"))
    }


@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v3"]))
@pytest.mark.parametrize(
    ("pixels", "names", "axes", "attributes"),
    [
        pytest.param(with_holes("float32"), None, "yx", {}, id="holes"),
        pytest.param(
            with_holes("uint16"),
            ("lat", "lon"),
            "yx",
            {"_FillValue": 7},
            id="nodata",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            noisy_image((2, 2, 75, 90), "uint8"),
            ("Time", "channel", "Y", "X"),
            "tcyx",
            {"halotile": {"scale": [2, 1, 0.5, 0.5], "units": ["second", None, *["micrometer"] * 2]}},
            id="tcyx",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            noisy_image((25, 33, 71), "uint16"),
            ("z", "y", "x"),
            "zyx",
            {},
            id="cubes",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            noisy_image((1, 18), "int16"), ("y", "x"), "yx", {}, id="small", marks=pytest.mark.thorough
        ),
    ],
)
def test_the_array_is_moved_and_levels_are_those_of_a_job(
    tmp_path: Path,
    form: str,
    pixels: NDArray[Any],
    names: tuple[str, ...] | None,
    axes: str,
    attributes: Mapping[str, Any],
) -> None:
    path = save_array(tmp_path / "a.zarr", pixels, form, names=names, attributes=attributes)
    tile = {"block": 32, "axes": "zyx"} if axes == "zyx" else {"block": 64}
    run_inline(job_of(path, tmp_path / "b.zarr", "none", shard=64 if axes == "yx" else 8, chunk=4, tile=tile))
    shutil.rmtree(tmp_path / "b.zarr.run", ignore_errors=True)
    before, stated = chunks(path), zarr.open_array(path).attrs.asdict()
    expected = stored_levels(tmp_path / "b.zarr")
    assert halotile.add_levels(path, as_group=True) == [level.shape for level in expected[1:]]
    check_equal(path, expected)
    assert chunks(path / "0") == before
    ours, others = image_of(path), image_of(tmp_path / "b.zarr")
    assert (ours["axes"], ours["datasets"]) == (others["axes"], others["datasets"])
    group = zarr.open_group(path)
    assert group.metadata.zarr_format == FORMATS[form]["zarr_format"]
    if form == "v2":
        assert ours["version"] == "0.4"
    else:
        assert group.attrs["ome"]["version"] == "0.5"
        assert {array.metadata.dimension_names for array in group.array_values()} == {tuple(axes)}
    assert zarr.open_array(path / "0").attrs.asdict() == stated
    assert sorted(os.listdir(tmp_path)) == ["a.zarr", "b.zarr"]
    assert not (path / WORK).exists()


@pytest.mark.parametrize("form", all_of(FORMATS, thorough=["v2"]))
def test_killed_at_any_moment_it_goes_on_to_the_same_files(tmp_path: Path, form: str) -> None:
    pixels = noisy_image((40, 26), "uint8")
    first, whole = save_array(tmp_path / "first.zarr", pixels, form), tmp_path / "whole.zarr"
    shutil.copytree(first, whole)
    make(whole)
    files, states = tree(whole), set()
    for last in itertools.count():
        path = tmp_path / f"{last}.zarr"
        shutil.copytree(first, path)
        before = chunks(path)
        try:
            make(path, MortalDisk(last))
        except Killed:
            (array,) = filter(is_array, (path, path / "0", hidden(path) / "0"))
            assert chunks(array).items() >= before.items()
            np.testing.assert_array_equal(zarr.open_array(array)[...], pixels)
            if array != path:  # a whole image at every moment
                np.testing.assert_array_equal(stored_levels(array.parent)[0], pixels)
            states.add(array.relative_to(tmp_path).as_posix().replace(str(last), "n", 1))
            halotile.add_levels(path, as_group=True)
            assert tree(path) == files
            assert chunks(path / "0") == before
            assert not hidden(path).exists()
            shutil.rmtree(path)
        else:
            break
    assert states == {"n.zarr", ".n.zarr.group/0", "n.zarr/0"}


def test_what_an_interrupted_command_moved_is_never_replaced(tmp_path: Path) -> None:
    path = save_array(tmp_path / "a.zarr", noisy_image(SHAPE))
    hidden(path).mkdir()
    path.rename(hidden(path) / "0")
    save_array(path, noisy_image((70, 50)))
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"has moved an array from there to .*a\.zarr\.group/0, and"):
        halotile.add_levels(path, as_group=True)
    assert tree(tmp_path) == before


def in_a_group(path: Path) -> None:
    zarr.create_group(path.parent)


def with_a_link(path: Path) -> None:
    (path / "c" / "0").rename(path.parent / "elsewhere")
    (path / "c" / "0").symlink_to("../../elsewhere")


def of_a_run(path: Path) -> None:
    run = RunDirectory.beside(path)
    run.create()
    run.write_job({})


@pytest.mark.parametrize(
    ("shape", "names", "change", "said"),
    [
        ((3, 40, 50), None, None, r"the file does not say what axis q is: .* write input\.axes: zyx"),
        ((3, 40, 50), ("q", "y", "x"), None, "the file does not say what axis q is"),
        ((40, 50, 3), None, None, "taken as yxc"),
        ((40, 50), ("row", "col"), None, "names the axes row, col: taken as yx"),
        ((40, 50), ("x", "y"), None, "its axes are xy, and those of an OME-Zarr yx"),
        ((40, 50), None, in_a_group, "it belongs to the Zarr .*folder, whose readers"),
        ((40, 50), None, with_a_link, r"a\.zarr/c/0 is a symlink"),
        ((40, 50), None, of_a_run, r"a\.zarr\.run belongs to it"),
    ],
)
def test_an_array_that_cannot_become_a_group_stays_as_it_is(
    tmp_path: Path,
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    change: Callable[[Path], None] | None,
    said: str,
) -> None:
    (tmp_path / "folder").mkdir()
    path = save_array(tmp_path / "folder" / "a.zarr", noisy_image(shape), names=names)
    if change:
        change(path)
    before = tree(tmp_path)
    for as_group in (True, False):
        with pytest.raises(ConfigError, match=rf"with --as-group: .*{said}.*(.|\n)*denoiser: {{name: none}}"):
            halotile.add_levels(path, as_group=as_group)
    assert tree(tmp_path) == before


def test_an_array_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_array(tmp_path / "a.zarr", noisy_image(SHAPE))
    for closed in (tmp_path, path):
        monkeypatch.setattr(os, "access", lambda folder, _, closed=closed: Path(folder) != closed)
        with pytest.raises(ConfigError, match="you may not write there and in"):
            halotile.add_levels(path, as_group=True)


def test_an_array_that_a_run_writes_or_has_not_finished_is_refused(tmp_path: Path) -> None:
    path = save_array(tmp_path / "a.zarr", noisy_image(SHAPE))
    of_a_run(path)
    run = RunDirectory.beside(path)
    with run.lock(), pytest.raises(OutputInUse, match="is writing this output"):
        halotile.add_levels(path, as_group=True)
    Journal.create(run.journal_path, "print", 4)
    with pytest.raises(OutputRefused, match=r"4 of the 4 blocks of its run are not done\. `recon-cli resume"):
        halotile.add_levels(path, as_group=True)
    assert is_array(path)


def test_a_symlink_leads_to_the_group_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path, link = save_array(tmp_path / "disk" / "a.zarr", noisy_image(SHAPE)), tmp_path / "link.zarr"
    link.symlink_to("disk/a.zarr")
    hidden(path).mkdir()
    path.rename(hidden(path) / "0")  # an interrupted command, of which the link is broken
    assert len(halotile.add_levels(link, as_group=True)) == 4
    assert link.is_symlink()
    assert len(stored_levels(link)) == 5
    assert sorted(os.listdir(tmp_path)) == ["disk", "link.zarr"]
    assert os.listdir(tmp_path / "disk") == ["a.zarr"]


def test_two_processes_make_one_group(tmp_path: Path) -> None:
    path = save_array(tmp_path / "a.zarr", noisy_image(SHAPE))
    slow, fast = ArrayGroup.of(str(path)), ArrayGroup.of(str(path))
    assert slow
    assert fast
    with RunDirectory(hidden(path) / WORK).lock(), pytest.raises(OutputInUse, match=r"process \d+ on "):
        fast.make()
    assert is_array(path)
    fast.make()
    before = tree(path)
    slow.make()
    assert tree(path) == before
    assert os.listdir(tmp_path) == ["a.zarr"]


class MountPoint(Disk):
    """A disk on which the array cannot be moved."""

    def _replace(self, old: Path, new: Path) -> None:
        if new.name == "0":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        super()._replace(old, new)


def test_an_array_that_the_system_does_not_move_stays(tmp_path: Path) -> None:
    path = save_array(tmp_path / "a.zarr", noisy_image(SHAPE), names=("y", "x"))
    before = tree(tmp_path)
    with pytest.raises(
        OutputRefused, match=r"cannot be moved into a group \(Invalid cross-device link\)\. A job"
    ):
        make(path, MountPoint())
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["a.zarr"]


def test_a_link_in_place_of_the_hidden_folder_is_refused(tmp_path: Path) -> None:
    path = save_array(tmp_path / "a.zarr", np.zeros((40, 40), "u2"))
    (tmp_path / "theirs").mkdir()
    hidden(path).symlink_to("theirs")
    with pytest.raises(OutputRefused, match=r"\.a\.zarr\.group, a symlink to theirs"):
        make(path)
    assert is_array(path)
    assert not list((tmp_path / "theirs").iterdir())
