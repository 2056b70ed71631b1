"""Job steps of a Slurm allocation, each with one worker, on a node and a slot that we name.

Steps that overlap all see every GPU of their node that the job has; the slot determines which are the worker's.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches.base import Launch, LaunchState, tail_of
from halotile.graphs.clusters.launches.slurm_allocation import NodeSlot, described, remaining_nodes

END_SECONDS = 10.0
# Requests of the batch job that srun would apply to a step, whose worker takes its share of the node's GPUs itself.
_OF_JOB = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


class NodeSlots:
    """The slots of an allocation; those on nodes that are lost are not taken again.

    Parameters
    ----------
    slots : sequence of NodeSlot
        All of them.
    """

    def __init__(self, slots: Sequence[NodeSlot]) -> None:
        self.free = list(slots)
        self.count = len(slots)
        """Number of slots that are free or taken."""

    def take(self) -> NodeSlot:
        """Take one that no worker has."""
        return self.free.pop(0)

    def give_back(self, slot: NodeSlot, *, lost: bool) -> None:
        """Let another worker have it, unless its node is lost."""
        if lost:
            self.count -= 1
        else:
            self.free.append(slot)


class WorkerStep(ProcessInterface):  # type: ignore[misc]
    """A worker in a job step of its own.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler.
    name : str or int
        The worker's name.
    slots : NodeSlots
        One of them is taken, and given back at the end.
    logs : Path
        Folder of the logs.
    arguments : sequence of str
        Arguments of the worker's command.
    """

    def __init__(
        self, scheduler: str, name: Any = None, *, slots: NodeSlots, logs: Path, arguments: Sequence[str]
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.name = name
        self.slots = slots
        self.arguments = arguments
        self.refusal: str | None = None
        self.lost = False
        """True when its node is lost."""
        self._log = logs / f"worker-{name}.log"
        self._slot: NodeSlot | None = None
        self._process: Process | None = None

    @property
    def node(self) -> str:
        """The node that it is on; empty before it is started."""
        return self._slot.node if self._slot else ""

    @property
    def title(self) -> str:
        """Its name in messages; empty before it is started."""
        return f"the worker on {self.node}" if self.node else ""

    def command(self, slot: NodeSlot) -> list[str]:
        step = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={slot.node}"]
        # All of the node's cores: of one core each, steps that overlap would get the same.
        step += [f"--cpus-per-task={slot.cores}", "--cpu-bind=none"]
        step += ["--kill-on-bad-exit=1", "--quit-on-interrupt"]
        if slot.gpus:
            step.append(f"--gres=gpu:{slot.gpus}")  # all of them too: the worker takes its share
        worker = [sys.executable, "-P", "-m", "halotile.graphs.clusters.workers", self.scheduler]
        worker += ["--name", str(self.name), "--share", f"{slot.number}/{slot.node_workers}"]
        return ["srun", *step, *worker, *self.arguments]

    async def start(self) -> None:
        """Start the step."""
        self._slot = self.slots.take()
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command(self._slot),
                    env={name: value for name, value in os.environ.items() if name not in _OF_JOB},
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
            self.slots.give_back(self._slot, lost=self.lost)
        await super().close()

    def state(self) -> LaunchState:
        code = self._process.returncode if self._process else None
        if code is None:
            return LaunchState(False, "starting")
        return LaunchState(True, f"its step ended with exit code {code}")

    def log_tail(self) -> str:
        """The last lines that it printed."""
        return tail_of([self._log])


def states_of(steps: Sequence[Launch]) -> dict[Launch, LaunchState]:
    """States of steps; where some are over, Slurm is asked for nodes that are lost."""
    states = {step: step.state() for step in steps if isinstance(step, WorkerStep)}
    over = [step for step, state in states.items() if state.over]
    if over:
        with suppress(ClusterFailed):  # then they are tried again
            remaining = remaining_nodes(described(os.environ["SLURM_JOB_ID"]))
            for step in over:
                step.lost = step.node not in remaining
    return {step: LaunchState(True, "its node is lost") if step.lost else state for step, state in states.items()}
