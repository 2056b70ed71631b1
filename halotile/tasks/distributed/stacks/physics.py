"""A stack of operators whose forward calls run on workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from deepinv.distributed.distribute import DistributedStackedPhysics as Peer
from deepinv.utils.tensorlist import TensorList

from halotile.errors import ConfigError, WrongKind
from halotile.tasks.distributed.rewritten import rewritten
from halotile.tasks.distributed.stacks.operators import Operators, pack_note
from halotile.tasks.distributed.stacks.single import OnePhysics
from halotile.tasks.distributed.transport.calls import Call, Method, Noisy
from halotile.tasks.distributed.transport.engine import Engine
from halotile.tasks.distributed.transport.evaluate import Batch, evaluate
from halotile.tasks.distributed.transport.packing import Packed
from halotile.tasks.distributed.transport.random_state import Draws
from halotile.tasks.distributed.transport.typed import typed

GATHERING = ("naive", "concatenated", "broadcast")
REDUCTIONS = ("sum", "mean", None)
FORWARD, ADJOINT = "forward", "adjoint"
KEEPING = ("A", "forward", "A_adjoint", "A_adjoint_A", "A_vjp")
"""Methods that leave an operator with the parameters that they are called with, as those of deepinv do."""


class DistributedStackedPhysics(Peer):  # type: ignore[misc]
    """``A x = (A_1 x, ..., A_n x)``, each on a worker.

    It is one of deepinv's class for scripts that ask by ``isinstance``, and takes nothing from it.

    Parameters
    ----------
    ctx : Engine
        The context.
    operators : Operators
        What is stacked.
    dtype : torch.dtype, optional
        Kept for deepinv's sake; results have the type that the operators give.
    gather_strategy : str
        ``naive``, ``concatenated`` or ``broadcast``. All of them mean the same here: each result is a file of its own,
        read by the one process that wants it.
    exact : bool
        Whether local operators on large images are computed by direct sums alone.
    reach : int or "auto", optional
        How far, in pixels, operators look that are none of halotile's.
    is_one : bool
        Whether it stands for one operator and no stack: then a measurement is a tensor, and no list of one.

    Raises
    ------
    ConfigError
        For other words.
    """

    def __init__(
        self,
        ctx: Engine,
        operators: Operators,
        *,
        dtype: torch.dtype | None = None,
        gather_strategy: str = "concatenated",
        exact: bool = False,
        reach: Any = None,
        is_one: bool = False,
        **kwargs: Any,
    ) -> None:
        super(Peer, self).__init__(**kwargs)
        if gather_strategy not in GATHERING:
            raise ConfigError(
                f"gather_strategy is {gather_strategy!r}: it must be one of {', '.join(GATHERING)}."
            )
        self.ctx = ctx
        self.dtype = dtype or torch.float32
        self.gather_strategy = gather_strategy
        self.exact = exact
        self.reach = reach
        self.is_one = is_one
        self.operators = operators
        self.num_operators = len(operators)
        self.local_indexes = list(range(len(operators)))
        self.local_physics = list(operators.here)
        self._draws = Draws(ctx.seed, ctx.stream())
        if is_one and operators.here:
            self.noise_model = operators.here[0].noise_model
        self._noise = (self.noise_model,)  # in a tuple, so that it is no second module

    def __len__(self) -> int:
        return self.num_operators

    def __getitem__(self, which: int | slice) -> Any:
        """One operator, or a stack of those of a slice."""
        if isinstance(which, slice):
            return self._some(range(self.num_operators)[which])
        return self.one(self, range(self.num_operators)[which])

    def _some(self, numbers: range) -> Self:
        """A stack of these operators."""
        if not numbers:
            raise ConfigError(
                f"the slice takes none of {self.num_operators} operators. Write one that takes some, such as [0:1]."
            )
        return type(self)(
            self.ctx,
            self.operators.chosen(numbers),
            dtype=self.dtype,
            gather_strategy=self.gather_strategy,
            exact=self.exact,
            reach=self.reach,
        )

    @typed
    def A(self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = None, **kwargs: Any) -> Any:
        """``(A_1 x, ..., A_n x)``, or their sum or mean."""
        return self._measured("A", x, gather, reduce_op, kwargs)

    @typed
    def forward(
        self, x: torch.Tensor, gather: bool = True, reduce_op: str | None = None, **kwargs: Any
    ) -> Any:
        """``A x`` with the operators' noise.

        Noise is drawn from the context's seed, or from a generator of the noise model, by the number of the call and that of
        the operator: the same for any number of workers.
        """
        if self.noise_model is not self._noise[0]:  # it was assigned
            self.set_noise_model(self.noise_model)
        return self._measured("forward", x, gather, reduce_op, kwargs, draws=True)

    @typed
    def A_vjp(
        self, x: torch.Tensor, v: Any, gather: bool = True, reduce_op: str | None = "sum", **kwargs: Any
    ) -> Any:
        """``sum_i J_i^T v_i`` with the derivatives ``J_i`` at ``x``; with ``reduce_op=None`` the list of them."""
        uses = [(0, number + 1) for number in range(self.num_operators)]
        return self._applied(ADJOINT, "A_vjp", [x, *self._parts(v)], uses, reduce_op, kwargs)

    def update(self, **kwargs: Any) -> None:
        """Change parameters of the operators and their noise, such as ``filter``, here and for all calls to come."""
        self._changed("update", kwargs)

    def update_parameters(self, **kwargs: Any) -> None:
        """Change parameters of the operators, here and for all calls to come."""
        self._changed("update_parameters", kwargs)

    def set_noise_model(self, noise_model: Any, **kwargs: Any) -> None:
        """Give every operator this noise, here and for all calls to come."""
        self._changed("set_noise_model", {"noise_model": noise_model, **kwargs})
        self.noise_model = noise_model
        self._noise = (noise_model,)

    def _changed(self, method: str, words: Mapping[str, Any], numbers: Iterable[int] | None = None) -> None:
        if not words:
            return
        if not self.operators.here:
            raise ConfigError(
                f"{method} has nothing to change: a factory makes the operators on the workers. Write distribute(...) anew, "
                "with other shared values."
            )
        which = range(self.num_operators) if numbers is None else numbers
        for number in which:
            getattr(self.operators.here[number], method)(**words)
        changed = {number: rewritten(self.operators.here[number], self.exact) for number in which}
        self.operators = self.operators.repacked(changed)
        self._kept = None

    def _keep(self, name: str, words: Mapping[str, Any], packed: Packed | None, *numbers: int) -> None:
        """Leave operators with the parameters of a call, as deepinv does, unless a factory makes them on the workers."""
        if name not in KEEPING or packed is None or not self.operators.here:
            return
        method = "update" if name == "forward" else "update_parameters"
        if self._kept != (kept := (method, numbers, packed.digest)):
            self._changed(method, words, numbers or None)
            self._kept = kept

    _kept: tuple[str, tuple[int, ...], str] | None = None
    """What the last call left the operators with."""

    def _parts(self, y: Any) -> list[torch.Tensor]:
        """One measurement for each operator."""
        is_single = isinstance(y, torch.Tensor) or self.ctx.is_lazy(y)
        if not isinstance(y, list | tuple | TensorList) and not (is_single and self.num_operators == 1):
            what = (
                f"one array of shape {tuple(y.shape)}"
                if is_single
                else f"an object of type {type(y).__name__}"
            )
            raise WrongKind(
                f"{what} was given as the measurements of {self.num_operators} operators. Write a list or a TensorList, with one "
                "measurement for each operator."
            )
        parts = [y] if is_single else list(y)
        if len(parts) != self.num_operators:
            raise ConfigError(
                f"{len(parts)} measurements were given for {self.num_operators} operators. Write one for each."
            )
        return parts

    def _measured(
        self, name: str, x: torch.Tensor, gather: bool, reduce_op: str | None, words: Any, draws: bool = False
    ) -> Any:
        uses = [(0,)] * self.num_operators
        result = self._applied(FORWARD, name, [x], uses, reduce_op, words, draws=draws)
        return self._listed(result, gather) if reduce_op is None else result

    def _listed(self, seen: Sequence[Any], gather: bool) -> Any:
        """Measurements as they are given: a ``TensorList``, a list of arrays, or that of one operator."""
        if self.is_one:
            return seen[0]
        return TensorList(seen) if gather and all(isinstance(each, torch.Tensor) for each in seen) else seen

    def _applied(
        self,
        phase: str,
        name: str,
        tensors: Sequence[torch.Tensor],
        uses: Sequence[tuple[int, ...]],
        reduce_op: str | None,
        words: Any,
        draws: bool = False,
    ) -> Any:
        """A method of every operator: the list of results, or what ``reduce_op`` makes of it."""
        if "return_graph_anchor" in words:
            raise ConfigError(
                "a DataFidelity that deepinv distributed was given a physics of halotile's. Distribute both by halotile: "
                "from halotile import distribute."
            )
        check_reduction("reduce_op", reduce_op)
        packed = pack_note(self.ctx, words)
        self._keep(name, words, packed)
        draw = self._draws.next() if draws else None
        calls = tuple(
            Call(
                Method(thing, name, packed, draw and draw.of(number), self.kind),
                used,
                (0 if reduce_op else number,),
                number,
            )
            for number, (thing, used) in enumerate(zip(self.operators.things, uses, strict=True))
        )
        found = evaluate(Batch(self.ctx, phase, calls, 1 if reduce_op else self.num_operators), tensors)
        if reduce_op is None:
            return found
        return found[0] / self.num_operators if reduce_op == "mean" else found[0]

    def applied_by(self, number: int, name: str, tensors: list[torch.Tensor], words: Any) -> torch.Tensor:
        """A method of one operator."""
        packed = pack_note(self.ctx, words)
        self._keep(name, words, packed, number)
        method = Method(self.operators.things[number], name, packed, kind=self.kind)
        call = Call(method, tuple(range(len(tensors))), (0,), number)
        return evaluate(Batch(self.ctx, FORWARD if name == "A" else ADJOINT, (call,), 1), tensors)[0]

    def _noisy(self, seen: Sequence[torch.Tensor]) -> list[Any]:
        """Measurements with the noise that the operators' own forward calls would give them."""
        draw = self._draws.next()
        calls = tuple(
            Call(Noisy(thing, draw.of(number)), (number,), (number,), number)
            for number, thing in enumerate(self.operators.things)
        )
        return evaluate(Batch(self.ctx, FORWARD, calls, self.num_operators), seen)

    kind: str | None = None
    """Class of ``deepinv.physics`` that operators made by a factory have to be of."""
    one: type[OnePhysics] = OnePhysics
    """What stands for one operator."""


def check_reduction(name: str, word: str | None) -> None:
    """Refuse what is no way to add up."""
    if word not in REDUCTIONS:
        raise ConfigError(f"{name} is {word!r}. Write 'sum', 'mean', or None for a list.")
