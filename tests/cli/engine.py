"""What stands in for the engine where the words of commands are tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from halotile.cli.main import app
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import kind_of
from halotile.graphs.runs.driver import Outcome
from halotile.graphs.watching.progress import Progress
from halotile.storage.grid import Region
from halotile.tasks.block import BadBlock

RUNNER = CliRunner()
MonkeyPatch = pytest.MonkeyPatch
SMALL_CONFIG = """\
version: 1
job: denoise
input: {path: noisy.npy}
output: {path: clean.zarr, shard: 32, chunk: 16}
denoiser: {name: gaussian, sigma: 1}
tile: {size: 32, block: 32}
run: {workers: 1}
"""


def ask(*words: object) -> Result:
    """The end of a command."""
    return RUNNER.invoke(app, [str(word) for word in words])


def sets(*settings: str) -> list[str]:
    """Words that set values."""
    return [word for each in settings for word in ("--set", each)]


def printed(*words: object) -> str:
    """The results that a command shows which ends well."""
    ended = ask(*words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def refused(*words: object, code: int = 2) -> str:
    """The message of a command that ends with a code."""
    ended = ask(*words)
    assert ended.exit_code == code, ended.output
    return ended.stderr


def check_lie(config: Path, was: str, lie: str, line: int, words: str) -> None:
    """Assert that what is written in the place of something else is told with its line, and nothing else is."""
    text = config.read_text()
    assert text.count(was) == 1
    config.write_text(text.replace(was, lie))
    result = refused("validate", config)
    assert result.startswith(f"error: {config}:{line}: ")
    assert words in result
    assert len(result.splitlines()) == 1


FIGURES = {
    "input": "noisy.zarr", "output": "clean.zarr", "shape": [70000, 70000], "axes": "yx", "dtype": "uint16",
    "output_shape": [70000, 70000], "output_dtype": "uint16", "pixel_size": "not known", "denoiser": "tv", "blocks": 400, "block": [4096, 4096],
    "shard": [1024, 1024], "chunk": [256, 256], "format": "zarr", "levels": [[70000, 70000]], "tile": [512, 512], "batch": 1, "depth": [[8, 8], [8, 8]],
    "depth_from": "declared by tv", "boundary": "reflect", "read_amplification": 1.0078, "compute_redundancy": 1.0635,
    "peak_memory_per_worker_bytes": 3 * 2**28, "memory_per_worker_bytes": 2**32, "output_bytes": 9_800_000_000,
    "scratch_bytes": 0, "free_disk_bytes": 10**11, "workers": 2, "fingerprint": "ab", "notes": ["a note"],
    "device": "cpu", "precision": "float32", "device_memory_bytes": None, "tuned": None,
}  # fmt: skip


BAD = BadBlock(7, (1, 2), Region((0, 512), (512, 1024)), "not finite", "", "task")
ENDING = Outcome(
    phase="stop", done=400, resumed=100, total=400, pixels_done=4_896_000_000, pixels_total=4_900_000_000, seconds=90.0,
    start_seconds=5.0, compute_seconds=80.0, peak_memory_bytes=2**29, output="/data/clean.zarr", run_directory="/data/clean.zarr.run",
)  # fmt: skip


@dataclass
class Engine:
    """Stands in for halotile.graphs, which would load Dask: remembers what was asked, ends as told."""

    ends: Outcome | BaseException = ENDING
    refuses: BaseException | None = None
    plans: list[Any] = field(default_factory=list)
    stands: int | BaseException = 0
    """Blocks that an earlier run has done, or why a run would be refused."""

    def make_plan(self, job: Denoising, *, refuse: bool = True, **words: Any) -> Any:
        given: dict[str, Any] = {"kind": kind_of(job), "run": job.run, "cluster": job.cluster}
        plan = Mock(job=job, run_directory=Path(f"{job.place}.run"), **words, **given)
        plan.summary.return_value, plan.check_fits.side_effect = FIGURES, self.refuses
        self.plans.append(plan)
        if refuse:
            plan.check_fits()
        return plan

    def count_done(self, plan: Any) -> int:
        if isinstance(self.stands, BaseException):
            raise self.stands
        return self.stands

    check_outputs = count_done

    def run(self, plan: Any, *, observer: Callable[[Progress], None]) -> Outcome:
        observer(Progress("start", done=100, resumed=100, total=400, pixels_done=0, pixels_total=1, seconds=0.0))
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends


def save_job(config: Path, output: Path) -> Path:
    directory = output.with_name(output.name + ".run")
    directory.mkdir()
    sections = {"input": {"path": str(config.with_name("noisy.npy"))}, "output": {"path": str(output)}}
    job = {"version": 1, "job": "denoise"} | sections | {"denoiser": {"name": "tv", "strength": 0.2}}
    (directory / "job.json").write_text(json.dumps(job))
    return directory
