"""Limits on the memory of a process, whatever an input asks for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from halotile.cli import exits
from halotile.errors import MemoryRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.kinds.sections import Run, Tile
from halotile.graphs.plans.trials.denoiser_trials import tried
from halotile.graphs.waiting import no_report
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import Function, GivenFunction

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone keeps to it")

GIB = 2**30


def take(nbytes: int) -> int:
    """Allocate memory without using it."""
    return np.empty(nbytes, np.uint8).nbytes


@pytest.mark.cluster
def test_a_worker_is_refused_what_goes_beyond_its_memory(cluster: RunningCluster) -> None:
    """A machine with 4 GiB; the real one may have far more, or overcommit."""
    assert cluster.client.submit(take, GIB, pure=False).result(timeout=60) == GIB
    refused = cluster.client.submit(take, 6 * GIB, pure=False).exception(timeout=60)
    assert isinstance(refused, MemoryError)


LIFTED = """
import numpy as np
from halotile.tasks.devices.device import allow_memory

def take():
    try:
        return np.empty(2**29, np.uint8).nbytes
    except MemoryError:
        return "refused"

allow_memory(2**28)
print(take())
allow_memory(None)
print(take())
"""

FOR_A_WHILE = """
import numpy as np
from halotile.tasks.devices.device import allow_memory, size_limited

def take(nbytes):
    try:
        return np.empty(nbytes, np.uint8).nbytes
    except MemoryError:
        return "refused"

with size_limited(2**20):
    print(take(2**28))
allow_memory(2**31)
with size_limited(2**20):
    print(take(2**29))
print(take(2**29))
"""

COMMAND = """
import resource, sys
from halotile.cli.main import main

sys.argv = ["recon-cli", "--version"]
try:
    main()
finally:
    print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""


def printed(code: str) -> list[str]:
    """The output of another process, which gives freed memory back at once."""
    usual = {name: word for name, word in os.environ.items() if not name.startswith("MALLOC_")}
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60, env=usual).split()


def test_a_limit_holds_until_it_is_lifted() -> None:
    assert printed(LIFTED) == ["refused", str(2**29)]


def test_a_process_is_limited_for_a_while_if_it_is_a_worker_of_ours() -> None:
    """Workers have a limit. In another process, other threads may do unrelated work."""
    assert printed(FOR_A_WHILE) == [str(2**28), "refused", str(2**29)]


def hungry(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """It uses 3 GiB, if it gets them."""
    return image + np.ones(3 * GIB // 8)[:1].astype(np.float32)


@pytest.mark.parametrize(
    "denoiser", [GivenFunction(call=hungry, depth=0), Function(import_=f"{__name__}:hungry", depth=0)]
)
def test_a_function_is_tried_with_the_memory_of_a_worker(denoiser: Denoiser) -> None:
    run = Run(memory_per_worker="2GiB")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        MemoryRefused, match=r"memory_per_worker is 2 GiB, and .*hungry needs more than that to be tried"
    ):
        tried(denoiser, Tile(), (500, 500), None, run=run, report=no_report)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; it would be 3 GiB here


def test_a_command_takes_no_more_than_was_free() -> None:
    assert 0 < int(printed(COMMAND)[-1]) < psutil.virtual_memory().total + GIB


def test_it_is_told_in_words() -> None:
    error = MemoryError("Unable to allocate 93.1 GiB for an array with shape (100000000000,)")
    assert exits.exit_code(error) == exits.REFUSED
    assert "unexpected" not in exits.message_of(error)
    assert "restore it from its origin" in exits.message_of(error)
