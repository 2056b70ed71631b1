"""The compiled filters, called with tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Made by hatch_build.py; not there where the package was installed without a C compiler.
KERNELS = Path(__file__).with_name("kernels.so")
# Of the compiler.
FLAGS = (
    "-std=gnu11",
    "-O2",  # -O3 takes twice as long for the networks, and they are no faster
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fno-fast-math",  # whatever CC says
    "-fno-unsafe-math-optimizations",  # with which gcc would link code that rounds tiny numbers to 0
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-lm",
)
DIGEST = "kernels_digest"  # name of the digest of the sources in it
Kernel = Callable[..., None]


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled filters; None where there are none of these sources for this machine."""
    try:
        loaded = ctypes.CDLL(str(KERNELS))
        digest = (ctypes.c_char * 64).in_dll(loaded, DIGEST).value.decode()
    except (OSError, ValueError):
        return None
    return loaded if digest == digest_of_sources() else None


def digest_of_sources() -> str:
    """A digest of everything that they are compiled from."""
    networks = Path(__file__).parents[2] / "convolution/median_networks.py"
    sources = [*sorted(KERNELS.parent.glob("*.[ch]")), KERNELS.with_name("networks_in_c.py"), networks]
    content = [" ".join(FLAGS).encode(), *(source.read_bytes() for source in sources)]
    return hashlib.sha256(b"".join(content)).hexdigest()


def compiled(name: str) -> Kernel | None:
    """A compiled filter, where there is one for this machine.

    Returns
    -------
    callable or None
        Takes contiguous tensors or arrays, whole numbers and real numbers. It raises MemoryError where there is not enough memory.
    """
    if (loaded := library()) is None:
        return None
    function = getattr(loaded, name)

    def call(*arguments: Any) -> None:
        if function(*map(_argument, arguments)):
            raise MemoryError(f"the filter {name} could not get its memory")

    return call


def kernel_for(name: str, image: torch.Tensor) -> Kernel | None:
    """A compiled filter, if it takes an image: planes of single-precision pixels in the memory of the processor."""
    import torch

    if image.device.type != "cpu" or image.dtype != torch.float32 or image.dim() != 4 or not image.numel():
        return None
    if image.requires_grad and torch.is_grad_enabled():
        return None
    return compiled(name)


def by_plane(kernel: Kernel, batch: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Filter each plane of a batch: the kernel takes its pixels, rows and columns, the arguments, and the place for its result."""
    import torch

    out = torch.empty_like(batch, memory_format=torch.contiguous_format)
    for plane, result in zip(*(each.flatten(0, 1).unbind(0) for each in (batch.contiguous(), out)), strict=True):
        kernel(plane, *plane.shape, *arguments, result)
    return out


def one_number(values: torch.Tensor) -> float | None:
    """The number that all values are; None where they differ, or gradients go through them."""
    if values.requires_grad:
        return None
    least, most = values.aminmax()
    return float(least) if least == most else None


def _argument(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_ssize_t(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    # The installation loads this module, without numpy.
    return ctypes.c_void_p(value.ctypes.data if hasattr(value, "ctypes") else value.data_ptr())
