"""A job as configurations: as it was asked for, and with every size decided."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from halotile.graphs.jobs.sections import Job, NamedChoice
from halotile.graphs.plans.plan import Documents
from halotile.graphs.plans.worker_count import Requested

PRIVATE = ("allow_import", "import_folder")
"""Keys that no file may set: it cannot allow itself to run code."""


def documents_of(
    job: Job,
    requested: Requested,
    given: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
) -> Documents:
    """Return a job in the shape of a job file, with an absolute output.

    Parameters
    ----------
    job : Job
        With its number of workers decided.
    requested : Requested
        The number that was asked for.
    given : mapping, optional
        Parts that are written otherwise than by their fields.
    resolved : mapping, optional
        Keys of sections whose values were decided, by section; a value itself outside sections.
    """
    job = job.moved_to(os.path.abspath(job.place))
    parts: dict[str, Any] = {each.name: _written(getattr(job, each.name)) for each in fields(job)}
    parts["run"]["workers"] = requested.workers
    asked = {"version": 1, "job": job.kind, **parts, **(given or {})}
    decided = {key: value for key, value in asked.items() if key not in PRIVATE}
    for key, value in (resolved or {}).items():
        decided[key] = (
            decided[key] | value if isinstance(decided.get(key), dict) and key != "denoiser" else value
        )
    return Documents(asked, decided)


def _written(part: Any) -> Any:
    """Return a part of a job as a file has it: a choice by name as one mapping."""
    if isinstance(part, NamedChoice):
        own = asdict(part)  # type: ignore[call-overload]  # as every choice is a dataclass
        return {**{key: value for key, value in own.items() if key != "options"}, **own["options"]}
    if is_dataclass(part) and not isinstance(part, type):
        return {each.name: _written(getattr(part, each.name)) for each in fields(part)}
    if isinstance(part, tuple | list):
        return [_written(each) for each in part]
    return part
