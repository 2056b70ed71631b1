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
    from halotile.cli.screens.scan_rows import scan_rows
    from halotile.storage.scans.convert import Framing, convert_scan

    convert_scan(source, path, Framing(crop, _pixel(center), binning), overwrite=overwrite)
    if not quiet:
        print_rows(path, scan_rows(path))
        echo("")
        echo(f"Next: job: ptychography with input: {{path: {path}}}")


def _pixel(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--center {text}: no pixel. Write its row and column, such as 128,131.")
    return int(parts[0]), int(parts[1])
