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
    """The random numbers of one call.

    Examples
    --------
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

    Parameters
    ----------
    seed : int, optional
        Seed of the context. Without one, random numbers differ from run to run.
    stream : int
        Number of the object within the context.
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
