"""The result of a reconstruction as the content of a CXI file, that of a user's model as well; its resolution, and its record while it goes on."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft

from halotile.errors import ConfigError, DamagedData
from halotile.storage.disk.durable import DISK
from halotile.storage.images.png import contrast, encode_png, grey, side_by_side
from halotile.storage.lengths import AT_BEST, AT_WORST, MEASURED
from halotile.storage.scans.formats import encode_cxi
from halotile.storage.scans.scan import RINGS, PatternComparison
from halotile.tasks.groups.training.curve import CurveRow, write_curve
from halotile.tasks.groups.training.fit import read_content, state_in, write_state
from halotile.tasks.options import import_from, import_reference
from halotile.tasks.ptychography.losses import amplitude_mse
from halotile.tasks.ptychography.model import PatternModel
from halotile.tasks.ptychography.patterns import PatternNumbers, Patterns, on_detector
from halotile.tasks.ptychography.propagators import propagator_of
from halotile.tasks.ptychography.recipe import ScanRecipe
from halotile.tasks.ptychography.state import ReconstructionState

# Attributes that a module has for the result, complex tensors, and their axes.
NEEDED = {"object": "rows, columns", "probe": "modes, rows, columns"}


def built_module(recipe: ScanRecipe) -> torch.nn.Module:
    """Build the user's module. Runs the user's code."""
    import_from(recipe.import_folder)
    assert recipe.module is not None
    torch.manual_seed(recipe.seed)
    module = import_reference(recipe.module)(recipe.scan, recipe.patterns, **recipe.module_options)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"{recipe.module} returned {type(module).__name__}. Write one that returns a torch.nn.Module."
        )
    for name, axes in NEEDED.items():
        found = getattr(module, name, None)
        if not isinstance(found, torch.Tensor) or not found.is_complex() or found.ndim != axes.count(",") + 1:
            what = f"of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else "missing"
            raise ConfigError(
                f"the {name} of {recipe.module} is {what}. Add it as an attribute or a property: a complex tensor, ({axes})."
            )
    if wrong := [
        name for name, value in module.named_parameters() if value.dtype not in (torch.float32, torch.complex64)
    ]:
        raise ConfigError(
            f"the parameter {wrong[0]} of {recipe.module} is in double precision. Write float32 or complex64."
        )
    return module.train()


def load(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Let a module compute with the tensors of a state."""
    for name, value in module.named_parameters():
        if name in parameters:
            value.data = parameters[name]


