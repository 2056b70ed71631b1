"""Steps of a Slurm allocation, each with one worker, on a node and a slot that we name.

Steps that overlap all see every GPU of their node that the job has; the slot says which are the worker's.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import Piece, State, tail_of
from halotile.graphs.clusters.launches.slurm_commands import answer_of

END_SECONDS = 10.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, order=True)
class Slot:
    """A place for one worker.

    Parameters
    ----------
    number : int
        Which of those on its node.
    node : str
        The node's name.
    of : int
        How many workers there are on the node, which is less than its tasks where they are not all wanted.
    cores : int
        Cores that the job has on the node.
    gpus : int
        GPUs that the job has there.
    memory_bytes : int, optional
        Memory that it has there; not told where Slurm does not account for it.
    """

    number: int
    node: str
    of: int
    cores: int
    gpus: int = 0
    memory_bytes: int | None = None


class Share(NamedTuple):
    """What a job has on a node besides its cores."""

    gpus: int = 0
    memory_bytes: int | None = None


NO_SHARES: Mapping[str, Share] = {}


def slots_in(environment: Mapping[str, str], workers: int) -> list[Slot]:
    """Slots for so many workers in the allocation that an environment tells of, with what Slurm tells of its nodes.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    nodes = nodes_of(environment["SLURM_JOB_NODELIST"])
    return slots_of(nodes, environment, workers, shares_of(environment["SLURM_JOB_ID"]))


