"""Workers whose driver is lost check until Slurm has noticed it, and requeue their job once."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from halotile.errors import ClusterFailed
from halotile.graphs.clusters import _orphans

JOB = {"SLURM_JOB_ID": "7", _orphans.ATTENDED: "1"}
ALIVE = "JobState=RUNNING\n   NodeList=n[1-2]\n   BatchHost=n1\n"
LOST = "JobState=RUNNING\n   NodeList=n2\n   BatchHost=n1\n"


@pytest.fixture
def closed() -> str:
    """An address at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"tls://127.0.0.1:{port}"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to Slurm; waiting takes no time."""
    calls: list[str] = []
    clock = SimpleNamespace(sleep=lambda seconds: calls.append(f"sleep {seconds:g}"))
    monkeypatch.setattr(_orphans, "time", clock)
    monkeypatch.setattr(_orphans, "nodes_of", {"n[1-2]": ("n1", "n2"), "n2": ("n2",)}.__getitem__)
    monkeypatch.setattr(_orphans, "requeue", lambda job: calls.append(f"requeue {job}"))
    monkeypatch.setattr(_orphans, "cancel", lambda job: calls.append(f"cancel {job}"))
    return calls


def answers(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    left = list(texts)
    monkeypatch.setattr(_orphans, "answer_of", lambda _: left.pop(0) if len(left) > 1 else left[0])


def test_it_is_looked_again_until_slurm_has_seen_the_loss(
    monkeypatch: pytest.MonkeyPatch, done: list[str], closed: str
) -> None:
    answers(monkeypatch, ALIVE, ALIVE, LOST)
    _orphans.requeue_orphan(closed, JOB)
    assert done == ["sleep 0", "sleep 2", "sleep 2", "requeue 7"]


def test_a_job_whose_driver_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, done: list[str], closed: str
) -> None:
    answers(monkeypatch, ALIVE)
    _orphans.requeue_orphan(closed, JOB)
    assert [call for call in done if not call.startswith("sleep")] == []
    assert len(done) == 1 + len(_orphans.ENDED_PAUSES)


def test_a_job_that_may_not_be_put_back_is_ended(
    monkeypatch: pytest.MonkeyPatch, done: list[str], closed: str
) -> None:
    answers(monkeypatch, f"{LOST}   Requeue=0 Restarts=0\n")
    _orphans.requeue_orphan(closed, JOB)
    assert done == ["sleep 0", "cancel 7"]


def test_a_requeue_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, done: list[str], closed: str
) -> None:
    outcomes: list[Exception | None] = [ClusterFailed("scontrol did not answer within 30 s"), None]

    def requeue(job: str) -> None:
        done.append(f"requeue {job}")
        if (error := outcomes.pop(0)) is not None:
            raise error

    answers(monkeypatch, f"{LOST}   Requeue=1 Restarts=0\n")
    monkeypatch.setattr(_orphans, "requeue", requeue)
    _orphans.requeue_orphan(closed, JOB)
    assert done == ["sleep 0", "requeue 7", "sleep 2", "requeue 7"]


def test_of_two_workers_at_once_the_slower_does_not_end_the_job_that_the_other_put_back(
    monkeypatch: pytest.MonkeyPatch, done: list[str], closed: str
) -> None:
    both_looked = threading.Barrier(2, timeout=30)
    slurmctld = threading.Lock()
    state = [LOST]

    def look(_: list[str]) -> str:
        text = state[0]
        if text is LOST:
            both_looked.wait()
        return text

    def requeue(_: str) -> None:
        with slurmctld:
            if state[0] is not LOST:
                raise ClusterFailed("Job is pending execution")
            state[0] = LOST.replace("RUNNING", "PENDING")
            done.append("put back")

    monkeypatch.setattr(_orphans, "answer_of", look)
    monkeypatch.setattr(_orphans, "requeue", requeue)
    with ThreadPoolExecutor(2) as workers:
        for end in [workers.submit(_orphans.requeue_orphan, closed, JOB) for _ in range(2)]:
            end.result(timeout=60)
    assert [call for call in done if not call.startswith("sleep")] == ["put back"]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {_orphans.ATTENDED: "1"}])
def test_only_workers_of_a_submitted_run_look(
    environment: dict[str, str], done: list[str], closed: str
) -> None:
    _orphans.requeue_orphan(closed, environment)
    assert done == []


def test_where_the_scheduler_answers_slurm_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    monkeypatch.delattr(_orphans, "answer_of")
    with socket.create_server(("127.0.0.1", 0)) as server:
        _orphans.requeue_orphan(f"tls://127.0.0.1:{server.getsockname()[1]}", JOB)
    assert done == ["sleep 0"]
