"""A worker on each GPU: detection and choice of GPUs, the real dask-cuda with fake GPUs, and GPUs that a job has nothing for."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask_cuda.utils
import distributed
import pytest

from halotile.errors import ConfigError, MemoryRefused, MissingPackage
from halotile.graphs import doctor
from halotile.graphs.clusters import local, local_cuda
from halotile.graphs.clusters.base import ChosenCluster, Order
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import Gpus, chosen, gpus_here
from halotile.graphs.clusters.launches import slurm_allocation
from halotile.graphs.clusters.launches.slurm_allocation import NodeSlot
from halotile.graphs.clusters.launches.slurm_steps import NodeSlots, WorkerStep
from halotile.graphs.clusters.workers.__main__ import keep_beside_gpu, share_of
from halotile.graphs.jobs.reconstruct.job import PriorChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, simulation_of
from halotile.graphs.kinds.sections import Cluster, Run
from halotile.graphs.plans.identity import differences
from halotile.graphs.plans.needs import check_allocation, device_of, workers_of
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.tasks.denoisers.function import GivenFunction
from tests.cases import thorough
from tests.graphs.trials import GAUSSIAN, TWO, deblurring, have
from tests.support import dncnn_weights, job_of, noisy_image, work_of, write_zarr

Patch = pytest.MonkeyPatch

NONE = Gpus(why_none="NVML finds none")


def nvml(count: int | None) -> Mock:
    """NVML of a machine with some GPUs, or a driver that does not answer."""
    error = type("NVMLError", (Exception,), {})
    begun = Mock(side_effect=None if count is not None else error("Driver Not Loaded"))
    module = Mock(spec_set=["NVMLError", "nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"])
    module.configure_mock(NVMLError=error, nvmlInit=begun, nvmlDeviceGetCount=lambda: count)
    return module


HERE: list[tuple[int | None, str | None, tuple[str, ...], str]] = [
    (2, None, ("0", "1"), ""),
    (4, "2,0", ("2", "0"), ""),
    (1, "GPU-84fd49f2", ("GPU-84fd49f2",), ""),
    (2, "", (), "CUDA_VISIBLE_DEVICES shows none"),
    (2, "-1", (), "CUDA_VISIBLE_DEVICES shows none"),
    (2, "0,7,1", ("0",), ""),
    (2, "1,1,-1,0", ("1",), ""),
    (2, "all", (), "CUDA_VISIBLE_DEVICES is 'all', which shows none of 2"),
    (2, ",", (), "CUDA_VISIBLE_DEVICES is ',', which shows none of 2"),
    (0, None, (), "NVML finds none"),
    (None, None, (), "NVML finds none (Driver Not Loaded)"),
]
"""Number of GPUs of NVML, those that are visible, their names, and the reason why there is none."""


def test_nvml_tells_which_gpus_are_here(monkeypatch: Patch) -> None:
    for count, visible, names, why in HERE:
        monkeypatch.setitem(sys.modules, "pynvml", nvml(count))
        found = gpus_here({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert (found.names, found.why_none) == (names, why)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in gpus_here({}).why_none


def test_auto_takes_the_gpus_that_are_here_or_says_why_not(monkeypatch: Patch) -> None:
    for here, installed, name, why in (
        (TWO, True, "local-cuda", "2 GPUs here, a worker on each"),
        (TWO, False, "local", "2 GPUs here are left alone; for a worker on each: pip install 'halotile[cuda]'"),
        (NONE, True, "local", "no GPU: NVML finds none"),
    ):
        monkeypatch.setattr(local_cuda, "gpus_here", lambda _, here=here: here)
        monkeypatch.setattr(local_cuda, "has_dask_cuda", lambda installed=installed: installed)
        assert cluster_kind_of(Cluster(), {}) == ChosenCluster(name, why)
        assert cluster_kind_of(Cluster(), {"SLURM_JOB_ID": "7"}).name != "local-cuda", "an allocation comes first"


EXTRA = "pip install 'halotile[cuda]'"
ON_CPUS = "none (NVML finds none): workers compute on CPUs"
EACH = "cluster local-cuda has a worker on each"
FOUND_BY_DOCTOR: list[tuple[str, Gpus, str | None, bool, str, str]] = [
    ("local", TWO, None, True, "ok", "2"),
    ("local", TWO, "0,1", True, "ok", "2, those that CUDA_VISIBLE_DEVICES shows (0,1)"),
    ("local", TWO, None, False, "note", f"2; for a worker on each: {EXTRA}"),
    ("local", NONE, None, True, "note", ON_CPUS),
    ("local", NONE, None, False, "note", f"{ON_CPUS}; where there are GPUs: {EXTRA}"),
    ("local-cuda", NONE, None, True, "missing", f"none (NVML finds none); {EACH}"),
    ("local-cuda", TWO, None, False, "missing", f"dask-cuda is not installed: {EXTRA}; {EACH}"),
]


def test_the_doctor_tells_of_gpus_or_why_there_is_none(monkeypatch: Patch, tmp_path: Path) -> None:
    for kind, here, visible, installed, verdict, text in FOUND_BY_DOCTOR:
        monkeypatch.setattr(doctor, "gpus_here", lambda here=here: here)
        monkeypatch.setattr(doctor, "has_dask_cuda", lambda installed=installed: installed)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (found,) = (each for each in doctor.examine(Cluster(kind=kind), tmp_path) if each.name == "GPU")
        assert (found.verdict, found.text) == (verdict, text)


def test_gpus_are_named_by_their_place_and_refused_where_they_are_not_there() -> None:
    asked: dict[Any, str] = {0: "01", "all": "01", 1: "0", (1,): "1", (1, 0, 1): "10"}
    for requested, names in asked.items():
        assert chosen(Cluster(gpus=requested), TWO) == tuple(names)
    for refused in (3, (0, 2), ()):
        with pytest.raises(ConfigError, match=r"there are 2 GPUs here\. Write gpus: all, or how many, or which"):
            chosen(Cluster(gpus=refused), TWO)


def test_a_worker_keeps_to_the_cores_beside_its_gpu(monkeypatch: Patch) -> None:
    """dask-cuda's function fails for a name where NVML does not know the cores."""
    mine, kept = sorted(os.sched_getaffinity(0)), []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(sorted(cores)))
    for near in ([*mine[-1:], 4095], [4095]):
        monkeypatch.setattr(dask_cuda.utils, "get_cpu_affinity", lambda gpu, near=near: near)
        keep_beside_gpu("3,1")
    monkeypatch.setattr(dask_cuda.utils, "get_cpu_affinity", lambda gpu: [gpu + 0])
    keep_beside_gpu("MIG-41b3359c")
    assert kept == [mine[-1:], mine, mine]


