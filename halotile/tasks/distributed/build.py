"""Construction of distributed objects from the arguments of ``distribute``."""

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from halotile.errors import ConfigError, MissingPackage, WrongKind
from halotile.tasks.distributed.stacks.physics import CommonOperators, make_all, send_all
from halotile.tasks.distributed.tiling.processing import DistributedProcessing, TilingOptions
from halotile.tasks.distributed.transport.calls import Engine
from halotile.tasks.distributed.transport.objects import wants_gradients

KINDS = ("physics", "linear_physics", "denoiser", "prior", "data_fidelity", "module", "parameters")


def build(
    value: Any,
    ctx: Engine,
    kind: str,
    *,
    count: int | None,
    shared: Mapping[str, Any] | None,
    tiling: TilingOptions,
    reduction: str | None = "sum",
    **options: Any,
) -> Any:
    """Return the distributed form of an object, with ``options`` of stacks.

    ``count`` and ``shared`` are for a factory, ``tiling`` is for denoisers, and ``reduction`` for fidelities: the
    adjoint of a stack is a sum in any case.
    """
    kind = detect_kind(value) if kind == "auto" else kind
    if kind not in KINDS:
        raise ConfigError(f"type_object is {kind!r}. Write one of auto, {', '.join(KINDS)}.")
    if kind in ("physics", "linear_physics"):
        return build_stack(value, ctx, kind, count, shared, options)
    if kind == "data_fidelity":
        return build_fidelity(value, ctx, count, shared, reduction)
    if kind == "parameters":
        return _check_parameters(value)
    builders = {"module": build_model, "prior": build_prior, "denoiser": build_processing}
    return builders[kind](value, ctx, tiling)


