"""Checks and rules for the values and parts of a ptychography job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from halotile.graphs.jobs.ptychography.job import ModelOptions, ScanInput, StageOptions
from halotile.graphs.kinds.base import Check
from halotile.graphs.rules.combinations import Faults, workers_of_slots
from halotile.graphs.rules.values import Above, AtLeast, seed
from halotile.storage.scans.hdf5 import fault_of_name
from halotile.storage.spacing import signed_metres
from halotile.tasks.options import Auto
from halotile.tasks.ptychography.recipe import PARTS, SOLVER_TRAITS, VARYING

OURS = ("focus", "modes", "variations", "oversampling", "support", "refine")
"""Keys of halotile's own model."""


def _result_path(path: str) -> str | None:
    if "://" in path:
        return f"{path} is in an object store, and results are written to a disk; write a path"
    return fault_of_name(path)


def _focus(length: float | str | None) -> str | None:
    known = length is None or signed_metres(length)
    return None if known else f"is {length}; write a length in metres or with its unit, such as 3.65 mm"


def _share(alpha: float) -> str | None:
    return None if 0 < alpha <= 1 else f"is {alpha:g}; write more than 0, such as 0.1, and at most 1"


def _kept_share(share: float) -> str | None:
    return None if 0 <= share < 1 else f"is {share}; write 0 or more and less than 1"


def _held_share(share: float | Auto) -> str | None:
    right = share == "auto" or 0 <= share <= 0.5
    return None if right else f"is {share}; write 0, or a share up to 0.5 such as 0.05"


def _betas(shares: Sequence[float]) -> str | None:
    right = len(shares) == 2 and not any(map(_kept_share, shares))
    return None if right else f"is {list(shares)}; write two numbers, each 0 or more and less than 1"


def _factors(factors: Mapping[str, float]) -> str | None:
    wrong = next((name for name, factor in factors.items() if not 0 <= factor < math.inf), None)
    return None if wrong is None else f"gives {wrong} {factors[wrong]:g}; write 0 or more, such as 0.5"


CHECKS: Mapping[tuple[str, str], Check] = {
    ("output", "path"): _result_path,
    ("model", "modes"): AtLeast(1),
    ("model", "variations"): AtLeast(0),
    ("model", "oversampling"): AtLeast(1),
    ("model", "focus"): _focus,
    ("model", "support"): Above(0),
    ("model", "margin"): AtLeast(1),
    ("stages", "epochs"): AtLeast(1),
    ("stages", "batch"): AtLeast(1),
    ("stages", "lr"): Above(0),
    ("stages", "lr_factors"): _factors,
    ("stages", "hold_positions"): AtLeast(0),
    ("stages", "alpha"): _share,
    ("stages", "betas"): _betas,
    ("stages", "momentum"): _kept_share,
    ("stages", "smoothness"): AtLeast(0),
    ("", "slots"): AtLeast(1),
    ("", "window"): AtLeast(0),
    ("", "held_out"): _held_share,
    ("", "seed"): seed,
}


def optics(model: ModelOptions) -> Faults:
    """Yield a focus behind the sample in a near field, and nothing to refine."""
    if model.field == "near" and model.focus is not None and (signed_metres(model.focus) or 1) < 0:
        yield ("model", "focus"), f"is {model.focus}; write a length above 0: a beam in a near field diverges"
    if model.oversampling > 1 and model.field == "near":
        yield ("model", "oversampling"), "is for field: far; leave it out"
    yield from _own_model(model)
    if "object" not in model.refine:
        yield ("model", "refine"), "does not name the object; write [object, probe] or more"


def _own_model(model: ModelOptions) -> Faults:
    """Yield what a user's own model has no use for."""
    usual = ModelOptions()
    if model.import_ is None:
        if model.options:
            yield ("model", "options"), "is for a model that import names; leave it out"
        return
    for name in OURS:
        if getattr(model, name) != getattr(usual, name):
            yield (
                ("model", name),
                "is for the model of halotile, and import names another one; write it in options, or leave it out",
            )


