"""Commands that inspect runs and images, or prepare images for viewers: status, verify, info, preview, export, levels, schema."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from halotile.cli import arguments as arg
from halotile.cli import exits
from halotile.cli.app import command
from halotile.cli.screens.screen import complain, drawing_here, echo, print_json, print_rows
from halotile.errors import ConfigError


@command()
def status(
    run_paths: arg.RunPaths,
    follow: Annotated[bool, arg.flag("--watch", "Go on showing until the run is over.")] = False,
    as_json: arg.Json = False,
) -> None:
    """Show progress or outcome of a run. The run directory alone is read. A job file of many images shows all of their runs."""
    from halotile.cli.config.loading import is_config, load_job
    from halotile.cli.screens.progress_report import make_report
    from halotile.cli.status import advice, find_run, read_status, show_many, show_several, status_rows, watch
    from halotile.graphs.kinds.sections import takes_many

    run_path, *more = run_paths
    if more:
        if follow:
            raise ConfigError(f"--watch follows one run, and {len(run_paths)} are given. Write one of them.")
        show_several(run_paths, as_json=as_json)
        return
    if is_config(Path(run_path)):
        job = load_job(Path(run_path))
        if takes_many(job):
            show_many(job, follow=follow, as_json=as_json)
            return
        run_path = job.place
    directory = find_run(run_path)
    try:
        now = watch(directory, make_report(quiet=as_json)) if follow else read_status(directory)
    except KeyboardInterrupt:  # the run itself continues
        raise typer.Exit(exits.INTERRUPTED) from None
    if as_json:
        print_json(now.to_json())
        return
    print_rows(now.state, status_rows(now))
    if advice_text := advice(now):
        echo(advice_text)


@command()
def report(
    run_path: arg.RunPath, is_opened: Annotated[bool, arg.flag("--open", "Open it in a browser.")] = False
) -> None:
    """Print the path of a run's report. The report is one file that needs no network. For the job file of many images, write an index of theirs."""
    import webbrowser

    from halotile.cli.config.loading import is_config, load_job
    from halotile.cli.viewing import report_index, report_page
    from halotile.graphs.kinds.sections import takes_many

    job = load_job(Path(run_path)) if is_config(Path(run_path)) else None
    page = report_index(job) if job and takes_many(job) else report_page(job.place if job else run_path)
    echo(str(page))
    if is_opened:
        webbrowser.open(page.resolve().as_uri())


@command()
def verify(
    path: Annotated[str, arg.argument("OUTPUT", "A Zarr that a run wrote.")],
    repair: Annotated[bool, arg.flag("--repair", "Do the damaged blocks again, and those that are not done.")] = False,
    allow_import: arg.AllowImport = False,
    as_json: arg.Json = False,
    quiet: arg.Quiet = False,
) -> None:
    """Check every stored block, and repair damaged ones. The exit code is 3 where blocks are not done yet, and 4 where blocks are damaged."""
    from halotile.cli.config.loading import saved_job_of
    from halotile.cli.screens.outcome_rows import remedy, verdict_json, verdict_lines
    from halotile.cli.screens.progress_report import make_report
    from halotile.cli.status import imports_flag, is_at_work, output_of, run_of
    from halotile.graphs.runs.verify import verify as verify_output
    from halotile.storage.disk.place import check_access

    output = output_of(path)
    check_access(run_of(output))
    job = saved_job_of(output, allow_import=allow_import) if repair else None
    at_work = is_at_work(run_of(output))
    with make_report(quiet=quiet) as report:
        verdict = verify_output(output, job=job, repair=repair, observer=report)
    if as_json:
        print_json(verdict_json(verdict))
    elif not quiet:
        echo("\n".join(verdict_lines(output, verdict)))
    if remedy_text := remedy(output, verdict, at_work=at_work, imports=imports_flag(run_of(output))):
        complain(f"error: {output} is {remedy_text}")
        raise typer.Exit(exits.QUARANTINED if verdict.sound else exits.BAD_DATA)


def _check_is_image(path: str, dataset: str | None) -> None:
    """Refuse a ptychographic scan and the result of a job as an image."""
    from halotile.storage.scans.scan import is_result, is_scan

    look = f"To look at it, write: recon-cli export {path} FILE, with a name that ends in"
    if dataset is None and is_scan(path):
        raise ConfigError(f"{path} is a ptychographic scan. {look} .png.")
    if dataset is None and is_result(path):
        raise ConfigError(
            f"{path} is the result of a ptychography job, stored as a CXI file. {look} .zarr to get images, or in .png to get a sheet."
        )


IMAGES = 'An image, a pattern of several in quotes such as "scans/*.tif", or their folder.'


