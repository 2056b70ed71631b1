"""Tests of what workers do run as workers do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def every_test_as_in_a_worker(as_in_a_worker: None) -> None:
    """One thread."""
