"""A network on the tiles of a noisy image, trained here in a few seconds.

python examples/distributed/denoiser.py --save denoised.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from deepinv.loss.metric import PSNR
from images import image, save_row, trained

from halotile import DistributedContext, distribute

SIGMA = 0.1


def main() -> None:
    """Train, add noise, take it away tile by tile, and compare with the network on the whole image."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--patch", type=int, default=128, help="edge of a tile")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--save", type=Path, help="PNG of noisy and denoised image")
    request = parser.parse_args()
    network = trained(request.steps, SIGMA)

    with DistributedContext(seed=42) as ctx:
        clean = image("camera", request.size).to(ctx.device)
        noisy = clean + SIGMA * torch.randn_like(clean)
        network = network.to(ctx.device)
        # Five convolutions of 3 by 3 see five pixels far: with that much overlap tiles leave no seams.
        denoiser = distribute(network, ctx, patch_size=request.patch, overlap=5)

        with torch.no_grad():
            tiled = denoiser(noisy)

        if ctx.rank == 0:
            psnr = PSNR()
            before, after = float(psnr(noisy, clean)), float(psnr(tiled, clean))
            print(f"denoised: {before:.1f} dB before, {after:.1f} dB after")
            inside = (slice(None), slice(None), slice(8, -8), slice(8, -8))
            seam = (tiled - network(noisy))[inside].abs().max()
            print(f"at most {float(seam):.0e} from the network on the whole image, away from its edge")
            if request.save:
                save_row(request.save, {f"noisy, {before:.1f} dB": noisy, f"denoised, {after:.1f} dB": tiled})


if __name__ == "__main__":
    main()
