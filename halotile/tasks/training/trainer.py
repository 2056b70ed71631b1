"""The training of a denoiser on one rank: methods without clean images, its steps, the duration of one, and the weights as a file."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch.nn.functional import pad

from halotile.errors import DamagedData
from halotile.storage.disk.durable import DISK
from halotile.storage.images.png import contrast, encode_png, grey, side_by_side
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.common.photon_denoiser import for_photon_noise
from halotile.tasks.denoisers.common.weights import METADATA
from halotile.tasks.denoisers.nlm import NonLocalMeans
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.devices.device import prepare_program, torch_threads
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import CurveRow, read_curve, write_curve
from halotile.tasks.groups.training.fit import fit, read_content, state_in
from halotile.tasks.networks.base import Network
from halotile.tasks.noise.photon_noise import PhotonNoise
from halotile.tasks.noise.quality import unbiased_risk, without_outliers
from halotile.tasks.noise.quiet_windows import Values
from halotile.tasks.training.patches import Patches, Recipe, Structure

MASKED = 0.03  # share of the pixels of a patch that Noise2Void hides
# Offsets of the neighbours; one of them, or their median, replaces a hidden pixel.
AROUND = torch.tensor([place for place in itertools.product(range(-2, 3), repeat=2) if place != (0, 0)])
REACH = 4  # pixels on each side of a hidden one that are replaced as well, along the axis where neighbours share noise
GRID = 4  # distance of the pixels that Noise2Self hides
# Memory format of weights and activations: a step on CPUs takes a fifth less than with channels first.
LAYOUT = torch.channels_last


class BlindTask(NamedTuple):
    """Input of the network, the wanted result, and the pixels that count."""

    given: torch.Tensor
    wanted: torch.Tensor
    counted: torch.Tensor


# Of pixels, rows and columns of places in them, and offsets of their neighbours: the values that stand there instead.
Replacement = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PatchBatch(NamedTuple):
    """Patches as tensors, (patches, channels, rows, columns); ``valid`` is 0 or 1."""

    pixels: torch.Tensor
    valid: torch.Tensor
    second: torch.Tensor
    structure: Structure = "none"


def noise2void(batch: PatchBatch) -> BlindTask:
    """Predict hidden pixels from their neighbours, which tell nothing of noise that differs from pixel to pixel.

    References
    ----------
    A. Krull, T.-O. Buchholz, F. Jug, Noise2Void: learning denoising from single noisy images, CVPR (2019).
    """
    return _hidden(batch, *_random_places(batch), _random_neighbour)


def noise2void2(batch: PatchBatch) -> BlindTask:
    """Predict hidden pixels as :func:`noise2void` does; the median of their neighbours stands for them.

    References
    ----------
    E. Höck, T.-O. Buchholz, A. Brachmann, F. Jug, A. Freytag, N2V2: fixing Noise2Void checkerboard artifacts with modified sampling strategies and a tweaked network
    architecture, ECCV workshops (2022).
    """
    return _hidden(batch, *_random_places(batch), _median_neighbour)


def noise2self(batch: PatchBatch) -> BlindTask:
    """Predict the pixels of a grid from all others.

    References
    ----------
    J. Batson, L. Royer, Noise2Self: blind denoising by self-supervision, ICML (2019).
    """
    count, _, rows, columns = batch.pixels.shape
    first_row, first_column = (int(n) for n in torch.randint(GRID, (2,)))
    grid = torch.meshgrid(torch.arange(first_row, rows, GRID), torch.arange(first_column, columns, GRID), indexing="ij")
    row, column = (places.reshape(1, -1).expand(count, -1) for places in grid)
    return _hidden(batch, row, column, _random_neighbour)


def _random_places(batch: PatchBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the pixels to hide, (patches, pixels) each."""
    count, _, rows, columns = batch.pixels.shape
    number = max(1, round(MASKED * rows * columns))
    places = torch.stack([torch.randperm(rows * columns)[:number] for _ in range(count)])
    return places // columns, places % columns


