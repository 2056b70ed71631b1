"""The nodes of a Slurm allocation and the slots for workers on them, without Dask being imported."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from halotile.graphs.clusters.launches.batch_system import answer_of


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
    nodes: Sequence[str], environment: Mapping[str, str], workers: int, shares: Mapping[str, Share] = NO_SHARES
) -> list[NodeSlot]:
    """Slots for so many workers: on a node as many as the job has tasks, else GPUs, else cores there, else equally many on each.

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
    counts = next(count for count in (tasks, [each.gpus for each in share], cores, equal) if sum(count) >= workers)
    slots = [(number, node) for node, count in enumerate(counts) for number in range(count)]
    taken = sorted(slots)[:workers]
    used = Counter(node for _, node in taken)
    return [NodeSlot(number, nodes[node], used[node], cores[node], *share[node]) for number, node in taken]


def _tasks_and_cores(environment: Mapping[str, str], nodes: int) -> tuple[list[int], list[int]]:
    tasks, cores = (environment.get(f"SLURM_{key}_PER_NODE", "1") for key in ("TASKS", "JOB_CPUS"))
    return expanded(tasks, nodes), expanded(cores, nodes)


def expanded(text: str, nodes: int) -> list[int]:
    """A number for each node, from Slurm's short form.

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
