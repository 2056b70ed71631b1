"""The keys of each kind of job in a file, derived from the fields of its dataclass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from halotile.graphs.kinds.base import find_kind
from halotile.graphs.kinds.sections import Job
from halotile.graphs.rules.keys import Key, Keys, keys_of
from halotile.graphs.words import parts

VERSION = 1
HEAD = ("version", "job")
FLAGS = dict.fromkeys(
    ("allow_import", "import_folder"),
    "a file cannot allow itself to run code; add --allow-import to the command",
)
"""Fields of a job that no file may set, with the message that says so."""


@dataclass(frozen=True)
class JobKeys:
    """The keys at the top of a file of some kind."""

    schema: type[Any]  # dataclass of the job
    # sections, lists: its sections, each by its dataclass, and its lists, each by the dataclass of an entry
    sections: Mapping[str, type]
    lists: Mapping[str, type] = field(default_factory=dict)
    values: Keys = field(default_factory=dict)  # keys outside all sections

    @property
    def keys(self) -> list[str]:
        """Keys at the top of a file, after its head."""
        return [*self.sections, *self.lists, *self.values]

    def requires(self, key: str) -> bool:
        """Return True where a key has to be written."""
        return any(name == key and kind.is_required for name, kind in keys_of(self.schema).items())


@functools.cache
def keys_of_job(name: str) -> JobKeys:
    """Return the keys of a kind of job: its own come first, and among these input and output.

    Examples
    --------
    >>> keys_of_job("denoise").keys
    ['input', 'output', 'denoiser', 'tile', 'noise', 'run', 'cluster']
    """
    job = find_kind(name).job
    keys, shared = keys_of(job), keys_of(Job)
    sections: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    values: dict[str, Key] = {}
    first = ("input", "output", "denoiser")
    for key in sorted(
        keys, key=lambda key: (key in shared, first.index(key) if key in first else len(first))
    ):
        hint = keys[key].type
        section = next((part for part in parts(hint) if dataclasses.is_dataclass(part)), None)
        entry = get_args(hint)[0] if get_origin(hint) is tuple else None
        if section is not None:
            sections[key] = section
        elif dataclasses.is_dataclass(entry):
            lists[key] = entry
        elif key not in FLAGS:
            values[key] = keys[key]
    return JobKeys(job, sections, lists, values)
