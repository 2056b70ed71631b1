"""The job that a run directory keeps, to go on with it or to repair what it wrote."""

from __future__ import annotations

import os
from pathlib import Path

from halotile.cli.config import load_saved_job
from halotile.errors import ConfigError
from halotile.graphs.job import Job
from halotile.storage.rundir import RunDirectory


def saved_job(
    directory: Path, *, workers: int | None = None, allow_import: bool = False, dashboard: bool = True
) -> Job:
    """The job of a run directory.

    Raises
    ------
    ConfigError
        When there is none, or it writes to another place than the one the directory lies beside.
    """
    job = load_saved_job(
        RunDirectory(directory).job_path, workers=workers, allow_import=allow_import, dashboard=dashboard
    )
    belongs = Path(job.output.path + ".run")
    if os.path.realpath(belongs) != os.path.realpath(directory):
        raise ConfigError(
            f"{directory} belongs to the output {job.output.path}: it was moved or copied. "
            "Move both back, or run the configuration with the new output.path."
        )
    return job


def saved_job_of(output: Path, *, allow_import: bool = False) -> Job | None:
    """The job that wrote an output; None where no run directory lies beside it."""
    whole = output.absolute()
    directory = whole.with_name(whole.name + ".run")
    if not RunDirectory(directory).job_path.is_file():
        return None
    return saved_job(directory, allow_import=allow_import)
