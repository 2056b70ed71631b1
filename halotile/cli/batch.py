"""Submitted runs on the command line: requests to batch systems, and reports from a run directory alone."""

from __future__ import annotations

import dataclasses
import getpass
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typer import Exit

from halotile.cli.arguments import Flags, RunOptions
from halotile.cli.exits import StoppedEarly
from halotile.cli.screens.screen import complain, echo
from halotile.cli.status import CANCELLED, QUEUE_SECONDS, read_status
from halotile.errors import ClusterFailed, ConfigError, Stopped
from halotile.graphs.clusters.base import ADDRESS, ATTENDED, VARIABLE
from halotile.graphs.clusters.launches.batch_system import SLURM, system_in, system_of
from halotile.graphs.kinds.sections import takes_many
from halotile.graphs.waiting import patience_seconds
from halotile.storage.disk.object_path import full_path
from halotile.storage.run_directory.directory import LOCK_SECONDS, WORKERS, BatchFiles, RunDirectory

if TYPE_CHECKING:
    from halotile.graphs.kinds.base import Row
    from halotile.graphs.kinds.sections import Job
    from halotile.graphs.submission import Submission

# Time for trials of the user's code on the machine that submits, which others share: the batch job tries it all.
TRIAL_SECONDS = 5.0
END_SECONDS = 60.0  # time that a job may take to end
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be submitted."""

    figures: Mapping[str, Any]  # its plan, for programs
    rows: Sequence[Row]  # its plan, for people
    submission: Submission  # record of the submission that is stored
    script: str  # batch script
    run: RunDirectory  # directory of the run and its files


def prepare(job: Job, asked: RunOptions) -> Prepared:
    """Plan a job as it will run inside its batch job; nothing is written."""
    from halotile.graphs.kinds.base import Requested
    from halotile.graphs.plans.needs import workers_of
    from halotile.graphs.plans.plan import documents_of
    from halotile.graphs.plans.trials.denoiser_trials import TrialTooLong, trials_within
    from halotile.graphs.submission import Submission, check_not_waiting, check_walltime, notice_seconds, script_of

    if not job.cluster.tls:
        raise ConfigError("cluster.tls is false, and a batch job may have several machines: leave it out.")
    # Independent of this machine, or an allocation around it.
    kind = SLURM if job.cluster.kind in ("auto", "slurm-alloc") else job.cluster.kind
    batch_system = system_of(kind)
    if batch_system is None or batch_system.driver is None:
        raise ConfigError(
            f"cluster.kind is {kind}, and submit is for Slurm, PBS, SGE and LSF. Write kind: slurm, pbs, sge or lsf, or start it "
            "with `recon-cli run`."
        )
    # Refuses what the jobs of its workers could not be submitted with.
    batch_system.requests(job.cluster, 0, Path())
    check_walltime(job.cluster, batch_system)
    run = RunDirectory.beside(full_path(job.place))
    if "\\" in str(run.path) and kind == SLURM:
        raise ConfigError(
            f"output.path is {job.place}, and Slurm drops the backslash from the names of its logs. Write a path without."
        )
    check_not_waiting(run)
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, kind=kind))
    try:
        with trials_within(TRIAL_SECONDS):
            figures, rows, workers = _planned(job, asked)
    except TrialTooLong as late:
        note = f"{late} the {TRIAL_SECONDS:g} s allowed on this machine; the batch job will plan the run"
        workers = workers_of(job.run, job.cluster, "cpu").workers
        figures, rows = {"notes": [note]}, [("note", note)]
        complain(f"note: {note}")
    job = dataclasses.replace(job, run=dataclasses.replace(job.run, workers=workers))
    saved = dict(documents_of(job, Requested(workers, "")).asked)
    # Wherever it is resumed later, it uses the resources there: in its batch job, the allocation.
    if kind == SLURM:
        saved["cluster"] = {**saved["cluster"], "kind": "auto"}
    submission = Submission(
        job=saved,
        notice_seconds=notice_seconds(job.cluster, kind),
        options={"fresh": asked.fresh, "same_input": asked.same_input, "allow_import": job.allow_import},
        submitted_from=_this_machine(),
        submitted=time.time(),
        system=kind,
    )
    return Prepared(figures, rows, submission, script_of(batch_system, job, run.path, _umask()), run)


def _planned(job: Job, asked: RunOptions) -> tuple[Mapping[str, Any], Sequence[Row], int]:
    """Plan a job, or that of each image: figures, rows, and the number of workers."""
    from halotile.cli import running
    from halotile.graphs.plans.plan import make_plan
    from halotile.graphs.runs.claim import count_done

    if takes_many(job):
        images = running.plan_images(job, asked, quiet=False)
        images.check_disk()
        running.name_failures(images.failed)
        workers = max(plan.run.count for plan in images.plans.values())
        return running.figures_of(images), running.plan_rows(images), workers
    plan = make_plan(job, fresh=asked.fresh, same_input=asked.same_input)
    count_done(plan)
    return plan.summary(), plan.kind.rows(plan.summary() | {"resumed_blocks": 0}), plan.run.count


def submitted_words(made: Submission, run: RunDirectory) -> str:
    """Describe the next steps."""
    commands = [
        f"  recon-cli {word} {shlex.quote(str(run.path))}{options}"
        for word, options in (("status", " --watch"), ("logs", ""), ("dashboard", ""), ("cancel", ""))
    ]
    return "\n".join([f"submitted as job {made.number}; from here on:", *commands])


def attend(path: Path) -> None:
    """Make one attempt at a submitted run, inside its batch job."""
    from halotile.cli.config.loading import check_saved_job
    from halotile.cli.running import go, go_through_images
    from halotile.graphs.submission import attend as make_attempt

    run = RunDirectory(path)
    for name in (VARIABLE, ADDRESS):  # those of the shell that the job was submitted from
        os.environ.pop(name, None)
    os.environ[ATTENDED] = "1"

    def attempt(submission: Submission, fresh: bool) -> None:
        options = submission.options
        flags = Flags(allow_import=options["allow_import"])
        job = check_saved_job(dict(submission.job), path, "batch.json", flags)
        asked = RunOptions(fresh=fresh, same_input=options["same_input"])
        try:
            if takes_many(job):
                with run.lock(patience_seconds(LOCK_SECONDS)):
                    go_through_images(job, asked, directory=run, since=submission.submitted)
            else:
                go(job, asked)
        except Exit as ended:
            ended.args = ("some images failed; see `recon-cli logs`",)
            raise
        except StoppedEarly as early:  # before the run, while it was planned
            raise Stopped(str(early), str(early).split()[-1]) from early

    make_attempt(run, attempt)


def look_after(path: Path) -> int:
    """Make the attempt in another process, and mark the run where that is killed; return the exit code.

    A process that is killed, mostly for memory, has no time to report it itself.
    """
    from halotile.graphs.runs.signals import PASSED_ON, run_child

    code = run_child([sys.executable, "-P", "-m", "halotile", "attend", str(path), "--driver"])
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    if -code not in PASSED_ON:  # otherwise it was asked to end before it could report so itself
        why = ", for memory perhaps" if -code == signal.SIGKILL else ""
        BatchFiles(RunDirectory(path)).mark_end(
            f"its driver was killed ({name}){why}: `recon-cli submit` of the same configuration goes on"
        )
    return 128 - code


def logs_of(directory: Path, lines: int, *, with_workers: bool) -> Iterator[tuple[str, str]]:
    """Yield the ends of the logs, with the path of each."""
    files = BatchFiles(RunDirectory(directory))
    paths = [files.log_path, *(sorted((directory / WORKERS).glob("*.*")) if with_workers else ())]
    logs = [path for path in paths if path.is_file() and path.stat().st_size]
    if files.read() is None and not logs:
        raise ConfigError(
            f"{directory}: this run was not submitted, and has no workers on other machines: there are no logs."
        )
    if not logs:
        raise ConfigError(
            f"{directory}: nothing has been printed yet. `recon-cli status {shlex.quote(str(directory))}` shows its state."
        )
    for path in logs:
        yield path.name, "\n".join(path.read_text(errors="replace").splitlines()[-max(1, lines) :])


def follow_log(directory: Path, lines: int) -> None:
    """Print the end of the log of the batch job, and new lines until the run is over."""

    path = BatchFiles(RunDirectory(directory)).log_path
    position = 0
    while True:
        over = read_status(directory).over  # before the last read
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            text = file.read().decode(errors="replace")
            shown = text if position else "".join(text.splitlines(keepends=True)[-lines:])
            position = file.tell()
            if shown:
                echo(shown.removesuffix("\n"))
        if over:
            return
        time.sleep(QUEUE_SECONDS)


def cancel(directory: Path) -> str:
    """End a run, and wait until it has ended."""

    run = RunDirectory(directory)
    files = BatchFiles(run)
    record = files.read() or {}
    number, system = record.get("number"), system_in(record)
    if number and system.state_of(number) is not None:
        if not files.finished:
            system.cancel(number)
        _await_end(lambda: system.state_of(number) is None, f"job {number}")
        if files.finished:
            raise ConfigError(f"{directory}: the run has finished.")
        files.mark_end(CANCELLED)
        return f"job {number} is cancelled; `recon-cli submit` of the same configuration goes on with the run"
    holder = run.is_running()
    if holder is None:
        raise ConfigError(f"{directory}: nothing runs there.")
    if holder.get("host") != socket.gethostname():
        raise ConfigError(
            f"{directory}: its driver is process {holder.get('pid')} on {holder.get('host')}. Cancel it there."
        )
    os.kill(int(holder["pid"]), signal.SIGTERM)
    _await_end(lambda: run.is_running() is None, f"process {holder['pid']}")
    return f"stopped; `recon-cli resume {shlex.quote(str(directory))}` goes on"


def dashboard_words(directory: Path) -> str:
    """Return the address of the dashboard, with the command that makes it available on another computer."""

    status = read_status(directory)
    address = status.recorded.get("dashboard")
    if status.over or status.queued or not address:
        waits = "waits in the queue" if status.queued else "has no dashboard, or none yet"
        why = "is over" if status.over else waits
        raise ConfigError(f"{directory}: the run {why}.")
    record = BatchFiles(RunDirectory(directory)).read()
    return tunnel_words(
        str(address),
        host=str(status.recorded.get("host")),
        login=(record or {}).get("submitted_from") or _this_machine(),
        user=getpass.getuser(),
    )


def tunnel_words(address: str, *, host: str, login: str, user: str) -> str:
    """Describe an address on a machine's loopback, and how to reach it from elsewhere.

    >>> print(tunnel_words("http://127.0.0.1:4711/status", host="node7", login="login1.example.org", user="ada"))
    http://127.0.0.1:4711/status on node7
    from your own computer:
      ssh -N -L 4711:127.0.0.1:4711 -J ada@login1.example.org ada@node7
    and open http://127.0.0.1:4711/status there
    """
    port = urlsplit(address).port
    same = login.split(".")[0] == host.split(".")[0]
    way = f"{user}@{login}" if same else f"-J {user}@{login} {user}@{host}"
    return (
        f"{address} on {host}\nfrom your own computer:\n  ssh -N -L {port}:127.0.0.1:{port} {way}\n"
        f"and open {address} there"
    )


def tunnel_here(address: str) -> str:
    """Describe an address on this machine's loopback, and how to reach it from elsewhere."""
    name = _this_machine()
    return tunnel_words(address, host=name, login=name, user=getpass.getuser())


def _umask() -> int:
    """Return the umask of this process; it can only be read by setting it."""
    before = os.umask(0o077)
    os.umask(before)
    return before


def _this_machine() -> str:
    """Return the name of this machine that other machines know."""
    full_name = socket.getfqdn()
    return socket.gethostname() if full_name.startswith("localhost") else full_name


def _await_end(over: Any, name: str) -> None:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        with suppress(ClusterFailed):  # a queue may leave a question unanswered
            if over():
                return
        time.sleep(POLL_SECONDS)
    raise ClusterFailed(f"{name} was asked to end, and after {END_SECONDS:g} s nothing shows that it has.")
