"""Commands for ptychographic scans: convert."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from halotile.cli.app import command
from halotile.cli.arguments import Overwrite, Quiet, number, whole
from halotile.cli.screens.screen import echo, print_rows
from halotile.errors import ConfigError

VOLTS = {"eV": 1.0, "keV": 1e3, "MeV": 1e6}


def _value(metavar: str, text: str, *names: str) -> Any:
    """An option for a value of the scan."""
    return typer.Option(*names, metavar=metavar, help=text)


CropOption = Annotated[
    int | None,
    typer.Option(metavar="N", parser=whole, help="Keep a square of so many pixels of each pattern."),
]
CenterOption = Annotated[
    str | None, _value("ROW,COLUMN", "Pixel of the beam without a sample, the middle of what is kept.")
]
CornerOption = Annotated[
    bool,
    typer.Option(
        "--corner", help="The beam is at the first pixel, as an FFT leaves it: move it to the middle."
    ),
]
BinningOption = Annotated[
    int, typer.Option("--bin", metavar="N", parser=whole, help="Add the counts of N × N pixels.")
]
PatternsOption = Annotated[str | None, _value("NAME", "Dataset of the patterns; of a raster with 4 axes.")]
PositionsOption = Annotated[
    str | None,
    _value("NAME", "Places of the beam: a dataset or a .npy, .csv or .txt, or two for rows,columns."),
]
PositionUnitOption = Annotated[str, _value("LENGTH", "Unit of the positions.", "--position-unit")]
PositionAxesOption = Annotated[
    str | None,
    _value(
        "AXES",
        "Their columns: y along rows, x along columns, z not used, - where the way is the other one; y,x if left out.",
        "--position-axes",
    ),
]
PositionsLastOption = Annotated[
    bool,
    typer.Option(
        "--positions-last", help="The axes of the positions come after those of the pixels in the patterns."
    ),
]
StepOption = Annotated[str | None, _value("LENGTH", "Step of a raster, or two for rows,columns.")]
RotationOption = Annotated[
    float, typer.Option(metavar="DEGREES", parser=number, help="Of the places, from rows to columns.")
]
GoodOption = Annotated[
    str | None, _value("NAME", "Image that is not 0 where a pixel counts.", "--good-pixels")
]
BadOption = Annotated[
    list[str] | None,
    _value(
        "NAME",
        'Image that is not 0 where none does; or pixels, such as "10,12 50,20"; or negative: those that are so, or NaN, in any pattern. May be repeated.',
        "--bad-pixels",
    ),
]
ProbeOption = Annotated[
    str | None, _value("NAME", "First guess of the probe, complex: modes, rows and columns of a pattern.")
]
EnergyOption = Annotated[str | None, _value("ENERGY", "Of a photon, such as 8.8 keV.")]
ElectronsOption = Annotated[bool, typer.Option("--electrons", help="The energy is that of electrons.")]
DistanceOption = Annotated[str | None, _value("LENGTH", "From the sample to the detector.")]
DetectorPixelOption = Annotated[
    str | None,
    _value(
        "LENGTH",
        "Size of a pixel of the detector, or two for rows,columns; in mrad without a distance.",
        "--pixel",
    ),
]


@command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCAN",
            help="A ptychographic scan: a CXI or PtyD file, or arrays in HDF5, Zarr or .npy.",
            show_default=False,
        ),
    ],
    path: Annotated[str, typer.Argument(metavar="ZARR", help="The Zarr to write.", show_default=False)],
    crop: CropOption = None,
    center: CenterOption = None,
    corner: CornerOption = False,
    binning: BinningOption = 1,
    patterns: PatternsOption = None,
    positions: PositionsOption = None,
    unit: PositionUnitOption = "m",
    axes: PositionAxesOption = None,
    positions_last: PositionsLastOption = False,
    step: StepOption = None,
    rotation: RotationOption = 0.0,
    good: GoodOption = None,
    bad: BadOption = None,
    probe: ProbeOption = None,
    energy: EnergyOption = None,
    electrons: ElectronsOption = False,
    distance: DistanceOption = None,
    pixel: DetectorPixelOption = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Store a ptychographic scan as a Zarr, which job: ptychography reads."""
    from halotile.cli.preview import progress
    from halotile.storage.scans.convert import convert_scan
    from halotile.storage.scans.framing import Framing
    from halotile.storage.scans.known import KnownValues

    framing = Framing(crop, _pixel(center), binning, corner)
    away, size = _detector(distance, pixel)
    known = KnownValues(
        wavelength=_wavelength(energy, electrons),
        distance=away,
        pixel=size,
        patterns=patterns,
        positions=positions,
        good=good,
        bad=tuple(bad or ()),
        probe=probe,
        step=_pair("--step", step),
        unit=_lengths("--position-unit", f"1 {unit}" if unit[:1].isalpha() else unit)[0],
        axes=axes,
        rotation=rotation,
        angles=_is_angle(pixel),
        positions_last=positions_last,
    )
    with progress(path, quiet) as tick:
        convert_scan(
            source, path, framing, known, overwrite=overwrite, report=lambda done, of: tick(done / of)
        )
    if not quiet:
        _show(path)