def test_workers_on_processors_see_no_gpu(monkeypatch: Patch) -> None:
    """So their memory has a limit, which the driver of a GPU would not bear."""
    started = Mock(side_effect=KeyError("enough"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(distributed, "LocalCluster", started)
    for gpus in (True, False):
        with pytest.raises(ConfigError, match="enough"), local.start(Order(workers=1, memory_bytes=2**30, gpus=gpus)):
            pass
    environments = [call.kwargs["env"] for call in started.call_args_list]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in environments] == ["0,1", ""]


def test_a_worker_for_each_gpu_needs_gpus_and_dask_cuda(monkeypatch: Patch) -> None:
    order = Order(workers=1, memory_bytes=2**30, choice=Cluster(kind="local-cuda"))
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    for here, installed, error, said in (
        (NONE, True, ConfigError, r"there is no GPU here: NVML finds none\. Write kind: local"),
        (TWO, False, MissingPackage, r"pip install 'halotile\[cuda\]'"),
        (TWO, True, MissingPackage, "cannot be imported"),
    ):
        have(monkeypatch, here)
        monkeypatch.setattr(local_cuda, "has_dask_cuda", lambda installed=installed: installed)
        with pytest.raises(error, match=said), local_cuda.start(order):
            pass


@dataclass
class Allocation:
    """A fake Slurm with one allocation of two nodes."""

    has: Sequence[str] = ("Mem=10 GRES=gpu:2(IDX:0-1)", "Mem=10 GRES=gpu:a100:2(IDX:0,3)")
    calls: int = 0

    def answer(self, words: Sequence[str]) -> str:
        """Output of scontrol."""
        self.calls += 1
        if "hostnames" in words:
            return {"n[1-2]": "n1\nn2\n"}.get(words[-1], words[-1])
        return "\n".join(f" Nodes=n{i} CPU_IDs=0-1 {each}" for i, each in enumerate(self.has, 1))


ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
IN_IT = Cluster(kind="slurm-alloc")


@pytest.fixture
def allocation(monkeypatch: Patch) -> Iterator[Allocation]:
    """The allocation of the fake Slurm; earlier answers are forgotten."""
    slurm, remembering = Allocation(), (slurm_allocation.nodes_of, slurm_allocation.shares_of)
    monkeypatch.setattr(slurm_allocation, "answer_of", slurm.answer)
    for remembers in remembering:
        remembers.cache_clear()
    yield slurm
    for remembers in remembering:
        remembers.cache_clear()


TASKS: list[tuple[str, int, tuple[str, str] | None, str]] = [
    ("2(x2)", 4, None, "cuda"),
    ("1(x2)", 2, None, "cuda"),
    ("1(x2)", 5, None, "cpu"),  # more workers than GPUs
    ("4(x2)", 4, None, "cuda"),  # more tasks than workers
    ("4(x2)", 8, None, "cpu"),
    ("2(x2)", 4, ("gpu:2(IDX:0-1)", ""), "cpu"),
    ("2,1", 3, ("gpu:2(IDX:0-1)", "gpu:1(IDX:0)"), "cuda"),
    ("1(x2)", 2, ("", ""), "cpu"),
]


@pytest.mark.parametrize(("tasks", "workers", "has", "device"), TASKS)
def test_gpus_serve_where_each_worker_has_one(allocation: Any, tasks: str, workers: int, has: Any, device: str) -> None:
    allocation.has = [f"Mem=10 GRES={each}" for each in has] if has else allocation.has
    environment = ALLOCATED | {"SLURM_TASKS_PER_NODE": tasks}
    assert device_of(Run(workers=workers), IN_IT, environment) == device
    shares = Counter(
        (slot.node, gpu)
        for slot in slurm_allocation.slots_in(environment, workers)
        for gpu in share_of(",".join(map(str, range(slot.gpus))), f"{slot.number}/{slot.node_workers}").split(",")
    )
    assert (device == "cuda") == all(gpu and count == 1 for (_, gpu), count in shares.items())


FOUR_GPUS = "gpu:4(IDX:0-3)"


@pytest.mark.parametrize(
    ("tasks", "cores", "has", "workers"),
    [
        ("2(x2)", 8, "", 4), ("1(x2)", 8, "", 16), ("1(x2)", 1, "", 2), ("1(x2)", 8, FOUR_GPUS, 8),
        ("4(x2)", None, FOUR_GPUS, 8), ("4(x2)", None, "gpu:2(IDX:0-1)", 8),
    ],
)  # fmt: skip
def test_an_allocation_is_taken_as_a_whole(allocation: Any, tasks: str, cores: Any, has: str, workers: int) -> None:
    allocation.has = [f"Mem=0 GRES={has}"] * 2
    environment, device = ALLOCATED | {"SLURM_TASKS_PER_NODE": tasks}, "cuda" if has == FOUR_GPUS else "cpu"
    environment |= {"SLURM_JOB_CPUS_PER_NODE": f"{cores}(x2)"} if cores else {}
    assert device_of(Run(), IN_IT, environment) == device
    found = workers_of(Run(), IN_IT, device, environment)
    assert (found.workers, found.why[-17:]) == (workers, "of the allocation")
    assert {slot.node_workers for slot in slurm_allocation.slots_in(environment, workers)} == {workers // 2}


def test_an_allocation_without_gpus_or_memory_for_its_workers_is_refused(allocation: Allocation) -> None:
    allocation.has = ["Mem=8192 GRES="] * 2
    rows = ((Run(device="cuda"), IN_IT, "run.device is cuda"), (Run(), replace(IN_IT, gpus=1), "cluster.gpus is 1"))
    for run, cluster, requested in rows:
        assert device_of(run, cluster, ALLOCATED) == "cuda"
        with pytest.raises(ConfigError, match=rf"^{requested}, and Slurm lists no GPU .*--gres.*, write run\.workers"):
            workers_of(run, cluster, "cuda", ALLOCATED)
        assert workers_of(replace(run, workers=2), cluster, "cuda", ALLOCATED).workers == 2
    environment = ALLOCATED | {"SLURM_TASKS_PER_NODE": "3(x2)"}
    words = (
        r"memory_per_worker is 4GiB, and 3 workers on n1 may take 12 GiB; the allocation has 8 GiB there\. "
        r"Write run\.memory_per_worker: 2730MiB, run\.workers: 4, or ask Slurm for more"
    )
    with pytest.raises(MemoryRefused, match=words):
        check_allocation(Run(workers=6), IN_IT, environment)
    check_allocation(Run(workers=4), IN_IT, environment)
    check_allocation(Run(workers=6, memory_per_worker="2730MiB"), IN_IT, environment)
    allocation.has = ["Mem=0 GRES="] * 2  # which Slurm does not account for
    slurm_allocation.shares_of.cache_clear()
    check_allocation(Run(workers=600), IN_IT, ALLOCATED)


def test_an_allocation_is_asked_for_its_gpus_once_and_by_name_or_auto(allocation: Allocation, tmp_path: Path) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    environment = ALLOCATED | {"PATH": str(tmp_path)}
    for cluster in (IN_IT, Cluster(), Cluster()):
        assert device_of(Run(workers=2), cluster, environment) == "cuda"
    assert allocation.calls == 4, "each list of names, and the job"


DEVICES: list[tuple[Run, Cluster, dict[str, str], str]] = [
    (Run(), Cluster(kind="local-cuda"), {}, "cuda"),
    (Run(), Cluster(kind="slurm", gpus=1), {}, "cuda"),
    (Run(device="cpu"), Cluster(kind="slurm", gpus=1), {}, "cpu"),
    (Run(device="cuda"), Cluster(kind="local"), {}, "cuda"),
    (Run(device="cpu"), IN_IT, ALLOCATED, "cpu"),
    (Run(device="cuda"), IN_IT, ALLOCATED, "cuda"),
    (Run(workers=9), Cluster(kind="slurm-alloc", gpus=1), ALLOCATED, "cuda"),
    (Run(), Cluster(kind="local"), ALLOCATED, "cpu"),
    (Run(), Cluster(kind="slurm"), ALLOCATED, "cpu"),
    (Run(), IN_IT, {}, "cpu"),
]


def test_what_computes_is_said_or_follows_from_where_the_workers_live(allocation: Allocation) -> None:
    for run, cluster, environment, device in DEVICES:
        assert device_of(run, cluster, environment) == device
    assert allocation.calls == 0


def plan_of(folder: Path, name: str = "median", options: dict[str, Any] | None = None, **parts: Any) -> Plan:
    """The plan of a job on a small image."""
    source = folder / "in.zarr"
    if not source.exists():
        write_zarr(source, noisy_image((300, 260)))
    job = job_of(source, folder / "out.zarr", name, {"size": 3} if options is None else options)
    return make_plan(replace(job, **parts))


def test_a_plan_for_gpus_has_one_worker_on_each_of_them(monkeypatch: Patch, tmp_path: Path) -> None:
    have(monkeypatch, TWO)
    plain = plan_of(tmp_path, cluster=Cluster(kind="local"))
    on_cards = plan_of(tmp_path, cluster=Cluster(kind="local-cuda"))
    assert on_cards.run.workers == 2
    assert on_cards.placement.machine_bytes == plain.placement.machine_bytes is not None, "they share its memory"
    on_cpu, on_gpu = work_of(plain).task, work_of(on_cards).task
    assert (on_cpu.device, on_gpu.device, on_gpu.overlap) == ("cpu", "cuda", True)
    assert plain.fingerprint != on_cards.fingerprint
    assert on_cards.documents.asked["run"]["workers"] == Run().workers


def test_a_plan_for_a_card_that_is_not_there_is_refused(monkeypatch: Patch, tmp_path: Path) -> None:
    have(monkeypatch, NONE)
    monkeypatch.setattr(local_cuda, "gpus_here", lambda _: NONE)
    asked: tuple[tuple[Run, Any], ...] = ((Run(device="cuda"), 0), (Run(), "all"), (Run(), (0, 2)), (Run(), 3))
    for kind, (run, gpus) in itertools.product(("local", "auto"), asked):
        with pytest.raises(ConfigError, match=r"no GPU here: NVML finds none|not for cluster local"):
            plan_of(tmp_path, run=run, cluster=Cluster(kind=kind, gpus=gpus))
    for prior in (GAUSSIAN, L1):
        given = deblurring(tmp_path, prior=prior, cluster=Cluster(kind="local-cuda"), run=Run(workers=1))
        with pytest.raises(ConfigError, match=r"cluster\.kind is local-cuda, .* Write kind: local"):
            make_plan(given)


def test_precision_is_of_networks_and_another_one_is_another_job(tmp_path: Path) -> None:
    weights = {"weights": str(dncnn_weights(tmp_path / "w.safetensors", 3, 8)), "depth": 3, "width": 8}
    cases: dict[str, dict[str, Any]] = {"tv": {"strength": 0.1}, "gaussian": {"sigma": 1}, "dncnn": weights}
    precisions: tuple[Any, ...] = ("float32", "bfloat16")
    for name, options in cases.items():
        plain, half = (plan_of(tmp_path, name, options, run=Run(precision=precision)) for precision in precisions)
        differing = ['run.precision was "float32", is "bfloat16"'] if name == "dncnn" else []
        assert differences(plain.identity, half.identity) == differing
        ignored = f"run.precision is bfloat16, which is for networks: {name} computes in float32"
        assert (ignored in half.notes) == (plain.fingerprint == half.fingerprint) == (not differing)


def test_a_worker_step_inherits_no_gpus_per_task(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho $* > {tmp_path}/words\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {"GPUS_PER_TASK": "1", "TRES_PER_TASK": "gres/gpu=1", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    slots = NodeSlots([NodeSlot(number=1, node="n1", node_workers=2, cores=4, gpus=2, memory_bytes=None)])
    step = WorkerStep("tls://10.0.0.7:8786", "w", slots=slots, logs=tmp_path, arguments=())

    async def run_step() -> None:
        await step.start()
        process: Any = step._process
        await process.wait()
        await step.close()

    asyncio.run(run_step())
    names = {line.split("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert "SLURM_JOB_ID" in names
    assert not names & {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"}
    assert "--gres=gpu:2" in (tmp_path / "words").read_text()


MIG = ("MIG-1d3c1f2e-aaaa", "MIG-1d3c1f2e-bbbb")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("here", "gpus", "visible"),
    [
        (TWO, "all", ["0,1", "1,0"]),
        thorough(Gpus(("0", "1", "2", "3")), (1, 3), ["1,3", "3,1"]),
        thorough(Gpus(MIG), "all", [",".join(MIG), ",".join(reversed(MIG))]),
    ],
)
def test_each_worker_has_a_card_of_its_own(monkeypatch: Patch, here: Gpus, gpus: Any, visible: list[str]) -> None:
    pytest.importorskip("dask_cuda", reason="the extra cuda is not installed")
    have(monkeypatch, here)
    # There is no GPU to ask for its memory and its cores.
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")
    order = Order(workers=2, memory_bytes=2**30, choice=Cluster(kind="local-cuda", gpus=gpus))
    with local_cuda.start(order) as cluster:
        told = cluster.client.run(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]))
        workers = cluster.client.scheduler_info()["workers"]
    assert cluster.workers == 2
    assert sorted(told.values()) == [(each, "PCI_BUS_ID") for each in visible]
    assert all(address.startswith("tls://127.0.0.1:") for address in told)
    assert {worker["nthreads"] for worker in workers.values()} == {1}


ALONE = "GPUs are left alone: nothing of this job computes on them"
ASKED = "no part of this job computes on GPUs, but cluster local-cuda starts one worker for each GPU"
ONE_EACH = "operators and solver compute on CPUs, one for each GPU on cluster local-cuda"
L1 = PriorChoice(name="l1")


def test_gpus_that_nobody_asked_for_are_left_alone(requested: list[Any], tmp_path: Path) -> None:
    rows: list[tuple[PriorChoice, Any, Any, str, int, str]] = [
        (GAUSSIAN, "auto", "auto", "auto", 2, ONE_EACH),
        (L1, "auto", "auto", "local", 5, ALONE),
        (GAUSSIAN, "auto", "cpu", "local", 5, ALONE),
        (L1, "local-cuda", "auto", "local-cuda", 2, ASKED),
        (L1, "local", "auto", "local", 5, ""),
    ]
    for prior, kind, device, where, workers, said in rows:
        given = deblurring(tmp_path, prior=prior, cluster=Cluster(kind=kind), run=Run(workers=5, device=device))
        plan = make_plan(given)
        assert (plan.cluster.kind, plan.run.workers) == (where, workers)
        assert [note[: len(said)] for note in plan.notes if "GPU" in note] == [said][: len(said)]
        assert plan.documents.asked["cluster"]["kind"] == kind, "the next run may find itself elsewhere"
    plan = make_plan(replace(given, run=Run(device="cuda", precision="bfloat16", workers=1)))
    assert "run.precision is bfloat16, which is for networks: this job has none" in plan.notes
    assert "run.device is cuda, and nothing of this job computes on GPUs" in plan.notes
    assert plan.identity["precision"] == "bfloat16", "runs that began so go on"
    reference = str(write_zarr(tmp_path / "truth.zarr", noisy_image((256, 256))))
    made = replace(given.operators[0], data=str(tmp_path / "made.zarr"))
    given = replace(given, reference=reference, operators=(made,), cluster=Cluster())
    plan = make_plan(simulation_of(given, NoiseChoice(name="none")))
    assert (plan.cluster.kind, plan.run.workers) == ("local", 5), "measurements are made on processors"


def test_a_function_of_arrays_leaves_gpus_alone(requested: list[Any], tmp_path: Path) -> None:
    given = GivenFunction(call=lambda image: image, depth=1)
    plan = plan_of(tmp_path, denoiser=given)
    assert plan.cluster.kind == "local"
    assert ALONE in plan.notes
    assert plan_of(tmp_path).cluster.kind == "auto"
    plan = plan_of(tmp_path, denoiser=given, cluster=Cluster(kind="local-cuda"))
    assert work_of(plan).task.device == "cpu"
    assert any("computes on CPUs" in note for note in plan.notes)
    assert any("local-cuda starts one worker for each GPU. Write kind: local" in note for note in plan.notes)
