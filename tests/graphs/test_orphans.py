"""Workers whose driver is lost check until Slurm has noticed it, and requeue their job once."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from halotile.errors import ClusterFailed
from halotile.graphs.clusters import slurm_alloc
from halotile.graphs.clusters.base import ATTENDED
from halotile.graphs.clusters.launches import slurm_allocation
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.slurm_alloc import ENDED_PAUSES, requeue_orphan

JOB = {"SLURM_JOB_ID": "7", ATTENDED: "1"}
ALIVE = "JobState=RUNNING Reason=None\n   NodeList=n[1-2]\n   BatchHost=n1\n"
LOST = "JobState=RUNNING Reason=None\n   NodeList=n2\n   BatchHost=n1\n"
CHECKED = [f"sleep {seconds:g}" for seconds in (0, *ENDED_PAUSES)]


@pytest.fixture
def address() -> str:
    """An address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"tls://127.0.0.1:{port}"


class FakeSlurm:
    """A Slurm that answers with these texts, the last one for ever, and fails to requeue so many times; it notes its calls."""

    def __init__(self, *texts: str, failures: int = 0) -> None:
        self.texts = [*texts]
        self.failures = failures
        self.calls: list[str] = []

    def answer(self, _: object) -> str:
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]

    def requeue(self, job: str) -> None:
        self.calls.append(f"requeue {job}")
        self.failures -= 1
        if self.failures >= 0:
            raise ClusterFailed("scontrol did not answer within 30 s")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of Slurm; waiting takes no time."""
        clock = SimpleNamespace(sleep=lambda seconds: self.calls.append(f"sleep {seconds:g}"))
        monkeypatch.setattr(slurm_alloc, "time", clock)
        monkeypatch.setattr(slurm_allocation, "answer_of", lambda words: self.answer(words))
        nodes = {"n[1-2]": ("n1", "n2"), "n2": ("n2",)}
        monkeypatch.setattr(slurm_allocation, "nodes_of", nodes.__getitem__)
        monkeypatch.setattr(BatchSystem, "requeue", lambda _, job: self.requeue(job))
        monkeypatch.setattr(BatchSystem, "cancel", lambda _, job: self.calls.append(f"cancel {job}"))


@pytest.mark.parametrize(
    ("slurm", "calls"),
    [
        (FakeSlurm(ALIVE, ALIVE, LOST), ["sleep 0", "sleep 2", "sleep 2", "requeue 7"]),
        (FakeSlurm(ALIVE), CHECKED),
        (FakeSlurm("JobState=RUNNING Reason=None"), CHECKED),
        (FakeSlurm(f"{LOST}   Requeue=0 Restarts=0\n"), ["sleep 0", "cancel 7"]),
        (FakeSlurm(f"{LOST}   Requeue=1 Restarts=0\n", failures=1), ["sleep 0", "requeue 7", "sleep 2", "requeue 7"]),
    ],
    ids=["noticed late", "driver ended", "no node known", "may not be requeued", "requeue fails once"],
)
def test_a_job_is_requeued_once_slurm_has_noticed_the_loss(
    slurm: FakeSlurm, calls: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.install(monkeypatch)
    requeue_orphan(address, JOB)
    assert slurm.calls == calls


def test_of_two_workers_at_once_the_slower_does_not_end_the_job_that_the_other_put_back(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_looked = threading.Barrier(2, timeout=30)
    slurmctld = threading.Lock()

    class Shared(FakeSlurm):
        def answer(self, _: object) -> str:
            if (text := self.texts[0]) is LOST:
                both_looked.wait()
            return text

        def requeue(self, job: str) -> None:
            with slurmctld:
                if self.texts[0] is not LOST:
                    raise ClusterFailed("Job is pending execution")
                self.texts[0] = LOST.replace("RUNNING", "PENDING")
                super().requeue(job)

    slurm = Shared(LOST)
    slurm.install(monkeypatch)
    with ThreadPoolExecutor(2) as workers:
        for end in [workers.submit(requeue_orphan, address, JOB) for _ in range(2)]:
            end.result(timeout=60)
    assert [call for call in slurm.calls if not call.startswith("sleep")] == ["requeue 7"]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {ATTENDED: "1"}, JOB])
def test_slurm_is_asked_by_workers_of_a_submitted_run_whose_scheduler_does_not_answer(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()  # which would fail
    slurm.install(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        requeue_orphan(f"tls://127.0.0.1:{server.getsockname()[1]}", environment)
    assert slurm.calls == []
