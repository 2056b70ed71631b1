"""Conversion between tensors and NumPy arrays, and random numbers of calls: the same wherever and however often one is evaluated."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import InputError, WrongKind


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one call.

    >>> Draw(1, 0, 0).for_number(3).torch_seed() == Draw(1, 0, 0, 3).torch_seed()
    True
    """

    seed: int  # seed of the context
    stream: int  # number of the distributed object within the context
    call: int  # number of earlier calls of that object
    number: int = 0  # number of the operator, or of the first tile of a batch

    def for_number(self, number: int) -> Draw:
        """Return the draw of one operator or tile."""
        return replace(self, number=number)

    def torch_seed(self) -> int:
        """Seed for torch's global generators."""
        return self._mix(self.seed % 2**64)

    def generator_seed(self, state: int) -> int:
        """Seed for a user's generator: it follows from the generator's state, not from the context's seed."""
        return self._mix(state)

    def _mix(self, seed: int) -> int:
        sequence = np.random.SeedSequence((seed, self.stream, self.call, self.number))
        return int(sequence.generate_state(1, np.uint64)[0])


class DrawSequence:
    """The draws of one distributed object, one for each of its calls.

    ``seed``: seed of the context. Without one, random numbers differ from run to run; ``stream``: number of the object within the context.
    """

    def __init__(self, seed: int | None, stream: int) -> None:
        self._next = Draw(secrets.randbits(62) if seed is None else seed, stream, 0)

    def next(self) -> Draw:
        """Return the draw of the next call."""
        draw = self._next
        self._next = replace(draw, call=draw.call + 1)
        return draw


@contextmanager
def seeded(draw: Draw | None) -> Iterator[None]:
    """Seed torch's global generators from a draw and restore them afterwards; do nothing for None."""
    if draw is None:
        yield
        return
    # Not torch.manual_seed: without CUDA it records the whole stack, which costs more than a tile.
    generators = global_generators()
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(draw.torch_seed())
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def global_generators() -> Sequence[torch.Generator]:
    """The generators that torch uses by default."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]


_lock = threading.RLock()

WIDER = {torch.bfloat16: torch.float32}  # dtypes that NumPy lacks, and wider ones that hold their values exactly


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

    >>> dtype_name(torch.ones(1))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")


def promoted_dtype(left: str, right: str) -> str:
    """Name of the dtype of a sum.

    >>> promoted_dtype("bfloat16", "float32"), promoted_dtype("float16", "complex64")
    ('float32', 'complex64')
    """
    if left == right:
        return left
    return str(torch.promote_types(getattr(torch, left), getattr(torch, right))).removeprefix("torch.")
