"""Seconds that commands take as whole processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.data import image
from tests.benchmarks.measuring import fresh
from tests.support import dncnn_weights

REPOSITORY = Path(__file__).parents[2]


def start_up(*arguments: str) -> Callable[[Path], float]:
    """Seconds that a recon-cli command takes as a whole process."""

    def measure(folder: Path) -> float:
        job = folder / "job.yaml"
        job.write_text(
            f"version: 1\njob: denoise\ninput: {{path: {folder}}}\noutput: {{path: {folder / 'no.zarr'}}}\n"
            "denoiser: {name: tv, strength: 0.1}\n"
        )
        command = [str(Path(sys.executable).with_name("recon-cli")), *(a.replace("JOB", str(job)) for a in arguments)]
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        return time.perf_counter() - began

    return measure


def beyond_torch(measure: Callable[[Path], float]) -> Callable[[Path], float]:
    """Seconds that a command takes longer than a process that imports torch, just before it."""

    def measured(folder: Path) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        importing = time.perf_counter() - began
        return measure(folder) - importing

    return measured


def gaussian_run(folder: Path) -> float:
    """Seconds of `recon-cli run` with a gaussian on 2048², as a whole process."""
    return filter_run(folder, image(folder, 2048), "gaussian, sigma: 1.5")


def filter_run(folder: Path, source: Path, denoiser: str) -> float:
    """Seconds of `recon-cli run` with two workers, as a whole process."""
    job = folder / "filter.yaml"
    job.write_text(
        f"version: 1\njob: denoise\ninput: {{path: {source}}}\noutput: {{path: {fresh(folder / 'filtered.zarr')}}}\n"
        f"denoiser: {{name: {denoiser}}}\nrun: {{workers: 2}}\n"
    )
    began = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("recon-cli"), "run", job, "--quiet"], check=True)
    return time.perf_counter() - began


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
    job = folder / "network.yaml"
    job.write_text(
        f"version: 1\njob: denoise\ninput: {{path: {image(folder, 1024)}}}\noutput: {{path: {folder / 'no.zarr'}}}\n"
        f"denoiser: {denoiser}\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(times):
            began = time.perf_counter()
            subprocess.run(
                [Path(sys.executable).with_name("recon-cli"), "plan", job, "--allow-import"],
                stdout=subprocess.DEVNULL,  # not a pipe, which would end with the process that trials were forked from
                check=True,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": cache},
            )
            seconds = time.perf_counter() - began
    return seconds
