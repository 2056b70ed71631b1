"""A small DnCNN trained in a minute or two on the images that come with scikit-image.

::

    python examples/train_dncnn.py dncnn.safetensors
    recon-cli run job.yaml      # denoiser: {name: dncnn, weights: dncnn.safetensors, depth: 7, width: 32}

The network learns the noise of grey images in [0, 1] with gaussian noise of ``--sigma``. It is an example, not
a good denoiser.
"""

from __future__ import annotations

import argparse
import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

INPUT_KEYS = ("camera", "coins", "moon", "brick", "grass", "gravel", "cell", "page")
PATCH, BATCH = 40, 8


def network(depth: int, width: int) -> torch.nn.Sequential:
    """A stack of ``depth`` convolutions with ReLU between them; its result is the noise."""
    sizes = [1] + [width] * (depth - 1) + [1]
    layers: list[torch.nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [torch.nn.Conv2d(into, out, 3, padding=1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).to(memory_format=torch.channels_last)


def images() -> list[NDArray[np.float32]]:
    """Grey images as float32 in [0, 1]."""
    from skimage import data

    return [np.asarray(getattr(data, name)(), np.float32) / np.float32(255) for name in INPUT_KEYS]


def patches(sources: list[NDArray[np.float32]], rng: np.random.Generator) -> torch.Tensor:
    """One batch of patches, turned and mirrored at random: (BATCH, 1, PATCH, PATCH)."""
    batch = []
    for image in (sources[i] for i in rng.integers(len(sources), size=BATCH)):
        y, x = (int(rng.integers(n - PATCH + 1)) for n in image.shape)
        patch = np.rot90(image[y : y + PATCH, x : x + PATCH], int(rng.integers(4)))
        batch.append(patch[:, :: rng.choice((-1, 1))])
    return torch.from_numpy(np.stack(batch)[:, None].copy())


def train(steps: int, sigma: float, depth: int, width: int, seed: int = 0) -> torch.nn.Sequential:
    """Train a network to tell the noise from the image."""
    torch.manual_seed(seed)
    rng, sources = np.random.default_rng(seed), images()
    stack = network(depth, width)
    optimizer = torch.optim.Adam(stack.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        clean = patches(sources, rng)
        noise = sigma * torch.randn_like(clean)
        loss = torch.nn.functional.mse_loss(stack(clean + noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            print(f"step {step} of {steps}: {-10 * np.log10(loss.item()):.2f} dB on the last batch", flush=True)
    return stack


def save(stack: torch.nn.Sequential, path: Path) -> str:
    """Write the weights as safetensors, the layers named model.0, model.1, ...; return the SHA-256."""
    convolutions = [layer for layer in stack if isinstance(layer, torch.nn.Conv2d)]
    tensors = {
        f"model.{place}.{kind}": parameter.detach().contiguous()
        for place, layer in enumerate(convolutions)
        for kind, parameter in layer.named_parameters()
    }
    save_file(tensors, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Train, save, and say what to write into a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights", type=Path, help="file to write, .safetensors")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sigma", type=float, default=0.1, help="standard deviation of the noise")
    parser.add_argument("--depth", type=int, default=7, help="number of convolutions")
    parser.add_argument("--width", type=int, default=32, help="channels between them")
    request = parser.parse_args()
    checksum = save(train(request.steps, request.sigma, request.depth, request.width), request.weights)
    print(f"denoiser: {{name: dncnn, weights: {request.weights}, depth: {request.depth}, width: {request.width},")
    print(f"           sha256: {checksum}}}")


if __name__ == "__main__":
    main()
