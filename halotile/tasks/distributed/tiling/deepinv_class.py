"""Distributed denoisers of deepinv's class, for scripts that test by ``isinstance``."""

from deepinv.distributed.distribute import DistributedProcessing as DeepinvClass

from halotile.tasks.distributed.tiling.processing import DistributedProcessing


class DeepinvProcessing(DistributedProcessing, DeepinvClass):  # type: ignore[misc]
    """The same object; it uses none of deepinv's methods."""
