"""Values of a scan that its file lacks, or has otherwise."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError

PLANCK_TIMES_LIGHT = 1.98644586e-25  # in joule metres: the wavelength of light is this by the energy of a photon
# Joules of an electronvolt, and of the mass of an electron.
CHARGE, ELECTRON_AT_REST = 1.602176634e-19, 8.1871057880e-14
NEGATIVE, PIXELS = "negative", re.compile(r"\d+,\d+(\s+\d+,\d+)*")  # bad pixels that are no name of an image


@dataclass(frozen=True)
class KnownValues:
    """Values that a user gives; None where the file has them."""

    wavelength: float | None = None  # wavelength, distance: in metres
    distance: float | None = None
    # size of a pixel of the detector along rows and columns, in metres
    pixel: tuple[float, float] | None = None
    # patterns, positions, good: names of datasets, or paths of .npy, .csv and .txt files: patterns, places of the
    # beam, and an image that is not 0 where a pixel of the detector counts. Two names with a comma between them are
    # places along rows and along columns
    patterns: str | None = None
    positions: str | None = None
    good: str | None = None
    # name of a first guess of the probe, complex, (rows, columns) or (modes, rows, columns), with the beam in the
    # middle
    probe: str | None = None
    # names of images that are not 0 where a pixel does not count, pixels such as `"10,12 50,20"`, or `negative`:
    # those that are negative or NaN in any pattern
    bad: tuple[str, ...] = ()
    # between the positions of a raster along its rows and columns, in metres
    step: tuple[float, float] | None = None
    unit: float = 1.0  # metres of a unit of the positions
    # which column of the positions goes along rows (y) and which along columns (x), with a minus where it goes the
    # other way; z is not used. None: `y,x` of two columns
    axes: str | None = None
    # degrees by which the places are turned, from rows to columns, where the detector is not parallel to the axes of
    # the scan
    rotation: float = 0.0
    angles: bool = False  # true where the pixel is an angle, as its size at a distance of 1 m
    # true where the axes of the positions come after those of the pixels in named patterns
    positions_last: bool = False

    def __post_init__(self) -> None:
        if sorted(name.removeprefix("-") for name in self._axes) not in (["x", "y"], ["x", "y", "z"]):
            raise ConfigError(
                f"the axes are {self.axes}. Write y,x or x,y, each with a minus where it goes the other way, and z for a column that is not used."
            )

    @property
    def _axes(self) -> list[str]:
        return (self.axes or "y,x").replace(" ", "").split(",")

    @property
    def bad_images(self) -> list[str]:
        """Names of images of bad pixels."""
        return [each for each in self.bad if each != NEGATIVE and not PIXELS.fullmatch(each.strip())]

    @property
    def leaves_negative_out(self) -> bool:
        """True where pixels are bad that are negative or NaN in any pattern."""
        return NEGATIVE in self.bad

    def without_pixels(self, mask: NDArray[np.bool_] | None, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """A mask of this shape without the pixels that are bad by their rows and columns.

        >>> KnownValues(bad=("0,1 1,0",)).without_pixels(None, (2, 2)).tolist()
        [[True, False], [False, True]]
        """
        lists = [each for each in self.bad if PIXELS.fullmatch(each.strip())]
        if not lists:
            return mask
        good = np.ones(shape, bool) if mask is None else mask.copy()
        for pixel in " ".join(lists).split():
            row, column = map(int, pixel.split(","))
            if row >= shape[0] or column >= shape[1]:
                raise ConfigError(
                    f"--bad-pixels {pixel}: the patterns have {shape[0]} rows and {shape[1]} columns, which count from 0."
                )
            good[row, column] = False
        return good

    def placed(self, columns: NDArray[Any]) -> NDArray[np.float64]:
        """Places along rows and columns of the detector, in metres, of values in the file's order, signs and unit.

        >>> KnownValues(unit=1e-6, axes="x,-y").placed(np.array([[1.0, 2.0]])).tolist()
        [[-2e-06, 1e-06]]
        >>> KnownValues(rotation=90).placed(np.array([[1.0, 0.0]])).round(9).tolist()
        [[0.0, 1.0]]
        """
        names, count = self._axes, columns.shape[1]
        if count < len(names) or (count > 2 and self.axes is None):
            raise ConfigError(
                f"the positions have {count} columns, and {'a place has 2' if self.axes is None else f'the axes are {self.axes}'}. Say which is which: "
                f"--position-axes {'y,x' if count == 2 else 'x,y,z'}, where y goes along rows, x along columns{'' if count == 2 else ' and z is not used'}."
            )
        signs = {name[-1]: (number, -1 if name[0] == "-" else 1) for number, name in enumerate(names)}
        scaled = np.asarray(columns, np.float64) * self.unit
        row, column = (sign * scaled[:, number] for number, sign in (signs["y"], signs["x"]))
        if not self.rotation:
            return np.stack([row, column], 1)
        cosine, sine = math.cos(math.radians(self.rotation)), math.sin(math.radians(self.rotation))
        return np.stack([cosine * row - sine * column, sine * row + cosine * column], 1)


def wavelength_of(energy: float, *, electrons: bool = False) -> float:
    """The wavelength in metres of photons or electrons of an energy in electronvolts.

    >>> round(wavelength_of(12398.42) * 1e10, 4), round(wavelength_of(300e3, electrons=True) * 1e12, 3)
    (1.0, 1.969)
    """
    joules = energy * CHARGE
    if electrons:
        return PLANCK_TIMES_LIGHT / math.sqrt(joules * (joules + 2 * ELECTRON_AT_REST))
    return PLANCK_TIMES_LIGHT / joules
