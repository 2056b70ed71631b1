"""What a worker does: a group of calls, or the sum of what groups came to."""

from __future__ import annotations

import math
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halotile.errors import InputError, TaskFailed
from halotile.tasks.distributed.transport.calls import Call, Derivative, Function
from halotile.tasks.distributed.transport.stored import Array, Stored, store
from halotile.tasks.distributed.transport.tensors import (
    check_tensor,
    kind_of,
    kind_of_both,
    loaded,
    to_array,
    to_tensor,
)

PART = "part"
"""How the files of partial sums begin."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What some calls came to: one array for each slot, and how many arrays there were at once."""

    arrays: dict[int, Stored]
    alive: int


@dataclass(frozen=True)
class Work:
    """Calls with what they have in common; pickles to a few kilobytes.

    Parameters
    ----------
    folder : str
        Where results go.
    inputs : tuple of Stored
        What calls name by places.
    phase, what : str
        For messages.
    wide : bool
        Whether sums are kept in double precision until the last.
    device : str
        What is computed on.
    """

    folder: str
    inputs: tuple[Stored, ...]
    phase: str
    what: str
    wide: bool = False
    device: str = "cpu"

    def compute(self, calls: Sequence[Call], after: Parts | None = None) -> Parts:
        """Evaluate calls one after the other, adding up what goes to the same slot.

        Parameters
        ----------
        calls : sequence of Call
            What is evaluated.
        after : Parts, optional
            What has to be there first; it is not used.

        Raises
        ------
        TaskFailed
            With the number of the call that failed.
        """
        totals: dict[int, tuple[Array, str]] = {}
        for call in calls:
            for slot, (array, kind) in self._evaluate(call).items():
                self._enter(totals, slot, array, kind)
        return self._keep(totals)

    def file(self, calls: Sequence[Call], name: str) -> None:
        """Evaluate calls, and leave what they came to in a file of this name: to ask a worker for it takes longer."""
        path = Path(self.folder, name)
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(self.compute(calls)))
        partial.replace(path)

    def filed(self, name: str) -> Parts:
        """What a file of this name says, which is forgotten."""
        path = Path(self.folder, name)
        parts: Parts = pickle.loads(path.read_bytes())
        path.unlink()
        return parts

    def add(self, parts: Sequence[Parts]) -> Parts:
        """The sums of several parts, slot by slot, in their order."""
        totals: dict[int, tuple[Array, str]] = {}
        for part in parts:
            for slot, stored in part.arrays.items():
                self._enter(totals, slot, stored.load(), stored.kind)
        kept = self._keep(totals)
        for part in parts:
            for stored in part.arrays.values():
                stored.delete()
        return Parts(kept.arrays, max(kept.alive, *(part.alive for part in parts)))

    def _enter(self, totals: dict[int, tuple[Array, str]], slot: int, array: Array, kind: str) -> None:
        """Add an array to what is in a slot, in the type of both."""
        if slot in totals:
            before, known = totals[slot]
            array, kind = _sum(before, array, self.wide), kind_of_both(known, kind)
        totals[slot] = array, kind

    def _keep(self, totals: dict[int, tuple[Array, str]]) -> Parts:
        arrays = {slot: store(array, self.folder, kind, PART) for slot, (array, kind) in totals.items()}
        alive = math.ceil(len(list(Path(self.folder).glob(f"{PART}-*"))) / max(1, len(arrays)))
        return Parts(arrays, alive)

    def _evaluate(self, call: Call) -> dict[int, tuple[Array, str]]:
        try:
            tensors = [loaded(self.inputs[place], self.device) for place in call.inputs]
            with torch.no_grad():
                values = call.function(*tensors)
            for value in values:
                _check_value(call.function, value)
            return {
                slot: (to_array(value), kind_of(value))
                for slot, value in zip(call.slots, values, strict=True)
                if value is not None
            }
        except Exception as error:
            raise failure(f"{self.phase} of {self.what} {call.number}", error) from None


def failure(task: str, error: Exception) -> TaskFailed:
    """What is told of an error that is being handled: which task, and the lines where it came from."""
    failed = TaskFailed(f"{task} failed on a worker: {type(error).__name__}: {error}")
    failed.add_note(traceback.format_exc())
    return failed


def _check_value(function: Function, value: Any) -> None:
    """Refuse what is no tensor; where something has no derivative there is none."""
    if value is not None or not isinstance(function, Derivative):
        check_tensor(getattr(function, "name", "the function"), value)


def _sum(left: Array, right: Array, wide: bool) -> Array:
    wider: Any = None
    if wide and left.dtype.kind in "fc":
        wider = np.complex128 if left.dtype.kind == "c" else np.float64
    try:
        added: Array = np.add(left, right, dtype=wider)
    except ValueError as error:
        raise InputError(
            f"results of shapes {left.shape} and {right.shape} were to be added up: the operators do not go with images of one "
            "size. Write img_size=(channels, rows, columns) where an operator takes it, or reduce_op=None for a list."
        ) from error
    return added


def on_arrays(function: Function, place: int, *arrays: Array) -> Array:
    """One value of a function, of arrays."""
    with torch.no_grad():
        value = function(*(to_tensor(np.array(array), str(array.dtype)) for array in arrays))[place]
    _check_value(function, value)
    assert value is not None
    return to_array(value)


def on_arrays_named(task: str, function: Function, place: int, *arrays: Array) -> Array:
    """The same on a worker.

    Raises
    ------
    TaskFailed
        With the name of the task that failed.
    """
    try:
        return on_arrays(function, place, *arrays)
    except Exception as error:
        raise failure(task, error) from None


def outcome(function: Function, place: int, arrays: Sequence[Array]) -> tuple[tuple[int, ...], Any]:
    """Shape and type of one value of a function."""
    found = on_arrays(function, place, *arrays)
    return found.shape, found.dtype


def add_arrays(arrays: Sequence[Array]) -> Array:
    """Their sum, in their order."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
