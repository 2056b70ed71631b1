"""Gloo at one address, instead of that of the machine's name; and the words in its errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_THREADS = 2
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Connect timeout",
    "Wait timeout",
    "imed out",
    "monitoredBarrier",
    "Application timeout",
)
"""Words in errors of torch.distributed that mean that another rank ended or did not answer."""


def gloo_options(host: str, timeout_seconds: float) -> Any:
    """Options of gloo that listen at the address ``host``."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = _THREADS
    return options


def is_lost_peer(error: BaseException) -> bool:
    """Return True when an error of torch means that another rank ended or did not answer."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(words in str(error) for words in LOST_PEER)
