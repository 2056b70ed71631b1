"""The keys of each kind of job in a file, derived from the fields of its dataclass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from halotile.graphs.kinds.finder import find_kind
from halotile.graphs.kinds.sections import OWN, READ, STRICT, Job, NamedChoice
from halotile.graphs.words import parts
from halotile.tasks.options import required_keys

VERSION = 1
HEAD = ("version", "job")
FLAGS = ("allow_import", "import_folder")
"""Fields of a job that no file may set."""


def is_named(schema: Any) -> TypeGuard[type[NamedChoice]]:
    """Return True for a part of a job that is a choice by name."""
    return isinstance(schema, type) and issubclass(schema, NamedChoice)


@dataclass(frozen=True)
class JobKeys:
    """The keys at the top of a file of some kind."""

    schema: type[Any]  # dataclass of the job
    sections: Mapping[str, type]  # its sections, each by its dataclass
    lists: Mapping[str, type] = field(default_factory=dict)  # its lists, each by the dataclass of an entry
    values: type | None = None  # dataclass of the keys outside all sections

    @property
    def keys(self) -> list[str]:
        """Keys at the top of a file, after its head."""
        value_keys = [f.name for f in dataclasses.fields(self.values)] if self.values else []
        return [*self.sections, *self.lists, *value_keys]

    def requires(self, key: str) -> bool:
        """Return True where a key has to be written."""
        return key in required_keys(self.schema)


@functools.cache
def keys_of(name: str) -> JobKeys:
    """Return the keys of a kind of job.

    Examples
    --------
    >>> keys_of("denoise").keys
    ['input', 'output', 'denoiser', 'tile', 'noise', 'run', 'cluster']
    """
    job = find_kind(name).job
    hints = get_type_hints(job, include_extras=True)
    sections: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    plain: list[tuple[str, Any, Any]] = []
    for job_field in _own_first(job):
        hint = hints[job_field.name]
        section = next((part for part in parts(hint) if dataclasses.is_dataclass(part)), None)
        entry = get_args(hint)[0] if get_origin(hint) is tuple else None
        if section is not None:
            sections[job_field.name] = section
        elif dataclasses.is_dataclass(entry):
            lists[job_field.name] = entry
        elif job_field.name not in FLAGS:
            plain.append((job_field.name, hint, dataclasses.field(default=job_field.default)))
    values = None
    if plain:
        values = dataclasses.make_dataclass(
            f"{job.__name__}Values",
            plain,
            kw_only=True,
            frozen=True,
            namespace={"__pydantic_config__": STRICT},
        )
        values.__doc__ = job.__doc__
    return JobKeys(job, sections, lists, values)


def _own_first(job: type[Job]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a job; those of every job come last, and input comes before output."""
    shared = {shared_field.name for shared_field in dataclasses.fields(Job)}
    order = ("input", "output", "denoiser")
    fields = sorted(
        dataclasses.fields(job),
        key=lambda shared_field: order.index(shared_field.name) if shared_field.name in order else len(order),
    )
    return [f for f in fields if f.name not in shared] + [f for f in fields if f.name in shared]


def paths_in(schema: type) -> dict[str, str]:
    """Return the keys that name files, with ``read`` for those that have to exist, else ``own``.

    Examples
    --------
    >>> from halotile.graphs.kinds.sections import Input, Output
    >>> paths_in(Input), paths_in(Output)
    ({'path': 'read', 'sides': 'read'}, {'path': 'own'})
    """
    hints = get_type_hints(schema, include_extras=True)
    marks_of = {key: {*_marks(hint)} & {READ, OWN} for key, hint in hints.items()}
    return {key: marks.pop() for key, marks in marks_of.items() if marks}


def _marks(hint: Any) -> list[Any]:
    """Return all annotations of a type, nested ones included."""
    inner = [mark for argument in get_args(hint) for mark in _marks(argument)]
    return [*getattr(hint, "__metadata__", ()), *inner]