def workers_in(environment: Mapping[str, str], device: str) -> tuple[int, str]:
    """How many workers take all of an allocation, and why.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    nodes = nodes_of(environment["SLURM_JOB_NODELIST"])
    tasks = expanded(environment.get("SLURM_TASKS_PER_NODE", "1"), len(nodes))
    if max(tasks) > 1:  # else it is what Slurm takes for granted
        return sum(tasks), "one for each task of the allocation"
    if device != "cpu":
        shares = shares_of(environment["SLURM_JOB_ID"])
        return sum(share.gpus for share in shares.values()), "one for each GPU of the allocation"
    cores = expanded(environment.get("SLURM_JOB_CPUS_PER_NODE", "1"), len(nodes))
    return sum(cores), "one for each core of the allocation"


def slots_of(
    nodes: Sequence[str],
    environment: Mapping[str, str],
    workers: int,
    shares: Mapping[str, Share] = NO_SHARES,
) -> list[Slot]:
    """Slots for so many workers: as many on a node as the job has tasks there, or GPUs, or cores, or all alike where that is not enough.

    Examples
    --------
    >>> [(slot.node, slot.number, slot.of) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "2,1"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    >>> [(slot.node, slot.number, slot.of) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "1(x2)"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    >>> [slot.node for slot in slots_of(["a", "b"], {"SLURM_JOB_CPUS_PER_NODE": "1,3"}, 4)]
    ['a', 'b', 'b', 'b']
    """
    tasks = expanded(environment.get("SLURM_TASKS_PER_NODE", "1"), len(nodes))
    cores = expanded(environment.get("SLURM_JOB_CPUS_PER_NODE", "1"), len(nodes))
    theirs = [shares.get(node, Share()) for node in nodes]
    alike = [-(-workers // len(nodes))] * len(nodes)
    counts = (tasks, [share.gpus for share in theirs], cores, alike)
    room = next(each for each in counts if sum(each) >= workers)
    places = [(number, node) for node, count in enumerate(room) for number in range(count)]
    taken = sorted(places)[:workers]
    used = Counter(node for _, node in taken)
    return [Slot(number, nodes[node], used[node], cores[node], *theirs[node]) for number, node in taken]


def expanded(text: str, nodes: int) -> list[int]:
    """Slurm's short form of a number for each node.

    Examples
    --------
    >>> expanded("2(x3),1", 4)
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    numbers = [int(number) for number, times in found for _ in range(int(times or 1))]
    return (numbers + [1] * nodes)[:nodes]


@lru_cache  # a plan wants to know again and again, and Slurm has others to answer
def nodes_of(listed: str) -> tuple[str, ...]:
    """The names of an allocation's nodes, from Slurm's short form of them.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    return tuple(answer_of(["scontrol", "show", "hostnames", listed]).split())


@lru_cache  # as long as a job runs, it keeps what it has
def shares_of(job: str) -> Mapping[str, Share]:
    """What a job has on each node.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    found = shares_in(answer_of(["scontrol", "--details", "show", "job", job]))
    return {node: share for listed, share in found.items() for node in nodes_of(listed)}


def shares_in(text: str) -> dict[str, Share]:
    """GPUs and memory that Slurm tells of a job's nodes, by its short form of them.

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


def nodes_left(job: str) -> tuple[str, ...]:
    """The nodes that a job has now: one that was lost is not among them any more.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    found = re.search(r"^ *NodeList=(\S+)", answer_of(["scontrol", "show", "job", job]), re.MULTILINE)
    return nodes_of(found[1]) if found else ()


class Slots:
    """The slots of an allocation; those on nodes that are lost are not taken again.

    Parameters
    ----------
    slots : sequence of Slot
        All of them.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.free = list(slots)
        self.count = len(slots)
        """Those that are free or taken."""

    def take(self) -> Slot:
        """One that no worker has."""
        return self.free.pop(0)

    def give_back(self, slot: Slot, *, lost: bool) -> None:
        """Let another worker have it, unless its node is lost."""
        if lost:
            self.count -= 1
        else:
            self.free.append(slot)


class Step(ProcessInterface):  # type: ignore[misc]
    """A worker in a step of its own.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler.
    name : str or int
        The worker's name.
    slots : Slots
        Of which one is taken, and given back at the end.
    logs : Path
        Where it prints to.
    arguments : sequence of str
        Of the worker's command.
    """

    def __init__(
        self,
        scheduler: str,
        name: Any = None,
        *,
        slots: Slots,
        logs: Path,
        arguments: Sequence[str],
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.name = name
        self.slots = slots
        self.logs = logs
        self.arguments = arguments
        self.read_error: str | None = None
        self.lost = False
        """Whether its node is."""
        self._slot: Slot | None = None
        self._process: Process | None = None

    @property
    def node(self) -> str:
        """The node that it is on; nothing before it is started."""
        return self._slot.node if self._slot else ""

    @property
    def title(self) -> str:
        """On which node it is."""
        return f"the worker on {self.node}" if self.node else ""

    def command(self, slot: Slot) -> list[str]:
        """What is run."""
        step = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={slot.node}"]
        # All of the node's cores: of one core each, steps that overlap would get the same.
        step += [
            f"--cpus-per-task={slot.cores}",
            "--cpu-bind=none",
            "--kill-on-bad-exit=1",
            "--quit-on-interrupt",
        ]
        if slot.gpus:
            step.append(f"--gres=gpu:{slot.gpus}")  # all of them too: the worker takes its share
        worker = [
            sys.executable,
            "-P",
            "-m",
            "halotile.graphs.clusters.workers",
            self.scheduler,
            "--name",
            str(self.name),
        ]
        return ["srun", *step, *worker, "--share", f"{slot.number}/{slot.of}", *self.arguments]

    async def start(self) -> None:
        """Start the step."""
        self._slot = self.slots.take()
        with self._log().open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command(self._slot),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.read_error = f"srun does not start ({error})"
        await super().start()

    async def close(self) -> None:
        """End the step."""
        if self.status == Status.closed:
            return
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
        if self._slot is not None:
            self.slots.give_back(self._slot, lost=self.lost)
        await super().close()

    def state(self) -> State:
        """How the step stands."""
        code = self._process.returncode if self._process else None
        return (
            State(False, "starting") if code is None else State(True, f"its step ended with exit code {code}")
        )

    def log_tail(self) -> str:
        """The last lines of what it printed."""
        return tail_of([self._log()])

    def _log(self) -> Path:
        return self.logs / f"worker-{self.name}.log"


def look(steps: Sequence[Piece]) -> dict[Piece, State]:
    """How steps stand; where some are over, whether their nodes are lost."""
    states = {step: step.state() for step in steps if isinstance(step, Step)}
    over = [step for step, state in states.items() if state.over]
    if over:
        with suppress(ClusterFailed):  # then they are tried again
            left = nodes_left(os.environ["SLURM_JOB_ID"])
            for step in over:
                step.lost = step.node not in left
    return {step: State(True, "its node is lost") if step.lost else state for step, state in states.items()}
