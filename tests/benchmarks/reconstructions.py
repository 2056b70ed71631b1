"""Programs that reconstruct, each measured in a process of its own."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.data import CNN, image, network, weights
from tests.benchmarks.measuring import Result, chosen, fresh, seconds, started
from tests.benchmarks.stacks import kernel

EDGES = (5, 9, 13)
"""Of the kernels of three circular blurs."""
STEP = 0.3
CHUNK = 512


def measurement(folder: Path, edge: int, number: int) -> Path:
    """What one of the blurs makes of the image; blurred row by row of chunks, so that no size is too large."""
    import zarr

    from halotile.storage.grid import Region
    from halotile.tasks.operators.blur import Blur

    path = folder / f"blurred-{edge}-{number}.zarr"
    if not path.exists():
        source = zarr.open_array(image(folder, edge), mode="r")
        size = EDGES[number]
        np.save(folder / f"kernel-{number}.npy", kernel(size))
        seen = Blur(kernel=kernel(size), boundary="circular").forward(_Stored(source))
        partial = path.with_suffix(".partial")
        array = zarr.create_array(
            fresh(partial), shape=(edge, edge), dtype="float32", chunks=(CHUNK, CHUNK), compressors=None
        )
        for row in range(0, edge, CHUNK):
            array[row : row + CHUNK] = seen.read(Region((row, 0), (row + CHUNK, edge)))
        partial.rename(path)
    return path


class _Stored:
    """A Zarr array, read by regions."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)

    def read(self, region: Any) -> Any:
        return self.array[region.slices]


# --- ours -----------------------------------------------------------------------------------------


def _job(folder: Path, edge: int, denoiser: str, iterations: int, every: int = 1, **options: Any) -> Any:
    """Plug and play with three blurs, a checkpoint every so many iterations."""
    from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
    from halotile.graphs.kinds.sections import Output, Run

    operators = []
    for number in range(len(EDGES)):
        data = measurement(folder, edge, number)
        blur = {"kernel": str(folder / f"kernel-{number}.npy"), "boundary": "circular"}
        operators.append(OperatorChoice(name="blur", data=str(data), options=blur))
    prior = chosen("gaussian", sigma=0.7)
    if denoiser == "cnn":
        prior = chosen("dncnn", weights=str(weights(folder)), **CNN)
    return Reconstruction(
        output=Output(path=str(fresh(folder / f"ours-{denoiser}.zarr")), format="zarr", codec="none"),
        operators=tuple(operators),
        prior=PriorChoice(name="pnp", options={"denoiser": prior}),
        solver=SolverChoice(iterations=iterations, step=STEP, checkpoint_every=every),
        run=Run(workers=2),
        **options,
    )


def _run(job: Any) -> tuple[Any, Any]:
    """The plan, and what came of it."""
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.driver import run as reconstruct

    with started(2) as cluster:
        plan = make_plan(job)
        return plan, reconstruct(plan, cluster=cluster)


WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "exact": ("cnn", 4, {"exact": True, "fuse": True}),  # the operators one by one, direct sums, one pass
    "normal": ("cnn", 4, {"fuse": True}),  # all operators in one kernel, one pass
    "gaussian": ("gaussian", 6, {"fuse": True}),
    "gaussian_pairs": ("gaussian", 12, {"every": 2, "fuse": True}),  # two iterations in each pass, the second is stored
    "gaussian_fused": ("gaussian", 6, {"exact": True, "fuse": True}),
    "gaussian_unfused": ("gaussian", 6, {"exact": True, "fuse": False}),  # two passes
    "twice": ("cnn", 2, {"fuse": True, "block": 1024}),  # the second reads an image: memory must not grow
}
"""Denoiser, iterations and options of a job."""


def ours(folder: Path, edge: int, way: str) -> Result:
    """A job; seconds are those of an iteration of the middle pass, the first one left out."""
    from halotile.graphs.kinds.sections import Tile

    denoiser, iterations, options = WAYS[way]
    given = {name: value for name, value in options.items() if name != "block"}
    if "block" in options:
        given["tile"] = Tile(block=options["block"])
    plan, outcome = _run(_job(folder, edge, denoiser, iterations, **given))
    rows = [json.loads(line) for line in (plan.run_directory / "iterations.jsonl").read_text().splitlines()]
    spent = [row["seconds"] * len(rows) / iterations for row in rows]
    status = json.loads((plan.run_directory / "status.json").read_text())
    moved = status["read_bytes"] + status["written_bytes"] - 2 * 4 * edge**2  # the output is one more copy
    return {
        "seconds": statistics.median(spent[1:] or spent),
        "peak_bytes": outcome.peak_memory_bytes,
        "iteration_bytes": moved / iterations,
    }


# --- by hand --------------------------------------------------------------------------------------


def by_hand(folder: Path, edge: int, last: str = "") -> Result:
    """The loop as one writes it with deepinv's operators and torch, everything in memory, two threads; channels last suits the CPU better."""
    import torch
    import zarr

    from tests.benchmarks.stacks import blurs

    torch.set_num_threads(2)
    layout = torch.channels_last if last else torch.contiguous_format
    model, stack = network(folder).to(memory_format=layout), blurs(EDGES)
    paths = [measurement(folder, edge, number) for number in range(len(EDGES))]
    seen = [torch.from_numpy(zarr.open_array(path, mode="r")[...])[None, None] for path in paths]
    x = torch.zeros_like(seen[0])

    def iterate() -> None:
        nonlocal x
        gradient = torch.zeros_like(x)
        for operator, y in zip(stack, seen, strict=True):
            gradient += operator.A_adjoint(operator.A(x) - y)
        x = model((x - STEP * gradient).contiguous(memory_format=layout))

    with torch.inference_mode():
        iterate()
        return {"seconds": statistics.median(seconds(iterate) for _ in range(2))}
