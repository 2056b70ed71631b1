"""Streams on which a device works through what is queued, and the pinned buffers that its copies go through."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, Protocol

from halotile.tasks.lazy import torch

Computation = Callable[[], "torch.Tensor"]
Name = Literal["upload", "compute", "download"]
NAMES: tuple[Name, ...] = ("upload", "compute", "download")
BUFFERS = 2
"""One is filled while the other is being copied."""


class Mark(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until everything queued before it is done."""


class TimeMark:
    """A mark of a device that runs everything at once: reached when it is made."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""


class Streams:
    """The streams of the CPU, which runs everything at once, in the order in which it is queued."""

    def on(self, name: Name) -> AbstractContextManager[None]:
        """Queue on a stream for the length of the context."""
        return nullcontext()

    def mark(self, name: Name) -> Any:
        """The end of what is queued on a stream so far."""
        return TimeMark()

    def wait(self, name: Name, mark: Any) -> None:
        """Let what is queued on a stream from now on begin once a mark is reached; returns at once."""

    def record_use(self, tensor: torch.Tensor, name: Name) -> None:
        """Keep the memory of another stream's tensor from reuse until a stream is done with it."""

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of ``size`` bytes that the device can copy from and to by itself."""
        with torch.inference_mode(False):  # it outlives the computation for which it is taken first
            return torch.empty(size, dtype=torch.uint8)

    def seconds(self, first: Any, last: Any) -> float:
        """The time between two marks that have been reached."""
        return float(last.time - first.time)

    def synchronize(self) -> None:
        """Wait until nothing is queued anywhere on the device."""

    def check_device(self) -> None:
        """Wait for the downloads; raises when the device is lost. Recordings are left alone."""

    def record(self, call: Computation) -> Computation:
        """Record what a call queues for computation, to queue it again at once; the result is always in the same place."""
        place = call()
        return lambda: place.copy_(call())


class CudaStreams(Streams):
    """The streams of a GPU.

    Parameters
    ----------
    device : str
        ``cuda:0`` and the like.
    """

    def __init__(self, device: str) -> None:

        self.torch: Any = torch
        self._device = device
        self._streams = {name: self.torch.cuda.Stream(device) for name in NAMES}
        self._graphs = self.torch.cuda.graph_pool_handle()

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """Queue on a stream for the length of the context."""
        with self.torch.cuda.stream(self._streams[name]):
            yield

    def mark(self, name: Name) -> Any:
        """An event that also takes the time."""
        event = self.torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._streams[name])
        return event

    def wait(self, name: Name, mark: Any) -> None:
        """Let the GPU wait, not this process."""
        self._streams[name].wait_event(mark)

    def record_use(self, tensor: torch.Tensor, name: Name) -> None:
        """Record the use in the allocator."""
        tensor.record_stream(self._streams[name])

    def pinned(self, size: int) -> torch.Tensor:
        """Page-locked memory: a copy from other memory would not overlap with anything."""
        with self.torch.inference_mode(False):
            memory: torch.Tensor = self.torch.empty(size, dtype=self.torch.uint8, pin_memory=True)
        return memory

    def seconds(self, first: Any, last: Any) -> float:
        """The time between two events by the GPU's own clock."""
        return float(first.elapsed_time(last)) / 1000

    def synchronize(self) -> None:
        """Wait for every stream of the GPU."""
        self.torch.cuda.synchronize(self._device)

    def check_device(self) -> None:
        """Wait for one stream: a lost GPU fails on each of them."""
        self._streams["download"].synchronize()

    def record(self, call: Computation) -> Computation:
        """Record a CUDA graph. All graphs share their memory: one runs at a time, on one stream."""
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

    def _end_allocating(self) -> None:
        """Inform the allocator that a failed recording is over.

        Up to torch 2.11 nothing does when the driver ends it, and the allocator would hold back from then on whatever is returned
        to it (pytorch issue 180395).
        """
        device = self.torch.cuda.current_device()
        with suppress(Exception):
            self.torch._C._cuda_endAllocateToPool(device, self._graphs)
            self.torch._C._cuda_releasePool(device, self._graphs)


class BufferRing:
    """A few buffers used in turn. Each that is taken has to be returned.

    Parameters
    ----------
    allocate : callable
        ``allocate(bytes)``: memory of that size.
    count : int
        Number of buffers. When all are taken, the next ``take`` waits.

    Examples
    --------
    >>> buffers = BufferRing(bytearray, count=1)
    >>> first = buffers.take(3)
    >>> buffers.give(first)
    >>> buffers.take(2) is first
    True
    """

    def __init__(self, allocate: Callable[[int], Any], count: int = BUFFERS) -> None:
        self._allocate = allocate
        self._free: queue.SimpleQueue[tuple[Any, Mark | None]] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put((None, None))

    def take(self, size: int) -> Any:
        """A buffer of at least ``size`` bytes that is no longer in use."""
        memory, mark = self._free.get()
        if mark is not None:
            mark.synchronize()
        if memory is not None and len(memory) >= size:
            return memory
        del memory  # the larger buffer replaces it, and must not be kept with it
        try:
            return self._allocate(size)
        except BaseException:
            self._free.put((None, None))
            raise

    def give(self, memory: Any, mark: Mark | None = None) -> None:
        """Return a buffer; with a mark, it is free once the mark is reached."""
        self._free.put((memory, mark))
