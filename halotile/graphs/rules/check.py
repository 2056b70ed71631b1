"""Checks of a job before any image is opened: every value, and all parts that have to agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from halotile.graphs.kinds.base import Check, JobKind, Rule
from halotile.graphs.kinds.finder import kind_of
from halotile.graphs.kinds.sections import Job
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules, no_check_for_nan
from halotile.graphs.rules.keys import PlacedFaults, faults_in, keys_of, raise_faults
from halotile.graphs.rules.values import COMMON
from halotile.graphs.words import KeyPath, parts
from halotile.storage.disk.object_path import credentials_fault


def check_job(job: Job) -> None:
    """Refuse a job with values that are wrong for every image, or with parts that do not agree.

    Raises
    ------
    ConfigError
        With every fault, one a line.

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
    faults = _value_faults(job, checks_of(kind)) | dict(credentials_in(job))
    if not faults:
        names = [
            name for name, key in keys_of(type(job)).items() if key.type is not Any and name != "denoiser"
        ]
        faults = apply_rules(rules_of(kind), {name: getattr(job, name) for name in names})
    raise_faults(faults)


def of_section(checks: Mapping[tuple[str, str], Check], section: str) -> Mapping[str, Check]:
    """Return the checks of one section, by key."""
    return {key: check for (part, key), check in checks.items() if part == section}


def checks_of(kind: JobKind) -> Mapping[tuple[str, str], Check]:
    """Return the checks of all values of a kind of job, by section and key."""
    return {**common_checks({name: key.type for name, key in keys_of(kind.job).items()}), **kind.checks}


def common_checks(sections: Mapping[str, Any]) -> Mapping[tuple[str, str], Check]:
    """Return the checks of the sections of a common type, whatever their names.

    Parameters
    ----------
    sections : mapping
        The type of each section by its name.

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


def credentials_in(part: Any, position: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
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


def _value_faults(job: Job, checks: Mapping[tuple[str, str], Check]) -> PlacedFaults:
    """Return the faults of all values, section by section."""
    faults: PlacedFaults = {}
    values: dict[str, Any] = {}
    keys = keys_of(type(job))
    for name in keys:
        part = getattr(job, name)
        entries: dict[KeyPath, Any] = {(name,): part}
        if isinstance(part, tuple) and part and all(map(dataclasses.is_dataclass, part)):
            entries = {(name, number): entry for number, entry in enumerate(part)}
        elif not dataclasses.is_dataclass(part):
            values |= {} if keys[name].type is Any else {name: part}
            continue
        for place, entry in entries.items() if name != "denoiser" else ():
            own = {key: getattr(entry, kind.field.name) for key, kind in keys_of(type(entry)).items()}
            found = faults_in(keys_of(type(entry)), own, of_section(checks, name))
            faults |= {(*place, *inner): message for inner, message in found.items()}
    return faults | faults_in({name: keys[name] for name in values}, values, of_section(checks, ""))
