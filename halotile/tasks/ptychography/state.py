"""What a reconstruction refines: object, probe and the rest, with the moments of the solver, from the first guess on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from halotile.errors import Diverged, InputError
from halotile.storage.scans.scan import StartValues
from halotile.tasks.groups.cut_tensors.transfers import as_real
from halotile.tasks.ptychography.model import PatternGradients, Positions
from halotile.tasks.ptychography.patterns import Patterns, turned
from halotile.tasks.ptychography.propagators import NearField, propagator_of
from halotile.tasks.ptychography.recipe import Optics, ScanRecipe

FAINT = 0.1  # amplitude of the further modes of the first guess, relative to the first one
FURTHER = 0.3  # share of the light of the further modes while they follow the first one
# Light of a derivative, by pixels of the detector and relative to the beam, of a plane wave: the mode stays as it is.
EVEN = 1e-6
FOLLOWED = 20  # epochs in which the further modes of the first guess follow the first one
# Counts of a pixel, on average, from which they do: below, a mode cannot be distinguished from none, and would keep its light.
TELLING = 1.0
LEAST_MEAN = 1e-9  # mean of a pixel from which all losses are as if it were 1: their floor is at 1e-12
DIM = 1e-3  # root of the first guess of the background, relative to that of the mean count
# Most of the loss relative to that before the first step, or to that without light: with more, a reconstruction has
# diverged.
MOST_RISE = 1e3
# Largest increase of the loss of its own patterns by the last step, relative to that loss and to the loss without light.
STEP_RISE, STEP_SHARE = 9, 0.01

PartTensors = dict[str, torch.Tensor]
# The loss of the patterns of a slot, and its gradients by part in real numbers, in the order of PARTS.
SlotGradients = dict[str, torch.Tensor]
LOSS_NUMBERS = 2  # numbers of single precision as which a loss is sent, so that no digit of it is lost


@dataclass
class ReconstructionState:
    """The state of a reconstruction between two steps."""

    # by part: the probe relative to `norm`, the root of the background to `root`; positions are the pixels by which
    # they were moved. `pattern_loss` is not refined: the mean `amplitude_mse` of a pixel of each pattern before the
    # last step with it, or 0
    parameters: PartTensors
    norm: float  # greatest modulus of the first guess of the probe, in roots of counts
    root: float = 1.0  # root of the mean count, at most 1: patterns may be relative to their sum
    scale: float = 1.0  # about the loss of a model without light: the mean count, of intensities its square
    # what the solver keeps, by its names and by part
    moments: dict[str, PartTensors] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of each epoch
    # those of the pixels that no gradient has, where there are any
    held_out: list[float] = field(default_factory=list)
    begun: float = 0.0  # loss of a pixel before the first step, once that was done
    # those of each half of the positions by itself, or none
    halves: list[ReconstructionState] = field(default_factory=list)
    stage_begun: float = 0.0  # loss of a pixel before the first step of the stage at hand, once that was done

    def content(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return self.__dict__ | {"halves": [half.content() for half in self.halves]}

    @classmethod
    def from_content(cls, content: Mapping[str, Any], device: Any) -> ReconstructionState:
        """The state in a checkpoint, on a device."""
        moments = {name: _moved(tensors, device) for name, tensors in content["moments"].items()}
        names = ("norm", "root", "scale", "losses", "held_out", "begun", "stage_begun")
        values = {key: content[key] for key in names}
        halves = [cls.from_content(half, device) for half in content["halves"]]
        return cls(_moved(content["parameters"], device), moments=moments, halves=halves, **values)

    def begin_with(self, name: str, value: torch.Tensor) -> None:
        """Set a part; what the solver keeps of what it was is forgotten."""
        self.parameters[name] = value
        for kept in self.moments.values():
            kept.pop(name, None)

    def keep_best(self, first: int, held_out: float) -> None:
        """Note the loss of held-out pixels; keep a copy of the state if it is the least of the stage that began at epoch ``first``."""
        self.held_out.append(held_out)
        if self.held_out[-1] < min(self.held_out[first:-1], default=math.inf):
            self.moments["best"] = {name: value.clone() for name, value in self.parameters.items()}

    def return_to_best(self) -> None:
        """Go back to the copy, and forget what the solver kept of later epochs; further modes of the probe still follow the first one."""
        best = self.moments.pop("best")
        if any(not torch.equal(self.parameters[name], best[name]) for name in best.keys() - {"pattern_loss"}):
            self.parameters.update(best)
            self.moments = {name: kept for name, kept in self.moments.items() if name == "following"}

    @property
    def has_diverged(self) -> bool:
        """True where the last loss is one of a reconstruction that has diverged."""
        return self.is_diverged(self.losses[-1])

    def is_diverged(self, loss: float) -> bool:
        """True for a loss that is not finite, or beyond all that further steps can make good."""
        usual = max(abs(self.begun), self.scale)  # a start that is nearly right has next to no loss
        return not math.isfinite(loss) or abs(loss) > MOST_RISE * usual

    def is_spoilt(self, before: float, after: float, kind: str) -> bool:
        """True where a step, or a stage, made a loss of a kind far worse, or a value is not finite any more."""
        finite = all(bool(part.isfinite().all()) for part in self.parameters.values())
        # A likelihood has no zero to be relative to.
        tolerated = self.scale if kind == "poisson_nll" else max(STEP_RISE * before, STEP_SHARE * self.scale)
        return not (finite and after - before <= tolerated)

    def follow_first(self) -> None:
        """Replace further modes of the probe by derivatives of the first one, as of a partly coherent beam, in the epochs in which they follow it.

        A blurred weak object explains nearly all of what such a mode does. The loss is nearly flat from a faint mode on, which fades
        before the object has contrast; it is steeper from the side of too much light.
        """
        if not (self.moments.get("following") and self.parameters["probe"][0].any()):
            return
        first, *others = self.parameters["probe"]
        row, column = (torch.fft.fftfreq(n, 1 / n, device=first.device) for n in first.shape)
        turn, light = row[:, None] + 1j * column, _power(self.parameters["probe"])
        for number, mode in enumerate(others):
            order = (turn.conj() if number % 2 else turn) ** (1 + number // 2)
            derived = torch.fft.ifft2(order * torch.fft.fft2(first)) * (mode != 0)  # 0 outside of a support
            derived -= first * ((first.conj() * derived).sum() / _power(first))
            if (power := _power(derived)) > EVEN * light:
                mode.copy_(derived * math.sqrt(FURTHER / len(others) * light / power))
        first.mul_(math.sqrt((light - _power(self.parameters["probe"][1:])) / _power(first)))

    @property
    def probe(self) -> torch.Tensor:
        """The modes of the probe in roots of counts."""
        return self.parameters["probe"] * self.norm

    @property
    def background(self) -> torch.Tensor:
        """Root of the counts without a beam, in the order in which patterns are compared."""
        return self.parameters["background"] * self.root

    def at_random(self, refined: Sequence[str], seed: int) -> ReconstructionState:
        """A state as it may be later on: what is refined, but the positions, has other values near these, none of them 0 or like another."""
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for name in (part for part in refined if part != "positions"):
            value = self.parameters[name]
            noise = torch.randn(value.shape, dtype=value.dtype, generator=generator)
            drawn[name] = value + 0.1 * noise.to(value.device)
        return ReconstructionState({**self.parameters, **drawn}, self.norm, self.root)

    def positions(self, recipe: ScanRecipe, numbers: np.ndarray[Any, Any]) -> Positions:
        """Some positions as they are now."""
        place = torch.from_numpy(recipe.places_of(numbers)) + self.parameters["positions"][numbers].cpu().double()
        shares = self.parameters["shares"][numbers] if recipe.variations else None
        return Positions.at(place, self.parameters["intensities"][numbers], shares)


def _power(wave: torch.Tensor) -> float:
    """The light of a wave."""
    return float(wave.abs().square().sum())


def _moved(tensors: Mapping[str, torch.Tensor], device: Any) -> PartTensors:
    """The tensors on a device, all in one layout: the kernel of Adam takes them in their order in memory."""
    return {name: tensor.to(device).contiguous() for name, tensor in tensors.items()}


def first_state(recipe: ScanRecipe, patterns: Patterns, device: Any) -> ReconstructionState:
    """The first guess: an object that is not there, and the probe of the scan or else that of the mean pattern."""
    scan, propagator = recipe.scan, propagator_of(recipe.optics, recipe.pattern, "cpu")
    mean = patterns.mean()
    if not mean.any():
        raise InputError(f"{recipe.patterns.path}: no pattern has a count. Look at the file that it is of.")
    if float(mean.mean()) < LEAST_MEAN:
        raise InputError(
            f"{recipe.patterns.path}: a pixel has {float(mean.mean()):.2g} on average, too little for the losses to distinguish from 0. Multiply the patterns so that it is 1e-6 or more."
        )
    background = torch.zeros(recipe.pattern) if scan.background is None else torch.from_numpy(scan.background)
    background = turned(background, recipe)
    light = (mean - background).clamp(min=0)
    guess = recipe.first_probe
    if guess is None:
        first, _ = propagator.adjoint(light.sqrt().to(torch.complex64), propagator.factor(torch.ones(1, 1)))
        first = first.conj().resolve_conj()
        if recipe.optics.field == "far":
            first = torch.fft.fftshift(first)
        known = _defocused(_padded(first[None], recipe.frame), recipe.optics)
    else:
        known = _strongest(torch.from_numpy(guess).flatten(0, -3).to(torch.complex64), recipe.modes)
        # Beside an object the probe has a scale; alone it is of a file whose units nobody knows.
        start = recipe.start
        if start is None or start.probe is None or (start.object is None and start.obj is None):
            known = known * (light.sum() / known.abs().square().sum()).sqrt()
    if known.shape[-2:] != recipe.frame:
        known = _padded(known, recipe.frame)
    probe = _with_modes(known, recipe.modes, recipe.seed)
    if (support := support_of(recipe)) is not None:
        probe = probe * support
    norm = float(probe.abs().max())
    if not norm:
        raise InputError(
            f"{recipe.patterns.path}: the first guess of the probe is 0 everywhere within its support. Write a larger model.support, or another probe."
        )
    root = math.sqrt(float(mean.mean()))
    scale = dark_loss(recipe, mean)
    dim, root = DIM * root, min(1.0, root)
    intensities = torch.ones(len(scan.positions))
    if scan.intensities is not None:
        intensities = torch.from_numpy(np.sqrt(scan.intensities / scan.intensities.mean())).float()
    parameters = {
        "object": torch.ones(recipe.shape, dtype=torch.complex64),
        "probe": probe / norm,
        "background": background.clamp(min=dim**2).sqrt() / root,
        "positions": torch.zeros(len(scan.positions), 2),
        "intensities": intensities,
        "pattern_loss": torch.zeros(len(scan.positions)),
    }
    if recipe.variations:
        more = _with_modes(probe[:1], 1 + recipe.variations, recipe.seed + 1)[1:]
        parameters["variations"] = (more if support is None else more * support) / norm
        parameters["shares"] = torch.zeros(len(scan.positions), recipe.variations)
    if recipe.start is not None:
        parameters |= _started(recipe, recipe.start, norm, root)
    state = ReconstructionState(_moved(parameters, device), norm, root, scale)
    if len(known) == 1 < recipe.modes and "probe" in recipe.refined and float(mean.mean()) >= TELLING:
        state.moments["following"] = {"probe": torch.tensor(FOLLOWED)}
    state.halves = [deepcopy(state) for _ in recipe.halves[1:]]
    return state


def dark_loss(recipe: ScanRecipe, mean: torch.Tensor) -> float:
    """About the loss of a model without light, by the mean pattern."""
    count = float(mean.mean()) or 1.0
    return count**2 if recipe.loss == "intensity_mse" else count


def _defocused(probe: torch.Tensor, optics: Optics) -> torch.Tensor:
    """A probe in focus, as it is at the distance of the sample from there."""
    if optics.focus is None:
        return probe
    way = NearField.from_frame((probe.shape[-2], probe.shape[-1]), optics.pixel, optics.wavelength, optics.focus)
    return way.forward(probe, way.transfer)[0]


def _started(recipe: ScanRecipe, start: StartValues, norm: float, root: float) -> PartTensors:
    """The parameters that an earlier reconstruction gives; its probe is the first guess of this one."""
    found = {}

    def in_order(values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Values of patterns in the order of the Zarr."""
        sorted_places = np.argsort(np.argsort(recipe.scan.numbers))
        return torch.from_numpy(values[sorted_places])

    if start.object is not None:
        found["object"] = torch.from_numpy(start.object).to(torch.complex64)
    if start.obj is not None:
        found["object"] = _in_middle(torch.from_numpy(start.obj).to(torch.complex64), recipe.shape)
    if start.background is not None:
        found["background"] = turned(torch.from_numpy(start.background).float().sqrt(), recipe) / root
    if start.first_pixel is not None:
        found["positions"] = (in_order(start.first_pixel) - torch.from_numpy(recipe.places)).float()
    if start.amplitude is not None:
        found["intensities"] = in_order(start.amplitude).float()
    if recipe.variations and start.variations is not None and start.shares is not None:
        found["variations"] = torch.from_numpy(start.variations / norm).to(torch.complex64)
        found["shares"] = in_order(start.shares).float()
    return found


