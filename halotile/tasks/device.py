"""The device that computes: what moves pixels to it and back, and what a worker process is told first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from halotile.tasks.denoisers.base import Model


def prepare_process(threads: int) -> None:
    """Pin torch to ``threads`` threads in this process.

    Several workers on one machine that each take every core are 2 to 10 times slower.
    """
    import torch

    torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """As in a worker, for the length of the context: how torch divides its work shows in the last bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Device:
    """One device: uploads NumPy arrays, downloads tensors, runs a model.

    Parameters
    ----------
    name : str
        ``cpu``, or ``cuda:0`` and the like.
    precision : str
        ``float32``, or ``bfloat16`` for automatic mixed precision (about 1 % error).
    channels_last : bool
        Whether activations are laid out channels last, which suits convolutions.
    """

    def __init__(self, name: str = "cpu", precision: str = "float32", channels_last: bool = False) -> None:
        import torch

        self.torch = torch
        self.name = name
        self.kind = torch.device(name).type
        self.precision = precision
        self.channels_last = channels_last

    def place(self, model: Model) -> Model:
        """The model on this device, in the memory layout that suits it."""
        if not isinstance(model, self.torch.nn.Module):
            return model
        network: Any = model.to(self.name)
        if self.channels_last:
            network = network.to(memory_format=self.torch.channels_last)
        placed: Model = network
        return placed

    def upload(self, pixels: NDArray[Any]) -> torch.Tensor:
        """A NumPy array as a tensor on this device."""
        tensor = self.torch.from_numpy(pixels).to(self.name)
        if self.channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=self.torch.channels_last)
        return tensor

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """A tensor as a NumPy array of the same numbers."""
        if tensor.dtype == self.torch.bfloat16:
            tensor = tensor.float()
        pixels: NDArray[Any] = tensor.cpu().numpy()
        return pixels

    def run(self, model: Model, batch: torch.Tensor, sides: dict[str, torch.Tensor]) -> torch.Tensor:
        """``model(batch, **sides)`` without gradients, at this device's precision.

        Gradient mode belongs to a thread, so it is set here, where the computing thread passes.
        """
        with self.torch.inference_mode():
            if self.precision == "bfloat16":
                with self.torch.autocast(self.kind, dtype=self.torch.bfloat16):
                    return model(batch, **sides)
            return model(batch, **sides)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that memory ran out, on any kind of device."""
        if isinstance(error, MemoryError | self.torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and "not enough memory" in str(error)

    def forget(self) -> None:
        """Give cached memory back after an out-of-memory error."""
        if self.kind == "cuda":
            self.torch.cuda.empty_cache()


def all_finite(pixels: NDArray[Any]) -> bool:
    """Whether no pixel is NaN or infinite, without a temporary the size of the picture."""
    if pixels.dtype.kind != "f":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = pixels.sum()  # infinite also where finite pixels add up to too much: then each is looked at
    return bool(np.isfinite(total)) or bool(np.isfinite(pixels).all())


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
