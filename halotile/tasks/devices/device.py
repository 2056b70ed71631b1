"""The device that computes: what moves pixels to it and back, and what a worker process is told first."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, HalotileError

if TYPE_CHECKING:
    import torch

    from halotile.tasks.denoisers.base import Model

MIXED = ("float16", "bfloat16")
"""Precisions in which a model computes parts of itself."""

OUT_OF_MEMORY = (
    "not enough memory",
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "unable to find an engine to execute",
    "can't allocate memory",
    "bad_alloc",
)
"""What libraries say where they have no exception for it; the last one is cuDNN's, whose every algorithm wants some room."""
LOST = 70
"""What a process ends with whose device is lost."""


def prepare_process(threads: int) -> None:
    """Pin torch to ``threads`` threads in this process.

    Several workers on one machine that each take every core are 2 to 10 times slower.
    """
    import torch

    torch.set_num_threads(threads)


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """So many for torch in the context; one as in a worker: how torch divides its work shows in the last bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that memory ran out, on any kind of device."""
    if error is None:
        return False
    is_said = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return is_said or isinstance(error, MemoryError) or is_out_of_memory(error.__cause__)


class Device:
    """The CPU. What a GPU does beside it (:class:`~halotile.tasks.devices.gpu.Gpu`) is done at once here, or not at all.

    A block's pixels are staged, perhaps on a thread of its own; taken, where they are computed; and its result is given
    back, to be had on yet another thread.

    Parameters
    ----------
    name : str
        ``cpu``, or ``cuda:0`` and the like.
    precision : str
        ``float32``, ``tf32`` (of GPUs), or ``float16`` and ``bfloat16`` for automatic mixed precision (about 0.1 and 1 % error).
    channels_last : bool
        Whether activations are laid out channels last, which suits convolutions.

    Examples
    --------
    >>> device = Device()
    >>> pixels = device.take(device.stage(np.arange(3.0)))
    >>> with device.computing():
    ...     doubled = device.run(lambda batch: batch * 2, pixels, {})
    >>> device.give(doubled).pixels()
    array([0., 2., 4.])
    """

    one_shape = False
    """Whether batches are filled up, so that all have one shape: where the shape decides on the algorithm, and so on the bits."""

    def __init__(self, name: str = "cpu", precision: str = "float32", channels_last: bool = False) -> None:
        import torch

        self.torch = torch
        self.name = name
        self.kind = torch.device(name).type
        self.precision = precision
        self.channels_last = channels_last
        self.records = False

    def at(self, precision: str) -> Self:
        """The same device at another precision."""
        return type(self)(self.name, precision, self.channels_last)

    def laid_out(self, channels_last: bool) -> Self:
        """The same device with another memory layout."""
        return type(self)(self.name, self.precision, channels_last)

    def wake(self) -> None:
        """Load what is loaded when something is first computed."""

    def recording(self) -> Self | None:
        """The same device that records what a batch asks of it, and asks it again at once; None where that cannot be."""
        return None

    def place(self, model: Model) -> Model:
        """The model on this device, in the memory layout that suits it."""
        if not isinstance(model, self.torch.nn.Module):
            return model
        layout = self.torch.channels_last if self.channels_last else self.torch.contiguous_format
        placed: Model = model.to(self.name).to(memory_format=layout)
        return placed

    def stage(self, pixels: NDArray[Any]) -> Any:
        """Begin to bring pixels to the device."""
        return self.torch.from_numpy(_plain(pixels))

    def take(self, staged: Any) -> torch.Tensor:
        """What was staged, for the computation that follows."""
        tensor: torch.Tensor = staged
        return tensor

    def give(self, tensor: torch.Tensor) -> Given:
        """Begin to bring a result back."""
        return Given(tensor)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Where models run, without gradients. The mode belongs to a thread, so it is set where the computing thread passes."""
        with self.torch.inference_mode():
            yield

    def clock(self) -> Any:
        """Now, as the device has it: once all that was asked of it is computed."""
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """Between two times of its clock, when they have come."""
        return float(last - first)

    def run(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """``model(batch, **sides)`` at this device's precision, in the memory layout that suits it."""
        if self.channels_last and batch.ndim == 4:
            batch = batch.contiguous(memory_format=self.torch.channels_last)
            sides = {
                name: side.contiguous(memory_format=self.torch.channels_last) for name, side in sides.items()
            }
        mixed = (
            self.torch.autocast(self.kind, dtype=getattr(self.torch, self.precision))
            if self.precision in MIXED
            else nullcontext()
        )
        with mixed:
            result = model(batch, **sides)
        return result.float() if result.dtype in (self.torch.bfloat16, self.torch.float16) else result

    @property
    def title(self) -> str:
        """What people call it."""
        return "this processor"

    def free_bytes(self) -> int | None:
        """Memory that a process has there for itself; None where it is the machine's, which is planned elsewhere."""
        return None

    def held_bytes(self) -> int:
        """What tensors hold there now."""
        return 0

    def peak_bytes(self) -> int:
        """The most that they held since :meth:`forget_peak`."""
        return 0

    def forget_peak(self) -> None:
        """Begin to measure anew."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that memory ran out, on any kind of device."""
        return isinstance(error, self.torch.cuda.OutOfMemoryError) or is_out_of_memory(error)

    def is_lost(self) -> bool:
        """Whether it answers nothing any more, so that only another process can go on."""
        return False

    def forget(self) -> None:
        """Give cached memory back after an out-of-memory error."""


