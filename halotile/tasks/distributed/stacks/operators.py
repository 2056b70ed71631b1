"""The operators of a distributed stack: objects sent to the workers, or a factory that makes them there."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.engine import Engine
from halotile.tasks.distributed.transport.calls import FactoryObject, RemoteObject
from halotile.tasks.distributed.transport.packing import Packed, Packer
from halotile.tasks.distributed.transport.tensors import version_of

ARGUMENTS_FOLDER = "words"
Held = tuple[torch.Tensor, ...]
"""Tensors that an object holds."""
Versions = tuple[tuple[torch.Tensor, int | None], ...]
"""Tensors that an object holds, with their versions."""


@dataclass(frozen=True)
class Operators:
    """Numbered objects on the workers."""

    remote: tuple[RemoteObject, ...]  # objects on the workers
    local: tuple[Any, ...]  # same objects in this process; empty for those of a factory
    live: tuple[Held, ...]  # tensors of each object that want gradients: inputs of every call
    constant: tuple[Versions, ...]  # other tensors of each object, with their versions when they were sent

    def __len__(self) -> int:
        return len(self.remote)

    def select(self, numbers: Sequence[int]) -> Operators:
        """Return the objects of these numbers."""

        def pick(held: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(held[number] for number in numbers) if held else ()

        return Operators(pick(self.remote), pick(self.local), pick(self.live), pick(self.constant))

    @property
    def all_live(self) -> Held:
        """The tensors that want gradients, object by object."""
        return tuple(itertools.chain(*self.live))

    def check(self, what: str = "operator") -> None:
        """Refuse objects of which a tensor was changed since it was sent, or wants a gradient since: it would get none."""
        for number, held in enumerate(self.constant):
            for tensor, version in held:
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

    def repack(self, changed: Mapping[int, Any]) -> Operators:
        """Replace objects by number. The files of the old ones stay, for gradients still to be computed."""
        rows = list(zip(self.remote, self.live, self.constant, strict=True))
        for number, value in changed.items():
            packed, *_ = rows[number]
            assert isinstance(packed, Packed)
            packer = Packer(value, packed.folder, packed.device, keeps_live=True)
            rows[number] = packer.pack(), packer.live, packer.constant
        remote, live, constant = zip(*rows, strict=True)
        return Operators(remote, self.local, live, constant)


@dataclass(eq=False)
class CommonOperators:
    """The operators of a stack, which its subsets share with it."""

    operators: Operators  # all of them, as they are now
    stored: tuple[tuple[Any, ...], Held] | None = None
    """The parameters of the last call that stored some, and their tensors, which stay alive: they are told apart by id."""
    tried: dict[int, Any] = field(default_factory=dict)
    """Operators for blocks by number, or None for one that cannot be computed by blocks."""
    warned: set[str] = field(default_factory=set)
    """Methods that have warned."""


def chosen_numbers(count: int, which: slice | Sequence[int]) -> Sequence[int]:
    """Return the numbers of a slice, or of a sequence, among ``count`` operators.

    Examples
    --------
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


def pack_all(engine: Engine, values: Sequence[Any], local: Sequence[Any] | None = None) -> Operators:
    """Pack objects as they are now, without later changes. ``local`` are the objects to use in this process."""
    rows = [_pack_named(engine, value, f"operator {number}") for number, value in enumerate(values)]
    remote, live, constant = zip(*rows, strict=True) if rows else ((), (), ())
    return Operators(remote, tuple(values if local is None else local), live, constant)


def make_packer(engine: Engine, value: Any, keeps_live: bool = False) -> Packer:
    """Return a packer for an object, with a folder of its own."""
    return Packer(value, tempfile.mkdtemp(dir=engine.folder), str(engine.device), keeps_live)


def _pack_named(engine: Engine, value: Any, name: str) -> tuple[Packed, Held, Versions]:
    """Pack an object, and name it in the error if it cannot be sent; return its live and constant tensors as well."""
    packer = make_packer(engine, value, keeps_live=True)
    try:
        return packer.pack(), packer.live, packer.constant
    except WrongKind as error:
        raise WrongKind(f"{name}: {error}") from error


def make_all(
    engine: Engine, factory: Callable[..., Any], count: int | None, shared: Mapping[str, Any] | None
) -> Operators:
    """Return the objects of a factory, each made when it is first needed."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"num_operators is {count!r}: the number of operators that the factory makes is not known. "
            "When using a factory, write num_operators=4 or the like."
        )
    packed, live, constant = _pack_named(engine, (factory, shared), "the factory and its shared values")
    remote = tuple(FactoryObject(packed, index, str(engine.device)) for index in range(count))
    return Operators(remote, (), (live,) * count, (constant,) * count)


def pack_live(engine: Engine, arguments: Any) -> tuple[Packed | None, Held]:
    """Pack arguments of a call, None if there are none; return the tensors among them that want gradients as well."""
    if not arguments:
        return None, ()
    packer = Packer(arguments, _arguments_folder(engine), str(engine.device), keeps_live=True)
    return packer.pack(), packer.live


def pack_arguments(engine: Engine, arguments: Any) -> Packed | None:
    """Pack arguments of a call that are constants, equal ones once; None if there are none."""
    if not arguments:
        return None
    if torch.is_grad_enabled() and (name := _name_requiring_grad(arguments)) is not None:
        raise ConfigError(
            f"{name} wants a gradient, and lies inside another argument of a denoiser, where it would get none. Give the tensor itself "
            f"as an argument, or write {name}.detach()."
        )
    return Packer(arguments, _arguments_folder(engine), str(engine.device)).pack()


def _arguments_folder(engine: Engine) -> Path:
    folder = engine.folder / ARGUMENTS_FOLDER
    folder.mkdir(exist_ok=True)
    return folder


def _name_requiring_grad(arguments: Any, name: str = "an argument") -> str | None:
    """Name of a tensor among arguments that requires a gradient."""
    if isinstance(arguments, torch.Tensor):
        return name if arguments.requires_grad else None
    entries: Iterable[Any] = ()
    if isinstance(arguments, Mapping):
        entries = arguments.items()
    elif isinstance(arguments, list | tuple):
        entries = ((name, entry) for entry in arguments)
    names = (_name_requiring_grad(entry, key) for key, entry in entries)
    return next((found for found in names if found is not None), None)
