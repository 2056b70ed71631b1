"""Ranks of torch programs on workers: right sums, the same bits for any number of ranks, all ended together."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from distributed import Client, LocalCluster
from typer.testing import CliRunner

from halotile import DistributedContext
from halotile.cli.main import app
from halotile.errors import ConfigError, RankFailed
from halotile.graphs import torch_script
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common import answers as arrival
from halotile.graphs.clusters.common.answers import present_workers
from halotile.graphs.runs.passes import torch_ranks
from halotile.graphs.runs.passes.torch_ranks import RankEnd, TorchProgram
from halotile.graphs.torch_script import run_rank_of_script
from halotile.tasks.groups import opening, script
from halotile.tasks.groups.group import TorchGroup
from tests.cases import thorough
from tests.graphs import ranks

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * (dist.get_rank() + 1)).square().sum().backward()
print("weight", sys.argv[1], model.module.weight.grad.sum().item())
print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], dist.is_torchelastic_launched())
first = "once" in sys.argv and not os.path.exists(sys.argv[-1])
if dist.get_rank() == 1 and (first or "fail" in sys.argv):
    first and open(sys.argv[-1], "x")
    sys.exit("no such data")
if "die" in sys.argv and dist.get_rank() == 1:
    os.kill(os.getpid() if "alone" in sys.argv else os.getppid(), 9)
if "hang" in sys.argv:
    sys.exit("only this one") if dist.get_rank() == 0 else time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_rank_gets_the_combination_of_all(four: DistributedContext, count: int) -> None:
    ends = four.run_torch(ranks.everything, ranks=count)
    factors = torch.arange(1.0, count + 1)
    for rank, end in enumerate(ends):
        assert end["rank"] == (rank, count, rank, "cpu")
        assert end["sum"] == [float(factors.sum()), -2 * float(factors.sum())]
        assert end["mean"] == [float(factors.mean()), -2 * float(factors.mean())]
        assert end["min"] == [1.0, -2.0 * count]
        assert end["max"] == [float(count), -2.0]
        assert end["product"] == [float(factors.prod()), (-2.0) ** count * float(factors.prod())]
        assert end["copy"] == [float(count), -2.0 * count]
        assert end["left as it was"] == [rank + 1.0, -2.0 * (rank + 1)]


def test_sums_over_slots_have_the_same_bits_for_any_number_of_ranks(four: DistributedContext) -> None:
    expected = ranks.slot_sums(TorchGroup())
    for count in (1, 2, 3, 4):
        for sums in four.run_torch(ranks.slot_sums, ranks=count):
            assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
    shuffled = ranks.slot(11)
    for number in range(11):
        shuffled = shuffled + ranks.slot(number)
    assert not torch.equal(shuffled, expected[0])  # the order shows in the bits


def test_groups_along_the_axes_of_a_mesh_are_orthogonal(four: DistributedContext) -> None:
    ends = four.run_torch(ranks.along_mesh)
    assert [end["data"] for end in ends] == [(0, 101.0), (0, 1010.0), (1, 101.0), (1, 1010.0)]
    assert [end["space"] for end in ends] == [(0, 11.0), (1, 11.0), (0, 1100.0), (1, 1100.0)]
    assert [end["inner"] for end in ends] == [[11.0, 1.0], [11.0, 10.0], [1100.0, 100.0], [1100.0, 1000.0]]
    assert [end["copied"] for end in ends] == [100.0, 1000.0, 100.0, 1000.0]


def test_ranks_listen_on_the_address_of_their_worker_alone(four: DistributedContext) -> None:
    assert four.run_torch(ranks.listened_at) == [["127.0.0.1"]] * 4


def meeting_place(place: opening.Rendezvous) -> tuple[int, int | None]:
    """Mode of the folder in which ranks meet, and the number of a rank's GPU."""
    return stat.S_IMODE(Path(place.meeting).parent.stat().st_mode), place.gpu


def test_ranks_meet_in_a_private_folder_and_take_the_first_gpu_of_their_worker(four: DistributedContext) -> None:
    assert TorchProgram(meeting_place, four.folder).run(four.client, 4, 0) == [(0o700, 0)] * 4


def test_ranks_are_processes_of_their_own_and_repeat_their_bits(four: DistributedContext) -> None:
    ends = [four.run_torch(ranks.repeated) for _ in range(2)]
    assert len({pid for pid, _ in ends[0]} - {os.getpid()}) == 4
    assert len(set[bytes]().union(*(bits for end in ends for _, bits in end))) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_early_or_ends_early_waits_for_the_others(four: DistributedContext, rank: int) -> None:
    ends = four.run_torch(ranks.late, rank, 2.5, ranks=3, timeout_seconds=1.0)
    assert all(ends[rank] - end > 2 for number, end in enumerate(ends) if number != rank)


