"""A GPU: pixels go there and come back beside the computation, through pinned memory, on streams of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.devices.device import Device, Given
from halotile.tasks.devices.pinned_buffers import Buffers, Mark
from halotile.tasks.devices.streams import AtOnce, Call, CudaStreams, Streams

if TYPE_CHECKING:
    import torch

    from halotile.tasks.denoisers.base import Model

SMALL_BYTES = 2**16
RECORDED_AT_MOST = 16
"""Shapes and margins of batches: those of corners and edges have their own."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of a batch, and where it is to be put."""

    batch: torch.Tensor
    sides: dict[str, torch.Tensor]
    replay: Call

    def __call__(self, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's result on another batch of the same shape."""
        self.batch.copy_(batch)
        for name, side in sides.items():
            self.sides[name].copy_(side)
        return self.replay()


@dataclass(frozen=True, slots=True)
class Sent:
    """Pixels on their way to the GPU."""

    tensor: torch.Tensor
    arrived: Mark


class Gpu(Device):
    """One GPU.

    Parameters
    ----------
    name, precision, channels_last
        As of :class:`~halotile.tasks.devices.device.Device`. ``cpu`` goes the same way on the CPU.
    records : bool
        Whether what a batch asks of the GPU is recorded once and asked again at once: a CUDA graph. Where a model is many small
        steps, asking for each takes longer than doing it.

    Examples
    --------
    >>> GPU = Card("cpu")
    >>> pixels = GPU.take(GPU.stage(np.arange(3.0)))
    >>> with GPU.computing():
    ...     doubled = GPU.run(lambda batch: batch * 2, pixels, {})
    >>> GPU.give(doubled).pixels()
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
        self.streams: Streams = CudaStreams(name) if self.kind == "cuda" else AtOnce()
        self._there = Buffers(self.streams.pinned)
        self._back = Buffers(self.streams.pinned)
        # What is told of a result comes beside it, and is not to take its place.
        self._beside = Buffers(self.streams.pinned)

    def place(self, model: Model) -> Model:
        """The model on the GPU, before anything is queued on any stream."""
        placed = super().place(model)
        self.streams.choose_tiles()
        return placed

    def is_lost(self) -> bool:
        """After an illegal access, say, every call fails."""
        try:
            self.streams.answer()
        except Exception:
            return True
        return False

    def wake(self) -> None:
        """A convolution brings most of it along."""
        with self.computing():
            image = self.torch.zeros(1, 1, 8, 8, device=self.name)
            self.torch.nn.functional.conv2d(image, image[..., :3, :3])
        self.streams.choose_tiles()

    def recording(self) -> Self:
        """The same GPU, which records."""
        return type(self)(self.name, self.precision, self.channels_last, records=True)

    def run(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """As on any device; of a GPU that records, the result is good until the next one is asked for."""
        if not self.records:
            return super().run(model, batch, sides)
        key = _key(model, batch, sides)
        recorded = self._recorded.get(key)
        if recorded is None and len(self._recorded) < RECORDED_AT_MOST:
            recorded = self._try_to_record(key, model, batch, sides)
        return super().run(model, batch, sides) if recorded is None else recorded(batch, sides)

    def _try_to_record(
        self, key: Any, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]
    ) -> Recorded | None:
        try:
            recorded = self._recorded[key] = self._record(model, batch, sides)
            return recorded
        except Exception as error:
            is_full = self.is_out_of_memory(error)
        # Not before the error is forgotten, whose frames hold what was made.
        self._recorded.clear()
        if is_full:
            raise self.torch.cuda.OutOfMemoryError("out of memory: a batch has no room to be recorded")
        self.records = False  # it asks for a value in between, or allocates in a way of its own
        return None

    def _record(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> Recorded:
        given, beside = batch.clone(), {name: side.clone() for name, side in sides.items()}

        def call() -> torch.Tensor:
            return Device.run(self, model, given, beside)

        call()  # libraries are loaded and algorithms chosen where nothing is recorded
        return Recorded(given, beside, self.streams.record(call))

    def stage(self, pixels: NDArray[Any]) -> Sent:
        """Send pixels, in their own type."""
        native = pixels.dtype.newbyteorder("=")
        dtype = self.torch.from_numpy(np.empty(0, native)).dtype
        size = pixels.size * native.itemsize
        memory = self._there.take(size)
        arrived: Mark | None = None
        try:
            pinned = memory[:size].view(dtype).view(pixels.shape)
            np.copyto(pinned.numpy(), pixels)
            with self.streams.on("there"):
                tensor = self.torch.empty(pixels.shape, dtype=dtype, device=self.name)
                tensor.copy_(pinned, non_blocking=True)
            arrived = self.streams.mark("there")
        finally:
            self._there.give(memory, arrived)
        return Sent(tensor, arrived)

    def take(self, staged: Sent) -> torch.Tensor:
        """What was sent; the GPU waits for it, not who asks."""
        self.streams.wait("compute", staged.arrived)
        self.streams.keep(staged.tensor, "compute")
        return staged.tensor

    @contextmanager
    def computing(self) -> Iterator[None]:
        """On the stream that computes, as exactly as this GPU is to compute: that is said for the whole process."""
        backends = self.torch.backends
        with warnings.catch_warnings():  # versions differ in how they want to be told
            warnings.simplefilter("ignore", UserWarning)
            backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = self.precision == "tf32"
        # A stopwatch would choose another algorithm on each worker, and its bits.
        backends.cudnn.benchmark = self.precision != "float32"
        backends.cudnn.deterministic = self.precision == "float32"
        with super().computing(), self.streams.on("compute"):
            yield

    def clock(self) -> Mark:
        """The end of what is queued to be computed."""
        return self.streams.mark("compute")

    def seconds(self, first: Mark, last: Mark) -> float:
        """By the card's own clock."""
        return self.streams.seconds(first, last)

    def give(self, tensor: torch.Tensor) -> Given:
        """Begin to bring a result back, once it is computed."""
        self.streams.wait("back", self.streams.mark("compute"))
        size = tensor.numel() * tensor.element_size()
        buffers = self._back if size > SMALL_BYTES else self._beside
        memory = buffers.take(size)
        try:
            with self.streams.on("back"):
                pinned = memory[:size].view(tensor.dtype).view(tensor.shape)
                pinned.copy_(tensor, non_blocking=True)
            self.streams.keep(tensor, "back")
            return OnItsWay(pinned, memory, self.streams.mark("back"), buffers)
        except BaseException:
            buffers.give(memory)
            raise

    @property
    def title(self) -> str:
        """The card's name."""
        return str(self.torch.cuda.get_device_name(self.name)) if self.kind == "cuda" else super().title

    def free_bytes(self) -> int | None:
        """As the driver tells, with what torch holds back for later."""
        if self.kind != "cuda":
            return None
        kept = self.torch.cuda.memory_reserved(self.name) - self.torch.cuda.memory_allocated(self.name)
        return int(self.torch.cuda.mem_get_info(self.name)[0] + kept)

    def held_bytes(self) -> int:
        """As torch counts."""
        return int(self.torch.cuda.memory_allocated(self.name)) if self.kind == "cuda" else 0

    def peak_bytes(self) -> int:
        """As torch counts."""
        return int(self.torch.cuda.max_memory_allocated(self.name)) if self.kind == "cuda" else 0

    def forget_peak(self) -> None:
        """Begin to measure anew."""
        if self.kind == "cuda":
            self.torch.cuda.reset_peak_memory_stats(self.name)

    def forget(self) -> None:
        """Give cached memory back after an out-of-memory error."""
        self._recorded.clear()
        if self.kind == "cuda":
            with suppress(
                RuntimeError
            ):  # of versions that take a recording which failed for one that goes on
                self.torch.cuda.empty_cache()


class OnItsWay(Given):
    """A result on its way back from a GPU."""

    def __init__(self, pinned: torch.Tensor, memory: torch.Tensor, arrived: Mark, buffers: Buffers) -> None:
        super().__init__(pinned)
        self._memory = memory
        self._arrived = arrived
        self._buffers = buffers

    def pixels(self) -> NDArray[Any]:
        """The result, in memory of its own: the pinned memory is for the next."""
        try:
            self._arrived.synchronize()
            return super().pixels().copy()
        finally:
            self._buffers.give(self._memory)


def _key(model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> Any:
    """What must be alike for a recording to do: the model with its margin, the shapes."""
    function, margin = (model.func, str(model.keywords)) if isinstance(model, partial) else (model, "")
    return function, margin, batch.shape, tuple((name, side.shape) for name, side in sorted(sides.items()))


def open_device(kind: str, precision: str, channels_last: bool, records: bool = False) -> Device:
    """The device of this process.

    Parameters
    ----------
    kind : str
        ``cpu``, or ``cuda``: the first GPU that the process may see.
    precision, channels_last
        As of :class:`~halotile.tasks.devices.device.Device`.
    records : bool
        As of :class:`Card`.

    Raises
    ------
    ConfigError
        For a GPU where there is none.
    """
    if kind == "cpu":
        return Device("cpu", precision, channels_last)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "run.device is cuda, and this worker sees no GPU: torch finds no driver, or CUDA_VISIBLE_DEVICES shows none. Write "
            "device: cpu, or start it where there is one (`recon-cli doctor`)."
        )
    return Gpu("cuda:0", precision, channels_last, records)
