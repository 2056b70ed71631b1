"""Inside a Slurm allocation (``sbatch``, ``salloc``): a job step for each worker, the scheduler in this process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from halotile.errors import ClusterFailed, ConfigError, MemoryRefused
from halotile.graphs.amounts import bytes_text, counted
from halotile.graphs.clusters.base import (
    ATTENDED,
    DEFAULT,
    ChosenCluster,
    ClusterTraits,
    Environment,
    Order,
    RunningCluster,
)
from halotile.graphs.clusters.common.security import listening_address
from halotile.graphs.clusters.launches.batch_system import answer_of
from halotile.graphs.clusters.slurm import SYSTEM
from halotile.graphs.kinds import sections

if TYPE_CHECKING:
    from distributed import SpecCluster
    from distributed.security import Security

CONNECT_SECONDS = 5.0
ENDED_PAUSES = (2.0,) * 5
"""Seconds between checks where the machine of the driver answers, and the driver does not: it may just have ended."""
LOST_PAUSES = (10.0,) * 60
"""Seconds between checks where the machine does not answer: Slurm takes minutes to notice that a node is lost."""
NODES = "SLURM_JOB_NODELIST"
"""Set in every job step and batch script of an allocation."""


def detect(environment: Environment) -> ChosenCluster | None:
    """This kind in an allocation with `srun`; without it the workers are processes of this machine."""
    if "SLURM_JOB_ID" not in environment:
        return None
    if shutil.which("srun", path=environment.get("PATH")):
        return ChosenCluster("slurm-alloc", f"in the Slurm allocation {environment['SLURM_JOB_ID']}")
    return ChosenCluster(DEFAULT, "in a Slurm allocation, but there is no srun here")


def check(_: sections.Cluster) -> None:
    """Refuse to start outside of an allocation."""
    if NODES not in os.environ:
        job = os.environ.get("SLURM_JOB_ID")
        left = f"SLURM_JOB_ID is {job}, and {NODES} is not set" if job else "cluster.kind is slurm-alloc"
        raise ConfigError(
            f"{left}: this is no Slurm allocation. Begin one with salloc or sbatch, write kind: slurm for a job for each worker, or "
            "--cluster local (cluster: {kind: local}) for workers on this machine."
        )


def gives_gpus(run: sections.Run, environment: Environment) -> bool:
    """Return True where no two workers would share a GPU of the allocation."""
    if NODES not in environment:
        return False  # the cluster refuses to start
    workers = workers_in(environment, "cuda")[0] if run.workers == "auto" else run.count
    return workers > 0 and all(slot.gpus >= slot.node_workers for slot in slots_in(environment, workers))


def count_workers(
    run: sections.Run, cluster: sections.Cluster, device: str, environment: Environment
) -> tuple[int, str] | None:
    """Number of workers that take all of the allocation."""
    from halotile.graphs.clusters.common.machine import requested_by

    if NODES not in environment:
        return None
    workers, why = workers_in(environment, device)
    if not workers:
        raise ConfigError(
            f"{requested_by(run, cluster)}, and Slurm lists no GPU in the allocation: with run.workers: auto there would be no worker. "
            "Leave it out to compute on CPUs, or ask Slurm for GPUs (--gres=gpu:1); where Slurm does not count them, write run.workers."
        )
    return workers, why


def check_memory(run: sections.Run, environment: Environment) -> None:
    """Refuse workers that may need more memory than the allocation has for them: Slurm would end the job."""
    if NODES not in environment:
        return
    wanted = sections.parse_bytes(run.memory_per_worker)
    nodes = {slot.node: slot for slot in slots_in(environment, run.count)}.values()
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


TRAITS = ClusterTraits(gives_gpus=gives_gpus, count_workers=count_workers, check_memory=check_memory)


@contextmanager
def start(order: Order) -> Iterator[RunningCluster]:
    """Start workers as job steps of this allocation."""
    import dask
    from distributed import Scheduler, SpecCluster

    from halotile.graphs.clusters.launches.remote_cluster import supervised_cluster, worker_arguments
    from halotile.graphs.clusters.launches.slurm_steps import NodeSlots, WorkerStep, states_of

    check(order.choice)
    nodes = nodes_of(os.environ[NODES])
    interface = order.choice.interface or dask.config.get("jobqueue.slurm.interface", None)
    slots = NodeSlots(slots_in(os.environ, order.workers))

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


def requeue_orphan(scheduler: str, environment: Environment = os.environ) -> None:
    """Requeue the batch job of this worker where the node of its driver is lost; cancel it where jobs may not be requeued.

    Nobody else is left to end the job, which Slurm keeps on the other nodes.

    ``scheduler``: its address: while it answers, nothing is lost, and Slurm is not asked; ``environment``: variables with the job's number.
    """
    job = environment.get("SLURM_JOB_ID", "") if ATTENDED in environment else ""
    error = _connection_error(scheduler) if job else None
    pauses = ENDED_PAUSES if isinstance(error, ConnectionRefusedError) else LOST_PAUSES
    for pause in (0.0, *pauses) if error else ():
        time.sleep(pause)
        if _connection_error(scheduler) is None:
            return
        with suppress(ClusterFailed):  # Slurm is slow, or another worker was faster: the next check decides
            found = described(job)
            is_running = found.get("JobState") == "RUNNING" and "BatchHost" in found
            if is_running and found["BatchHost"] not in remaining_nodes(found):
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


@dataclass(frozen=True, order=True)
class NodeSlot:
    """Room for one worker."""

    number: int  # number among the slots of its node
    node: str  # node's name
    node_workers: int  # number of workers on the node, fewer than its tasks where not all are wanted
    cores: int  # cores that the job has on the node
    gpus: int = 0  # GPUs that the job has there
    memory_bytes: int | None = None  # memory that it has there; unknown where Slurm does not account for it


class Share(NamedTuple):
    """Resources of a job on a node besides its cores."""

    gpus: int = 0
    memory_bytes: int | None = None


NO_SHARES: Mapping[str, Share] = {}


def slots_in(environment: Mapping[str, str], workers: int) -> list[NodeSlot]:
    """Slots for so many workers in the allocation of an environment, with the resources of its nodes."""
    nodes = nodes_of(environment["SLURM_JOB_NODELIST"])
    return slots_of(nodes, environment, workers, shares_of(environment["SLURM_JOB_ID"]))


def workers_in(environment: Mapping[str, str], device: str) -> tuple[int, str]:
    """Number of workers that take all of an allocation, and the reason."""
    tasks, cores = _tasks_and_cores(environment, len(nodes_of(environment["SLURM_JOB_NODELIST"])))
    if max(tasks) > 1:  # one is Slurm's default
        return sum(tasks), "one for each task of the allocation"
    if device != "cpu":
        shares = shares_of(environment["SLURM_JOB_ID"])
        return sum(share.gpus for share in shares.values()), "one for each GPU of the allocation"
    return sum(cores), "one for each core of the allocation"


def slots_of(
    nodes: Sequence[str],
    environment: Mapping[str, str],
    workers: int,
    shares: Mapping[str, Share] = NO_SHARES,
) -> list[NodeSlot]:
    """Slots for so many workers: on a node as many as the job has tasks, else GPUs, else cores there, else equally many on each.

    Examples
    --------
    >>> [(slot.node, slot.number, slot.node_workers) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "2,1"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    >>> [(slot.node, slot.number, slot.node_workers) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "1(x2)"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    >>> [slot.node for slot in slots_of(["a", "b"], {"SLURM_JOB_CPUS_PER_NODE": "1,3"}, 4)]
    ['a', 'b', 'b', 'b']
    """
    tasks, cores = _tasks_and_cores(environment, len(nodes))
    share = [shares.get(node, Share()) for node in nodes]
    equal = [-(-workers // len(nodes))] * len(nodes)
    counts = next(
        count for count in (tasks, [each.gpus for each in share], cores, equal) if sum(count) >= workers
    )
    slots = [(number, node) for node, count in enumerate(counts) for number in range(count)]
    taken = sorted(slots)[:workers]
    used = Counter(node for _, node in taken)
    return [NodeSlot(number, nodes[node], used[node], cores[node], *share[node]) for number, node in taken]


def _tasks_and_cores(environment: Mapping[str, str], nodes: int) -> tuple[list[int], list[int]]:
    tasks, cores = (environment.get(f"SLURM_{key}_PER_NODE", "1") for key in ("TASKS", "JOB_CPUS"))
    return expanded(tasks, nodes), expanded(cores, nodes)


def expanded(text: str, nodes: int) -> list[int]:
    """A number for each node, from Slurm's short form.

    Examples
    --------
    >>> expanded("2(x3),1", 4)
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    numbers = [int(number) for number, times in found for _ in range(int(times or 1))]
    return (numbers + [1] * nodes)[:nodes]


@lru_cache  # a plan asks again and again, and Slurm has others to answer
def nodes_of(listed: str) -> tuple[str, ...]:
    """The names of an allocation's nodes, from Slurm's short form."""
    return tuple(answer_of(["scontrol", "show", "hostnames", listed]).split())


@lru_cache  # a job keeps its resources as long as it runs
def shares_of(job: str) -> Mapping[str, Share]:
    """Resources of a job on each node."""
    found = shares_in(answer_of(["scontrol", "--details", "show", "job", job]))
    return {node: share for listed, share in found.items() for node in nodes_of(listed)}


def shares_in(text: str) -> dict[str, Share]:
    """GPUs and memory of a job's nodes in Slurm's description of the job, by the short form of the nodes.

    Examples
    --------
    >>> shares_in("Nodes=n[1-2] CPU_IDs=0-1 Mem=1000 GRES=gpu:2(IDX:0-1)\\n Nodes=n3 CPU_IDs=0 Mem=0 GRES=gpu:a100:4(IDX:0-3)")
    {'n[1-2]': Share(gpus=2, memory_bytes=1048576000), 'n3': Share(gpus=4, memory_bytes=None)}
    """
    shares = {}
    for nodes, mebibytes, gres in re.findall(r"Nodes=(\S+) .*?Mem=(\d+) GRES=(\S*)", text):
        gpus = sum(map(int, re.findall(r"gpu(?::[^:,()]+)?:(\d+)\(", gres)))
        shares[nodes] = Share(gpus, int(mebibytes) * 2**20 or None)
    return shares


def described(job: str) -> dict[str, str]:
    """The first entry of each line of Slurm's description of a job."""
    return dict(re.findall(r"^ *(\w+)=(\S+)", answer_of(["scontrol", "show", "job", job]), re.MULTILINE))


def remaining_nodes(description: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes that a job has now, without those that were lost."""
    return nodes_of(description["NodeList"]) if "NodeList" in description else ()