def test_a_barrier_waits_no_longer_than_it_says(four: DistributedContext, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"barrier: another rank ended, or did not answer in time"):
        four.run_torch(ranks.barrier_without, 1, str(tmp_path), ranks=3)
    waited = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(waited) == ["0", "2"]
    assert all(0.4 < seconds < 2.5 for seconds in waited.values())


def test_nothing_is_left_in_the_folder_in_which_ranks_meet(four: DistributedContext) -> None:
    four.run_torch(ranks.everything)
    assert list(four.folder.glob("ranks-*")) == []


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("raises", r"rank 2 of 4 failed: Traceback(?s:.)*ValueError: the seventh patch is empty\n"),
        ("killed", r"rank 2 of 4 failed: its worker tls://127\.0\.0\.1:\d+ died"),
        (
            "hangs",
            r"rank 2 of 4 did not answer the others in time, and its worker was started anew\. It was here:\n"
            r"Stack(?s:.)* in fail\n +time\.sleep(?s:.)*The first that waited for it:\n",
        ),
        thorough("returns", r"another rank ended, or did not answer in time"),
    ],
)
def test_a_rank_that_fails_ends_all_others(four: DistributedContext, way: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        four.run_torch(ranks.fail, way, 2, timeout_seconds=4.0)
    assert time.monotonic() - began < 25
    four.client.wait_for_workers(4, timeout=60)
    assert len(four.run_torch(ranks.everything)) == 4


@pytest.mark.thorough
def test_ranks_meet_in_another_attempt_after_they_waited_in_vain(four: DistributedContext, tmp_path: Path) -> None:
    call = partial(ranks.late_to_meet, tmp_path / "marker")
    program = TorchProgram(call, four.folder, device_mode="cpu", timeout_seconds=3.0)
    with pytest.warns(UserWarning, match=r"rank 1 of 3 did not answer(?s:.)*time\.sleep(?s:.)*waiting for 3 ranks"):
        assert program.run(four.client, 3, retries=1) == [3, 3, 3]


@pytest.mark.parametrize(
    "numbers",
    [{"ranks": n} for n in (0, -1, True, 1.5)] + [{"retries": -1}, {"timeout_seconds": 0}, {"end_seconds": -1}],
)
def test_numbers_that_mean_nothing_are_refused(four: DistributedContext, numbers: dict[str, Any]) -> None:
    (name,) = numbers
    with pytest.raises(ConfigError, match=f"{name} is {numbers[name]}: "):
        four.run_torch(ranks.everything, **numbers)


@pytest.mark.thorough
def test_ranks_that_are_done_wait_for_one_that_hangs_as_long_as_they_are_asked_to(four: DistributedContext) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 did not answer the others in time(?s:.)*barrier: "):
        four.run_torch(ranks.late, 1, 20.0, ranks=2, end_seconds=1.0)
    assert time.monotonic() - began < 40
    four.client.wait_for_workers(4, timeout=60)


def test_a_worker_without_a_nanny_is_not_said_to_be_started_anew() -> None:
    with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        hung = list(client.scheduler_info()["workers"])
        is_restarted = torch_ranks._restart(client, hung)
    end = RankEnd(0, trace="PeerLost", by_others=True)
    assert "its worker could not be started anew: it may still be" in str(
        torch_ranks._failure([end], [1], 2, is_restarted)
    )


def test_another_attempt_goes_on_from_a_checkpoint(four: DistributedContext, tmp_path: Path) -> None:
    ends = four.run_torch(ranks.once_killed, str(tmp_path), ranks=3, retries=1)
    assert ends == [(4, 45.0)] * 3


@pytest.mark.parametrize("wanted", [None, 4])
def test_another_attempt_does_without_a_worker_that_does_not_come_back(
    four: DistributedContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | None
) -> None:
    monkeypatch.setattr(torch_ranks, "RETURN_SECONDS", 1.0)
    workers = present_workers(four.client)
    nannies = four.client.cluster.workers
    (lost,) = (nanny for nanny in nannies.values() if str(nanny.name) == sorted(map(str, nannies))[1])
    monkeypatch.setattr(lost, "_on_worker_exit", lambda _: lost._unregister())
    if wanted is None:
        ends = four.run_torch(ranks.once_killed, str(tmp_path), retries=1)
        assert ends == [(4, 4 * 6.0 + 3 * 9.0)] * 3
    else:
        with pytest.raises(RankFailed, match="was killed"):
            four.run_torch(ranks.once_killed, str(tmp_path), ranks=wanted, retries=1)
    monkeypatch.undo()
    four.client.cluster.sync(lost.instantiate)
    four.client.wait_for_workers(len(workers), timeout=60)


def test_more_ranks_than_workers_are_refused(four: DistributedContext) -> None:
    with pytest.raises(ConfigError, match=r"ranks is 5, and the cluster has 4 workers.*ranks=4"):
        four.run_torch(ranks.everything, ranks=5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: group.all_reduce(torch.ones(1), "average"), r"op is 'average'.*sum, mean"),
        (lambda group: group.mesh({"data": 3}), r"lengths multiply to 3, and the number of ranks is 1\."),
        (
            lambda group: group.mesh({"data": 2, "space": -1}),
            r"'space': -1}: its other lengths multiply to 2, .* ranks is 1\.",
        ),
        (lambda group: group.mesh({"a": -1, "b": 1, "c": -1}), r"2 of its lengths are -1, and only one may be\."),
        (lambda group: group.mesh({"data": 0, "space": -1}), r"lengths of at least 1, or one of -1\."),
        (lambda group: group.mesh({}), r"lengths of at least 1"),
        (lambda group: group.broadcast(torch.ones(1), 1), r"source is 1.*0 to 0"),
        (lambda group: group.sum_slots({1: torch.ones(1)}, 2), r"slots \[1\] of 2.*\[0, 1\]"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_write(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call(TorchGroup())


def test_a_torchrun_script_runs_unchanged_on_a_cluster_and_anew_after_a_failure(tmp_path: Path) -> None:
    script, flag = tmp_path / "train.py", tmp_path / "failed"
    script.write_text(TRAIN)
    options = ("--torch", str(script), "--workers", "2", "--retries", "1", "--no-dashboard")
    command = [sys.executable, "-m", "halotile", "exec", *options, "--", "x", "once", str(flag)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    lines = sorted(line for line in done.stdout.splitlines() if " weight " in line)
    assert [line[:13] for line in lines] == 2 * ["[0] weight x "] + 2 * ["[1] weight x "]
    assert len({line[3:] for line in lines}) == 1
    restarts = sorted(line for line in done.stdout.splitlines() if " restart " in line)
    assert restarts == [f"[{rank}] restart {attempt} True" for rank in range(2) for attempt in range(2)]
    assert "train.py ended with exit code 1. Its last line: no such data\nStarting again" in done.stderr
    assert "attempt 2 of 2" in done.stderr


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('no such data')", "exit code 1. Its last line: no such data"),
        thorough("sys.exit(3)", "exit code 3. Its last line: at the end"),
        thorough("raise OSError('no disk')", "exit code 1. Its last line: at the end"),
    ],
)
def test_a_script_that_fails_says_why_even_where_its_group_would_abort_it(tmp_path: Path, end: str, said: str) -> None:
    failing = tmp_path / "fail.py"
    abort = "libc.__cxa_atexit(libc.abort, None, None)"  # as threads that still run do when C++ ends
    farewell = "atexit.register(print, 'at the end')" if "no such" not in end else ""
    failing.write_text(f"import atexit, ctypes, sys\nlibc = ctypes.CDLL(None)\n{abort}\n{farewell}\n{end}\n")
    lines: list[str] = []
    with pytest.raises(RankFailed, match=re.escape(said)):
        script.run_script(str(failing), (), opening.Rendezvous(rank=0, world_size=1), lines.append)
    assert ("OSError: no disk" in lines) == ("no disk" in end)


COPIES = {
    "torchrun": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
    "srun": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
}


@pytest.mark.parametrize("launcher", COPIES)
@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--torch train.py", "--workers 3 --torch train.py"),
        ("train.py --torch --memory 1GiB", "--workers 3 train.py --torch --memory 1GiB"),
        ("--torch --workers=4 train.py -- --epochs 3", "--torch --workers=4 train.py -- --epochs 3"),
        ("--torch 'my train.py' -- --workers 7", "--workers 3 --torch 'my train.py' -- --workers 7"),
    ],
)
def test_copies_of_exec_are_refused_with_the_command_that_works(
    launcher: str, words: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in COPIES[launcher].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/bin/recon-cli", "exec", *shlex.split(words)])
    with pytest.raises(ConfigError) as refused:
        torch_script.execute_torch("train.py", (), Order(workers=1, memory_bytes=2**30))
    assert str(refused.value) == (
        "this is copy 1 of 3 of the command, and exec --torch starts the ranks itself. Start it once, without torchrun, srun or "
        f"mpirun: `recon-cli exec {command}`."
    )


@pytest.mark.thorough
def test_the_command_that_exec_names_under_torchrun_works(tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text(TRAIN)
    recon_cli = str(Path(sys.executable).with_name("recon-cli"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["exec", "--torch", "my train.py", "--memory", "1GiB", "--no-dashboard", "--", "x", "-"]
    how: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 180}
    refused = subprocess.run([*torchrun, recon_cli, *words], check=False, **how)
    named = re.search(r"^error: .*`recon-cli (.*)`\.$", refused.stderr, re.MULTILINE)
    assert named, refused.stderr
    done = subprocess.run([recon_cli, *shlex.split(named[1])], check=True, **how)
    lines = [line[:13] for line in done.stdout.splitlines() if " weight " in line]
    assert sorted(lines) == ["[0] weight x ", "[1] weight x "]


def test_a_script_has_the_variables_of_torchrun(tmp_path: Path) -> None:
    place = opening.Rendezvous(3, 4, meeting=str(tmp_path / "ranks-7"), machine=1)
    variables = script.rank_variables(place, 2, 5)
    elastic = {name: variables[f"TORCHELASTIC_{name}"] for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")}
    assert elastic == {"RUN_ID": tmp_path.name, "RESTART_COUNT": "2", "MAX_RESTARTS": "5"}
    assert [variables[name] for name in ("GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")] == ["1", "3", "4"]


class Queue(RunningCluster):
    """A cluster whose workers come one by one."""

    def __init__(self) -> None:
        super().__init__(None, 3)
        self.present = 0
        self.checked: list[int] = []

    def missing(self, wanted: int = 1) -> str | None:
        """The reason why there are fewer."""
        return f"{3 - self.present} PENDING" if self.present < wanted else None

    def check(self, wanted: int = 1) -> None:
        """Another one comes."""
        self.checked.append(wanted)
        self.present += 1


class Program:
    """A program that fails the first time, and loses its workers."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.runs: list[tuple[int, int | None]] = []

    def run(self, _: None, ranks: int | None, *__: int) -> None:
        """Record how many workers there are, and how many were asked for."""
        self.runs.append((self.queue.present, ranks))
        if len(self.runs) == 1:
            self.queue.present = 0
            raise RankFailed("rank 0 of 3 failed: its worker died\nmore", 0)


def test_a_script_waits_for_all_workers_and_after_a_failure_for_those_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrival, "QUIET_SECONDS", -1.0)
    monkeypatch.setattr(arrival, "POLL_SECONDS", 0.0)
    queue, reports = Queue(), list[str]()
    program: Any = Program(queue)
    attempts: list[int] = []

    def program_of(attempt: int) -> Any:
        attempts.append(attempt)
        return program

    order = Order(workers=3, memory_bytes=1, report=reports.append)
    torch_script._run(program_of, cast(Any, queue), order, 1)
    assert attempts == [0, 1]
    assert program.runs == [(3, 3), (1, None)]
    assert queue.checked == [3, 3, 3, 1]
    assert reports[:3] == [f"waiting for 3 workers: {left} PENDING" for left in (3, 2, 1)]
    assert reports[3].startswith("rank 0 of 3 failed: its worker died\nStarting again")
    assert reports[4:] == ["waiting for the first of 3 workers: 3 PENDING"]


@pytest.mark.parametrize("words", [["--retries", "1"], ["--torch", "--retries=-1"]])
def test_attempts_are_of_ranks(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    done = CliRunner().invoke(app, ["exec", str(tmp_path / "s.py"), *words])
    assert done.exit_code == 2
    assert "Write 0 or more, with --torch." in done.stderr


@pytest.mark.thorough
def test_a_script_that_fails_ends_those_of_all_ranks(four: DistributedContext, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for words, failure in (
        (("fail",), r"1 of 2 failed: .*train\.py ended with exit code 1\. Its last line: no such data"),
        (("hang",), r"(1 of 2 did not answer|0 of 2 failed)"),
        (("die", "alone"), r"1 of 2 failed: .*was ended by SIGKILL, as where memory ran out\."),
        (("die",), "1 of 2 failed: .*its worker .* died"),
    ):
        program = TorchProgram(partial(run_rank_of_script, str(script), words), four.folder)
        with pytest.raises(RankFailed, match=f"rank {failure}"):
            program.run(four.client, 2, 0)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())]


def test_a_script_waits_for_minutes_not_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(groups, name, timedelta(minutes=30))
    script._shorten_waits()
    assert groups._get_default_timeout("gloo") == groups._get_default_timeout("nccl") == timedelta(minutes=5)


def test_nccl_is_bound_to_the_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    opening._connect(opening.Rendezvous(meeting=str(tmp_path / "meeting")), "nccl")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("visible", "all_gpus", "seen"),
    [
        ("1,0,10", True, {"CUDA_VISIBLE_DEVICES": "0,1,10", "LOCAL_RANK": "1"}),
        ("3", True, {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "0"}),  # the batch system shows no others
    ],
)
def test_a_rank_sees_its_own_gpu_or_all_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, visible: str, all_gpus: bool, seen: dict[str, str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    variables = script.rank_variables(opening.Rendezvous(1, 2, 1, local_size=2), all_gpus=all_gpus)
    assert seen.items() <= variables.items()
