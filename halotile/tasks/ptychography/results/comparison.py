"""Measured patterns beside those that a reconstruction expects."""

from __future__ import annotations

import numpy as np
import torch

from halotile.storage.scans.export import PatternComparison
from halotile.tasks.ptychography.losses import amplitude_mse
from halotile.tasks.ptychography.model import PatternModel
from halotile.tasks.ptychography.order import PatternNumbers
from halotile.tasks.ptychography.patterns import Patterns, on_detector
from halotile.tasks.ptychography.recipe import ScanRecipe
from halotile.tasks.ptychography.state import ReconstructionState


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
    model, image = PatternModel.of(recipe, mask, "cpu"), state.parameters["object"]
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
