"""Scans with a known object, probe and positions, of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from halotile.errors import ConfigError
from halotile.storage.scans.scan import Scan
from halotile.tasks.ptychography.model import PatternModel, Positions
from halotile.tasks.ptychography.propagators import propagator_of
from halotile.tasks.ptychography.recipe import Optics

LEAST_PATTERN, MOST_MODES = 8, 4


@dataclass(frozen=True)
class SimulatedScan:
    """A scan of a random phase object by a defocused beam through a round aperture, whose places are a jittered raster.

    The beam is a quarter of a pattern wide, unless it is further out of focus: with a step of a sixteenth of it, neighbours share three quarters of it along each axis.

    Parameters
    ----------
    field : {"far", "near"}
        Geometry of the detector.
    raster : tuple of int
        Rows and columns of positions.
    pattern : int
        Edge of a pattern in pixels.
    step : float
        From position to position, in pixels of the object.
    modes : int
        Modes of the probe, 1 to 4; each further one has a tenth of the intensity of the one before.
    phase : float
        Largest phase of the object, in radians: patterns of an object of small phases tell little of their positions.
    photons : float, optional
        Photons of a pattern, which are counted; None: exact intensities, 1e6 for each pattern.
    defocus : float
        Distance from the sample to the focus behind it, in pattern × pixel² / wavelength: the beam is a third as many edges of a pattern wide.
    position_error : float
        Standard deviation of the difference of the positions in the scan from the true ones, in pixels.
    seed : int
        All random numbers follow from it.

    Examples
    --------
    >>> scan = SimulatedScan(raster=(3, 4), pattern=32, step=5.0)
    >>> scan.image.shape, scan.probe.shape, scan.patterns(np.arange(2)).shape
    ((50, 54), (1, 32, 32), (2, 32, 32))
    """

    field: Literal["far", "near"] = "far"
    raster: tuple[int, int] = (32, 32)
    pattern: int = 128
    step: float = 8.0
    modes: int = 1
    phase: float = 1.0
    photons: float | None = None
    defocus: float = 0.75
    position_error: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "field": (self.field in ("far", "near"), "far or near"),
            "raster": (len(self.raster) == 2 and min(self.raster) > 0, "numbers of rows and columns, such as (8, 8)"),
            "pattern": (self.pattern >= LEAST_PATTERN, f"{LEAST_PATTERN} or more"),
            "step": (self.step > 0, "a number above 0"),
            "modes": (1 <= self.modes <= MOST_MODES, f"1 to {MOST_MODES}"),
            "phase": (self.phase >= 0, "a number of at least 0, in radians"),
            "photons": (self.photons is None or self.photons > 0, "a number above 0, or None"),
            "defocus": (abs(self.defocus) <= 3, "a number of -3 to 3, or the beam is wider than a pattern"),
            "position_error": (self.position_error >= 0, "a number of at least 0"),
        }
        for name, (is_valid, wanted) in rules.items():
            if not is_valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Write {wanted}.")

    def _random(self, number: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence((self.seed, number)))

    @property
    def count(self) -> int:
        """Number of positions."""
        return self.raster[0] * self.raster[1]

    @cached_property
    def places(self) -> NDArray[np.float64]:
        """First pixel of the object that each pattern sees, with fractions, (positions, 2)."""
        raster = np.stack(np.meshgrid(*map(np.arange, self.raster), indexing="ij"), -1).reshape(-1, 2)
        places = self.step * (raster + 0.3 * self._random(0).uniform(-1, 1, raster.shape))
        return np.asarray(places - places.min(0) + 2)

    @cached_property
    def image(self) -> NDArray[np.complex64]:
        """The object, of about 1, smooth in absorption and phase."""
        rows, columns = (int(n) + self.pattern + 4 for n in self.places.max(0))
        phase, loss = (gaussian_filter(self._random(n).standard_normal((rows, columns)), 2.5) for n in (1, 2))
        modulus = 1 - 0.2 * loss / np.abs(loss).max()
        return np.asarray(modulus * np.exp(1j * self.phase * phase / np.abs(phase).max()), np.complex64)

    @cached_property
    def probe(self) -> NDArray[np.complex64]:
        """The modes of the probe, in roots of counts."""
        n = self.pattern
        row, column = np.meshgrid(*2 * [np.fft.fftfreq(n) * n], indexing="ij")
        aperture = (np.hypot(row, column) < n / 6) * np.exp(np.pi * self.defocus * 1j / n * (row**2 + column**2))
        shapes = (1.0, row, column, row * column)
        modes = [np.fft.fftshift(np.fft.ifft2(aperture * shape)) for shape in shapes[: self.modes]]
        share = [0.1**mode for mode in range(self.modes)]
        total = 1e6 if self.photons is None else self.photons
        scaled = [
            mode * np.sqrt(total * part / sum(share) / (np.abs(mode) ** 2).sum())
            for mode, part in zip(modes, share, strict=True)
        ]
        return np.array(scaled, np.complex64)

    @cached_property
    def scan(self) -> Scan:
        """Everything about it but the patterns, with the wrong positions."""
        wavelength, distance, pixel = 1e-10, 1.0, 5e-5
        if self.field == "near":
            distance, pixel = 2e-3, 1e-7
        scan = Scan(wavelength, distance, (pixel, pixel), self.places, np.arange(self.count))
        wrong = self.places + self.position_error * self._random(3).standard_normal(self.places.shape)
        return replace(scan, positions=wrong * self._optics(scan).pixel)

    def _optics(self, scan: Scan) -> Optics:
        return Optics.of(scan, (self.pattern, self.pattern), self.field, None)

    @cached_property
    def _model(self) -> PatternModel:
        return PatternModel(propagator_of(self._optics(self.scan), (self.pattern, self.pattern), "cpu"))

    def patterns(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some of the patterns, (positions, rows, columns), with the beam in the middle."""
        positions = Positions.at(torch.from_numpy(self.places[numbers]), torch.ones(len(numbers)))
        dark = torch.zeros(self.pattern, self.pattern)
        image, probe = torch.from_numpy(self.image), torch.from_numpy(self.probe)
        exact = self._model.intensity(image, probe, dark, positions)
        if self.field == "far":
            exact = torch.fft.fftshift(exact, (-2, -1))
        if self.photons is None:
            return np.asarray(exact)
        counted = [self._random(10 + int(n)).poisson(one) for n, one in zip(numbers, exact.numpy(), strict=True)]
        return np.array(counted, np.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of all patterns."""
        return self.count, self.pattern, self.pattern

    def __getitem__(self, index: tuple[Any, slice, slice]) -> NDArray[np.float32]:
        """Parts of some patterns, as of an array."""
        chosen, rows, columns = index
        return self.patterns(np.arange(self.count)[chosen])[:, rows, columns]
