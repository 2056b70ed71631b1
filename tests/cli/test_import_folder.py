"""Imports start from the folder of the job file, and only where the command line allows imports."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_job, load_saved_job
from halotile.errors import ConfigError
from tests.support import load_denoising


def saved_of(config: Path, folder: Path) -> Path:
    """What a run directory keeps of a job whose file lies in another folder."""
    job = load_denoising(config)
    parts = {name: asdict(getattr(job, name)) for name in ("input", "output", "tile", "run", "cluster")}
    denoiser = {"name": job.denoiser.name, **job.denoiser.options}
    tree = {"version": 1, "job": "denoise", **parts, "denoiser": denoiser, "allow_import": True}
    path = config.parent / "job.json"
    path.write_text(json.dumps(tree | {"import_folder": str(folder)}))
    return path


def test_it_is_the_folder_of_the_job_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    assert load_job(Path(config.name), flags=Flags(allow_import=True)).import_folder == str(config.parent)
    assert load_job(config).import_folder is None


def test_a_saved_job_keeps_it(config: Path, tmp_path: Path) -> None:
    saved = saved_of(config, tmp_path / "elsewhere")
    assert load_saved_job(saved, flags=Flags(allow_import=True)).import_folder == str(tmp_path / "elsewhere")
    assert load_saved_job(saved).import_folder is None


def test_a_job_file_cannot_name_it(config: Path) -> None:
    config.write_text(config.read_text() + "import_folder: /tmp\n")
    with pytest.raises(ConfigError, match="import_folder"):
        load_job(config, flags=Flags(allow_import=True))