class Given:
    """A result on its way back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def pixels(self) -> NDArray[Any]:
        """The result, once it is there. It is asked for once."""
        pixels: NDArray[Any] = self._tensor.numpy()
        return pixels


def _plain(pixels: NDArray[Any]) -> NDArray[Any]:
    """Pixels as torch takes them: of this machine's byte order, writable, no axis backwards."""
    native = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if native.flags.writeable and all(step >= 0 for step in native.strides):
        return native
    return native.copy()


def all_finite(pixels: NDArray[Any]) -> bool:
    """Whether no pixel is NaN or infinite, without a temporary the size of the image."""
    if pixels.dtype.kind != "f":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = pixels.sum()  # infinite also where finite pixels add up to too much: then each is looked at
    return bool(np.isfinite(total)) or bool(np.isfinite(pixels).all())


@contextmanager
def unless_lost(device: Device) -> Iterator[None]:
    """End the process when its device is lost: its nanny starts another one, and the block is done there."""
    try:
        yield
    except HalotileError:  # ours: it was there to say so
        raise
    except Exception:
        if device.is_lost():
            os._exit(LOST)
        raise


def give_memory_back() -> None:
    """Let go of what torch keeps of a GPU for later: others may want it now."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def choose_device(mode: str | None) -> torch.device:
    """The device of a mode: ``cpu``, ``gpu``, or None for a GPU where there is one.

    Raises
    ------
    ConfigError
        For another word, and for ``gpu`` where there is none.

    Examples
    --------
    >>> choose_device("cpu")
    device(type='cpu')
    """
    import torch

    if mode not in (None, "cpu", "gpu"):
        raise ConfigError(f"device_mode is {mode!r}. Write 'cpu', 'gpu', or leave it out.")
    # Asked of NVML: CUDA, once begun with, would not work in processes that are forked later.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    has_gpu = mode != "cpu" and torch.cuda.is_available()
    if mode == "gpu" and not has_gpu:
        raise ConfigError("device_mode is 'gpu', but torch sees no CUDA device. Write device_mode='cpu'.")
    return torch.device("cuda" if has_gpu else "cpu")


def seed_everything(seed: int | None, deterministic: bool) -> None:
    """Set what torch draws from in this process, and keep cuDNN to deterministic algorithms if asked."""
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    if deterministic:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
