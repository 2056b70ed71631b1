"""Checks of a job before any image is opened: every value, and all parts that have to agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from halotile.graphs.kinds.base import Check, JobKind, Rule, kind_of
from halotile.graphs.kinds.sections import Job
from halotile.graphs.rules.combinations import OF_CLUSTERS, apply_rules, no_check_for_nan
from halotile.graphs.rules.keys import PlacedFaults, faults_in, keys_of, raise_faults
from halotile.graphs.rules.values import COMMON
from halotile.graphs.words import KeyPath
from halotile.storage.disk.object_path import credentials_fault


def check_job(job: Job) -> None:
    """Refuse a job with values that are wrong for every image, or with parts that do not agree.

    >>> from halotile.graphs.jobs.denoise.job import Denoising
    >>> from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run
    >>> check_job(Denoising(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...                     run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    kind = kind_of(job)
    faults = _value_faults(job, kind) | dict(credentials_in(job))
    if not faults:
        names = [name for name, key in keys_of(type(job)).items() if key.type is not Any and name != "denoiser"]
        faults = apply_rules(rules_of(kind), {name: getattr(job, name) for name in names})
    raise_faults(faults)


def checks_of(section: str, schema: type, kind: JobKind | None = None) -> Mapping[str, Check]:
    """Return the checks of a section by key: those of its type, whatever its name, and those of the kind of job.

    >>> from halotile.graphs.kinds.sections import Output
    >>> sorted(checks_of("target", Output))
    ['chunk', 'dtype', 'levels', 'path', 'shard']
    """
    common = {key: check for (part, key), check in COMMON.items() if issubclass(schema, part)}
    own = kind.checks if kind else {}
    return common | {key: check for (part, key), check in own.items() if part == section}


def credentials_in(part: Any, position: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the fault of every address with credentials in it, except in the commands of the cluster section.

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


def _value_faults(job: Job, kind: JobKind) -> PlacedFaults:
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
            given = {key: getattr(entry, own.field.name) for key, own in keys_of(type(entry)).items()}
            found = faults_in(keys_of(type(entry)), given, checks_of(name, type(entry), kind), in_file=False)
            faults |= {(*place, *inner): message for inner, message in found.items()}
    own_keys = {name: keys[name] for name in values}
    return faults | faults_in(own_keys, values, checks_of("", type(job), kind), in_file=False)
