"""Arguments that several commands share, and short forms of those that one command has."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from halotile.errors import ConfigError, OutputRefused
from halotile.storage.disk.object_path import lies_in
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Region


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

    >>> worker_counts("1, 2,4"), worker_counts(None)
    ((1, 2, 4), ())
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--workers {text}: not numbers of workers. Write them as 1,2,4, each 1 or more.")
    return tuple(map(int, parts))


def argument(metavar: str, text: str) -> Any:
    """A word of the command that is no option."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def flag(name: str, text: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=text)


def option(metavar: str, text: str, *names: str, parser: Callable[..., Any] | None = None) -> Any:
    """An option with a value."""
    return typer.Option(*names, metavar=metavar, help=text, parser=parser)


def count(text: str, *names: str) -> Any:
    """An option whose value is an integer."""
    return option("N", text, *names, parser=whole)


AllowImport = Annotated[
    bool,
    flag("--allow-import", "Allow the job to import and run your own code. Use it only for job files that you trust."),
]
ClusterKind = Annotated[
    str | None, option("KIND", "Kind of cluster, such as local or slurm; replaces cluster.kind.", "--cluster")
]
Config = Annotated[Path, argument("CONFIG", "The job, a YAML file.")]
Dataset = Annotated[
    str | None,
    typer.Option(help="Dataset inside an HDF5 file, image or array inside a Zarr, or scene of a microscope's file."),
]
Debug = Annotated[bool, flag("--debug", "Show the traceback of an error.")]
Fresh = Annotated[bool, flag("--fresh", "Start over instead of resuming.")]
Json = Annotated[bool, flag("--json", "Write the result as JSON.")]
Level = Annotated[int, count("Resolution level of PATH; 0 is the finest.")]
NoDashboard = Annotated[bool, flag("--no-dashboard", "Do not serve Dask's dashboard.")]
NoTls = Annotated[bool, flag("--no-tls", "Do not encrypt; refused where anything but loopback is used.")]
SET = 'Replace a value, such as tile.size=256 or "operators[0].noise_sigma=0.05".'
Overrides = Annotated[list[str] | None, option("KEY=VALUE", SET, "--set")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace FILE if it is there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors and warnings.")]
RunPath = Annotated[str, argument("RUN", "A run directory, or the output it belongs to.")]
RunPaths = Annotated[list[str], argument("RUN", "Run directories, or the outputs they belong to.")]
SameInput = Annotated[
    bool, flag("--same-input", "Continue: the input was repaired, copied or moved, and is the same image.")
]
Workers = Annotated[int | None, count("Worker processes; replaces run.workers.")]
# Arguments of calls in Python that have another name than the option, or a value.
ARGUMENTS = {"range": "values", "overwrite": "overwrite=True", "cog": "cog=True"}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options that override a job file."""

    workers: Workers = None
    cluster: ClusterKind = None
    allow_import: AllowImport = False
    no_dashboard: NoDashboard = False
    no_tls: NoTls = False


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run and of its plan."""

    fresh: Fresh = False
    same_input: SameInput = False
    as_json: Json = False
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """Options of a file with a part of an image, from the command line or a call."""

    region: Annotated[str | None, option("Y0:Y1,X0:X1", "Only these rows and columns, pixel by pixel.")] = None
    plane: Annotated[str | None, option("AXIS=N,...", "Which plane, such as t=0,c=1 or c=DAPI.")] = None
    overwrite: Overwrite = False
    is_call: bool = False  # true where a script asks, whose messages name arguments, not options

    def spelled(self, name: str) -> str:
        """Return the spelling of an option: ``--name`` on the command line, the argument in a call.

        >>> FileRequest(is_call=False).spelled("overwrite"), FileRequest(is_call=True).spelled("overwrite")
        ('--overwrite', 'overwrite=True')
        """
        return ARGUMENTS.get(name, name) if self.is_call else f"--{name}"

    @property
    def area(self) -> Region | None:
        """Rows and columns from ``y0:y1,x0:x1``.

        >>> FileRequest(region="0:100,50:250").area
        Region(start=(0, 50), stop=(100, 250))
        """
        if self.region is None:
            return None
        self._check_text("region", self.region, "0:512,1000:1512")
        match = re.fullmatch(r"\s*(\d+):(\d+)\s*,\s*(\d+):(\d+)\s*", self.region)
        if match is None:
            raise ConfigError(
                f"{self.spelled('region')} {self.region}: not rows and columns. Write first row:end row,first column:end column, which exclude the end row and "
                "column, such as 0:512,1000:1512."
            )
        y0, y1, x0, x1 = map(int, match.groups())
        return Region((y0, x0), (y1, x1))

    @property
    def at(self) -> dict[str, int | str]:
        """Places along axes from ``t=0,c=1``, or ``c=DAPI`` for a channel by its name.

        >>> FileRequest(plane="t=0, c=1").at, FileRequest(plane="c=Alexa 488").at
        ({'t': 0, 'c': 1}, {'c': 'Alexa 488'})
        """
        positions: dict[str, int | str] = {}
        self._check_text("plane", self.plane or "", "t=0,c=1")
        for entry in self.plane.split(",") if self.plane else ():
            match = re.fullmatch(r"\s*([A-Za-z])\s*=\s*(\d+|(?<=[cC]=)\S.*?)\s*", entry)
            if match is None or match[1].lower() in positions:
                name = self.spelled("plane")
                raise ConfigError(
                    f"{name} {self.plane}: not a number for each axis. Write it as {name} t=0,c=1, each axis once."
                )
            positions[match[1].lower()] = int(match[2]) if match[2].isdecimal() else match[2]
        return positions

    def _check_text(self, name: str, text: object, instead: str) -> None:
        """Refuse what a script passes in place of a text."""
        if not isinstance(text, str):
            raise ConfigError(
                f'{self.spelled(name)} is {text!r}: it is written as on the command line, such as "{instead}".'
            )

    def check_file(self, file: Path, images: Iterable[str]) -> None:
        """Refuse a path that a file must not be written to."""
        for image in images:
            if "://" not in image and lies_in(file.resolve(), Path(image).resolve()):
                raise OutputRefused(f"{file}: it is the image {image}, or inside it. Write a name elsewhere.")
        remedy = "" if self.overwrite else self.spelled("overwrite")
        check_place(file, overwrite=self.overwrite, key="the path", remedy=remedy, is_file=True)


@dataclass(frozen=True, kw_only=True)
class ImageRequest(FileRequest):
    """A file that shows an image."""

    path: Annotated[str, argument("PATH", "An image.")]
    file: Path
    level: Level = 0
    dataset: Dataset = None


@dataclass(frozen=True, kw_only=True)
class PreviewRequest(ImageRequest):
    """A PNG of an image."""

    file: Annotated[Path, argument("FILE", "The PNG to write.")]
    size: Annotated[int | None, count("Longest side of a PNG in pixels; 1024 when left out.")] = None
    against: Annotated[str | None, option("OTHER", "A second image, drawn on the right of a PNG.")] = None
    values: Annotated[
        tuple[float, float] | None, option("LOW HIGH", "Values that are black and white in a PNG.", "--range")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportRequest(ImageRequest):
    """A TIFF of an image."""

    file: Annotated[
        Path,
        argument(
            "FILE",
            "The TIFF to write. For the result of a ptychography job: a .zarr for its images or a .png for a sheet. For a scan: a .png.",
        ),
    ]
    cog: Annotated[bool, flag("--cog", "Write a Cloud Optimized GeoTIFF; PATH has a georeference.")] = False
    plane: Annotated[str | None, option("AXIS=N,...", "Only these planes, such as t=0,c=1.")] = None


@dataclass(frozen=True, kw_only=True)
class TryRequest(FileRequest):
    """Settings that are compared on a crop."""

    config: Config
    file: Annotated[Path | None, argument("FILE", "The sheet to draw, a .png.")] = None
    overrides: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE,...",
            "Values to compare, such as denoiser.strength=0.5,1,2; of several lists every combination.",
            "--set",
        ),
    ] = None
    region: Annotated[str | None, option("Y0:Y1,X0:X1", "The crop; auto: 512 × 512 pixels with most structure.")] = None
    allow_import: AllowImport = False
