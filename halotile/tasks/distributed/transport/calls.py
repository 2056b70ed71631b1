"""Functions of tensors that are evaluated on a worker, each with its derivative."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from halotile.tasks.distributed.transport.loaded_objects import Loaded, lent
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.random_state import Draw
from halotile.tasks.operators.deepinv import COPIES

Tensors = tuple[torch.Tensor | None, ...]


class Function(Protocol):
    """A pure function of tensors. What it is made of travels as :class:`~halotile.tasks.distributed.transport.packing.Carried`."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Its values."""
        ...


@dataclass(frozen=True)
class Made:
    """What a factory makes of a number, made once in a process.

    Parameters
    ----------
    factory : Packed
        ``factory(index, device, shared)``.
    index : int
        Which one.
    device : str
        Where its tensors are to be.
    """

    factory: Packed
    index: int
    device: str = "cpu"

    def loaded(self) -> Loaded:
        """The thing itself."""
        key = (self.factory.digest, self.index, self.device)
        if key not in _made:
            while len(_made) >= KEPT:
                del _made[next(iter(_made))]
            factory, shared = self.factory.get()
            _made[key] = Loaded(factory(self.index, torch.device(self.device), shared))
        return _made[key]

    def forget(self) -> None:
        """Make it anew next time."""
        _made.pop((self.factory.digest, self.index, self.device), None)


KEPT = 1024
"""Things made by factories that a process keeps."""
_made: dict[tuple[str, int, str], Loaded] = {}

Thing = Packed | Made


@dataclass(frozen=True)
class Method:
    """``thing.name(*tensors, **words)``.

    Parameters
    ----------
    thing : Carried or Made
        Whose method it is.
    name : str
        Of the method.
    words : Carried, optional
        Keywords, constants to autograd.
    draw : Draw, optional
        What random numbers it has, wherever it runs.
    kind : str, optional
        Name of a class of ``deepinv.physics`` that the thing has to be of.
    """

    thing: Thing
    name: str
    words: Packed | None = None
    draw: Draw | None = None
    kind: str | None = None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with lent(self.draw, self.thing, self.words) as (thing, given):
            words: Mapping[str, Any] = given or {}
            if self.kind is not None:
                check_kind(thing, self.kind)
            return (getattr(thing, self.name)(*tensors, **words),)


@dataclass(frozen=True)
class Noisy:
    """What a sensor makes of a measurement and its noise: the part of a physics that comes after ``A``.

    Parameters
    ----------
    physics : Carried or Made
        Whose noise and sensor they are.
    draw : Draw
        What random numbers it has, wherever it runs.
    """

    physics: Thing
    draw: Draw

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with lent(self.draw, self.physics) as (physics,):
            return (physics.sensor(physics.noise(*tensors)),)


def check_kind(thing: Any, kind: str) -> None:
    """Refuse what a factory should not have made."""
    import deepinv.physics

    if not isinstance(thing, getattr(deepinv.physics, kind)):
        raise ValueError(
            f"the factory must return {kind} instances, and returned a {type(thing).__name__}. "
            "Write type_object='physics' for operators that are not linear."
        )


@dataclass(frozen=True)
class Misfit:
    """``d(A x, y)``, or its gradient ``A^T d'(A x, y)``: forward and adjoint in one call.

    Parameters
    ----------
    fidelity : Carried or Made
        A ``deepinv.optim.DataFidelity``.
    physics : Carried or Made
        The operator.
    wants : str
        ``fn`` or ``grad``.
    words : Packed
        Positional arguments of the distance, and keywords that distance and operator take.
    """

    fidelity: Thing
    physics: Thing
    wants: str
    words: Packed | None = None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        with lent(None, self.fidelity, self.physics, self.words) as (fidelity, physics, given):
            distance = fidelity.d
            rest, words = given or ((), {})
            seen = physics.A(x, **words)
            if self.wants == "fn":
                return (distance.fn(seen, y, *rest, **words),)
            return (physics.A_vjp(x, distance.grad(seen, y, *rest, **words), **words),)


@dataclass(frozen=True)
class SquareWeight:
    """How much ``|A x - y|²`` counts in a fidelity that a worker made; NaN where its distance is another one.

    Parameters
    ----------
    fidelity : Carried or Made
        A ``deepinv.optim.DataFidelity``.
    """

    fidelity: Thing

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with lent(None, self.fidelity) as (fidelity,):
            weight = square_weight(fidelity)
        return (torch.full((1,), math.nan if weight is None else weight, dtype=torch.float64),)


def square_weight(fidelity: Any) -> float | None:
    """How much ``|A x - y|²`` counts; None where the distance is another one."""
    from deepinv.optim.data_fidelity import L2

    plain = type(fidelity) is L2 and not isinstance(fidelity.norm, torch.Tensor)
    return float(fidelity.norm) if plain else None


@dataclass(frozen=True)
class Derivative:
    """Of a function: its inputs and the cotangents of its values in, gradients of the wanted inputs out.

    It is a function like others, so it has a derivative as well.

    Parameters
    ----------
    of : Function
        What is differentiated; it is evaluated again.
    wanted : tuple of bool
        For each input, whether its gradient is wanted.
    given : tuple of bool
        For each value, whether it has a cotangent.
    """

    of: Function
    wanted: tuple[bool, ...]
    given: tuple[bool, ...]

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        higher = torch.is_grad_enabled()
        count = len(self.wanted)
        inputs, cotangents = list(tensors[:count]), tensors[count:]
        with torch.enable_grad():
            for place, wanted in enumerate(self.wanted):
                if wanted and not inputs[place].requires_grad:
                    inputs[place] = inputs[place].detach().requires_grad_()
            values = [value for value, given in zip(self.of(*inputs), self.given, strict=True) if given]
            pairs = [
                (v, c) for v, c in zip(values, cotangents, strict=True) if v is not None and v.requires_grad
            ]
            sought = [tensor for tensor, wanted in zip(inputs, self.wanted, strict=True) if wanted]
            found = (
                torch.autograd.grad(
                    [value for value, _ in pairs],
                    sought,
                    [cotangent for _, cotangent in pairs],
                    create_graph=higher,
                    allow_unused=True,
                )
                if pairs
                else [None] * len(sought)
            )
        return tuple(found)


def held_bytes(function: Function, given: Sequence[int]) -> int:
    """About what a function holds at once, of arrays of these sizes; 0 for those that read windows of them.

    An operator on whole images holds copies of image and measurement beside what is mapped. Where only one of the two is
    given, the other is taken to be as large. A derivative keeps what lies between besides.
    """
    if isinstance(function, Derivative):
        inputs, cotangents = given[: len(function.wanted)], given[len(function.wanted) :]
        inner = held_bytes(function.of, inputs)
        return inner and 2 * inner + sum(cotangents)
    if isinstance(function, Method | Misfit | Noisy):
        return sum(given) + COPIES * (2 * given[0] if len(given) == 1 else sum(given))
    return 0


@dataclass(frozen=True)
class Call:
    """One evaluation: a function, which tensors go in, and which totals its values are added to.

    Parameters
    ----------
    function : Function
        What is evaluated.
    inputs : tuple of int
        Places of its inputs in a list of tensors.
    slots : tuple of int
        For each value the total that it is part of.
    number : int
        Of the operator or tile, for messages. Totals are added up in the order of the calls.
    """

    function: Function
    inputs: tuple[int, ...]
    slots: tuple[int, ...]
    number: int
