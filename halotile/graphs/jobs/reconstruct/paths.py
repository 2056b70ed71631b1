"""Paths of a reconstruction that a script gives, made whole."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.rules.operator_options import stand_ins
from halotile.graphs.rules.paths import whole_path
from halotile.registry import find, names


def with_whole_paths(job: Reconstruction) -> Reconstruction:
    """Return a job in which every path that is read is absolute."""
    start, reference = (
        path and whole_path(key, path) for key, path in (("start", job.start), ("reference", job.reference))
    )
    prior = job.prior
    if isinstance(prior.denoiser, DenoiserChoice) and isinstance(
        weights := prior.denoiser.options.get("weights"), str | os.PathLike
    ):
        options = {**prior.denoiser.options, "weights": whole_path("weights", weights)}
        prior = replace(prior, denoiser=replace(prior.denoiser, options=options))
    operators = tuple(map(whole_choice, job.operators))
    return replace(job, operators=operators, prior=prior, start=start, reference=reference)


def whole_choice(choice: OperatorChoice) -> OperatorChoice:
    """Return a measurement in which every path is absolute."""
    return replace(
        choice, data=whole_path("data", choice.data), options=_whole_options(choice.name, choice.options)
    )


def _whole_options(name: str, options: Any) -> dict[str, Any]:
    """Return the options of an operator with absolute paths, those of nested operators included."""
    if "operator" in options or name not in names("operators"):
        return dict(options)
    meant = stand_ins(find("operators", name).OPERATOR)
    return {key: _whole_option(key, value, meant.get(key)) for key, value in options.items()}


def _whole_option(key: str, value: Any, kind: str | None) -> Any:
    if kind in ("array", "image") and isinstance(value, str | os.PathLike):
        return whole_path(key, value)
    if kind == "operators" and isinstance(value, list | tuple):
        return [
            {"name": inner["name"], **_whole_options(inner["name"], _beside_name(inner))}
            if isinstance(inner, dict) and "name" in inner
            else inner
            for inner in value
        ]
    return value


def _beside_name(written: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key != "name"}
