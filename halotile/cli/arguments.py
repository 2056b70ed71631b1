"""Arguments that several commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halotile.errors import ConfigError


def whole(text: str | int) -> int:
    """Parse an integer from the command line."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; write one such as 4.") from None


def number(text: str | float) -> float:
    """Parse a number from the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write one such as 0.5.") from None


def worker_counts(text: str | None) -> tuple[int, ...]:
    """Parse numbers of workers from the command line.

    Examples
    --------
    >>> worker_counts("1, 2,4"), worker_counts(None)
    ((1, 2, 4), ())
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--workers {text}: not numbers of workers. Write them as 1,2,4, each 1 or more.")
    return tuple(map(int, parts))


Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The job, a YAML file.", show_default=False)]
RunPath = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run directory, or the output it belongs to.", show_default=False),
]
Workers = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole, help="Worker processes; replaces run.workers."),
]
Level = Annotated[
    int, typer.Option(metavar="N", parser=whole, help="Resolution level of PATH; 0 is the finest.")
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="Dataset inside an HDF5 file, image or array inside a Zarr, or scene of a microscope's file."
    ),
]
RegionText = Annotated[
    str | None, typer.Option(metavar="Y0:Y1,X0:X1", help="Only these rows and columns, pixel by pixel.")
]
PlaneText = Annotated[str | None, typer.Option(metavar="AXIS=N,...", help="Which plane, such as t=0,c=1.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it is there.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help='Replace a value, such as tile.size=256 or "operators[0].noise_sigma=0.05".',
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors and warnings.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NoDashboard = Annotated[bool, typer.Option("--no-dashboard", help="Do not serve Dask's dashboard.")]
ClusterKind = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="KIND", help="Kind of cluster, such as local or slurm; replaces cluster.kind."
    ),
]
NoTls = Annotated[
    bool, typer.Option("--no-tls", help="Do not encrypt; refused where anything but loopback is used.")
]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Allow the job to run code of your own. Trust its file first.")
]

Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
SameInput = Annotated[
    bool,
    typer.Option(
        "--same-input", help="Continue: the input was repaired, copied or moved, and is the same image."
    ),
]
