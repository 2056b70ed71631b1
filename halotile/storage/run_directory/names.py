"""Names of the files in a run directory.

==============  ===============================================================
``job.json``    the job as requested; the first file to be written, it claims the output
``config.json``  the same job as a configuration with all sizes resolved
``plan.json``   the plan and its fingerprint; the last file to be written, without it nothing resumes
``journal``     the finished blocks
``status.json`` the progress of the run, replaced about once a second
``events.jsonl``  events, one JSON object per line
``iterations.jsonl``  results of each iteration of a solver
``examples.png``  patches of a training above the same ones denoised; the object of a ptychographic reconstruction
``page.html``   the page of the run as it was at the end, if its dashboard was on
``written.json``  the iterations up to the one whose image is in the output
``state``       a solver's images and numbers between two iterations
``lock``        held by the driver while it runs
``workers.lock``  held by every worker while it lives
``workers/``    output of workers on other machines, and their certificates while they live
``batch.json``  the batch job: its number and its request
``batch.sh``    the batch script, and ``batch.log`` its output
``finished``, ``failed``  the end of the run, as a mark for other programs; the second contains the reason
``primary.json``  beside a further output of a run: path of the run directory, which lies beside the first
``claim.json``  the claim on an output in an object store, as it lies beside that
``stop``        exists while a run ends early: workers start no further block
==============  ===============================================================
"""

from __future__ import annotations

from pathlib import Path

from halotile.storage.disk.object_path import ObjectPath, OutputPath

JOB = "job.json"
CONFIG = "config.json"
PLAN = "plan.json"
JOURNAL = "journal"
STATUS = "status.json"
EVENTS = "events.jsonl"
LOCK = "lock"
WORKERS_LOCK = "workers.lock"
STOP = "stop"
STATE = "state"
REPLACED = "replaced"
WORKERS = "workers"
BATCH = "batch.json"
SCRIPT = "batch.sh"
LOG = "batch.log"
FINISHED = "finished"
FAILED = "failed"
ITERATIONS = "iterations.jsonl"
EXAMPLES = "examples.png"
WRITTEN = "written.json"
PAGE = "page.html"
PRIMARY = "primary.json"
CLAIM = "claim.json"
NAMES = {
    JOB, CONFIG, PLAN, JOURNAL, STATUS, EVENTS, LOCK, WORKERS_LOCK, STOP, STATE,
    ITERATIONS, EXAMPLES, WRITTEN, WORKERS, BATCH, SCRIPT, LOG, FINISHED, FAILED, PAGE, PRIMARY, CLAIM,
}  # fmt: skip


def run_path(output: OutputPath) -> Path:
    """Path of the run directory of an output: beside it, or in the working directory for an output in a store.

    Examples
    --------
    >>> run_path(Path("scans/clean.zarr")).as_posix(), run_path(ObjectPath("s3://scans/day/clean.zarr")).name
    ('scans/clean.zarr.run', 's3+scans+day+clean.zarr.run')
    """
    if isinstance(output, ObjectPath):
        return Path.cwd() / f"{output.as_name}.run"
    return output.parent / f"{output.name}.run"


def output_path(run: Path) -> OutputPath:
    """Place of the output that a run directory belongs to, the inverse of :func:`run_path`; without ``.run``, the path itself."""
    name = run.name.removesuffix(".run")
    place = ObjectPath.from_name(name) if name != run.name else None
    return place or run.with_name(name)
