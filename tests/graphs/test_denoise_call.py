"""The denoiser of ``halotile.denoise`` as a mapping: an option may have the name of an argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import halotile
from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise import call
from halotile.graphs.kinds.sections import DenoiserChoice


def test_an_option_that_is_named_like_an_argument_is_given_in_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(call, "make_plan", lambda job, **_: jobs.append(job))
    monkeypatch.setattr(call, "run", lambda plan, **_: None)
    section = {"name": "dncnn", "weights": tmp_path / "w.safetensors", "depth": 9}
    halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", section, depth=12)
    (job,) = jobs
    assert job.denoiser == DenoiserChoice(
        name="dncnn", options={"weights": str(tmp_path / "w.safetensors"), "depth": 9}
    )
    assert job.tile.depth == 12
    assert section["name"] == "dncnn"


def test_a_mapping_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Write a name"):
        halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", {"depth": 9})
