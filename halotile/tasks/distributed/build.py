"""Distributed objects, made of what ``distribute`` is given."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halotile.errors import ConfigError, MissingPackage, WrongKind
from halotile.tasks.distributed.kinds import KINDS, recognise, unstacked
from halotile.tasks.distributed.stacks.operators import Operators, make_all, pack_all
from halotile.tasks.distributed.tiling.processing import DistributedProcessing, TilingOptions
from halotile.tasks.distributed.transport.engine import Engine


def build(
    thing: Any,
    ctx: Engine,
    kind: str,
    *,
    count: int | None,
    shared: Mapping[str, Any] | None,
    tiling: TilingOptions,
    reduction: str | None = "sum",
    **options: Any,
) -> Any:
    """The distributed form of an object.

    Parameters
    ----------
    thing : object
        A physics, a denoiser, a fidelity, several of them, or what makes them.
    ctx : Engine
        The context.
    kind : str
        One of the kinds, or ``auto``.
    count : int, optional
        How many operators a factory makes.
    shared : mapping, optional
        What a factory is given besides.
    tiling : TilingOptions
        For denoisers.
    reduction : str, optional
        For fidelities. The adjoint of a stack is a sum, whatever this says.
    **options
        For stacks.

    Raises
    ------
    ConfigError
        When it is not clear what the object is, or it is not what it is said to be.
    """
    kind = recognise(thing) if kind == "auto" else kind
    if kind not in KINDS:
        raise ConfigError(f"type_object is {kind!r}. Write one of auto, {', '.join(KINDS)}.")
    if kind in ("physics", "linear_physics"):
        return stack_of(thing, ctx, kind, count, shared, options)
    if kind == "data_fidelity":
        return fidelity_of(thing, ctx, count, shared, reduction)
    if kind == "parameters":
        return _parameters_of(thing, ctx)
    if kind == "module":
        return model_of(thing, ctx, tiling)
    if kind == "prior":
        return prior_of(thing, ctx, tiling)
    if not callable(thing):
        raise WrongKind(
            f"the denoiser is a {type(thing).__name__}, which cannot be called. Write a network or a function."
        )
    return processing_of(thing, ctx, tiling)


def stack_of(
    thing: Any,
    ctx: Engine,
    kind: str,
    count: int | None,
    shared: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Any:
    """A distributed stack: of a stack, a list, one physics, or what a factory makes."""
    try:
        from deepinv.physics import Physics

        from halotile.tasks.distributed.rewritten import Rewriting, rewritten
        from halotile.tasks.distributed.stacks.linear import DistributedStackedLinearPhysics
        from halotile.tasks.distributed.stacks.physics import DistributedStackedPhysics
    except ImportError as error:
        raise MissingPackage(
            "a distributed physics is one of deepinv's. Install it: pip install 'halotile[deepinv]'"
        ) from error
    exact = bool(options.get("exact"))
    kinds = {"physics": DistributedStackedPhysics, "linear_physics": DistributedStackedLinearPhysics}
    if isinstance(thing, Physics | list | tuple):
        parts = unstacked([thing] if isinstance(thing, Physics) else thing)
        wrong = [type(part).__name__ for part in parts if not isinstance(part, Physics)]
        if wrong or not parts:
            raise WrongKind(
                f"the list of physics holds {', '.join(wrong) or 'nothing'}. Write deepinv.physics objects."
            )
        _tell_of_weights(parts)
        operators = pack_all(ctx, [rewritten(part, exact) for part in parts], here=parts)
        is_one = isinstance(thing, Physics) and not hasattr(thing, "physics_list")
        return kinds[kind](ctx, operators, is_one=is_one, **options)
    return kinds[kind](ctx, make_all(ctx, Rewriting(thing, exact), count, shared), **options)


def _tell_of_weights(parts: Sequence[Any]) -> None:
    """Say that weights of operators get no gradients."""
    for number, part in enumerate(parts):
        name = next((name for name, weight in part.named_parameters() if weight.requires_grad), None)
        if name is not None:
            warnings.warn(
                f"operator {number} ({type(part).__name__}) has weights that want gradients ({name}): distributed operators have "
                "gradients by their images alone. Write requires_grad_(False), or train without distribute.",
                stacklevel=4,
            )


def fidelity_of(
    thing: Any,
    ctx: Engine,
    count: int | None = None,
    shared: Mapping[str, Any] | None = None,
    reduction: str | None = "sum",
) -> Any:
    """A distributed fidelity: one for all operators, one for each, or what a factory makes."""
    from deepinv.optim.data_fidelity import DataFidelity, StackedPhysicsDataFidelity

    from halotile.tasks.distributed.stacks.fidelity import DistributedDataFidelity

    if isinstance(thing, StackedPhysicsDataFidelity):
        thing = list(thing.data_fidelity_list)
    if isinstance(thing, DataFidelity):
        return DistributedDataFidelity(ctx, pack_all(ctx, [thing]), copy.deepcopy(thing), reduction=reduction)
    operators: Operators
    if isinstance(thing, list | tuple):
        operators = pack_all(ctx, thing)
    else:
        operators = make_all(ctx, thing, count, shared)
    return DistributedDataFidelity(ctx, operators, reduction=reduction)


def processing_of(thing: Any, ctx: Engine, tiling: TilingOptions) -> DistributedProcessing:
    """A denoiser or function on tiles; of deepinv's class too where the script has imported deepinv, which takes seconds."""
    if "deepinv" not in sys.modules:
        return DistributedProcessing(ctx, thing, tiling)
    from halotile.tasks.distributed.tiling.peer import DeepinvProcessing

    return DeepinvProcessing(ctx, thing, tiling)


