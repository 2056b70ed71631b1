"""What a bar is on, and how a figure is measured."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halotile.graphs.clusters.workers.settings import ALLOCATOR_ENVIRONMENT
from tests.benchmarks.measuring import PROGRAM, printed


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


def program(name: str, folder: Path, edge: int, *more: str) -> dict[str, float]:
    """One run of one program, ``MODULE.FUNCTION [ARGUMENT ...]`` of this folder, in a process of its own."""
    call, *arguments = name.split()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
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
