"""A job at work on the command line: what is told before, while and after."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import typer

from halotile.cli import exits
from halotile.cli.screens.screen import complain, echo, print_json, print_rows

if TYPE_CHECKING:
    from halotile.graphs.jobs.sections import AnyJob
    from halotile.graphs.jobs.simulate.noise import NoiseChoice


def show(job: AnyJob, *, fresh: bool, same_input: bool, as_json: bool) -> None:
    """Show what a run would do, and the script of a worker where that is a batch job; nothing is started or written."""
    from halotile.cli.screens.job_words import words_of
    from halotile.graphs.clusters.launches.batch_jobs import worker_script
    from halotile.graphs.clusters.workers.fork_server import expect_no_workers
    from halotile.graphs.jobs.engines import engine_of
    from halotile.graphs.runs.claim import look

    expect_no_workers()
    plan = engine_of(job).plan(job, fresh=fresh, same_input=same_input, report=complain)
    figures = plan.summary() | {"resumed_blocks": look(plan)}
    script = worker_script(plan.run, plan.cluster, plan.run_directory)
    if as_json:
        print_json({"script": script, "plan": figures})
        return
    if script is not None:
        echo(script)
    print_rows("plan", words_of(job).rows(figures))


def go(job: AnyJob, *, fresh: bool, same_input: bool, as_json: bool, quiet: bool) -> None:
    """Run a job; one that was interrupted goes on where it was."""
    began = time.perf_counter()
    from halotile.cli.screens.job_words import words_of
    from halotile.cli.screens.outcome_rows import outcome_json, outcome_rows
    from halotile.cli.screens.progress_report import make_report
    from halotile.cli.screens.units import first_line
    from halotile.graphs.clusters.detection.cluster_kind import is_other_copy
    from halotile.graphs.jobs.engines import engine_of

    if is_other_copy(job.cluster):
        from halotile.graphs.clusters.ranks import serve
        from halotile.graphs.plans.plan import run_directory_of

        serve(run_directory_of(job.output.path))
        return
    engine = engine_of(job)
    with _among_copies(job):
        # Where nobody is to be told, the planner need not tell.
        told = {} if quiet else {"say": complain}
        plan = engine.plan(job, fresh=fresh, same_input=same_input, **told)
        planned = time.perf_counter()
        if not quiet:
            complain(words_of(job).headline(plan.summary()))
            for note in plan.summary()["notes"]:
                complain(f"note: {note}")
        with make_report(quiet=quiet) as report:
            outcome = engine.run(plan, observer=report)
    times = planned - began, time.perf_counter() - began
    if as_json:
        print_json(outcome_json(outcome, *times))
    elif not quiet:
        print_rows(
            "finished" if not outcome.quarantined else "finished, but for the bad blocks",
            outcome_rows(outcome, *times),
        )
    for bad in outcome.quarantined:
        where = f"index {bad.index}, region {bad.region.start}–{bad.region.stop}"
        complain(f"quarantined: block {bad.number} ({where}): {first_line(bad.error)}")
    if outcome.quarantined:
        raise typer.Exit(exits.QUARANTINED)


def _among_copies(job: AnyJob) -> AbstractContextManager[None]:
    """Where this is the first of several copies of the command, the others hear of its end."""
    from halotile.graphs.clusters.detection.cluster_kind import kind_of
    from halotile.graphs.clusters.detection.launchers import copy_of

    if not kind_of(job.cluster).traits.of_copies or copy_of() is None:
        return nullcontext()
    from halotile.graphs.clusters.ranks import as_first

    return as_first()


def simulate(job: AnyJob, noise: NoiseChoice, *, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Write the measurements of a job.

    Raises
    ------
    ConfigError
        When it is a job without measurements.
    """
    from halotile.cli.screens.progress_report import make_report
    from halotile.errors import ConfigError
    from halotile.graphs.clusters.detection.cluster_kind import is_other_copy
    from halotile.graphs.jobs.sections import Reconstruction
    from halotile.graphs.jobs.simulate.plan import make_simulation_plans
    from halotile.graphs.jobs.simulate.run import run_simulation

    if not isinstance(job, Reconstruction):
        raise ConfigError(
            "job is denoise: it has no operators whose measurements could be simulated. Write job: reconstruct."
        )
    if is_other_copy(job.cluster):
        raise ConfigError("simulate is a command for one copy. Start it without mpirun and srun.")
    plans = make_simulation_plans(job, noise, overwrite=overwrite)
    with make_report(quiet=quiet) as report:
        run_simulation(plans, observer=report, import_folder=job.import_folder)
    if as_json:
        print_json({"measurements": [plan.summary() for plan in plans]})
    elif not quiet:
        for plan in plans:
            echo(plan.told)
