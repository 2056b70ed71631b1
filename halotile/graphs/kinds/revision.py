"""A part of a job that may change while its run is not finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halotile.storage.run_directory.directory import RunDirectory


@dataclass(frozen=True)
class Revision:
    """A list in the identity of a job whose later entries may change: the work keeps what it computed of the first ones.

    Parameters
    ----------
    key : str
        Its key, the same in a job file.
    kept : callable
        Takes the run directory, the fingerprint and the identity; returns the number of entries, the first ones, that the run has begun. With
        any it goes on from there.
    """

    key: str
    kept: Callable[[RunDirectory, str, Mapping[str, Any]], int]
