"""Functions of tensors that are evaluated on a worker, each with its derivative."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from halotile.tasks.distributed.transport.contents import contents_of
from halotile.tasks.distributed.transport.loaded_objects import LoadedObject, load_for_call
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.random_state import Draw
from halotile.tasks.operators.deepinv import COPIES

FACTORY_CACHE = 1024
"""Objects made by factories that a process keeps."""
Tensors = tuple[torch.Tensor | None, ...]


class PureFunction(Protocol):
    """A pure function of tensors; the objects it uses travel as ``Packed``."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Return the values."""


@dataclass(frozen=True)
class FactoryObject:
    """An object that a factory makes from a number, once per process."""

    factory: Packed  # `factory(index, device, shared)`
    index: int  # number of the object
    device: str = "cpu"  # device of its tensors

    def load(self, live: Sequence[torch.Tensor] = ()) -> LoadedObject:
        """Return the object, made on first use, or from the ``live`` tensors of one call."""
        if self.live:
            factory, shared = self.factory.load(live).value
            return LoadedObject(factory(self.index, torch.device(self.device), shared))
        key = self._key
        if key not in _factory_objects:
            while len(_factory_objects) >= FACTORY_CACHE:
                del _factory_objects[next(iter(_factory_objects))]
            factory, shared = self.factory.get()
            made = factory(self.index, torch.device(self.device), shared)
            _factory_objects[key] = LoadedObject(made)
        return _factory_objects[key]

    def discard(self) -> None:
        """Drop the object, so that it is made again on next use."""
        _factory_objects.pop(self._key, None)

    @property
    def live(self) -> int:
        """Number of tensors of the factory and its shared values that each call is given anew."""
        return self.factory.live

    @property
    def _key(self) -> tuple[str, int, str]:
        return self.factory.digest, self.index, self.device


_factory_objects: dict[tuple[str, int, str], LoadedObject] = {}

RemoteObject = Packed | FactoryObject


@dataclass(frozen=True)
class MethodCall:
    """``remote.name(*tensors, **kwargs)``."""

    remote: RemoteObject
    name: str  # name of the method
    kwargs: Packed | None = None  # keywords
    draw: Draw | None = None  # random numbers of the call
    kind: str | None = None  # name of the class of `deepinv.physics` that the object must be an instance of

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(self.draw, tensors, *self.sources) as (own, loaded, given):
            kwargs: Mapping[str, Any] = given or {}
            check_kind(loaded, self.kind)
            return (_without_unknown(getattr(loaded, self.name)(*own, **kwargs), tensors, loaded),)

    @property
    def sources(self) -> tuple[RemoteObject | None, ...]:
        """The objects, in the order in which the inputs end with their tensors."""
        return self.remote, self.kwargs


@dataclass(frozen=True)
class SensorCall:
    """The noise and the sensor model of a physics, applied to a measurement: what follows after ``A``."""

    physics: RemoteObject
    draw: Draw  # random numbers of the call

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(self.draw, tensors, *self.sources) as (own, physics):
            return (_without_unknown(physics.sensor(physics.noise(*own)), tensors, physics),)

    @property
    def sources(self) -> tuple[RemoteObject | None, ...]:
        """The objects, in the order in which the inputs end with their tensors."""
        return (self.physics,)


def _without_unknown(value: torch.Tensor, known: Sequence[torch.Tensor], *held: Any) -> torch.Tensor:
    """Return a value, unless a weight that the caller could not give a gradient to takes part in it.

    Parameters
    ----------
    value : Tensor
        The value.
    known : sequence of Tensor
        The inputs of the call, which get their gradients.
    *held : object
        Objects whose other tensors must not want gradients. Those that a method makes for itself may.
    """
    pending, seen, unknown = [getattr(value, "grad_fn", None)], set(), []
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            unknown += [] if leaf is None or any(leaf is tensor for tensor in known) else [leaf]
            pending += [following for following, _ in node.next_functions]
    inside = {id(tensor) for tensor in contents_of(*held)} if unknown else set()
    for leaf in unknown:
        if isinstance(leaf, torch.nn.Parameter) or id(leaf) in inside:
            raise ValueError(
                f"the operator has a weight of shape {tuple(leaf.shape)} that wants a gradient and exists on the worker alone, "
                "because a factory made it there, or an imported module holds it. Give it to the factory in shared=, hold it in "
                "the operator, or call requires_grad_(False) on it"
            )
    return value


