"""A GPU that computes nothing and takes its time: work queued on its streams ends at known moments, and who waits for it sleeps.

It shows whether the device always has work at hand. It says nothing about the time that a real one takes for a model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halotile.tasks.devices.gpu import NAMES, Gpu, Name, Streams


class Moment:
    """A mark of a stream: the moment at which what was queued before it ends."""

    def __init__(self, at: float) -> None:
        self.time = at

    def synchronize(self) -> None:
        """Sleep until then; other threads go on."""
        time.sleep(max(0.0, self.time - time.perf_counter()))


class EmulatedStreams(Streams):
    """Streams whose work ends one after the other.

    ``copies_per_second``: of pieces of a block, each way.
    """

    def __init__(self, copies_per_second: float = 1000.0) -> None:
        self.copy_seconds = 1 / copies_per_second
        self.ends: dict[Name, float] = dict.fromkeys(NAMES, 0.0)
        self.computed: list[tuple[float, float]] = []
        """Beginning and end of each batch."""
        self._lock = threading.Lock()

    def queue(self, name: Name, seconds: float) -> None:
        """Queue work that takes so long."""
        with self._lock:
            began = max(self.ends[name], time.perf_counter())
            self.ends[name] = began + seconds
            if name == "compute":
                self.computed.append((began, began + seconds))

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """A copy that is queued takes its time; computations are queued by :class:`EmulatedGpu`."""
        if name != "compute":
            self.queue(name, self.copy_seconds)
        yield

    def mark(self, name: Name) -> Moment:
        return Moment(max(self.ends[name], time.perf_counter()))

    def wait(self, name: Name, mark: Moment) -> None:
        self.ends[name] = max(self.ends[name], mark.time)


class EmulatedGpu(Gpu):
    """A GPU of a given speed, whose model returns what it is given."""

    def __init__(self, megapixels_per_second: float) -> None:
        self.emulated = EmulatedStreams()
        super().__init__("cpu", streams=self.emulated)
        self.rate = 1e6 * megapixels_per_second

    def run(self, model: Any, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """The batch, which takes as long as its pixels at this speed."""
        self.emulated.queue("compute", batch.numel() / self.rate)
        return batch
