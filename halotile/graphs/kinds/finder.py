"""The kinds of jobs by name: folders in ``graphs/jobs``, and entry points ``halotile.jobs`` of installed packages."""

from __future__ import annotations

from collections.abc import Mapping

from halotile.errors import ConfigError
from halotile.graphs.kinds.base import JobKind
from halotile.graphs.kinds.sections import Job
from halotile.registry import find, names


def kind_names() -> list[str]:
    """Return every word that may follow ``job:``.

    Examples
    --------
    >>> "denoise" in kind_names()
    True
    """
    return names("jobs")


def find_kind(name: str) -> JobKind:
    """Return the kind of this name.

    Examples
    --------
    >>> find_kind("denoise").job.__name__
    'Denoising'
    """
    module = find("jobs", name)
    kind = getattr(module, "KIND", module)
    if not isinstance(kind, JobKind):
        raise ConfigError(f"the plug-in {name} declares no KIND of job. Repair or uninstall it.")
    return kind


def kind_of(job: Job) -> JobKind:
    return find_kind(job.kind)


def kinds() -> Mapping[str, JobKind]:
    """Return all kinds by name."""
    return {name: find_kind(name) for name in kind_names()}
