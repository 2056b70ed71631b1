"""A GPU: pixels are copied there and back during the computation, through pinned memory, on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.devices.device import Device, Download, set_precision
from halotile.tasks.devices.streams import BufferRing, Computation, CudaStreams, Mark, Streams
from halotile.tasks.lazy import torch

if TYPE_CHECKING:
    from halotile.tasks.denoisers.base import Model

SMALL_BYTES = 2**16
MAX_RECORDINGS = 16
"""One for each shape and margin of a batch: corners and edges have their own."""


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

    Parameters
    ----------
    name, precision, channels_last
        As for :class:`~halotile.tasks.devices.device.Device`. ``cpu`` runs the same code on the CPU.
    records : bool
        Whether the launches of a batch are recorded once and then replayed: a CUDA graph. For a model of many small steps,
        launching each takes longer than computing it.

    Examples
    --------
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
    ) -> None:
        super().__init__(name, precision, channels_last)
        self.records = records
        self._recorded: dict[Any, Recorded] = {}
        self.streams = CudaStreams(name) if self.kind == "cuda" else Streams()
        self._upload_buffers = BufferRing(self.streams.pinned)
        self._download_buffers = BufferRing(self.streams.pinned)
        # The sums of a result are downloaded at the same time, and must not take its buffer.
        self._small_buffers = BufferRing(self.streams.pinned)

    def place(self, model: Model) -> Model:
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

    def run(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """``model(batch, **sides)``; with recording, the result is valid until the next call."""
        if not self.records:
            return super().run(model, batch, sides)
        key = _key(model, batch, sides)
        recorded = self._recorded.get(key)
        if recorded is None and len(self._recorded) < MAX_RECORDINGS:
            recorded = self._try_to_record(key, model, batch, sides)
        return super().run(model, batch, sides) if recorded is None else recorded(batch, sides)

    def _try_to_record(
        self, key: Any, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]
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

    def _record(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> Recorded:
        own_batch, own_sides = batch.clone(), {name: side.clone() for name, side in sides.items()}

        def call() -> torch.Tensor:
            return Device.run(self, model, own_batch, own_sides)

        call()  # unrecorded: libraries are loaded and algorithms chosen
        return Recorded(own_batch, own_sides, self.streams.record(call))

    def stage(self, pixels: NDArray[Any]) -> Upload:
        """Start to copy pixels, in their own type."""
        native = pixels.dtype.newbyteorder("=")
        dtype = self.torch.from_numpy(np.empty(0, native)).dtype
        size = pixels.size * native.itemsize
        memory = self._upload_buffers.take(size)
        arrived: Mark | None = None
        try:
            pinned = memory[:size].view(dtype).view(pixels.shape)
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
        """Free memory as the driver reports it, with what torch caches."""
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
        """Measure the peak anew."""
        if self.kind == "cuda":
            self.torch.cuda.reset_peak_memory_stats(self.name)

    def release_cache(self) -> None:
        """Release cached memory after an out-of-memory error."""
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

    def pixels(self) -> NDArray[Any]:
        """Wait for the result and return it in its own memory: the pinned buffer is reused."""
        try:
            self.arrived.synchronize()
            return Download.pixels(self).copy()
        finally:
            self.buffers.give(self.memory)


def _key(model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> Any:
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
