"""The operators of a job with their measurements: opened, checked, with the shape of the image they share."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.choices import make_chosen
from halotile.graphs.plans.inputs import check_whole
from halotile.graphs.rules.keys import stand_ins
from halotile.registry import find
from halotile.storage.arrays import Source, open_array, open_source, planes_last
from halotile.storage.views import checked
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.operators.own import Own
from halotile.tasks.shared import Shared
from halotile.tasks.terms import Term


def make_operator(choice: OperatorChoice, job: Job | None = None) -> Operator:
    """Return the operator that a job names, with its options checked; a script, without a job, may import."""
    given = choice.options.get("operator")
    operator: Operator = make_chosen(choice, job) if given is None else given
    return operator


def make_operators(choices: tuple[OperatorChoice, ...], job: Job) -> tuple[Operator, ...]:
    operators = []
    for number, choice in enumerate(choices):
        try:
            operator = make_operator(choice, job)
            for source in sources_in(operator):
                check_whole(source.path)
            operators.append(operator)
        except (ConfigError, InputError) as error:
            raise type(error)(f"operators[{number}]: {error}") from None
    return tuple(operators)


def describe_operator(operator: Operator) -> dict[str, Any]:
    """Return an operator as JSON: its name and every option, arrays and the user's own code by their digests."""
    options = {
        field.name: _as_json(getattr(operator, field.name))
        for field in dataclasses.fields(operator)  # type: ignore[arg-type]  # every operator has to be a dataclass
    }
    code = {"code": operator.code} if isinstance(operator, Own) else {}
    return {"name": operator.name} | options | code


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": digest}
    if hasattr(value, "fingerprint"):
        return value.fingerprint()
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return describe_operator(value)  # type: ignore[arg-type]  # an operator inside another
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def sources_in(value: Any) -> Iterator[Source]:
    """Yield the arrays on disk among the options of an operator."""
    if hasattr(value, "change"):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from sources_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, tuple | list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from sources_in(inner)


def written(choice: OperatorChoice) -> dict[str, Any]:
    """Return a choice as a job file has it; objects that only a script can pass are described."""
    options = {key: _as_json(value) for key, value in choice.options.items()}
    return {"name": choice.name, "data": choice.data, "noise_sigma": choice.noise_sigma} | options


def files_of(choices: Iterable[OperatorChoice]) -> Iterator[Path]:
    """Yield the files that options name."""
    for choice in choices:
        if "operator" not in choice.options:
            meant = stand_ins(find("operators", choice.name).OPERATOR)
            values = (value for key, value in choice.options.items() if meant.get(key) in ("array", "image"))
            yield from (Path(value) for value in values if isinstance(value, str))


def open_measurements(
    choices: Iterable[OperatorChoice], operators: tuple[Operator, ...]
) -> tuple[Source, ...]:
    """Return the measurement of each operator, opened."""
    pairs = zip(choices, operators, strict=True)
    return tuple(_open_measurement(choice.data, operator) for choice, operator in pairs)


def _open_measurement(path: str, operator: Operator) -> Source:
    try:
        return planes_last(open_source(path))
    except DamagedData:
        raise
    except InputError:
        line = open_array(path)
        if len(line.shape) != 1 or line.dtype.kind not in "biuf" or operator.kind != "whole":
            raise
    return cast(Source, line)


def image_shape(
    operators: tuple[Operator, ...], data: tuple[Source, ...], given: Any, others: Iterable[Shape] = ()
) -> Shape:
    """Return the shape of the image that all measurements are of.

    ``operators``: stack; ``data``: measurement of each operator; ``given``: shape, where the job has it; ``others``: shapes to try first, before
    those of the measurements.
    """
    if given != "auto":
        if wrong := _shape_fault(operators, data, tuple(given)):
            raise InputError(wrong)
        return tuple(given)
    tried: dict[Shape, str] = {}
    for shape in (*others, *_candidates(operators, data)):
        if (message := _shape_fault(operators, data, shape)) is None:
            return shape
        tried.setdefault(shape, message)
    if not tried:
        raise ConfigError(
            "shape is auto, and data of one axis do not tell how long the image is along its own. Write its shape, such as "
            "shape: [4096, 4096]."
        )
    shape, wrong = next(iter(tried.items()))
    raise ConfigError(
        f"{wrong} If the image is not {' × '.join(map(str, shape))}, write its shape, such as shape: [4096, 4096]."
    )


def check_made(operators: Iterable[Operator]) -> None:
    """Refuse an operator that exists for no shape, such as a physics whose name does not exist."""
    for number, operator in enumerate(operators):
        try:
            _ = operator.kind
        except ConfigError as error:
            raise ConfigError(f"operators[{number}]: {error}") from None


def _candidates(operators: tuple[Operator, ...], data: tuple[Source, ...]) -> Iterable[Shape]:
    for operator, source in zip(operators, data, strict=True):
        if len(source.shape) < 2:
            continue
        factor = getattr(operator, "factor", 1)
        yield (*source.shape[:-2], *(n * factor for n in source.shape[-2:]))


def _shape_fault(operators: tuple[Operator, ...], data: tuple[Source, ...], shape: Shape) -> str | None:
    """Return the fault of this shape of the image, if it has one."""
    for number, (operator, source) in enumerate(zip(operators, data, strict=True)):
        try:
            expected = operator.measured(shape)
        except ConfigError as error:
            return f"operators[{number}]: {error}"
        if expected != source.shape:
            return (
                f"operators[{number}]: {source.path} has shape {list(source.shape)}, but {operator.name} of an image of "
                f"shape {list(shape)} gives {list(expected)}. Write shape as it is, or the data that belong to it."
            )
    return None


def make_terms(
    choices: tuple[OperatorChoice, ...],
    operators: tuple[Operator, ...],
    data: tuple[Source, ...],
    fidelity: Fidelity,
    start: Source | None = None,
) -> tuple[Term, ...]:
    """Return the terms of the misfit, each measurement shared by all that read it; counts are checked as they are read."""
    are_counts = fidelity.is_of_counts
    at = None if fidelity.is_square or start is None else Shared(start)
    return tuple(
        Term(
            operator,
            Shared(checked(source, f"operators[{number}].data", are_counts=are_counts)),
            1 / choice.noise_sigma**2,
            fidelity,
            at,
        )
        for number, (choice, operator, source) in enumerate(zip(choices, operators, data, strict=True))
    )
