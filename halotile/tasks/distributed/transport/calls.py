"""Calls: functions of tensors that workers evaluate and add up, each with its derivative, which is a call again."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from halotile.errors import InputError, TaskFailed, WrongKind
from halotile.storage.disk.stored import Stored, store
from halotile.storage.rim import Array
from halotile.tasks.distributed.transport.objects import RemoteObject, contents_of, load_for_call
from halotile.tasks.distributed.transport.tensors import (
    Draw,
    check_tensor,
    default_dtype,
    dtype_name,
    promoted_dtype,
    to_array,
    to_tensor,
)
from halotile.tasks.operators.deepinv import COPIES

BACKWARD = "adjoint"  # phase of derivatives
Tensors = tuple[torch.Tensor | None, ...]
# A pure function of tensors that pickles to a few kilobytes: the objects it uses are `RemoteObject`.
TensorFunction = Callable[..., Tensors]


@dataclass(frozen=True)
class Call:
    """One evaluation of a function: its inputs, and the totals that its values are added to."""

    function: TensorFunction  # pure function of tensors
    inputs: tuple[int, ...]  # positions of its inputs in a list of tensors
    slots: tuple[int, ...]  # for each value, the number of its total
    number: int  # number of the operator or tile, for messages. Totals are added up in the order of the calls


class Engine(Protocol):
    """Evaluates calls on workers; arrays travel as files."""

    device: Any  # Torch device of the results
    seed: int | None  # seed of random numbers; None for different ones each time
    task_bytes: int | None  # memory that one task may use; None without a limit
    accumulate: str | None  # `float64` where sums over operators are kept in double precision
    streams: itertools.count[int]  # numbers that tell the random numbers of distributed objects apart

    @property
    def folder(self) -> Path:
        """Folder where arrays and objects are put for the workers."""

    def result_path(self, name: str) -> Path:
        """Path of the next result of this name, without its suffix."""

    def run(self, phase: str, calls: Sequence[Call], inputs: Sequence[Stored], what: str) -> dict[int, Stored]:
        """Return the total of each slot, added up in the order of the calls.

        ``phase``: name of the tasks on the dashboard; ``inputs``: arrays that calls refer to by position; ``what``: unit that a call's number counts:
        `operator` or `tile`.
        """

    def is_lazy(self, value: Any) -> bool:
        """Return True for an array that is computed later."""

    def run_lazily(
        self, phase: str, calls: Sequence[Call], arrays: Sequence[Any], like: Sequence[Any], what: str
    ) -> list[Any]:
        """Return the totals of calls on lazy arrays, as lazy arrays with the shapes and dtypes of ``like``."""


@dataclass(frozen=True)
class ObjectCall:
    """A function of tensors and of objects on the worker."""

    function: TensorFunction  # `function(tensors, *objects)` returns the values
    # objects. The inputs end with the tensors that they are given anew, in this order
    objects: tuple[RemoteObject | None, ...]
    draw: Draw | None = None  # random numbers of the call
    name: str = "the function"  # name of the function, for messages

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(self.draw, tensors, *self.objects) as (own, *loaded):
            values = self.function(own, *loaded)
            for value in values:
                _refuse_unknown_weights(value, tensors, loaded)
            return values

    def working_bytes(self, sizes: Sequence[int]) -> int:
        """Estimate the memory of a call on whole images.

        An operator holds copies of image and measurement beside the mapped inputs. If only one of the two is
        an input, the other is taken to be as large.
        """
        images = sizes[: len(sizes) - sum(source.live for source in self.objects if source is not None)]
        return sum(sizes) + COPIES * (2 * images[0] if len(images) == 1 else sum(images))


def _refuse_unknown_weights(value: torch.Tensor | None, known: Sequence[torch.Tensor], objects: Sequence[Any]) -> None:
    """Refuse a value in which a weight takes part that the caller could not give a gradient to.

    Tensors that want gradients and that a method makes for itself may take part.
    """
    pending, seen, unknown = [getattr(value, "grad_fn", None)], set(), []
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            unknown += [] if leaf is None or any(leaf is tensor for tensor in known) else [leaf]
            pending += [following for following, _ in node.next_functions]
    inside = {id(tensor) for tensor in contents_of(*objects)} if unknown else set()
    for leaf in unknown:
        if isinstance(leaf, torch.nn.Parameter) or id(leaf) in inside:
            raise ValueError(
                f"the operator has a weight of shape {tuple(leaf.shape)} that wants a gradient and exists on the worker alone, "
                "because a factory made it there, or an imported module holds it. Give it to the factory in shared=, hold it in "
                "the operator, or call requires_grad_(False) on it"
            )


@dataclass(frozen=True)
class Derivative:
    """The derivative of a function: from inputs and cotangents to the gradients of some inputs.

    It is a function like any other, so it has a derivative as well.
    """

    function: TensorFunction  # function, which is evaluated again
    needs_gradient: tuple[bool, ...]  # for each input, True if its gradient is needed
    has_cotangent: tuple[bool, ...]  # for each value, True if it has a cotangent

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        create_graph = torch.is_grad_enabled()
        count = len(self.needs_gradient)
        inputs, cotangents = list(tensors[:count]), tensors[count:]
        targets = []
        with torch.enable_grad():
            for place in itertools.compress(range(count), self.needs_gradient):
                if not inputs[place].requires_grad:
                    inputs[place] = inputs[place].detach().requires_grad_()
                targets.append(inputs[place])
            values = list(itertools.compress(self.function(*inputs), self.has_cotangent))
            pairs = [(v, c) for v, c in zip(values, cotangents, strict=True) if v is not None and v.requires_grad]
            if not pairs:
                return (None,) * len(targets)
            outputs, weights = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, targets, weights, create_graph=create_graph, allow_unused=True)
        return tuple(gradients)

    def working_bytes(self, sizes: Sequence[int]) -> int:
        """Estimate the memory: intermediate results are kept besides."""
        count = len(self.needs_gradient)
        inner = working_bytes(self.function, sizes[:count])
        return inner and 2 * inner + sum(sizes[count:])


def working_bytes(function: TensorFunction, sizes: Sequence[int]) -> int:
    """Estimate the memory of a function of inputs of these sizes; 0 if it reads windows of them."""
    return function.working_bytes(sizes) if isinstance(function, ObjectCall | Derivative) else 0


def derive(calls: Sequence[Call], needs_gradient: Sequence[bool], has_cotangent: Sequence[bool]) -> list[Call]:
    """Return the calls that compute gradients of tensors from all tensors, followed by the cotangents of slots."""
    slots = itertools.compress(itertools.count(), has_cotangent)
    places = {slot: len(needs_gradient) + place for place, slot in enumerate(slots)}
    derivatives = []
    for call in calls:
        needed = tuple(needs_gradient[place] for place in call.inputs)
        present = tuple(slot in places for slot in call.slots)
        if any(needed) and any(present):
            cotangents = (places[slot] for slot in call.slots if slot in places)
            function = Derivative(call.function, needed, present)
            targets = tuple(itertools.compress(call.inputs, needed))
            derivatives.append(Call(function, (*call.inputs, *cotangents), targets, call.number))
    return derivatives


def compute(
    engine: Engine,
    phase: str,
    calls: Sequence[Call],
    tensors: Sequence[torch.Tensor],
    slots: int,
    what: str = "operator",
) -> list[torch.Tensor | None]:
    """Compute the totals of calls, without gradients; None for slots that no value was added to."""
    stored = [store(to_array(tensor), engine.folder, dtype_name(tensor)) for tensor in tensors]
    try:
        results = engine.run(phase, calls, stored, what)
    finally:
        for each in stored:
            each.delete()
    loaded = {slot: to_tensor(s.take(), s.kind, engine.device) for slot, s in results.items()}
    return [loaded.get(slot) for slot in range(slots)]


def evaluate(
    engine: Engine,  # engine that evaluates them
    phase: str,  # name of the tasks on the dashboard
    calls: Sequence[Call],  # calls; each refers to its inputs by their positions among the tensors
    tensors: Sequence[Any],  # inputs
    slots: int,  # number of totals
    what: str = "operator",  # unit that a call's number counts, such as `operator` or `tile`
) -> list[Any]:
    """Compute the totals of calls, differentiable any number of times; of lazy arrays as lazy arrays."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) and not engine.is_lazy(tensor):
            raise WrongKind(
                f"{phase} was given an object of type {type(tensor).__name__} in the place of a tensor. Write the tensor "
                "itself: lists are for measurements, one for each operator."
            )
    if any(engine.is_lazy(tensor) for tensor in tensors):
        arrays = [to_array(each) if isinstance(each, torch.Tensor) else each for each in tensors]
        return engine.run_lazily(phase, calls, arrays, _examples(calls, arrays), what)
    return list(_Evaluate.apply(engine, what, phase, calls, slots, *tensors))