def check_kind(value: Any, kind: str | None) -> None:
    """Refuse an object of a factory that is not an instance of this class of ``deepinv.physics``."""
    if kind is None:
        return
    import deepinv.physics

    if not isinstance(value, getattr(deepinv.physics, kind)):
        raise ValueError(
            f"the factory must return {kind} instances, and returned a {type(value).__name__}. "
            "Write type_object='physics' for operators that are not linear."
        )


@dataclass(frozen=True)
class FidelityCall:
    """``d(A x, y)``, or its gradient ``A^T d'(A x, y)``: forward and adjoint in one call."""

    fidelity: RemoteObject  # a `deepinv.optim.DataFidelity`
    physics: RemoteObject  # operator
    output: Literal["fn", "grad"]
    # positional arguments of the distance, and keywords of distance and operator
    arguments: Packed | None = None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(None, tensors, *self.sources) as ((x, y), fidelity, physics, given):
            args, kwargs = given or ((), {})
            predicted = physics.A(x, **kwargs)
            value = getattr(fidelity.d, self.output)(predicted, y, *args, **kwargs)
            value = value if self.output == "fn" else physics.A_vjp(x, value, **kwargs)
            return (_without_unknown(value, tensors, fidelity, physics),)

    @property
    def sources(self) -> tuple[RemoteObject | None, ...]:
        """The objects, in the order in which the inputs end with their tensors."""
        return self.fidelity, self.physics, self.arguments


@dataclass(frozen=True)
class SquareWeight:
    """The weight of ``|A x - y|²`` in a fidelity made by a factory; NaN for another distance."""

    fidelity: RemoteObject  # a `deepinv.optim.DataFidelity`

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        with load_for_call(None, tensors, self.fidelity) as (_, fidelity):
            weight = square_weight(fidelity)
        return (torch.full((1,), math.nan if weight is None else weight, dtype=torch.float64),)


def square_weight(fidelity: Any) -> float | None:
    """Return the weight of ``|A x - y|²``, or None for another distance."""
    from deepinv.optim.data_fidelity import L2

    is_square = type(fidelity) is L2 and not isinstance(fidelity.norm, torch.Tensor)
    return float(fidelity.norm) if is_square else None


@dataclass(frozen=True)
class Derivative:
    """The derivative of a function: from inputs and cotangents to gradients of the wanted inputs.

    It is a function like any other, so it has a derivative as well.
    """

    function: PureFunction  # function, which is evaluated again
    wanted: tuple[bool, ...]  # for each input, True if its gradient is wanted
    given: tuple[bool, ...]  # for each value, True if it has a cotangent

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        create_graph = torch.is_grad_enabled()
        count = len(self.wanted)
        inputs, cotangents = list(tensors[:count]), tensors[count:]
        with torch.enable_grad():
            for place, wanted in enumerate(self.wanted):
                if wanted and not inputs[place].requires_grad:
                    inputs[place] = inputs[place].detach().requires_grad_()
            results = zip(self.function(*inputs), self.given, strict=True)
            values = [value for value, given in results if given]
            pairs = [
                (v, c) for v, c in zip(values, cotangents, strict=True) if v is not None and v.requires_grad
            ]
            targets = [tensor for tensor, wanted in zip(inputs, self.wanted, strict=True) if wanted]
            if not pairs:
                return (None,) * len(targets)
            outputs, weights = zip(*pairs, strict=True)
            gradients: Tensors = torch.autograd.grad(
                outputs, targets, weights, create_graph=create_graph, allow_unused=True
            )
        return tuple(gradients)


def working_bytes(function: PureFunction, sizes: Sequence[int]) -> int:
    """Estimate the memory of a function of inputs of these sizes; 0 if it reads windows of them.

    An operator on whole images holds copies of image and measurement beside the mapped inputs. If only one of
    the two is an input, the other is taken to be as large. A derivative keeps the intermediate results
    besides.
    """
    if isinstance(function, Derivative):
        inputs, cotangents = sizes[: len(function.wanted)], sizes[len(function.wanted) :]
        inner = working_bytes(function.function, inputs)
        return inner and 2 * inner + sum(cotangents)
    if isinstance(function, MethodCall | FidelityCall | SensorCall):
        images = sizes[: len(sizes) - sum(source.live for source in function.sources if source is not None)]
        return sum(sizes) + COPIES * (2 * images[0] if len(images) == 1 else sum(images))
    return 0


@dataclass(frozen=True)
class Call:
    """One evaluation of a function: its inputs, and the totals that its values are added to."""

    function: PureFunction
    inputs: tuple[int, ...]  # positions of its inputs in a list of tensors
    slots: tuple[int, ...]  # for each value, the number of its total
    number: int  # number of the operator or tile, for messages. Totals are added up in the order of the calls
