"""Folders with images, each with the configuration of a job on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.engine import Engine

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
    """The configuration of the README, beside the image it names."""
    np.save(tmp_path / "noisy.npy", np.zeros((96, 80), np.float32))
    path = tmp_path / "config.yaml"
    path.write_text(README_CONFIG)
    return path


RECONSTRUCTION = """\
version: 1
job: reconstruct
output: {path: x.zarr, shard: 64, chunk: 32}
operators:
  - {name: blur, kernel: k0.npy, boundary: circular, data: y0.npy, noise_sigma: 0.03}
  - {name: mask, mask: m.npy, data: y1.npy}
fidelity: {name: l2}
prior: {name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}
solver: {name: pgd, iterations: 4, step: auto, tol: 1.0e-4, checkpoint_every: 1}
tile: {depth: auto, axes: auto}
run: {workers: 2}
shape: auto
start: truth.npy
reference: truth.npy
exact: false
"""


@pytest.fixture
def reconstruction(tmp_path: Path) -> Path:
    """A reconstruction from a blurred copy and from one with pixels left out."""
    pixels = np.random.default_rng(0).random((96, 80), np.float32)
    for name in ("y0", "y1", "m", "truth"):
        np.save(tmp_path / f"{name}.npy", pixels)
    np.save(tmp_path / "k0.npy", np.full((3, 3), 1 / 9, np.float32))
    path = tmp_path / "reconstruct.yaml"
    path.write_text(RECONSTRUCTION)
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that remembers what it was asked."""
    made = Engine()
    for place, names in (
        ("cli.running", ("make_plan", "count_done", "check_outputs")),
        ("graphs.runs.driver", ("run",)),
    ):
        for name in names:
            monkeypatch.setattr(f"halotile.{place}.{name}", getattr(made, name))
    return made
