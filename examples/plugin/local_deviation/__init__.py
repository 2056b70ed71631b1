"""A kind of job: the standard deviation of an image around each pixel, and an overview of half its size."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from halotile.graphs.kinds.base import Figures, JobKind, Row
from halotile.graphs.kinds.sections import Input, Output, OutputJob
from halotile.graphs.plans.rows import cost_rows, output_rows
from halotile.graphs.rules.values import AtLeast, Faults, output_path
from halotile.tasks.options import OwnPath


@dataclass(frozen=True, kw_only=True)
class LocalDeviation(OutputJob):
    """The standard deviation of an image around each pixel."""

    kind: ClassVar[str] = "local-deviation"

    input: Input
    overview: OwnPath
    """Path of a second Zarr to write: the deviation at half its size."""
    radius: int = 4
    """Edge of the square around a pixel is twice this, plus one."""

    def moved_into(self, folder: str) -> Self:
        """Return the same job with both outputs in a folder."""
        overview = os.path.join(folder, os.path.basename(self.overview))
        return replace(super().moved_into(folder), overview=overview)


def title(job: LocalDeviation) -> str:
    """Return a job in a few words."""
    return f"deviation within {job.radius} pixels, from {job.input.path} to {job.output.path}"


def headline(figures: Figures) -> str:
    """Return a plan in one line."""
    return f"deviation within {figures['radius']} pixels in {figures['blocks']} blocks"


def rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    return [
        ("input", str(figures["input"])),
        ("output", str(figures["output"])),
        ("radius", f"{figures['radius']} pixels"),
        *output_rows(figures),
        *cost_rows(figures),
    ]


def unused(input: Input, output: Output) -> Faults:  # noqa: A002 - a rule takes parts by their keys
    """Refuse keys of the sections that this job has no use for."""
    for section, key, value in (
        ("input", "range", input.range != "auto"),
        ("input", "sides", bool(input.sides)),
        ("input", "spacing", bool(input.spacing)),
        ("input", "nodata", input.nodata != "auto"),
        ("output", "dtype", output.dtype != "auto"),
    ):
        if value:
            yield (section, key), "is not for job local-deviation; leave it out"


KIND = JobKind(
    job=LocalDeviation,
    plan="local_deviation.plan:plan",
    title=title,
    headline=headline,
    rows=rows,
    checks={("", "radius"): AtLeast(1), ("", "overview"): output_path},
    rules=(unused,),
    inputs=("input",),
)
