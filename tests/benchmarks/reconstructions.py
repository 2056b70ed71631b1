"""Programs that reconstruct, each measured in a process of its own: ``python reconstructions.py NAME FOLDER EDGE``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from tests.benchmarks.data import CNN, image, network, weights
from tests.benchmarks.measuring import Result, fresh, main, warm
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
    from halotile.graphs.kinds.sections import DenoiserChoice, Output, Run

    operators = []
    for number in range(len(EDGES)):
        data = measurement(folder, edge, number)
        blur = {"kernel": str(folder / f"kernel-{number}.npy"), "boundary": "circular"}
        operators.append(OperatorChoice(name="blur", data=str(data), options=blur))
    choices = {
        "cnn": lambda: DenoiserChoice(name="dncnn", options={"weights": str(weights(folder)), **CNN}),
        "gaussian": lambda: DenoiserChoice(name="gaussian", options={"sigma": 0.7}),
    }
    return Reconstruction(
        output=Output(path=str(fresh(folder / f"ours-{denoiser}.zarr")), format="zarr", codec="none"),
        operators=tuple(operators),
        prior=PriorChoice(name="pnp", options={"denoiser": choices[denoiser]()}),
        solver=SolverChoice(iterations=iterations, step=STEP, checkpoint_every=every),
        run=Run(workers=2),
        **options,
    )


def _run(job: Any) -> tuple[Any, Any]:
    """The plan, and what came of it."""
    from halotile.graphs.clusters import local
    from halotile.graphs.clusters.base import Order
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.driver import run as reconstruct

    with local.start(Order(workers=2, memory_bytes=8 * 2**30)) as cluster:
        warm(cluster.client)
        plan = make_plan(job)
        return plan, reconstruct(plan, cluster=cluster)


def _ours(folder: Path, edge: int, denoiser: str, iterations: int = 4, **options: Any) -> Result:
    """A job; seconds are those of an iteration of the middle pass, the first one left out."""
    plan, outcome = _run(_job(folder, edge, denoiser, iterations, **options))
    rows = [json.loads(line) for line in (plan.run_directory / "iterations.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] * len(rows) / iterations for row in rows]
    status = json.loads((plan.run_directory / "status.json").read_text())
    image_bytes = 4 * edge**2
    moved = status["read_bytes"] + status["written_bytes"] - 2 * image_bytes  # the output is one more copy
    return {
        "seconds": statistics.median(seconds[1:] or seconds),
        "peak_bytes": outcome.peak_memory_bytes,
        "iteration_bytes": moved / iterations,
    }


def ours_exact(folder: Path, edge: int) -> Result:
    """The network as prior, the operators one by one, direct sums, one pass."""
    return _ours(folder, edge, "cnn", exact=True, fuse=True)


def ours_normal(folder: Path, edge: int) -> Result:
    """The network as prior, all operators in one kernel, one pass."""
    return _ours(folder, edge, "cnn", fuse=True)


def ours_gaussian(folder: Path, edge: int) -> Result:
    """A gaussian as prior, all operators in one kernel, one pass."""
    return _ours(folder, edge, "gaussian", 6, fuse=True)


def ours_gaussian_pairs(folder: Path, edge: int) -> Result:
    """The same, two iterations in each pass, of which the second is stored."""
    return _ours(folder, edge, "gaussian", 12, every=2, fuse=True)


def ours_gaussian_fused(folder: Path, edge: int) -> Result:
    """A gaussian as prior, the operators one by one, direct sums, one pass."""
    return _ours(folder, edge, "gaussian", 6, exact=True, fuse=True)


def ours_gaussian_unfused(folder: Path, edge: int) -> Result:
    """A gaussian as prior, the operators one by one, direct sums, two passes."""
    return _ours(folder, edge, "gaussian", 6, exact=True, fuse=False)


def ours_twice(folder: Path, edge: int) -> Result:
    """Two iterations with the network, of which the second reads an image, in super-blocks of one size: memory must not grow."""
    from halotile.graphs.kinds.sections import Tile

    return _ours(folder, edge, "cnn", 2, fuse=True, tile=Tile(block=1024))


def same_bits(folder: Path, edge: int) -> Result:
    """Pixels that differ between one pass, two passes, and the same two iterations on whole images in memory."""
    import zarr

    from halotile.graphs.kinds.sections import Tile
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.solvers.base import State
    from halotile.tasks.devices.device import torch_threads
    from halotile.tasks.operators.base import InMemory, read_all
    from tests.support import work_of

    images = []
    for fuse in (True, False):
        job = _job(folder, edge, "cnn", 2, exact=True, fuse=fuse, tile=Tile(size=200 if fuse else 512))
        plan, _ = _run(job)
        images.append(zarr.open_array(plan.output, mode="r")[...])
    whole = make_plan(
        _job(folder, edge, "cnn", 2, exact=True, fuse=True, tile=Tile(size=edge, block=edge)), refuse=False
    )
    work = work_of(whole)
    problem = work.problem(STEP)
    x: Any = work.start
    with torch_threads():
        for _ in range(2):
            at = x
            step = work.solver.step(problem, State(), lambda name, age: at)  # noqa: B023 - called at once
            x = InMemory(read_all(step.images["x"]))
    images.append(x.pixels)
    differing = sum(int((images[0] != other).sum()) for other in images[1:])
    return {"differing": differing, "seconds": 0.0}


# --- by hand --------------------------------------------------------------------------------------


def by_hand(folder: Path, edge: int) -> Result:
    """The loop as one writes it with deepinv's operators and torch, everything in memory, two threads."""
    model = network(folder).to(memory_format=_torch().contiguous_format)
    return _by_hand(folder, edge, model)


def by_hand_channels_last(folder: Path, edge: int) -> Result:
    """The same with the network channels last, which suits the CPU better."""
    torch, model = _torch(), network(folder)
    return _by_hand(folder, edge, lambda x: model(x.contiguous(memory_format=torch.channels_last)))


def _by_hand(folder: Path, edge: int, model: Callable[[Any], Any], iterations: int = 3) -> Result:
    import zarr

    from tests.benchmarks.stacks import blurs

    torch = _torch()
    torch.set_num_threads(2)
    stack = blurs(EDGES)
    paths = [measurement(folder, edge, number) for number in range(len(EDGES))]
    seen = [torch.from_numpy(zarr.open_array(path, mode="r")[...])[None, None] for path in paths]
    x = torch.zeros_like(seen[0])
    seconds = []
    with torch.inference_mode():
        for _ in range(iterations):
            began = time.perf_counter()
            gradient = torch.zeros_like(x)
            for operator, y in zip(stack, seen, strict=True):
                gradient += operator.A_adjoint(operator.A(x) - y)
            x = model(x - STEP * gradient)
            seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds[1:])}


def _torch() -> Any:
    import torch

    return torch


if __name__ == "__main__":
    main(globals())
