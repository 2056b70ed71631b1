"""Paths of a reconstruction that a script gives, made whole."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.rules.arguments import whole_path
from halotile.graphs.rules.keys import stand_ins, written_keys
from halotile.graphs.words import parts
from halotile.tasks.options import OwnPath, ReadPath


def with_whole_paths(job: Reconstruction) -> Reconstruction:
    """Return a job in which every path that is read is absolute."""
    start, reference = (
        path and whole_path(key, path) for key, path in (("start", job.start), ("reference", job.reference))
    )
    prior = replace(job.prior, options=_whole_options(job.prior, job.prior.options))
    operators = tuple(map(whole_choice, job.operators))
    return replace(job, operators=operators, prior=prior, start=start, reference=reference)


def whole_choice(choice: OperatorChoice) -> OperatorChoice:
    """Return a measurement in which every path is absolute."""
    return replace(
        choice, data=whole_path("data", choice.data), options=_whole_options(choice, choice.options)
    )


def _whole_options(choice: NamedChoice, options: Any) -> dict[str, Any]:
    """Return the options of a choice with absolute paths, those of nested choices included."""
    if "operator" in options or choice.name not in choice.accepted():
        return dict(options)
    declared = choice.declared(choice.name)
    keys, kinds = written_keys(declared), stand_ins(declared)
    paths = {key for key, kind in keys.items() if {ReadPath, OwnPath} & {*parts(kind.type)}}
    whole = {
        key: whole_path(key, value)
        for key, value in options.items()
        if key in paths and isinstance(value, str | os.PathLike)
    }
    return {key: _whole_option(value, kinds.get(key), type(choice)) for key, value in options.items()} | whole


def _whole_option(value: Any, kind: str | None, choice: type[NamedChoice]) -> Any:
    if kind == "operators" and isinstance(value, list | tuple):
        return [_whole_mapping(inner, choice) for inner in value]
    return _whole_mapping(value, DenoiserChoice) if kind == "denoiser" else value


def _whole_mapping(written: Any, choice: type[NamedChoice]) -> Any:
    if isinstance(written, DenoiserChoice):
        return replace(written, options=_whole_options(written, written.options))
    if not (isinstance(written, dict) and "name" in written):
        return written
    inner = {key: value for key, value in written.items() if key != "name"}
    named = choice.nested(written)
    return {"name": written["name"], **_whole_options(named, inner)}
