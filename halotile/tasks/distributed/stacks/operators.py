"""The operators of a distributed stack: objects sent to the workers, or a factory that makes them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.transport.calls import Engine
from halotile.tasks.distributed.transport.objects import (
    FactoryObject,
    LiveTensors,
    Packed,
    Packer,
    RemoteObject,
    Versions,
    make_packer,
)
from halotile.tasks.distributed.transport.tensors import version_of


@dataclass(frozen=True)
class SentObject:
    """An object on the workers."""

    remote: RemoteObject  # object on the workers
    live: LiveTensors  # its tensors that want gradients: inputs of every call
    constant: Versions  # its other tensors, with their versions when they were sent
    local: Any = None  # same object in this process; None for one of a factory

    def repack(self, value: Any) -> SentObject:
        """Send a changed value. The files of the old one stay, for gradients still to be computed."""
        assert isinstance(self.remote, Packed)
        packer = Packer(value, self.remote.folder, self.remote.device, keeps_live=True)
        return replace(self, remote=packer.pack(), live=packer.live, constant=packer.constant)


SentObjects = tuple[SentObject, ...]


def live_tensors(sent: SentObjects) -> LiveTensors:
    """The tensors that want gradients, object by object."""
    return tuple(tensor for each in sent for tensor in each.live)


def check_unchanged(sent: SentObjects, what: str = "operator") -> None:
    """Refuse objects with a tensor that was changed since it was sent, or wants a gradient since: it would get none."""
    for number, each in enumerate(sent):
        for tensor, version in each.constant:
            is_late = tensor.requires_grad and torch.is_grad_enabled()
            if not is_late and version_of(tensor) == version:
                continue
            name = f"a tensor of shape {tuple(tensor.shape)} of {what} {number}"
            if is_late:
                raise ConfigError(
                    f"{name} wants a gradient since requires_grad_() was called on it, and did not when the {what} was "
                    "distributed. Call distribute(...) afterwards."
                )
            raise ConfigError(
                f"{name} was changed in place, and the workers have its values from before. Call distribute(...) "
                "afterwards, or requires_grad_() on the tensor before distribute(...): then each call has its values."
            )


@dataclass(eq=False)
class CommonOperators:
    """The operators of a stack, which its subsets share with it."""

    operators: SentObjects  # all of them, as they are now
    stored: tuple[tuple[Any, ...], LiveTensors] | None = None
    """The parameters of the last call that stored some, and their tensors, which stay alive: they are identified by id."""
    tried: dict[int, Any] = field(default_factory=dict)
    """Operators for blocks by number, or None for one that cannot be computed by blocks."""
    warned: set[str] = field(default_factory=set)
    """Methods that have warned."""


def chosen_numbers(count: int, which: slice | Sequence[int]) -> Sequence[int]:
    """Return the numbers of a slice, or of a sequence, among ``count`` operators.

    >>> list(chosen_numbers(5, slice(1, 3))), chosen_numbers(5, [4, -5])
    ([1, 2], [4, 0])
    """
    everything = range(count)
    if isinstance(which, slice):
        numbers: Sequence[int] = everything[which]
    else:
        given = np.asarray(which)  # not as it is: to Python, True is 1, and a mask would pick two operators
        is_list = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        if not is_list or not all(-count <= number < count for number in given):
            raise ConfigError(
                f"operators {which} were asked for, and there are {count}, from 0 to {count - 1}. Write a list of their numbers."
            )
        numbers = [everything[number] for number in given]
    if not numbers:
        raise ConfigError(f"none of {count} operators is taken. Write some, such as [0:1] or [[0, 2]].")
    return numbers


def send_all(engine: Engine, values: Sequence[Any], local: Sequence[Any] | None = None) -> SentObjects:
    """Send objects as they are now, without later changes. ``local`` are the objects to use in this process."""
    pairs = enumerate(zip(values, values if local is None else local, strict=True))
    return tuple(_send(engine, value, f"operator {number}", same) for number, (value, same) in pairs)


def _send(engine: Engine, value: Any, name: str, local: Any = None) -> SentObject:
    packer = make_packer(value, engine.folder, engine.device, keeps_live=True)
    try:
        return SentObject(packer.pack(), packer.live, packer.constant, local)
    except WrongKind as error:
        raise WrongKind(f"{name}: {error}") from error


def make_all(
    engine: Engine,
    factory: Callable[..., Any],
    count: int | None,
    shared: Mapping[str, Any] | None,
    kind: str | None = None,
) -> SentObjects:
    """Return the objects of a factory, each made when it is first needed, as instances of this class of ``deepinv.physics``."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"num_operators is {count!r}: the number of operators that the factory makes is not known. "
            "When using a factory, write num_operators=4 or the like."
        )
    sent = _send(engine, (factory, shared), "the factory and its shared values")
    assert isinstance(sent.remote, Packed)
    made = (FactoryObject(sent.remote, n, str(engine.device), kind, sent.remote.live) for n in range(count))
    return tuple(replace(sent, remote=remote) for remote in made)
