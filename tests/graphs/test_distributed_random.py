"""Random numbers and the state of distributed objects do not depend on the worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.graphs.clusters.base import RunningCluster
from tests.graphs.distributing import NEAR, difference, image, tiled

physics = pytest.importorskip("deepinv.physics")
models = pytest.importorskip("deepinv.models")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


class Dropping(torch.nn.Module):  # type: ignore[misc]
    """Drops half of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("options", [{"overlap": 0}, {"max_batch_size": 1}, {"blending": "hann"}], ids=str)
def test_gradients_of_a_stochastic_denoiser_match_its_value(ctx: DistributedContext, options: Any) -> None:
    net, x = Dropping(), torch.ones(1, 1, 64, 64, requires_grad=True)
    value = tiled(ctx, net, **options)(x)
    by_image, by_weight = torch.autograd.grad(value.sum(), [x, net.weight])
    assert bool((value == 0).any())
    assert difference(by_weight, value.sum().reshape(1)) < NEAR
    assert difference(by_image.sum(), value.sum()) < NEAR
    if options.get("overlap") == 0:  # otherwise pixels near a seam are in several windows
        assert torch.equal(by_image, value)


def test_random_numbers_of_a_denoiser_follow_from_seed_call_and_tile(cluster: RunningCluster) -> None:
    found, x = [], torch.ones(1, 1, 64, 64)
    for _ in range(2):
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=8) as opened:
            denoiser = tiled(opened, Dropping(), overlap=0, max_batch_size=1)
            other = tiled(opened, Dropping(), overlap=0, max_batch_size=1)
            with torch.no_grad():
                found.append([denoiser(x), denoiser(x), other(x)])
    assert difference(*found) == 0
    tiles = torch.stack([value.reshape(4, 16, 4, 16).transpose(1, 2) for value in found[0]])
    assert len({tuple(tile.flatten().tolist()) for tile in tiles.reshape(-1, 16, 16)}) == 3 * 16


def test_a_stateful_denoiser_is_reset_for_each_tile(ctx: DistributedContext) -> None:
    x, options = image(1, 1, 64, 64), {"overlap": 8, "max_batch_size": 1}
    denoiser = tiled(ctx, models.TVDenoiser(n_it_max=20), **options)
    fresh = tiled(ctx, lambda tile: models.TVDenoiser(n_it_max=20)(tile, 0.3), **options)
    wanted = fresh(x)
    assert torch.equal(denoiser(x, 0.3), wanted)
    assert torch.equal(denoiser(x, 0.3), wanted)


def test_noise_of_a_generator_is_the_same_on_any_worker(cluster: RunningCluster) -> None:
    found = []
    for seed in (8, 9):
        with DistributedContext(cluster=cluster, device_mode="cpu", seed=seed) as opened:
            noises = [physics.GaussianNoise(0.1, rng=torch.Generator().manual_seed(k)) for k in range(3)]
            stack = distribute([physics.Denoising(noise) for noise in noises], opened)
            found.append([each for _ in range(4) for each in stack(torch.zeros(1, 1, 9, 9))])
    assert difference(*found) == 0
    assert len({float(each.sum()) for each in found[0]}) == 12
