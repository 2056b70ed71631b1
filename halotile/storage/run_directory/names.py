"""Names of the files in a run directory.

==============  ===============================================================
``job.json``    the job as it was asked for; the first file, it claims the output
``config.json``  the same job as a configuration with every size decided
``plan.json``   the plan and its fingerprint; the last file, without it nothing resumes
``journal``     which blocks are done
``status.json`` how far the run is, replaced about once a second
``events.jsonl``  what happened, one JSON object a line
``iterations.jsonl``  what each iteration of a solver came to
``performance.html``  Dask's report of the run, where its dashboard was on
``written.json``  the iterations up to the one whose image the output holds
``state``       a solver's images and numbers between two iterations
``lock``        held by the driver while it runs
``workers.lock``  held by every worker while it lives
``workers/``    what workers on other machines printed, and while they live their certificates
``batch.json``  the batch job that it was submitted as: its number, and what was asked
``batch.sh``    the script of that, and ``batch.log`` what it printed
``finished``, ``failed``  how it ended, as a mark for other programs; the second says why
``primary.json``  beside a further output of a run: the run directory, beside the first
``stop``        there while a run ends early: workers begin no further block
==============  ===============================================================
"""

from __future__ import annotations

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
WORKERS = "workers"
BATCH = "batch.json"
SCRIPT = "batch.sh"
LOG = "batch.log"
FINISHED = "finished"
FAILED = "failed"
ITERATIONS = "iterations.jsonl"
WRITTEN = "written.json"
REPORT = "performance.html"
PRIMARY = "primary.json"
NAMES = {
    JOB, CONFIG, PLAN, JOURNAL, STATUS, EVENTS, LOCK, WORKERS_LOCK, STOP, STATE,
    ITERATIONS, WRITTEN, WORKERS, BATCH, SCRIPT, LOG, FINISHED, FAILED, REPORT, PRIMARY,
}  # fmt: skip
