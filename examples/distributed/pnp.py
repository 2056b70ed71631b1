"""Plug and play: one image from three blurred and noisy ones, by a loop of one's own and by deepinv's.

python examples/distributed/pnp.py --save pnp.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from deepinv.loss.metric import PSNR
from deepinv.optim import L2, PnP, optim_builder
from deepinv.physics import Blur, GaussianNoise, StackedLinearPhysics, stack
from deepinv.physics.functional import gaussian_blur
from images import image, save_row, trained

from halotile import DistributedContext, distribute

SIGMA = 0.03
"""Noise of the measurements."""


def cameras(device: torch.device) -> StackedLinearPhysics:
    """Three of them, each with its own blur; their noise is drawn from a seed."""
    made = []
    for number, (along, across) in enumerate([(0.8, 0.8), (1.6, 1.6), (0.7, 2.0)]):
        rng = torch.Generator(device).manual_seed(number)
        kernel = gaussian_blur(sigma=(along, across), angle=40)
        noise = GaussianNoise(sigma=SIGMA, rng=rng)
        made.append(Blur(filter=kernel, padding="circular", noise_model=noise, device=device))
    return stack(*made)


def by_hand(y: Any, physics: Any, fidelity: Any, prior: Any, step: float, iterations: int) -> torch.Tensor:
    """``x <- D(x - step * gradient)``, from the mean of the measurements."""
    x = sum(y) / len(y)
    for _ in range(iterations):
        x = prior.prox(x - step * fidelity.grad(x, y, physics), sigma_denoiser=SIGMA)
    return x


def by_deepinv(y: Any, physics: Any, fidelity: Any, prior: Any, step: float, iterations: int) -> torch.Tensor:
    """The same iteration, as ``optim_builder`` makes it."""
    solver = optim_builder(
        "PGD",
        max_iter=iterations,
        data_fidelity=fidelity,
        prior=prior,
        params_algo={"stepsize": step, "g_param": SIGMA, "lambda": 1.0},
        early_stop=False,
    )
    found: torch.Tensor = solver(y, physics, init=sum(y) / len(y))
    return found


def main() -> None:
    """Measure, reconstruct twice, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--save", type=Path, help="PNG of image, measurement and reconstruction")
    request = parser.parse_args()
    network = trained(request.steps, SIGMA)

    with DistributedContext(seed=42) as ctx:
        clean = image("camera", request.size).to(ctx.device)
        plain = cameras(ctx.device)
        y = plain(clean)
        physics = distribute(plain, ctx)
        fidelity = distribute(L2(), ctx)
        prior = PnP(distribute(network.to(ctx.device), ctx, patch_size=128, overlap=8))
        step = 1 / float(physics.compute_sqnorm(clean, local_only=False, verbose=False))

        with torch.no_grad():
            mine = by_hand(y, physics, fidelity, prior, step, request.iterations)
            theirs = by_deepinv(y, physics, fidelity, prior, step, request.iterations)

        if ctx.rank == 0:
            psnr = PSNR()
            before, after = float(psnr(y[1], clean)), float(psnr(mine, clean))
            print(f"reconstructed: {before:.1f} dB before, {after:.1f} dB after {request.iterations} iterations")
            print(f"by optim_builder: {float(psnr(theirs, clean)):.1f} dB")
            if request.save:
                titles = (f"second camera, {before:.1f} dB", f"reconstructed, {after:.1f} dB")
                save_row(request.save, {titles[0]: y[1], titles[1]: mine, "image": clean})


if __name__ == "__main__":
    main()
