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
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from tests.graphs.distributing import STACKS, image
from tests.graphs.trials import deblurring, have
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, write_zarr

Patch = pytest.MonkeyPatch

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


def crossed() -> list[tuple[int, ...]]:
    """What was noted."""
    return list(torch._crossed)


def unwatch() -> None:
    torch._watched()


Tensors = Callable[[], list[tuple[int, ...]]]


@pytest.fixture
def tensors(cluster: RunningCluster) -> Iterator[Tensors]:
    """What crossed a border since the beginning of the test, here and in every worker."""
    watch_tensors()
    cluster.client.run(watch_tensors)
    yield lambda: sum(cluster.client.run(crossed).values(), crossed())
    cluster.client.run(unwatch)
    unwatch()


def test_no_tensor_crosses_in_runs_on_cards_or_without_and_their_bits_are_the_same(
    cluster: RunningCluster, tensors: Tensors, monkeypatch: Patch, tmp_path: Path
) -> None:
    have(monkeypatch)
    source, written = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260), "uint16")), []
    network: dict[str, Any] = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    for name, device in (("dncnn", "cpu"), ("tv", "cpu"), ("tv", "cuda")):
        options = network if name == "dncnn" else {"strength": 0.1}
        job = job_of(source, tmp_path / f"{name}-{device}.zarr", name, options, run={"device": device})
        if device == "cuda":
            cluster.client.run(cards_of_the_processor)
        try:
            outcome = run(make_plan(job), cluster=cluster)
        finally:
            cluster.client.run(devices_as_they_are)
        assert outcome.done == outcome.total > 1
        written.append(read_zarr(tmp_path / f"{name}-{device}.zarr"))
    np.testing.assert_array_equal(written[1], written[2])
    run(make_plan(deblurring(tmp_path, "cpu")), cluster=cluster)
    assert tensors() == []


def test_none_crosses_between_distributed_objects_and_one_that_crosses_is_noticed(
    cluster: RunningCluster, tensors: Tensors
) -> None:
    with DistributedContext(cluster=cluster, device_mode="cpu") as ctx:
        stack, x = distribute(STACKS["circular blurs"](), ctx), image(1, 1, 20, 24)
        assert stack.A_adjoint(stack.A(x)).shape == x.shape
        smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
        assert smooth(x).shape == x.shape
    assert tensors() == []
    gives: tuple[Callable[[], Any], ...] = (lambda: torch.zeros(3, 5), lambda: {"a": [torch.zeros(7)]})
    for number, give in enumerate(gives, 1):  # else what is above would say nothing
        cluster.client.submit(give, pure=False).result()
        assert len(tensors()) == number
