"""Checks of a job before any image is opened: every value, and all parts that have to agree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from halotile.errors import ConfigError
from halotile.graphs.kinds.base import Check, JobKind, Rule
from halotile.graphs.kinds.finder import kind_of
from halotile.graphs.kinds.sections import Job
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules, no_check_for_nan
from halotile.graphs.rules.values import COMMON
from halotile.graphs.words import dotted, expected, fits, parts, shown
from halotile.storage.disk.object_path import credentials_fault

_hints_of: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)
Position = tuple[str | int, ...]
"""Keys that lead to a value of a job."""


def check_job(job: Job) -> None:
    """Refuse a job with values that are wrong for every image, or with parts that do not agree.

    Examples
    --------
    >>> from halotile.graphs.jobs.denoise.job import Denoising
    >>> from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run
    >>> check_job(Denoising(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...                     run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    kind = kind_of(job)
    faults_found = {**dict(_value_faults(job, checks_of(kind))), **dict(credentials_in(job))}
    if not faults_found:
        hints = _hints_of(type(job))
        names = [name for name, hint in hints.items() if hint is not Any and name != "denoiser"]
        faults_found = disagreements(kind, {name: getattr(job, name) for name in names})
    faults = [f"{dotted(position)}: {message}" for position, message in faults_found.items()]
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} problems in the job; nothing was started")
    if faults:
        raise ConfigError("\n".join(faults))


def checks_of(kind: JobKind) -> Mapping[tuple[str, str], Check]:
    """Return the checks of all values of a kind of job, by section and key."""
    return {**common_checks(_hints_of(kind.job)), **kind.checks}


def common_checks(sections: Mapping[str, Any]) -> Mapping[tuple[str, str], Check]:
    """Return the checks of the sections of a common type, whatever their names.

    ``sections``: type of each section by its name.

    Examples
    --------
    >>> from halotile.graphs.kinds.sections import Output
    >>> sorted(common_checks({"target": Output}))
    [('target', 'chunk'), ('target', 'dtype'), ('target', 'levels'), ('target', 'path'), ('target', 'shard')]
    """
    return {
        (name, key): check
        for name, hint in sections.items()
        for part in parts(hint)
        for (section, key), check in COMMON.items()
        if isinstance(part, type) and issubclass(part, section)
    }


def credentials_in(part: Any, position: Position = ()) -> Iterator[tuple[Position, str]]:
    """Yield the fault of every address with credentials in it, except in the commands of the cluster section.

    Examples
    --------
    >>> [place for place, _ in credentials_in({"input": {"path": "s3://me:secret@bucket/a.zarr"}, "cluster": {}})]
    [('input', 'path')]
    """
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    entries: Mapping[Any, Any] = part if isinstance(part, Mapping) else {}
    if isinstance(part, list | tuple):
        entries = dict(enumerate(part))
    for key, value in entries.items():
        if key != "cluster":
            yield from credentials_in(value, position if key == "options" else (*position, key))
    if isinstance(part, str) and (fault := credentials_fault(part)):
        yield position, fault


def rules_of(kind: JobKind) -> tuple[Rule, ...]:
    """Return the rules for the parts of a kind of job: its own first."""
    return (*kind.rules, *OF_CLUSTERS, *(() if kind.checks_nan else (no_check_for_nan,)))


def disagreements(kind: JobKind, parts: Mapping[str, Any]) -> dict[Position, str]:
    """Return the faults of parts that have to agree, as far as these parts are known.

    ``parts``: its sections, lists and values by name; a denoiser that it names is passed as `denoiser`.

    Examples
    --------
    >>> from halotile.graphs.kinds.finder import find_kind
    >>> from halotile.graphs.jobs.reconstruct.job import PriorChoice, SolverChoice
    >>> disagreements(find_kind("reconstruct"), {"solver": SolverChoice(name="cg"), "prior": PriorChoice(name="l1")})
    {('prior', 'name'): 'l1 with solver cg, which knows no prior; write none, or solver.name: admm, fista, gd, pgd, sgd or svrg'}
    """
    return apply_rules(rules_of(kind), parts)


def _value_faults(job: Job, checks: Mapping[tuple[str, str], Check]) -> Iterator[tuple[Position, str]]:
    """Yield the faults of all values, section by section."""
    hints, values = _hints_of(type(job)), []
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
    hints = _hints_of(type(part))
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