def prior_of(thing: Any, ctx: Engine, tiling: TilingOptions) -> Any:
    """The same prior with its denoiser distributed.

    Raises
    ------
    ConfigError
        For a prior without one.
    """
    denoiser = getattr(thing, "denoiser", None)
    if denoiser is None:
        raise ConfigError(
            f"the prior {type(thing).__name__} has no denoiser: how it runs on tiles is not clear. Distribute what "
            "computes its prox: distribute(prior.prox, ctx, type_object='denoiser')."
        )
    same = copy.copy(thing)
    same._modules = dict(thing._modules)
    same.denoiser = processing_of(denoiser, ctx, tiling)
    return same


def model_of(model: Any, ctx: Engine, tiling: TilingOptions) -> Any:
    """An unfolded model of ``deepinv.optim`` with its fidelities and denoisers distributed, in place.

    Raises
    ------
    WrongKind
        For other models.
    """
    from deepinv.optim import BaseOptim

    if not isinstance(model, BaseOptim):
        raise WrongKind(
            f"type_object='module' only supports deepinv BaseOptim models with unfold=True, and {type(model).__name__} is "
            "none. Write type_object='denoiser' to run a network on tiles."
        )
    if not model.unfold:
        raise WrongKind(
            "the model has unfold=False. Distribute its physics, its fidelity and its denoiser, and make it of those."
        )
    from halotile.tasks.distributed.stacks.fidelity import DistributedDataFidelity

    if model.data_fidelity is not None:
        model.data_fidelity = torch.nn.ModuleList(
            each if isinstance(each, DistributedDataFidelity) else fidelity_of(each, ctx)
            for each in model.data_fidelity
        )
    for prior in model.prior or ():
        denoiser = getattr(prior, "denoiser", None)
        if denoiser is not None and not isinstance(denoiser, DistributedProcessing):
            prior.denoiser = processing_of(denoiser, ctx, tiling)
    model._deepinv_dist_sync = None  # by which deepinv tells that nothing is left to do
    return model


def _parameters_of(thing: Any, ctx: Engine) -> Any:
    """The parameters as they are: one driver has all of their gradients."""
    one = isinstance(thing, torch.nn.Parameter)
    for each in [thing] if one else thing:
        if not isinstance(each, torch.nn.Parameter):
            raise WrongKind(
                f"the list of parameters holds a {type(each).__name__}. Write torch.nn.Parameter objects."
            )
    return thing if one else list(thing)
