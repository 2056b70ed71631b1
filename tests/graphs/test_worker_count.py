"""As many workers as there is room for; lost launches are replaced, and an allocation whose driver is lost requeues its job once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from distributed.core import Status

from halotile.errors import ClusterFailed
from halotile.graphs.clusters import slurm_alloc
from halotile.graphs.clusters.base import ATTENDED
from halotile.graphs.clusters.common import machine as machine_module
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.clusters.launches import slurm_allocation
from halotile.graphs.clusters.launches.base import LaunchState
from halotile.graphs.clusters.launches.batch_system import BatchSystem
from halotile.graphs.clusters.launches.remote_cluster import Supervisor
from halotile.graphs.clusters.slurm_alloc import ENDED_PAUSES, requeue_orphan
from halotile.graphs.kinds.sections import Cluster, Run
from halotile.graphs.plans import needs
from halotile.graphs.plans.needs import machine_bytes, workers_of
from halotile.graphs.plans.plan import make_plan
from tests.faults import until
from tests.support import job_of, noisy_image, write_zarr

Patch = pytest.MonkeyPatch

GIB = 2**30
Groups = Callable[[dict[str, str]], None]
HERE = Cluster(kind="local")


@pytest.fixture
def machine(monkeypatch: Patch) -> Patch:
    """A machine of 8 cores and 64 GiB."""
    monkeypatch.setattr(needs, "cores_here", lambda _: 8)
    monkeypatch.setattr(needs, "machine_bytes", lambda: 64 * GIB)
    return monkeypatch


def test_this_machine_works_with_all_cores_that_have_memory(machine: Patch) -> None:
    assert workers_of(Run(), HERE, "cpu") == (8, "one for each core")
    assert workers_of(Run(workers=3), HERE, "cpu") == (3, "")
    assert workers_of(Run(device="cuda"), HERE, "cuda") == (2, "which share the first GPU")
    machine.setattr(needs, "machine_bytes", lambda: 16 * GIB)
    assert workers_of(Run(), HERE, "cpu") == (4, "16 GiB have no room for more of 4GiB; 8 cores")
    for memory, count in (("64GiB", 1), ("1MiB", 8)):
        assert workers_of(Run(memory_per_worker=memory), HERE, "cpu").workers == count
    launch = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "5"}
    assert workers_of(Run(), Cluster(), "cpu", launch).workers == 4
    for kind in ("slurm", "pbs", "scheduler", "slurm-alloc"):
        assert workers_of(Run(), Cluster(kind=kind), "cpu", {}).workers == 2


def test_a_plan_has_no_worker_for_which_there_is_no_block(machine: Patch, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    job = replace(job_of(source, tmp_path / "out.zarr", "median", {"size": 3}), run=Run(), cluster=HERE)
    plan = make_plan(replace(job, output=replace(job.output, shard="auto", chunk="auto")))
    assert (plan.run.workers, plan.summary()["workers_from"]) == (1, "one for each block")
    assert plan.documents.asked["run"]["workers"] == "auto", "where it goes on, it takes what is there"
    small = make_plan(replace(job, output=replace(job.output, shard=64, chunk=64)))
    assert (small.run.workers, small.summary()["workers_from"]) == (8, "one for each core")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: Patch) -> Groups:
    """Makes control groups of these files; the process is in those of a job's step."""

    def make(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    (tmp_path / "own").write_text("5:memory:/slurm/job\n4:cpu,cpuacct:/slurm/job\n1:name=systemd:/else\n0::/job/step\n")
    monkeypatch.setattr("halotile.graphs.clusters.common.machine.MOUNTED", tmp_path)
    monkeypatch.setattr("halotile.graphs.clusters.common.machine.OWN", tmp_path / "own")
    return make


GROUPS = [
    ({}, 2, 24),
    ({"job/step/cpu.max": "max 100000", "job/step/memory.max": "max"}, 2, 24),
    ({"job/cpu.max": "150000 100000", "job/step/memory.max": f"{2 * GIB}"}, 2, 2),
    ({"job/cpu.max": "100000 100000", "job/step/cpu.max": "max 100000"}, 1, 24),
    ({"cpu.max": "50000 100000", "memory.max": f"{2 * GIB}"}, 1, 2),
    ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1, 24),
    ({"cpu/slurm/cpu.cfs_quota_us": "100000", "cpu/slurm/cpu.cfs_period_us": "100000"}, 1, 24),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2, 24),
    ({"job/memory.max": f"{2 * GIB}", "job/step/memory.max": f"{8 * GIB}"}, 2, 2),
    ({"memory/slurm/job/memory.limit_in_bytes": f"{2 * GIB}"}, 2, 2),
    ({"memory/slurm/memory.limit_in_bytes": f"{2 * GIB}", "memory/memory.limit_in_bytes": f"{2**63}"}, 2, 2),
    ({"else/memory.max": f"{2 * GIB}"}, 2, 24),
]


