"""Commands for clusters: submit, logs, cancel, dashboard, exec, doctor, and attend, which runs inside a batch job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from halotile.cli import arguments as arg
from halotile.cli import exits
from halotile.cli.app import command
from halotile.cli.screens.screen import complain, echo, print_json, print_rows
from halotile.errors import ConfigError

if TYPE_CHECKING:
    from halotile.graphs.clusters.base import Order
    from halotile.graphs.doctor import Finding
    from halotile.graphs.kinds.sections import Cluster


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
    """Run a job as a batch job that resubmits itself. When its time is up, another batch job continues it."""
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
    lines: Annotated[int, arg.count("Number of lines to show from the end of each log.")] = 40,
    with_workers: Annotated[bool, arg.flag("--workers", "Show the workers' logs too.")] = False,
    follow: Annotated[bool, arg.flag("--follow", "Go on showing until the run is over.")] = False,
) -> None:
    """Show the output of a batch job and of its workers."""
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
    """Stop a run: its batch job or its driver. A driver without a batch job must run on this machine. Finished blocks are kept."""
    from halotile.cli.batch import cancel as cancel_run
    from halotile.cli.status import find_run

    echo(cancel_run(find_run(run_path)))


@command()
def dashboard(run_path: arg.RunPath) -> None:
    """Show the address of a run's dashboard. The answer says how to reach it from your own computer."""
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


_BEFORE = "halotile.before"
Memory = Annotated[str, arg.option("SIZE", "Memory for each worker, such as 4GiB.", "--memory")]
Site = Annotated[Path | None, arg.option("CONFIG", "A job file; its cluster section sets everything else.", "--config")]
ALL_GPUS = "With --torch: each rank sees all GPUs of its machine, for scripts that take cuda:LOCAL_RANK."
TORCH = "A torchrun script: one rank on each worker, all of them the same script."


class _OwnAndTheirs(TyperCommand):
    """A command that passes arguments on to another program, and records which stood before ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_BEFORE] = args[: args.index("--")] if "--" in args else list(args)
        return super().parse_args(ctx, args)


@command("exec", cls=_OwnAndTheirs, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def execute(
    context: typer.Context,
    script: Annotated[Path, arg.argument("SCRIPT", "A Python script; its arguments follow.")],
    workers: arg.Workers = None,
    cluster: arg.ClusterKind = None,
    memory: Memory = "4GiB",
    config: Site = None,
    no_dashboard: arg.NoDashboard = False,
    no_tls: arg.NoTls = False,
    torch: Annotated[bool, arg.flag("--torch", TORCH)] = False,
    retries: Annotated[int, arg.count("With --torch: number of restarts after a rank fails.")] = 0,
    all_gpus: Annotated[bool, arg.flag("--all-gpus", ALL_GPUS)] = False,
) -> None:
    """Run your own script with a cluster, or as torch ranks. Client() and DistributedContext() in it join the cluster; arguments after -- go to the script."""
    from halotile.cli.config.loading import load_cluster
    from halotile.graphs.torch_script import execute as execute_script
    from halotile.graphs.torch_script import execute_torch

    if not script.is_file():
        raise ConfigError(f"{script} is no file. Write the path of a Python script.")
    _check_spelling(context)
    if retries and not (torch and retries > 0):
        raise ConfigError(
            f"--retries is {retries}. Write 0 or more, and only with --torch. Put the script's own arguments after --."
        )
    if all_gpus and not torch:
        raise ConfigError("--all-gpus needs --torch. Write both, or leave --all-gpus out.")
    choice = load_cluster(config, arg.Flags(cluster=cluster, no_dashboard=no_dashboard, no_tls=no_tls))
    order = _order(workers, memory, choice)
    if torch:
        show, path = partial(print, flush=True), str(script.resolve())
        execute_torch(path, context.args, order, retries=retries, all_gpus=all_gpus, line=show)
        return
    code = execute_script(
        [sys.executable, str(script), *context.args],
        order,
        started=lambda dashboard: complain(f"dashboard: {dashboard}") if dashboard else None,
    )
    raise typer.Exit(code)


@command()
def doctor(
    config: Site = None,
    folder: Annotated[Path, arg.option("FOLDER", "Where outputs are to go.", "--output")] = Path("."),
    start: Annotated[bool, arg.flag("--start", "Start the cluster too, and compare what its workers have.")] = False,
    workers: arg.Workers = None,
    cluster: arg.ClusterKind = None,
    memory: Memory = "4GiB",
    as_json: arg.Json = False,
) -> None:
    """Check this machine and its batch system. The list shows what a run would find here, and what is missing."""
    from halotile.cli.config.loading import load_cluster
    from halotile.graphs.doctor import compare_workers, examine

    choice = load_cluster(config, arg.Flags(cluster=cluster, no_dashboard=True))
    findings = list(examine(choice, folder))
    _show("doctor", findings, as_json=as_json)  # starting the cluster takes a while
    if start:
        of_workers = list(compare_workers(_order(workers, memory, choice)))
        _show("workers", of_workers, as_json=as_json)
        findings += of_workers
    if as_json:
        print_json([vars(finding) for finding in findings])
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(exits.FAILED)


def _check_spelling(context: typer.Context) -> None:
    """Refuse a near miss of one of our options: the script would receive it, and the cluster would be different."""
    from halotile.graphs.words import nearest

    options = [name for p in context.command.params for name in p.opts if name.startswith("--")]
    for word in context.args:
        name = word.partition("=")[0]
        is_option = name in context.meta[_BEFORE] and name.startswith("--")
        if is_option and (near := nearest(name, options, likeness=0.75)):
            raise ConfigError(f"exec has no {name}; did you mean {near}? Put the script's own arguments after --.")


def _show(title: str, findings: Sequence[Finding], *, as_json: bool) -> None:
    marks = {"ok": "ok", "note": "note:", "missing": "MISSING:"}
    if not as_json:
        print_rows(title, [(f.name, f"{marks[f.verdict]} {f.text}") for f in findings])


def _order(workers: int | None, memory: str, choice: Cluster) -> Order:
    """Return the request to a cluster from the options of a command."""
    from halotile.graphs.clusters.base import Order
    from halotile.graphs.kinds.sections import Run, parse_bytes
    from halotile.graphs.plans.needs import device_of, workers_of

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: at least one worker is needed. Write --workers 1 or more.")
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from None
    run = Run(workers=workers or "auto", memory_per_worker=memory_bytes)
    count = workers_of(run, choice, device_of(run, choice)).workers
    return Order(workers=count, memory_bytes=memory_bytes, choice=choice, report=complain)
