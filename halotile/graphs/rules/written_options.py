"""Options as a job file has them: paths for arrays and images, mappings for operators and denoisers."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halotile.errors import HalotileError
from halotile.graphs.kinds.sections import NamedChoice
from halotile.graphs.words import parts
from halotile.storage.rim import Readable
from halotile.storage.views import Constant
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.median import Median
from halotile.tasks.operators.base import Operator
from halotile.tasks.operators.shift import Shift
from halotile.tasks.options import job_key, option_fields

WrittenAs = Literal["array", "image", "operators", "denoiser"]

_WRITTEN: Mapping[WrittenAs, Any] = {
    "array": Path,
    "image": Path,
    "operators": tuple[dict[str, Any], ...],
    "denoiser": dict[str, Any],
}


def stand_ins(declared: type) -> dict[str, WrittenAs]:
    """Return the options that a job writes differently: an array or an image by its path, other objects by their mappings.

    Examples
    --------
    >>> from halotile.tasks.operators.blur import Blur
    >>> from halotile.tasks.operators.composition import Composition
    >>> stand_ins(Blur), stand_ins(Composition)
    ({'kernel': 'array'}, {'operators': 'operators'})
    """
    hints = typing.get_type_hints(declared)
    kinds = {key: _kind_of(hints[f.name]) for key, f in option_fields(declared).items()}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _kind_of(hint: Any) -> WrittenAs | None:
    for part in parts(hint):
        if typing.get_origin(part) is np.ndarray:
            return "array"
        if part is Readable:
            return "image"
        if part is Denoiser:
            return "denoiser"
        if typing.get_origin(part) is tuple and typing.get_args(part)[0] is Operator:
            return "operators"
    return None


def written_form(choice: type[NamedChoice], declared: type) -> type:
    """Return the dataclass of the keys beside the name of a choice, from the class that the name refers to."""
    return as_written(declared, choice) if choice.differs else declared  # type: ignore[arg-type]  # it is hashable


@functools.cache
def as_written(declared: type, own: type | None = None) -> type:
    """Return the dataclass of a choice in a job file: the keys of ``own`` except its name, then the options of the class.

    It refuses what the class refuses, without opening a file.

    Examples
    --------
    >>> from halotile.graphs.jobs.reconstruct.job import OperatorChoice
    >>> from halotile.tasks.operators.blur import Blur
    >>> as_written(Blur, OperatorChoice)(data="y.zarr", kernel="k.npy", boundary="round")
    Traceback (most recent call last):
    halotile.errors.ConfigError: boundary is 'round': write one of circular, reflect, replicate, zero, valid.
    """
    hints, kinds, options = typing.get_type_hints(declared), stand_ins(declared), option_fields(declared)
    written = _own_fields(own) if own else []
    for key, field in options.items():
        written.append((_name_of(field.name), _type_of(hints[field.name], kinds.get(key)), _default(field)))

    def check(self: Any) -> None:
        values = {key: getattr(self, _name_of(f.name)) for key, f in options.items()}
        declared(**{options[key].name: _trial_value(value, kinds.get(key)) for key, value in values.items()})

    namespace = {
        "__post_init__": check,
        "__doc__": declared.__doc__,
        "__pydantic_config__": {"extra": "forbid", "alias_generator": job_key},
    }
    return dataclasses.make_dataclass(
        declared.__name__, written, namespace=namespace, frozen=True, kw_only=True
    )


def fault_of_option(choice: type[NamedChoice], name: str, option: str) -> str | None:
    """Return the fault of an option that belongs to other names than the written one, if it does.

    Examples
    --------
    >>> from halotile.graphs.jobs.reconstruct.job import FidelityChoice
    >>> fault_of_option(FidelityChoice, "l2", "background")
    'is for fidelity poisson, and the name is l2; write poisson, or leave it out'
    """
    others = []
    for other in choice.accepted():
        with suppress(HalotileError, AttributeError):
            others += [other] if option in option_fields(choice.declared(other)) else []
    if not others:
        return None
    *first, last = others
    names = f"{', '.join(first)} or {last}" if first else last
    instead = "one of these names" if first else last
    return f"is for {choice.word()} {names}, and the name is {name}; write {instead}, or leave it out"


def _name_of(field: str) -> str:
    """Return the key of a field in a dataclass: the field's name, changed where it is a Python keyword."""
    key = job_key(field)
    return field if keyword.iskeyword(key) else key


def _own_fields(choice: type) -> list[tuple[str, Any, Any]]:
    """Return the fields of a choice other than its name and its options."""
    hints = typing.get_type_hints(choice)
    fields = (field for field in dataclasses.fields(choice) if field.name not in ("name", "options"))
    return [
        (field.name, Path if field.name == "data" else hints[field.name], _default(field)) for field in fields
    ]


def _type_of(hint: Any, kind: WrittenAs | None) -> Any:
    """Return the type of a value in a job file: a path for an array, a name for a Python object."""
    if kind is not None:
        return _WRITTEN[kind] | None if type(None) in parts(hint) else _WRITTEN[kind]
    return str if {str, Any} == set(parts(hint)) else hint


def _default(field: dataclasses.Field[Any]) -> Any:
    return dataclasses.field(
        default=field.default, default_factory=field.default_factory, metadata=field.metadata
    )


def _trial_value(value: Any, kind: WrittenAs | None) -> Any:
    """Return a value that the class can be tried with: the content of a file is not known yet."""
    if value is None or kind is None:
        return value
    return {
        "array": np.ones((1, 1)),
        "image": Constant((1, 1), np.dtype("float32")),
        "operators": tuple(Shift(shift=(0, 0)) for _ in value) if kind == "operators" else (),
        "denoiser": Median(size=3),
    }[kind]
