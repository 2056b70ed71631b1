"""Commands for ptychographic scans: convert."""

from __future__ import annotations

from typing import Annotated

import typer

from halotile.cli.app import command
from halotile.cli.arguments import Overwrite, Quiet, whole
from halotile.cli.screens.screen import echo, print_rows
from halotile.errors import ConfigError


@command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SCAN", help="A ptychographic scan, a CXI file.", show_default=False)
    ],
    path: Annotated[str, typer.Argument(metavar="ZARR", help="The Zarr to write.", show_default=False)],
    crop: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole, help="Keep a square of so many pixels of each pattern."),
    ] = None,
    center: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,COLUMN", help="Pixel of the beam without a sample, the middle of what is kept."
        ),
    ] = None,
    binning: Annotated[
        int, typer.Option("--bin", metavar="N", parser=whole, help="Add the counts of N × N pixels.")
    ] = 1,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Store a ptychographic scan as a Zarr, which job: ptychography reads."""
    from halotile.cli.preview import progress
    from halotile.cli.screens.scan_rows import ScanFacts
    from halotile.storage.scans.convert import Framing, convert_scan

    framing = Framing(crop, _pixel(center), binning)
    with progress(path, quiet) as tick:
        convert_scan(source, path, framing, overwrite=overwrite, report=lambda done, of: tick(done / of))
    facts = ScanFacts.of(path)
    if facts and not quiet:
        print_rows(path, facts.rows())
        echo(f"\n{facts.next_step()}")


def _pixel(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--center {text}: no pixel. Write its row and column, such as 128,131.")
    return int(parts[0]), int(parts[1])
