"""The options of an operator as a job writes them: files for arrays and images, mappings for operators."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halotile.graphs.rules.words import parts
from halotile.storage.rim import Readable
from halotile.storage.views import Constant
from halotile.tasks.operators.base import Operator
from halotile.tasks.options import job_key

Kind = Literal["array", "image", "operators"]

_WRITTEN: Mapping[Kind, Any] = {"array": Path, "image": Path, "operators": tuple[dict[str, Any], ...]}


def stand_ins(operator: type) -> dict[str, Kind]:
    """What stands for something else in a job: an array or an image by its path, operators by their mappings.

    Examples
    --------
    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> stand_ins(Blur), stand_ins(Composition)
    ({'kernel': 'array'}, {'operators': 'operators'})
    """
    hints = typing.get_type_hints(operator)
    kinds = {job_key(f.name): _kind_of(hints[f.name]) for f in dataclasses.fields(operator)}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _kind_of(hint: Any) -> Kind | None:
    for part in parts(hint):
        if typing.get_origin(part) is np.ndarray:
            return "array"
        if part is Readable:
            return "image"
        if typing.get_origin(part) is tuple and typing.get_args(part)[0] is Operator:
            return "operators"
    return None


@functools.cache
def as_written(operator: type, own: type | None = None) -> type:
    """The dataclass of what a job writes of an operator: its options, after the keys of ``own`` that are not its name.

    It refuses what the operator refuses, without opening a file.

    Examples
    --------
    >>> from halotile.graphs.jobs.reconstruct.job import OperatorChoice
    >>> from halotile.tasks.operators.blur import Blur
    >>> as_written(Blur, OperatorChoice)(data="y.zarr", kernel="k.npy", boundary="round")
    Traceback (most recent call last):
    halotile.errors.ConfigError: boundary is 'round': write one of circular, reflect, replicate, zero, valid.
    """
    hints, kinds = typing.get_type_hints(operator), stand_ins(operator)
    written = _own(own) if own else []
    for field in dataclasses.fields(operator):
        key = job_key(field.name)
        written.append((_attribute(field.name), _written(hints[field.name], kinds.get(key)), _default(field)))

    def check(self: Any) -> None:
        values = {f.name: getattr(self, _attribute(f.name)) for f in dataclasses.fields(operator)}
        operator(**{name: _tried(value, kinds.get(job_key(name))) for name, value in values.items()})

    namespace = {
        "__post_init__": check,
        "__doc__": operator.__doc__,
        "__pydantic_config__": {"extra": "forbid", "alias_generator": job_key},
    }
    return dataclasses.make_dataclass(
        operator.__name__, written, namespace=namespace, frozen=True, kw_only=True
    )


def _attribute(field: str) -> str:
    """What stands for a field: its key, unless Python has that word for itself."""
    key = job_key(field)
    return field if keyword.iskeyword(key) else key


def _own(choice: type) -> list[tuple[str, Any, Any]]:
    """What a choice has besides its name and its options."""
    hints = typing.get_type_hints(choice)
    fields = (field for field in dataclasses.fields(choice) if field.name not in ("name", "options"))
    return [
        (field.name, Path if field.name == "data" else hints[field.name], _default(field)) for field in fields
    ]


def _written(hint: Any, kind: Kind | None) -> Any:
    """The type of what a job writes: a file for an array, a name for an object of Python's."""
    if kind is not None:
        return _WRITTEN[kind] | None if type(None) in parts(hint) else _WRITTEN[kind]
    return str if {str, Any} == set(parts(hint)) else hint


def _default(field: dataclasses.Field[Any]) -> Any:
    return dataclasses.field(default=field.default, default_factory=field.default_factory)


def _tried(value: Any, kind: Kind | None) -> Any:
    """A value that the operator can be tried with: what a file holds is not known yet."""
    if value is None or kind is None:
        return value
    return {"array": np.ones((1, 1)), "image": Constant((1, 1), np.dtype("float32")), "operators": ()}[kind]
