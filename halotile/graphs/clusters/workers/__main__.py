"""The command that starts a worker on another machine: ``python -m halotile.graphs.clusters.workers ADDRESS [options of dask worker]``.

It listens on the address of this machine on the way to the scheduler, or on that of ``--interface``, and nowhere else.
With ``--share 1/4`` it takes the second quarter of the GPUs that it may see.
"""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import dask
from distributed.cli.dask_worker import main as dask_worker

from halotile.graphs.clusters.common.machine import cores_beside, gpus_here
from halotile.graphs.clusters.common.security import LOOPBACK, address_of_interface, address_towards, host_of
from halotile.graphs.clusters.slurm_alloc import requeue_orphan
from halotile.graphs.clusters.workers.fork_server import mark_leftovers
from halotile.graphs.clusters.workers.settings import SETTINGS, keep_compiled_code_at_home, private_scratch
from halotile.graphs.clusters.workers.worker import OwnWorker

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Its web server, which it has without pages too, would otherwise listen on every interface.
PRIVATE = ("--no-dashboard", "--dashboard-address", f"{LOOPBACK}:0")
OWN_WORKER = f"{OwnWorker.__module__}.{OwnWorker.__qualname__}"
LEVEL = "DASK_LOGGING__DISTRIBUTED"
QUIET = "warning"  # the logs are for errors


def main(words: Sequence[str] | None = None) -> None:
    """Be a worker until the scheduler is gone."""
    parser = argparse.ArgumentParser(prog="python -m halotile.graphs.clusters.workers", allow_abbrev=False)
    parser.add_argument("address")
    parser.add_argument("--interface")
    parser.add_argument("--share")
    own, others = parser.parse_known_args(words)
    if own.share and (visible := os.environ.get(VISIBLE) or ",".join(gpus_here().names)):
        os.environ[VISIBLE] = share_of(visible, own.share)
        keep_beside_gpu(os.environ[VISIBLE])
    host = address_of_interface(own.interface) if own.interface else address_towards(host_of(own.address))
    keep_compiled_code_at_home()
    mark_leftovers()
    level = os.environ.setdefault(LEVEL, QUIET)
    logging.getLogger("distributed").setLevel(level.upper())
    encrypted = own.address.startswith("tls://")
    with (
        dask.config.set(SETTINGS | {"distributed.comm.require-encryption": encrypted}),
        private_scratch() as scratch,
        errors_described(own.address),
    ):
        # Of an option that occurs twice, as it may with dask-jobqueue's configuration, the last counts.
        fixed = ["--nthreads", "1", "--local-directory", scratch, "--worker-class", OWN_WORKER]
        try:
            dask_worker([own.address, "--host", host, *PRIVATE, *others, *fixed])
        finally:
            requeue_orphan(own.address)


@contextmanager
def errors_described(address: str) -> Iterator[None]:
    """End with one line, the last of the log, when an error keeps a worker from its scheduler."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        cause: BaseException = error
        while (deeper := cause.__cause__ or cause.__context__) is not None:
            cause = deeper
        sys.exit(
            f"no worker on {socket.gethostname()}: the scheduler at {address} does not answer it "
            f"({type(cause).__name__}: {cause})"
        )


def keep_beside_gpu(devices: str) -> None:
    """Run on those of the permitted cores that the first of some GPUs is connected to, as a worker of dask-cuda does."""
    first = devices.split(",")[0]
    with suppress(Exception):  # without dask-cuda or NVML all cores stay allowed
        near = os.sched_getaffinity(0) & set(cores_beside(int(first) if first.isdigit() else first))
        os.sched_setaffinity(0, near or os.sched_getaffinity(0))


def share_of(devices: str, share: str) -> str:
    """The GPUs of one of several workers on a machine; where there are fewer, some are shared.

    >>> share_of("0,1,2,3", "1/2"), share_of("4,6", "1/2"), share_of("0,1", "3/4")
    ('2,3', '6', '1')
    """
    every = devices.split(",")
    number, count = map(int, share.split("/"))
    first = number * len(every) // count
    return ",".join(every[first : max(first + 1, (number + 1) * len(every) // count)])


if __name__ == "__main__":
    main()
