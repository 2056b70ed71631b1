"""Images and weights that the benchmarks run on: made once, from fixed seeds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

CNN = {"depth": 7, "width": 32}
CNN_REACH = CNN["depth"]
BOX = 9


def image(folder: Path, edge: int, chunk: int = 512, squares: int = 1, dtype: str = "float32") -> Path:
    """A noisy image of 0 to 1, or to 50,000 of integers, as a plain Zarr of uncompressed chunks: squares one below the other."""
    path = folder / f"image-{squares}-{edge}-{chunk}{'' if dtype == 'float32' else f'-{dtype}'}.zarr"
    if not path.exists():
        array = zarr.create_array(
            path, shape=(squares * edge, edge), dtype=dtype, chunks=(chunk, chunk), compressors=None
        )
        rng = np.random.default_rng(0)
        for row in range(0, squares * edge, chunk):
            y = np.arange(row, row + chunk, dtype="float32")[:, None]
            smooth = 0.5 + 0.3 * np.sin(y / 37) * np.cos(np.arange(edge, dtype="float32")[None] / 53)
            noisy = smooth + 0.1 * rng.standard_normal((chunk, edge), dtype="float32")
            array[row : row + chunk] = noisy if dtype == "float32" else (noisy.clip(0, 1) * 50_000).astype(dtype)
    return path


def pixels_of(folder: Path, edge: int, chunk: int = 512) -> NDArray[Any]:
    """The same image in memory."""
    pixels: NDArray[Any] = zarr.open_array(image(folder, edge, chunk), mode="r")[...]
    return pixels


def weights(folder: Path) -> Path:
    """Random weights of the small network, the same every time."""
    import torch
    from safetensors.torch import save_file

    path = folder / "cnn.safetensors"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        state = {}
        depth, width = CNN["depth"], CNN["width"]
        for layer in range(depth):
            rows, columns = (1 if layer == depth - 1 else width), (1 if layer == 0 else width)
            bound = 1 / np.sqrt(9 * columns)
            draw = torch.rand((rows, columns, 3, 3), generator=generator)
            state[f"layers.{layer}.weight"] = (2 * draw - 1) * bound
            state[f"layers.{layer}.bias"] = (2 * torch.rand(rows, generator=generator) - 1) * bound
        save_file(state, path)
    return path


def network(folder: Path) -> Any:
    """The small network as every peer runs it: plain torch, channels last, no gradients."""
    import torch
    from safetensors.torch import load_file

    class Plain(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            sizes = [1] + [CNN["width"]] * (CNN["depth"] - 1) + [1]
            self.layers = torch.nn.ModuleList(
                torch.nn.Conv2d(into, out, 3, padding=1) for into, out in itertools.pairwise(sizes)
            )

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            signal = batch
            for layer in self.layers[:-1]:
                signal = torch.relu_(layer(signal))
            return batch - self.layers[-1](signal)

    model = Plain()
    model.load_state_dict(load_file(weights(folder)))
    return model.to(memory_format=torch.channels_last).eval().requires_grad_(False)


def our_network(folder: Path) -> Any:
    """The same network as halotile builds it."""
    import torch

    from halotile.tasks.denoisers.dncnn import DENOISER

    model: Any = DENOISER(weights=str(weights(folder)), depth=CNN["depth"], width=CNN["width"]).build()
    return model.to(memory_format=torch.channels_last)


def box(pixels: NDArray[Any]) -> NDArray[Any]:
    """The box filter that every program here runs."""
    from scipy.ndimage import uniform_filter

    filtered: NDArray[Any] = uniform_filter(pixels, BOX, mode="nearest")
    return filtered
