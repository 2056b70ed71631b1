"""Metadata that are odd or unreadable are reported with the reason, and take no others with them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from halotile.errors import InputError, InputUnreadable
from halotile.storage.arrays import open_source
from halotile.storage.images.planes import choose_planes
from halotile.storage.images.tiff_export import write_tiff
from halotile.storage.sharded.ome_metadata import OmeImage
from halotile.storage.sharded.output import open_output
from halotile.storage.sharded.ownership import metadata_problems
from tests.cases import in_folders
from tests.storage.outputs import OME, PLAIN, written


def test_metadata_that_the_system_cannot_read_are_reported_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a.zarr", PLAIN)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for ask in (open_output, lambda root: metadata_problems(root, PLAIN)):
        with pytest.raises(InputUnreadable, match=r"zarr\.json: it cannot be read: .*Input/output error"):
            ask(tmp_path / "a.zarr")


def test_a_file_in_place_of_the_folder_of_an_array_is_no_zarr(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", OME)
    shutil.rmtree(tmp_path / "a.zarr" / "0")
    (tmp_path / "a.zarr" / "0").touch()
    with pytest.raises(InputError, match=r"0/zarr\.json is not there"):
        open_output(tmp_path / "a.zarr")


def test_more_pixels_than_any_disk_holds_are_refused(tmp_path: Path) -> None:
    for folder, shape in in_folders(tmp_path, ((2**40, 2**40), (2**62, 2**62))):
        zarr.create_array(folder / "a.zarr", shape=shape, chunks=(2**20, 2**20), dtype="f4")
        with pytest.raises(InputError, match="no disk holds so many pixels"):
            open_source(folder / "a.zarr")


def test_a_size_in_ome_xml_that_is_none_has_a_remark(tmp_path: Path) -> None:
    for value in ("0", "-1", "nan", "inf", "0,5", ""):
        sizes = {"PhysicalSizeX": 0.7, "PhysicalSizeY": 0.5}
        tifffile.imwrite(tmp_path / "a.ome.tif", np.zeros((3, 4), "u1"), metadata={"axes": "YX", **sizes})
        _edit(tmp_path / "a.ome.tif", 'PhysicalSizeX="0.7"', f'PhysicalSizeX="{value}"')
        source = open_source(tmp_path / "a.ome.tif")
        assert source.units == ("micrometer", None)
        assert any(f"{value!r} as the size along x" in remark for remark in source.remarks)


def test_damaged_ome_xml_has_a_remark(tmp_path: Path) -> None:
    for damage in ("<Pixels", "</OME>"):
        tifffile.imwrite(tmp_path / "a.ome.tif", np.zeros((3, 4), "u1"), metadata={"axes": "YX", "PhysicalSizeX": 0.7})
        _edit(tmp_path / "a.ome.tif", damage, damage.replace("<", "{"))
        source = open_source(tmp_path / "a.ome.tif")
        assert source.shape[-2:] == (3, 4)
        assert any("OME-XML is damaged" in remark for remark in source.remarks)


def _edit(path: Path, old: str, new: str) -> None:
    """Change the description of a TIFF."""
    with tifffile.TiffFile(path) as file:
        text = file.pages.first.description
    assert old in text
    tifffile.tiffcomment(path, text.replace(old, new).encode())


def test_a_name_of_any_characters_leaves_ome_xml_sound(tmp_path: Path) -> None:
    for name in ("a\0b", "a\x07b", "\ud800", "\ufffe", "R&D <x>", "α\U0001f52c"):
        np.save(tmp_path / "a.npy", np.zeros((2, 3, 4), "u1"))
        source: Any = open_source(tmp_path / "a.npy", axes="cyx")
        source.ome, source.channels = OmeImage(name=name), ({"label": name}, {"label": "two"})
        write_tiff(tmp_path / "a.tif", choose_planes(source, {}, None))
        back = open_source(tmp_path / "a.tif")
        shown = re.sub("[\0\x07\ud800\ufffe]", "\ufffd", name)
        assert [channel["label"] for channel in back.channels] == [shown, "two"]
        assert back.remarks == ()


def test_an_invalid_channel_costs_no_other_its_name(tmp_path: Path) -> None:
    window = {"start": 0, "end": 9, "min": 0, "max": 9}
    whole = {"label": "DAPI", "color": "0000FF", "window": window}
    channels = [whole, {"label": "GFP"}, {"label": 3, "color": "red", "window": {"start": 9, "end": 0}}]
    image = {"axes": ["c", "y", "x"], "datasets": [{"path": "0"}]}
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    group.create_array("0", shape=(3, 4, 5), dtype="u1")
    group.attrs.update({"multiscales": [image, image], "omero": {"channels": channels}})
    source = open_source(tmp_path / "a.zarr")
    assert source.channels == ({"label": "DAPI", "color": "0000FF", "window": (0, 9)}, {"label": "GFP"}, {})
    assert any("omero attribute is not valid" in remark for remark in source.remarks)
    assert any("2 multiscales" in remark for remark in source.remarks)
    assert not any("describes" in remark for remark in source.remarks)
    group.attrs["omero"] = {"channels": [whole]}
    remark = "its omero attribute describes 1 of 3 channels"
    assert remark in open_source(tmp_path / "a.zarr").remarks
