"""`resume` finds the run that is meant, or says why there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halotile.storage.run_directory.directory import RunDirectory
from tests.cli.engine import Engine, ask, refused, save_job


@pytest.mark.parametrize("named_by", ["directory", "output"])
def test_resume_goes_on_from_the_run_directory(config: Path, engine: Engine, named_by: str) -> None:
    output = config.with_name("clean.zarr")
    directory = save_job(config, output)
    words = ["resume", str(directory if named_by == "directory" else output), "--workers", "3"]
    assert ask(*words).exit_code == 0
    (plan,) = engine.plans
    assert (plan.fresh, plan.job.run.workers, plan.job.denoiser.options) == (False, 3, {"strength": 0.2})


def test_a_run_directory_that_was_moved_alone_is_not_resumed(config: Path, engine: Engine) -> None:
    directory = save_job(config, config.with_name("clean.zarr"))
    for name in ("copy.run", "copy"):
        directory = directory.rename(directory.with_name(name))
        assert "it was moved or copied. Move both back" in refused("resume", directory)
    assert not engine.plans


@pytest.mark.parametrize("relative", [False, True])
def test_a_run_that_was_moved_goes_on(
    config: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    moved = config.with_name("moved.zarr")
    moved.mkdir()
    monkeypatch.chdir(config.parent)
    for _ in range(2):
        assert ask("resume", directory.name if relative else str(directory)).exit_code == 0
    assert [plan.job.output.path for plan in engine.plans] == [str(moved)] * 2
    saved = json.loads((directory / "job.json").read_text())
    assert (saved["output"]["path"], saved["denoiser"]["strength"]) == (str(moved), 0.2)


@pytest.mark.parametrize("left", ["clean.zarr", "clean.zarr.run"])
def test_a_run_that_may_be_a_copy_is_not_resumed(config: Path, engine: Engine, left: str) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    before = (directory / "job.json").read_text()
    for name in ("moved.zarr", left):
        config.with_name(name).mkdir()
    assert "it was moved or copied, and something still stands at the old place" in refused("resume", directory)
    assert (directory / "job.json").read_text() == before
    assert not engine.plans


def test_a_run_that_was_moved_while_it_works_is_left_alone(config: Path, engine: Engine) -> None:
    directory = save_job(config, config.with_name("clean.zarr")).rename(config.with_name("moved.zarr.run"))
    config.with_name("moved.zarr").mkdir()
    before = (directory / "job.json").read_text()
    with RunDirectory(directory).lock():
        result = ask("resume", directory)
    assert (result.exit_code, "in use" in result.stderr) == (2, True)
    assert (directory / "job.json").read_text() == before
