"""Distributed stacks: operators sent to the workers or made there by a factory, and their forward calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from deepinv.distributed.distribute import DistributedStackedPhysics as DeepinvClass
from deepinv.physics import LinearPhysics, Physics
from deepinv.utils.tensorlist import TensorList

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.stacks.blockwise import rewrite
from halotile.tasks.distributed.transport import objects
from halotile.tasks.distributed.transport.calls import Call, Engine, ObjectCall, Tensors, evaluate
from halotile.tasks.distributed.transport.tensors import DrawSequence, version_of
from halotile.tasks.distributed.transport.type_conversion import convert_types


@dataclass(frozen=True)
class SentObject:
    """An object on the workers."""

    remote: objects.RemoteObject  # object on the workers
    live: objects.LiveTensors  # its tensors that want gradients: inputs of every call
    constant: objects.Versions  # its other tensors, with their versions when they were sent
    local: Any = None  # same object in this process; None for one of a factory

    def repack(self, value: Any) -> SentObject:
        """Send a changed value. The files of the old one stay, for gradients still to be computed."""
        assert isinstance(self.remote, objects.Packed)
        packer = objects.Packer(value, self.remote.folder, self.remote.device, keeps_live=True)
        return replace(self, remote=packer.pack(), live=packer.live, constant=packer.constant)


SentObjects = tuple[SentObject, ...]


def live_tensors(sent: SentObjects) -> objects.LiveTensors:
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
    # The parameters of the last call that stored some, and their tensors, which stay alive: they are identified by id.
    stored: tuple[tuple[Any, ...], objects.LiveTensors] | None = None
    # Operators for blocks by number, or None for one that cannot be computed by blocks.
    tried: dict[int, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # methods that have warned


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
    packer = objects.make_packer(value, engine.folder, engine.device, keeps_live=True)
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
    assert isinstance(sent.remote, objects.Packed)
    made = (objects.FactoryObject(sent.remote, n, str(engine.device), kind, sent.remote.live) for n in range(count))
    return tuple(replace(sent, remote=remote) for remote in made)


GATHER_STRATEGIES = ("naive", "concatenated", "broadcast")
REDUCTIONS = ("sum", "mean", None)
FORWARD, ADJOINT = "forward", "adjoint"
# Methods that store the parameters they are called with in the operator, as deepinv's do.
UPDATING_METHODS = ("A", "forward", "A_adjoint", "A_adjoint_A", "A_vjp")


class SingleOperator(Physics):  # type: ignore[misc]
    """One operator of a stack, on the workers. ``stack``: the stack; ``number``: number of the operator."""

    def __init__(self, stack: DistributedStackedPhysics, number: int) -> None:
        models = {}
        if local := stack.operators[number].local:
            models = {"noise_model": local.noise_model, "sensor_model": local.sensor_model}
        super().__init__(**models)
        self._stack = (stack,)  # in a tuple, so that it is not a submodule
        self.number = number

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i x``."""
        return self._remote_call("A", [x], kwargs)

    def A_vjp(self, x: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``J_i^T v`` with the derivative at ``x``."""
        return self._remote_call("A_vjp", [x, v], kwargs)

    def _remote_call(self, name: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = self._stack[0]._remote_call(name, tensors, (), "sum", kwargs, only=self.number)
        return result


class SingleLinearOperator(SingleOperator, LinearPhysics):  # type: ignore[misc]
    """One operator of a stack of linear operators."""

    def A_adjoint(self, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T y``."""
        return self._remote_call("A_adjoint", [y], kwargs)

    def A_adjoint_A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T A_i x``."""
        return self._remote_call("A_adjoint_A", [x], kwargs)


class DistributedStackedPhysics(DeepinvClass):  # type: ignore[misc]
    """``A x = (A_1 x, ..., A_n x)``, each on a worker.

    It derives from deepinv's class for scripts that test by ``isinstance``, and uses none of its methods.

    ``ctx``: the context; ``common``: the operators, and what else a stack and its subsets have in common; ``numbers``: the operators of this stack
    among them; all of them when left out; ``dtype``: accepted for compatibility with deepinv; results have the dtype that the operators return;
    ``gather_strategy``: ``naive``, ``concatenated`` or ``broadcast``. All of them mean the same here: each result is a file of its own, read by the
    one process that wants it; ``exact``: compute local operators on large images by direct sums alone; ``reach``: reach in pixels of operators that
    are not halotile's; ``is_single``: the stack stands for a single operator: then a measurement is a tensor, not a list of one.
    """

    single_operator: type[SingleOperator] = SingleOperator  # class of a single operator of the stack

    def __init__(
        self,
        ctx: Engine,
        common: CommonOperators,
        numbers: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        gather_strategy: str = "concatenated",
        exact: bool = False,
        reach: Any = None,
        is_single: bool = False,
        **kwargs: Any,
    ) -> None:
        kind = LinearPhysics if isinstance(self, LinearPhysics) else Physics
        kind.__init__(self, **kwargs)
        if gather_strategy not in GATHER_STRATEGIES:
            raise ConfigError(
                f"gather_strategy is {gather_strategy!r}: it must be one of {', '.join(GATHER_STRATEGIES)}."
            )
        self.ctx = ctx
        self.dtype = dtype or torch.float32
        self.gather_strategy = gather_strategy
        self.exact = exact
        self.reach = reach
        self.is_single = is_single
        self._draws = DrawSequence(ctx.seed, next(ctx.streams))
        self._common = common
        self._numbers = tuple(range(len(common.operators)) if numbers is None else numbers)
        self.num_operators = len(self._numbers)
        self.local_indexes = list(range(self.num_operators))
        self.local_physics = [each.local for each in self.operators if each.local is not None]
        if is_single and self.local_physics:
            self.noise_model = self.local_physics[0].noise_model
        self._noise = (self.noise_model,)  # in a tuple, so that it is not a second submodule

    @property
    def physics_list(self) -> list[SingleOperator]:
        """The single operators, as in a stack of deepinv's."""
        return [self[number] for number in range(self.num_operators)]

    @property
    def operators(self) -> SentObjects:
        """The operators of this stack, as they are now."""
        return tuple(self._common.operators[number] for number in self._numbers)

    def __len__(self) -> int:
        return self.num_operators

    def __getitem__(self, which: int | slice | Sequence[int]) -> Any:
        """Return one operator, or a stack of those of a slice or a sequence of numbers.

        Nothing is sent again, and a change of an operator by one of the stacks is a change for the other.
        """
        if isinstance(which, int | np.integer):
            return self.single_operator(self, range(self.num_operators)[which])
        numbers = chosen_numbers(self.num_operators, which)
        return type(self)(
            self.ctx,
            self._common,
            [self._numbers[number] for number in numbers],
            dtype=self.dtype,
            gather_strategy=self.gather_strategy,
            exact=self.exact,
            reach=self.reach,
        )

    @convert_types
    def A(self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = None, **kwargs: Any) -> Any:
        """``(A_1 x, ..., A_n x)``, or their sum or mean."""
        return self._gather(self._remote_call("A", [x], (), reduce_op, kwargs), gather, reduce_op)

    @convert_types
    def forward(self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = None, **kwargs: Any) -> Any:
        """``A x`` with the operators' noise.

        Noise is drawn from the context's seed, or from a generator of the noise model, by the number of the
        call and that of the operator: the same for any number of workers.
        """
        if self.noise_model is not self._noise[0]:  # it was assigned
            self.set_noise_model(self.noise_model)
        results = self._remote_call("forward", [x], (), reduce_op, kwargs)
        return self._gather(results, gather, reduce_op)

    @convert_types
    def A_vjp(self, x: torch.Tensor, v: Any, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any) -> Any:
        """``sum_i J_i^T v_i`` with derivatives at ``x``; for ``reduce_op=None`` the list of terms."""
        return self._remote_call("A_vjp", [x], self._measurements(v), reduce_op, kwargs)

    def update(self, **kwargs: Any) -> None:
        """Change parameters of operators and noise, such as ``filter``, here and for all later calls."""
        self._change("update", kwargs)

    def update_parameters(self, **kwargs: Any) -> None:
        """Change parameters of the operators, here and for all later calls."""
        self._change("update_parameters", kwargs)

    def set_noise_model(self, noise_model: Any, **kwargs: Any) -> None:
        """Set the noise model of every operator, here and for all later calls."""
        self._change("set_noise_model", {"noise_model": noise_model, **kwargs})
        self.noise_model = noise_model
        self._noise = (noise_model,)

    def _change(self, method: str, kwargs: Mapping[str, Any], numbers: Sequence[int] = ()) -> None:
        """Call a method that changes operators, by default those of this stack, and send them again."""
        if not kwargs:
            return
        common = self._common
        operators = list(common.operators)
        if operators[0].local is None:
            raise ConfigError(
                f"{method} has nothing to change: a factory makes the operators on the workers. Call distribute(...) again "
                "with other shared values."
            )
        changed = numbers or self._numbers
        for number in changed:
            getattr(operators[number].local, method)(**kwargs)
        for number in changed:
            operators[number] = operators[number].repack(rewrite(operators[number].local, self.exact))
        common.operators = tuple(operators)
        common.stored = None
        common.tried.clear()

    def _store_parameters(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        packed: objects.Packed | None,
        live: objects.LiveTensors,
        numbers: tuple[int, ...],
    ) -> None:
        """Store the parameters of a call in the operators, as deepinv does, except in those of a factory."""
        if name not in UPDATING_METHODS or packed is None or self.operators[0].local is None:
            return
        method = "update" if name == "forward" else "update_parameters"
        parameters = (method, numbers, packed.digest, *((id(each), version_of(each)) for each in live))
        if self._common.stored is None or self._common.stored[0] != parameters:
            self._change(method, kwargs, numbers)
            self._common.stored = parameters, live

    def _measurements(self, y: Any) -> list[torch.Tensor]:
        """Return the list of measurements, one for each operator."""
        is_array = isinstance(y, torch.Tensor) or self.ctx.is_lazy(y)
        if not isinstance(y, list | tuple | TensorList) and not (is_array and self.num_operators == 1):
            given = f"one array of shape {tuple(y.shape)}" if is_array else f"an object of type {type(y).__name__}"
            raise WrongKind(
                f"{given} was given as the measurements of {self.num_operators} operators. Write a list or a TensorList, with one "
                "measurement for each operator."
            )
        measurements = [y] if is_array else list(y)
        if len(measurements) != self.num_operators:
            raise ConfigError(
                f"{len(measurements)} measurements were given for {self.num_operators} operators. Write one for each."
            )
        return measurements

    def _gather(self, results: Any, gather: bool, reduce_op: str | None) -> Any:
        """Return measurements as a ``TensorList``, as a list of arrays, or as that of a single operator."""
        if reduce_op is not None:
            return results
        if self.is_single:
            return results[0]
        is_tensors = all(isinstance(result, torch.Tensor) for result in results)
        return TensorList(results) if gather and is_tensors else results

    def _remote_call(
        self,
        name: str,
        shared: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        reduce_op: str | None,
        kwargs: Any,
        only: int | None = None,
    ) -> Any:
        """Call a method of every operator, or of one, and return the list of results or its reduction.

        Its arguments are the shared tensors, followed by the operator's own one, if there are any.
        """
        if "return_graph_anchor" in kwargs:
            raise ConfigError(
                "a DataFidelity that deepinv distributed was given a physics of halotile's. Distribute both by halotile: "
                "from halotile import distribute."
            )
        check_reduction("reduce_op", reduce_op)
        if only is None and not kwargs:
            results = self._compute_blocks(name, [*shared, *own], reduce_op)
            if results is not None:
                return results
        packed, live = objects.pack_arguments(kwargs, self.ctx.folder, self.ctx.device)
        numbers = range(self.num_operators) if only is None else [only]
        self._store_parameters(name, kwargs, packed, live, tuple(self._numbers[number] for number in numbers))
        check_unchanged(self.operators)
        draw = self._draws.next() if name == "forward" and only is None else None
        operators = {number: self.operators[number] for number in numbers}
        calls = {
            number: ObjectCall(
                partial(call_method, name), (sent.remote, packed), draw and draw.for_number(number), name
            )
            for number, sent in operators.items()
        }
        held = [(*sent.live, *live) for sent in operators.values()]
        phase = FORWARD if name in ("A", "forward") else ADJOINT
        return evaluate_reduced(self.ctx, phase, calls, shared, own, reduce_op, held)

    def _compute_blocks(self, name: str, tensors: Sequence[Any], reduce_op: str | None) -> Any:
        """Compute large images of local operators by blocks; None for others."""
        return None

    def _add_noise(self, measurements: Sequence[torch.Tensor]) -> list[Any]:
        """Add the noise that the operators' own forward calls would add."""
        draw = self._draws.next()
        operators = self.operators
        calls = {n: ObjectCall(add_noise, (o.remote,), draw.for_number(n)) for n, o in enumerate(operators)}
        live = [sent.live for sent in operators]
        noisy: list[Any] = evaluate_reduced(self.ctx, FORWARD, calls, (), measurements, None, live)
        return noisy


def call_method(name: str, tensors: Sequence[torch.Tensor], operator: Any, kwargs: Any) -> Tensors:
    """Return ``operator.name(*tensors, **kwargs)``."""
    return (getattr(operator, name)(*tensors, **(kwargs or {})),)


def add_noise(tensors: Sequence[torch.Tensor], physics: Any) -> Tensors:
    """Apply the noise and the sensor model of a physics to a measurement: what follows after ``A``."""
    return (physics.sensor(physics.noise(*tensors)),)


def evaluate_reduced(
    engine: Engine,
    phase: str,
    functions: Mapping[int, ObjectCall],
    shared: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    reduction: str | None,
    live: Sequence[objects.LiveTensors],
) -> Any:
    """Evaluate the function of each operator, by number, and return the list of values or its reduction.

    Its inputs are the shared tensors, followed by the operator's own one, if there are any, and by those that
    its objects are given anew. One that several operators hold is one input, so its gradient is one sum.
    """
    common = tuple(range(len(shared)))
    inputs = [*shared, *own]
    places: dict[tuple[int, int], int] = {}
    calls = []
    for slot, ((number, function), held) in enumerate(zip(functions.items(), live, strict=True)):
        used = (*common, len(shared) + slot) if own else common
        earlier: Counter[int] = Counter()
        for tensor in held:
            # One that a call holds twice, such as an operator and its keyword, is two inputs.
            key = id(tensor), earlier[id(tensor)]
            earlier[id(tensor)] += 1
            if key not in places:
                places[key] = len(inputs)
                inputs.append(tensor)
            used = (*used, places[key])
        calls.append(Call(function, used, (0 if reduction else slot,), number))
    values = evaluate(engine, phase, calls, inputs, 1 if reduction else len(calls))
    if reduction is None:
        return values
    return values[0] / len(calls) if reduction == "mean" else values[0]


def check_reduction(name: str, reduction: str | None) -> None:
    """Refuse an unknown reduction."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"{name} is {reduction!r}. Write 'sum', 'mean', or None for a list.")
