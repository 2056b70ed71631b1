"""Levels that were added to an output are removed when its pixels change, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halotile.storage.disk.durable import DISK
from halotile.storage.sharded.ownership import remove_added_levels
from tests.storage.outputs import OME, written


@pytest.mark.parametrize("name", ["..", ".", "0", "../beside", "link", "/", ""])
def test_names_that_lead_elsewhere_remove_nothing_there(tmp_path: Path, name: str) -> None:
    output, beside = tmp_path / "a.zarr", tmp_path / "beside"
    written(output, OME)
    beside.mkdir()
    (beside / "kept.txt").write_text("kept")
    (output / "link").symlink_to(beside)
    before = {path: path.read_bytes() for path in (output / "0").rglob("*") if path.is_file()}
    document = json.loads((output / "zarr.json").read_text())
    document["attributes"]["ome"]["multiscales"][0]["datasets"].append({"path": name})
    (output / "zarr.json").write_text(json.dumps(document))
    assert remove_added_levels(output, OME) == 1
    assert (beside / "kept.txt").read_text() == "kept"
    assert {path: path.read_bytes() for path in before} == before
    assert f'"path": "{name}"' not in (output / "zarr.json").read_text() or name == "0"


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.txt").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    DISK.remove_tree(tmp_path / "link")
    assert (tmp_path / "kept" / "a.txt").exists()
    assert not (tmp_path / "link").is_symlink()
