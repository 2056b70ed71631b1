"""Unrolled networks as deepinv's two demos train them come to the numbers of deepinv.distributed, whose classes our objects have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halotile import DistributedContext, distribute
from halotile.errors import ConfigError
from tests.graphs.distributing import NEAR, STACKS, Smooth, difference, image

peer = pytest.importorskip("deepinv.distributed")
framework: Any = pytest.importorskip("deepinv.distributed.framework")
optim = pytest.importorskip("deepinv.optim")
physics = pytest.importorskip("deepinv.physics")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

ITERATIONS = 3


def loop(y: Any, stack: Any, fidelity: Any, denoiser: Any, steps: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = stack.A_adjoint(y)
    for step in torch.nn.functional.softplus(steps):
        x = denoiser(x - step * fidelity.grad(x, y, stack), sigma=0.5)
    return x


def proximal(y: Any, stack: Any, fidelity: Any, denoiser: Any, steps: torch.Tensor) -> torch.Tensor:
    """deepinv's unfolded class."""
    model = optim.PGD(
        stepsize=[0.1] * ITERATIONS,
        sigma_denoiser=0.5,
        trainable_params=["stepsize"],
        data_fidelity=fidelity,
        max_iter=ITERATIONS,
        prior=optim.PnP(denoiser=denoiser),
        unfold=True,
    )
    found: torch.Tensor = model(y, stack) * steps.sum()
    return found


@pytest.mark.parametrize("network", [loop, proximal])
def test_an_unrolled_network_trains_as_with_deepinv(
    ctx: DistributedContext, network: Callable[..., torch.Tensor]
) -> None:
    found = []
    with peer.DistributedContext(device_mode="cpu", seed=3) as theirs:
        for open_context, share in ((ctx, distribute), (theirs, peer.distribute)):
            net, steps = Smooth(), torch.full((ITERATIONS,), -2.0, requires_grad=True)
            parts = physics.StackedLinearPhysics(STACKS["circular blurs"]()[:2])
            y = parts.A(image(1, 1, 32, 32))
            stack = share(parts, open_context, type_object="linear_physics", reduction="mean")
            denoiser = share(net, open_context, type_object="denoiser", patch_size=16, overlap=4)
            made = network(y, stack, share(optim.L2(), open_context), denoiser, steps)
            gradients = torch.autograd.grad((made - 1).square().mean(), [steps, *net.parameters()])
            found.append([made, *gradients])
    assert difference(*found) < 10 * NEAR


def test_distributed_objects_derive_from_deepinvs_classes_and_use_none_of_their_methods(
    ctx: DistributedContext,
) -> None:
    made = {
        framework.DistributedStackedLinearPhysics: distribute(STACKS["circular blurs"](), ctx),
        framework.DistributedStackedPhysics: distribute([physics.Denoising()], ctx, type_object="physics"),
        framework.DistributedDataFidelity: distribute(optim.L2(), ctx),
        framework.DistributedProcessing: distribute(Smooth(), ctx, type_object="denoiser"),
    }
    for theirs, ours in made.items():
        assert isinstance(ours, theirs)
        owners = {
            name: next(kind for kind in type(ours).__mro__ if name in vars(kind)).__module__ for name in dir(type(ours))
        }
        assert not [
            name
            for name, owner in owners.items()
            if owner.startswith("deepinv.distributed") and (name == "__init__" or not name.startswith("_"))
        ]


def test_a_fidelity_of_deepinvs_framework_is_refused(ctx: DistributedContext) -> None:
    stack = distribute(STACKS["circular blurs"](), ctx)
    x = image(2, 1, 16, 16)
    with pytest.raises(ConfigError, match="Distribute both by halotile"):
        peer.distribute(optim.L2(), ctx).grad(x, stack.A(x), stack)
