"""Random numbers of calls: the same wherever a call is evaluated, and however often."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Draw:
    """What random numbers a call has.

    Parameters
    ----------
    seed : int
        Of the context.
    stream : int
        Which of the context's distributed objects draws.
    call : int
        How often it drew before.
    number : int
        Of the operator, or of the first tile of a batch.

    Examples
    --------
    >>> Draw(1, 0, 0).of(3).key() == Draw(1, 0, 0, 3).key()
    True
    """

    seed: int
    stream: int
    call: int
    number: int = 0

    def of(self, number: int) -> Draw:
        """That of one operator or tile."""
        return replace(self, number=number)

    def key(self) -> int:
        """The seed of torch's own generators."""
        return _mixed(self.seed % 2**64, self.stream, self.call, self.number)

    def key_after(self, state: int) -> int:
        """The seed of a generator that somebody brings: what its state was decides, and not the seed of the context."""
        return _mixed(state, self.stream, self.call, self.number)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class Draws:
    """The draws of one distributed object, one for each of its calls.

    Parameters
    ----------
    seed : int, optional
        Of the context. Where there is none, random numbers are others each time.
    stream : int
        Which of the context's objects it is.
    """

    def __init__(self, seed: int | None, stream: int) -> None:
        self._next = Draw(secrets.randbits(62) if seed is None else seed, stream, 0)

    def next(self) -> Draw:
        """That of the next call."""
        draw = self._next
        self._next = replace(draw, call=draw.call + 1)
        return draw


@contextmanager
def seeded(draw: Draw | None) -> Iterator[None]:
    """Random numbers of torch are those of a draw; with None, whatever comes. Afterwards they go on as before."""
    if draw is None:
        yield
        return
    # Not by torch.manual_seed: it writes down the whole stack where CUDA has not begun, which costs more than a tile.
    generators = global_generators()
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(draw.key())
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def global_generators() -> Sequence[torch.Generator]:
    """Those that torch draws from unasked."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]
