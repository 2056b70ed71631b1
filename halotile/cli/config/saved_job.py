"""The job in a run directory, loaded to resume it or to repair its output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_saved_job
from halotile.cli.status import check_here, run_of
from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Job
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path
from halotile.storage.run_directory.directory import RunDirectory


def saved_job(directory: Path, flags: Flags = Flags()) -> Job:
    """Return the job of a run directory, with new paths where that was moved together with its output."""
    run = RunDirectory(directory)
    job = load_saved_job(run.job_path, flags, has_begun=run.read_valid_plan() is not None)
    place = full_path(job.place)
    if isinstance(place, ObjectPath):
        check_here(directory, place)
        return job
    belongs = RunDirectory.beside(place).path
    if os.path.realpath(belongs) == os.path.realpath(directory):
        return job
    output = _output_beside(directory)
    if output is None or os.path.lexists(job.place) or os.path.lexists(belongs):
        raise ConfigError(_refusal(directory, job.place, output))
    _move_job(RunDirectory(Path(os.path.realpath(directory))), job.place, str(output))
    return job.moved_to(str(output))


def _output_beside(directory: Path) -> Path | None:
    """Return the output that a run directory lies beside, if there is one."""
    real_path = Path(os.path.realpath(directory))
    output = real_path.with_name(real_path.name.removesuffix(".run"))
    return output if output != real_path and output.is_dir() else None


def _refusal(directory: Path, before: str, output: Path | None) -> str:
    """Return the reason why a job is not resumed at the present place of its directory."""
    belongs = f"{directory} belongs to the output {before}: it was moved or copied"
    if output is None:
        return f"{belongs}. Move both back, or run the configuration with the new output.path."
    # Resuming a copy as well would make two runs of one journal.
    return (
        f"{belongs}, and something still stands at the old place. Move that away to go on here, "
        f"or run the configuration with output.path: {output}."
    )


def _move_job(run: RunDirectory, before: str, place: str) -> None:
    """Record the present place of the output: a later file at the old place may belong to another job."""
    with run.lock():
        job = run.read_job()
        assert job is not None  # it was read just before
        run.write_job(moved(job, before, place))


def moved(part: Any, before: str, place: str) -> Any:
    """Return a stored job, or a part of it, with another path wherever it names the path of its first output.

    Examples
    --------
    >>> moved({"job": "denoise", "output": {"path": "/a.zarr"}}, "/a.zarr", "/b.zarr")
    {'job': 'denoise', 'output': {'path': '/b.zarr'}}
    """
    if isinstance(part, dict):
        return {key: moved(value, before, place) for key, value in part.items()}
    if isinstance(part, list):
        return [moved(value, before, place) for value in part]
    return place if part == before else part


def saved_job_of(output: OutputPath, *, allow_import: bool = False) -> Job | None:
    """Return the job that wrote an output; None where it has no run directory."""
    directory = run_of(output)
    if not RunDirectory(directory).job_path.is_file():
        return None
    return saved_job(directory, Flags(allow_import=allow_import))
