"""The work of a worker: evaluating groups of calls, and adding up their results."""

from __future__ import annotations

import math
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halotile.errors import InputError, TaskFailed
from halotile.storage.disk.stored import Stored, store
from halotile.storage.rim import Array
from halotile.tasks.distributed.transport.calls import Call, TensorFunction, call_on_arrays, checked_values
from halotile.tasks.distributed.transport.tensors import (
    default_dtype,
    dtype_name,
    promoted_dtype,
    to_array,
    to_tensor,
)

PART = "part"
"""Prefix of the files of partial sums."""


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The results of some calls: one array for each slot, and the largest number of arrays at once."""

    arrays: dict[int, Stored]
    alive: int


@dataclass(frozen=True)
class CallWork:
    """Calls with their common inputs and settings; pickles to a few kilobytes."""

    folder: str  # folder of the results
    inputs: tuple[Stored, ...]  # arrays that calls refer to by position
    phase: str  # phase, what: name of the tasks, and the unit that a call's number counts, for messages
    what: str
    in_double: bool = False  # keep sums in double precision until the last
    device: str = "cpu"  # device of the computation
    # dtype of tensors for which a call names none: that of the driver
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def compute(self, calls: Sequence[Call], after: PartialSums | None = None) -> PartialSums:
        """Evaluate calls one after the other, and add up the values of each slot.

        ``after``: result that the task only waits for.
        """
        totals: dict[int, tuple[Array, str]] = {}
        for call in calls:
            for slot, (array, kind) in self._evaluate(call).items():
                self._add_to(totals, slot, array, kind)
        return self._store(totals)

    def compute_to_file(self, calls: Sequence[Call], name: str) -> None:
        """Evaluate calls and describe the results in a file: fetching from a worker takes longer."""
        path = Path(self.folder, name)
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(self.compute(calls)))
        partial.replace(path)

    def take_from_file(self, name: str) -> PartialSums:
        """Read the results that a file describes, and delete the file."""
        path = Path(self.folder, name)
        sums: PartialSums = pickle.loads(path.read_bytes())
        path.unlink()
        return sums

    def add(self, parts: Sequence[PartialSums]) -> PartialSums:
        """Add up several partial sums, slot by slot, in their order."""
        totals: dict[int, tuple[Array, str]] = {}
        for part in parts:
            for slot, stored in part.arrays.items():
                self._add_to(totals, slot, stored.load(), stored.kind)
        sums = self._store(totals)
        for part in parts:
            for stored in part.arrays.values():
                stored.delete()
        return PartialSums(sums.arrays, max(sums.alive, *(part.alive for part in parts)))

    def _add_to(self, totals: dict[int, tuple[Array, str]], slot: int, array: Array, kind: str) -> None:
        """Add an array to the total of a slot, in their common type."""
        if slot in totals:
            before, kind_before = totals[slot]
            array, kind = _sum(before, array, self.in_double), promoted_dtype(kind_before, kind)
        totals[slot] = array, kind

    def _store(self, totals: dict[int, tuple[Array, str]]) -> PartialSums:
        arrays = {slot: store(array, self.folder, kind, PART) for slot, (array, kind) in totals.items()}
        alive = math.ceil(len(list(Path(self.folder).glob(f"{PART}-*"))) / max(1, len(arrays)))
        return PartialSums(arrays, alive)

    def _evaluate(self, call: Call) -> dict[int, tuple[Array, str]]:
        try:
            inputs = (self.inputs[place] for place in call.inputs)
            tensors = [to_tensor(stored.load(), stored.kind, self.device) for stored in inputs]
            with torch.no_grad(), default_dtype(self.default_dtype):
                values = checked_values(call.function, call.function(*tensors))
            return {
                slot: (to_array(value), dtype_name(value))
                for slot, value in zip(call.slots, values, strict=True)
                if value is not None
            }
        except Exception as error:
            raise _task_failure(f"{self.phase} of {self.what} {call.number}", error) from None


def _task_failure(task: str, error: Exception) -> TaskFailed:
    """Return the error to raise for an exception that is being handled, with its traceback as a note."""
    failed = TaskFailed(f"{task} failed on a worker: {type(error).__name__}: {error}")
    failed.add_note(traceback.format_exc())
    return failed


def _sum(left: Array, right: Array, in_double: bool) -> Array:
    dtype: Any = None
    if in_double and left.dtype.kind in "fc":
        dtype = np.complex128 if left.dtype.kind == "c" else np.float64
    try:
        total: Array = np.add(left, right, dtype=dtype)
    except ValueError as error:
        raise InputError(
            f"results of shapes {left.shape} and {right.shape} cannot be added: the operators do not take images of one size. "
            "Write img_size=(channels, rows, columns) where an operator takes it, or reduce_op=None for a list."
        ) from error
    return total


def run_named_task(task: str, function: TensorFunction, *arrays: Array) -> list[Array]:
    """Return the values of a function of arrays, on a worker."""
    try:
        return call_on_arrays(function, *arrays)
    except Exception as error:
        raise _task_failure(task, error) from None


def add_arrays(arrays: Sequence[Array]) -> Array:
    """Add up arrays in their order."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
