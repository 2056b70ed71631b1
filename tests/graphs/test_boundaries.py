"""No torch tensor crosses the border of a task: Dask takes its size for 80 bytes, and some of them hang between workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common import machine as gpu_detection
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, PriorChoice, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Output, Run, Tile
from halotile.graphs.plans import needs
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.driver import run as reconstruct
from tests.graphs.distributing import image, kernel
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, write_zarr

pytestmark = pytest.mark.cluster


def watch_tensors() -> None:
    """From now on this process notes each tensor that Dask serialises, however deep inside of something it is."""
    import importlib
    import threading

    import torch

    serialize = importlib.import_module("distributed.protocol.serialize")
    own = serialize.dask_serialize.dispatch(torch.Tensor)  # it is registered when it is first looked for
    torch._crossed = []
    inside = threading.local()
    dumps, reduce = serialize.pickle.dumps, torch.Tensor.__reduce_ex__

    def watched_dumps(*arguments: Any, **options: Any) -> Any:
        inside.depth = getattr(inside, "depth", 0) + 1
        try:
            return dumps(*arguments, **options)
        finally:
            inside.depth -= 1

    def watched_reduce(self: Any, protocol: Any) -> Any:
        if getattr(inside, "depth", 0):
            torch._crossed.append(tuple(self.shape))
        return reduce(self, protocol)

    def watched_own(tensor: Any) -> Any:
        torch._crossed.append(tuple(tensor.shape))
        return own(tensor)

    def undo() -> None:
        serialize.pickle.dumps, torch.Tensor.__reduce_ex__ = dumps, reduce
        serialize.dask_serialize.register(torch.Tensor)(own)

    serialize.pickle.dumps, torch.Tensor.__reduce_ex__ = watched_dumps, watched_reduce
    serialize.dask_serialize.register(torch.Tensor)(watched_own)
    torch._watched = undo


def unwatch_tensors() -> None:
    """As before."""
    import torch

    torch._watched()


def crossed() -> list[tuple[int, ...]]:
    """What was noted."""
    import torch

    return list(torch._crossed)


@pytest.fixture
def tensors(cluster: RunningCluster) -> Iterator[Callable[[], list[tuple[int, ...]]]]:
    """What crossed a border since the beginning of the test, here and in every worker."""
    watch_tensors()
    cluster.client.run(watch_tensors)
    yield lambda: [*crossed(), *(each for found in cluster.client.run(crossed).values() for each in found)]
    cluster.client.run(unwatch_tensors)
    unwatch_tensors()


def give_tensor() -> torch.Tensor:
    return torch.zeros(3, 5)


def give_nested() -> dict[str, Any]:
    return {"a": [torch.zeros(7)]}


@pytest.mark.parametrize("give", [give_tensor, give_nested])
def test_a_tensor_that_crosses_is_noticed(
    cluster: RunningCluster, tensors: Callable[[], list[tuple[int, ...]]], give: Callable[[], Any]
) -> None:
    """Else the tests below would say nothing."""
    cluster.client.submit(give, pure=False).result()
    assert len(tensors()) == 1


def test_none_crosses_in_a_denoising_run(
    cluster: RunningCluster, tensors: Callable[[], list[tuple[int, ...]]], tmp_path: Path
) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    weights = dncnn_weights(tmp_path / "w.safetensors")
    plan = make_plan(job_of(source, tmp_path / "o.zarr", "dncnn", {"weights": str(weights), "depth": 5, "width": 8}))
    assert run(plan, cluster=cluster).done == len(plan.grid)
    assert tensors() == []


def cards_of_the_processor() -> None:
    """From now on workers of this process have a GPU that is the CPU."""
    from halotile.tasks import denoise_block
    from halotile.tasks.devices.gpu import Gpu

    vars(denoise_block)["open_device"] = lambda kind, *options: Gpu("cpu", *options)


def devices_as_they_are() -> None:
    """As before."""
    from halotile.tasks import denoise_block
    from halotile.tasks.devices import gpu

    vars(denoise_block)["open_device"] = gpu.open_device


def test_none_crosses_in_a_run_on_cards_and_its_bits_are_the_same(
    cluster: RunningCluster,
    tensors: Callable[[], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for module in (needs, gpu_detection):
        monkeypatch.setattr(module, "gpus_here", lambda: Gpus(("0",)))
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260), "uint16"))
    written = []
    for device in ("cpu", "cuda"):
        job = job_of(source, tmp_path / f"{device}.zarr", "tv", {"strength": 0.1}, run={"device": device})
        if device == "cuda":
            cluster.client.run(cards_of_the_processor)
        try:
            outcome = run(make_plan(job), cluster=cluster)
        finally:
            cluster.client.run(devices_as_they_are)
        assert outcome.done == outcome.total > 1
        written.append(read_zarr(tmp_path / f"{device}.zarr"))
    np.testing.assert_array_equal(written[0], written[1])
    assert tensors() == []


def test_none_crosses_in_a_reconstruction(
    cluster: RunningCluster, tensors: Callable[[], list[tuple[int, ...]]], tmp_path: Path
) -> None:
    measured = write_zarr(tmp_path / "y.zarr", noisy_image((128, 128)))
    blur = OperatorChoice(
        name="blur", data=str(measured), options={"kernel": np.full((3, 3), 1 / 9), "boundary": "circular"}
    )
    job = Reconstruction(
        output=Output(path=str(tmp_path / "x.zarr"), shard=64, chunk=32),
        operators=(blur,),
        prior=PriorChoice(name="tv", options={"weight": 0.1}),
        solver=SolverChoice(name="fista", iterations=2),
        tile=Tile(block=64),
        run=Run(memory_per_worker="3GiB"),
    )
    reconstruct(make_plan(job), cluster=cluster)
    assert tensors() == []


def test_none_crosses_between_distributed_objects(
    cluster: RunningCluster, tensors: Callable[[], list[tuple[int, ...]]]
) -> None:
    import deepinv

    blurs = [deepinv.physics.Blur(filter=kernel(edge), padding="circular") for edge in (3, 5)]
    with DistributedContext(cluster=cluster, device_mode="cpu") as ctx:
        stack = distribute(deepinv.physics.StackedLinearPhysics(blurs), ctx)
        x = image(1, 1, 20, 24)
        assert stack.A_adjoint(stack.A(x)).shape == x.shape
        smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
        assert smooth(x).shape == x.shape
    assert tensors() == []
