"""Scripts of torchrun on a cluster, unchanged: what they see, how they end, and how they start anew."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import psutil
import pytest
from typer.testing import CliRunner

from halotile import DistributedContext
from halotile.cli.main import app
from halotile.errors import ConfigError, RankFailed
from halotile.graphs import torch_script
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common import answers as arrival
from halotile.graphs.runs.passes.torch_ranks import TorchProgram
from halotile.graphs.torch_script import run_rank_of_script
from halotile.tasks.groups import script
from halotile.tasks.groups.opening import Rendezvous
from tests.cases import in_folders, thorough

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], dist.is_torchelastic_launched())
first = "once" in sys.argv and not os.path.exists(sys.argv[-1])
if dist.get_rank() == 1 and (first or "fail" in sys.argv):
    first and open(sys.argv[-1], "x")
    sys.exit("no such data")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * (dist.get_rank() + 1)).square().sum().backward()
print("weight", sys.argv[1], model.module.weight.grad.sum().item())
if "die" in sys.argv and dist.get_rank() == 1:
    os.kill(os.getpid() if "alone" in sys.argv else os.getppid(), 9)
if "hang" in sys.argv:
    sys.exit("only this one") if dist.get_rank() == 0 else time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_torchrun_script_runs_unchanged_on_a_cluster_and_anew_after_a_failure(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(TRAIN)
    options = ("--torch", str(path), "--workers", "2", "--retries", "1", "--no-dashboard")
    done = CliRunner().invoke(app, ["exec", *options, "--", "x", "once", str(tmp_path / "failed")])
    assert done.exit_code == 0, done.output
    lines = sorted(line for line in done.stdout.splitlines() if " weight " in line)
    assert [line[:13] for line in lines] == ["[0] weight x ", "[1] weight x "]
    assert len({line[3:] for line in lines}) == 1
    restarts = sorted(line for line in done.stdout.splitlines() if " restart " in line)
    assert restarts == [f"[{rank}] restart {attempt} True" for rank in range(2) for attempt in range(2)]
    assert "train.py ended with exit code 1. Its last line: no such data\nStarting again" in done.stderr
    assert "attempt 2 of 2" in done.stderr


@pytest.mark.thorough
def test_a_script_that_fails_ends_those_of_all_ranks(four: DistributedContext, tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(TRAIN)
    for words, failure in {
        "fail": r"1 of 2 failed: .*train\.py ended with exit code 1\. Its last line: no such data",
        "hang": r"(1 of 2 did not answer|0 of 2 failed)",
        "die alone": r"1 of 2 failed: .*was ended by SIGKILL, as where memory ran out\.",
        "die": "1 of 2 failed: .*its worker .* died",
    }.items():
        program = TorchProgram(partial(run_rank_of_script, str(path), tuple(words.split())), four.folder)
        with pytest.raises(RankFailed, match=f"rank {failure}"):
            program.run(four.client, 2, 0)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(path) in (p.info["cmdline"] or ())]


FAILING = [("sys.exit('no such data')", "exit code 1. Its last line: no such data")]
FAILING += [thorough("raise OSError('no disk')", "exit code 1. Its last line: at the end")]


@pytest.mark.parametrize(("end", "said"), FAILING)
def test_a_script_that_fails_says_why_even_where_its_group_would_abort_it(tmp_path: Path, end: str, said: str) -> None:
    failing = tmp_path / "fail.py"
    abort = "libc.__cxa_atexit(libc.abort, None, None)"  # as threads that still run do when C++ ends
    farewell = "atexit.register(print, 'at the end')" if "no such" not in end else ""
    failing.write_text(f"import atexit, ctypes, sys\nlibc = ctypes.CDLL(None)\n{abort}\n{farewell}\n{end}\n")
    lines: list[str] = []
    with pytest.raises(RankFailed, match=re.escape(said)):
        script.run_script(str(failing), (), Rendezvous(rank=0, world_size=1), lines.append)
    assert ("OSError: no disk" in lines) == ("no disk" in end)


BACKGROUND = """
import subprocess, sys, threading, time
subprocess.Popen(["sleep", "20"])
log = open(sys.argv[2], "w")
log.write("epoch 1")
def wait():
    while True:
        time.sleep(0.001)
