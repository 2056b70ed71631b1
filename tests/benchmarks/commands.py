"""Seconds that commands take as whole processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.benchmarks.data import image
from tests.benchmarks.measuring import fresh, seconds
from tests.support import dncnn_weights

REPOSITORY = Path(__file__).parents[2]
RECON_CLI = str(Path(sys.executable).with_name("recon-cli"))


def job_file(path: Path, source: Path, output: Path, denoiser: str, run: str = "") -> Path:
    """A denoising job."""
    path.write_text(
        f"version: 1\njob: denoise\ninput: {{path: {source}}}\noutput: {{path: {output}}}\ndenoiser: {denoiser}\n{run}"
    )
    return path


def start_up(*arguments: str) -> Callable[[Path], float]:
    """Seconds that a recon-cli command takes as a whole process."""

    def measure(folder: Path) -> float:
        job = job_file(folder / "job.yaml", folder, folder / "no.zarr", "{name: tv, strength: 0.1}")
        command = [RECON_CLI, *(a.replace("JOB", str(job)) for a in arguments)]
        return seconds(lambda: subprocess.run(command, capture_output=True, check=True))

    return measure


def beyond_torch(measure: Callable[[Path], float]) -> Callable[[Path], float]:
    """Seconds that a command takes longer than a process that imports torch, just before it."""

    def measured(folder: Path) -> float:
        importing = seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
        return measure(folder) - importing

    return measured


def gaussian_run(folder: Path) -> float:
    """Seconds of `recon-cli run` with a gaussian on 2048², as a whole process."""
    return filter_run(folder, image(folder, 2048), "gaussian, sigma: 1.5")


def filter_run(folder: Path, source: Path, denoiser: str) -> float:
    """Seconds of `recon-cli run` with two workers, as a whole process."""
    output = fresh(folder / "filtered.zarr")
    job = job_file(folder / "filter.yaml", source, output, f"{{name: {denoiser}}}", "run: {workers: 2}\n")
    return seconds(lambda: subprocess.run([RECON_CLI, "run", job, "--quiet"], check=True))


def planned(build: str, *, again: bool = False, **options: int) -> Callable[[Path], float]:
    """Seconds that `recon-cli plan` takes with a network that it has not seen yet, or for a second time."""

    denoiser = f"{{name: torch, import: '{build}', options: {json.dumps(options)}}}"
    return lambda folder: _seconds_of_plan(folder, denoiser, 1 + again)


def trained_network_planned_again(folder: Path) -> float:
    """Seconds that `recon-cli plan` takes for a second time with a network of halotile, 5 layers of 8 channels."""
    path = dncnn_weights(folder / "trained.safetensors")
    return _seconds_of_plan(folder, f"{{name: dncnn, weights: {path}, depth: 5, width: 8}}", 2)


def _seconds_of_plan(folder: Path, denoiser: str, times: int) -> float:
    """Seconds of the last of some plans, of which the first one finds an empty cache."""
    job = job_file(folder / "network.yaml", image(folder, 1024), folder / "no.zarr", denoiser)
    command = [RECON_CLI, "plan", job, "--allow-import"]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": cache}
        # Not to a pipe, which would end with the process that trials were forked from.
        run = partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True, env=environment)
        return [seconds(run) for _ in range(times)][-1]
