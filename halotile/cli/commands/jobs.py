"""Commands that take a job: run, plan, validate, try, bench, simulate, resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halotile.cli.app import command
from halotile.cli.arguments import (
    AllowImport,
    ClusterKind,
    Config,
    Fresh,
    Json,
    NoDashboard,
    NoTls,
    Overrides,
    Overwrite,
    PlaneText,
    Quiet,
    RunPath,
    SameInput,
    Workers,
    number,
    whole,
    worker_counts,
)
from halotile.cli.screens.screen import complain, echo, print_json, print_rows
from halotile.errors import ConfigError, HalotileError

if TYPE_CHECKING:
    from halotile.cli.config.loading import Flags


def _flags(
    workers: int | None,
    cluster: str | None,
    no_dashboard: bool,
    no_tls: bool,
    allow_import: bool = False,
) -> Flags:
    from halotile.cli.config.loading import Flags

    return Flags(
        workers=workers,
        cluster=cluster,
        dashboard=not no_dashboard,
        tls=not no_tls,
        allow_import=allow_import,
    )


@command()
def run(
    config: Config,
    workers: Workers = None,
    cluster: ClusterKind = None,
    overrides: Overrides = None,
    fresh: Fresh = False,
    same_input: SameInput = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the plan, and the script of a worker's batch job; start nothing."
        ),
    ] = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    no_tls: NoTls = False,
) -> None:
    """Run a job; one that was interrupted goes on where it was."""
    from halotile.cli import many, running
    from halotile.cli.config.loading import load_job
    from halotile.graphs.kinds.patterns import takes_many

    job = load_job(config, overrides or (), _flags(workers, cluster, no_dashboard, no_tls, allow_import))
    how = many if takes_many(job) else running
    if dry_run:
        how.show(job, fresh=fresh, same_input=same_input, as_json=as_json)
        return
    how.go(job, fresh=fresh, same_input=same_input, as_json=as_json, quiet=quiet)


@command()
def plan(
    config: Config,
    workers: Workers = None,
    cluster: ClusterKind = None,
    overrides: Overrides = None,
    fresh: Fresh = False,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Try the device: the speed of tiles and batches, and the error of each precision."
        ),
    ] = False,
    as_json: Json = False,
    no_dashboard: NoDashboard = False,
    no_tls: NoTls = False,
) -> None:
    """Show what a run would do and cost, or why it is refused."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.many import show as show_many
    from halotile.graphs.clusters.base import AUTO, DEFAULT
    from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
    from halotile.graphs.clusters.workers.fork_server import expect_no_workers
    from halotile.graphs.kinds.patterns import takes_many
    from halotile.graphs.plans.make import make_plan
    from halotile.graphs.runs.claim import look

    expect_no_workers()
    job = load_job(config, overrides or (), _flags(workers, cluster, no_dashboard, no_tls, allow_import))
    if takes_many(job):
        if probe:
            raise ConfigError("--probe tries one image. Write one of those that match: --set input.path=FILE")
        show_many(job, fresh=fresh, same_input=same_input, as_json=as_json)
        return
    job_plan = make_plan(job, fresh=fresh, same_input=same_input, probe=probe, refuse=False, report=complain)
    kind = cluster_kind_of(job_plan.cluster)
    is_shown = kind.name != DEFAULT or job_plan.cluster.kind == AUTO
    where = {"cluster": f"{kind.name} ({kind.why})"} if is_shown else {}
    figures, refusal = job_plan.summary() | {"resumed_blocks": 0} | where, None
    try:
        figures["resumed_blocks"] = look(job_plan)
    except HalotileError as error:
        refusal = error
    if as_json:
        print_json(figures)
    else:
        print_rows("plan", job_plan.kind.rows(figures))
    job_plan.check_fits()
    if refusal is not None:
        raise refusal


