"""Programs beside the jobs of the table of a GPU.

MONAI and deepinv.distributed; training and ptychography, beside CDTools and a bare loop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import ptychography, training
from tests.benchmarks.data import pixels_of
from tests.benchmarks.gpu_programs import Subject, best_of, one_precision, seconds_of, timed
from tests.benchmarks.measuring import Result, deepinv_denoiser

PEER_WINDOW = 2048
"""Windows of the peers, where they are not left at their defaults: as large as pays, so that little is computed twice."""


def _peer(folder: Path, edge: int, device: str, subject: str) -> tuple[Any, Any]:
    """The model as plain torch, in the memory layout in which the bare forward is faster, and the whole image, on the device."""
    import torch

    one_precision(benchmark=True)
    model = next(iter(Subject.named(subject).models(folder).values()))
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
    share = (2 * Subject.named(subject).reach / window) if overlap == "least" and window < edge else 0.25
    return _peer_rate(
        lambda: sliding_window_inference(pixels, (window, window), 1, forward, overlap=share), device, edge
    )


def deepinv(folder: Path, edge: int, device: str, subject: str, patches: str) -> Result:
    """deepinv.distributed in one process with image and result on the device: large patches, or its defaults."""
    from deepinv.distributed import DistributedContext, distribute

    forward, pixels = _peer(folder, edge, device, subject)
    reach = math.ceil(Subject.named(subject).reach / 8) * 8
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


EPOCHS = {"cuda": 40, "cpu": 1}
STEPS = {"cuda": 400, "cpu": 10}
BATCH, PATCH = 16, 64
SCANS = {"petra": {"batch": 10, "lr": 0.04}, "far": {"batch": 64, "lr": 0.02}}


def _exact(folder: Path) -> Path:
    """A scan with exact intensities, without the suffix of its files."""
    ptychography.written(folder, "exact")
    return folder / "exact"


def scan(folder: Path, edge: int, device: str, subject: str) -> Result:
    """Seconds of an epoch of a scan, on one worker."""
    import halotile

    if subject == "petra":
        opened = ptychography.petra(folder)
    else:
        opened = halotile.ptychography.open(_exact(folder).with_suffix(".zarr"), modes=2)
    given: Any = {"cluster": {"kind": "local"}, "device_mode": "gpu" if device == "cuda" else "cpu"}
    options = {"lr": SCANS[subject]["lr"], "batch_size": SCANS[subject]["batch"]}
    with halotile.DistributedContext(workers=1, **given) as context:
        adam = halotile.ptychography.Adam(opened, context=context)
        return {"seconds": ptychography.epoch_seconds(adam, EPOCHS[device], **options)}


def cdtools(folder: Path, edge: int, device: str, subject: str) -> Result:
    """The same by CDTools."""
    request: dict[str, Any] = dict(ptychography.PETRA_REQUEST)
    if subject != "petra":
        request = {"cxi": str(_exact(folder).with_suffix(".cxi")), "modes": 2}
    epochs = EPOCHS[device] + ptychography.WARM
    request["device"] = device
    return {"seconds": ptychography.cdtools_seconds(folder, request, SCANS[subject], epochs, 1)}


def step(folder: Path, edge: int, device: str) -> Result:
    """Seconds of a step of training, as a job of one worker."""
    source = training.noisy(folder, "retina", "gaussian", edge)
    weights = folder / f"step-{device}.safetensors"
    return training.train(
        source, weights, steps=STEPS[device], run={"workers": 1, "device": device}, cluster={"kind": "local"}
    )


def loop(folder: Path, edge: int, device: str) -> Result:
    """Seconds of a forward and a backward pass of the same network and of Adam, on pixels that are on the device."""
    import torch

    from halotile.tasks.denoisers.common.layers import BlindUNet

    one_precision(benchmark=True)
    network = BlindUNet(1, 32, 2).to(device)
    adam = torch.optim.Adam(network.parameters())
    pixels = torch.rand(BATCH, 1, PATCH, PATCH, device=device)

    def once() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            adam.zero_grad()
            (network(pixels.clone()) - pixels.clone()).square().mean().backward()
            adam.step()

    return {"seconds": seconds_of(once, device)}
