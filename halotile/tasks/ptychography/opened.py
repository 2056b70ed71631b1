"""Scans of a script: one that is opened and reconstructed, and one whose object, probe and positions are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from halotile.errors import ConfigError, InputError
from halotile.storage.disk.durable import DISK
from halotile.storage.lengths import shown_resolution
from halotile.storage.scans.scan import PatternComparison, Scan, check_result_place
from halotile.tasks.groups.training.curve import LOOK_SECONDS
from halotile.tasks.groups.training.fit import read_content, state_in, write_state
from halotile.tasks.ptychography import result
from halotile.tasks.ptychography.model import PatternModel, Positions
from halotile.tasks.ptychography.patterns import Patterns, on_detector, turned
from halotile.tasks.ptychography.propagators import propagator_of
from halotile.tasks.ptychography.recipe import Optics, ScanRecipe, SolverStage, warning_of_halves
from halotile.tasks.ptychography.state import DIM, ReconstructionState, first_state, shift_limits, support_of


@dataclass
class OpenedScan:
    """A scan, its object and its probe.

    What is set, such as ``scan.object = image``, is what the next epochs begin with.

    Parameters
    ----------
    recipe : ScanRecipe
        The scan and its model.
    """

    recipe: ScanRecipe
    _checkpoint: Path | None = field(default=None, init=False, repr=False)
    """File in which ranks that are at work keep the state."""
    _stages: tuple[SolverStage, ...] = field(default=(), init=False, repr=False)
    """Stages that were computed, and the one at hand."""
    _known: list[float] = field(default_factory=list, init=False, repr=False)
    """Losses that a loop over their epochs has had, while ranks are at work: they keep the state of the last one once the loop asks for no other."""
    _is_computing: Callable[[], bool] = field(default=bool, init=False, repr=False)
    """True while ranks are at work."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__ and not hasattr(type(self), name):
            raise AttributeError(f"a scan has no {name}. Set object, probe, positions or background.")
        super().__setattr__(name, value)

    @cached_property
    def _own(self) -> ReconstructionState:
        return first_state(self.recipe, Patterns(self.recipe, self.recipe.slots), "cpu")

    @property
    def state(self) -> ReconstructionState:
        """Everything that was reconstructed so far."""
        while self._checkpoint and (content := read_content(self._checkpoint)):
            self._own = ReconstructionState.from_content(state_in(content), "cpu")
            if len(self._own.losses) >= len(self._known) or not self._is_computing():
                break
            time.sleep(LOOK_SECONDS)
        return self._own

    @property
    def object(self) -> NDArray[np.complex64]:
        """The object, (rows, columns)."""
        return _read_only(self.state.parameters["object"].clone())

    @object.setter  # noqa: A003 - its name in files
    def object(self, image: Any) -> None:
        self._own.begin_with("object", self._given("object", image))

    @property
    def probe(self) -> NDArray[np.complex64]:
        """The modes of the probe in roots of counts, (modes, rows, columns); orthogonal, the strongest first, unless there are variations."""
        return _read_only(result.shown_probe(self.state).clone())

    @probe.setter
    def probe(self, modes: Any) -> None:
        self._own.begin_with("probe", self._given("probe", modes) / self._own.norm)

    @property
    def positions(self) -> NDArray[np.float64]:
        """First pixel of the object that each pattern sees, (positions, 2), in the order of the file that the scan came from."""
        places = self.recipe.places + self.state.parameters["positions"].numpy()
        return _read_only(places[np.argsort(self.recipe.scan.numbers)])

    @positions.setter
    def positions(self, places: Any) -> None:
        order = np.argsort(self.recipe.scan.numbers)
        given = torch.empty_like(self._own.parameters["positions"])
        given[order] = self._given("positions", places, origin=self.recipe.places[order])
        least, most = shift_limits(self.recipe)
        if outside := int(((given < least) | (given > most)).any(1).sum()):
            raise ConfigError(
                f"{outside} of {len(given)} positions would be beyond the object. Open the scan with a margin above {self.recipe.margin}."
            )
        self._own.begin_with("positions", given)

    @property
    def background(self) -> NDArray[np.float32]:
        """Counts that are there without a beam, (rows, columns)."""
        return _read_only(on_detector(self.state.background.square(), self.recipe))

    @background.setter
    def background(self, counts: Any) -> None:
        given, dim = self._given("background", counts), DIM * self._own.root
        if (given < 0).any():
            raise ConfigError("background has values below 0, and they are counts. Write 0 or more.")
        root = given.clamp(min=dim**2).sqrt()  # at 0 there is no slope
        self._own.begin_with("background", turned(root / self._own.root, self.recipe))

    @property
    def losses(self) -> list[float]:
        """The mean loss of a pixel in each epoch so far; within a loop over epochs up to that of the loop."""
        return list(self._known if self._checkpoint else self.state.losses)

    def report(self) -> str:
        """Describe the last epoch, or that of a loop over epochs, in a line; the resolution is that of the object as it is now."""
        if not (losses := self.losses):
            return "no epoch yet"
        text = f"epoch {len(losses)}: loss {losses[-1]:.4g}"
        if self.recipe.resolution:
            state = self.state
            rings = result.correlated_halves(self._computed, state)
            assert rings is not None
            text += f", resolution {shown_resolution(rings.resolution, rings.bound)}"
            of_halves = max(half.losses[-1] for half in state.halves)
            if warning := warning_of_halves(state.losses[-1], of_halves, self.recipe.loss):
                text += f"; {warning}"
        return text

    @property
    def rings(self) -> result.RingCorrelation | None:
        """Correlation of the objects of two halves of the positions by spatial frequency; None where the scan was opened without."""
        return result.correlated_halves(self._computed, self.state) if self.recipe.resolution else None

    def compare(self, numbers: Sequence[int] | None = None) -> PatternComparison:
        """Simulate some patterns, and return them beside the measured ones.

        Parameters
        ----------
        numbers : sequence of int, optional
            Numbers of patterns in the file that the scan came from; None: those with the least, the median and the greatest `amplitude_mse` in the last epoch.

        Returns
        -------
        PatternComparison
            With ``numbers`` and ``loss``, the mean `amplitude_mse` of a pixel whatever the fit minimises, (patterns,), and ``measured`` and ``simulated``, (patterns, rows, columns).

        Raises
        ------
        ConfigError
            When the scan has no such pattern, or no epoch tells which ones.
        """
        state, there = self.state, self.recipe.scan.numbers
        if numbers is None:
            chosen = result.extreme_patterns(state)
        elif missing := np.setdiff1d(numbers, there).tolist():
            raise ConfigError(
                f"the scan has no pattern {missing[0]}. Write some of its {len(there)}, which are from {there.min()} to {there.max()}."
            )
        else:
            chosen = np.argsort(there)[np.searchsorted(np.sort(there), np.atleast_1d(numbers))]
        if not len(chosen):
            raise ConfigError(
                "no patterns were given, and no epoch has run from which to choose them. Write numbers such as [0, 1]."
            )
        return result.compared(self.recipe, state, chosen)

    def save(self, path: str | Path) -> None:
        """Write object, probe, positions and losses as the CXI file of a job, in place of an earlier one.

        Raises
        ------
        ConfigError, OutputRefused
            Where no result can be, or what is there is none.
        """
        check_result_place(Path(path))
        DISK.write_file(Path(path), [result.encoded_state(self._computed, self.state)])

    def check_ready(self) -> None:
        """Refuse to go on where others have the state, or with other patterns.

        Raises
        ------
        ConfigError, InputError
            With what to do.
        """
        self._check_free("the next ones cannot begin")
        if change := self.recipe.patterns.change():
            raise InputError(f"{self.recipe.patterns.path} {change} since the scan was opened. Open it again.")

    def hand_over(self, stage: SolverStage, checkpoint: Path, curve: Path, requests: Path) -> ScanRecipe:
        """Leave the state to ranks; return what they have to do."""
        self._known = self.losses
        write_state(checkpoint, self.state.content())
        self._checkpoint, self._stages = checkpoint, (*self._stages, stage)
        return replace(self._computed, checkpoint=checkpoint, curve=curve, requests=requests)

    def hand_out(self, loss: float, is_computing: Callable[[], bool]) -> None:
        """Take note of an epoch that a loop has now, and how to see whether ranks still are at work."""
        self._known.append(loss)
        self._is_computing = is_computing

    def take_back(self) -> None:
        """Take the state of ranks that have ended."""
        self._own = self.state
        self._checkpoint = None
        self._stages = tuple(first_epochs(self._stages, len(self._own.losses)))

    @property
    def _computed(self) -> ScanRecipe:
        """The recipe of what was computed."""
        return replace(self.recipe, stages=self._stages or self.recipe.stages)

    def _given(self, name: str, values: Any, origin: Any = 0) -> torch.Tensor:
        """Return values for a parameter, relative to an origin, once they are known to fit."""
        self._check_free(f"{name} cannot be set")
        if self._own.halves:
            raise ConfigError(
                f"{name} cannot be set where a resolution is measured: its halves would begin with the same. Open the scan without resolution."
            )
        there = self._own.parameters[name]
        try:
            array = np.asarray(values).astype(complex if there.is_complex() else float, casting="same_kind")
        except (TypeError, ValueError, RuntimeError) as error:  # the last one is torch's
            kind = "numbers" if there.is_complex() else "real numbers"
            raise ConfigError(f"{name} is no array of {kind}: {error}") from None
        if array.shape != tuple(there.shape):
            raise ConfigError(f"{name} has shape {list(array.shape)}, and the scan needs {list(there.shape)}.")
        given = torch.from_numpy(array - origin).to(there.dtype)
        if name == "probe" and (support := support_of(self.recipe)) is not None:
            given *= support
        if not given.abs().isfinite().all():
            raise ConfigError(f"{name} has NaN or inf. Write finite values.")
        if name in ("object", "probe") and not given.any():
            raise ConfigError(f"{name} is 0 everywhere: no epoch would change that.")
        return given

    def _check_free(self, refusal: str) -> None:
        if self._checkpoint:
            raise ConfigError(f"{refusal} while epochs are computed. End the loop over optimize() first.")


def first_epochs(stages: Iterable[SolverStage], epochs: int) -> Iterator[SolverStage]:
    """Yield the stages of the first epochs, the last one as short as it was.

    >>> stages = [SolverStage(epochs=n, lr=0.1, batch=8) for n in (3, 5, 7)]
    >>> [stage.epochs for stage in first_epochs(stages, 6)]
    [3, 3]
    """
    for stage in stages:
        if epochs > 0:
            yield replace(stage, epochs=min(stage.epochs, epochs))
        epochs -= stage.epochs


def _read_only(values: Any) -> NDArray[Any]:
    """An array that cannot be written to: the scan would not see it."""
    array = np.asarray(values)
    array.setflags(write=False)
    return array


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
        return Optics.from_scan(scan, (self.pattern, self.pattern), self.field, None)

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
