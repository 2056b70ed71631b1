"""The device that computes, with the copies of pixels to it and back, the settings and memory limits of a worker process, and a name for what decides on its last bits."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import platform
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from halotile.errors import ConfigError, HalotileError
from halotile.storage.io_threads import IO_THREADS
from halotile.tasks.lazy import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Vector instruction sets by CPU flag, the widest first.
LEVELS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
LIMITS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip
"""Environment variables that keep a library from using the widest one."""
LIBRARIES = ("torch", "numpy", "scipy")
LARGE = 2**22  # pixels from which the I/O threads look at them together
_CPUS = Path("/proc/cpuinfo")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")


def cpu_kind() -> str:
    """CPU model, its vector instructions and L2 cache, and versions of the numerical libraries.

    Libraries choose the order of sums by all of these: two workers that differ in one may round differently.

    >>> "torch 2" in cpu_kind()
    True
    """
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    model, libraries = _machine()
    return ", ".join([*model, *limits, *libraries])


@functools.cache
def _machine() -> tuple[list[str], list[str]]:
    return _cpu(), [*filter(None, map(_library, LIBRARIES))]


def _cpu() -> list[str]:
    """Maker, family and model rather than the name, which includes the clock rate."""
    facts = dict(_facts())
    if not facts:
        return [platform.processor() or platform.machine()]
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    level = next((word for flag, word in LEVELS.items() if flag in flags), "no vectors known")
    keys = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    parts = [" ".join(facts[key] for key in keys if key in facts), level]
    return [*parts, f"L2 {_CACHE.read_text('utf-8').strip()}"] if _CACHE.exists() else parts


def _facts() -> list[tuple[str, str]]:
    """The entries of /proc/cpuinfo for the first CPU."""
    if not _CPUS.exists():
        return []
    lines = _CPUS.read_text("utf-8").split("\n\n")[0].splitlines()
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def _library(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def limit_memory(limit_bytes: int) -> None:
    """Make allocations beyond this fail from now on, for good."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if most == resource.RLIM_INFINITY else min(limit_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def allow_memory(more_bytes: int | None) -> None:
    """Make allocations of more than this in addition to the present ones fail, until a later call; None: as much as is permitted."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most
    if more_bytes is not None:
        try:
            limit = _memory_bytes(5) + more_bytes
        except OSError:  # no Linux
            return
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


@contextmanager
def size_limited(total_bytes: int | None) -> Iterator[None]:
    """Limit this process to ``total_bytes`` for the length of the context.

    Only a process that already has a limit is limited, as halotile's workers are: in another process other threads may do
    unrelated work.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if total_bytes is not None and before[0] != resource.RLIM_INFINITY:
        allow_memory(max(0, total_bytes - _memory_bytes(1)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def release_memory() -> None:
    """Return memory that is not in use to the system; workers keep it otherwise, for their next blocks."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _memory_bytes(column: int) -> int:
    """A column of /proc/self/statm, which counts in pages: 1 is resident memory, 5 is writable memory."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[column]) * resource.getpagesize()


MIXED = ("float16", "bfloat16")  # precisions in which a model computes parts of itself

OUT_OF_MEMORY = (
    "not enough memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED",
    "unable to find an engine to execute", "can't allocate memory", "bad_alloc",
)  # fmt: skip
"""Words in the errors of libraries that have no exception for it; "unable to find an engine" is cuDNN's, whose every algorithm needs some memory."""
LOST = 70  # exit code of a process whose device is lost


def prepare_process(threads: int) -> None:
    """Pin torch to ``threads`` threads in this process, also where it is not imported yet.

    Several workers on one machine that each take every core are 2 to 10 times slower.
    """
    if "torch" in sys.modules:
        torch.set_num_threads(threads)
    else:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def prepare_program(device: Any) -> None:
    """Prepare the process of a rank for a program on its device: one thread on a CPU, and on a GPU the arithmetic of ``float32``."""
    if torch.device(device).type == "cpu":
        prepare_process(threads=1)
    else:
        set_precision("float32")


def set_precision(precision: str) -> None:
    """Set the arithmetic of GPUs for this process.

    In ``float32`` cuDNN chooses its algorithms by rule: timing would choose another one, and so other bits, on each worker.
    """
    backends = torch.backends

    with warnings.catch_warnings():  # versions of torch differ in the setting they prefer
        warnings.simplefilter("ignore", UserWarning)
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = precision == "tf32"
    backends.cudnn.benchmark = precision != "float32"
    backends.cudnn.deterministic = precision == "float32"


@contextmanager
def torch_threads(count: int = 1) -> Iterator[None]:
    """Set the number of torch threads for the length of the context.

    One is the number of a worker: how torch divides its work shows in the last bit.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, means that memory ran out, on any kind of device."""
    if error is None:
        return False
    by_message = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return by_message or isinstance(error, MemoryError) or is_out_of_memory(error.__cause__)


class Device:
    """The CPU. Copies that a GPU (:class:`~halotile.tasks.devices.gpu.Gpu`) makes in the background are made at once here, or not at all.

    The pixels of a block are staged, perhaps on a thread for reading; taken by the thread that computes; and its result is
    fetched, perhaps by a thread for writing.

    ``name``: ``cpu``, or ``cuda:0`` and the like; ``precision``: ``float32``, ``tf32`` (GPUs only), or ``float16`` and ``bfloat16`` for automatic
    mixed precision (about 0.1 and 1 % error); ``channels_last``: whether activations are laid out channels last, which suits convolutions.

    >>> import numpy as np
    >>> device = Device()
    >>> pixels = device.take(device.stage(np.arange(3.0)))
    >>> with device.computing():
    ...     doubled = device.run(lambda batch: batch * 2, pixels, {})
    >>> device.fetch(doubled).pixels()
    array([0., 2., 4.])
    """

    # True if batches are filled up to one shape: needed where the shape decides on the algorithm, and so on the bits.
    one_shape = False

    def __init__(self, name: str = "cpu", precision: str = "float32", channels_last: bool = False) -> None:

        self.torch = torch
        self.name = name
        self.kind = name.partition(":")[0]
        self.precision = precision
        self.channels_last = channels_last
        self.records = False

    def with_precision(self, precision: str) -> Self:
        """The same device at another precision."""
        return type(self)(self.name, precision, self.channels_last)

    def with_layout(self, channels_last: bool) -> Self:
        """The same device with another memory layout."""
        return type(self)(self.name, self.precision, channels_last)

    def warm_up(self) -> None:
        """Load the libraries that would be loaded with the first computation."""

    def with_recording(self) -> Self | None:
        """The same device, recording the launches of a batch to replay them; None where that is impossible."""
        return None

    def place(self, model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the model on this device, in the chosen memory layout."""
        if not isinstance(model, self.torch.nn.Module):
            return model
        layout = self.torch.channels_last if self.channels_last else self.torch.contiguous_format
        placed: Callable[..., torch.Tensor] = model.to(self.name).to(memory_format=layout)
        return placed

    def stage(self, pixels: NDArray[Any]) -> Any:
        """Start to copy pixels to the device."""
        return self.torch.from_numpy(_plain(pixels))

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Memory for pixels that :meth:`stage` gets next."""
        import numpy as np  # late: commands limit their memory before anything heavy is loaded

        pixels: NDArray[Any] = np.empty(shape, dtype)
        return pixels

    def owned(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Pixels that stay as they are: a copy, where those given are in memory that the device uses again."""
        return pixels

    def take(self, staged: Any) -> torch.Tensor:
        """The staged pixels, for the computation that follows."""
        tensor: torch.Tensor = staged
        return tensor

    def fetch(self, tensor: torch.Tensor) -> Download:
        """Start to copy a result back."""
        return Download(tensor)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The context in which models run, without gradients; the mode belongs to the thread that enters it."""
        with self.torch.inference_mode():
            yield

    def clock(self) -> Any:
        """The time on the device: that at which everything queued so far is computed."""
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two times of the clock, both in the past."""
        return float(last - first)

    def run(
        self, model: Callable[..., torch.Tensor], batch: torch.Tensor, sides: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """``model(batch, **sides)`` at this device's precision, in its memory layout."""
        if self.channels_last and batch.ndim == 4:
            batch = batch.contiguous(memory_format=self.torch.channels_last)
            sides = {name: side.contiguous(memory_format=self.torch.channels_last) for name, side in sides.items()}
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
        """Name of the device in messages."""
        return "this CPU"

    def free_bytes(self) -> int | None:
        """Free memory of the device; None for a CPU, whose memory is planned elsewhere."""
        return None

    def allocated_bytes(self) -> int:
        """Memory that tensors hold on the device now."""
        return 0

    def peak_bytes(self) -> int:
        """The most that tensors held since :meth:`reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Measure the peak anew."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that memory ran out, on any kind of device."""
        return isinstance(error, self.torch.cuda.OutOfMemoryError) or is_out_of_memory(error)

    def is_lost(self) -> bool:
        """Return whether every call to the device fails, so that only another process can go on."""
        return False

    def release_cache(self) -> None:
        """Release cached memory after an out-of-memory error."""


@dataclass(frozen=True, slots=True)
class Download:
    """A result that is being copied back."""

    tensor: torch.Tensor

    @contextmanager
    def borrowed(self) -> Iterator[NDArray[Any]]:
        """Wait for the result, which is valid within the context. Enter it once, or call :meth:`pixels` once."""
        yield self.tensor.numpy()

    def pixels(self) -> NDArray[Any]:
        """Wait for the result and return it."""
        with self.borrowed() as pixels:
            return pixels


def _plain(pixels: NDArray[Any]) -> NDArray[Any]:
    """Pixels as torch takes them: in native byte order, writable, no axis reversed."""
    native = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if native.flags.writeable and all(step >= 0 for step in native.strides):
        return native
    return native.copy()


def all_finite(pixels: NDArray[Any]) -> bool:
    """Return whether no pixel is NaN or infinite, without a temporary the size of the image."""
    import numpy as np  # late: commands limit their memory before anything heavy is loaded

    if pixels.dtype.kind != "f":
        return True

    def are_finite(part: NDArray[Any]) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            total = part.sum()  # overflows to infinity for some finite pixels: then each is checked
        return bool(np.isfinite(total)) or bool(np.isfinite(part).all())

    if pixels.size < LARGE or IO_THREADS.count == 1:
        return are_finite(pixels)
    longest = max(range(pixels.ndim), key=lambda axis: pixels.shape[axis])
    return all(list(IO_THREADS.map(are_finite, np.array_split(pixels, IO_THREADS.count, longest))))


@contextmanager
def unless_lost(device: Device) -> Iterator[None]:
    """End the process when its device is lost: its nanny starts another one, which repeats the block."""
    try:
        yield
    except HalotileError:  # raised on purpose, not by a lost device
        raise
    except Exception:
        if device.is_lost():
            os._exit(LOST)
        raise


def give_memory_back() -> None:
    """Release the GPU memory that torch caches, for other processes."""
    if "torch" in sys.modules and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def choose_device(mode: str | None) -> torch.device:
    """The device of a mode: ``cpu``, ``gpu``, or None for a GPU if there is one.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if mode not in (None, "cpu", "gpu"):
        raise ConfigError(f"device_mode is {mode!r}. Write 'cpu', 'gpu', or leave it out.")
    # NVML answers this: once CUDA is initialised, it would not work in processes forked later.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    has_gpu = mode != "cpu" and torch.cuda.is_available()
    if mode == "gpu" and not has_gpu:
        raise ConfigError("device_mode is 'gpu', but torch sees no CUDA device. Write device_mode='cpu'.")
    return torch.device("cuda" if has_gpu else "cpu")


def seed_everything(seed: int | None, deterministic: bool) -> None:
    """Seed torch's random numbers in this process, and restrict cuDNN to deterministic algorithms if wanted."""
    if seed is not None:
        torch.manual_seed(seed)
    if deterministic:
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
