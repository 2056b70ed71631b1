"""A job checked before any image is looked at: every value, and all parts that have to agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from halotile.errors import ConfigError
from halotile.graphs.jobs.base import Check, JobKind
from halotile.graphs.jobs.kinds import kind_of
from halotile.graphs.jobs.sections import Job
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules
from halotile.graphs.rules.values import COMMON
from halotile.graphs.rules.words import dotted, expected, fits, shown

Position = tuple[str | int, ...]
"""Keys that lead to a value of a job."""


def check_job(job: Job) -> None:
    """Refuse a job with values that no image could make right, or with parts that do not agree.

    Raises
    ------
    ConfigError
        With every fault, one a line.

    Examples
    --------
    >>> from halotile.graphs.jobs.denoise.job import Denoising
    >>> from halotile.graphs.jobs.sections import DenoiserChoice, Input, Output, Run
    >>> check_job(Denoising(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...                     run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    kind = kind_of(job)
    found = dict(_value_faults(job, checks_of(kind)))
    if not found:
        parts = {
            name: getattr(job, name) for name, hint in get_type_hints(type(job)).items() if hint is not Any
        }
        found = disagreements(kind, {name: part for name, part in parts.items() if name != "denoiser"})
    faults = [f"{dotted(position)}: {message}" for position, message in found.items()]
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} problems in the job; nothing was started")
    if faults:
        raise ConfigError("\n".join(faults))


def checks_of(kind: JobKind) -> Mapping[tuple[str, str], Check]:
    """Return the checks of all values of a kind of job, by section and key."""
    return {**COMMON, **kind.checks}


def disagreements(kind: JobKind, parts: Mapping[str, Any]) -> dict[Position, str]:
    """Return the faults of parts that have to agree, as far as the parts are known.

    Parameters
    ----------
    kind : JobKind
        The kind of job.
    parts : mapping
        Its sections, lists and values by name; a denoiser that it names, as ``denoiser``.

    Examples
    --------
    >>> from halotile.graphs.jobs.kinds import find_kind
    >>> from halotile.graphs.jobs.reconstruct.job import PriorChoice, SolverChoice
    >>> disagreements(find_kind("reconstruct"), {"solver": SolverChoice(name="cg"), "prior": PriorChoice(name="l1")})
    {('prior', 'name'): 'l1 with solver cg, which knows no prior; write none, or solver.name: admm, fista, gd or pgd'}
    """
    return apply_rules((*kind.rules, *OF_CLUSTERS), parts)


def _value_faults(job: Job, checks: Mapping[tuple[str, str], Check]) -> Iterator[tuple[Position, str]]:
    """Yield the faults of all values, section by section."""
    hints, values = get_type_hints(type(job)), []
    for field in dataclasses.fields(job):
        part = getattr(job, field.name)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            if "denoiser" not in field.name:
                yield from _faults((field.name,), field.name, part, checks)
        elif isinstance(part, tuple) and part and all(map(dataclasses.is_dataclass, part)):
            for number, entry in enumerate(part):
                yield from _faults((field.name, number), field.name, entry, checks)
        elif hints[field.name] is not Any:
            values.append(field)
    for field in values:
        yield from _fault((), "", field.name, getattr(job, field.name), hints[field.name], checks)


def _faults(
    position: Position, section: str, part: Any, checks: Mapping[tuple[str, str], Check]
) -> Iterator[tuple[Position, str]]:
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        yield from _fault(position, section, field.name, getattr(part, field.name), hints[field.name], checks)


def _fault(
    position: Position, section: str, key: str, value: Any, hint: Any, checks: Mapping[tuple[str, str], Check]
) -> Iterator[tuple[Position, str]]:
    """Yield the fault of one value, if it has one."""
    check = checks.get((section, key))
    if not fits(value, hint):
        yield (*position, key), f"{shown(value)} is not {expected(hint)}"
    elif check is not None and value is not None and (message := check(value)):
        yield (*position, key), message
