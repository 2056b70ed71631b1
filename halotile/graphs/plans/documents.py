"""A job as configurations: as it was asked for, and with every size decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from halotile.graphs.kinds.sections import Job, NamedChoice
from halotile.graphs.plans.plan import Documents
from halotile.graphs.plans.resources.worker_count import Requested
from halotile.storage.disk.object_path import full_path
from halotile.tasks.options import job_key

PRIVATE = ("allow_import", "import_folder")
"""Keys that no file may set: a file must not allow itself to run code."""


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
        The number of workers that was asked for.
    given : mapping, optional
        Parts that are written differently from their fields.
    resolved : mapping, optional
        Keys of sections whose values were decided, by section; for values outside sections the value itself.
    """
    job = job.moved_to(str(full_path(job.place)))
    parts: dict[str, Any] = {f.name: _written(getattr(job, f.name)) for f in fields(job)}
    parts["run"]["workers"] = requested.workers
    requested_document = {"version": 1, "job": job.kind, **parts, **(given or {})}
    decided = {key: value for key, value in requested_document.items() if key not in PRIVATE}
    for key, value in (resolved or {}).items():
        decided[key] = (
            decided[key] | value if isinstance(decided.get(key), dict) and key != "denoiser" else value
        )
    return Documents(requested_document, decided)


def _written(part: Any) -> Any:
    """Return a part of a job as a file has it: a choice by name as one mapping."""
    if isinstance(part, NamedChoice):
        choice = asdict(part)  # type: ignore[call-overload]  # every choice is a dataclass
        options = {key: _written(value) for key, value in part.options.items()}
        return {**{key: value for key, value in choice.items() if key != "options"}, **options}
    if is_dataclass(part) and not isinstance(part, type):
        return {job_key(item.name): _written(getattr(part, item.name)) for item in fields(part)}
    if isinstance(part, tuple | list):
        return [_written(item) for item in part]
    return part
