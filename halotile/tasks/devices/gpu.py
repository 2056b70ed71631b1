"""A GPU: pixels are copied there and back during the computation, through pinned memory, on streams of their own."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.devices.device import Device, Download, set_precision
from halotile.tasks.lazy import torch

Computation = Callable[[], "torch.Tensor"]
Name = Literal["upload", "compute", "download"]
NAMES: tuple[Name, ...] = ("upload", "compute", "download")
BUFFERS = 2  # one is filled while the other is being copied


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
    """The streams of a GPU. ``device``: ``cuda:0`` and the like."""

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
        """Page-locked memory, or other memory where no more can be locked: its copies work, but do not overlap with anything."""
        with self.torch.inference_mode(False):
            try:
                memory: torch.Tensor = self.torch.empty(size, dtype=self.torch.uint8, pin_memory=True)
            except RuntimeError:
                memory = self.torch.empty(size, dtype=self.torch.uint8)
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

    ``allocate``: ``allocate(bytes)``: memory of that size; ``count``: number of buffers. When all are taken, the next ``take`` waits.

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


SMALL_BYTES = 2**16
MAX_RECORDINGS = 16  # one for each shape and margin of a batch: corners and edges have their own


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded launches of a batch, and the tensors that they read."""

    batch: torch.Tensor
    sides: dict[str, torch.Tensor]
    replay: Computation

    def __call__(self, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's result for another batch of the same shape."""
        self.batch.copy_(batch)
        for name, side in sides.items():
            self.sides[name].copy_(side)
        return self.replay()


@dataclass(frozen=True, slots=True)
class Upload:
    """Pixels that are being copied to the GPU."""

    tensor: torch.Tensor
    arrived: Mark


class Gpu(Device):
    """One GPU.

    ``name, precision, channels_last``: as for :class:`~halotile.tasks.devices.device.Device`. ``cpu`` runs the same code on the CPU; ``records``:
    whether the launches of a batch are recorded once and then replayed: a CUDA graph. For a model of many small steps, launching each takes longer
    than computing it.

    >>> gpu = Gpu("cpu")
    >>> pixels = gpu.take(gpu.stage(np.arange(3.0)))
    >>> with gpu.computing():
    ...     doubled = gpu.run(lambda batch: batch * 2, pixels, {})
    >>> gpu.fetch(doubled).pixels()
    array([0., 2., 4.])
    """

    one_shape = True

    def __init__(
        self,
        name: str = "cuda:0",
        precision: str = "float32",
        channels_last: bool = False,
        records: bool = False,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(name, precision, channels_last)
        self.records = records
        self._recorded: dict[Any, Recorded] = {}
        self.streams = streams or (CudaStreams(name) if self.kind == "cuda" else Streams())
        self._upload_buffers = BufferRing(self.streams.pinned)
        self._download_buffers = BufferRing(self.streams.pinned)
        # The sums of a result are downloaded at the same time, and must not take its buffer.
        self._small_buffers = BufferRing(self.streams.pinned)
        self._allocated: torch.Tensor | None = None

    def place(self, model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the model on the GPU, before anything is queued on any stream."""
        placed = super().place(model)
        self.streams.synchronize()
        return placed

    def is_lost(self) -> bool:
        """Return whether every call fails, as after an illegal memory access."""
        try:
            self.streams.check_device()
        except Exception:
            return True
        return False

    def warm_up(self) -> None:
        """Compute a convolution, which loads most libraries."""
        with self.computing():
            image = self.torch.zeros(1, 1, 8, 8, device=self.name)
            self.torch.nn.functional.conv2d(image, image[..., :3, :3])
        self.streams.synchronize()

    def with_recording(self) -> Self:
        """The same GPU, recording."""
        return type(self)(self.name, self.precision, self.channels_last, records=True)

    def run(
        self, model: Callable[..., torch.Tensor], batch: torch.Tensor, sides: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """``model(batch, **sides)``; with recording, the result is valid until the next call."""
        if not self.records:
            return super().run(model, batch, sides)
        key = _key(model, batch, sides)
        recorded = self._recorded.get(key)
        if recorded is None and len(self._recorded) < MAX_RECORDINGS:
            recorded = self._try_to_record(key, model, batch, sides)
        return super().run(model, batch, sides) if recorded is None else recorded(batch, sides)

    def _try_to_record(
        self, key: Any, model: Callable[..., torch.Tensor], batch: torch.Tensor, sides: dict[str, torch.Tensor]
    ) -> Recorded | None:
        try:
            recorded = self._recorded[key] = self._record(model, batch, sides)
            return recorded
        except Exception as error:
            out_of_memory = self.is_out_of_memory(error)
        # Only once the error is gone, whose frames hold tensors.
        self._recorded.clear()
        if out_of_memory:
            raise self.torch.cuda.OutOfMemoryError("out of memory: a batch has no room to be recorded")
        self.records = False  # it needs a value in between, or allocates in a way of its own
        return None

    def _record(
        self, model: Callable[..., torch.Tensor], batch: torch.Tensor, sides: dict[str, torch.Tensor]
    ) -> Recorded:
        own_batch, own_sides = batch.clone(), {name: side.clone() for name, side in sides.items()}

        def call() -> torch.Tensor:
            return Device.run(self, model, own_batch, own_sides)

        call()  # unrecorded: libraries are loaded and algorithms chosen
        return Recorded(own_batch, own_sides, self.streams.record(call))

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Pinned memory: what is read into it needs no copy to be uploaded."""
        self._allocated_for(None)
        size = math.prod(shape) * dtype.itemsize
        self._allocated = memory = self._upload_buffers.take(size)
        pixels: NDArray[Any] = memory[:size].numpy().view(dtype.newbyteorder("=")).reshape(shape)
        return pixels

    def owned(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """A copy."""
        return pixels.copy()

    def _allocated_for(self, pixels: NDArray[Any] | None) -> torch.Tensor | None:
        """The memory that was allocated, if the pixels are in it; else it is returned."""
        memory, self._allocated = self._allocated, None
        if memory is None or (
            pixels is not None and pixels.flags.c_contiguous and _address(memory.numpy()) == _address(pixels)
        ):
            return memory
        self._upload_buffers.give(memory)
        return None

    def stage(self, pixels: NDArray[Any]) -> Upload:
        """Start to copy pixels, in their own type."""
        native = pixels.dtype.newbyteorder("=")
        dtype = self.torch.from_numpy(np.empty(0, native)).dtype
        size = pixels.size * native.itemsize
        memory = self._allocated_for(pixels)
        is_there = memory is not None
        if memory is None:
            memory = self._upload_buffers.take(size)
        arrived: Mark | None = None
        try:
            pinned = memory[:size].view(dtype).view(pixels.shape)
            if not is_there:
                np.copyto(pinned.numpy(), pixels)
            with self.streams.on("upload"):
                tensor = self.torch.empty(pixels.shape, dtype=dtype, device=self.name)
                tensor.copy_(pinned, non_blocking=True)
            arrived = self.streams.mark("upload")
        finally:
            self._upload_buffers.give(memory, arrived)
        return Upload(tensor, arrived)

    def take(self, staged: Upload) -> torch.Tensor:
        """The uploaded pixels; the GPU waits for them, not this thread."""
        self.streams.wait("compute", staged.arrived)
        self.streams.record_use(staged.tensor, "compute")
        return staged.tensor

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The context in which models run: on the compute stream, at this precision, which is set for the whole process."""
        set_precision(self.precision)
        with super().computing(), self.streams.on("compute"):
            yield

    def clock(self) -> Any:
        """The end of the queued computations."""
        return self.streams.mark("compute")

    def seconds(self, first: Mark, last: Mark) -> float:
        """Seconds between two marks, by the GPU's own clock."""
        return self.streams.seconds(first, last)

    def fetch(self, tensor: torch.Tensor) -> Download:
        """Start to copy a result back, once it is computed."""
        self.streams.wait("download", self.streams.mark("compute"))
        size = tensor.numel() * tensor.element_size()
        buffers = self._download_buffers if size > SMALL_BYTES else self._small_buffers
        memory = buffers.take(size)
        try:
            with self.streams.on("download"):
                pinned = memory[:size].view(tensor.dtype).view(tensor.shape)
                pinned.copy_(tensor, non_blocking=True)
            self.streams.record_use(tensor, "download")
            return GpuDownload(pinned, memory, self.streams.mark("download"), buffers)
        except BaseException:
            buffers.give(memory)
            raise

    @property
    def title(self) -> str:
        """Name of the GPU."""
        return str(self.torch.cuda.get_device_name(self.name)) if self.kind == "cuda" else super().title

    def free_bytes(self) -> int | None:
        if self.kind != "cuda":
            return None
        cached = self.torch.cuda.memory_reserved(self.name) - self.torch.cuda.memory_allocated(self.name)
        return int(self.torch.cuda.mem_get_info(self.name)[0] + cached)

    def allocated_bytes(self) -> int:
        """Memory that tensors hold on the GPU, as torch counts it."""
        return int(self.torch.cuda.memory_allocated(self.name)) if self.kind == "cuda" else 0

    def peak_bytes(self) -> int:
        """The most that tensors held since :meth:`reset_peak`, as torch counts it."""
        return int(self.torch.cuda.max_memory_allocated(self.name)) if self.kind == "cuda" else 0

    def reset_peak(self) -> None:
        if self.kind == "cuda":
            self.torch.cuda.reset_peak_memory_stats(self.name)

    def release_cache(self) -> None:
        self._recorded.clear()
        if self.kind == "cuda":
            # Some versions of torch take a recording that failed for one that goes on, and refuse.
            with suppress(RuntimeError):
                self.torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class GpuDownload(Download):
    """A result that is being copied back from a GPU to a pinned buffer."""

    memory: torch.Tensor
    arrived: Mark
    buffers: BufferRing

    @contextmanager
    def borrowed(self) -> Iterator[NDArray[Any]]:
        """Wait for the result; the pinned buffer is reused after the context."""
        try:
            self.arrived.synchronize()
            yield self.tensor.numpy()
        finally:
            self.buffers.give(self.memory)

    def pixels(self) -> NDArray[Any]:
        """Wait for the result and return it in its own memory."""
        with self.borrowed() as pixels:
            return pixels.copy()


def _address(pixels: NDArray[Any]) -> int:
    return int(pixels.__array_interface__["data"][0])


def _key(model: Callable[..., torch.Tensor], batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> Any:
    """Key of a recording: the model with its margin, and the shapes."""
    function, margin = (model.func, str(model.keywords)) if isinstance(model, partial) else (model, "")
    return function, margin, batch.shape, tuple((name, side.shape) for name, side in sorted(sides.items()))


def open_device(kind: str, precision: str, channels_last: bool, records: bool = False) -> Device:
    """Open the device of this process.

    ``kind``: `cpu`, or `cuda`: the first GPU that the process may see; ``precision, channels_last``: as for `Device`; ``records``: as for `Gpu`.
    """
    if kind == "cpu":
        return Device("cpu", precision, channels_last)

    if not torch.cuda.is_available():
        raise ConfigError(
            "run.device is cuda, but this worker sees no GPU: torch finds no driver, or CUDA_VISIBLE_DEVICES hides them. Write "
            "device: cpu, or start the worker on a machine with a GPU (check with `recon-cli doctor`)."
        )
    return Gpu("cuda:0", precision, channels_last, records)
