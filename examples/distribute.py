"""A stack of blurs, a denoiser on tiles, and both in plug and play: deepinv's objects on a local cluster.

    python examples/distribute.py --workers 2 --size 256

The picture is synthetic, and the denoiser a median filter: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math

import torch
from deepinv.models import MedianFilter
from deepinv.optim import L2
from deepinv.physics import Blur, GaussianNoise, StackedLinearPhysics
from deepinv.physics.functional import gaussian_blur

from halotile import DistributedContext, distribute


def picture(size: int) -> torch.Tensor:
    """Discs and stripes in [0, 1], of shape (1, 1, size, size)."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij")
    discs = ((x - 0.3) ** 2 + (y + 0.2) ** 2 < 0.15).float() + (
        (x + 0.4) ** 2 + (y - 0.4) ** 2 < 0.08
    ).float()
    stripes = (torch.sin(24 * x) * torch.cos(7 * y) > 0.6).float() / 3
    return (0.1 + 0.6 * discs + stripes).clamp(0, 1)[None, None]


def cameras() -> StackedLinearPhysics:
    """Three of them, each with its own blur and noise."""
    made = []
    for width in (0.8, 1.5, 2.2):
        made.append(Blur(filter=gaussian_blur(sigma=(width, width)), padding="circular"))
        made[-1].noise_model = GaussianNoise(sigma=0.03)
    return StackedLinearPhysics(made)


def psnr(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Of a picture with a peak of 1, in dB."""
    return -10 * math.log10(float((found - truth).square().mean()))


def main() -> None:
    """Measure, denoise, reconstruct."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args()
    truth = picture(options.size)

    with DistributedContext(workers=options.workers, seed=0) as ctx:
        physics = distribute(cameras(), ctx)
        y = physics(truth)
        print(f"{len(y)} measurements from {ctx.world_size} workers, ||A||² = ", end="")
        step = 1 / float(physics.compute_sqnorm(truth, verbose=False))
        print(f"{1 / step:.3f}")

        denoiser = distribute(MedianFilter(3), ctx, patch_size=128, overlap=8)
        noisy = truth + 0.1 * torch.randn_like(truth)
        print(
            f"denoised: {psnr(noisy, truth):.1f} dB before, {psnr(denoiser(noisy, 0.1), truth):.1f} dB after"
        )

        fidelity = distribute(L2(), ctx)
        x = sum(y) / len(y)
        print(f"reconstructed: {psnr(x, truth):.1f} dB before, ", end="")
        for k in range(options.iterations):
            x = x - step * fidelity.grad(x, y, physics)
            if k % 5 == 4:
                x = denoiser(x, 0.03)
        print(f"{psnr(x, truth):.1f} dB after {options.iterations} iterations")


if __name__ == "__main__":
    main()
