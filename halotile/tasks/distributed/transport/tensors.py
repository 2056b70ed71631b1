"""Conversion between tensors and NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError, WrongKind

_lock = threading.RLock()

WIDER = {torch.bfloat16: torch.float32}
"""Dtypes that NumPy lacks, and wider ones that hold their values exactly."""


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Convert a tensor to an array in host memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    try:
        array: NDArray[Any] = plain.to(WIDER.get(plain.dtype, plain.dtype)).numpy()
    except TypeError as error:
        raise InputError(
            f"a tensor of {tensor.dtype} cannot be sent to a worker ({error}). Write tensor.float() first."
        ) from error
    return array


def to_tensor(array: NDArray[Any], kind: str | None = None, device: Any = "cpu") -> torch.Tensor:
    """Convert an array to a tensor of the named dtype, by default the array's own.

    Examples
    --------
    >>> to_tensor(np.ones(2, np.float32), "bfloat16").dtype
    torch.bfloat16
    """
    writable = np.asarray(array) if array.flags.writeable else np.array(array)
    dtype = getattr(torch, kind or str(array.dtype))
    tensor: torch.Tensor = torch.from_numpy(writable).to(device=device, dtype=dtype)
    return tensor


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors of this dtype for a while. Threads share its default, so only one at a time has another."""
    if dtype == torch.float32:
        yield
        return
    with _lock:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def version_of(tensor: torch.Tensor) -> int | None:
    """Number of changes of a tensor in place; None in inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version


def check_tensor(name: str, value: Any) -> None:
    """Refuse a function's result that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise WrongKind(
            f"{name} returned an object of type {type(value).__name__}, and a tensor is needed. Return a tensor."
        )


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype.

    Examples
    --------
    >>> dtype_name(torch.ones(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")


def promoted_dtype(left: str, right: str) -> str:
    """Name of the dtype of a sum.

    Examples
    --------
    >>> promoted_dtype("bfloat16", "float32"), promoted_dtype("float16", "complex64")
    ('float32', 'complex64')
    """
    if left == right:
        return left
    return str(torch.promote_types(getattr(torch, left), getattr(torch, right))).removeprefix("torch.")
