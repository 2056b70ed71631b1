"""A job run from the command line: its output before, during and after the run."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import typer

from halotile.cli import exits
from halotile.cli.screens.screen import complain, echo, print_json, print_rows

if TYPE_CHECKING:
    from halotile.graphs.jobs.simulate.job import NoiseChoice
    from halotile.graphs.kinds.sections import Job


def show(job: Job, *, fresh: bool, same_input: bool, as_json: bool) -> None:
    """Print what a run would do, and the script of a worker in a batch job; nothing is started or written."""
    from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
    from halotile.graphs.clusters.launches.batch_jobs import worker_script
    from halotile.graphs.clusters.launches.batch_system import system_of
    from halotile.graphs.clusters.workers.fork_server import expect_no_workers
    from halotile.graphs.plans.make import make_plan
    from halotile.graphs.runs.claim import look

    expect_no_workers()
    plan = make_plan(job, fresh=fresh, same_input=same_input, report=complain)
    figures = plan.summary() | {"resumed_blocks": look(plan)}
    system = system_of(cluster_kind_of(plan.cluster).name)
    script = worker_script(system, plan.run, plan.cluster, plan.run_directory) if system else None
    if as_json:
        print_json({"script": script, "plan": figures})
        return
    if script is not None:
        echo(script)
    print_rows("plan", plan.kind.rows(figures))


def go(job: Job, *, fresh: bool, same_input: bool, as_json: bool, quiet: bool) -> None:
    """Run a job; an interrupted run is resumed."""
    began = time.perf_counter()
    from halotile.cli.screens.outcome_rows import outcome_json, outcome_rows
    from halotile.cli.screens.progress_report import make_report
    from halotile.graphs.amounts import first_line
    from halotile.graphs.clusters.common.cluster_kind import is_other_copy
    from halotile.graphs.plans.make import make_plan
    from halotile.graphs.runs.claim import check_outputs
    from halotile.graphs.runs.driver import run
    from halotile.graphs.waiting import no_report

    if is_other_copy(job.cluster):
        from halotile.graphs.clusters.ranks import serve
        from halotile.storage.run_directory.directory import RunDirectory

        serve(RunDirectory.beside(job.place).path)
        return
    import_for_workers(job)
    with _among_copies(job):
        report_line = no_report if quiet else complain
        plan = make_plan(job, fresh=fresh, same_input=same_input, report=report_line)
        check_outputs(plan)
        planned = time.perf_counter()
        if not quiet:
            complain(plan.kind.headline(plan.summary()))
            for note in plan.summary()["notes"]:
                complain(f"note: {note}")
        with make_report(quiet=quiet) as report:
            outcome = run(plan, observer=report)
    times = planned - began, time.perf_counter() - began
    if as_json:
        print_json(outcome_json(outcome, *times))
    elif not quiet:
        print_rows(
            "finished" if not outcome.quarantined else "finished, except the bad blocks",
            outcome_rows(outcome, *times),
        )
    if quiet:  # the report said nothing, and a result that may be wrong is no news to leave out
        for warning in outcome.inspection.warnings:
            complain(f"warning: {warning}")
    for bad in outcome.quarantined:
        where = f"index {bad.index}, region {bad.region.start}–{bad.region.stop}"
        complain(f"quarantined: block {bad.number} ({where}): {first_line(bad.error)}")
    if outcome.quarantined:
        raise typer.Exit(exits.QUARANTINED)


def import_for_workers(job: Job) -> None:
    """Begin to import what workers on this machine need, in the process that they are forked from, while the job is planned."""
    from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
    from halotile.graphs.clusters.workers.fork_server import ensure_forks

    if cluster_kind_of(job.cluster).traits.is_here:
        ensure_forks()


def _among_copies(job: Job) -> AbstractContextManager[None]:
    """Notify the other copies of the command of its end, if this is the first of several."""
    from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
    from halotile.tasks.groups.launchers import copy_of

    if not cluster_kind_of(job.cluster).traits.of_copies or copy_of() is None:
        return nullcontext()
    from halotile.graphs.clusters.ranks import as_first

    return as_first()


def simulate(
    job: Job, noise: NoiseChoice, *, overwrite: bool, fresh: bool, as_json: bool, quiet: bool
) -> None:
    """Simulate the measurements of a job."""
    from halotile.errors import ConfigError
    from halotile.graphs.clusters.common.cluster_kind import is_other_copy
    from halotile.graphs.jobs.reconstruct.job import Reconstruction
    from halotile.graphs.jobs.simulate.job import simulation_of

    if not isinstance(job, Reconstruction):
        raise ConfigError(
            f"job is {job.kind}: measurements are simulated of a reconstruction. Write job: reconstruct."
        )
    if is_other_copy(job.cluster):
        raise ConfigError("simulate is a command for one copy. Start it without mpirun and srun.")
    go(
        simulation_of(job, noise, overwrite=overwrite),
        fresh=fresh,
        same_input=False,
        as_json=as_json,
        quiet=quiet,
    )
