"""MONAI and deepinv.distributed beside the table of a GPU, as programs of their own: ``python gpu_peers.py NAME FOLDER EDGE DEVICE SUBJECT WAY``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.data import pixels_of
from tests.benchmarks.gpu_programs import Subject, best_of, one_precision, timed
from tests.benchmarks.measuring import Result, deepinv_denoiser, main

PEER_WINDOW = 2048
"""Windows of the peers, where they are not left at their defaults: as large as pays, so that little is computed twice."""


def _peer(folder: Path, edge: int, device: str, subject: str) -> tuple[Any, Any]:
    """The model as plain torch, in the memory layout in which the bare forward is faster, and the whole image, on the device."""
    import torch

    one_precision(benchmark=True)
    model = next(iter(Subject.of(subject).models(folder).values()))
    known = best_of(folder, device, subject)
    last = not known.exists() or json.loads(known.read_text())[0][3]
    layout = torch.channels_last if last else torch.contiguous_format
    model = model.to(device=device, memory_format=layout)
    pixels = torch.from_numpy(pixels_of(folder, edge))[None, None]

    def forward(windows: Any) -> Any:
        return model(windows.contiguous(memory_format=layout))

    return forward, pixels.to(device)


def _peer_rate(call: Callable[[], Any], device: str, edge: int) -> Result:
    """Millions of pixels a second of the second of two calls."""
    import torch

    with torch.inference_mode():
        timed(call, device, 1)
        return {"mpix_per_s": edge**2 / 1e6 / timed(call, device, 1)}


def monai(folder: Path, edge: int, device: str, subject: str, overlap: str) -> Result:
    """MONAI's sliding window with image and result on the device: the least overlap without seams, or its default."""
    from monai.inferers import sliding_window_inference

    forward, pixels = _peer(folder, edge, device, subject)
    window = min(PEER_WINDOW, edge)
    share = (2 * Subject.of(subject).reach / window) if overlap == "least" and window < edge else 0.25
    return _peer_rate(
        lambda: sliding_window_inference(pixels, (window, window), 1, forward, overlap=share), device, edge
    )


def deepinv(folder: Path, edge: int, device: str, subject: str, patches: str) -> Result:
    """deepinv.distributed in one process with image and result on the device: large patches, or its defaults."""
    from deepinv.distributed import DistributedContext, distribute

    forward, pixels = _peer(folder, edge, device, subject)
    reach = math.ceil(Subject.of(subject).reach / 8) * 8
    patch, overlap, batch = 256, 64, 16
    if patches == "large":
        patch, batch = min(PEER_WINDOW, edge // 2), 1
        overlap = min(reach, patch // 2)
    with DistributedContext(device_mode="gpu" if device == "cuda" else "cpu") as context:
        denoiser = distribute(
            deepinv_denoiser(forward),
            context,
            tiling_dims=(-2, -1),
            patch_size=patch,
            overlap=overlap,
            max_batch_size=batch,
        )
        return _peer_rate(lambda: denoiser(pixels, 0.1), device, edge)


if __name__ == "__main__":
    main(globals())
