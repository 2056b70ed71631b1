"""What a bar is on, and how a figure is measured."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT
from tests.benchmarks.data import image
from tests.benchmarks.measuring import PROGRAM, fresh, printed, seconds


@dataclass(frozen=True)
class Ratio:
    """One bar, if any: a program of ours over a peer's, by a figure that both give; with decibels the peer's less ours."""

    case: str
    title: str
    ours: str
    peer: str
    edge: int
    bar: float | None
    repeats: int = 3
    figure: str = "seconds"


@dataclass(frozen=True)
class Figure:
    """One bar on a figure of one program."""

    case: str
    title: str
    measure: Callable[[Path], float]
    unit: str
    bar: float
    repeats: int = 3


LIMIT_SECONDS = 1800
REPOSITORY = Path(__file__).parents[2]


def program(name: str, folder: Path, edge: int, *more: str) -> dict[str, float]:
    """One run of one program, ``MODULE.FUNCTION [ARGUMENT ...]`` of this folder, in a process of its own."""
    call, *arguments = name.split()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment |= ALLOCATOR_ENVIRONMENT if name.startswith(("filters.", "samples.", "transforms.")) else {}
    command = [*PROGRAM, call, str(folder), str(edge), *arguments, *more]
    result: dict[str, float] = json.loads(printed(name, command, LIMIT_SECONDS, env=environment))
    return result


def shared_run(name: str, edge: int) -> Callable[[Path], dict[str, float]]:
    """The next run of a program, of which each run serves all figures that are read from it."""
    runs = _shared_runs.setdefault((name, edge), [])
    requested = itertools.count()

    def run(folder: Path) -> dict[str, float]:
        number = next(requested)
        while len(runs) <= number:
            runs.append(program(name, folder, edge))
        return runs[number]

    return run


_shared_runs: dict[tuple[str, int], list[dict[str, float]]] = {}


def memory_growth(name: str) -> Callable[[Path], float]:
    """MB that the peak of a program grows by when the image has 16 times the pixels."""

    def measure(folder: Path) -> float:
        small, large = (program(name, folder, edge)["peak_bytes"] for edge in (4096, 16384))
        return (large - small) / 1e6

    return measure


def streamed_growth(whose: str) -> Callable[[Path], float]:
    """MB that the peak of a ptychography job grows by when there are 8 times as many patterns: of its ``largest`` process, or ``total``."""
    runs = [shared_run("ptychography.ours_streamed", size) for size in (2, 16)]

    def measure(folder: Path) -> float:
        small, large = (run(folder)[f"{whose}_bytes"] for run in runs)
        return (large - small) / 1e6

    return measure


def checks(folder: Path) -> float:
    """Per cent of a copy's time that its own checks take."""
    return program("denoising.share", folder, 16384)["percent"]


def noop(blocks: int, figure: str) -> Callable[[Path], float]:
    """A figure of a run of blocks that do nothing."""
    run = shared_run("denoising.ours_noop", blocks)
    return lambda folder: run(folder)[figure]


# --- commands as whole processes --------------------------------------------------------------------

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
    from tests.support import dncnn_weights

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
