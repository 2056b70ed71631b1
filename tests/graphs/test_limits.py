"""Limits on the memory of a process, whatever an input asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from halotile.cli import exits
from halotile.graphs.clusters.base import RunningCluster

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
from halotile.tasks.devices.memory_limits import allow_memory

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
from halotile.tasks.devices.memory_limits import allow_memory, size_limited

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

WHILE_TRIED = """
import numpy as np, psutil, resource
from halotile.errors import MemoryRefused
from halotile.graphs.kinds.sections import Run, Tile
from halotile.graphs.waiting import no_report
from halotile.graphs.plans.trials.denoiser_trials import tried
from halotile.tasks.denoisers.function import GivenFunction

class Free:
    available = 2**28

psutil.virtual_memory = Free
def hungry(image):
    return image + np.ones(2**26)[:1]  # 512 MiB
try:
    tried(GivenFunction(call=hungry, depth=0), Tile(), (500, 500), None, run=Run(), report=no_report)
except MemoryRefused as error:
    print("needs more memory than is free for an image of shape" in str(error))
print(resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY, hungry(0).nbytes)
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


def test_a_function_takes_no_more_than_is_free_while_it_is_tried() -> None:
    assert printed(WHILE_TRIED) == ["True", "True", "8"]


def test_a_command_takes_no_more_than_was_free() -> None:
    assert 0 < int(printed(COMMAND)[-1]) < psutil.virtual_memory().total + GIB


def test_it_is_told_in_words() -> None:
    error = MemoryError("Unable to allocate 93.1 GiB for an array with shape (100000000000,)")
    assert exits.exit_code(error) == exits.REFUSED
    assert "unexpected" not in exits.message_of(error)
    assert "restore it from its origin" in exits.message_of(error)
