"""Steps of a Slurm allocation, each with one worker, on a node and a slot that we name.

Steps that overlap all see every GPU of their node that the job has; the slot says which are the worker's.
"""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from halotile.graphs.pieces.base import Piece, State, tail_of
from halotile.graphs.pieces.slurm import answer_of

END_SECONDS = 10.0
POLL_SECONDS = 0.1
NO_GPUS: Mapping[str, int] = {}


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
    """

    number: int
    node: str
    of: int
    cores: int
    gpus: int = 0


def slots_in(environment: Mapping[str, str], workers: int) -> list[Slot]:
    """Slots for so many workers in the allocation that an environment tells of, with the GPUs that Slurm tells of.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    nodes = nodes_of(environment["SLURM_JOB_NODELIST"])
    return slots_of(nodes, environment, workers, gpus_of(environment["SLURM_JOB_ID"]))


def slots_of(
    nodes: Sequence[str], environment: Mapping[str, str], workers: int, gpus: Mapping[str, int] = NO_GPUS
) -> list[Slot]:
    """Slots for so many workers: as many on a node as the job has tasks there, or all alike where that is not enough.

    Examples
    --------
    >>> [(slot.node, slot.number, slot.of) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "2,1"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    >>> [(slot.node, slot.number, slot.of) for slot in slots_of(["a", "b"], {"SLURM_TASKS_PER_NODE": "1(x2)"}, 3)]
    [('a', 0, 2), ('b', 0, 1), ('a', 1, 2)]
    """
    tasks = expanded(environment.get("SLURM_TASKS_PER_NODE", "1"), len(nodes))
    cores = expanded(environment.get("SLURM_JOB_CPUS_PER_NODE", "1"), len(nodes))
    if sum(tasks) < workers:
        tasks = [max(count, -(-workers // len(nodes))) for count in tasks]
    places = [(number, node) for node, count in enumerate(tasks) for number in range(count)]
    taken = sorted(places)[:workers]
    used = Counter(node for _, node in taken)
    return [
        Slot(number, nodes[node], used[node], cores[node], gpus.get(nodes[node], 0)) for number, node in taken
    ]


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
def gpus_of(job: str) -> Mapping[str, int]:
    """How many GPUs a job has on each node.

    Raises
    ------
    ClusterFailed
        When Slurm does not answer.
    """
    found = gpus_in(answer_of(["scontrol", "--details", "show", "job", job]))
    return {node: count for listed, count in found.items() for node in nodes_of(listed)}


def gpus_in(text: str) -> dict[str, int]:
    """The GPUs that Slurm tells of a job's nodes, by its short form of them.

    Examples
    --------
    >>> gpus_in("Nodes=n[1-2] CPU_IDs=0-1 Mem=1000 GRES=gpu:2(IDX:0-1)\\n Nodes=n3 CPU_IDs=0 Mem=10 GRES=gpu:a100:4(IDX:0-3)")
    {'n[1-2]': 2, 'n3': 4}
    """
    found = re.findall(r"Nodes=(\S+) .*?GRES=(\S*)", text)
    counts = {nodes: re.findall(r"gpu(?::[^:,()]+)?:(\d+)\(", gres) for nodes, gres in found}
    return {nodes: sum(map(int, numbers)) for nodes, numbers in counts.items() if numbers}


class Step(ProcessInterface):  # type: ignore[misc]
    """A worker in a step of its own.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler.
    name : str or int
        The worker's name.
    free : list of Slot
        Slots that no worker has; one is taken, and given back at the end.
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
        free: list[Slot],
        logs: Path,
        arguments: Sequence[str],
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.name = name
        self.free = free
        self.logs = logs
        self.arguments = arguments
        self.refusal: str | None = None
        self._slot: Slot | None = None
        self._process: Process | None = None

    @property
    def title(self) -> str:
        """On which node it is."""
        return f"the worker on {self._slot.node}" if self._slot else ""

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
            "halotile.graphs.workers",
            self.scheduler,
            "--name",
            str(self.name),
        ]
        return ["srun", *step, *worker, "--share", f"{slot.number}/{slot.of}", *self.arguments]

    async def start(self) -> None:
        """Start the step."""
        self._slot = self.free.pop(0)
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
                self.refusal = f"srun does not start ({error})"
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
            self.free.append(self._slot)
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
    """How steps stand."""
    return {step: step.state() for step in steps if isinstance(step, Step)}
