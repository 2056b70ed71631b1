"""Maps of the error of a denoiser: as large as the error, the same bits for any blocks, workers and kills, and bad input in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import zarr
from numpy.typing import NDArray

import halotile
from halotile.errors import ConfigError, HalotileError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.jobs.samples.job import FieldPrior, MapOutput, PosteriorOptions, Sampling
from halotile.graphs.kinds.base import OutputArray
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Input, Run, Tile
from halotile.graphs.plans.make import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.sharded.output import create_output
from halotile.tasks.block import BlockRunner
from halotile.tasks.devices.device import torch_threads
from tests.faults import REPOSITORY, until
from tests.graphs.test_samples import journalled, same
from tests.support import read_zarr, work_of

Pixels = NDArray[Any]
SIGMA = 20.0
IMAGES: dict[str, Callable[[], Pixels]] = {
    "camera": lambda: skimage.data.camera()[100:292, 150:342],
    "coins": lambda: skimage.data.coins()[50:242, 50:242],
    "moon": lambda: skimage.data.moon()[150:342, 150:342],
}


def noisy(folder: Path, name: str, n: int = 192) -> Pixels:
    """Write an image with noise; return the truth."""
    truth: Pixels = IMAGES[name]()[:n, :n].astype(float)
    noise = SIGMA * np.random.default_rng(1).standard_normal(truth.shape)
    np.save(folder / "y.npy", (truth + noise).astype("float32"))
    return truth


def job_in(folder: Path, name: str = "mean", block: int = 96, **changes: Any) -> Sampling:
    parts: dict[str, Any] = {
        "input": Input(path=str(folder / "y.npy")),
        "denoiser": DenoiserChoice(name="tv", options={"strength": 1.0, "sigma": SIGMA}),
        "output": MapOutput(path=str(folder / f"{name}.zarr"), std=str(folder / f"{name}-std.zarr"), shard=32, chunk=32),
        "posterior": PosteriorOptions(count=3),
        "tile": Tile(block=block),
        "run": Run(workers=1, memory_per_worker="3GiB"),
        "cluster": Cluster(dashboard=False),
    }
    return Sampling(**parts | changes)


def computed(job: Sampling | Denoising) -> tuple[Pixels, ...]:
    """Every image of a job, in this process."""
    plan = make_plan(job)
    for output in plan.outputs:
        assert isinstance(output, OutputArray)
        create_output(output.path, output.layout, overwrite=True)
    (wanted,) = work_of(plan).run(None)
    with torch_threads():
        receipt = BlockRunner(wanted.task).run(range(len(wanted.grid)))
    assert not receipt.bad, receipt.bad[0].traceback
    return tuple(read_zarr(output.path) for output in plan.outputs)


def denoised(job: Sampling) -> Pixels:
    """The image of the denoising job of these sections."""
    output = replace(Denoising.__annotations__ and job.output)
    return computed(
        Denoising(
            input=job.input,  # type: ignore[arg-type]
            output=halotile.graphs.kinds.sections.Output(path=output.path + "2", shard=32, chunk=32),
            denoiser=job.denoiser,
            noise=job.noise,
            run=job.run,
            cluster=job.cluster,
        )
    )[0]


@pytest.mark.parametrize("name", IMAGES)
def test_two_standard_deviations_hold_as_many_pixels_as_they_should(tmp_path: Path, name: str) -> None:
    truth = noisy(tmp_path, name)
    mean, std = computed(job_in(tmp_path, posterior=PosteriorOptions(count=16)))
    assert 0.93 <= np.mean(np.abs(mean - truth) <= 2 * std) <= 0.97
