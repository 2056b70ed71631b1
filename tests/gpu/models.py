"""Networks that jobs of these tests import."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tests.networks import convolutions


class Faults(torch.nn.Module):  # type: ignore[misc]
    """A small network that tells a folder which process it runs in and which GPUs that sees, and takes its time there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.layers = convolutions()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The network on a batch."""
        if batch.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("what is recorded would neither tell nor take its time")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        (self.folder / f"seen-{os.getpid()}").write_text(f"{batch.device.type} {visible}")
        time.sleep(float((self.folder / "pace").read_text()))
        result: torch.Tensor = self.layers(batch)
        return result


def told(folder: str) -> torch.nn.Module:
    """One that tells."""
    return Faults(folder)
