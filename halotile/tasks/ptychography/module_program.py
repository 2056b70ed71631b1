"""Refinement of a user's own module by automatic differentiation, with the batches and slots of every scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.transfers import as_real
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography.losses import LOSSES
from halotile.tasks.ptychography.patterns import PatternNumbers, turned
from halotile.tasks.ptychography.program import Refinement
from halotile.tasks.ptychography.recipe import ScanRecipe
from halotile.tasks.ptychography.state import PartTensors, ReconstructionState, SlotGradients, dark_loss
from halotile.tasks.ptychography.user_module import built_module, load


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