def _show(path: str) -> None:
    """Print what a scan is, and what to do with it."""
    from halotile.cli.screens.scan_views import ScanFacts

    if facts := ScanFacts.of(path):
        print_rows(path, facts.rows())
        echo(f"\n{facts.next_step()}")


def _pixel(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--center {text}: no pixel. Write its row and column, such as 128,131.")
    return int(parts[0]), int(parts[1])


def _is_angle(pixel: str | None) -> bool:
    return pixel is not None and pixel.rstrip().endswith("mrad")


def _detector(distance: str | None, pixel: str | None) -> tuple[float | None, tuple[float, float] | None]:
    """The distance and the pixel size in metres; pixels that are angles are those of a detector at one metre."""
    if pixel is not None and _is_angle(pixel):
        if distance is not None:
            raise ConfigError(
                "--pixel is an angle, which needs no --distance. Leave one of them out, or write the pixel as a length."
            )
        return 1.0, _pair("--pixel", pixel.replace("mrad", "mm"))
    return None if distance is None else _lengths("--distance", distance)[0], _pair("--pixel", pixel)


def _pair(option: str, text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    lengths = _lengths(option, text)
    if len(lengths) > 2:
        raise ConfigError(
            f"{option} {text}: {len(lengths)} lengths. Write one, or one for rows and one for columns."
        )
    return lengths[0], lengths[-1]


def _lengths(option: str, text: str) -> list[float]:
    """Lengths in metres, with commas between them."""
    from halotile.storage.spacing import metres

    parts = [part.strip() for part in text.split(",")]
    unit = parts[-1].lstrip("+-.0123456789eE ")
    # A unit at the end is that of all numbers before it: 0.2,0.3 um.
    found = [metres(part if part[-1:].isalpha() or not unit else f"{part} {unit}") for part in parts]
    known = [length for length in found if length]
    if len(known) < len(found):
        raise ConfigError(f"{option} {text}: no length above 0. Write one such as 55 um, or in metres.")
    return known


def _wavelength(energy: str | None, electrons: bool) -> float | None:
    from halotile.storage.scans.known import wavelength_of

    if energy is not None:
        return wavelength_of(_electronvolts(energy), electrons=electrons)
    if electrons:
        raise ConfigError(
            "--electrons says what --energy is that of. Write both, such as --energy '300 keV'."
        )
    return None


def _electronvolts(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(eV|keV|MeV)\s*", text)
    try:
        value = float(match[1]) * VOLTS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(
            f"--energy {text}: no energy. Write a number above 0 with its unit, such as 8.8 keV."
        )
    return value