def module_contents(recipe: ScanRecipe, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Object, probe and all parameters by their names."""
    module = built_module(recipe)
    load(module, parameters)
    found = {name: getattr(module, name).detach() for name in NEEDED}
    return found | {f"parameters/{name}": value for name, value in parameters.items()}


Waves = NDArray[np.complexfloating]
LEAST = 16  # edge in pixels of the smallest part of an object whose resolution is measured
# Rings around the mean that are left out: a gradient of the phase and its slow changes are hardly seen by any pattern.
FIRST = 3
FINER = 10  # each of two looks finds a peak to so many parts of the one before


@dataclass(frozen=True)
class RingCorrelation:
    """Correlation of two images by spatial frequency.

    References
    ----------
    M. van Heel, M. Schatz, Fourier shell correlation threshold criteria, Journal of Structural Biology 151 (2005) 250.
    """

    frequency: NDArray[np.float64]  # middle of each ring, in periods per metre
    # correlation, threshold: correlation of the two images in a ring, and what it is where half a bit of information
    # is left in each pixel
    correlation: NDArray[np.float64]
    threshold: NDArray[np.float64]

    @property
    def resolution(self) -> float:
        """Half of the period, in metres, of the first frequency whose correlation is below the threshold; see ``bound``.

        >>> falling = RingCorrelation(np.arange(8.0), np.linspace(1, 0, 8), np.full(8, 0.5))
        >>> round(1 / falling.resolution / 2, 3)
        3.5
        """
        above, below = self.correlation - self.threshold, self._below
        if not len(below):
            return float(0.5 / (2 * self.frequency[-1] - self.frequency[-2]))
        last = int(below[0])
        if last == FIRST:
            return float(0.5 / self.frequency[last])
        share = above[last - 1] / (above[last - 1] - above[last])
        crossing = self.frequency[last - 1] + share * (self.frequency[last] - self.frequency[last - 1])
        return float(0.5 / crossing)

    @property
    def bound(self) -> float:
        """``AT_WORST`` where no ring is below the threshold, so that the resolution is about a pixel; ``AT_BEST`` where the first one is; else ``MEASURED``.

        >>> RingCorrelation(np.arange(8.0), np.zeros(8), np.full(8, 0.5)).bound == AT_BEST
        True
        """
        if not len(self._below):
            return AT_WORST
        return AT_BEST if self._below[0] == FIRST else MEASURED

    @property
    def _below(self) -> NDArray[np.intp]:
        """Numbers of the rings below the threshold."""
        return np.flatnonzero((self.correlation - self.threshold)[FIRST:] < 0) + FIRST

    def values(self) -> dict[str, Any]:
        """Everything by its name in a file."""
        rings = (self.frequency, self.correlation, self.threshold, self.resolution, self.bound)
        return dict(zip(RINGS, rings, strict=True))


def covered(recipe: ScanRecipe) -> tuple[slice, slice]:
    """The rectangle of the object that the middle of the beam covered."""
    middle = np.array(recipe.frame) / 2
    begins = itertools.accumulate((stage.epochs for stage in recipe.stages[:-1]), initial=0)
    places = recipe.places[np.logical_or.reduce([recipe.used(epoch) for epoch in begins])]
    start = np.ceil(places.min(0) + middle).astype(int).tolist()
    stop = np.floor(places.max(0) + middle).astype(int).tolist()
    rows, columns = (slice(a, b) for a, b in zip(start, stop, strict=True))
    edges = [part.stop - part.start for part in (rows, columns)]
    if min(edges) < LEAST:
        raise ConfigError(
            f"the positions cover {edges[0]} × {edges[1]} pixels of the object, and a resolution needs {LEAST} × {LEAST}. Write resolution: false."
        )
    return rows, columns


def resolution_of(recipe: ScanRecipe, first: Waves, second: Waves) -> RingCorrelation:
    """Compare two objects of a scan."""
    scanned = covered(recipe)
    return ring_correlation(first[scanned], second[scanned], recipe.optics.pixel)


def ring_correlation(first: Waves, second: Waves, pixel: tuple[float, float]) -> RingCorrelation:
    """Correlate two complex images whose pixels have a size in metres.

    A shift, a gradient of the phase and a constant factor between them are taken out first: no pattern tells them.
    """
    window = np.outer(*(np.hanning(n + 2)[1:-1] for n in first.shape))
    second = aligned(first, second, window)
    spectra = []
    for image in (first, second):
        mean = (image * window).sum() / window.sum()
        spectra.append(fft.fft2((image - mean) * window))
    extent = min(n * size for n, size in zip(first.shape, pixel, strict=True))
    row, column = (fft.fftfreq(n, size) for n, size in zip(first.shape, pixel, strict=True))
    ring = np.rint(np.hypot(row[:, None], column) * extent).astype(int).reshape(-1)
    count = int(extent / (2 * max(pixel)))

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(ring, values.reshape(-1), count + 1)[:count])

    common = total((spectra[0] * spectra[1].conj()).real)
    power = [total(np.abs(spectrum) ** 2) for spectrum in spectra]
    correlation = common / np.sqrt(np.maximum(power[0] * power[1], np.finfo(float).tiny))
    # A window makes neighbours in the spectrum alike: fewer of them are independent.
    independent = (window**2).sum() ** 2 / (window.size * (window**4).sum())
    return RingCorrelation(np.arange(count) / extent, correlation, half_bit(total(np.ones(first.shape)) * independent))


def half_bit(count: NDArray[np.float64]) -> NDArray[np.float64]:
    """The correlation of rings of so many independent pixels at which each has half a bit of information.

    >>> half_bit(np.array([16.0, 1e6])).round(3).tolist()
    [0.477, 0.173]
    """
    root = np.sqrt(np.maximum(count, 1))
    return np.asarray((0.2071 + 1.9102 / root) / (1.2071 + 0.9102 / root))


def aligned(first: Waves, second: Waves, window: NDArray[np.float64]) -> Waves:
    """The second image without the shift, the gradient of the phase and the factor between both."""
    shape = first.shape
    for _ in range(2):  # each is found better without the other
        gradient = _peak(second * first.conj() * window)
        ramps = [np.exp(-2j * math.pi * at * np.arange(n)) for at, n in zip(gradient, shape, strict=True)]
        second = second * np.multiply.outer(*ramps)
        spectra = [fft.fft2(image * window) for image in (first, second)]
        cross = spectra[1] * spectra[0].conj()
        cross[0, 0] = 0
        # All frequencies count alike: the strongest ones are the lowest, which tell least of a shift.
        shift = _peak(fft.fftshift(cross / np.maximum(np.abs(cross), np.finfo(float).tiny)))
        moves = [np.exp(-2j * math.pi * at * np.rint(fft.fftfreq(n) * n)) for at, n in zip(shift, shape, strict=True)]
        second = fft.ifft2(fft.fft2(second) * np.multiply.outer(*moves))
    factor = (second.conj() * first * window).sum() / ((np.abs(second) ** 2) * window).sum()
    return np.asarray(factor * second)


def _peak(values: Waves) -> NDArray[np.float64]:
    """The frequency of a plane wave in an image, in periods per pixel along each axis, to 1/100 of its ring."""
    spectrum = np.abs(fft.fft2(values))
    place = np.array(np.unravel_index(spectrum.argmax(), spectrum.shape))
    found = np.array([fft.fftfreq(n)[at] for n, at in zip(values.shape, place, strict=True)])
    step = 1 / np.array(values.shape)
    for _ in range(2):
        near = [at + width * np.arange(-FINER, FINER + 1) / FINER for at, width in zip(found, step, strict=True)]
        waves = [np.exp(-2j * math.pi * np.outer(at, np.arange(n))) for at, n in zip(near, values.shape, strict=True)]
        amount = np.abs(waves[0] @ values @ waves[1].T)
        best = np.unravel_index(amount.argmax(), amount.shape)
        found = np.array([at[number] for at, number in zip(near, best, strict=True)])
        step = step / FINER
    return found


EDGE = 512  # longest edge of a drawn object, in pixels
BRIGHT = 0.03  # least illumination of a pixel that is drawn, relative to the brightest one

SHOWN = 500  # positions, at most, whose light decides what is drawn


def draw_object(image: NDArray[Any], light: NDArray[Any]) -> list[bytes]:
    """Draw modulus and phase of an object side by side, as a PNG; what had little light is black.

    ``image``: complex object; ``light``: sum of the intensities that each of its pixels had.

    >>> b"".join(draw_object(np.ones((8, 8), complex), np.ones((8, 8))))[1:4]
    b'PNG'
    """
    bright = light >= BRIGHT * light.max()
    rows, columns = (slice(n.min(), n.max() + 1) for n in np.nonzero(bright))
    step = -(-max(n.stop - n.start for n in (rows, columns)) // EDGE)
    image, light, bright = (part[rows, columns][::step, ::step] for part in (image, light, bright))
    # The phase of an object is known but for a constant: its mean is drawn in the middle.
    phase = np.angle(image * np.conj((image * light).sum()))
    drawn = []
    for part in (np.abs(image), phase):
        low, high = contrast([part[bright][None, :, None].astype(np.float32)])
        shown = np.where(bright, part, low).astype(np.float32)
        drawn.append(grey(shown[None], low, high))
    return encode_png(side_by_side(drawn))


def illumination(probe: NDArray[Any], places: NDArray[np.float64], shape: tuple[int, int]) -> NDArray[np.float64]:
    """The sum of the intensities of a probe, (modes, rows, columns), at places of an object."""
    intensity = (np.abs(probe) ** 2).sum(0)
    rows, columns = intensity.shape
    light = np.zeros(shape)
    for row, column in places.astype(np.int64):
        light[row : row + rows, column : column + columns] += intensity
    return light


CURVE_SECONDS = 1.0  # least time between two curves, by which the driver sees that epochs end; loops wait for each
# Least time between two checkpoints, and most of the time that they may take.
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 1.0, 0.1


@dataclass
class Record:
    """Files that rank 0 writes of a reconstruction while it goes on."""

    recipe: ScanRecipe  # reconstruction
    state: ReconstructionState  # its state, which changes
    # gives the object, and the light that its pixels had
    drawn: Callable[[], tuple[NDArray[Any], NDArray[Any]]]
    seconds: dict[int, float] = field(default_factory=dict)  # of epochs, as far as this process computed them
    saved: int = field(init=False)  # epochs in the checkpoint
    due: float = field(default_factory=lambda: time.monotonic() + CHECKPOINT_SECONDS)  # time of the next checkpoint
    written: float = field(default_factory=time.monotonic)  # time of the last curve

    def __post_init__(self) -> None:
        self.saved = len(self.state.losses)  # it began with these

    def epoch_ended(self, seconds: float, *, is_last: bool) -> None:
        """Write the checkpoint with the drawing, and the curve, where they are due."""
        self.seconds[len(self.state.losses) - 1] = seconds
        began = time.monotonic()
        if is_last or began >= self.due or self._ends_stage:
            self.save()
            self.write(is_last=is_last)
            self.draw()
            took = time.monotonic() - began
            self.due = time.monotonic() + max(CHECKPOINT_SECONDS, took / CHECKPOINT_SHARE)
        elif self.recipe.requests or began >= self.written + CURVE_SECONDS:
            self.write(is_last=False)

    def save(self) -> None:
        """Write the checkpoint, unless it is there. Of other stages' checkpoints, only the last one of the previous stage is kept."""
        if self.saved == len(self.state.losses):
            return
        checkpoints, like = self.recipe.checkpoints, self.recipe.checkpoint
        number = self.recipe.stage_number(len(self.state.losses) - 1)
        write_state(checkpoints[number], self.state.content())
        self.saved = len(self.state.losses)
        kept = checkpoints[max(0, number - 1) : number + 1]
        for other in like.parent.glob(f"{like.stem}-*{like.suffix}"):
            if other not in kept:
                other.unlink(missing_ok=True)

    @property
    def _ends_stage(self) -> bool:
        first, stage = self.recipe.stage_of(len(self.state.losses) - 1)
        return len(self.state.losses) == first + stage.epochs

    def write(self, *, is_last: bool) -> None:
        """Write the curve, whose last figure at the end is the resolution."""
        rows: list[CurveRow] = [
            {"iteration": n + 1, "loss": loss} | ({"seconds": self.seconds[n]} if n in self.seconds else {})
            for n, loss in enumerate(self.state.losses)
        ]
        if is_last and self.state.held_out:
            first, _ = self.recipe.stage_of(len(rows) - 1)
            kept = first + int(np.argmin(self.state.held_out[first:]))
            rows[-1] |= {"kept": kept + 1, "loss_of_kept": self.state.losses[kept]}
        if is_last and self.recipe.modes > 1:
            light = shown_probe(self.state).abs().square().sum((1, 2))
            rows[-1]["faintest_mode"] = float(light.min() / light.sum())
        if is_last and (rings := correlated_halves(self.recipe, self.state)):
            halves = max(half.losses[-1] for half in self.state.halves)
            rows[-1] |= {"resolution": rings.resolution, "resolution_bound": rings.bound, "loss_of_halves": halves}
        write_curve(self.recipe.curve, len(rows), rows, is_awaited=self.recipe.requests is not None)
        self.written = time.monotonic()

    def draw(self) -> None:
        """Draw the object."""
        if self.recipe.drawing is not None:
            with suppress(OSError):
                DISK.write_file(self.recipe.drawing, draw_object(*self.drawn()), sync=False)


def words_of_kept(recipe: ScanRecipe, epoch: int) -> str:
    """Return the end of a message about an epoch: what a run with other stages goes on from. A loop keeps every epoch."""
    first, _ = recipe.stage_of(epoch)
    if not first or recipe.requests:
        return ""
    return (
        f" The {first} epochs of the stages before are kept: with other stages after them the run goes on from there."
    )


def extreme_patterns(state: ReconstructionState) -> PatternNumbers:
    """Return the patterns with the least, the median and the greatest loss; none before the first epoch, or of a model that does not keep them."""
    losses = state.parameters.get("pattern_loss", torch.zeros(0)).cpu().numpy()
    order: PatternNumbers = losses.argsort(kind="stable")
    order = order[losses[order] != 0]
    return order[[0, len(order) // 2, -1]] if len(order) else order


def compared(recipe: ScanRecipe, state: ReconstructionState, numbers: PatternNumbers) -> PatternComparison:
    """Simulate some patterns of a state on the CPU; their numbers are those in the Zarr."""
    patterns = Patterns(recipe, 1)
    mask = patterns.mask("cpu")
    counts = torch.ones(()) if mask is None else mask
    model, image = PatternModel.from_recipe(recipe, mask, "cpu"), state.parameters["object"]
    variations = state.parameters.get("variations")
    found = []
    for some in np.split(numbers, range(recipe.at_once, len(numbers), recipe.at_once)):
        measured, positions = patterns.read(some, "cpu"), state.positions(recipe, some)
        simulated = model.intensity(image, state.probe, state.background, positions, variations)
        loss = (amplitude_mse(simulated, measured)[0] * counts).sum((1, 2)) / patterns.counted_pixels
        found.append((measured.masked_fill(counts == 0, torch.nan), simulated, loss))
    measured, simulated, loss = (torch.cat(each) for each in zip(*found, strict=True))
    seen, expected = (on_detector(each, recipe).numpy() for each in (measured, simulated))
    return PatternComparison(recipe.scan.numbers[numbers], seen, expected, loss.numpy())


DETECTOR = "instrument_1/detector_1"
# Short names at the root of the file, and their places in the entry.
LINKS = {
    "object": "image_1/data",
    "probe": "image_2/data",
    "positions": "sample_1/geometry_1/translation",
    "loss": "process_1/loss",
    # As CDTools calls them:
    "obj": "image_1/data",
    "obj_basis": "image_1/basis_vectors",
    "probe_basis": "image_1/basis_vectors",
    "translations": "process_1/probe_translations",
    "original_translations": "process_1/probe_translations_before",
    "background": f"{DETECTOR}/background",
    "weights": "process_1/amplitude",
    "wavelength": "instrument_1/source_1/wavelength",
    "loss_history": "process_1/loss",
    "det_basis": f"{DETECTOR}/basis_vectors",
    "det_distance": f"{DETECTOR}/distance",
}
# Group of the parameters of `cdtools.models.FancyPtycho`, which opens such a file by `from_results_h5`.
FANCY = "/state_dict"
OF_FANCY = (
    "obj", "probe", "obj_basis", "original_translations", "weights", "wavelength", "det_basis", "det_distance"
)  # fmt: skip
"""Those that are at the root of the file as well."""


def encoded_result(recipe: ScanRecipe) -> bytes:
    """Return the state in the checkpoint as the content of a file."""
    checkpoint = recipe.checkpoints[-1]
    state = ReconstructionState.from_content(state_in(read_content(checkpoint)), "cpu")
    if len(state.losses) != recipe.epochs:
        raise DamagedData(f"{checkpoint} has {len(state.losses)} of {recipe.epochs} epochs. Run again to go on.")
    return encoded_state(recipe, state)


def correlated_halves(recipe: ScanRecipe, state: ReconstructionState) -> RingCorrelation | None:
    """The correlation of the objects of both halves; None where there are none."""
    objects = [half.parameters["object"].cpu().numpy() for half in state.halves]
    return resolution_of(recipe, objects[0], objects[1]) if objects else None


def encoded_state(recipe: ScanRecipe, state: ReconstructionState) -> bytes:
    """Return a state as the content of a file."""
    attributes = {f"image_{n}": {"pixel_size": recipe.optics.pixel} for n in (1, 2)}
    found, links = contents(recipe, state), LINKS
    if f"{FANCY}/near_field" in found:
        links = links | {f"{FANCY}/{name}": LINKS[name] for name in OF_FANCY}
    return encode_cxi(found, attributes, {name: place for name, place in links.items() if place in found})


def contents(recipe: ScanRecipe, state: ReconstructionState) -> dict[str, Any]:
    """Everything that a result has, by its place in the entry; patterns are in the order of the file that the scan came from."""
    order = np.argsort(recipe.scan.numbers)
    if recipe.module:
        return _of_every_model(recipe, state, order) | _of_module(recipe, state, order)
    return _of_every_model(recipe, state, order) | _of_patterns(recipe, state, order)


def _of_every_model(recipe: ScanRecipe, state: ReconstructionState, order: NDArray[np.int64]) -> dict[str, Any]:
    scan = recipe.scan
    return {
        "image_1/data_space": "real",
        "image_2/data_space": "real",
        "sample_1/geometry_1/translation_before": _translations(scan.positions)[order],
        "process_1/loss": np.array(state.losses),
        "process_1/numbers": scan.numbers[order],
        f"{DETECTOR}/distance": scan.distance,
        f"{DETECTOR}/basis_vectors": _basis(scan.pixel),
        "instrument_1/source_1/wavelength": scan.wavelength,
    }


def _of_module(recipe: ScanRecipe, state: ReconstructionState, order: NDArray[np.int64]) -> dict[str, Any]:
    """The images of a user's module, and its parameters."""
    found = module_contents(recipe, state.parameters)
    return {
        "image_1/data": found.pop("object").numpy(),
        "image_2/data": orthogonal(found.pop("probe")).numpy(),
        "sample_1/geometry_1/translation": _translations(recipe.scan.positions)[order],
        "process_1/first_pixel": recipe.places[order],
        **{f"process_1/{name}": value.numpy() for name, value in found.items()},
    }


def _of_patterns(recipe: ScanRecipe, state: ReconstructionState, order: NDArray[np.int64]) -> dict[str, Any]:
    """Everything that the closed model of the patterns has."""
    moved = state.parameters["positions"].numpy()
    rings = correlated_halves(recipe, state)
    correlation = {} if rings is None else rings.values()
    extreme = extreme_patterns(state)
    comparison = compared(recipe, state, extreme)._asdict() if len(extreme) else {}
    return {
        "image_1/data": state.parameters["object"].numpy(),
        "image_2/data": shown_probe(state).numpy(),
        "sample_1/geometry_1/translation": _translations(recipe.scan.positions + moved * recipe.optics.pixel)[order],
        "process_1/first_pixel": (recipe.places + moved)[order],
        "process_1/amplitude": state.parameters["intensities"].numpy()[order],
        "process_1/pattern_loss": state.parameters["pattern_loss"].numpy()[order],
        f"{DETECTOR}/background": on_detector(state.background.square(), recipe).numpy(),
        **{f"process_1/compared/{name}": value for name, value in comparison.items()},
        **{f"process_1/{name}": value for name, value in correlation.items()},
        **_variations(state, order),
        **_for_cdtools(recipe, state, order),
    }


def _for_cdtools(recipe: ScanRecipe, state: ReconstructionState, order: NDArray[np.int64]) -> dict[str, Any]:
    """Everything that CDTools keeps in another way: translations of the beam, roots of the background, and its whole model, unless there are variations."""
    pixel, positions = recipe.optics.pixel, recipe.scan.positions
    moved = state.parameters["positions"].numpy()
    found: dict[str, Any] = {
        "image_1/basis_vectors": _basis(pixel),
        "process_1/probe_translations": -_translations(positions + moved * pixel)[order],
        "process_1/probe_translations_before": -_translations(positions)[order],
        "/oversampling": recipe.oversampling,
        "/loss_function": recipe.loss,
    }
    if recipe.variations:
        return found
    propagator = propagator_of(recipe.optics, recipe.frame, "cpu")
    model: dict[str, Any] = {
        "near_field": recipe.optics.field == "near",
        "oversampling": recipe.oversampling,
        "probe_norm": float(recipe.oversampling),  # it takes the mean of samples, not their sum
        "background": on_detector(state.background, recipe).numpy(),
        "translation_offsets": moved[order],
        "min_translation": positions[0] / pixel - recipe.places_of(slice(1))[0],
        "mask": recipe.scan.mask,
        "angular_spectrum_propagator": getattr(propagator, "transfer", None),
    }
    return found | {f"{FANCY}/{name}": value for name, value in model.items() if value is not None}


def _basis(pixel: tuple[float, float]) -> NDArray[np.float64]:
    """Steps from pixel to pixel along rows and columns, (3, 2)."""
    return np.array([[0.0, -pixel[1]], [-pixel[0], 0.0], [0.0, 0.0]])


def _variations(state: ReconstructionState, order: NDArray[np.int64]) -> dict[str, Any]:
    if "variations" not in state.parameters:
        return {}
    return {
        "process_1/probe_variations": (state.parameters["variations"] * state.norm).numpy(),
        "process_1/probe_shares": state.parameters["shares"].numpy()[order],
    }


def _translations(positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Translations of the sample along x, y and z: rows of the object go along -y, columns along -x, and the sample moves against the beam."""
    rows, columns = positions.T
    return np.stack([columns, rows, np.zeros(len(rows))], 1)


def shown_probe(state: ReconstructionState) -> torch.Tensor:
    """The modes of the probe, orthogonal; with variations as they are, since these belong to the first mode of all."""
    return state.probe if "variations" in state.parameters else orthogonal(state.probe)


def orthogonal(probe: torch.Tensor) -> torch.Tensor:
    """Modes that are orthogonal and give the same intensities, the strongest one first.

    >>> same = torch.ones(2, 1, 2, dtype=torch.complex64)
    >>> [round(float(mode.abs().square().sum()), 4) for mode in orthogonal(same)]
    [4.0, 0.0]
    """
    flat = probe.reshape(len(probe), -1)
    _, values, right = torch.linalg.svd(flat, full_matrices=False)
    modes = values[:, None] * right
    # The phase of a mode is free; that of the first one stays as it was, so that the object keeps its own.
    turn = (modes.conj() * flat).sum(1)
    turn = torch.where(turn.abs() > 0, turn / turn.abs(), torch.ones_like(turn))
    return (turn[:, None] * modes).reshape(probe.shape)
