"""What all tests share: one real cluster for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two worker processes over TLS, started once."""
    with local.start(workers=2, memory_bytes=4 * 2**30) as running:
        yield running
