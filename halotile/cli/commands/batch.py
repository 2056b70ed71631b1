"""Commands for batch jobs: submit, logs, cancel, dashboard, and attend, which runs inside a batch job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halotile.cli import arguments as arg
from halotile.cli.app import command
from halotile.cli.screens.screen import complain, echo, print_json, print_rows


@command()
def submit(
    config: arg.Config,
    asked: arg.RunOptions,
    workers: arg.Workers = None,
    overrides: arg.Overrides = None,
    dry_run: Annotated[bool, arg.flag("--dry-run", "Show the script and the plan, and submit nothing.")] = False,
    allow_import: arg.AllowImport = False,
    no_dashboard: arg.NoDashboard = False,
) -> None:
    """Run a job as a batch job; when its time is up, another batch job continues it."""
    from halotile.cli.batch import prepare, submitted_words
    from halotile.cli.config.loading import load_job
    from halotile.graphs.submission import submit as submit_run

    flags = arg.Flags(workers=workers, no_dashboard=no_dashboard, allow_import=allow_import)
    prepared = prepare(load_job(config, overrides or (), flags), asked)
    if dry_run and asked.as_json:
        print_json({"script": prepared.script, "plan": prepared.figures})
        return
    if dry_run:
        echo(prepared.script)
        print_rows("plan", prepared.rows)
        return
    submission = submit_run(prepared.submission, prepared.script, prepared.run)
    if asked.as_json:
        print_json({"job": submission.number, "run_directory": str(prepared.run.path)})
    else:
        echo(submitted_words(submission, prepared.run))


@command()
def logs(
    run_path: arg.RunPath,
    lines: Annotated[int, arg.count("How many of each log, from its end.")] = 40,
    with_workers: Annotated[bool, arg.flag("--workers", "Show the workers' logs too.")] = False,
    follow: Annotated[bool, arg.flag("--follow", "Go on showing until the run is over.")] = False,
) -> None:
    """Show what a run's batch job printed, and its workers."""
    from halotile.cli.batch import follow_log, logs_of
    from halotile.cli.status import find_run

    directory = find_run(run_path)
    if follow:
        follow_log(directory, lines)
        return
    for title, text in logs_of(directory, lines, with_workers=with_workers):
        echo(f"== {title}\n{text}" if with_workers else text)


@command()
def cancel(run_path: arg.RunPath) -> None:
    """End a run: its batch job, or its driver where it runs on this machine. What is done stays done."""
    from halotile.cli.batch import cancel as cancel_run
    from halotile.cli.status import find_run

    echo(cancel_run(find_run(run_path)))


@command()
def dashboard(run_path: arg.RunPath) -> None:
    """Show where the dashboard of a run is, and how to reach it from your own computer."""
    from halotile.cli.batch import dashboard_words
    from halotile.cli.status import find_run

    echo(dashboard_words(find_run(run_path)))


@command(hidden=True)
def attend(run_path: arg.RunPath, as_driver: Annotated[bool, arg.flag("--driver", "In this process.")] = False) -> None:
    """Make one attempt at a submitted run; the script of its batch job calls this."""
    from halotile.cli.batch import attend as attend_run
    from halotile.cli.batch import look_after

    if as_driver:
        complain(f"attempt at {run_path}")
        attend_run(Path(run_path))
    else:
        raise typer.Exit(look_after(Path(run_path)))
