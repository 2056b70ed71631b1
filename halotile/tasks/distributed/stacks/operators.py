"""The operators of a distributed stack: objects sent to the workers, or a factory that makes them there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.transport.calls import FactoryObject, RemoteObject
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.packing import Packed, Packer

ARGUMENTS_FOLDER = "words"


@dataclass(frozen=True)
class Operators:
    """Numbered objects on the workers.

    Parameters
    ----------
    remote : tuple of Packed or FactoryObject
        The objects on the workers.
    local : tuple of object
        The same objects in this process; empty for those of a factory.
    """

    remote: tuple[RemoteObject, ...]
    local: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.remote)

    def select(self, numbers: Sequence[int]) -> Operators:
        """Return the objects of these numbers."""
        local = tuple(self.local[number] for number in numbers) if self.local else ()
        return Operators(tuple(self.remote[number] for number in numbers), local)

    def repack(self, changed: Mapping[int, Any]) -> Operators:
        """Replace objects by number. The files of the old ones stay, for gradients still to be computed."""
        remote = list(self.remote)
        for number, value in changed.items():
            packed = remote[number]
            assert isinstance(packed, Packed)
            remote[number] = Packer(value, packed.folder, packed.device).pack()
        return Operators(tuple(remote), self.local)


def pack_all(engine: Engine, values: Sequence[Any], local: Sequence[Any] | None = None) -> Operators:
    """Pack objects as they are now, without later changes. ``local`` are the objects to use in this process.

    Raises
    ------
    WrongKind
        With the number of one that cannot be pickled.
    """
    packed = tuple(_pack_named(engine, value, f"operator {number}") for number, value in enumerate(values))
    return Operators(packed, tuple(values if local is None else local))


def make_packer(engine: Engine, value: Any) -> Packer:
    """Return a packer for an object, with a folder of its own."""
    return Packer(value, tempfile.mkdtemp(dir=engine.folder), str(engine.device))


def _pack_named(engine: Engine, value: Any, name: str) -> Packed:
    """Pack an object, and name it in the error if it cannot be sent."""
    try:
        return make_packer(engine, value).pack()
    except WrongKind as error:
        raise WrongKind(f"{name}: {error}") from error


def make_all(
    engine: Engine, factory: Callable[..., Any], count: int | None, shared: Mapping[str, Any] | None
) -> Operators:
    """Return the objects of a factory, each made when it is first needed.

    Raises
    ------
    ConfigError
        Without a valid count.
    WrongKind
        When the factory cannot be pickled.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"num_operators is {count!r}: the number of operators that the factory makes is not known. "
            "When using a factory, write num_operators=4 or the like."
        )
    packed = _pack_named(engine, (factory, shared), "the factory and its shared values")
    return Operators(tuple(FactoryObject(packed, index, str(engine.device)) for index in range(count)))


def pack_arguments(engine: Engine, arguments: Any) -> Packed | None:
    """Pack arguments of a call, equal ones once; None if there are none.

    Raises
    ------
    ConfigError
        For a tensor that requires a gradient: it would get none.
    """
    if not arguments:
        return None
    if torch.is_grad_enabled() and (name := _name_requiring_grad(arguments)) is not None:
        raise ConfigError(
            f"{name} wants a gradient, and distributed operators have gradients with respect to their images alone. Write "
            f"{name}.detach(), or call the operator without distribute."
        )
    folder = engine.folder / ARGUMENTS_FOLDER
    folder.mkdir(exist_ok=True)
    return Packer(arguments, folder, str(engine.device)).pack()


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
