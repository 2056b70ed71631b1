"""Paths of a reconstruction that a script gives, made whole."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice
from halotile.graphs.rules.arguments import whole_path
from halotile.graphs.rules.written_options import stand_ins


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
    meant = stand_ins(declared) if choice.differs else {"weights": "array"}
    return {key: _whole_option(key, value, meant.get(key), type(choice)) for key, value in options.items()}


def _whole_option(key: str, value: Any, kind: str | None, choice: type[NamedChoice]) -> Any:
    if kind in ("array", "image") and isinstance(value, str | os.PathLike):
        return whole_path(key, value)
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
