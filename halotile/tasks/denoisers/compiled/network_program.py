"""Sorting networks as steps on registers, as median.c follows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.tasks.convolution.median_networks import median_network

STRETCH = 512
"""Pixels of a row that are sorted at a time."""
KINDS = {"min": 1, "max": 2}
BOTH = 0


class Place(NamedTuple):
    """A register, and the pixel in it that is the first of a value."""

    register: int
    shift: int


@dataclass
class NetworkProgram:
    """Steps of a network for windows of a size.

    Parameters
    ----------
    size : int
        Edge of the window.
    pitch : int
        Pixels of a register.
    """

    size: int
    pitch: int
    steps: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Kind, then lesser, greater and both values, as places in the room of all registers."""
    of_columns: int = 0
    """The first steps, which sort columns."""
    registers: int = 0
    result: int = 0

    def array(self) -> NDArray[np.int32]:
        """The steps, (steps, 5)."""
        return np.array(self.steps, np.int32)

    def at(self, place: Place) -> int:
        """The place of a value in the room of all registers."""
        return place.register * self.pitch + place.shift


@dataclass(frozen=True)
class _Exchange:
    """The lesser and the greater of two values, or one of them."""

    one: int
    other: int
    in_columns: bool
    results: dict[str, int] = field(default_factory=dict)


@cache
def network_program(size: int) -> NetworkProgram:
    """Translate the network for windows of ``size`` × ``size`` pixels.

    Examples
    --------
    >>> program = network_program(3)
    >>> program.of_columns, len(program.steps), program.registers
    (3, 14, 5)
    """
    network = median_network(size, 2)
    origins: dict[int, tuple[int, int]] = {}
    rows: dict[int, int] = {}
    late: set[int] = set()
    found: dict[tuple[int, int], _Exchange] = {}
    for number, (kind, one, other) in network.used.items():
        axis, shift = divmod(other, size)
        if kind == "shift":
            origins[number] = (one, shift) if axis else (number, 0)
            if axis:
                late.add(number)
            else:
                rows[number] = shift
            continue
        origins[number] = (number, 0)
        is_late = bool({one, other} & late)
        found.setdefault((one, other), _Exchange(one, other, not is_late)).results[kind] = number
        late |= {number} if is_late else set()
    exchanges = list(found.values())
    exchanges.sort(key=lambda exchange: not exchange.in_columns)
    return _placed(NetworkProgram(size, STRETCH + 64), exchanges, origins, rows, network.result)


def _placed(
    program: NetworkProgram,
    exchanges: list[_Exchange],
    origins: dict[int, tuple[int, int]],
    rows: dict[int, int],
    result: int,
) -> NetworkProgram:
    """Give every value a register, as few as there can be."""
    last = {origins[n][0]: number for number, e in enumerate(exchanges) for n in (e.one, e.other)}
    last[origins[result][0]] = len(exchanges)
    registers = dict(rows)
    free: list[int] = []
    program.registers = program.size
    for number, exchange in enumerate(exchanges):
        read = [origins[n] for n in (exchange.one, exchange.other)]
        places = [Place(registers[origin], shift) for origin, shift in read]
        done = {registers[origin] for origin, _ in read if last[origin] == number}
        # A value may replace one that is read at the same pixel, not one that is read ahead.
        ahead = {place.register for place in places if place.shift}
        free += sorted(done - ahead)
        written = []
        for value in exchange.results.values():
            if not free:
                free.append(program.registers)
                program.registers += 1
            registers[value] = free.pop()
            written.append(Place(registers[value], 0))
        free += sorted(done & ahead)
        kind = BOTH if len(written) == 2 else KINDS[next(iter(exchange.results))]
        if kind == BOTH and next(iter(exchange.results)) == "max":
            written.reverse()
        program.steps.append((kind, *map(program.at, (written[0], written[-1], *places))))  # type: ignore[arg-type]
    program.of_columns = sum(exchange.in_columns for exchange in exchanges)
    origin, shift = origins[result]
    program.result = program.at(Place(registers[origin], shift))
    return program
