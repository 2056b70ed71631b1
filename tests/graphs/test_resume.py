"""Going on with a run: from any journal, in another way, after the disk was full."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halotile.graphs.clusters.base import Cluster
from tests.faults import BLOCKS, Scene

pytestmark = pytest.mark.cluster


@pytest.fixture
def half_done(scene: Scene, cluster: Cluster) -> Scene:
    """A run that ended with only some of its blocks done."""
    from halotile.errors import BlockFailed

    for block in range(20, 40):
        scene.make_trouble("raise", block)
    with pytest.raises(BlockFailed):
        scene.run(cluster, retries=0)
    for block in range(20, 40):
        (scene.folder / f"raise-{block}").unlink()
    assert scene.journalled() == set(range(BLOCKS)) - set(range(20, 40))
    return scene


def test_probe(half_done: Scene, check_resumes: Callable[[], None]) -> None:
    check_resumes()
