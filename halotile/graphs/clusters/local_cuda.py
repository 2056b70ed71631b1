"""A worker on each GPU of this machine: dask-cuda's LocalCUDACluster, on loopback only, encrypted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halotile.errors import MissingPackage
from halotile.graphs.clusters.base import Cluster, Order
from halotile.graphs.clusters.detection.gpus import INSTALL, has_dask_cuda
from halotile.graphs.clusters.local import held, options_of
from halotile.graphs.clusters.workers.fork_server import environment_now
from halotile.graphs.plans.devices import chosen


@contextmanager
def start(order: Order) -> Iterator[Cluster]:
    """Start a worker of one thread on each GPU that is asked for; they end with the context.

    Raises
    ------
    ConfigError
        Where there is no GPU, or not the one that is asked for; when the processes cannot start.
    MissingPackage
        Without dask-cuda.
    """
    names = chosen(order.choice)
    if not has_dask_cuda():
        raise MissingPackage(f"cluster local-cuda is dask-cuda's, which is not installed. Write: {INSTALL}")

    def make() -> Any:
        return _class()(
            CUDA_VISIBLE_DEVICES=list(names),
            # None of torch's memory is seen by what moves Dask's results off a GPU: the plan bounds it.
            device_memory_limit=None,
            data=dict,
            **options_of(order),
        )

    with held(order, len(names), make) as cluster:
        yield cluster


def _class() -> type:
    """LocalCUDACluster, with workers that are told what the environment says by now."""
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingPackage(
            f"cluster local-cuda is dask-cuda's, which cannot be imported: {error}. Write: {INSTALL}"
        ) from None

    class OnGpus(LocalCUDACluster):  # type: ignore[misc]
        def new_worker_spec(self) -> Any:
            made = super().new_worker_spec()
            for each in made.values():
                options = each["options"]
                options["env"] = environment_now() | options["env"]
                # CUDA is touched where a model is loaded, and not before: a worker without its GPU says so then, in words.
                options["preload"], options["preload_argv"] = [], []
            return made

    return OnGpus
