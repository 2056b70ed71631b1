"""Tensors as NumPy arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError, WrongKind
from halotile.tasks.distributed.transport.stored import Stored

WIDER = {torch.bfloat16: torch.float32}
"""Types that NumPy has not, and those that hold them without loss."""


def to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The numbers of a tensor, on the processor.

    Raises
    ------
    InputError
        For types that NumPy cannot hold.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    try:
        array: NDArray[Any] = plain.to(WIDER.get(plain.dtype, plain.dtype)).numpy()
    except TypeError as error:
        raise InputError(
            f"a tensor of {tensor.dtype} cannot go to a worker ({error}). Write tensor.float() first."
        ) from error
    return array


def to_tensor(array: NDArray[Any], kind: str, device: Any = "cpu") -> torch.Tensor:
    """An array as a tensor of the type it had.

    Examples
    --------
    >>> to_tensor(np.ones(2, np.float32), "bfloat16").dtype
    torch.bfloat16
    """
    writable = array if array.flags.writeable else np.array(array)
    tensor: torch.Tensor = torch.from_numpy(np.asarray(writable)).to(
        device=device, dtype=getattr(torch, kind)
    )
    return tensor


def check_tensor(name: str, value: Any) -> None:
    """Refuse what a function gave in the place of a tensor.

    Raises
    ------
    WrongKind
        With what it gave.
    """
    if not isinstance(value, torch.Tensor):
        raise WrongKind(
            f"{name} gave an object of type {type(value).__name__}, and a tensor is needed. Have it return one."
        )


def kind_of(tensor: torch.Tensor) -> str:
    """The type of a tensor, in a word.

    Examples
    --------
    >>> kind_of(torch.ones(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")


def kind_of_both(left: str, right: str) -> str:
    """The type of a sum of two.

    Examples
    --------
    >>> kind_of_both("bfloat16", "float32"), kind_of_both("float16", "complex64")
    ('float32', 'complex64')
    """
    if left == right:
        return left
    return str(torch.promote_types(getattr(torch, left), getattr(torch, right))).removeprefix("torch.")


def loaded(stored: Stored, device: Any = "cpu") -> torch.Tensor:
    """A stored array as a tensor."""
    return to_tensor(stored.load(), stored.kind, device)