def build_stack(
    value: Any, ctx: Engine, kind: str, count: int | None, shared: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Any:
    """Return a distributed stack: of a stack, a list, a single physics, or the objects of a factory."""
    try:
        from deepinv.physics import LinearPhysics, Physics

        from halotile.tasks.distributed.stacks.blockwise import RewritingFactory, rewrite
        from halotile.tasks.distributed.stacks.linear import DistributedStackedLinearPhysics
        from halotile.tasks.distributed.stacks.physics import DistributedStackedPhysics
    except ImportError as error:
        raise MissingPackage("a distributed physics needs deepinv: pip install 'halotile[deepinv]'") from error
    exact = bool(options.get("exact"))
    is_linear = kind != "physics"
    stack = DistributedStackedLinearPhysics if is_linear else DistributedStackedPhysics
    base = LinearPhysics if is_linear else Physics
    if not isinstance(value, Physics | list | tuple):
        factory = value if wants_gradients((value, shared)) else RewritingFactory(value, exact)
        return stack(
            ctx, CommonOperators(make_all(ctx, factory, count, shared, base.__name__ if is_linear else None)), **options
        )
    parts = unstack([value] if isinstance(value, Physics) else value)
    wrong = [type(part).__name__ for part in parts if not isinstance(part, base)]
    if wrong or not parts:
        raise WrongKind(
            f"the list of physics holds {', '.join(wrong) or 'nothing'}. Write {base.__name__} objects of deepinv."
        )
    operators = send_all(ctx, [rewrite(part, exact) for part in parts], local=parts)
    is_single = isinstance(value, Physics) and not hasattr(value, "physics_list")
    return stack(ctx, CommonOperators(operators), is_single=is_single, **options)


def build_fidelity(
    value: Any,
    ctx: Engine,
    count: int | None = None,
    shared: Mapping[str, Any] | None = None,
    reduction: str | None = "sum",
) -> Any:
    """Return a distributed fidelity: one for all operators, one for each, or the objects of a factory."""
    from deepinv.optim.data_fidelity import DataFidelity, StackedPhysicsDataFidelity

    from halotile.tasks.distributed.stacks.linear import DistributedDataFidelity

    if isinstance(value, StackedPhysicsDataFidelity):
        value = list(value.data_fidelity_list)
    if isinstance(value, DataFidelity):
        fidelity = value if wants_gradients(value) else copy.deepcopy(value)
        return DistributedDataFidelity(ctx, send_all(ctx, [value]), fidelity, reduction=reduction)
    is_list = isinstance(value, list | tuple)
    operators = send_all(ctx, value) if is_list else make_all(ctx, value, count, shared)
    return DistributedDataFidelity(ctx, operators, reduction=reduction)


def build_processing(processor: Any, ctx: Engine, tiling: TilingOptions) -> DistributedProcessing:
    """Return a denoiser or function on tiles.

    It is an instance of deepinv's class if deepinv is imported already: importing it takes seconds.
    """
    if not callable(processor):
        raise WrongKind(
            f"the denoiser is a {type(processor).__name__}, which cannot be called. Write a network or a function."
        )
    if "deepinv" not in sys.modules:
        return DistributedProcessing(ctx, processor, tiling)
    from halotile.tasks.distributed.tiling.deepinv_class import DeepinvProcessing

    return DeepinvProcessing(ctx, processor, tiling)


def build_prior(prior: Any, ctx: Engine, tiling: TilingOptions) -> Any:
    """Return the same prior with its denoiser distributed."""
    denoiser = getattr(prior, "denoiser", None)
    if denoiser is None:
        raise ConfigError(
            f"the prior {type(prior).__name__} has no denoiser, so it cannot run on tiles. Distribute its prox: "
            "distribute(prior.prox, ctx, type_object='denoiser')."
        )
    same = copy.copy(prior)
    same._modules = dict(prior._modules)
    same.denoiser = build_processing(denoiser, ctx, tiling)
    return same


def build_model(model: Any, ctx: Engine, tiling: TilingOptions) -> Any:
    """Distribute the fidelities and denoisers of an unfolded model of ``deepinv.optim``, in place."""
    from deepinv.optim import BaseOptim

    if not isinstance(model, BaseOptim):
        raise WrongKind(
            f"type_object='module' only supports deepinv BaseOptim models with unfold=True, not a {type(model).__name__}. "
            "Write type_object='denoiser' to run a network on tiles."
        )
    if not model.unfold:
        raise WrongKind(
            "the model has unfold=False. Distribute its physics, its fidelity and its denoiser, and build the model of those."
        )
    from halotile.tasks.distributed.stacks.linear import DistributedDataFidelity

    if model.data_fidelity is not None:
        model.data_fidelity = torch.nn.ModuleList(
            fidelity if isinstance(fidelity, DistributedDataFidelity) else build_fidelity(fidelity, ctx)
            for fidelity in model.data_fidelity
        )
    for prior in model.prior or ():
        denoiser = getattr(prior, "denoiser", None)
        if denoiser is not None and not isinstance(denoiser, DistributedProcessing):
            prior.denoiser = build_processing(denoiser, ctx, tiling)
    model._deepinv_dist_sync = None  # tells deepinv that the model is distributed and needs no synchronisation
    return model


def _check_parameters(value: Any) -> Any:
    """Return the parameters as they are: the one driver has all of their gradients."""
    is_single = isinstance(value, torch.nn.Parameter)
    for parameter in [value] if is_single else value:
        if not isinstance(parameter, torch.nn.Parameter):
            raise WrongKind(
                f"the list of parameters holds a {type(parameter).__name__}. Write torch.nn.Parameter objects."
            )
    return value if is_single else list(value)


def detect_kind(value: Any) -> str:
    """Detect the kind of an object.

    >>> detect_kind(torch.nn.Parameter(torch.ones(1)))
    'parameters'
    """
    is_list = isinstance(value, list | tuple)
    first = value[0] if is_list and len(value) else value
    if isinstance(first, torch.nn.Parameter):
        return "parameters"
    if kind := _deepinv_kind(value, is_list):
        return kind
    if isinstance(value, torch.nn.Module):
        raise ConfigError(
            f"Cannot auto-detect generic torch.nn.Module: {type(value).__name__} could be a denoiser or a model. "
            "Write type_object='denoiser' to run it on tiles."
        )
    if is_list:
        names = ", ".join(dict.fromkeys(type(entry).__name__ for entry in value)) or "nothing"
        given = f"the {type(value).__name__} holds {names}"
    else:
        suffix = " that can be called" if callable(value) else ""
        given = f"the object is a {type(value).__name__}{suffix}"
    raise ConfigError(f"{given}: its kind is not clear. Write type_object, one of {', '.join(KINDS)}.")


def unstack(physics: Sequence[Any]) -> list[Any]:
    """Replace stacks by their operators."""
    return [part for each in physics for part in getattr(each, "physics_list", [each])]


def _deepinv_kind(value: Any, is_list: bool) -> str | None:
    """Detect the kind of one or several objects of deepinv."""
    try:
        from deepinv.models.base import Denoiser
        from deepinv.optim import BaseOptim
        from deepinv.optim.data_fidelity import DataFidelity
        from deepinv.optim.prior import Prior
        from deepinv.physics import LinearPhysics, Physics
    except ImportError:
        return None
    parts = list(value) if is_list else [value]
    if not parts:
        return None
    if all(isinstance(part, Physics) for part in parts):
        is_linear = all(isinstance(part, LinearPhysics) for part in unstack(parts))
        return "linear_physics" if is_linear else "physics"
    if all(isinstance(part, DataFidelity) for part in parts):
        return "data_fidelity"
    classes = ((BaseOptim, "module"), (Denoiser, "denoiser"), (Prior, "prior"))
    return next((kind for base, kind in classes if isinstance(value, base)), None)