def starts(input: ScanInput, model: ModelOptions, resolution: bool) -> Faults:  # noqa: A002 - the section
    """Yield a start where there must be none."""
    if input.start is not None and resolution:
        yield (
            ("input", "start"),
            "is not for a resolution, whose halves would begin with the same object; leave one of them out",
        )
    if input.start is not None and model.import_ is not None:
        yield ("input", "start"), "is for the model of halotile; leave it out"


def parts_of_factors(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield factors of parts that are not refined; those of a user's own model are known when it is built."""
    refined = (*model.refine, *(VARYING if model.variations else ()))
    for number, stage in enumerate(stages if model.import_ is None else ()):
        for part in stage.lr_factors:
            if part not in PARTS:
                yield ("stages", number, "lr_factors"), f"names {part}; write some of {', '.join(refined)}"
            elif part not in refined:
                yield (
                    ("stages", number, "lr_factors"),
                    f"names {part}, which is not refined; leave it out, or add it to model.refine",
                )


def import_of_model(
    model: ModelOptions, stages: Sequence[StageOptions], resolution: bool, held_out: float | Auto
) -> Faults:
    """Yield what there is not for a user's own model."""
    if model.import_ is None:
        return
    if held_out not in ("auto", 0):
        yield ("held_out",), "is for the model of halotile; leave it out"
    if resolution:
        yield ("resolution",), "is not there for a model of your own; leave it out"
    for number, stage in enumerate(stages):
        if not SOLVER_TRAITS[stage.solver].any_model:
            yield (("stages", number, "solver"), f"is {stage.solver}, which needs the model of halotile; write adam")
        if stage.smoothness:
            yield ("stages", number, "smoothness"), "is for the model of halotile; leave it out"


def smooth_objects(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield a smoothness of an object that does not change."""
    for number, stage in enumerate(stages):
        if stage.smoothness and "object" not in model.refine:
            yield (("stages", number, "smoothness"), "is for the object, which refine does not name; leave it out")


def options_of_others(stages: Sequence[StageOptions]) -> Faults:
    """Yield options that another solver has."""
    users = {
        option: [name for name, traits in SOLVER_TRAITS.items() if option in traits.options]
        for option in ("alpha", "betas", "amsgrad", "momentum")
    }
    for number, stage in enumerate(stages):
        usual = StageOptions(epochs=stage.epochs)
        for option, names in users.items():
            if stage.solver not in names and getattr(stage, option) != getattr(usual, option):
                yield (
                    ("stages", number, option),
                    f"is for solver: {' or '.join(names)}, and the solver is {stage.solver}; leave it out",
                )


def solvers(model: ModelOptions, stages: Sequence[StageOptions]) -> Faults:
    """Yield losses, rates and batches that a solver cannot do with."""
    if not stages:
        yield ("stages",), "is empty; write one such as {epochs: 50}"
    for number, stage in enumerate(stages):
        losses = SOLVER_TRAITS[stage.solver].losses
        if losses and model.loss not in losses:
            yield (
                ("stages", number, "solver"),
                f"is {stage.solver}, which is for loss: {' or '.join(losses)}, and the loss is {model.loss}; write adam",
            )
        if not SOLVER_TRAITS[stage.solver].rate and stage.lr == "auto":
            yield (
                ("stages", number, "lr"),
                f"is needed: that of {stage.solver} depends on the counts; begin with 0.001",
            )
        if not SOLVER_TRAITS[stage.solver].batch and stage.batch != "auto":
            yield (
                ("stages", number, "batch"),
                f"is {stage.batch}, and {stage.solver} uses all patterns at once; leave it out",
            )


RULES = (
    optics,
    starts,
    import_of_model,
    parts_of_factors,
    smooth_objects,
    solvers,
    options_of_others,
    workers_of_slots,
)