def _hidden(batch: PatchBatch, row: torch.Tensor, column: torch.Tensor, replacement: Replacement) -> BlindTask:
    """The prediction of some pixels of each patch, which have other values in what the network is given.

    Where neighbours share noise along an axis, the line of pixels through each has other values as well, of other lines.

    References
    ----------
    C. Broaddus, A. Krull, M. Weigert, U. Schmidt, G. Myers, Removing structured noise with self-supervised blind-spot networks, ISBI (2020).
    """
    sample = torch.arange(len(row))[:, None].expand_as(row)
    given, counted = batch.pixels.clone(), torch.zeros_like(batch.valid)
    counted[sample, :, row, column] = batch.valid[sample, :, row, column]
    rows, columns = batch.pixels.shape[-2:]
    line, around = [(0, 0)], AROUND
    if batch.structure == "x":
        line, around = [(0, n) for n in range(-REACH, REACH + 1)], AROUND[AROUND[:, 0] != 0]
    elif batch.structure == "y":
        line, around = [(n, 0) for n in range(-REACH, REACH + 1)], AROUND[AROUND[:, 1] != 0]
    for down, right in line:
        at = _inside(row, torch.tensor(down), rows), _inside(column, torch.tensor(right), columns)
        given[sample, :, at[0], at[1]] = replacement(batch.pixels, *at, around)
    return BlindTask(given, batch.pixels, counted)


def _random_neighbour(
    pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor, around: torch.Tensor
) -> torch.Tensor:
    """Return the value of one neighbour of each place, (patches, places, channels)."""
    return _neighbours(pixels, row, column, around[torch.randint(len(around), row.shape)])


def _median_neighbour(
    pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor, around: torch.Tensor
) -> torch.Tensor:
    """Return the median of the neighbours of each place, of the two in the middle the lower one."""
    around = torch.stack([_neighbours(pixels, row, column, offset) for offset in around])
    return around.median(dim=0).values


