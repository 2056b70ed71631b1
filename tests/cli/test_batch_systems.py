"""Runs as batch jobs of systems that are not here, whose commands are replaced."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halotile.cli import batch, exits
from halotile.cli.main import app
from tests.hpc import HpcJob

SLEEPY = '''
import time
from pathlib import Path


def sleepy(pixels, folder):
    """The same pixels, after a while."""
    with open(Path(folder) / "log", "a") as log:
        log.write("called\\n")
    time.sleep(60)
    return pixels
'''


@pytest.mark.parametrize("pattern", ["in.zarr", "*n.zarr"])
def test_a_function_is_tried_for_a_few_seconds_alone_where_it_is_submitted(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = HpcJob.create(tmp_path, walltime="60", kind="slurm")
    (tmp_path / "noting.py").write_text(SLEEPY.replace("sleepy", "noted"))
    job.config.write_text(
        job.config.read_text().replace("in.zarr", pattern).replace("out.zarr", "{stem}-clean.zarr")
    )
    monkeypatch.setattr(batch, "TRIAL_SECONDS", 0.5)
    began = time.monotonic()
    result = CliRunner().invoke(
        app, ["submit", str(job.config), "--allow-import", "--dry-run", "--json", "--set", "run.workers=3"]
    )
    assert result.exit_code == exits.OK, result.output
    assert time.monotonic() - began < 50
    assert len(job.log()) == 1
    shown = json.loads(result.stdout)
    assert shown["plan"]["notes"] == [
        "trying noting:noted takes too long here (0.5 s are allowed): the batch job plans the run"
    ]
    assert "#SBATCH --ntasks=3\n" in shown["script"]