@pytest.mark.parametrize(("files", "cores", "gibibytes"), GROUPS)
def test_cores_and_memory_are_those_that_a_control_group_allows(
    files: dict[str, str], cores: int, gibibytes: int, groups: Groups, monkeypatch: Patch
) -> None:
    groups(files)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3})
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=24 * GIB))
    assert (cores_here(), machine_bytes()) == (cores, gibibytes * GIB)


SPREAD = "n1 4 all.q@n1 UNDEFINED\nn2.site.org 2 all.q@n2 <NULL>\n"


def test_a_batch_job_takes_no_more_cores_than_it_has_here(groups: Groups, monkeypatch: Patch) -> None:
    """Not all batch systems bind a job to its cores."""
    rows: list[tuple[dict[str, str], str, int, str]] = [
        ({}, "", 64, "one for each core"),
        ({"JOB_ID": "7", "NSLOTS": "4"}, "", 4, "4 slots"),
        ({"SGE_TASK_ID": "undefined", "NSLOTS": "1"}, "", 1, "the job has 1 slot"),
        ({"JOB_ID": "7", "NSLOTS": "6", "PE_HOSTFILE": "$"}, SPREAD, 2, "2 slots"),
        ({"JOB_ID": "7", "NSLOTS": "6", "PE_HOSTFILE": "$"}, "n1", 6, "6 slots"),
        ({"NSLOTS": "4", "NCPUS": "4", "PBS_NUM_PPN": "4"}, "", 64, "one for each core"),
        ({"JOB_ID": "7", "NSLOTS": "undefined"}, "", 64, "one for each core"),
        ({"JOB_ID": "7", "NSLOTS": "96"}, "", 64, "one for each core"),
        ({"PBS_JOBID": "7.head", "NCPUS": "8", "PBS_NODEFILE": "$"}, "n2\n", 8, "8 cores"),
        ({"PBS_JOBID": "7", "NCPUS": "1", "PBS_NODEFILE": "$"}, "n2\n" * 8, 8, "8 cores"),
        ({"PBS_JOBID": "7", "PBS_NUM_PPN": "4", "PBS_NP": "8"}, "", 4, "4 cores"),
        ({"PBS_JOBID": "7", "PBS_NP": "3", "PBS_NODEFILE": "$"}, "n1\nn2\nn2\n", 2, "2 cores"),
        ({"PBS_JOBID": "7", "PBS_NP": "3"}, "", 3, "3 cores"),
        ({"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "4"}, "", 4, "4 slots"),
        ({"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "12", "LSB_MCPU_HOSTS": "n1 4 n2 8"}, "", 8, "8 slots"),
        ({"LSB_JOBID": "7", "LSB_HOSTS": "n1 n2 n2", "LSB_MCPU_HOSTS": "n1"}, "", 2, "2 slots"),
        ({"LSB_JOBID": "7", "LSB_HOSTS": "other other other"}, "", 3, "3 slots"),
        ({"OAR_JOB_ID": "7", "OAR_NODEFILE": "$"}, "n1\nn2\nn2\nn2\n", 3, "3 cores"),
        ({"OAR_JOB_ID": "7", "OAR_NODEFILE": "/nowhere/at/all"}, "", 64, "one for each core"),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "16", "SLURM_CPUS_PER_TASK": "2"}, "", 16, "16 CPUs"),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}, "", 2, "2 CPUs"),
        ({"_CONDOR_JOB_AD": "x", "_CONDOR_MACHINE_AD": "$"}, "CpusBusy = 9\nCpus = 4\n", 4, "4 cores"),
    ]
    for told, file, workers, why in rows:
        groups({"told": file})
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
        monkeypatch.setattr("socket.gethostname", lambda: "n2")
        monkeypatch.setattr(needs, "machine_bytes", lambda: 1024 * GIB)
        environment = {name: word.replace("$", str(machine_module.MOUNTED / "told")) for name, word in told.items()}
        why = f"one for each of {why} of the job" if why[0].isdigit() else why
        assert workers_of(Run(), HERE, "cpu", environment) == (workers, why)


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

    def install(self, monkeypatch: Patch) -> None:
        """Take the place of Slurm; waiting takes no time."""
        clock = SimpleNamespace(sleep=lambda seconds: self.calls.append(f"sleep {seconds:g}"))
        monkeypatch.setattr(slurm_alloc, "time", clock)
        monkeypatch.setattr(slurm_allocation, "answer_of", lambda words: self.answer(words))
        monkeypatch.setattr(slurm_allocation, "nodes_of", {"n[1-2]": ("n1", "n2"), "n2": ("n2",)}.__getitem__)
        monkeypatch.setattr(BatchSystem, "requeue", lambda _, job: self.requeue(job))
        monkeypatch.setattr(BatchSystem, "cancel", lambda _, job: self.calls.append(f"cancel {job}"))


