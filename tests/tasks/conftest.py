"""Fixtures for tests of workers: one thread, and a user's own modules and files."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from tests.tasks.denoising import NETWORK_DEPTH, dncnn_tensors, network, sharpen


@pytest.fixture(autouse=True)
def every_test_as_in_a_worker(as_in_a_worker: None) -> None:
    """Run every test with one thread."""


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own."""
    module = types.ModuleType("lab")
    vars(module).update(network=network, sharpen=sharpen, number=3, not_a_network=lambda: "text")
    monkeypatch.setitem(sys.modules, "lab", module)


@pytest.fixture(scope="session")
def dncnn_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small DnCNN."""
    path = tmp_path_factory.mktemp("weights") / "dncnn.pth"
    torch.save(dncnn_tensors([f"model.{2 * i}" for i in range(NETWORK_DEPTH)]), path)
    return path
