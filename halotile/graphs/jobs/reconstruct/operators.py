"""The operators of a job with what they measured: opened, checked, and the image they share."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, OperatorChoice
from halotile.graphs.plans.opening import Imports, allow_imports
from halotile.graphs.rules.operator_options import Kind, stand_ins
from halotile.registry import find
from halotile.storage.arrays import Source, open_array, open_source
from halotile.storage.grid import Region
from halotile.tasks.fidelity import L2, Fidelity, Poisson, Term
from halotile.tasks.operators.base import Operator, Shape
from halotile.tasks.operators.own import Own
from halotile.tasks.options import job_key, required_keys
from halotile.tasks.shared import Shared


class Measured(Imports, Protocol):
    """A job with operators."""

    @property
    def operators(self) -> tuple[OperatorChoice, ...]:
        """The operators, and what each measures."""
        ...


def make_operator(choice: OperatorChoice, job: Imports | None = None) -> Operator:
    """The operator that a job names, with its options checked; a script may import what it likes.

    Raises
    ------
    UnknownName
        When there is none of that name.
    ConfigError, InputError
        When its options are wrong, a file that they name is not there, or it would run the user's code without being allowed to.
    """
    if "operator" in choice.options:
        given: Operator = choice.options["operator"]
        return given
    kind = find("operators", choice.name).OPERATOR
    fields = {job_key(field.name): field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(choice.options) - set(fields)):
        raise ConfigError(
            f"operator {choice.name} has no option {unknown[0]!r}. Write some of {', '.join(fields)}."
        )
    if job is not None and "import" in fields:
        allow_imports(f"operator {choice.name}", choice.options, job)
    if left_out := [key for key in required_keys(kind) if key not in choice.options]:
        raise ConfigError(f"operator {choice.name}: write {' and '.join(left_out)}, which has no default.")
    meant = stand_ins(kind)
    try:
        operator: Operator = kind(
            **{fields[key]: _given(value, meant.get(key), job) for key, value in choice.options.items()}
        )
    except TypeError as error:
        raise ConfigError(f"operator {choice.name}: {error}.") from None
    return operator


def _given(value: Any, kind: Kind | None, job: Imports | None) -> Any:
    """What a job writes, as the operator takes it; from Python it may be that already."""
    if kind == "operators":
        return tuple(_nested(inner, job) for inner in value)
    if kind is not None and isinstance(value, str):
        source = open_array(value)
        return source if kind == "image" else np.array(source.read(Region.whole(source.shape)))
    if kind == "array" and isinstance(value, list | tuple):
        return np.asarray(value)
    return tuple(value) if isinstance(value, list) else value


def _nested(value: Any, job: Imports | None) -> Any:
    """An operator among the options of another: a name and its options."""
    if not isinstance(value, Mapping):
        return value
    options = {key: inner for key, inner in value.items() if key != "name"}
    return make_operator(OperatorChoice(name=value["name"], data="", options=options), job)


def make_operators(job: Measured) -> tuple[Operator, ...]:
    """The operators of a job.

    Raises
    ------
    ConfigError, InputError
        As :func:`make_operator`, saying which of them.
    """
    made = []
    for number, choice in enumerate(job.operators):
        try:
            made.append(make_operator(choice, job))
        except (ConfigError, InputError) as error:
            raise type(error)(f"operators[{number}]: {error}") from None
    return tuple(made)


def describe_operator(operator: Operator) -> dict[str, Any]:
    """An operator as JSON: its name and every option, arrays by their digests, and code of the user's own by its."""
    options = {
        field.name: _as_json(getattr(operator, field.name))
        for field in dataclasses.fields(operator)  # type: ignore[arg-type]  # as every operator has to be
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
        return describe_operator(value)  # type: ignore[arg-type]  # an operator inside of one
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def sources_in(value: Any) -> Iterator[Source]:
    """The arrays on a disk among the options of an operator."""
    if hasattr(value, "change"):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from sources_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, tuple | list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from sources_in(inner)


def written(choice: OperatorChoice) -> dict[str, Any]:
    """A choice as a job file has it; what only Python can say is described."""
    options = {key: _as_json(value) for key, value in choice.options.items()}
    return {"name": choice.name, "data": choice.data, "noise_sigma": choice.noise_sigma} | options


def files_of(choices: Iterable[OperatorChoice]) -> Iterator[Path]:
    """The files that options name."""
    for choice in choices:
        if "operator" not in choice.options:
            meant = stand_ins(find("operators", choice.name).OPERATOR)
            values = (value for key, value in choice.options.items() if meant.get(key) in ("array", "image"))
            yield from (Path(value) for value in values if isinstance(value, str))


def open_measurements(
    choices: Iterable[OperatorChoice], operators: tuple[Operator, ...]
) -> tuple[Source, ...]:
    """What each operator measured, as it lies on the disk.

    Raises
    ------
    InputError
        When it is nothing that can be read; a line of numbers is what an operator measures that sees the whole image.
    """
    pairs = zip(choices, operators, strict=True)
    return tuple(_open_measurement(choice.data, operator) for choice, operator in pairs)


def _open_measurement(path: str, operator: Operator) -> Source:
    try:
        return open_source(path)
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
    """The shape of the image that all measurements are of.

    Parameters
    ----------
    operators : tuple of Operator
        The stack.
    data : tuple of Source
        What each of them measured.
    given : tuple of int or "auto"
        The shape, where it is told.
    others : iterable of tuple of int
        Shapes that it probably has, before those of the measurements.

    Raises
    ------
    ConfigError
        When it has to be told.
    InputError
        When a measurement is not one of that image.
    """
    if given != "auto":
        if wrong := _misfits(operators, data, tuple(given)):
            raise InputError(wrong)
        return tuple(given)
    tried: dict[Shape, str] = {}
    for shape in (*others, *_candidates(operators, data)):
        if (message := _misfits(operators, data, shape)) is None:
            return shape
        tried.setdefault(shape, message)
    if not tried:
        raise ConfigError(
            "shape is auto, and data of one axis do not tell how long the image is along its own. Write its shape, such as "
            "shape: [4096, 4096]."
        )
    shape, wrong = next(iter(tried.items()))
    raise ConfigError(
        f"{wrong} If the image is not {' x '.join(map(str, shape))}, write its shape, such as shape: [4096, 4096]."
    )


def check_made(operators: Iterable[Operator]) -> None:
    """Refuse an operator that there is for no shape, such as a physics of no such name."""
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


def _misfits(operators: tuple[Operator, ...], data: tuple[Source, ...], shape: Shape) -> str | None:
    """What is wrong with the image having this shape, if anything."""
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
    fidelity: FidelityChoice,
    start: Source | None = None,
) -> tuple[Term, ...]:
    """The terms of the misfit, each measurement shared by whatever asks for it."""
    is_square = fidelity.name == "l2"
    kind: Fidelity = L2() if is_square else Poisson(background=fidelity.background)
    at = None if is_square or start is None else Shared(start)
    return tuple(
        Term(operator, Shared(source), 1 / choice.noise_sigma**2, kind, at)
        for choice, operator, source in zip(choices, operators, data, strict=True)
    )
