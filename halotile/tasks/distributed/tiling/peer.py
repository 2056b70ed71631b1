"""Tiled denoisers that are of deepinv's class too, for scripts that ask by ``isinstance``."""

from deepinv.distributed.distribute import DistributedProcessing as Peer

from halotile.tasks.distributed.tiling.processing import DistributedProcessing


class DeepinvProcessing(DistributedProcessing, Peer):  # type: ignore[misc]
    """The same, and nothing that it does is deepinv's."""
