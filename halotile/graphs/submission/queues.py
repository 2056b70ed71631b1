"""Queues that the batch job of a submitted run waits in: Slurm's, and those of other batch systems."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halotile.errors import ClusterFailed
from halotile.graphs.clusters.launches import slurm_jobs
from halotile.graphs.clusters.launches.batch_system import SLURM, BatchSystem
from halotile.graphs.clusters.launches.queue_answers import answer_of
from halotile.registry import find
from halotile.storage.run_directory.directory import WORKERS


@dataclass(frozen=True)
class JobQueue:
    """The queue of a batch system that dask-jobqueue knows. Each command raises ClusterFailed where it fails."""

    system: BatchSystem

    def submit(self, script: Path) -> str:
        """Submit a script; what the system prints besides the log goes to the folder of the workers' logs."""
        job_class, words = self.system.cluster_class().job_cls, [self.system.submits, str(script)]
        stdin = script.read_text("utf-8") if self.system.configured("use-stdin") else None
        folder = script.parent / WORKERS
        folder.mkdir(mode=0o700, exist_ok=True)
        answer = answer_of(words[:1] if stdin else words, self.system.title, input=stdin, cwd=folder)
        if found := re.search(job_class.job_id_regexp, answer):
            return found["job_id"]
        raise ClusterFailed(f"{words[0]} printed no job number: {answer.strip() or 'nothing'}.")

    def requeue(self, job: str) -> None:
        """Refuse: the script is submitted again."""
        raise ClusterFailed(f"job {job} of {self.system.title} is not requeued")

    def cancel(self, job: str) -> None:
        """End a job."""
        answer_of([self.system.cluster_class().job_cls.cancel_command, job], self.system.title)

    def state_of(self, job: str) -> str | None:
        """State of a job; an error that keeps it in the queue is one."""
        state = self.system.states([job]).get(job)
        if state is None:
            raise ClusterFailed(
                f"{self.system.title} did not report the state of job {job}. Try again later."
            )
        return None if state.over and not state.text.startswith("Eqw") else state.text


def queue_of(name: str) -> Any:
    """The queue of a batch system, by the name of its kind of cluster: a JobQueue, or the module with the same functions for Slurm."""
    return slurm_jobs if name == SLURM else JobQueue(find("clusters", name).SYSTEM)
