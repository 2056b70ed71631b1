"""Small jobs of kind ``train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.train.job import NetworkChoice, Training, WeightsFile
from halotile.graphs.jobs.train.plan import TrainWork
from halotile.graphs.kinds.sections import Input, Run
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import Outcome, run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.training.patches import Recipe
from tests.support import work_of, write_zarr

NETWORK = NetworkChoice(name="unet", options={"width": 4, "levels": 1})


def write_images(folder: Path) -> Path:
    """Write two noisy images of the same waves, and the waves."""
    y, x = np.mgrid[:192, :160]
    clean = (0.5 + 0.3 * np.sin(y / 9) * np.cos(x / 7)).astype(np.float32)
    rng = np.random.default_rng(0)
    for name in ("noisy", "second"):
        noise = 0.2 * rng.standard_normal(clean.shape).astype(np.float32)
        write_zarr(folder / f"{name}.zarr", clean + noise)
    write_zarr(folder / "clean.zarr", clean)
    return folder


def training(images: Path, folder: Path, **options: Any) -> Training:
    """A small training."""
    usual: dict[str, Any] = {
        "input": Input(path=str(images / "noisy.zarr")),
        "output": WeightsFile(path=str(folder / "net.safetensors")),
        "network": NETWORK,
        "steps": 12,
        "patch": 16,
        "batch": 8,
        "run": Run(workers=2, memory_per_worker="3GiB"),
    }
    return Training(**(usual | options))


def train(job: Training, cluster: RunningCluster | None = None, **options: Any) -> tuple[Outcome, bytes]:
    """Run a training; return its end and the weights."""
    outcome = run(make_plan(job, **options), cluster=cluster)
    return outcome, Path(job.output.path).read_bytes()


def curve_of(job: Training) -> list[dict[str, float]]:
    """The rows of the curve without their times."""
    lines = RunDirectory.beside(job.output.path).iterations_path.read_text().splitlines()
    return [{name: n for name, n in json.loads(line).items() if name != "seconds"} for line in lines]


def recipe_of(job: Training) -> Recipe:
    work = work_of(make_plan(job))
    assert isinstance(work, TrainWork)
    return work.recipe
