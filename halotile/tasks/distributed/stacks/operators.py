"""The operators of a distributed stack: objects carried to the workers, or a factory that makes them there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.transport.calls import Made, Thing
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.packing import Packed, Packer

WORDS = "words"
"""The folder of keywords."""


@dataclass(frozen=True)
class Operators:
    """Numbered things on the workers.

    Parameters
    ----------
    things : tuple of Carried or Made
        Where they are.
    here : tuple of object
        The same in this process; none where a factory makes them.
    """

    things: tuple[Thing, ...]
    here: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.things)

    def chosen(self, numbers: Sequence[int]) -> Operators:
        """Those of these numbers."""
        return Operators(
            tuple(self.things[number] for number in numbers),
            tuple(self.here[number] for number in numbers) if self.here else (),
        )

    def repacked(self, changed: Mapping[int, Any]) -> Operators:
        """With these things, by their numbers, as they are now. What they were stays where it is, for gradients to come."""
        things = list(self.things)
        for number, thing in changed.items():
            place = things[number]
            assert isinstance(place, Packed)
            things[number] = Packer(thing, place.folder, place.device).packed()
        return Operators(tuple(things), self.here)


def pack_all(engine: Engine, things: Sequence[Any], here: Sequence[Any] | None = None) -> Operators:
    """Objects as they are now; what is done to them later is not seen. ``here`` is what they are in this process.

    Raises
    ------
    WrongKind
        With the number of one that cannot be pickled.
    """
    packed = tuple(_pack(engine, thing, f"operator {number}") for number, thing in enumerate(things))
    return Operators(packed, tuple(things if here is None else here))


def packer(engine: Engine, thing: Any) -> Packer:
    """Something that carries an object, as it is whenever it is asked."""
    return Packer(thing, tempfile.mkdtemp(dir=engine.folder), str(engine.device))


def pack(engine: Engine, thing: Any) -> Packed:
    """An object, put where workers find it."""
    return packer(engine, thing).packed()


def _pack(engine: Engine, thing: Any, name: str) -> Packed:
    """An object with a name for the message that it cannot be carried."""
    try:
        return pack(engine, thing)
    except WrongKind as error:
        raise WrongKind(f"{name}: {error}") from error


def make_all(
    engine: Engine, factory: Callable[..., Any], count: int | None, shared: Mapping[str, Any] | None
) -> Operators:
    """What a factory will make, each where it is first needed.

    Raises
    ------
    ConfigError
        When it is not said how many.
    WrongKind
        When it cannot be pickled.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"num_operators is {count!r}: how often the factory is to be called is not clear. "
            "When using a factory, write num_operators=4 or the like."
        )
    packed = _pack(engine, (factory, shared), "the factory and what it shares")
    return Operators(tuple(Made(packed, index, str(engine.device)) for index in range(count)))


def pack_note(engine: Engine, words: Any) -> Packed | None:
    """Keywords for a call, equal ones once; nothing where there are none.

    Raises
    ------
    ConfigError
        For a tensor that wants a gradient: it would get none.
    """
    if not words:
        return None
    if torch.is_grad_enabled() and (name := _wants_gradient(words)) is not None:
        raise ConfigError(
            f"{name} wants a gradient, and a distributed operator has gradients by its images alone. Write {name}.detach(), or "
            "call the operator without distribute."
        )
    folder = engine.folder / WORDS
    folder.mkdir(exist_ok=True)
    return Packer(words, folder, str(engine.device)).packed()


def _wants_gradient(words: Any, name: str = "an argument") -> str | None:
    """The name of a tensor among arguments that wants a gradient."""
    if isinstance(words, torch.Tensor):
        return name if words.requires_grad else None
    named: Any = ()
    if isinstance(words, Mapping):
        named = words.items()
    elif isinstance(words, list | tuple):
        named = ((name, each) for each in words)
    return next((found for key, each in named if (found := _wants_gradient(each, key)) is not None), None)
