"""Networks that jobs of these tests import."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from distributed import Worker

from tests.networks import convolutions


class Reporter(torch.nn.Module):  # type: ignore[misc]
    """A small, slow network that writes the process it runs in and its visible GPUs to a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.layers = convolutions()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The network on a batch."""
        if batch.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a recorded call would neither write nor wait")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        role = "worker" if Worker._instances else "trial"
        (self.folder / f"{role}-{os.getpid()}").write_text(f"{batch.device.type} {visible}")
        time.sleep(float((self.folder / "pace").read_text()))
        result: torch.Tensor = self.layers(batch)
        return result


def build(folder: str) -> torch.nn.Module:
    """The network for a folder."""
    return Reporter(folder)