@command()
def info(
    path: Annotated[str, arg.argument("PATH", IMAGES)],
    level: arg.Level = 0,
    dataset: arg.Dataset = None,
    as_json: arg.Json = False,
) -> None:
    """Describe an image or a scan, and print a job file for it."""
    from halotile.cli.info import config_text, describe, info_rows
    from halotile.cli.screens.scan_views import ScanFacts

    if scan := None if dataset else ScanFacts.from_file(path):
        if as_json:
            print_json(scan.to_json())
        else:
            scan.show()
        return

    _check_is_image(path, dataset)
    facts = describe(path, level=level, dataset=dataset)
    if as_json:
        print_json(facts)
        return
    print_rows(path, info_rows(facts))
    echo(f"\n{config_text(facts)}")


@command()
def preview(
    request: arg.PreviewRequest,
    inline: Annotated[
        bool, arg.flag("--inline", "Show it in this terminal as well: kitty, iTerm2, WezTerm or Ghostty.")
    ] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Draw an image as a small PNG, or a part of it pixel by pixel."""
    from halotile.cli.export import preview as write_preview

    _check_is_image(request.path, request.dataset)
    show = drawing_here() if inline else None
    description = write_preview(request, quiet=quiet)
    if show:
        echo(show(request.file.read_bytes()))
    if not quiet:
        echo(description)


@command()
def view(
    paths: Annotated[list[str], arg.argument("IMAGE...", "Images, side by side.")],
    against: Annotated[
        str | None,
        arg.option(
            "OTHER", "The image before; it is the first panel, and its difference from the first IMAGE the last."
        ),
    ] = None,
    dataset: arg.Dataset = None,
    no_browser: Annotated[bool, arg.flag("--no-browser", "Print the address, and open nothing.")] = False,
) -> None:
    """Pan and zoom through images in a browser. The images stand side by side and move together. Ctrl-C ends the viewer."""
    import tempfile
    import webbrowser

    from halotile.cli.batch import tunnel_here
    from halotile.cli.viewing import ImageServer, panels_of

    for path in (*paths, *([against] if against else [])):
        _check_is_image(path, dataset)
    images = panels_of(paths, against, dataset)
    with suppress(KeyboardInterrupt), ImageServer(images) as server, tempfile.TemporaryDirectory() as private:
        echo(f"{tunnel_here(server.address)}\nCtrl-C ends it.")
        if not no_browser:  # by a file of this user's: on the browser's command line, others would see the address
            page = Path(private, "view.html")
            page.write_text(f'<meta http-equiv="refresh" content="0; url={server.address}">')
            webbrowser.open(page.as_uri())
        server.wait_for_ctrl_c()


@command()
def export(
    request: arg.ExportRequest,
    unwrap: Annotated[
        bool, arg.flag("--unwrap", "For the result of a ptychography job: unwrap the phase of the object beyond ±π.")
    ] = False,
    quiet: arg.Quiet = False,
) -> None:
    """Write an image as OME-TIFF or GeoTIFF, draw a scan as PNG. The TIFF has every pixel and resolution levels, for QuPath, Fiji and the like."""
    from halotile.cli.export import draw_sheet
    from halotile.cli.export import export as write_export
    from halotile.storage.scans.scan import export_result, is_result, is_scan

    path, file = request.path, request.file
    if (file.suffix in (".zarr", ".png") and is_result(path)) or (file.suffix == ".png" and is_scan(path)):
        if any((request.cog, request.region, request.plane, request.level, request.dataset)):
            raise ConfigError(
                f"{file}: all of a result is written. Leave out all options but --unwrap and --overwrite."
            )
        if file.suffix == ".png":
            draw_sheet(request)
            description = str(file)
        else:
            images = export_result(path, str(file), unwrap=unwrap, overwrite=request.overwrite)
            description = "\n".join(images)
    elif unwrap:
        raise ConfigError(
            f"--unwrap needs the result of a ptychography job and a .zarr to write, and {path} or {file} is something else. Leave --unwrap out."
        )
    else:
        _check_is_image(path, request.dataset)
        description = write_export(request, quiet=quiet)
    if not quiet:
        echo(description)


@command()
def levels(path: Annotated[str, arg.argument("PATH", "An OME-Zarr image.")], quiet: arg.Quiet = False) -> None:
    """Add resolution levels to an OME-Zarr. The levels are written in place, so that viewers open the image quickly."""
    from halotile.cli.export import complete

    description = complete(path, quiet=quiet)
    if not quiet:
        echo(description)


@command()
def schema() -> None:
    """Write the JSON Schema of job files, for editors."""
    from halotile.cli.config.schema import config_schema

    print_json(config_schema())