def _neighbours(pixels: torch.Tensor, row: torch.Tensor, column: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the values at offsets from places."""
    sample = torch.arange(len(row))[:, None].expand_as(row)
    rows, columns = pixels.shape[-2:]
    return pixels[sample, :, _inside(row, offset[..., 0], rows), _inside(column, offset[..., 1], columns)]


def _inside(place: torch.Tensor, offset: torch.Tensor, edge: int) -> torch.Tensor:
    """Places so far away, on the other side where they would be outside."""
    moved = place + offset
    return torch.where((moved < 0) | (moved >= edge), place - offset, moved)


def noise2noise(batch: PatchBatch) -> BlindTask:
    """Predict a second image of the same from the first, or the other way round.

    References
    ----------
    J. Lehtinen et al., Noise2Noise: learning image restoration without clean data, ICML (2018).
    """
    return BlindTask(batch.pixels, batch.second, batch.valid)


METHODS: Mapping[str, Callable[[PatchBatch], BlindTask]] = {
    "noise2void": noise2void,
    "noise2void2": noise2void2,
    "noise2self": noise2self,
    "noise2noise": noise2noise,
}


def mean_loss(
    module: Callable[[torch.Tensor], torch.Tensor], trial: BlindTask, deviation: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of the pixels that count, in units of the deviation of each channel."""
    wrong = (module(trial.given) - trial.wanted) / deviation.view(-1, 1, 1)
    return (wrong.square() * trial.counted).sum() / trial.counted.sum().clamp(min=1)


DECAYS = 0.9, 0.999  # of the means of gradients, and of their squares
EPSILON = 1e-8


class AdamOptimizer:
    """Steps by the mean of past gradients over the root of the mean of their squares.

    ``parameters``: numbers to train; ``rate``: returns the learning rate from the number of steps that are done.

    References
    ----------
    D. P. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR (2015).

    Examples
    --------
    >>> x = torch.nn.Parameter(torch.tensor([3.0]))
    >>> adam = AdamOptimizer([x], lambda step: 0.1)
    >>> x.square().sum().backward()
    >>> adam.step()
    >>> x.tolist()
    [2.9000000953674316]
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: Callable[[int], float]) -> None:
        self.parameters = list(parameters)
        self.rate = rate
        self.steps = 0
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Change the parameters by their gradients; one that has none counts as zero."""
        rate = self.rate(self.steps)
        self.steps += 1
        of_means, of_squares = (1 - decay**self.steps for decay in DECAYS)
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean.lerp_(gradient, 1 - DECAYS[0])
            square.lerp_(gradient.square(), 1 - DECAYS[1])
            spread = square.sqrt().div_(math.sqrt(of_squares)).add_(EPSILON)
            parameter.addcdiv_(mean, spread, value=-rate / of_means)

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint."""
        return {"steps": self.steps, "means": self.means, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name in ("means", "squares"):
            for tensor, stored in zip(getattr(self, name), state[name], strict=True):
                tensor.copy_(stored)
        self.steps = state["steps"]


# Patches that are drawn, at most, and the pixels of their edges: the page of a run is sent them every second.
EXAMPLES, EDGE = 4, 64
GAP_PIXELS = 2


def draw_examples(noisy: NDArray[Any], denoised: NDArray[Any]) -> list[bytes]:
    """Draw patches in a row above the same ones denoised, as a PNG; in each channel both have the contrast of the noisy one.

    ``noisy, denoised``: shape (patches, channels, rows, columns): the first of one or two channels is drawn in grey, the first three of more in
    colours.

    >>> import numpy as np
    >>> b"".join(draw_examples(np.zeros((4, 1, 64, 64)), np.zeros((4, 1, 64, 64))))[1:4]
    b'PNG'
    """
    colours = 3 if noisy.shape[1] >= 3 else 1
    above, below = (patches[:EXAMPLES, :colours, :EDGE, :EDGE] for patches in (noisy, denoised))
    levels = [[contrast([channel]) for channel in patch] for patch in above]
    rows = [
        side_by_side([_drawn(patch, ends) for patch, ends in zip(patches, levels, strict=True)], GAP_PIXELS)
        for patches in (above, below)
    ]
    return encode_png(side_by_side([row.swapaxes(0, 1) for row in rows], GAP_PIXELS).swapaxes(0, 1))


def _drawn(patch: NDArray[Any], levels: list[tuple[float, float]]) -> NDArray[np.uint8]:
    """Draw each channel from black to white between its own levels: channels may be of very unlike brightness."""
    scaled = [(channel - low) / ((high - low) or 1.0) for channel, (low, high) in zip(patch, levels, strict=True)]
    return grey(np.stack(scaled), 0, 1)


VALIDATED = 16  # patches that validate, at most
CHECKPOINT_SECONDS = 10.0
WRITE_SECONDS, DRAW_SECONDS = 0.5, 10.0  # least time between two records of the curve, and of the example images
FIRST = 2**31  # number in place of a step of the patches whose mean and deviation are taken for those of the images


@dataclass(frozen=True)
class Trainer:
    """A training on a device."""

    recipe: Recipe
    device: Any

    def train(self, group: TorchGroup) -> None:
        """Train on this rank of a group, from the checkpoint on."""
        recipe = self.recipe
        prepare_program(self.device)
        module = self.module().to(self.device, memory_format=LAYOUT)
        optimizer = AdamOptimizer(module.parameters(), self.rate)
        recorder = _Recorder(self, module) if group.rank == 0 else None
        fit(
            group,
            module,
            self.draw,
            self.loss,
            optimizer,
            steps=recipe.steps,
            slots=recipe.slots,
            seed=recipe.patches.seed,
            mode=recipe.mode,
            checkpoint=recipe.checkpoint,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            report=recorder or (lambda step, loss: None),
        )
        if recorder:
            recorder.write(recipe.steps)
            recorder.draw()

    def draw(self, step: int, slot: int) -> PatchBatch:
        """The patches of a slot."""
        return self.tensors(self.recipe.patches.draw(step, slot, self.recipe.batch // self.recipe.slots))

    def loss(self, module: Callable[[torch.Tensor], torch.Tensor], batch: PatchBatch) -> torch.Tensor:
        """The loss of a slot, by the method."""
        return mean_loss(module, METHODS[self.recipe.method](batch), self.deviation)

    def module(self) -> torch.nn.Module:
        """The network with its first weights, which follow from the seed and the images."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.patches.seed)
            deviation = self.deviation.cpu()
            return self.recipe.network.build(self.recipe.channels, self.first.mean((0, 2, 3)), deviation)

    @cached_property
    def first(self) -> torch.Tensor:
        """The patches whose mean and deviation are taken for those of the images."""
        return torch.cat([self.draw(FIRST, slot).pixels.cpu() for slot in range(self.recipe.slots)])

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Standard deviation of the pixels of each channel; 1 where they are all the same."""
        deviation = self.first.std((0, 2, 3))
        return torch.where(deviation > 0, deviation, 1.0).to(self.device)

    def rate(self, step: int) -> float:
        """The learning rate after a number of steps."""
        return self.recipe.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.recipe.steps)))

    def tensors(self, patches: Patches) -> PatchBatch:
        """Patches on the device."""
        arrays = (np.ascontiguousarray(part, np.float32) for part in patches)
        pixels, valid, second = (torch.from_numpy(array).to(self.device) for array in arrays)
        return PatchBatch(pixels, valid, second, self.recipe.patches.structure)

    def trained(self) -> dict[str, Any]:
        """The weights in the checkpoint, as the denoiser reads them."""
        recipe, channels = self.recipe, self.recipe.channels
        state = state_in(read_content(recipe.checkpoint))
        if len(state["losses"]) != recipe.steps:
            raise DamagedData(
                f"{recipe.checkpoint} has {len(state['losses'])} of {recipe.steps} steps. Run again to go on."
            )
        module = recipe.network.build(channels, torch.zeros(channels), torch.ones(channels))
        module.load_state_dict(state["module"])
        return dict(self.recipe.network.weights(module))


class _Recorder:
    """Records the curve of a training; called after each step on one rank."""

    def __init__(self, trainer: Trainer, module: torch.nn.Module) -> None:
        self.trainer, self.recipe, self.module = trainer, trainer.recipe, module
        content = read_content(self.recipe.checkpoint)
        self.losses: list[float] = state_in(content)["losses"] if content else []
        """Losses of all steps."""
        self.rows = self._rows_so_far()
        self.began = time.monotonic()
        """Time of the last row."""
        self.written = 0.0
        held_out = self.recipe.patches.held_out(VALIDATED)
        self.held_out = None if held_out is None else trainer.tensors(held_out)
        patches = trainer.first if self.held_out is None else self.held_out.pixels
        self.shown = patches[:: -(-len(patches) // EXAMPLES)].to(trainer.device)
        """Patches that are drawn."""
        self.drawn = -math.inf
        self.compared = self._held_out_errors()
        """Errors of the network and of filters, and the number of rows from one estimate to the next."""

    def _held_out_errors(self) -> tuple[HeldOutErrors, int] | None:
        """Errors on a crop; None where the noise is not known, or the training is too short for them."""
        recipe, noise, alignment = self.recipe, self.recipe.noise, self.recipe.network.alignment
        if noise is None or not (noise.gain + noise.read_sigma > 0).all():  # False for NaN
            return None
        crop = recipe.patches.crop(CROP, CROPS)
        if crop is None or min(crop.shape[1:]) < CONTEXT + alignment:
            return None
        found = HeldOutErrors(crop, noise, self.trainer.device, alignment)
        work = SHARE * WORK * recipe.steps * recipe.batch / 2 * recipe.patches.patch**2
        estimates = int(work / found.work) - len(FILTERS) * len(STRENGTHS)
        if estimates <= 0 or not math.isfinite(found.unchanged):
            return None
        return found, math.ceil(recipe.steps / recipe.every / estimates)

    def __call__(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        if has_row := self._has_row(step):
            self.rows.append(self._row(step))
        # The checkpoint, which is written afterwards, is never ahead of the curve.
        if has_row or time.monotonic() - self.written >= WRITE_SECONDS:
            self.write(step)

    def _has_row(self, step: int) -> bool:
        return step % self.recipe.every == 0 or step == self.recipe.steps

    def _rows_so_far(self) -> list[CurveRow]:
        """The rows up to the checkpoint; those that the curve has lost come from the losses, without the loss on held-out patches."""
        recorded = {row["iteration"]: row for row in read_curve(self.recipe.curve)[1]}
        steps = [step for step in range(1, len(self.losses) + 1) if self._has_row(step)]
        return [recorded.get(step) or self._trained(step) for step in steps]

    def _row(self, step: int) -> CurveRow:
        seconds = time.monotonic() - self.began
        row = self._trained(step)
        if self.held_out is not None:
            row["validation"] = self._validate(self.held_out)
        if self.compared is not None:
            errors, rows = self.compared
            if step == self.recipe.steps or step // self.recipe.every % rows == 0:
                with self._apart():
                    row |= {"error": errors.error(self.module)} | errors.filters
        self.began = time.monotonic()
        return row | {"seconds": seconds}

    def _trained(self, step: int) -> CurveRow:
        """Mean loss of the steps of a row, and the learning rate after them."""
        losses = self.losses[(step - 1) // self.recipe.every * self.recipe.every : step]
        return {"iteration": step, "loss": math.fsum(losses) / len(losses), "rate": self.trainer.rate(step)}

    def write(self, step: int) -> None:
        """Write the curve, for the driver to show."""
        write_curve(self.recipe.curve, step, self.rows)
        self.written = time.monotonic()
        if self.written - self.drawn >= DRAW_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draw some patches as they are, and denoised."""
        began = time.monotonic()
        with self._apart():
            denoised = self.module(self.shown)
        drawn = draw_examples(self.shown.cpu().numpy(), denoised.cpu().numpy())
        with suppress(OSError):
            DISK.write_file(self.recipe.examples, drawn, sync=False)
        self.drawn = time.monotonic()
        self.began += self.drawn - began  # it is no time of a step

    def _validate(self, held_out: PatchBatch) -> float:
        """The loss on patches that are held out, always with the same masks."""
        part = self.recipe.batch // self.recipe.slots

        # All at once would take several times the memory of a step.
        def in_parts(pixels: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.module(patches) for patches in pixels.split(part)])

        with self._apart():
            return float(self.trainer.loss(in_parts, held_out))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Compute with the network as it is in use, without a trace in its training."""
        training = [part for part in self.module.modules() if part.training]
        cuda = [self.trainer.device] if torch.device(self.trainer.device).type == "cuda" else []
        self.module.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(cuda):
                torch.manual_seed(self.recipe.patches.seed)
                yield
        finally:
            for part in training:
                part.training = True


# Edge of the crop on which the network is compared with filters; most held-out cells, among which the one with most
# structure is taken; and pixels that are mirrored around it, as at the rim of an image.
CROP, CROPS, CONTEXT = 128, 16, 16
# Share of the work of one of two ranks for the comparison, at most, and work of a step relative to that of the network
# in use.
SHARE, WORK = 0.05, 3
FILTERS = {"tv": TotalVariation, "nlm": NonLocalMeans}
STRENGTHS = 0.5, 1.0, 2.0


class HeldOutErrors:
    """Estimated errors on a crop, relative to that of the noisy one, as :func:`~halotile.tasks.noise.quality.unbiased_risk` has them."""

    def __init__(self, crop: Values, noise: PhotonNoise, device: Any, alignment: int = 1) -> None:
        self.of_channels, self.device, self.alignment = noise, device, alignment
        self.noisy, outliers = without_outliers(crop, noise)
        self.noise = noise._replace(read_sigma=np.where(outliers, np.nan, noise.read_sigma))
        self.used = 0
        """Number of times that a model was used."""
        self.unchanged = self.error(lambda pixels: pixels)
        rows, columns = self.noisy.shape[1:]
        self.work = self.used * (rows + 2 * CONTEXT) * (columns + 2 * CONTEXT)
        """Pixels that an estimate computes."""

    def error(self, model: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """The estimated error of a model."""
        usual = float(np.nanmedian(self.noisy))

        def denoise(image: Values) -> Values:
            self.used += 1
            pixels = torch.from_numpy(np.nan_to_num(image, nan=usual)[None].astype(np.float32)).to(self.device)
            rows, columns = image.shape[1:]
            down, right = (CONTEXT + -(n + 2 * CONTEXT) % self.alignment for n in (rows, columns))
            around = pad(pixels, (CONTEXT, right, CONTEXT, down), mode="reflect")
            found: Values = (
                model(around)[0, :, CONTEXT : CONTEXT + rows, CONTEXT : CONTEXT + columns].cpu().double().numpy()
            )
            return found

        return unbiased_risk(self.noisy, self.noise, denoise).error

    @cached_property
    def filters(self) -> CurveRow:
        """The errors of filters, each at its best strength."""
        return {
            name: min(self.error(self._filter(kind(strength=strength, sigma="auto"))) for strength in STRENGTHS)
            for name, kind in FILTERS.items()
        }

    def _filter(self, denoiser: Denoiser) -> Callable[[torch.Tensor], torch.Tensor]:
        noise = self.of_channels
        models = [for_photon_noise(denoiser, PhotonNoise(*part), 1.0).build() for part in zip(*noise, strict=True)]
        return lambda pixels: torch.cat([model(pixels[:, [n]]) for n, model in enumerate(models)], 1)


TIMES = 3


def seconds_of_slot(network: Network, method: str, shape: tuple[int, int, int]) -> float:
    """Return the time that a rank on a CPU takes for its part of a batch: so many patches of that edge.

    ``shape``: channels, patches, and their edge in pixels.
    """
    channels, count, edge = shape
    with torch_threads():
        module = network.build(channels, torch.zeros(channels), torch.ones(channels))
        module = module.to(memory_format=LAYOUT)
        pixels = torch.rand(count, channels, edge, edge)
        batch = PatchBatch(pixels, torch.ones_like(pixels), pixels)
        seconds = []
        for _ in range(TIMES + 1):
            began = time.perf_counter()
            mean_loss(module, METHODS[method](batch), torch.ones(channels)).backward()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def encoded_weights(recipe: Recipe) -> bytes:
    """Return the weights in the checkpoint as the content of a .safetensors file."""
    content = {
        "denoiser": recipe.network.denoiser(recipe.channels),
        "method": recipe.method,
        "values": list(recipe.patches.values),
    }
    metadata = {METADATA: json.dumps(content)}  # the library writes several in no fixed order
    weights = {name: tensor.contiguous() for name, tensor in Trainer(recipe, "cpu").trained().items()}
    encoded: bytes = save(weights, metadata)
    return encoded
