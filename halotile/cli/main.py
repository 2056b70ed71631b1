"""The command ``recon-cli``.

Each command reads its words, calls one function of another room, and shows what comes back. Heavy
packages are imported by the command that needs them, so that ``--help`` answers at once. The
interface of the engine that is used here::

    halotile.graphs.jobs.engine_of(job) -> Engine
    Engine.plan(job, *, fresh, same_input) -> RunPlan     RunPlan.summary() -> figures
    Engine.run(plan, *, observer) -> Outcome
    halotile.graphs.verify.verify(output, *, job, repair, observer) -> Verdict
"""

from __future__ import annotations

import functools
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec

import typer

from halotile.cli import exits
from halotile.cli.arguments import (
    AllowImport,
    Config,
    Debug,
    Fresh,
    Json,
    Level,
    NoDashboard,
    Overrides,
    Quiet,
    RunPath,
    SameInput,
    Workers,
    number,
    whole,
)
from halotile.cli.screen import complain, print_json, print_rows, say
from halotile.errors import HalotileError

P = ParamSpec("P")

app = typer.Typer(
    name="recon-cli",
    help="Denoise and reconstruct images bigger than memory: Zarr, OME-Zarr, TIFF, .npy or HDF5 in, Zarr out.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 done but for quarantined blocks (verify: "
    "but for blocks not done), 4 bad input data, 5 refused for memory or disk, 75 stopped and resumable, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _told(command: Callable[P, None]) -> Callable[P, None]:
    """Turn an error of a command into one message and its exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt, exits.StoppedEarly) as error:
            _give_up(error, debug=bool(kwargs.get("debug")))

    return wrapped


def _give_up(error: BaseException, *, debug: bool) -> NoReturn:
    if debug:
        import traceback

        complain("".join(traceback.format_exception(error)))
    complain(exits.message_of(error))
    raise typer.Exit(exits.exit_code(error)) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        from halotile import __version__

        say(f"halotile {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@_told
def run(
    config: Config,
    workers: Workers = None,
    overrides: Overrides = None,
    fresh: Fresh = False,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    debug: Debug = False,
) -> None:
    """Run a job; one that was interrupted goes on where it was."""
    from halotile.cli.config import load_job
    from halotile.cli.running import go

    job = load_job(
        config, overrides or (), workers=workers, allow_import=allow_import, dashboard=not no_dashboard
    )
    go(job, fresh=fresh, same_input=same_input, as_json=as_json, quiet=quiet)


@app.command()
@_told
def plan(
    config: Config,
    workers: Workers = None,
    overrides: Overrides = None,
    fresh: Fresh = False,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    no_dashboard: NoDashboard = False,
    debug: Debug = False,
) -> None:
    """Show what a run would do and cost, or why it is refused."""
    from halotile.cli.config import load_job
    from halotile.cli.jobs import words_of
    from halotile.graphs.claim import look
    from halotile.graphs.jobs import engine_of

    job = load_job(
        config, overrides or (), workers=workers, allow_import=allow_import, dashboard=not no_dashboard
    )
    made = engine_of(job).plan(job, fresh=fresh, same_input=same_input, refuse=False)
    figures, refusal = made.summary() | {"resumed_blocks": 0}, None
    try:
        figures["resumed_blocks"] = look(made)
    except HalotileError as error:
        refusal = error
    if as_json:
        print_json(figures)
    else:
        print_rows("plan", words_of(job).rows(figures))
    made.check_fits()
    if refusal is not None:
        raise refusal


@app.command()
@_told
def validate(
    config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Check a configuration; every mistake is shown at once."""
    from halotile.cli.config import read_config
    from halotile.cli.jobs import words_of
    from halotile.cli.problems import raise_problems
    from halotile.cli.sections import check_config

    job, problems = check_config(read_config(config, overrides or ()), config.parent)
    if as_json:
        print_json({"ok": not problems, "problems": [problem.to_json() for problem in problems]})
    raise_problems(str(config), problems)
    if job is not None and not as_json:
        say(f"{config}: ok, {words_of(job).job(job)}")


@app.command()
@_told
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
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace measurements that are there.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    debug: Debug = False,
) -> None:
    """Write the data of every operator of a reconstruction, as it would be measured of its reference."""
    from halotile.cli.config import load_job
    from halotile.cli.running import simulate as write_measurements
    from halotile.graphs.simulation.noise import NoiseChoice

    job = load_job(config, overrides or (), workers=workers, dashboard=not no_dashboard, makes_data=True)
    wanted = NoiseChoice(name=noise, gain=gain, seed=seed)  # type: ignore[arg-type]
    write_measurements(job, wanted, overwrite=overwrite, as_json=as_json, quiet=quiet)


