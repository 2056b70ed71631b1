"""Streams of work of a device: what is queued on one runs beside the others. The CPU has none, and does all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

from halotile.tasks.devices.pinned_buffers import Mark

if TYPE_CHECKING:
    import torch

Call = Callable[[], "torch.Tensor"]
Name = Literal["there", "compute", "back"]
NAMES: tuple[Name, ...] = ("there", "compute", "back")
"""To the device, on it, and back."""


class Streams(Protocol):
    """Three streams, and memory that can be copied to and from beside them."""

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """What is queued within goes to a stream."""
        ...

    def mark(self, name: Name) -> Mark:
        """The end of what is queued on a stream by now."""
        ...

    def wait(self, name: Name, mark: Any) -> None:
        """What is queued on a stream from now on begins once a mark is reached. Does not wait here."""
        ...

    def keep(self, tensor: torch.Tensor, name: Name) -> None:
        """A stream uses a tensor that another one made: its memory is not for others before that is done."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes of memory that the device can reach by itself."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks that have been reached."""
        ...

    def choose_tiles(self) -> None:
        """Wait until nothing is queued anywhere on the device."""
        ...

    def answer(self) -> None:
        """Wait for what is on its way back; fails where the device is lost. Recordings are left alone."""
        ...

    def record(self, call: Call) -> Call:
        """What a call queues on the stream that computes, to be queued again at once; its result is always in the same place."""
        ...


class Moment:
    """A mark of a device that does all at once: it is reached when it is made."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class AtOnce:
    """The CPU's: everything is done where it is queued."""

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """Here."""
        yield

    def mark(self, name: Name) -> Moment:
        """Now."""
        return Moment()

    def wait(self, name: Name, mark: Moment) -> None:
        """It has been reached."""

    def keep(self, tensor: torch.Tensor, name: Name) -> None:
        """Nobody else uses it."""

    def pinned(self, size: int) -> torch.Tensor:
        """Plain memory."""
        import torch

        with torch.inference_mode(False):  # it outlives the computation for which it is taken first
            return torch.empty(size, dtype=torch.uint8)

    def seconds(self, first: Moment, last: Moment) -> float:
        """By the clock."""
        return last.time - first.time

    def choose_tiles(self) -> None:
        """Nothing ever is."""

    def answer(self) -> None:
        """It does."""

    def record(self, call: Call) -> Call:
        """The call itself, with one place for its results."""
        place = call()
        return lambda: place.copy_(call())


class CudaStreams:
    """Those of a GPU.

    Parameters
    ----------
    device : str
        ``cuda:0`` and the like.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch: Any = torch
        self._device = device
        self._streams = {name: self.torch.cuda.Stream(device) for name in NAMES}
        self._graphs = self.torch.cuda.graph_pool_handle()

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """On a stream of the GPU."""
        with self.torch.cuda.stream(self._streams[name]):
            yield

    def mark(self, name: Name) -> Any:
        """An event, with its time."""
        event = self.torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._streams[name])
        return event

    def wait(self, name: Name, mark: Any) -> None:
        """The GPU waits."""
        self._streams[name].wait_event(mark)

    def keep(self, tensor: torch.Tensor, name: Name) -> None:
        """The allocator is told."""
        tensor.record_stream(self._streams[name])

    def pinned(self, size: int) -> torch.Tensor:
        """Page-locked memory: a copy from other memory would not go on beside anything."""
        with self.torch.inference_mode(False):
            memory: torch.Tensor = self.torch.empty(size, dtype=self.torch.uint8, pin_memory=True)
        return memory

    def seconds(self, first: Any, last: Any) -> float:
        """By the card's own clock."""
        return float(first.elapsed_time(last)) / 1000

    def choose_tiles(self) -> None:
        """Whatever stream it is on."""
        self.torch.cuda.synchronize(self._device)

    def record(self, call: Call) -> Call:
        """A CUDA graph. All share their memory: one runs at a time, on one stream."""
        graph = self.torch.cuda.CUDAGraph()
        # Threads that read and write go on allocating and copying meanwhile.
        recording = self.torch.cuda.graph(
            graph, pool=self._graphs, stream=self._streams["compute"], capture_error_mode="thread_local"
        )
        try:
            with recording:
                place = call()
        except BaseException:
            self._end_allocating()
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return place

        return replay

    def answer(self) -> None:
        """What loses a GPU shows on each of its streams."""
        self._streams["back"].synchronize()

    def _end_allocating(self) -> None:
        """Say that a recording which failed is over.

        Up to torch 2.11 the allocator is not told when the driver ends it, and would keep from then on whatever it is given back
        (pytorch issue 180395).
        """
        device = self.torch.cuda.current_device()
        with suppress(Exception):
            self.torch._C._cuda_endAllocateToPool(device, self._graphs)
            self.torch._C._cuda_releasePool(device, self._graphs)