@command()
def validate(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a configuration; every mistake is shown at once."""
    from halotile.cli.config.loading import read_config
    from halotile.cli.config.problems import raise_problems
    from halotile.cli.config.sections import check_config
    from halotile.graphs.kinds.base import kind_of

    job, problems = check_config(read_config(config, overrides or ()), config.parent)
    if as_json:
        print_json({"ok": not problems, "problems": [problem.to_json() for problem in problems]})
    raise_problems(str(config), problems)
    if job is not None and not as_json:
        echo(f"{config}: ok, {kind_of(job).title(job)}")


@command("try")
def try_settings(
    config: Config,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The sheet to draw, a .png.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,...",
            help="Values to compare, such as denoiser.strength=0.5,1,2; of several lists every combination.",
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(metavar="Y0:Y1,X0:X1", help="The crop; auto: 512 × 512 pixels with most structure."),
    ] = None,
    plane: PlaneText = None,
    overwrite: Overwrite = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Denoise a crop with several settings, as a run would, and lay the results side by side."""
    from halotile.cli import trying

    request = trying.TryRequest(config, overrides or (), file, region, plane, overwrite, allow_import)
    comparison = trying.try_settings(request, report=complain)
    for failure in trying.failures_of(comparison):
        complain(f"not shown: {failure}")
    if as_json:
        print_json(trying.comparison_json(comparison, file))
    elif not quiet:
        print_rows(str(file) if file else "settings", trying.rows_of(comparison))


@command()
def bench(
    config: Config,
    counts: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="N,N,...",
            help="Numbers of workers to compare; 1, 2, 4 and so on up to run.workers when left out.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="Trials with each of them, in turns.")
    ] = 3,
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole, help="Blocks of a trial; ten seconds' worth when left out."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole, help="Iterations of a trial, the first not measured; 5 when left out."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the table and charts.")
    ] = None,
    cluster: ClusterKind = None,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_tls: NoTls = False,
) -> None:
    """Run a few blocks or iterations with several numbers of workers, and compare their times; the output is left alone."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.preview import check_file
    from halotile.cli.screens.scaling_views import scaling_table
    from halotile.graphs.kinds.patterns import jobs_of, takes_many
    from halotile.graphs.scaling import ScalingRequest, measure
    from halotile.graphs.waiting import no_report

    request = ScalingRequest(worker_counts(counts), trials, blocks, steps)
    job = load_job(config, overrides or (), _flags(None, cluster, True, no_tls, allow_import))
    if takes_many(job):
        job = next(iter(jobs_of(job).values()))
    if page is not None:
        check_file(page, [job.place], None if overwrite else "--overwrite")
    scaling = measure(job, request, no_report if quiet else complain)
    if page is not None:
        from halotile.cli.screens.scaling_views import write_page

        write_page(page, config.name, scaling)
    if as_json:
        print_json(scaling.to_json())
    elif not quiet:
        echo(scaling_table(scaling))


@command()
def simulate(
    config: Config,
    noise: Annotated[
        str,
        typer.Option(metavar="NAME", help="gaussian (of each operator's noise_sigma), poisson, or none."),
    ] = "gaussian",
    gain: Annotated[
        float, typer.Option(metavar="G", parser=number, help="What one count is worth, for poisson.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", parser=whole, help="Which noise.")] = 0,
    workers: Workers = None,
    cluster: ClusterKind = None,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace measurements that are there.")
    ] = False,
    fresh: Fresh = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    no_tls: NoTls = False,
) -> None:
    """Write the data of every operator of a reconstruction, as it would be measured of its reference."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.running import simulate as write_measurements
    from halotile.graphs.jobs.simulate.job import NoiseChoice

    flags = _flags(workers, cluster, no_dashboard, no_tls, allow_import)
    job = load_job(config, overrides or (), flags, makes_data=True)
    noise_choice = NoiseChoice(name=noise, gain=gain, seed=seed)  # type: ignore[arg-type]
    write_measurements(job, noise_choice, overwrite=overwrite, fresh=fresh, as_json=as_json, quiet=quiet)


@command()
def resume(
    run_path: RunPath,
    workers: Workers = None,
    cluster: ClusterKind = None,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    no_tls: NoTls = False,
) -> None:
    """Go on with an interrupted run, from what its directory holds."""
    from halotile.cli.config.saved_job import saved_job
    from halotile.cli.running import go
    from halotile.cli.status import find_run

    job = saved_job(find_run(run_path), _flags(workers, cluster, no_dashboard, no_tls, allow_import))
    go(job, fresh=False, same_input=same_input, as_json=as_json, quiet=quiet)
