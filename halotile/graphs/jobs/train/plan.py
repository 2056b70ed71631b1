"""The plan of a training: images opened, the network sized, the length decided, then identified."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.clusters.workers.fork_server import NoAnswer, call_bounded
from halotile.graphs.iterations.rank_programs import ProgramFiles, ProgramWork
from halotile.graphs.jobs.train.images import (
    epochs_of,
    hidden_with,
    notes_of_images,
    notes_of_pairs,
    open_images,
    patch_source,
    samples_of,
    smallest_edge,
    steps_of_epochs,
)
from halotile.graphs.jobs.train.job import HUB, LEAST_PATCH, Training, describe_weights, result_rows
from halotile.graphs.kinds import base
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.choices import check_decoding, check_paths, describe_options, kept_bytes, make_part
from halotile.graphs.plans.identity import code_versions
from halotile.graphs.plans.needs import IMPORTS_BYTES, PROCESS
from halotile.graphs.plans.plan import place_ranks
from halotile.graphs.waiting import report_if_slow
from halotile.storage.arrays import Source
from halotile.storage.disk.durable import DISK, GONE
from halotile.storage.sharded.output import FileLayout
from halotile.storage.stored_array import MOST_SHARED
from halotile.tasks.block import ONE_BLOCK
from halotile.tasks.networks.base import Network
from halotile.tasks.noise.estimate import plane_level
from halotile.tasks.noise.photon_noise import noise_of_planes
from halotile.tasks.training.patches import PatchSource, Recipe
from halotile.tasks.user_code import file_digest


@dataclass(frozen=True)
class TrainWork(ProgramWork):
    """A training, and the file of its weights."""

    recipe: Recipe
    phase = "train"
    word = "step"
    titles = (" while the network was trained", " while the weights were written")

    @property
    def steps(self) -> int:
        return self.recipe.steps

    def in_files(self, files: ProgramFiles, drawing: Path) -> Recipe:
        return replace(self.recipe, checkpoint=files.checkpoint, curve=files.curve, examples=drawing)

    def program(self, recipe: Recipe) -> Callable[[Any], None]:
        """Return the program of a rank."""
        return partial(_train, recipe)

    def encode(self, recipe: Recipe) -> Callable[[], bytes]:
        """Return a function that encodes the weights."""
        return partial(_encode, recipe)

    def run(self, at: base.RunView) -> Generator[base.AnyPass, base.Sums, None]:
        """Yield the passes, and describe the weights once they are written."""
        yield from super().run(at)
        with suppress(*GONE):  # weights that were removed meanwhile are named where the run ends
            self._describe(at)

    def _describe(self, at: base.RunView) -> None:
        """Write the model card, unless it is there."""
        weights, plan = Path(str(self.output.path)), at.directory.read_plan()
        before, digest = (
            self.description.read_text(errors="replace") if self.description.exists() else HUB,
            file_digest(weights),
        )
        if HUB not in before:
            at.report(f"{self.description} is there, and no training wrote it: the weights have no model card.")
        elif digest not in before and plan:
            rows = at.directory.read_output_iterations()
            text = describe_weights(plan, self._denoiser(weights.name), digest, rows, before)
            DISK.write_file(self.description, [text.encode()])

    @property
    def description(self) -> Path:
        """Path of the model card."""
        return Path(str(self.output.path)).with_suffix(".md")

    def _denoiser(self, weights: str) -> dict[str, Any]:
        return {**self.recipe.network.denoiser(self.recipe.channels), "weights": weights}

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> base.Inspection:
        """Return the last figures of the curve, and the denoiser to write into a job."""
        last, drawing = self.last_row()
        denoiser = self._denoiser(str(self.output.path))
        figures = {name: last[name] for name in ("loss", "validation", "error", "tv", "nlm") if name in last}
        return base.Inspection(
            figures | {"denoiser": denoiser},
            [*result_rows(last, denoiser, drawing), ("model card", str(self.description))],
        )


def _train(recipe: Recipe, group: Any) -> None:
    """Train on one rank; only workers load torch."""
    from halotile.tasks.training.trainer import Trainer

    Trainer(recipe, group.device).train(group)


def _encode(recipe: Recipe) -> bytes:
    """Encode the weights; only workers load torch."""
    from halotile.tasks.training.trainer import encoded_weights

    return encoded_weights(recipe)


USUAL_STEPS = 1000
ROWS = 50  # rows of the curve
# The current one, the next while it is written, and two that are kept while the input is checked; each has the network
# and two moments of Adam.
CHECKPOINTS = 4
# Time of a step with the exchange of gradients and the reading of patches, relative to that of the network.
EXCHANGE = 1.1
SMALLER = "a smaller patch or batch, or a narrower network"


@dataclass(frozen=True)
class _Length:
    """Number of steps, and the time of one as far as it was tried."""

    steps: int
    seconds_per_step: float | None = None


def plan_training(job: Training, state: base.OutputState, request: base.PlanRequest) -> base.Planned:
    """Decide the length of a training and the memory of its workers."""
    placement = place_ranks(job, job.slots)
    job = placement.job
    network = _network(job)
    first, second = _opened(job, state)
    _check_patch(job, network, smallest_edge(first))
    patches = patch_source(job, first, second)
    planes, (low, high) = samples_of(patches.images[0]), patches.values
    structure, is_white, shared = hidden_with(job, planes)
    noise = noise_of_planes([[(square - low) / (high - low) for square in squares] for squares in planes])
    patches = replace(patches, structure=structure)
    length = _length(job, network, patches, state, request, placement.device)
    output = base.OutputFile(
        Path(str(state.output)),
        FileLayout(network.weight_bytes(patches.images[0].channels)),
        ONE_BLOCK,
        job.output.overwrite,
    )
    every = max(1, length.steps // ROWS)
    recipe = Recipe(
        patches,
        network,
        job.method,
        length.steps,
        job.batch,
        job.slots,
        job.lr,
        every,
        job.mode,
        noise if is_white else None,
    )
    return base.Planned(
        placement=placement,
        work=TrainWork(recipe, output, placement.device),
        sources=(*first, *second),
        identity=_identity(job, network, (first, second), length, placement.device) | {"structure": structure},
        needs=(_need(recipe, (*first, *second), placement.device),),
        smaller=SMALLER,
        scratch_bytes=CHECKPOINTS * 3 * output.layout.size_bytes,
        decided={"steps": length.steps, "epochs": None, "minutes": None, "structure": structure},
        figures=_figures(job, recipe, first, length, placement.device) | {"noise_levels": [*map(plane_level, planes)]},
        notes=(
            *first[0].remarks,
            *shared,
            *notes_of_pairs(patches.images, first, second),
            *notes_of_images(patches, first),
        ),
    )


def _opened(job: Training, state: base.OutputState) -> tuple[Sequence[Source], Sequence[Source]]:
    """Open the images and the second ones, if there are such."""
    first = open_images(job, "input.path", job.input.path)
    second = open_images(job, "second", job.second) if job.second else ()
    for source in (*first, *second):
        check_paths(source.path, state.output)
    check_decoding((*first, *second), job.run)
    return first, second


def _network(job: Training) -> Network:
    network: Network = make_part("network", job.network, job)
    if network.begins_as_identity and job.method == "noise2void2":
        raise ConfigError(
            f"method: noise2void2 replaces hidden pixels by medians, and {network.name} learns next to nothing from them. Write method: noise2void, or network: {{name: unet}}."
        )
    return network


def _check_patch(job: Training, network: Network, edge: int) -> None:
    """Refuse a patch that the network does not divide, with the next one that does; ``edge`` is the smallest of the images."""
    step = network.alignment
    if job.patch % step:
        above, largest = -(-job.patch // step) * step, edge // step * step
        better = largest if edge < above and largest >= LEAST_PATCH else above
        raise ConfigError(
            f"patch is {job.patch}, which is not a multiple of {step}, by which the network downsamples. Write patch: {better}."
        )


def _length(
    job: Training,
    network: Network,
    patches: PatchSource,
    state: base.OutputState,
    request: base.PlanRequest,
    device: str,
) -> _Length:
    """Decide the number of steps; a resumed run keeps those that a trial gave."""
    if job.minutes is None:
        if job.epochs is not None:
            return _Length(steps_of_epochs(patches, job.epochs, job.batch))
        return _Length(USUAL_STEPS if job.steps == "auto" else job.steps)
    known = state.previous["identity"].get("length") if state.previous else None
    if known and known["minutes"] == job.minutes:
        return _Length(known["steps"])
    if device != "cpu":
        raise ConfigError(
            "minutes works only on CPUs, where a trial measures the time of a step, but this job computes on GPUs. Write steps or epochs."
        )
    shape = (patches.images[0].channels, job.batch // job.slots, job.patch)
    call = partial(_try_slot, network, job.method, shape)
    with report_if_slow(request.report, "trying a step of the training"):
        try:
            seconds = call_bounded(call, parse_bytes(job.run.memory_per_worker))
        except NoAnswer as error:
            raise ConfigError(f"a trial of the training {error}. Write steps in place of minutes.") from error
    per_step = EXCHANGE * seconds * -(-job.slots // job.run.count)
    return _Length(max(1, math.ceil(60 * job.minutes / per_step)), per_step)


def _try_slot(network: Network, method: str, shape: tuple[int, int, int]) -> float:
    """Try a part of a batch; called in another process, which loads torch."""
    from halotile.tasks.training.trainer import seconds_of_slot

    return seconds_of_slot(network, method, shape)


def _need(recipe: Recipe, sources: Sequence[Source], device: str) -> base.Need:
    """Return the memory of a rank: activations of its patches, the weights with those of Adam, and the cells of its slots."""
    pixels = recipe.batch // recipe.slots * recipe.patches.patch**2
    activations = round(pixels * recipe.network.bytes_per_pixel()) if device == "cpu" else 0
    weights = recipe.network.weight_bytes(recipe.channels)
    cells = recipe.batch * recipe.patches.cell_bytes
    decoded = kept_bytes(sources, MOST_SHARED) + kept_bytes(sources, 1)  # one more while it is decoded
    parts = {
        PROCESS: IMPORTS_BYTES,
        "the activations": activations,
        "the network with the moments of Adam": (8 + 2 * recipe.slots) * weights,
        "the patches": cells,
        "decoded chunks of the images": decoded,
    }
    edge = recipe.patches.patch
    what = f"a step with {recipe.batch // recipe.slots} patches of {edge} × {edge} on each worker"
    return base.Need(what, parts, SMALLER)


def _figures(job: Training, recipe: Recipe, images: Sequence[Source], length: _Length, device: str) -> dict[str, Any]:
    patches, channels = recipe.patches, recipe.channels
    return {
        "input": job.input.path,
        "second": job.second,
        "shape": list(images[0].shape),
        "shapes": [list(source.shape) for source in images],
        "network": recipe.network.name,
        "channels_text": "one channel" if channels == 1 else f"{channels} channels together",
        "device_text": "CPUs" if device == "cpu" else "GPUs",
        "method": job.method,
        "structure": patches.structure,
        "steps": length.steps,
        "epochs": epochs_of(patches, length.steps, job.batch),
        "seconds_per_step": length.seconds_per_step,
        "patch": job.patch,
        "batch": job.batch,
        "slots": job.slots,
        "mode": job.mode,
    }


def _identity(
    job: Training, network: Network, images: tuple[Sequence[Source], Sequence[Source]], length: _Length, device: str
) -> dict[str, Any]:
    """Return everything that can change a bit of the weights."""
    first, second = images
    return {
        "input": {str(n): source.fingerprint() for n, source in enumerate(first)},
        "second": {str(n): source.fingerprint() for n, source in enumerate(second)},
        "nodata": job.input.nodata,
        "range": job.input.range,
        "method": job.method,
        "network": {"name": network.name, **describe_options(network)},
        "length": {"steps": length.steps, "minutes": job.minutes},
        **{key: getattr(job, key) for key in ("patch", "batch", "slots", "lr", "mode", "seed")},
        "device": device,
        "code": code_versions(),
    }
