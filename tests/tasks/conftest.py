"""Tests of what workers do run as workers do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halotile.tasks.device import one_thread


@pytest.fixture(autouse=True)
def as_in_a_worker() -> Iterator[None]:
    """One thread: torch divides its work among several, and each has an end of its own."""
    with one_thread():
        yield
