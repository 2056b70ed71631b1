"""The kinds of jobs that a configuration can describe, each by the parts that it is written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from halotile import registry
from halotile.graphs.jobs.sections import (
    Aim,
    Cluster,
    DenoiserChoice,
    FidelityChoice,
    Input,
    Job,
    OperatorChoice,
    Output,
    PriorChoice,
    Reconstruction,
    Run,
    SolverChoice,
    Tile,
)
from halotile.graphs.rules.words import parts
from halotile.tasks.options import required_keys

VERSION = 1
HEAD = ("version", "job")


def _as_declared(declared: type) -> type:
    return declared


def _with_files(declared: type) -> type:
    """An operator's options with paths in place of arrays, and its measurement beside them."""
    from halotile.graphs.rules.operator_options import as_written

    return as_written(declared, OperatorChoice)


def _options_with_files(declared: type) -> type:
    from halotile.graphs.rules.operator_options import as_written

    return as_written(declared)


@dataclass(frozen=True)
class Named:
    """Something that is a name with its options, written side by side."""

    registry: str
    """Where the name is looked up."""
    attribute: str
    """What a file of that name declares."""
    written: Callable[[type], type] = _as_declared
    """The dataclass of the keys beside the name, from what is declared."""
    hidden: tuple[str, ...] = ()
    """Names that are not for jobs."""

    @property
    def word(self) -> str:
        """One of them."""
        return self.registry.removesuffix("s")

    @property
    def names(self) -> list[str]:
        """Those that may be written."""
        return [name for name in registry.names(self.registry) if name not in self.hidden]

    def find(self, name: str) -> type:
        """What the name stands for.

        Raises
        ------
        HalotileError
            When it cannot be loaded.
        AttributeError
            When a plug-in declares no such thing.
        """
        declared: type = getattr(registry.find(self.registry, name), self.attribute)
        return declared


NAMED: Mapping[type, Named] = {
    DenoiserChoice: Named("denoisers", "DENOISER"),
    OperatorChoice: Named("operators", "OPERATOR", _with_files, hidden=("normal",)),
}
"""Parts of a job that are names."""

NESTED = Named("operators", "OPERATOR", _options_with_files, hidden=("normal",))
"""An operator among the options of another."""

PATHS: Mapping[type, tuple[str, ...]] = {Input: ("path", "sides"), Aim: ("start", "reference")}
"""Keys that name what is read: a path, or a mapping of names to paths."""

PLACES: Mapping[type, tuple[str, ...]] = {Output: ("path",), Cluster: ("scheduler_file",)}
"""Keys that name what need not be there when a job is checked."""


@dataclass(frozen=True)
class JobKind:
    """A kind of job: the dataclass that is built, and how it is written.

    Parameters
    ----------
    schema : type
        The dataclass.
    sections : mapping of str to type
        Its sections, each by its dataclass.
    lists : mapping of str to type
        Its lists, each by the dataclass of an entry.
    values : type, optional
        The dataclass of the keys that stand in no section.
    """

    schema: type[Any]
    sections: Mapping[str, type]
    lists: Mapping[str, type] = field(default_factory=dict)
    values: type | None = None

    @property
    def keys(self) -> list[str]:
        """What may stand at the top of a file, after its head."""
        own = [f.name for f in dataclasses.fields(self.values)] if self.values else []
        return [*self.sections, *self.lists, *own]

    def requires(self, key: str) -> bool:
        """Whether it has to be written."""
        return key in required_keys(self.schema)


JOBS: Mapping[str, JobKind] = {
    "denoise": JobKind(
        Job,
        {
            "input": Input,
            "output": Output,
            "denoiser": DenoiserChoice,
            "tile": Tile,
            "run": Run,
            "cluster": Cluster,
        },
    ),
    "reconstruct": JobKind(
        Reconstruction,
        {
            "output": Output,
            "fidelity": FidelityChoice,
            "prior": PriorChoice,
            "solver": SolverChoice,
            "tile": Tile,
            "run": Run,
            "cluster": Cluster,
        },
        lists={"operators": OperatorChoice},
        values=Aim,
    ),
}
"""The word after ``job:``, and what it means."""


def named_in(schema: type) -> dict[str, type]:
    """The keys of a section that hold a name with its options.

    Examples
    --------
    >>> named_in(PriorChoice), named_in(Tile)
    ({'denoiser': <class 'halotile.graphs.jobs.sections.DenoiserChoice'>}, {})
    """
    hints = get_type_hints(schema)
    return {key: part for key, hint in hints.items() for part in parts(hint) if part in NAMED}
