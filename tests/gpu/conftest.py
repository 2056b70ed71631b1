"""Fixtures for a GPU, or for a CPU in its place when the tests are rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halotile.tasks.devices.gpu import Gpu


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> str:
    """``cuda``, or ``cpu`` in a rehearsal; without a GPU the test is skipped, or fails if a GPU was requested."""
    requested: str = pytestconfig.getoption("--gpu-device")
    if requested == "cpu" or torch.cuda.is_available():
        return "cpu" if requested == "cpu" else "cuda"
    why = "no GPU here: torch sees no CUDA device"
    if requested == "cuda":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture
def gpu_device(gpu: str) -> Gpu:
    """The GPU in this process."""
    return Gpu("cuda:0" if gpu == "cuda" else "cpu")


@pytest.fixture(params=[False, True], ids=["launched", "recorded"])
def any_gpu(gpu_device: Gpu, request: pytest.FixtureRequest) -> Gpu:
    """The GPU without and with recording."""
    return gpu_device.with_recording() if request.param else gpu_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow warnings of GPU libraries that fall back to another method."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default::UserWarning"))
