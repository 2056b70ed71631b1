"""What each kind of job says of itself to people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halotile.cli.screens import denoising, reconstruction
from halotile.cli.screens.plan_rows import Figures
from halotile.cli.screens.screen import Row
from halotile.graphs.jobs.sections import AnyJob, Job, Reconstruction


@dataclass(frozen=True)
class Words:
    """A kind of job in words.

    Parameters
    ----------
    job : callable
        A checked job in a few words.
    headline : callable
        The figures of a plan in one line.
    rows : callable
        The figures of a plan as rows.
    """

    job: Callable[[Any], str]
    headline: Callable[[Figures], str]
    rows: Callable[[Figures], list[Row]]


_WORDS: Mapping[type, Words] = {
    Job: Words(denoising.job_text, denoising.headline, denoising.plan_rows),
    Reconstruction: Words(reconstruction.job_text, reconstruction.headline, reconstruction.plan_rows),
}


def words_of(job: AnyJob) -> Words:
    """The words for a job."""
    return _WORDS[type(job)]
