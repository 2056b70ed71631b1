"""What the three examples share: an image, a small network that learns to denoise it, and a row of results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from deepinv.models import DnCNN
from skimage import data


def image(name: str, size: int) -> torch.Tensor:
    """The middle of a grey image of scikit-image in [0, 1], of shape (1, 1, size, size) at most."""
    pixels = np.asarray(getattr(data, name)(), np.float32) / np.float32(255)
    top, left = (max(0, (n - size) // 2) for n in pixels.shape)
    return torch.from_numpy(pixels[None, None, top : top + size, left : left + size].copy())


def trained(steps: int, sigma: float) -> DnCNN:
    """A small DnCNN that has seen noise of ``sigma`` on other images; seconds, not a good denoiser."""
    torch.manual_seed(0)
    network = DnCNN(in_channels=1, out_channels=1, depth=5, nf=16, pretrained=None)
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    sources = [image(name, 512) for name in ("coins", "brick", "moon", "page")]
    for step in range(steps):
        clean = torch.cat([patch(sources[(step + k) % len(sources)]) for k in range(8)])
        loss = torch.nn.functional.mse_loss(network(clean + sigma * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def patch(source: torch.Tensor, edge: int = 40) -> torch.Tensor:
    """A square of an image, somewhere."""
    y, x = (int(torch.randint(n - edge + 1, ())) for n in source.shape[-2:])
    return source[..., y : y + edge, x : x + edge]


def save_row(path: Path, images: Mapping[str, torch.Tensor]) -> None:
    """Draw images side by side, each with its title, and write them as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(images), figsize=(4 * len(images), 4.4))
    for axis, (title, image) in zip(axes, images.items(), strict=True):
        axis.imshow(image[0, 0].cpu(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(title)
        axis.axis("off")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"drawn: {path}")
