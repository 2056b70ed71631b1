"""Calls as a step of autograd: their derivatives are calls again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import WrongKind
from halotile.tasks.distributed.transport.calls import Call, Derivative
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.tensors import kind_of, to_array, to_tensor

BACKWARD = "adjoint"
"""The phase of derivatives."""


@dataclass(frozen=True)
class Batch:
    """Calls that are evaluated together.

    Parameters
    ----------
    engine : Engine
        Who evaluates them.
    phase : str
        What the dashboard calls them.
    calls : tuple of Call
        Each names its inputs by their places among the tensors.
    totals : int
        How many slots there are: so many tensors come out.
    what : str
        ``operator`` or ``tile``.
    """

    engine: Engine
    phase: str
    calls: tuple[Call, ...]
    totals: int
    what: str = "operator"

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The totals; None where nothing was added."""
        stored = [self.engine.put(to_array(tensor), kind_of(tensor)) for tensor in tensors]
        try:
            found = self.engine.run(self.phase, self.calls, stored, self.what)
        finally:
            for each in stored:
                each.delete()
        made = {slot: to_tensor(s.take(), s.kind, self.engine.device) for slot, s in found.items()}
        return [made.get(slot) for slot in range(self.totals)]

    def derivative(self, wanted: Sequence[bool], given: Sequence[bool]) -> Batch:
        """What gives the gradients of the wanted tensors, of the same tensors and the given cotangents."""
        place = len(wanted)
        cotangents: dict[int, int] = {}
        for slot, is_given in enumerate(given):
            if is_given:
                cotangents[slot] = place
                place += 1
        calls = []
        for call in self.calls:
            want = tuple(wanted[i] for i in call.inputs)
            gave = tuple(slot in cotangents for slot in call.slots)
            if any(want) and any(gave):
                extra = tuple(cotangents[slot] for slot in call.slots if slot in cotangents)
                slots = tuple(i for i in call.inputs if wanted[i])
                function = Derivative(call.function, want, gave)
                calls.append(Call(function, (*call.inputs, *extra), slots, call.number))
        return Batch(self.engine, BACKWARD, tuple(calls), len(wanted), self.what)


def evaluate(batch: Batch, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The totals of a batch, differentiable by its tensors as often as wanted.

    Raises
    ------
    WrongKind
        For what is no tensor.
    TaskFailed
        When a call fails; with the number of its operator or tile.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) and not batch.engine.is_lazy(tensor):
            raise WrongKind(
                f"{batch.phase} was given an object of type {type(tensor).__name__} in the place of a tensor. Write the tensor itself: lists are for "
                "measurements, one for each operator."
            )
    if any(batch.engine.is_lazy(tensor) for tensor in tensors):
        return batch.engine.later(batch.phase, batch.calls, tensors, batch.totals)
    return [_needed(value) for value in _Evaluate.apply(batch, *tensors)]


def _needed(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


class _Evaluate(torch.autograd.Function):  # type: ignore[misc]
    """Forward: the batch. Backward: its derivative, evaluated in the same way.

    Forward and context apart, so that ``torch.func`` takes it as well.
    """

    @staticmethod
    def forward(batch: Batch, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(batch.values(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not any(ctx.needs_input_grad):
            return  # tensors of an inference mode have no versions
        ctx.batch, *tensors = inputs
        # Not by save_for_backward: each of several results may be differentiated by itself, one after the other.
        ctx.kept = [(tensor, tensor._version) for tensor in tensors]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = [tensor for tensor, _ in ctx.kept]
        if any(tensor._version != version for tensor, version in ctx.kept):
            raise RuntimeError(
                "a tensor that went into a distributed operation was changed in place before the backward pass. "
                "Write x = x - step rather than x -= step."
            )
        wanted = list(ctx.needs_input_grad[1:])
        derivative = ctx.batch.derivative(wanted, [cotangent is not None for cotangent in cotangents])
        if not derivative.calls:
            return (None,) * (1 + len(tensors))
        both = [*tensors, *(c for c in cotangents if c is not None)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in both):
            return (None, *_Evaluate.apply(derivative, *both))
        return (None, *derivative.values(both))
