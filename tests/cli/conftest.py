"""A folder with a picture and the configuration that the README opens with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

README_CONFIG = """\
version: 1
job: denoise
input:    {path: noisy.npy, level: 0}
output:   {path: clean.zarr, overwrite: false, shard: auto, chunk: 256, codec: lz4}
denoiser: {name: tv, strength: 0.1}
tile:     {size: auto, depth: auto, boundary: auto, batch: auto}
run:      {workers: 2, memory_per_worker: 4GiB, retries: 3, on_bad_block: fail}   # or quarantine
cluster:  {kind: local}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of the README, beside the picture it names."""
    np.save(tmp_path / "noisy.npy", np.zeros((96, 80), np.float32))
    path = tmp_path / "config.yaml"
    path.write_text(README_CONFIG)
    return path
