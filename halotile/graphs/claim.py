"""Taking possession of an output: alone, with the right journal, nothing of anybody else's touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from halotile.errors import OutputRefused, ResumeRefused
from halotile.graphs.job import DenoiserChoice
from halotile.graphs.plan import Plan
from halotile.graphs.resolve import describe_denoiser
from halotile.storage.disk import sweep_partials
from halotile.storage.journal import Journal
from halotile.storage.output import create_output, metadata_digest
from halotile.storage.rundir import RunDirectory

ORPHAN_SECONDS = 60.0
"""How long workers of a killed driver may take to end before a new one may write."""


@contextmanager
def claim(plan: Plan, directory: RunDirectory) -> Iterator[Journal]:
    """Hold the output of a plan, with the journal of what is done, for the length of the context.

    Raises
    ------
    OutputRefused
        When something that is not this job's stands there, or another run is writing.
    ResumeRefused
        When the run directory belongs to a different job; the message lists what differs.
    """
    if not directory.exists():
        _check_free(plan)
    with directory.lock():
        directory.wait_for_workers(ORPHAN_SECONDS)
        if _resumable(plan, directory):
            sweep_partials(plan.output)
        else:
            _start_over(plan, directory)
        journal = Journal.open(directory.journal_path, plan.fingerprint, len(plan.grid))
        try:
            yield journal
        finally:
            journal.close()


def _check_free(plan: Plan) -> None:
    """Nothing may stand at the output unless the job says to replace it."""
    if plan.output.exists() and not plan.job.output.overwrite:
        raise OutputRefused(
            f"output.path is {plan.output}: something stands there that no run of ours made. "
            "Write another path, or output.overwrite: true to replace it."
        )


def _resumable(plan: Plan, directory: RunDirectory) -> bool:
    """Whether the directory holds this very job, with its output as it was left."""
    previous = directory.read_plan()
    if previous is None or plan.fresh:
        return False
    if plan.differs:
        listed = "\n".join(f"  {line}" for line in plan.differs)
        raise ResumeRefused(
            f"{directory.path} belongs to a different job:\n{listed}\n"
            "Write what it was, or run with --fresh to start over."
        )
    if not directory.journal_path.exists():
        return False
    if not plan.output.exists():
        return False
    if metadata_digest(plan.output, plan.layout) != previous["metadata"]:
        raise OutputRefused(
            f"the metadata of {plan.output} is not what the run wrote. "
            "`recon-cli verify --repair` restores it; --fresh starts over."
        )
    return True


def _start_over(plan: Plan, directory: RunDirectory) -> None:
    """An empty output and an empty journal.

    The job comes first: it claims the output, so that a run cut off in here may begin again. The plan
    comes last: without one, nothing is resumed.
    """
    ours = directory.job_path.exists()
    if not ours:
        _check_free(plan)
    directory.forget()
    directory.write_job(job_to_json(plan))
    create_output(plan.output, plan.layout, overwrite=ours or plan.job.output.overwrite)
    Journal.create(directory.journal_path, plan.fingerprint, len(plan.grid)).close()
    directory.write_plan(plan.to_json() | {"metadata": metadata_digest(plan.output, plan.layout)})


def job_to_json(plan: Plan) -> dict[str, object]:
    """The job as a configuration: the same shape as the YAML, with an absolute output."""
    parts = {name: asdict(getattr(plan.job, name)) for name in ("input", "output", "tile", "run", "cluster")}
    parts["output"]["path"] = str(plan.output)
    choice = plan.job.denoiser
    if isinstance(choice, DenoiserChoice):
        denoiser = {"name": choice.name, **choice.options}
    else:
        denoiser = describe_denoiser(choice)
    return {
        "version": 1,
        "job": "denoise",
        **parts,
        "denoiser": denoiser,
        "allow_import": plan.job.allow_import,
    }
