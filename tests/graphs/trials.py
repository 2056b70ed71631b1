"""Trials of a GPU that end as a test wants, on GPUs that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halotile.graphs.clusters import local_cuda
from halotile.graphs.clusters.common import machine as gpu_detection
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Cluster, DenoiserChoice, Output, Run, Tile
from halotile.graphs.plans import needs
from halotile.graphs.plans.trials import gpu_trials
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.trials.gpu_trial import TileTrial, Tuned
from tests.graphs.solving import kernel
from tests.support import noisy_image, write_zarr

TWO = Gpus(("0", "1"))
GAUSSIAN = PriorChoice(name="pnp", options={"denoiser": DenoiserChoice(name="gaussian", options={"sigma": 1.0})})
FOUND = Tuned(
    device="a card",
    tile=(32, 48),
    batch=6,
    channels_last=True,
    records=True,
    megapixels_per_second=100.0,
    device_bytes=5_000_000,
    free_bytes=10_000_000,
    host_bytes=800 * 2**20,
    block_pixels=128 * 128,
    tried=(TileTrial((32, 48), 6, 0.1, 4_000_000), TileTrial((64, 64), 1, 0.2, 4_000_000)),
)


def answering(monkeypatch: pytest.MonkeyPatch, here: Gpus = Gpus(("0",))) -> None:
    """Trials find the first tile that they are asked for, as a trial of a GPU that likes large ones would."""
    finding(monkeypatch, FOUND, here)

    def answer(task: Any, request: Any, _: Any) -> Tuned:
        batch = FOUND.batch if request.batch is None else request.batch
        return replace(FOUND, tile=request.tiles[0], batch=batch, channels_last=task.channels_last)

    monkeypatch.setattr(gpu_trials, "_in_a_process_of_its_own", answer)


def have(monkeypatch: pytest.MonkeyPatch, here: Gpus = Gpus(("0",))) -> None:
    """Let this machine have these GPUs."""
    for module in (needs, gpu_detection):
        monkeypatch.setattr(module, "gpus_here", lambda *_: here)


def finding(monkeypatch: pytest.MonkeyPatch, found: Any, here: Gpus = Gpus(("0",))) -> list[Any]:
    """Trials end so; returns what was asked for."""
    requested = []

    def instead(task: Any, request: Any, _: Any) -> Any:
        requested.append(request)
        if isinstance(found, BaseException):
            raise found
        return found

    have(monkeypatch, here)
    for module in (gpu_trials, local_cuda):
        monkeypatch.setattr(module, "gpus_here", lambda *_: here)
    monkeypatch.setattr(local_cuda, "has_dask_cuda", lambda: True)
    monkeypatch.setattr(gpu_trials, "_in_a_process_of_its_own", instead)
    return requested


def out_of_memory_once(folder: Path) -> GivenFunction:
    """A denoiser of tiles of 32 pixels that changes nothing, and for which memory runs out at one of them."""

    def hungry(image: Any, marker: Path = folder / "once") -> Any:
        if image.shape == (34, 34) and not marker.exists():
            marker.touch()
            raise MemoryError
        return image

    return GivenFunction(call=hungry, depth=1)


def deblurring(
    folder: Path, device: str = "cuda", prior: PriorChoice = GAUSSIAN, *, edge: int = 5, size: int = 256, **parts: Any
) -> Reconstruction:
    """A blur of an image of a few blocks."""
    data = folder / "y.zarr"
    if not data.exists():
        write_zarr(data, noisy_image((size, size), "float32"), 64)
    operator = OperatorChoice(name="blur", data=str(data), options={"kernel": kernel(edge), "boundary": "reflect"})
    given: dict[str, Any] = {
        "output": Output(path=str(folder / "x.zarr"), shard=128, chunk=64, codec="none"),
        "operators": (operator,),
        "prior": prior,
        "solver": SolverChoice(name="pgd", step=0.1, iterations=4),
        "tile": Tile(block=128),
        "run": Run(device=device, workers=1),  # type: ignore[arg-type]
        "cluster": Cluster(kind="local"),
    }
    return Reconstruction(**given | parts)
