"""The job that a run directory keeps, to go on with it or to repair what it wrote."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from halotile.cli.config.loading import NO_FLAGS, Flags, load_saved_job
from halotile.cli.status import run_beside
from halotile.errors import ConfigError
from halotile.graphs.jobs.sections import AnyJob
from halotile.storage.run_directory.directory import RunDirectory


def saved_job(directory: Path, flags: Flags = NO_FLAGS) -> AnyJob:
    """The job of a run directory. Where that was moved together with its output, the job moves with them.

    Raises
    ------
    ConfigError
        When there is none, or it writes to another place than the one the directory lies beside.
    OutputRefused
        When it was moved and a run is writing.
    """
    job = load_saved_job(RunDirectory(directory).job_path, flags)
    belongs = run_beside(Path(job.output.path))
    if os.path.realpath(belongs) == os.path.realpath(directory):
        return job
    here = _output_beside(directory)
    if here is None or os.path.lexists(job.output.path) or os.path.lexists(belongs):
        raise ConfigError(_refusal(directory, job.output.path, here))
    _move_job(RunDirectory(Path(os.path.realpath(directory))), here)
    return dataclasses.replace(job, output=dataclasses.replace(job.output, path=str(here)))


def _output_beside(directory: Path) -> Path | None:
    """The output that a run directory lies beside, if it does."""
    whole = Path(os.path.realpath(directory))
    output = whole.with_name(whole.name.removesuffix(".run"))
    return output if output != whole and output.is_dir() else None


def _refusal(directory: Path, before: str, here: Path | None) -> str:
    """Why a job does not go on from where its directory lies now."""
    belongs = f"{directory} belongs to the output {before}: it was moved or copied"
    if here is None:
        return f"{belongs}. Move both back, or run the configuration with the new output.path."
    # To go on with a copy as well would make two runs of one journal.
    return (
        f"{belongs}, and something still stands at the old place. Move that away to go on here, "
        f"or run the configuration with output.path: {here}."
    )


def _move_job(run: RunDirectory, output: Path) -> None:
    """Write down where the output is now: what may stand at the old place some day is another's."""
    with run.lock():
        job = run.read_job()
        assert job is not None  # it was read just now
        job["output"]["path"] = str(output)
        run.write_job(job)


def saved_job_of(output: Path, *, allow_import: bool = False) -> AnyJob | None:
    """The job that wrote an output; None where no run directory lies beside it."""
    directory = run_beside(output)
    if not RunDirectory(directory).job_path.is_file():
        return None
    return saved_job(directory, Flags(allow_import=allow_import))
