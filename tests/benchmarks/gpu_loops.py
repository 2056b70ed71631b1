"""Training and ptychography on a GPU, beside CDTools and a bare loop, as programs: ``python gpu_loops.py NAME FOLDER EDGE DEVICE [SUBJECT]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks import known_scans, ptychography, training
from tests.benchmarks.gpu_programs import one_precision, seconds_of
from tests.benchmarks.measuring import Result, main

EPOCHS = {"cuda": 40, "cpu": 1}
STEPS = {"cuda": 400, "cpu": 10}
BATCH, PATCH = 16, 64
SCANS = {"petra": {"batch": 10, "lr": 0.04}, "far": {"batch": 64, "lr": 0.02}}


def _exact(folder: Path) -> Path:
    """A scan with exact intensities, without the suffix of its files."""
    known_scans.written(folder, "exact")
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


if __name__ == "__main__":
    main(globals())
