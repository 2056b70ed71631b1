"""Commands that take a job: run, plan, validate, try, bench, simulate, resume."""

from pathlib import Path
from typing import Annotated

from halotile.cli import arguments as arg
from halotile.cli.app import command
from halotile.cli.screens.screen import complain, echo, print_json, print_rows


@command()
def run(
    config: arg.Config,
    flags: arg.Flags,
    asked: arg.RunOptions,
    overrides: arg.Overrides = None,
    dry_run: Annotated[
        bool, arg.flag("--dry-run", "Show the plan, and the script of a worker's batch job; start nothing.")
    ] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Run a job; an interrupted one resumes."""
    from halotile.cli import running
    from halotile.cli.config.loading import load_job

    job = load_job(config, overrides or (), flags)
    if dry_run:
        running.show(job, asked)
    else:
        running.go(job, asked, quiet=quiet)


@command()
def plan(
    config: arg.Config,
    flags: arg.Flags,
    asked: arg.RunOptions,
    overrides: arg.Overrides = None,
    probe: Annotated[
        bool, arg.flag("--probe", "Try the device: the speed of tiles and batches, and the error of each precision.")
    ] = False,
) -> None:
    """Show sizes, memory, disk and halo of a run before it starts. A refused plan says why."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.running import show_plan

    show_plan(load_job(config, overrides or (), flags), asked, probe=probe)


@command()
def validate(config: arg.Config, overrides: arg.Overrides = None, as_json: arg.Json = False) -> None:
    """Check a job file, without opening images. Every mistake is shown at once."""
    from halotile.cli.config.loading import read_config
    from halotile.cli.config.sections import check_config
    from halotile.cli.config.yaml_source import raise_problems
    from halotile.graphs.kinds.base import kind_of

    job, problems = check_config(read_config(config, overrides or ()), config.parent)
    if as_json:
        print_json({"ok": not problems, "problems": [problem.to_json() for problem in problems]})
    raise_problems(str(config), problems)
    if job is not None and not as_json:
        echo(f"{config}: ok, {kind_of(job).title(job)}")


@command("try")
def try_settings(request: arg.TryRequest, as_json: arg.Json = False, quiet: arg.Quiet = False) -> None:
    """Compare settings on a crop, side by side. Each denoises it as a run would."""
    from halotile.cli import comparing
    from halotile.graphs.jobs.denoise.comparison import failures_of, rows_of

    comparison = comparing.try_settings(request, report=complain)
    for failure in failures_of(comparison):
        complain(f"not shown: {failure}")
    if as_json:
        print_json(comparing.comparison_json(comparison, request.file))
    elif not quiet:
        print_rows(str(request.file or "settings"), rows_of(comparison))


COUNTS = "Numbers of workers to compare; 1, 2, 4 and so on up to run.workers when left out."
STEPS = "Iterations of a trial, the first not measured; 5 when left out."
Page = Annotated[Path | None, arg.option("FILE", "Write a page with the table and charts.", "--html")]


@command()
def bench(
    config: arg.Config,
    counts: Annotated[str | None, arg.option("N,N,...", COUNTS, "--workers")] = None,
    trials: Annotated[int, arg.count("Trials with each of them, in turns.")] = 3,
    blocks: Annotated[int | None, arg.count("Blocks of a trial; ten seconds' worth when left out.")] = None,
    steps: Annotated[int | None, arg.count(STEPS)] = None,
    page: Page = None,
    cluster: arg.ClusterKind = None,
    overrides: arg.Overrides = None,
    overwrite: arg.Overwrite = False,
    allow_import: arg.AllowImport = False,
    as_json: arg.Json = False,
    quiet: arg.Quiet = False,
    no_tls: arg.NoTls = False,
) -> None:
    """Measure how a job scales with its workers. A few blocks or iterations run with several numbers of workers. The output is left alone."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.screens.scaling_views import scaling_table, write_page
    from halotile.graphs.kinds.sections import first_job
    from halotile.graphs.scaling import ScalingRequest, measure
    from halotile.graphs.waiting import no_report

    request = ScalingRequest(arg.worker_counts(counts), trials, blocks, steps)
    flags = arg.Flags(cluster=cluster, allow_import=allow_import, no_dashboard=True, no_tls=no_tls)
    job = first_job(load_job(config, overrides or (), flags))
    if page is not None:
        arg.FileRequest(overwrite=overwrite).check_file(page, [job.place])
    scaling = measure(job, request, no_report if quiet else complain)
    if page is not None:
        write_page(page, config.name, scaling)
    if as_json:
        print_json(scaling.to_json())
    elif not quiet:
        echo(scaling_table(scaling))


NOISE = "gaussian (of each operator's noise_sigma), poisson, or none."
GAIN = "What one count is worth, for poisson."


@command()
def simulate(
    config: arg.Config,
    flags: arg.Flags,
    noise: Annotated[str, arg.option("NAME", NOISE)] = "gaussian",
    gain: Annotated[float, arg.option("G", GAIN, parser=arg.number)] = 1.0,
    seed: Annotated[int, arg.count("Seed of the random noise.")] = 0,
    overrides: arg.Overrides = None,
    overwrite: Annotated[bool, arg.flag("--overwrite", "Replace measurements that are there.")] = False,
    fresh: arg.Fresh = False,
    as_json: arg.Json = False,
    quiet: arg.Quiet = False,
) -> None:
    """Simulate the measurements of a reconstruction. Each operator is applied to the reference, and the result is written to its data path."""
    from halotile.cli.config.loading import load_job
    from halotile.cli.running import go, simulation
    from halotile.graphs.jobs.simulate.job import NoiseChoice

    job = load_job(config, overrides or (), flags, makes_data=True)
    choice = NoiseChoice(name=noise, gain=gain, seed=seed)  # type: ignore[arg-type]
    go(simulation(job, choice, overwrite=overwrite), arg.RunOptions(fresh=fresh, as_json=as_json), quiet=quiet)


@command()
def resume(
    run_path: arg.RunPath,
    flags: arg.Flags,
    same_input: arg.SameInput = False,
    as_json: arg.Json = False,
    quiet: arg.Quiet = False,
) -> None:
    """Resume a run from its directory alone."""
    from halotile.cli.config.loading import saved_job
    from halotile.cli.running import go
    from halotile.cli.status import find_run

    go(saved_job(find_run(run_path), flags), arg.RunOptions(same_input=same_input, as_json=as_json), quiet=quiet)
