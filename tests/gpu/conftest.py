"""Whether there is a GPU, and what the tests take in its place when they are rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halotile.tasks.devices.gpu import Card


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> str:
    """``cuda``, or ``cpu`` where the tests are rehearsed; what needs it is skipped, or fails, where there is none."""
    asked: str = pytestconfig.getoption("--gpu-device")
    if asked == "cpu" or torch.cuda.is_available():
        return "cpu" if asked == "cpu" else "cuda"
    why = "no GPU here: torch sees no CUDA device"
    if asked == "cuda":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture
def card(gpu: str) -> Card:
    """The card in this process."""
    return Card("cuda:0" if gpu == "cuda" else "cpu")


@pytest.fixture(params=[False, True], ids=["asked", "recorded"])
def any_card(card: Card, request: pytest.FixtureRequest) -> Card:
    """The card, and the card that records."""
    return card.recording() if request.param else card


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Libraries of a card warn of what they cannot do and do otherwise: that is no failure."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default::UserWarning"))
