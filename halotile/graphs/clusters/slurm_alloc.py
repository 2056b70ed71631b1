"""Inside a Slurm allocation (``sbatch``, ``salloc``): a job step for each worker, the scheduler in this process."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from halotile.errors import ClusterFailed, ConfigError, MemoryRefused
from halotile.graphs.clusters import base
from halotile.graphs.clusters.common.security import listening_address
from halotile.graphs.clusters.launches import slurm_allocation
from halotile.graphs.clusters.slurm import SYSTEM
from halotile.graphs.kinds import sections
from halotile.graphs.words import bytes_text, counted

if TYPE_CHECKING:
    from distributed import SpecCluster
    from distributed.security import Security

CONNECT_SECONDS = 5.0
# Seconds between checks where the machine of the driver answers, and the driver does not: it may just have ended.
ENDED_PAUSES = (2.0,) * 5
# Seconds between checks where the machine does not answer: Slurm takes minutes to notice that a node is lost.
LOST_PAUSES = (10.0,) * 60
NODES = "SLURM_JOB_NODELIST"  # set in every job step and batch script of an allocation


def detect(environment: base.Environment) -> base.ChosenCluster | None:
    """This kind in an allocation with `srun`; without it the workers are processes of this machine."""
    if "SLURM_JOB_ID" not in environment:
        return None
    if shutil.which("srun", path=environment.get("PATH")):
        return base.ChosenCluster("slurm-alloc", f"in the Slurm allocation {environment['SLURM_JOB_ID']}")
    return base.ChosenCluster(base.DEFAULT, "in a Slurm allocation, but there is no srun here")


def check(_: sections.Cluster) -> None:
    """Refuse to start outside of an allocation."""
    if NODES not in os.environ:
        job = os.environ.get("SLURM_JOB_ID")
        left = f"SLURM_JOB_ID is {job}, and {NODES} is not set" if job else "cluster.kind is slurm-alloc"
        raise ConfigError(
            f"{left}: this is no Slurm allocation. Begin one with salloc or sbatch, write kind: slurm for a job for each worker, or "
            "--cluster local (cluster: {kind: local}) for workers on this machine."
        )


def gives_gpus(run: sections.Run, environment: base.Environment) -> bool:
    """Return True where no two workers would share a GPU of the allocation."""
    if NODES not in environment:
        return False  # the cluster refuses to start
    workers = slurm_allocation.workers_in(environment, "cuda")[0] if run.workers == "auto" else run.count
    return workers > 0 and all(
        slot.gpus >= slot.node_workers for slot in slurm_allocation.slots_in(environment, workers)
    )


def count_workers(
    run: sections.Run, cluster: sections.Cluster, device: str, environment: base.Environment
) -> tuple[int, str] | None:
    """Number of workers that take all of the allocation."""
    from halotile.graphs.clusters.common.machine import requested_by

    if NODES not in environment:
        return None
    workers, why = slurm_allocation.workers_in(environment, device)
    if not workers:
        raise ConfigError(
            f"{requested_by(run, cluster)}, and Slurm lists no GPU in the allocation: with run.workers: auto there would be no worker. "
            "Leave it out to compute on CPUs, or ask Slurm for GPUs (--gres=gpu:1); where Slurm does not count them, write run.workers."
        )
    return workers, why


def check_memory(run: sections.Run, environment: base.Environment) -> None:
    """Refuse workers that may need more memory than the allocation has for them: Slurm would end the job."""
    if NODES not in environment:
        return
    wanted = sections.parse_bytes(run.memory_per_worker)
    nodes = {slot.node: slot for slot in slurm_allocation.slots_in(environment, run.count)}.values()
    room = {slot.node: slot.memory_bytes // wanted for slot in nodes if slot.memory_bytes is not None}
    tight = next((slot for slot in nodes if room.get(slot.node, slot.node_workers) < slot.node_workers), None)
    if tight is None or tight.memory_bytes is None:
        return
    fit = sum(min(slot.node_workers, room.get(slot.node, slot.node_workers)) for slot in nodes)
    raise MemoryRefused(
        f"run.memory_per_worker is {run.memory_per_worker}, and {counted(tight.node_workers, 'worker')} on {tight.node} may take "
        f"{bytes_text(wanted * tight.node_workers)}; the allocation has {bytes_text(tight.memory_bytes)} there. "
        f"Write run.memory_per_worker: {tight.memory_bytes // tight.node_workers // 2**20}MiB, "
        + (f"run.workers: {fit}, " if fit else "")
        + "or ask Slurm for more memory."
    )


TRAITS = base.ClusterTraits(gives_gpus=gives_gpus, count_workers=count_workers, check_memory=check_memory)


@contextmanager
def start(order: base.Order) -> Iterator[base.RunningCluster]:
    """Start workers as job steps of this allocation."""
    import dask
    from distributed import Scheduler, SpecCluster

    from halotile.graphs.clusters.launches.remote_cluster import supervised_cluster, worker_arguments
    from halotile.graphs.clusters.launches.slurm_steps import NodeSlots, WorkerStep, states_of

    check(order.choice)
    nodes = slurm_allocation.nodes_of(os.environ[NODES])
    interface = order.choice.interface or dask.config.get("jobqueue.slurm.interface", None)
    slots = NodeSlots(slurm_allocation.slots_in(os.environ, order.workers))

    def make(security: Security, logs: Path, scheduler: dict[str, Any]) -> SpecCluster:
        arguments = worker_arguments(order, security, interface)
        return SpecCluster(
            scheduler={"cls": Scheduler, "options": scheduler},
            worker={"cls": WorkerStep, "options": {"slots": slots, "logs": logs, "arguments": arguments}},
            security=security,
            silence_logs=50,
        )

    address = listening_address(interface, is_alone=[*nodes] == [os.environ.get("SLURMD_NODENAME")])
    with supervised_cluster(order, address, make, states_of, lambda: slots.count) as cluster:
        yield cluster


def requeue_orphan(scheduler: str, environment: base.Environment = os.environ) -> None:
    """Requeue the batch job of this worker where the node of its driver is lost; cancel it where jobs may not be requeued.

    Nobody else is left to end the job, which Slurm keeps on the other nodes.

    ``scheduler``: its address: while it answers, nothing is lost, and Slurm is not asked; ``environment``: variables with the job's number.
    """
    job = environment.get("SLURM_JOB_ID", "") if base.ATTENDED in environment else ""
    error = _connection_error(scheduler) if job else None
    pauses = ENDED_PAUSES if isinstance(error, ConnectionRefusedError) else LOST_PAUSES
    for pause in (0.0, *pauses) if error else ():
        time.sleep(pause)
        if _connection_error(scheduler) is None:
            return
        with suppress(ClusterFailed):  # Slurm is slow, or another worker was faster: the next check decides
            found = slurm_allocation.described(job)
            is_running = found.get("JobState") == "RUNNING" and "BatchHost" in found
            if is_running and found["BatchHost"] not in slurm_allocation.remaining_nodes(found):
                # The failure of a requeue does not mean that it is not allowed.
                (SYSTEM.cancel if found.get("Requeue") == "0" else SYSTEM.requeue)(job)
                return


def _connection_error(address: str) -> OSError | None:
    """Connect to an address and return the error, if there is one."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None
