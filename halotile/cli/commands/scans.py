"""Commands for ptychographic scans: convert."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any

from halotile.cli import arguments as arg
from halotile.cli.app import command
from halotile.errors import ConfigError

VOLTS = {"eV": 1.0, "keV": 1e3, "MeV": 1e6}
FIRST = "The beam is at the first pixel, as an FFT leaves it: move it to the middle."
PLACES = "Positions of the beam: a dataset, or a .npy, .csv or .txt file; or two of these, for rows,columns."
COLUMNS = "Meaning of the position columns: y along rows, x along columns, z unused; a minus reverses an axis. y,x when left out."
LAST = "The patterns have the pixel axes first and the position axes last."
BAD = (
    'Bad pixels: an image that is not 0 there; a list such as "10,12 50,20"; or negative, for pixels that are negative or NaN in any pattern. '
    "May be repeated."
)
PROBE = "First guess of the probe, complex: modes, rows and columns of a pattern."
PIXEL = "Size of a pixel of the detector, or two for rows,columns; in mrad without a distance."
Text = str | None


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """Options of :func:`convert`; those that are not converted have the names of the fields that they fill."""

    crop: Annotated[int | None, arg.count("Keep a square of so many pixels of each pattern.")] = None
    center: Annotated[
        Text,
        arg.option(
            "ROW,COLUMN", "Pixel that the beam hits without a sample; it becomes the middle of the kept square."
        ),
    ] = None
    corner: Annotated[bool, arg.flag("--corner", FIRST)] = False
    binning: Annotated[int, arg.count("Add the counts of N × N pixels.", "--bin")] = 1
    patterns: Annotated[Text, arg.option("NAME", "Dataset of the patterns; of a raster with 4 axes.")] = None
    positions: Annotated[Text, arg.option("NAME", PLACES)] = None
    unit: Annotated[str, arg.option("LENGTH", "Unit of the positions.", "--position-unit")] = "m"
    axes: Annotated[Text, arg.option("AXES", COLUMNS, "--position-axes")] = None
    positions_last: Annotated[bool, arg.flag("--positions-last", LAST)] = False
    step: Annotated[Text, arg.option("LENGTH", "Step of a raster, or two for rows,columns.")] = None
    rotation: Annotated[
        float, arg.option("DEGREES", "Rotation of the positions, from rows towards columns.", parser=arg.number)
    ] = 0.0
    good: Annotated[Text, arg.option("NAME", "Image that is not 0 where a pixel counts.", "--good-pixels")] = None
    bad: Annotated[list[str] | None, arg.option("NAME", BAD, "--bad-pixels")] = None
    probe: Annotated[Text, arg.option("NAME", PROBE)] = None
    energy: Annotated[
        Text, arg.option("ENERGY", "Energy of a photon, or of an electron with --electrons, such as 8.8 keV.")
    ] = None
    electrons: Annotated[bool, arg.flag("--electrons", "The energy is that of electrons.")] = False
    distance: Annotated[Text, arg.option("LENGTH", "Distance from the sample to the detector.")] = None
    pixel: Annotated[Text, arg.option("LENGTH", PIXEL, "--pixel")] = None


SCAN = "A ptychographic scan: a CXI or PtyD file, or arrays in HDF5, Zarr or .npy."


@command()
def convert(
    source: Annotated[str, arg.argument("SCAN", SCAN)],
    path: Annotated[str, arg.argument("ZARR", "The Zarr to write.")],
    options: ScanOptions,
    overwrite: arg.Overwrite = False,
    quiet: arg.Quiet = False,
) -> None:
    """Store a ptychographic scan as Zarr, which job: ptychography reads."""
    from halotile.cli.export import progress
    from halotile.cli.screens.scan_views import ScanFacts
    from halotile.storage.scans.convert import Framing, convert_scan
    from halotile.storage.scans.known import KnownValues

    given, unit = vars(options), options.unit
    framing = Framing(options.crop, _pixel(options.center), options.binning, options.corner)
    distance, pixel = _detector(options.distance, options.pixel)
    converted: dict[str, Any] = {
        "wavelength": _wavelength(options.energy, options.electrons),
        "distance": distance,
        "pixel": pixel,
        "bad": tuple(options.bad or ()),
        "step": _pair("--step", options.step),
        "unit": _lengths("--position-unit", f"1 {unit}" if unit[:1].isalpha() else unit)[0],
        "angles": _is_angle(options.pixel),
    }
    names = (field.name for field in dataclasses.fields(KnownValues))
    known = KnownValues(**{name: converted[name] if name in converted else given[name] for name in names})
    with progress(path, quiet) as tick:
        convert_scan(source, path, framing, known, overwrite=overwrite, report=lambda done, of: tick(done / of))
    if not quiet and (facts := ScanFacts.from_file(path)):
        facts.show()


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
        raise ConfigError(f"{option} {text}: {len(lengths)} lengths. Write one, or one for rows and one for columns.")
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

    if energy is None and electrons:
        raise ConfigError("--electrons needs --energy. Write both, such as --energy '300 keV'.")
    if energy is None:
        return None
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)((?:e[+-]?\d+)?)\s*(eV|keV|MeV)\s*", energy)
    volts = float(match[1] + match[2]) * VOLTS[match[3]] if match else 0.0
    if volts <= 0:
        raise ConfigError(f"--energy {energy}: no energy. Write a number above 0 with its unit, such as 8.8 keV.")
    return wavelength_of(volts, electrons=electrons)