threading.Thread(target=wait, daemon=True).start()
def main(code: str = "") -> None:
    assert main.__annotations__["code"] is str
    print("done", file=sys.stderr if log.closed else sys.stdout)
    sys.exit(int(sys.argv[1]))
main()
"""


@pytest.mark.thorough
def test_a_script_ends_before_what_it_leaves_running_with_its_files_whole(tmp_path: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("0", ""),
        ("3", "ended with exit code 3. Its last line: done"),
        ("x", "ended with exit code 1. Its last line: ValueError"),
    ]
    for folder, (code, words) in in_folders(tmp_path, rows):
        path, log, lines = folder / "leaves.py", folder / "log", list[str]()
        path.write_text(BACKGROUND)
        began, failure = time.monotonic(), ""
        try:
            script.run_script(str(path), (code, str(log)), Rendezvous(), lines.append)
        except RankFailed as error:
            failure = str(error)
        assert time.monotonic() - began < 15
        assert lines[0] == "done"
        assert words in failure
        assert bool(words) == bool(failure)
        assert log.read_text() == "epoch 1"


COPIES = {
    "torchrun": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
    "srun": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
}
COMMANDS = {
    "--torch train.py": "--workers 3 --torch train.py",
    "train.py --torch --memory 1GiB": "--workers 3 train.py --torch --memory 1GiB",
    "--torch --workers=4 train.py -- --epochs 3": "--torch --workers=4 train.py -- --epochs 3",
    "--torch 'my train.py' -- --workers 7": "--workers 3 --torch 'my train.py' -- --workers 7",
}


@pytest.mark.parametrize("launcher", COPIES)
def test_copies_of_exec_are_refused_with_the_command_that_works(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COPIES[launcher].items():
        monkeypatch.setenv(name, value)
    for words, command in COMMANDS.items():
        monkeypatch.setattr(sys, "argv", ["/bin/recon-cli", "exec", *shlex.split(words)])
        with pytest.raises(ConfigError) as refused:
            torch_script.execute_torch("train.py", (), Order(workers=1, memory_bytes=2**30))
        assert str(refused.value) == (
            "this is copy 1 of 3 of the command, and exec --torch starts the ranks itself. Start it once, without torchrun, "
            f"srun or mpirun: `recon-cli exec {command}`."
        )


class Queue(RunningCluster):
    """A cluster whose workers come one by one, each at a check."""

    present = 0

    def missing(self, wanted: int = 1) -> str | None:
        return f"{3 - self.present} PENDING" if self.present < wanted else None

    def check(self, wanted: int = 1) -> None:
        self.present += 1


def test_a_script_waits_for_all_workers_and_later_for_those_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "QUIET_SECONDS", -1.0)
    monkeypatch.setattr(arrival, "WAIT_STEP_SECONDS", 0.0)
    queue, reports, seen = Queue(None, 3), list[str](), list[int]()

    def run(_: None, ranks: int | None, *__: int) -> None:
        seen.append(queue.present)
        if len(seen) == 1:
            queue.present = 0
            raise RankFailed("rank 0 of 3 failed: its worker died\nmore", 0)

    program = Mock(run=Mock(side_effect=run))
    program_of = Mock(return_value=program)
    torch_script._run(program_of, queue, Order(workers=3, memory_bytes=1, report=reports.append), 1)
    assert program_of.call_args_list == [call(0), call(1)]
    assert [each.args[:2] for each in program.run.call_args_list] == [(None, 3), (None, None)]
    assert seen == [3, 1]
    assert reports[:3] == [f"waiting for 3 workers: {left} PENDING" for left in (3, 2, 1)]
    assert reports[3].startswith("rank 0 of 3 failed: its worker died\nStarting again")
    assert reports[4:] == ["waiting for the first of 3 workers: 3 PENDING"]


def test_attempts_are_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    for words in (["--retries", "1"], ["--torch", "--retries=-1"]):
        done = CliRunner().invoke(app, ["exec", str(tmp_path / "s.py"), *words])
        assert (done.exit_code, "Write 0 or more, and only with --torch." in done.stderr) == (2, True)


def test_a_script_waits_for_minutes_not_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(groups, name, timedelta(minutes=30))
    script._shorten_waits()
    assert groups._get_default_timeout("gloo") == groups._get_default_timeout("nccl") == timedelta(minutes=5)
