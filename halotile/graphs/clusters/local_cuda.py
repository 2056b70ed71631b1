"""A worker on each GPU of this machine: dask-cuda's LocalCUDACluster, on loopback only, encrypted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halotile.errors import MissingPackage
from halotile.graphs.clusters.base import DEFAULT, ChosenCluster, ClusterTraits, Environment, Order, RunningCluster
from halotile.graphs.clusters.common.machine import INSTALL, cores_beside, gpus_here, has_dask_cuda
from halotile.graphs.clusters.local import cluster_options, running
from halotile.graphs.words import counted

TRAITS = ClusterTraits(is_here=True, gpus="each", gives_gpus=lambda *_: True)


def detect(environment: Environment) -> ChosenCluster:
    """This kind where there are GPUs and dask-cuda, else the default one with the reason."""
    gpus = gpus_here(environment)
    if not gpus.names:
        return ChosenCluster(DEFAULT, f"no GPU: {gpus.why_none}")
    count = f"{counted(len(gpus.names), 'GPU')} here"
    if not has_dask_cuda():
        return ChosenCluster(DEFAULT, f"{count} are left alone; for a worker on each: {INSTALL}")
    return ChosenCluster("local-cuda", f"{count}, a worker on each")


@contextmanager
def start(order: Order) -> Iterator[RunningCluster]:
    """Start a worker of one thread on each GPU that is asked for; they end with the context."""
    from halotile.graphs.clusters.common.machine import chosen

    names = chosen(order.choice)
    if not has_dask_cuda():
        raise MissingPackage(f"cluster local-cuda needs dask-cuda, which is not installed. Write: {INSTALL}")

    def make() -> Any:
        return _cluster_class()(
            CUDA_VISIBLE_DEVICES=list(names),
            # dask-cuda moves Dask's results off a GPU and sees none of torch's memory: the plan bounds it.
            device_memory_limit=None,
            data=dict,
            **cluster_options(order),
        )

    with running(order, len(names), make) as cluster:
        yield cluster


def _cluster_class() -> type:
    """LocalCUDACluster, with workers that start in the present environment."""
    from halotile.graphs.clusters.workers.fork_server import environment_now

    try:
        from dask_cuda import LocalCUDACluster, worker_common
    except ImportError as error:
        raise MissingPackage(
            f"cluster local-cuda needs dask-cuda, which cannot be imported: {error}. Write: {INSTALL}"
        ) from None

    worker_common.get_cpu_affinity = cores_beside

    class OnGpus(LocalCUDACluster):  # type: ignore[misc]
        def new_worker_spec(self) -> Any:
            specs = super().new_worker_spec()
            for spec in specs.values():
                options = spec["options"]
                options["env"] = environment_now() | options["env"]
                # CUDA is touched where a model is loaded, and not before: a worker without its GPU then reports it in plain words.
                options["preload"], options["preload_argv"] = [], []
            return specs

    return OnGpus
