"""deepinv's own tests of its distributed framework, run on ours.

``deepinv/tests/test_distributed.py`` is taken from the installed package. ``DistributedContext`` and ``distribute``
are put in the place of deepinv's; its harness, which starts one process for each rank, is
replaced by a call in this process with a cluster of as many workers. What fails is in :data:`FAILING`, each with its
reason.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from halotile import DistributedContext, distribute
from halotile.graphs.clusters.base import RunningCluster
from tests.cases import all_of
from tests.support import IN_THREADS

peer: Any = pytest.importorskip("deepinv.tests.test_distributed")

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]  # deepinv warns of its own defaults

FAILING = {
    "test_distributed_context_collectives[cpu_multi]": "raw process-group collectives: sums over ranks, and there is one",
    "test_distributed_parameter_autodetect[cpu_multi]": "each rank has data of its own by nature, and there is one rank",
    "test_processor_different_patch_sizes": "demands a ValueError for a patch as large as the image, which works here",
}


@pytest.fixture(scope="session")
def clusters(cluster: RunningCluster) -> Iterator[Callable[[int], RunningCluster]]:
    """A cluster of this number of workers, started on first use."""
    with ExitStack() as held:
        known = {cluster.workers: cluster}

        def of(workers: int) -> RunningCluster:
            if workers not in known:  # as threads of this process, which has imported deepinv already
                started = LocalCluster(n_workers=workers, **IN_THREADS)
                client = held.enter_context(Client(held.enter_context(started), set_as_default=False))
                known[workers] = RunningCluster(client, workers)
            return known[workers]

        yield of


@pytest.fixture(autouse=True)
def _substituted(clusters: Callable[[int], RunningCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace deepinv's context and functions by halotile's."""
    size = [1]

    def context(**options: Any) -> DistributedContext:
        return DistributedContext(cluster=clusters(size[0]), **options)

    def run(
        test: Callable[..., Any],
        device_config: Mapping[str, Any],
        test_args: Mapping[str, Any] | None = None,
        timeout_per_rank: float = 0.0,
    ) -> list[Any]:
        if device_config["skip_reason"]:
            pytest.skip(device_config["skip_reason"])
        size[0] = device_config["world_size"]
        return [test(0, device_config["world_size"], dict(test_args or {}))]

    monkeypatch.setattr(peer, "DistributedContext", context)
    monkeypatch.setattr(peer, "distribute", distribute)
    monkeypatch.setattr(peer, "_distribute_base_optim", distribute)
    monkeypatch.setattr(peer, "run_distributed_test", run)
    # The pretrained weights would be downloaded, and the backward passes of 32 million of them take minutes.
    small = functools.partial(peer.DRUNet, pretrained=None, nc=[4, 8, 8, 8], nb=1)
    monkeypatch.setattr(peer, "DRUNet", small)


@pytest.fixture(autouse=True)
def _failing(request: pytest.FixtureRequest) -> None:
    for name, reason in FAILING.items():
        if request.node.name == name or request.node.name.startswith(f"{name}["):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


num_operators = peer.num_operators
gather_strategy = peer.gather_strategy
device_config = peer.device_config
DEVICES = pytest.mark.parametrize(
    "device_config",
    all_of(["cpu_single", "cpu_multi", "gpu_single", "gpu_multi"], thorough=["cpu_single"]),
    indirect=True,
)
globals().update(
    {
        name: DEVICES(thing) if "device_config" in inspect.signature(thing).parameters else thing
        for name, thing in vars(peer).items()
        if name.startswith("test_")
    }
)


def test_the_documentation_lists_the_failures_with_their_reasons() -> None:
    page = (Path(__file__).parents[2] / "docs/distribute.md").read_text()
    listed = dict(re.findall(r"^\| `(test_\S+)` \| (.+) \|$", page, re.MULTILINE))
    assert listed == FAILING
