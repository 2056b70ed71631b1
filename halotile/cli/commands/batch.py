"""Commands for batch jobs: submit, logs, cancel, dashboard, and attend, which runs inside a batch job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halotile.cli.app import command
from halotile.cli.arguments import (
    AllowImport,
    Config,
    Fresh,
    Json,
    NoDashboard,
    Overrides,
    RunPath,
    SameInput,
    Workers,
    whole,
)
from halotile.cli.screens.screen import complain, echo, print_json


@command()
def submit(
    config: Config,
    workers: Workers = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the script and the plan, and submit nothing.")
    ] = False,
    fresh: Fresh = False,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    no_dashboard: NoDashboard = False,
    as_json: Json = False,
) -> None:
    """Run a job as a batch job; when its time is up, another batch job continues it."""
    from halotile.cli.batch import prepare, show, submitted_words
    from halotile.cli.config.loading import Flags, load_job
    from halotile.graphs.submission import submit as submit_run

    flags = Flags(workers=workers, dashboard=not no_dashboard, allow_import=allow_import)
    prepared = prepare(load_job(config, overrides or (), flags), fresh=fresh, same_input=same_input)
    if dry_run and as_json:
        print_json({"script": prepared.script, "plan": prepared.figures})
        return
    if dry_run:
        show(prepared)
        return
    submission = submit_run(prepared.submission, prepared.script, prepared.run)
    if as_json:
        print_json({"job": submission.number, "run_directory": str(prepared.run.path)})
    else:
        echo(submitted_words(submission, prepared.run))


@command()
def logs(
    run_path: RunPath,
    lines: Annotated[
        int, typer.Option("--lines", metavar="N", parser=whole, help="How many of each log, from its end.")
    ] = 40,
    with_workers: Annotated[bool, typer.Option("--workers", help="Those of the workers too.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing until the run is over.")] = False,
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
def cancel(run_path: RunPath) -> None:
    """End a run: its batch job, or its driver where it runs on this machine. What is done stays done."""
    from halotile.cli.batch import cancel as cancel_run
    from halotile.cli.status import find_run

    echo(cancel_run(find_run(run_path)))


@command()
def dashboard(run_path: RunPath) -> None:
    """Show where the dashboard of a run is, and how to reach it from your own computer."""
    from halotile.cli.batch import dashboard_words
    from halotile.cli.status import find_run

    echo(dashboard_words(find_run(run_path)))


@command(hidden=True)
def attend(
    run_path: RunPath,
    as_driver: Annotated[bool, typer.Option("--driver", help="In this process.")] = False,
) -> None:
    """Make one attempt at a submitted run; the script of its batch job calls this."""
    from halotile.cli.batch import attend as attend_run
    from halotile.cli.batch import look_after

    if as_driver:
        complain(f"attempt at {run_path}")
        attend_run(Path(run_path))
    else:
        raise typer.Exit(look_after(Path(run_path)))