def _with_modes(known: torch.Tensor, modes: int, seed: int) -> torch.Tensor:
    """As many modes: those that are known, and faint ones that are the first with random phases."""
    generator = torch.Generator().manual_seed(seed)
    missing = modes - len(known)
    phases = 2 * math.pi * torch.rand(max(0, missing), *known.shape[1:], generator=generator)
    return torch.cat([known[:modes], FAINT * known[:1] * torch.polar(torch.ones(()), phases)])


def _strongest(modes: torch.Tensor, count: int) -> torch.Tensor:
    """As many modes at most; where there are more, those with the most light."""
    order = modes.abs().square().sum((1, 2)).argsort(descending=True, stable=True)
    return modes if len(modes) <= count else modes[order[:count]]


def _padded(modes: torch.Tensor, frame: tuple[int, int]) -> torch.Tensor:
    """Modes in the middle of a frame that is dark around them; what was the middle stays it."""
    padded = modes.new_zeros(len(modes), *frame)
    first = [whole // 2 - n // 2 for whole, n in zip(frame, modes.shape[1:], strict=True)]
    padded[:, first[0] : first[0] + modes.shape[1], first[1] : first[1] + modes.shape[2]] = modes
    return padded


def _in_middle(image: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The middle of an image in a shape, 1 where it has nothing."""
    placed, (own, whole) = torch.ones(shape, dtype=image.dtype), ([], [])
    for n, wanted in zip(image.shape, shape, strict=True):
        first, edge = max(0, (n - wanted) // 2), min(n, wanted)
        own.append(slice(first, first + edge))
        whole.append(slice((wanted - edge) // 2, (wanted - edge) // 2 + edge))
    placed[tuple(whole)] = image[tuple(own)]
    return placed


def support_of(recipe: ScanRecipe) -> torch.Tensor | None:
    """1 where the probe may be, (rows, columns), else 0; None where it may be anywhere."""
    if recipe.support is None:
        return None
    row, column = (torch.arange(n) - n // 2 for n in recipe.frame)
    return ((row[:, None] ** 2 + column**2) <= recipe.support**2).float()


def by_name(found: PatternGradients) -> SlotGradients:
    """The loss and the gradients of a slot, as they are sent."""
    return {"loss": found.loss.reshape(1)} | {name: as_real(part) for name, part in found.parts.items()}


def unpacked(vector: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> SlotGradients:
    """Gradients of a slot that another rank sent."""
    loss, *pieces = vector.split([LOSS_NUMBERS, *map(math.prod, shapes.values())])
    found = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    return {"loss": loss.clone().view(torch.float64)} | found


def same_bits(a: SlotGradients, b: SlotGradients) -> bool:
    """True where two are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def shift_limits(recipe: ScanRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest shift of each position, in pixels: as far as the object reaches."""
    places = torch.from_numpy(recipe.places).float()
    last = torch.tensor([n - edge for n, edge in zip(recipe.shape, recipe.frame, strict=True)])
    room = torch.finfo(torch.float32).eps * last  # what rounding may add
    return room - places, last - room - places


def keep_between(values: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> None:
    """Limit values in place."""
    if not bool(values.clamp_(least, most).isfinite().all()):
        raise Diverged("positions are no longer finite. Write a smaller lr, or refine them in a later run.")