def _examples(calls: Sequence[Call], arrays: Sequence[Any]) -> list[Array]:
    """Return an array of the shape and dtype of each total, from calls on arrays of zeros."""
    found: dict[int, Array] = {}
    for call in calls:
        if not found.keys() >= set(call.slots):
            zeros = (np.zeros(arrays[place].shape, arrays[place].dtype) for place in call.inputs)
            found |= zip(call.slots, call_on_arrays(call.function, *zeros), strict=True)
    return [found[slot] for slot in sorted(found)]


def call_on_arrays(function: TensorFunction, *arrays: Array) -> list[Array]:
    """Return the values of a function of arrays."""
    with torch.no_grad():
        values = function(*(to_tensor(np.array(array)) for array in arrays))
    return [to_array(value) for value in checked_values(function, values) if value is not None]


def checked_values(function: TensorFunction, values: Tensors) -> Tensors:
    """Refuse values that are not tensors; those of a derivative may be None."""
    for value in values:
        if value is not None or not isinstance(function, Derivative):
            check_tensor(getattr(function, "name", "the function"), value)
    return values


class _Evaluate(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of calls: backward evaluates their derivatives in the same way.

    ``setup_context`` is separate from ``forward`` so that ``torch.func`` accepts it as well.
    """

    @staticmethod
    def forward(
        engine: Engine, what: str, phase: str, calls: Sequence[Call], slots: int, *tensors: torch.Tensor
    ) -> Tensors:
        return tuple(compute(engine, phase, calls, tensors, slots, what))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not any(ctx.needs_input_grad):
            return  # tensors of inference mode have no versions
        ctx.engine, ctx.what, _, ctx.calls, _, *tensors = inputs
        # Not save_for_backward: each of several results may be differentiated by itself, one after the other.
        ctx.saved = [(tensor, tensor._version) for tensor in tensors]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Tensors:
        tensors = [tensor for tensor, _ in ctx.saved]
        if any(tensor._version != version for tensor, version in ctx.saved):
            raise RuntimeError(
                "an input of a distributed operation was changed in place before the backward pass. "
                "Write x = x - step instead of x -= step."
            )
        present = [cotangent for cotangent in cotangents if cotangent is not None]
        calls = derive(ctx.calls, ctx.needs_input_grad[5:], [each is not None for each in cotangents])
        if not calls:
            return (None,) * (5 + len(tensors))
        # Not evaluate: without gradients of gradients there is no graph to keep.
        is_differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *present))
        run = _Evaluate.apply if is_differentiable else _Evaluate.forward
        settings = (ctx.engine, ctx.what, BACKWARD, calls, len(tensors))
        return (None,) * 5 + tuple(run(*settings, *tensors, *present))


PART = "part"  # prefix of the files of partial sums


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
    return functools.reduce(operator.add, arrays)
