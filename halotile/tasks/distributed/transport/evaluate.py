"""Batches of calls as differentiable operations: their derivatives are batches of calls again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import WrongKind
from halotile.tasks.distributed.engine import Engine
from halotile.tasks.distributed.transport.calls import Call, Derivative
from halotile.tasks.distributed.transport.tensors import tensor_kind_of, to_array, to_tensor

BACKWARD = "adjoint"
"""Phase of derivatives."""


@dataclass(frozen=True)
class Batch:
    """Calls that are evaluated together."""

    engine: Engine  # engine that evaluates them
    phase: str  # name of the tasks on the dashboard
    calls: tuple[Call, ...]  # calls; each refers to its inputs by their positions among the tensors
    totals: int  # number of slots, and so of results
    what: str = "operator"  # unit that a call's number counts, such as `operator` or `tile`

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Compute the totals; None for slots that no value was added to."""
        stored = [self.engine.put(to_array(tensor), tensor_kind_of(tensor)) for tensor in tensors]
        try:
            results = self.engine.run(self.phase, self.calls, stored, self.what)
        finally:
            for each in stored:
                each.delete()
        loaded = {slot: to_tensor(s.take(), s.kind, self.engine.device) for slot, s in results.items()}
        return [loaded.get(slot) for slot in range(self.totals)]

    def derivative(self, wanted: Sequence[bool], given: Sequence[bool]) -> Batch:
        """Return the batch that computes wanted gradients from all tensors and given cotangents."""
        slots_given = [slot for slot, is_given in enumerate(given) if is_given]
        places = {slot: len(wanted) + place for place, slot in enumerate(slots_given)}
        calls = []
        for call in self.calls:
            wanted_inputs = tuple(wanted[i] for i in call.inputs)
            given_values = tuple(slot in places for slot in call.slots)
            if any(wanted_inputs) and any(given_values):
                cotangents = (places[slot] for slot in call.slots if slot in places)
                function = Derivative(call.function, wanted_inputs, given_values)
                slots = tuple(i for i in call.inputs if wanted[i])
                calls.append(Call(function, (*call.inputs, *cotangents), slots, call.number))
        return Batch(self.engine, BACKWARD, tuple(calls), len(wanted), self.what)


def evaluate(batch: Batch, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the totals of a batch, differentiable any number of times."""
    engine = batch.engine
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) and not engine.is_lazy(tensor):
            raise WrongKind(
                f"{batch.phase} was given an object of type {type(tensor).__name__} in the place of a tensor. Write the tensor "
                "itself: lists are for measurements, one for each operator."
            )
    if any(engine.is_lazy(tensor) for tensor in tensors):
        arrays = [to_array(each) if isinstance(each, torch.Tensor) else each for each in tensors]
        return engine.lazy_totals(batch.phase, batch.calls, arrays, batch.totals)
    return list(_Evaluate.apply(batch, *tensors))


class _Evaluate(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of a batch: backward evaluates its derivative in the same way.

    ``setup_context`` is separate from ``forward`` so that ``torch.func`` accepts it as well.
    """

    @staticmethod
    def forward(batch: Batch, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(batch.values(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not any(ctx.needs_input_grad):
            return  # tensors of inference mode have no versions
        ctx.batch, *tensors = inputs
        # Not save_for_backward: each of several results may be differentiated by itself, one after the other.
        ctx.saved = [(tensor, tensor._version) for tensor in tensors]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = [tensor for tensor, _ in ctx.saved]
        if any(tensor._version != version for tensor, version in ctx.saved):
            raise RuntimeError(
                "an input of a distributed operation was changed in place before the backward pass. "
                "Write x = x - step instead of x -= step."
            )
        wanted = list(ctx.needs_input_grad[1:])
        derivative = ctx.batch.derivative(wanted, [cotangent is not None for cotangent in cotangents])
        if not derivative.calls:
            return (None,) * (1 + len(tensors))
        inputs = [*tensors, *(c for c in cotangents if c is not None)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return (None, *_Evaluate.apply(derivative, *inputs))
        return (None, *derivative.values(inputs))