def test_a_job_is_requeued_once(address: str, monkeypatch: Patch) -> None:
    rows: list[tuple[FakeSlurm, list[str]]] = [
        (FakeSlurm(ALIVE, ALIVE, LOST), ["sleep 0", "sleep 2", "sleep 2", "requeue 7"]),
        (FakeSlurm(ALIVE), CHECKED),
        (FakeSlurm("JobState=RUNNING Reason=None"), CHECKED),
        (FakeSlurm(f"{LOST}   Requeue=0 Restarts=0\n"), ["sleep 0", "cancel 7"]),
        (FakeSlurm(f"{LOST}   Requeue=1 Restarts=0\n", failures=1), ["sleep 0", "requeue 7", "sleep 2", "requeue 7"]),
        # Another worker was faster, and the job waits.
        (FakeSlurm(LOST, LOST.replace("RUNNING", "PENDING"), failures=1), [CHECKED[0], "requeue 7", *CHECKED[1:]]),
    ]
    for slurm, calls in rows:
        slurm.install(monkeypatch)
        requeue_orphan(address, JOB)
        assert slurm.calls == calls


def test_slurm_is_asked_by_workers_of_submitted_runs_whose_scheduler_is_gone(address: str, monkeypatch: Patch) -> None:
    (slurm := FakeSlurm()).install(monkeypatch)  # which would fail
    for environment in ({}, {"SLURM_JOB_ID": "7"}, {ATTENDED: "1"}):
        requeue_orphan(address, environment)
    with socket.create_server(("127.0.0.1", 0)) as server:
        requeue_orphan(f"tls://127.0.0.1:{server.getsockname()[1]}", JOB)
    assert slurm.calls == []


PENDING = LaunchState(False, "PENDING (Resources)")


class FakeCluster:
    """Launches by name, and the names of those whose workers are connected."""

    status, made, refusal = Status.running, 0, ""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.here: set[str] = set()

    @property
    def scheduler_info(self) -> dict[str, Any]:
        return {"workers": {name: {"name": name} for name in self.here}}

    def scale(self, count: int) -> None:
        while len(self.workers) < count:
            self.made += 1
            launch = Mock(title=f"job {self.made}", refusal=self.refusal or None, state=PENDING)
            launch.log_tail.return_value = "no such module"
            self.workers[f"w{self.made}"] = launch

    def scale_down(self, names: Sequence[str]) -> None:
        for name in names:
            del self.workers[name]

    def sync(self, function: Any, *arguments: Any, **_: Any) -> Any:
        return function(*arguments)


def supervisor(cluster: FakeCluster, workers: int, reports: list[str]) -> Supervisor:
    def query(launches: Sequence[Any]) -> dict[Any, LaunchState]:
        return {launch: launch.state for launch in launches}

    return Supervisor(None, workers, cluster=cluster, query=query, report=reports.append)


