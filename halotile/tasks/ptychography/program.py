"""Ptychography as a program of ranks: patterns shared, the object and the probe summed; with the model of halotile, or with a module of the user."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import ConfigError, Diverged
from halotile.tasks.devices.device import prepare_program
from halotile.tasks.groups.cut_tensors.transfers import as_real
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import StepRequests, count_received
from halotile.tasks.groups.training.fit import shared_state
from halotile.tasks.ptychography import model
from halotile.tasks.ptychography.losses import LOSSES
from halotile.tasks.ptychography.patterns import PatternNumbers, Patterns, steps_of, turned
from halotile.tasks.ptychography.recipe import PARTS, ScanRecipe, SolverStage
from halotile.tasks.ptychography.result import SHOWN, Record, built_module, illumination, load, words_of_kept
from halotile.tasks.ptychography.solvers import SOLVERS, PatternBatch, add_smoothness, begin_epoch, rate_of
from halotile.tasks.ptychography.state import (
    LOSS_NUMBERS,
    PartTensors,
    ReconstructionState,
    SlotGradients,
    by_name,
    dark_loss,
    first_state,
    keep_between,
    same_bits,
    shift_limits,
    support_of,
    unpacked,
)


@dataclass(frozen=True)
class Refinement:
    """A reconstruction on one rank of a group."""

    recipe: ScanRecipe
    group: TorchGroup
    # True for sizes of slots that can be computed together.
    together: dict[tuple[int, ...], bool] = field(default_factory=dict, init=False, repr=False)
    # The loss of a pixel of the last step's patterns before it, by half.
    last_losses: dict[int | None, float] = field(default_factory=dict, init=False, repr=False)

    def run(self) -> None:
        """Run the epochs that are left; refuse patterns that are no counts, and a loss that diverges."""
        recipe, group = self.recipe, self.group
        prepare_program(group.device)
        content = shared_state(recipe.newest_checkpoint, group)
        state = ReconstructionState.from_content(content, group.device) if content else self.first_state()
        record = Record(recipe, state, partial(self.drawn, state))
        if group.rank == 0 and state.losses:  # a killed run may have written a longer or shorter curve
            record.write(is_last=len(state.losses) == recipe.epochs)
            record.draw()
        for epoch in range(len(state.losses), recipe.epochs):
            if recipe.requests and not StepRequests(recipe.requests).await_step(epoch, group, record.save):
                break
            if recipe.requests and group.rank == 0 and epoch + 1 == recipe.epochs:
                record.save()  # the last epoch may be refused
            began = time.monotonic()
            try:
                self.whole_epoch(state, epoch)
            except Diverged as error:
                raise Diverged(f"{error}{words_of_kept(recipe, epoch)}") from None
            if group.rank == 0:
                record.epoch_ended(time.monotonic() - began, is_last=epoch + 1 == recipe.epochs)
        group.barrier()  # the checkpoint is there once any rank returns

    def whole_epoch(self, state: ReconstructionState, epoch: int) -> None:
        """Use every pattern, of all positions and of each half; refuse losses of a reconstruction that has diverged."""
        for half, one in zip(self.recipe.halves, (state, *state.halves), strict=True):
            one.losses.append(self.epoch(one, epoch, half))
        if diverged := [one for one in (state, *state.halves) if one.has_diverged]:
            raise Diverged(
                f"the loss is {diverged[0].losses[-1]:.4g} in epoch {epoch + 1} of {self.recipe.epochs}. Write a smaller lr, or look at the patterns."
            )
        first, stage = self.recipe.stage_of(epoch)
        if epoch + 1 == first + stage.epochs:
            self.check_end(state, epoch)

    def epoch(self, state: ReconstructionState, epoch: int, half: int | None = None) -> float:
        """Use every pattern of all positions or of a half once; return the mean loss of a pixel, each measured before its step."""
        first, stage = self.recipe.stage_of(epoch)
        begin_epoch(state, stage, epoch - first)
        rate = rate_of(stage, state.losses[first:])
        if "positions" in self.refined and epoch < first + stage.hold_positions:
            stage = replace(stage, lr_factors={**stage.lr_factors, "positions": 0.0})
        total, held = 0.0, 0.0
        steps = steps_of(self.recipe, epoch, half)
        ahead = max(1, self.recipe.window * self.recipe.slots // stage.batch)
        coming = itertools.islice(itertools.chain(steps, self._steps_after(epoch, half)), ahead, None)
        for number, parts in enumerate(steps):
            if later := next(coming, None):
                first_ones = [later[slot][: self.recipe.at_once] for slot in self.slots]
                self.patterns.expect(np.concatenate(first_ones))
            loss, of_held = self.step(state, stage, rate, parts)
            self.last_losses[half] = loss / (sum(map(len, parts)) * self.patterns.counted_pixels)
            state.begun = state.begun or self.last_losses[half]
            if epoch == first and number == 0:
                state.stage_begun = self.last_losses[half]
            total, held = total + loss, held + of_held
        pixels = int(self.recipe.used(epoch, half).sum()) * self.patterns.counted_pixels
        if self.recipe.held_out:
            state.keep_best(first, held / (pixels * self.recipe.held_out))
        return total / pixels

    def check_end(self, state: ReconstructionState, epoch: int) -> None:
        """Refuse the end of a stage whose last step diverged: each loss is from before its step and would not show it."""
        for half, one in zip(self.recipe.halves, (state, *state.halves), strict=True):
            if one.is_spoilt(one.stage_begun, one.losses[-1], self.recipe.loss):
                raise Diverged(
                    f"the loss is {one.losses[-1]:.4g} at the end of a stage, and was {one.stage_begun:.4g} before it. Write a smaller lr in that stage, or smaller lr_factors."
                )
            parts = steps_of(self.recipe, epoch, half)[-1]
            total, _ = self._sums(one, parts, self.positions(one, parts))
            loss = total / (sum(map(len, parts)) * self.patterns.counted_pixels)
            before = self.last_losses[half]
            if one.is_spoilt(before, loss, self.recipe.loss):
                raise Diverged(
                    f"the loss of some patterns is {loss:.4g} after the last step of a stage, and was {before:.4g}. Write a smaller lr in that stage, or smaller lr_factors."
                )
            if self.recipe.held_out:
                one.return_to_best()

    def _steps_after(self, epoch: int, half: int | None) -> Iterable[list[PatternNumbers]]:
        """The steps that follow those of an epoch."""
        halves = self.recipe.halves
        if half != halves[-1]:
            return steps_of(self.recipe, epoch, halves[halves.index(half) + 1])
        return steps_of(self.recipe, epoch + 1) if epoch + 1 < self.recipe.epochs else []

    def step(
        self, state: ReconstructionState, stage: SolverStage, rate: float, parts: Sequence[PatternNumbers]
    ) -> tuple[float, float]:
        """Do one step; return the loss of its patterns, and that of their pixels that are held out."""
        loss, gradients = self._sums(state, parts, places := self.positions(state, parts))
        self._scale(state, gradients)
        scale = 1 / (sum(map(len, parts)) * self.patterns.counted_pixels)
        batch = PatternBatch(places, scale, rate, stage)
        if batch.smoothness:
            add_smoothness(state, gradients, batch.smoothness)
        rates = {name: rate * stage.lr_factors.get(name, 1.0) for name in self.refined}
        SOLVERS[stage.solver](state, gradients, rates, batch)
        if "pattern_loss" in gradients:
            means = gradients["pattern_loss"] / self.patterns.counted_pixels
            state.parameters["pattern_loss"][np.concatenate(parts)] = means
        state.follow_first()
        if "positions" in rates:
            self._keep_inside(state)
        return loss, float(gradients.get("held_out", 0.0))

    @property
    def refined(self) -> tuple[str, ...]:
        """The parts that change."""
        return self.recipe.refined

    def first_state(self) -> ReconstructionState:
        """The first guess."""
        return first_state(self.recipe, self.patterns, self.group.device)

    def positions(self, state: ReconstructionState, parts: Sequence[PatternNumbers]) -> list[Any]:
        """The positions of each slot as they are now."""
        together = state.positions(self.recipe, np.concatenate(parts))
        ends = list(itertools.accumulate(map(len, parts)))
        return [together.some(slice(end - len(part), end)) for end, part in zip(ends, parts, strict=True)]

    def _sums(
        self, state: ReconstructionState, parts: Sequence[PatternNumbers], places: Sequence[Any]
    ) -> tuple[float, PartTensors]:
        """The loss and the gradients of the patterns of a step, from all ranks."""
        own = slice(self.slots.start, self.slots.stop)
        found = self._of_all_ranks(state, self._found(state, parts[own], places[own]), places)
        return self._added(state, found, parts, places)

    def _of_all_ranks(
        self, state: ReconstructionState, mine: list[SlotGradients], places: Sequence[model.Positions]
    ) -> list[SlotGradients]:
        """The loss and the gradients of every slot, from those of the slots of each rank."""
        if self.group.world_size == 1:
            return mine
        shapes = [self._shapes(state, positions) for positions in places]
        lengths = [LOSS_NUMBERS + sum(map(math.prod, each.values())) for each in shapes]
        ranks = [replace(self.group, rank=rank).slots(len(places)) for rank in range(self.group.world_size)]
        sizes = [sum(lengths[slot] for slot in slots) for slots in ranks]
        # The loss is sent as two numbers, so that no digit of it is lost.
        pieces = [piece.reshape(-1).view(torch.float32) for found in mine for piece in found.values()]
        count_received(torch.float32.itemsize * (sum(sizes) - sizes[self.group.rank]))
        vectors = self.group.gather_parts(torch.cat(pieces), sizes)
        found: list[SlotGradients] = []
        for slots, vector in zip(ranks, vectors, strict=True):
            some = slice(slots.start, slots.stop)
            sent = map(unpacked, vector.split(lengths[some]), shapes[some])
            found += mine if slots == self.slots else sent
        return found

    def _found(
        self, state: ReconstructionState, parts: Sequence[PatternNumbers], places: Sequence[model.Positions]
    ) -> list[SlotGradients]:
        """The loss and the gradients of each slot of this rank.

        Slots are computed together where that gives the bits of each by itself, which is tried once for their sizes.
        """
        sizes = tuple(map(len, parts))
        if sum(sizes) <= self.recipe.at_once and sum(size > 0 for size in sizes) > 1:
            if sizes not in self.together:
                self.together[sizes] = self._has_same_bits_together(state, parts)
            if self.together[sizes]:
                return self._found_together(state, parts, places)
        return [self._found_alone(state, *slot) for slot in zip(parts, places, strict=True)]

    def _has_same_bits_together(self, state: ReconstructionState, parts: Sequence[PatternNumbers]) -> bool:
        """Compute slots in both ways, with an object and a probe without zeros or cancellations."""
        drawn = state.at_random(self.refined, self.recipe.seed)
        places = self.positions(drawn, parts)
        apart = [self._found_alone(drawn, *slot) for slot in zip(parts, places, strict=True)]
        return all(map(same_bits, self._found_together(drawn, parts, places), apart))

    def _found_together(
        self, state: ReconstructionState, parts: Sequence[PatternNumbers], places: Sequence[model.Positions]
    ) -> list[SlotGradients]:
        ends = list(itertools.accumulate(map(len, parts)))
        groups = [slice(end - len(part), end) for end, part in zip(ends, parts, strict=True) if len(part)]
        found = iter(self._of_groups(state, np.concatenate(parts), model.Positions.joined(places), groups))
        return [
            by_name(next(found)) if len(part) else self._found_alone(state, part, where)
            for part, where in zip(parts, places, strict=True)
        ]

    def _of_groups(
        self, state: ReconstructionState, numbers: PatternNumbers, positions: model.Positions, groups: Sequence[slice]
    ) -> list[model.PatternGradients]:
        """Loss and gradients of groups of patterns."""
        parts, device = state.parameters, self.group.device
        return self.model.gradients(
            parts["object"],
            state.probe,
            state.background,
            positions,
            self.patterns.read(numbers, device),
            groups,
            self.recipe.refined,
            parts.get("variations"),
            self.patterns.held_out(numbers, device),
        )

    def _found_alone(
        self, state: ReconstructionState, numbers: PatternNumbers, positions: model.Positions
    ) -> SlotGradients:
        """The loss and the gradients of a slot."""
        if len(numbers):
            return by_name(self._gradients(state, numbers, positions))
        shapes, zeros = self._shapes(state, positions), partial(torch.zeros, device=self.group.device)
        return {"loss": zeros(1, dtype=torch.float64)} | {name: zeros(each) for name, each in shapes.items()}

    def _gradients(
        self, state: ReconstructionState, numbers: PatternNumbers, positions: model.Positions
    ) -> model.PatternGradients:
        """Loss and gradients of a slot, some of its patterns at a time."""
        total: model.PatternGradients | None = None
        for start in range(0, len(numbers), self.recipe.at_once):
            some = slice(start, start + self.recipe.at_once)
            self.patterns.expect(numbers[some.stop : some.stop + self.recipe.at_once])
            (found,) = self._of_groups(state, numbers[some], positions.some(some), [slice(0, self.recipe.at_once)])
            if len(numbers) <= self.recipe.at_once:
                return found
            if total is None:
                total = model.zero_gradients(found, positions.box(self.recipe.frame), len(numbers))
            total = model.added_gradients(total, found, some)
        assert total is not None
        return total

    def _shapes(self, state: ReconstructionState, positions: model.Positions) -> dict[str, tuple[int, ...]]:
        """Shapes of the gradients of a slot by part, in real numbers."""
        count, box = len(positions.pixel), positions.box(self.recipe.frame)
        shapes = {
            "object": (*(part.stop - part.start for part in box), 2),
            "probe": (*state.parameters["probe"].shape, 2),
            "background": self.recipe.pattern,
            "positions": (count, 2),
            "intensities": (count,),
            "shares": (count, self.recipe.variations),
            "variations": (self.recipe.variations, *self.recipe.frame, 2),
        }
        held = {"held_out": (1,)} if self.recipe.held_out else {}
        refined = {name: shapes[name] for name in PARTS if name in self.recipe.refined}
        return refined | held | {"pattern_loss": (count,)}

    def _added(
        self,
        state: ReconstructionState,
        slots: Sequence[SlotGradients],
        parts: Sequence[PatternNumbers],
        places: Sequence[model.Positions],
    ) -> tuple[float, PartTensors]:
        """Sum the loss and the gradients of all slots, in their order."""
        total = {name: torch.zeros_like(state.parameters[name]) for name in self.refined}
        for found, numbers, positions in zip(slots, parts, places, strict=True):
            for name in self.refined:
                self._add(total, name, found[name], numbers, positions)
        if self.recipe.held_out:
            total["held_out"] = torch.stack([found["held_out"] for found in slots]).double().sum()
        if "pattern_loss" in state.parameters:
            total["pattern_loss"] = torch.cat([found["pattern_loss"] for found in slots])
        losses = [found["loss"] for found in slots]
        loss = 0.0
        for each in torch.cat(losses).tolist():  # as sum() of Python 3.11, which later ones do otherwise
            loss += each
        return loss, total

    def _add(
        self, total: PartTensors, name: str, gradient: torch.Tensor, numbers: PatternNumbers, positions: model.Positions
    ) -> None:
        """Add a gradient of a slot to that of all."""
        if name in model.OWN_PARTS:
            total[name][numbers] = gradient
        elif name == "object":
            as_real(total[name])[positions.box(self.recipe.frame)] += gradient
        else:
            as_real(total[name]).add_(gradient)

    def _scale(self, state: ReconstructionState, gradients: PartTensors) -> None:
        """Turn gradients by probe and background into those by their parameters, in the support of the probe."""
        for name in {"probe", "variations"} & gradients.keys():
            gradients[name] *= state.norm if self.support is None else state.norm * self.support
        if "background" in gradients:
            gradients["background"] *= state.root

    def _keep_inside(self, state: ReconstructionState) -> None:
        """Keep the positions on the object."""
        keep_between(state.parameters["positions"], *self.limits)

    @cached_property
    def limits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest shift of each position, in pixels."""
        least, most = shift_limits(self.recipe)
        return least.to(self.group.device), most.to(self.group.device)

    @cached_property
    def patterns(self) -> Patterns:
        return Patterns(self.recipe, len(self.slots))

    @property
    def slots(self) -> range:
        """The slots of this rank."""
        return self.group.slots(self.recipe.slots)

    @cached_property
    def model(self) -> model.PatternModel:
        return model.PatternModel.from_recipe(self.recipe, self.patterns.mask(self.group.device), self.group.device)

    @cached_property
    def support(self) -> torch.Tensor | None:
        """1 where the probe may be, else 0."""
        support = support_of(self.recipe)
        return None if support is None else support.to(self.group.device)

    def drawn(self, state: ReconstructionState) -> tuple[NDArray[Any], NDArray[Any]]:
        """The object, and the light that each of its pixels had."""
        places = self.recipe.places + state.parameters["positions"].cpu().numpy()
        image = state.parameters["object"].cpu().numpy()
        return image, illumination(state.probe.cpu().numpy(), places[:: 1 + len(places) // SHOWN], image.shape)


@dataclass(frozen=True)
class ModuleRefinement(Refinement):
    """A reconstruction with the user's module on one rank of a group."""

    @cached_property
    def module(self) -> torch.nn.Module:
        return built_module(self.recipe).to(self.group.device)

    @cached_property
    def refined(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(name for name, value in self.module.named_parameters() if value.requires_grad)

    def first_state(self) -> ReconstructionState:
        """The module as it was built on rank 0."""
        for part in {part for stage in self.recipe.stages for part in stage.lr_factors}.difference(self.refined):
            raise ConfigError(
                f"lr_factors names {part}, and the parameters of {self.recipe.module} are {', '.join(self.refined)}. Write some of them."
            )
        values = dict(self.module.named_parameters())
        parameters = {name: _sent(values[name].detach().clone(), self.group) for name in self.refined}
        return ReconstructionState(parameters, 1.0, scale=dark_loss(self.recipe, self.patterns.mean()))

    def positions(self, state: ReconstructionState, parts: Sequence[PatternNumbers]) -> list[Any]:
        """No positions: the module has its own."""
        return [None] * len(parts)

    def _found(
        self, state: ReconstructionState, parts: Sequence[PatternNumbers], places: Sequence[Any]
    ) -> list[SlotGradients]:
        return [self._found_alone(state, *slot) for slot in zip(parts, places, strict=True)]

    def _found_alone(self, state: ReconstructionState, numbers: PatternNumbers, positions: Any) -> SlotGradients:
        load(self.module, state.parameters)
        values = [dict(self.module.named_parameters())[name] for name in self.refined]
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        sums: PartTensors = {}
        for start in range(0, len(numbers), self.recipe.at_once):
            some = numbers[start : start + self.recipe.at_once]
            loss = self._loss(some)
            found = torch.autograd.grad(loss, values, allow_unused=True)
            total = total + loss.detach()
            for name, gradient in zip(self.refined, found, strict=True):
                if gradient is not None:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        parts = {name: sums.get(name, torch.zeros_like(state.parameters[name])) for name in self.refined}
        return {"loss": total.reshape(1)} | {name: as_real(part) for name, part in parts.items()}

    def _loss(self, numbers: PatternNumbers) -> torch.Tensor:
        """The loss of some patterns, summed in double precision."""
        counted = self.patterns.read(numbers, self.group.device)
        expected = turned(self.module(torch.from_numpy(numbers).to(self.group.device)), self.recipe)
        if expected.shape != counted.shape:
            raise ConfigError(
                f"the module of {self.recipe.module} gave {list(expected.shape)} for {len(numbers)} patterns, and {list(counted.shape)} were counted."
            )
        loss, _ = LOSSES[self.recipe.loss](expected, counted)
        mask = self.patterns.mask(self.group.device)
        return (loss if mask is None else loss * mask).sum(dtype=torch.float64)

    def _shapes(self, state: ReconstructionState, positions: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(as_real(state.parameters[name]).shape) for name in self.refined}

    def _add(
        self, total: PartTensors, name: str, gradient: torch.Tensor, numbers: PatternNumbers, positions: Any
    ) -> None:
        as_real(total[name]).add_(gradient)

    def _scale(self, state: ReconstructionState, gradients: PartTensors) -> None:
        """Leave them as they are."""

    def _keep_inside(self, state: ReconstructionState) -> None:
        """Allow whatever the module does."""

    def drawn(self, state: ReconstructionState) -> tuple[NDArray[Any], NDArray[Any]]:
        """The object; where it had light the module alone knows."""
        load(self.module, state.parameters)
        image = self.module.object.detach().cpu().numpy()
        return image, np.ones(image.shape)


def _sent(tensor: torch.Tensor, group: TorchGroup) -> torch.Tensor:
    """The tensor of rank 0."""
    return (
        torch.view_as_complex(group.broadcast(as_real(tensor).contiguous()))
        if tensor.is_complex()
        else group.broadcast(tensor)
    )


def refinement_of(recipe: ScanRecipe, group: TorchGroup) -> Refinement:
    """The program of a rank: with the closed gradients, or with those of the user's module."""
    return (ModuleRefinement if recipe.module else Refinement)(recipe, group)
