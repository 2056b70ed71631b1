"""A stack of blurs on the workers: forward, adjoint and both, held against the plain stack.

python examples/distributed/physics.py --save stack.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from deepinv.physics import Blur, StackedLinearPhysics, stack
from deepinv.physics.functional import gaussian_blur
from images import image, save_row

from halotile import DistributedContext, distribute


def cameras(device: torch.device) -> StackedLinearPhysics:
    """Three of them: nearly sharp, out of focus, and shaken along a line."""
    kernels = [
        gaussian_blur(sigma=(0.8, 0.8)),
        gaussian_blur(sigma=(2.5, 2.5)),
        gaussian_blur(sigma=(0.7, 4.0), angle=30),
    ]
    return stack(*(Blur(filter=kernel, padding="circular", device=device) for kernel in kernels))


def farthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    """Apply the stack both ways, and say how far apart they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--save", type=Path, help="PNG of the image and what the cameras make of it")
    request = parser.parse_args()

    with DistributedContext(seed=42) as ctx:
        plain = cameras(ctx.device)
        x = image("camera", request.size).to(ctx.device)
        physics = distribute(plain, ctx)

        y = physics(x)
        back = physics.A_adjoint(y)
        both = physics.A_adjoint_A(x)

        if ctx.rank == 0:
            print(f"{len(physics.local_indexes)} of {len(y)} operators here, {ctx.world_size} at work")
            wanted = plain(x)
            print(f"A:    {max(map(farthest, y, wanted)):.0e} from the plain stack")
            print(f"A^T:  {farthest(back, plain.A_adjoint(wanted)):.0e}")
            print(f"A^TA: {farthest(both, plain.A_adjoint_A(x)):.0e}")
            if request.save:
                seen = {f"camera {number}": part for number, part in enumerate(y, 1)}
                save_row(request.save, {"image": x, **seen, "added up": back / len(y)})


if __name__ == "__main__":
    main()