@app.command()
@_told
def status(
    run_path: RunPath,
    follow: Annotated[bool, typer.Option("--watch", help="Go on showing until the run is over.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a run stands, from its directory alone."""
    from halotile.cli.report import make_report
    from halotile.cli.status import advice, find_run, read_status, status_rows, watch

    directory = find_run(run_path)
    now = watch(directory, make_report(quiet=as_json)) if follow else read_status(directory)
    if as_json:
        print_json(now.to_json())
        return
    print_rows(now.state, status_rows(now))
    if said := advice(now):
        say(said)


@app.command()
@_told
def resume(
    run_path: RunPath,
    workers: Workers = None,
    same_input: SameInput = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_dashboard: NoDashboard = False,
    debug: Debug = False,
) -> None:
    """Go on with an interrupted run, from what its directory holds."""
    from halotile.cli.resume import saved_job
    from halotile.cli.running import go
    from halotile.cli.status import find_run

    job = saved_job(
        find_run(run_path), workers=workers, allow_import=allow_import, dashboard=not no_dashboard
    )
    go(job, fresh=False, same_input=same_input, as_json=as_json, quiet=quiet)


@app.command()
@_told
def verify(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A Zarr that a run wrote.", show_default=False)
    ],
    repair: Annotated[bool, typer.Option("--repair", help="Do the damaged blocks again.")] = False,
    allow_import: AllowImport = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check every stored block against its checksums; exits with 3 where blocks are not done yet."""
    from halotile.cli.figures import remedy, verdict_json, verdict_lines
    from halotile.cli.report import make_report
    from halotile.cli.resume import saved_job_of
    from halotile.cli.status import imports_flag, is_at_work, output_of, run_beside
    from halotile.graphs.verify import verify as verify_output

    output = output_of(output)
    job = saved_job_of(output, allow_import=allow_import) if repair else None
    at_work = is_at_work(run_beside(output))
    with make_report(quiet=quiet) as report:
        verdict = verify_output(output, job=job, repair=repair, observer=report)
    if as_json:
        print_json(verdict_json(verdict))
    elif not quiet:
        for line in verdict_lines(output, verdict):
            say(line)
    if said := remedy(output, verdict, at_work=at_work, imports=imports_flag(run_beside(output))):
        complain(f"error: {output} is {said}")
        raise typer.Exit(exits.QUARANTINED if verdict.sound else exits.BAD_DATA)


@app.command()
@_told
def info(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A picture.", show_default=False)],
    level: Level = 0,
    dataset: Annotated[str | None, typer.Option(help="Dataset inside an HDF5 file or a Zarr group.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a picture is, and a configuration to begin with."""
    from halotile.cli.info import describe, info_rows

    facts = describe(path, level=level, dataset=dataset)
    if as_json:
        print_json(facts)
        return
    print_rows(path, info_rows(facts))
    say(
        f"\nTo denoise it, write this to config.yaml and type `recon-cli run config.yaml`:\n\n{facts['config'].rstrip()}"
    )


@app.command()
@_told
def preview(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A picture.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="What to write: .png (small), .tif or .tiff (full resolution).",
            show_default=False,
        ),
    ],
    size: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole, help="Longest side of a PNG in pixels; 1024 when left out."),
    ] = None,
    region: Annotated[
        str | None, typer.Option(metavar="Y0:Y1,X0:X1", help="Only these rows and columns, pixel by pixel.")
    ] = None,
    plane: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Which plane, such as t=0,c=1.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="A second picture, drawn on the right of a PNG.")
    ] = None,
    values: Annotated[
        tuple[float, float] | None,
        typer.Option("--range", metavar="LOW HIGH", help="Values that are black and white in a PNG."),
    ] = None,
    level: Level = 0,
    dataset: Annotated[str | None, typer.Option(help="Dataset inside an HDF5 file or a Zarr group.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it is there.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make a picture viewable: a small PNG, or a TIFF of every pixel."""
    from halotile.cli.preview import Wish
    from halotile.cli.preview import preview as write_preview

    wish = Wish(path, file, size, region, plane, against, values, level, dataset, overwrite)
    said = write_preview(wish, quiet=quiet)
    if not quiet:
        say(said)


@app.command()
@_told
def schema(debug: Debug = False) -> None:
    """Write the JSON Schema of a configuration, for editors."""
    from halotile.cli.schema import config_schema

    print_json(config_schema())


def _stop_early(number: int, _: object) -> NoReturn:
    raise exits.StoppedEarly(f"stopped on {signal.Signals(number).name}; run again to go on")


def main() -> None:
    """Entry point of ``recon-cli``."""
    for asked in (signal.SIGTERM, signal.SIGUSR1):  # a run drains on them instead
        signal.signal(asked, _stop_early)
    try:
        app(prog_name="recon-cli")
    except SystemExit as end:
        if end.code == exits.INTERRUPTED:  # what closes at exit is not to be torn as well
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
    finally:
        # All of it ends with the process: to search it for garbage takes a second where torch is loaded. triton, which deepinv
        # loads, holds what is not searched against us, in thirty lines on the screen.
        if "triton" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()
