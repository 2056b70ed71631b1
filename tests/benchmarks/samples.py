"""Posterior samples of a blurred image, by blocks: time, memory and bytes against one mean and a denoising job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.bars import Figure, Ratio, shared_run
from tests.benchmarks.data import image
from tests.benchmarks.measuring import Result, fresh, started

EDGE, DRAWS = 1024, 16
BLOCK, SIGMA = 512, 0.1


def _run(job: Any) -> Result:
    """Seconds, peak and bytes of a job of two workers."""
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.driver import run

    with started(2) as cluster:
        plan = make_plan(job)
        outcome = run(plan, cluster=cluster)
    status = json.loads((plan.run_directory / "status.json").read_text())
    moved = {name: status[name] for name in ("read_bytes", "written_bytes")}
    return {"seconds": outcome.seconds, "peak_bytes": outcome.peak_memory_bytes, **moved}


def ours(folder: Path, edge: int, count: str) -> Result:
    """Mean, and deviation where there are draws, of the image behind a blurred one."""
    from halotile.graphs.jobs.samples.job import FieldPrior, MapOutput, MeasuredOperator, PosteriorOptions, Sampling
    from halotile.graphs.kinds.sections import Run, Tile
    from tests.benchmarks.reconstructions import measurement

    data, draws = measurement(folder, edge, 0), int(count)
    blur = {"kernel": str(folder / "kernel-0.npy"), "boundary": "reflect"}
    std = str(fresh(folder / "std.zarr")) if draws else None
    result = _run(
        Sampling(
            operators=(MeasuredOperator(name="blur", data=str(data), noise_sigma=SIGMA, options=blur),),
            prior=FieldPrior(options={"std": 0.3, "range": 16.0, "mean": 0.5}),
            posterior=PosteriorOptions(method="blocks", count=draws, halo=32),
            output=MapOutput(path=str(fresh(folder / "mean.zarr")), std=std, shard=BLOCK, codec="none"),
            tile=Tile(block=BLOCK),
            run=Run(workers=2),
        )
    )
    return result | {
        "read_ratio": result["read_bytes"] / (4 * edge**2),
        "written_ratio": result["written_bytes"] / (4 * edge**2 * (2 if draws else 1)),
    }


def seventeen_means(folder: Path, edge: int) -> Result:
    """The time of 17 means, one after the other."""
    result = ours(folder, edge, "0")
    return result | {"seconds": (DRAWS + 1) * result["seconds"]}


def denoising(folder: Path, edge: int) -> Result:
    """TV in blocks of the same size."""
    from halotile.graphs.jobs.denoise.job import Denoising
    from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run, Tile

    return _run(
        Denoising(
            input=Input(path=str(image(folder, edge))),
            output=Output(path=str(fresh(folder / "tv.zarr")), format="zarr", shard=BLOCK, codec="none"),
            denoiser=DenoiserChoice(name="tv", options={"strength": 1.0, "sigma": SIGMA}),
            tile=Tile(block=BLOCK),
            run=Run(workers=2),
        )
    )


def _ratio(name: str) -> Any:
    draws = shared_run(f"samples.ours {DRAWS}", EDGE)
    return lambda folder: draws(folder)[name]


_TITLE = f"mean and deviation from {DRAWS} draws, {EDGE}², two workers, by blocks of {BLOCK}²"
SAMPLES_RATIOS = [
    Ratio("samples", f"{_TITLE} / 17 means", f"samples.ours {DRAWS}", "samples.seventeen_means", EDGE, 1.1),
    Ratio(
        "samples",
        "the same / tv in such blocks: peak of one worker",
        f"samples.ours {DRAWS}",
        "samples.denoising",
        EDGE,
        1.15,
        figure="peak_bytes",
    ),
]
SAMPLES_FIGURES = [
    Figure("samples", "the same: bytes read / bytes of the measurement", _ratio("read_ratio"), "", 1.3),
    Figure("samples", "the same: bytes written / bytes of both maps", _ratio("written_ratio"), "", 1.1),
]
