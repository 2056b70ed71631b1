"""Names of the files in a run directory.

==============  ===============================================================
``job.json``    the job as requested; the first file to be written, it claims the output
``config.json``  the same job as a configuration with all sizes resolved
``plan.json``   the plan and its fingerprint; the last file to be written, without it nothing resumes
``journal``     the finished blocks
``status.json`` the progress of the run, replaced about once a second
``events.jsonl``  events, one JSON object per line
``iterations.jsonl``  results of each iteration of a solver
``performance.html``  Dask's report of the run, if its dashboard was on
``written.json``  the iterations up to the one whose image is in the output
``state``       a solver's images and numbers between two iterations
``lock``        held by the driver while it runs
``workers.lock``  held by every worker while it lives
``workers/``    output of workers on other machines, and their certificates while they live
``batch.json``  the batch job: its number and its request
``batch.sh``    the batch script, and ``batch.log`` its output
``finished``, ``failed``  the end of the run, as a mark for other programs; the second contains the reason
``primary.json``  beside a further output of a run: path of the run directory, which lies beside the first
``stop``        exists while a run ends early: workers start no further block
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
