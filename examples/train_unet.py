"""A U-Net trained on a noisy image alone, without clean ones (Noise2Void), by two workers.

::

    python examples/train_unet.py noisy.zarr unet.safetensors
    recon-cli run job.yaml      # denoiser: {name: unet, weights: unet.safetensors}

Some pixels of each patch are replaced by the median of their neighbours, and the network learns to predict them: it can do so only for what
neighbouring pixels tell, which noise that differs from pixel to pixel does not. It is trained again where it was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors.torch import save_file

import halotile
from halotile import torch_group
from halotile.tasks.denoisers.common.unet_layers import BlindUNet

PATCH, BATCH, SLOTS = 64, 16, 4
MASKED = 0.005
"""Share of the pixels of a patch that are masked."""
AROUND = [place for place in itertools.product(range(-2, 3), repeat=2) if place != (0, 0)]
RATE = 1e-3
NO_STEP = 2**31 - 1
"""Number in place of a step of the patches whose mean and deviation the network takes for those of the image."""
MOST_TRIES = 1000
"""Places that are tried for the patches of a slot, where many have holes."""


def opened(path: Path) -> Any:
    """The pixels of a Zarr array, or of the finest level of an OME-Zarr; planes are along the last two axes."""
    node = zarr.open(path, mode="r")
    return node if isinstance(node, zarr.Array) else node["0"]


def patches(image: Any, white: float, step: int, slot: int) -> torch.Tensor:
    """Patches at places that follow from step and slot alone: (BATCH / SLOTS, 1, PATCH, PATCH)."""
    rng = np.random.default_rng((step, slot))
    found: list[Any] = []
    for _ in range(MOST_TRIES):
        if len(found) == BATCH // SLOTS:
            return torch.from_numpy(np.stack(found)[:, None])
        plane = tuple(int(rng.integers(n)) for n in image.shape[:-2])
        row, column = (int(rng.integers(max(1, n - PATCH + 1))) for n in image.shape[-2:])
        pixels = np.asarray(image[(*plane, slice(row, row + PATCH), slice(column, column + PATCH))])
        if np.isfinite(pixels).all():
            found.append(pixels.astype(np.float32) / np.float32(white))
    raise ValueError(f"next to no patches of {PATCH} x {PATCH} pixels are without holes")


def blind_loss(network: torch.nn.Module, patch: torch.Tensor) -> torch.Tensor:
    """Squared error of the prediction of masked pixels, from their neighbours."""
    count, _, rows, columns = patch.shape
    number = max(1, round(MASKED * rows * columns))
    inside = (rows - 4) * (columns - 4)
    places = torch.stack([torch.randperm(inside)[:number] for _ in range(count)])
    row, column = places // (columns - 4) + 2, places % (columns - 4) + 2
    sample = torch.arange(count)[:, None].expand_as(row)
    neighbours = torch.stack([patch[sample, 0, row + a, column + b] for a, b in AROUND])
    masked = patch.clone()
    masked[sample, 0, row, column] = neighbours.median(0).values
    predicted = network(masked)
    wrong = (predicted - patch)[sample, 0, row, column] / network.deviation.mean()
    return wrong.square().mean()


def tell(steps: int, step: int, loss: float) -> None:
    """Print the loss from time to time."""
    if step % max(1, steps // 10) == 0:
        print(f"step {step} of {steps}: loss {loss:.4f}", flush=True)


def train(group: Any, path: Path, steps: int, width: int, levels: int) -> dict[str, torch.Tensor]:
    """Train on the ranks of a group; return the weights."""
    torch.manual_seed(0)
    image = opened(path)
    white = float(np.iinfo(image.dtype).max) if image.dtype.kind in "iu" else 1.0
    network = BlindUNet(1, width, levels)
    first = torch.cat([patches(image, white, NO_STEP, slot) for slot in range(SLOTS)])
    network.mean.fill_(float(first.mean()))
    network.deviation.fill_(float(first.std()))
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    torch_group.fit(
        group,
        network,
        partial(patches, image, white),
        blind_loss,
        optimizer,
        steps=steps,
        slots=SLOTS,
        scheduler=scheduler,
        checkpoint=f"{path.resolve()}.training",
        report=partial(tell, steps),
    )
    Path(f"{path.resolve()}.training").unlink(missing_ok=True)
    weights: dict[str, torch.Tensor] = network.state_dict()
    return weights


def main() -> None:
    """Train, save, and say what to write into a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", type=Path, help="noisy image: a Zarr array or OME-Zarr")
    parser.add_argument("weights", type=Path, help="file to write, .safetensors")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolutions")
    parser.add_argument("--levels", type=int, default=2, help="reductions by 2")
    request = parser.parse_args()
    with halotile.DistributedContext(workers=request.workers) as ctx:
        weights, *_ = ctx.run_torch(
            train, request.image, request.steps, request.width, request.levels, retries=2
        )
    save_file(weights, request.weights)
    print(f"denoiser: {{name: unet, weights: {request.weights}}}")


if __name__ == "__main__":
    main()
