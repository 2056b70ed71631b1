"""The weights of a training that has ended, as the content of a file."""

from __future__ import annotations

import json

from safetensors.torch import save

from halotile.tasks.denoisers.common.weights import METADATA
from halotile.tasks.training.recipe import Recipe
from halotile.tasks.training.trainer import Trainer


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