class Watch:
    """A supervisor whose updates are called by hand, with its own clock."""

    def __init__(self, workers: int, clock: SimpleNamespace) -> None:
        self.clock, self.cluster, self.reports = clock, FakeCluster(), list[str]()
        self.supervisor = supervisor(self.cluster, workers, self.reports)

    def rounds(self, count: int, seconds: float = 5.0) -> None:
        """Update some times."""
        for _ in range(count):
            self.supervisor._update()
            self.clock.now += seconds

    def end(self, *names: str) -> None:
        """End launches."""
        for name in names:
            self.cluster.here.discard(name)
            self.cluster.workers[name].state = LaunchState(True, "FAILED (NonZeroExitCode)")

    def end_at_once(self, times: int, seconds: float) -> None:
        """End all launches that have no worker, again and again."""
        for _ in range(times):
            self.rounds(1, seconds)
            self.end(*{*self.cluster.workers} - self.cluster.here)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Watch]:
    """Makes a watch of some workers."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.time.monotonic", lambda: clock.now)
    return lambda workers: Watch(workers, clock)


def test_a_launch_is_asked_for_each_worker_and_replaced_when_it_ends(watch: Callable[[int], Watch]) -> None:
    three = watch(3)
    three.rounds(2)
    assert [*three.cluster.workers] == ["w1", "w2", "w3"]
    assert three.supervisor.missing() == "3 PENDING (Resources)"
    three.cluster.here.add("w2")
    assert three.supervisor.missing() is None
    assert three.supervisor.missing(2) == "3 PENDING (Resources)"
    three.cluster.here |= {"w1", "w3"}
    three.rounds(1)
    three.end("w1")
    three.rounds(2)
    assert [*three.cluster.workers] == ["w2", "w3", "w4"]
    assert three.reports == ["1 worker lost (job 1: FAILED (NonZeroExitCode)); asking for it again"]


def test_launches_that_keep_ending_are_given_up_with_the_log_for_a_while(watch: Callable[[int], Watch]) -> None:
    two, one = watch(2), watch(1)
    one.end_at_once(1, seconds=5)
    for rounds, made in ((2, 1), (5, 2)):  # after a pause
        one.rounds(rounds, seconds=0.5)
        assert one.cluster.made == made
    two.end_at_once(4, seconds=60)
    one = watch(1)
    assert two.cluster.made == 4
    said = r"4 workers in a row ended before .* job 3: FAILED .*\n.*no such module"
    with pytest.raises(ClusterFailed, match=said):
        two.supervisor.check()
    one.end_at_once(6, seconds=20)
    made = one.cluster.made
    with pytest.raises(ClusterFailed):
        one.supervisor.check()
    one.rounds(2, seconds=400)
    assert one.cluster.made == made + 1
    one.supervisor.check()
    one.end_at_once(2, seconds=40)
    one.supervisor.check()  # it is counted anew


def test_launches_that_worked_are_replaced_without_end_and_do_not_count(watch: Callable[[int], Watch]) -> None:
    one, two = watch(1), watch(2)
    for number in range(1, 12):
        one.rounds(1)
        assert [*one.cluster.workers] == [f"w{number}"]
        one.cluster.here.add(f"w{number}")
        one.rounds(14)
        one.end(f"w{number}")
        one.rounds(2)
    one.supervisor.check()
    two.rounds(1)
    two.cluster.here |= {"w1", "w2"}
    two.rounds(14)
    two.end("w1", "w2")
    two.rounds(2)
    for _ in range(3):
        two.end(next(iter({*two.cluster.workers} - two.cluster.here)))
        two.rounds(8)
    two.supervisor.check()
    assert len(two.cluster.workers) == 2


def test_a_cluster_goes_on_with_the_workers_that_are_left(watch: Callable[[int], Watch]) -> None:
    two = watch(2)
    two.rounds(1)
    two.cluster.here.add("w1")
    while two.clock.now < 1000 and not (two.reports and "no more" in two.reports[-1]):
        two.end_at_once(1, seconds=25)
    assert "no more workers are asked for" in two.reports[-1]
    assert next(iter(two.cluster.workers)) == "w1"
    two.supervisor.check()
    for wanted, here in ((2, {"w1"}), (1, set[str]())):
        two.cluster.here = here
        with pytest.raises(ClusterFailed):
            two.supervisor.check(wanted)


def test_workers_without_room_and_refused_launches_are_not_waited_for(watch: Callable[[int], Watch]) -> None:
    two, one = watch(2), watch(1)
    two.supervisor.capacity = lambda: 1  # an allocation that has lost a node
    two.cluster.here.add("w1")
    two.supervisor.check()
    with pytest.raises(ClusterFailed, match="room for 1 of 2 workers"):
        two.supervisor.check(2)
    one.cluster.refusal = "sbatch: error: invalid partition."
    one.rounds(10, seconds=30)
    with pytest.raises(ClusterFailed, match="invalid partition"):
        one.supervisor.check()


def test_a_supervisor_that_stumbles_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.clusters.launches.remote_cluster.POLL_SECONDS", 0.01)
    cluster, reports = FakeCluster(), list[str]()
    scale, failures = cluster.scale, iter([True] * 5)

    def stumble(count: int) -> None:
        if next(failures, False):
            raise KeyError("a worker that has just gone")
        scale(count)

    monkeypatch.setattr(cluster, "scale", stumble)
    with supervisor(cluster, 2, reports):
        until(lambda: cluster.made >= 2)
    assert cluster.made == 2
    assert reports == ["supervising the workers failed, and is tried again: KeyError: 'a worker that has just gone'"]
