"""Ranks that a launcher or `exec --torch` started: their numbers, where they meet and listen, their GPUs, and how scripts of torchrun end and start anew."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from halotile import DistributedContext, torch_group
from halotile.cli.main import app
from halotile.errors import ClusterFailed, ConfigError, RankFailed
from halotile.graphs import torch_script
from halotile.graphs.clusters import ranks
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common import answers as arrival
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of, is_other_copy
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.runs.passes.torch_ranks import TorchProgram
from halotile.graphs.torch_script import run_rank_of_script
from halotile.tasks.groups import opening, script
from halotile.tasks.groups.opening import Copy, Rendezvous, copy_of
from halotile.tasks.groups.script import rank_variables
from tests.cases import in_folders, thorough
from tests.faults import REPOSITORY
from tests.graphs import ranks as programs
from tests.graphs.ranks import launched

Patch = pytest.MonkeyPatch

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def of(prefix: str, **words: object) -> dict[str, str]:
    """Variables whose names begin alike."""
    return {f"{prefix}{name}": str(word) for name, word in words.items()}


STEP = of("SLURM_", JOB_ID=7, STEP_ID=0, PROCID=1, STEP_NUM_TASKS=2)
PMI = of("PMI_", RANK=3, SIZE=4)
PMIX = {"PMIX_RANK": "3", "HALOTILE_SIZE": "4"}
PALS = of("PALS_", RANKID=3, LOCAL_RANKID=1, APID="a-b")
LOCAL = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
SET_BY = {
    "srun": (STEP | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}, Copy(1, 2, 1, 2, "7-0")),
    "srun on two nodes": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, Copy(1, 2, None, None, "7-0")),
    "mpirun of Open MPI": (of("OMPI_COMM_WORLD_", **LOCAL) | of("PMIX_", NAMESPACE="prterun-a-1@1", RANK=3), Copy(3, 4, 1, 2, "prterun-a-1@1")),
    "mpiexec of MPICH": (PMI | of("MPI_", LOCALRANKID=1, LOCALNRANKS=2), Copy(3, 4, 1, 2)),
    "mpirun_rsh of MVAPICH2": (of("MV2_COMM_WORLD_", **LOCAL) | {"MPIRUN_ID": "99"}, Copy(3, 4, 1, 2, "99")),
    "MVAPICH 3": (of("MVP_COMM_WORLD_", RANK=3, SIZE=4), Copy(3, 4)),
    "mpiexec of PALS": (PALS | PMI | {"PMI_LOCAL_SIZE": "2"}, Copy(3, 4, 1, 2, "a-b")),
    "torchrun": (
        of("", RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, MASTER_PORT=29500, TORCHELASTIC_RUN_ID="none"),
        Copy(3, 4, 1, 2, "none-29500"),
    ),
    "torchrun in a step of each node": (STEP | of("", RANK=3, WORLD_SIZE=4, MASTER_PORT=1), Copy(3, 4, launch="7-1")),
    "PMIx with a count": (PMIX, Copy(3, 4)),
    "PMIx with a number on its machine": (PMIX | {"HALOTILE_LOCAL_RANK": "1"}, Copy(3, 4, 1)),
    "PALS with a count": (PALS | {"HALOTILE_SIZE": "4"}, Copy(3, 4, 1, launch="a-b")),
    "PMIx in a batch job's script": (PMIX | of("SLURM_", JOB_ID=7, PROCID=0), Copy(3, 4, launch="7")),
    "whoever knows better": (STEP | of("HALOTILE_", RANK=3, SIZE=4, LOCAL_RANK=1), Copy(3, 4, 1, launch="7")),
}  # fmt: skip
ALONE: dict[str, dict[str, str]] = {
    "nothing": {},
    "one task": STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    "variables of somebody's own": {"RANK": "colonel", "WORLD_SIZE": "large"},
    "a size alone": {"WORLD_SIZE": "8"},
    "whoever knows better": {"HALOTILE_RANK": "0", "HALOTILE_SIZE": "1", "RANK": "0", "WORLD_SIZE": "4"},
    "PALS with a count of one": {"HALOTILE_SIZE": "1", "PALS_RANKID": "0"},
}


def test_a_copy_knows_its_number_one_alone_is_no_rank_and_those_that_nobody_counts_are_refused() -> None:
    for how, (environment, copy) in SET_BY.items():
        assert copy_of(environment) == copy, how
        assert cluster_kind_of(Cluster(), environment).name == "ranks"
        assert is_other_copy(Cluster(), environment)
    assert [how for how, environment in ALONE.items() if copy_of(environment) is not None] == []
    for name in ("PMIX_RANK", "PALS_RANKID"):
        with pytest.raises(ConfigError, match=rf"{name} is 0.*Set HALOTILE_SIZE"):
            cluster_kind_of(Cluster(), {name: "0"})


LOOK = "import json, sys; from halotile.tasks.groups.opening import copy_of; print([copy_of(e) is not None for e in json.loads(sys.argv[1])])"
AT_A_TERMINAL = "import pty, sys; pty.spawn(sys.argv[1:])"
PTY = STEP | {"SLURM_PTY_PORT": "9"}


def test_the_shell_of_an_interactive_step_is_no_rank() -> None:
    seen = {
        json.dumps(PTY): False,
        json.dumps(PTY | {"PMI_RANK": "1", "PMI_SIZE": "2"}): False,
        json.dumps(STEP): True,
        json.dumps(PTY | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}): True,
    }
    command = [sys.executable, "-c", AT_A_TERMINAL, sys.executable, "-c", LOOK, f"[{','.join(seen)}]"]
    said = subprocess.check_output(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, timeout=60, text=True)
    assert said.strip() == str([*seen.values()])


def test_a_copy_that_is_alone_says_what_it_waits_for(tmp_path: Path, monkeypatch: Patch) -> None:
    lines: list[str] = []
    for name, value in {"log_line": lines.append, "WORD_SECONDS": 0.05, "WAIT_SECONDS": 0.5}.items():
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterFailed, match="the first copy of the command did not begin within"):
        ranks.serve(tmp_path)
    (line,) = lines
    assert line.startswith("copy 1 of 2 (counted from 0) waits for the first copy")
    assert "unset the variables that number copies, as RANK and WORLD_SIZE" in line


SLURM = of("SLURM_", JOB_ID=7, STEP_ID=1, STEP_NUM_TASKS=2, STEP_TASKS_PER_NODE=2)
OPENMPI = {"PMIX_NAMESPACE": "prterun-a-7@1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
"""An address of no machine, where nobody can meet."""
OVERRIDE = {"HALOTILE_SIZE": "2", "HALOTILE_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
TURNS = [[str(rank), "2", str(1.0 + 20 * turn), "127.0.0.1"] for rank in range(2) for turn in range(3)]


LAUNCHERS = [
    (SLURM | ELSEWHERE, "SLURM_PROCID"), (OPENMPI | ELSEWHERE, "OMPI_COMM_WORLD_RANK"), thorough(OVERRIDE, "HALOTILE_RANK"),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "rank"), LAUNCHERS)
def test_ranks_of_a_launcher_join_again_and_listen_on_loopback_alone(launcher: dict[str, str], rank: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        launcher = {"MASTER_PORT": str(free.getsockname()[1])} | launcher
    ended = launched(programs.turns, [launcher | {rank: str(number)} for number in range(2)])
    assert [words for end in ended for words in end.result] == TURNS


def test_ranks_of_torchrun_join_again_and_again(tmp_path: Path) -> None:
    (script := tmp_path / "turns.py").write_text(
        "from tests.graphs.ranks import turns\n"
        "for words in turns():\n    print(' '.join(words) + '\\n', end='', flush=True)  # in one piece: both write to one pipe\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    said = subprocess.check_output(torchrun, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, text=True, timeout=120)
    # The store is torchrun's, and listens where that says.
    assert sorted(line.split()[:3] for line in said.splitlines()) == [words[:3] for words in TURNS]


def test_ranks_that_cannot_meet_are_told(monkeypatch: Patch) -> None:
    cannot = r"rank 0 cannot listen at MASTER_ADDR 192\.0\.2\.1, MASTER_PORT 29500"
    alone = {"HALOTILE_SIZE": "2", "HALOTILE_LOCAL_SIZE": "2", "HALOTILE_RANK": "0"}
    for words, said in ((alone, r"rank 0 of 2, and nothing says where.*MASTER_ADDR"), (ELSEWHERE, cannot)):
        for name, word in words.items():
            monkeypatch.setenv(name, word)
        with pytest.raises(ConfigError, match=said), torch_group.join(device_mode="cpu"):
            pass


def test_a_rank_that_has_ended_does_not_wait_for_one_that_died() -> None:
    """Nobody ends it: not every launcher does when another rank fails."""
    step = SLURM | {"SLURM_STEP_ID": "2"}
    waiting, killed = launched(programs.waited_for, [step | {"SLURM_PROCID": str(number)} for number in range(2)])
    assert killed.code == -9
    assert 0.2 < waiting.result < 20


def test_ranks_remove_the_file_in_which_they_met(tmp_path: Path) -> None:
    ended = launched(programs.left_at_once, [{"RANK": str(rank)} for rank in range(2)], str(tmp_path / "meeting"))
    assert [end.code for end in ended] == [0, 0]
    assert not (tmp_path / "meeting").exists()


def test_a_program_that_has_a_process_group_keeps_it(tmp_path: Path) -> None:
    ended = launched(programs.own_group, [{"RANK": str(rank)} for rank in range(2)], str(tmp_path / "meet"))
    both = [[(rank, 2, 3.0, 2, 2)] * 2 for rank in range(2)]
    assert [end.result for end in ended] == [[*both[0], (0, 1, 1.0, 1, 1)], [*both[1], (0, 1, 2.0, 1, 1)]]


GIVEN: tuple[tuple[Any, str], ...] = (
    ("mesh", r"process_group is DeviceMesh.* not a torch ProcessGroup\. Write .*mesh\.get_group\('space'\)"),
    ("space", r"process_group is 'space', which is not a torch ProcessGroup\. Write "),
    (dist.GroupMember.NON_GROUP_MEMBER, r"this rank is not a member of process_group"),
    (None, ""),
)


def test_a_process_group_that_is_none_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "space"))
        for given, said in GIVEN:
            chosen = mesh if given == "mesh" else given
            with (
                pytest.raises(ConfigError, match=said) if said else nullcontext(),
                torch_group.join(device_mode="cpu", process_group=chosen) as group,
            ):
                assert group.world_size == 1
    finally:
        dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder in which ranks of this user meet, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/halotile/ranks"


@pytest.mark.parametrize("kind", ["readable by the group", "of another user", "linked"])
def test_ranks_do_not_meet_where_others_could_join_them(kind: str, folder: Path, monkeypatch: Patch) -> None:
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    for name, word in STEP.items():
        monkeypatch.setenv(name, word)
    made = folder.with_name("theirs") if kind == "linked" else folder
    made.mkdir(parents=True, mode=0o700)
    if kind == "linked":
        folder.symlink_to(made)
    elif kind == "of another user":
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o740)
    with pytest.raises(ConfigError, match=r"ranks, which is not a folder of yours alone"), torch_group.join():
        pass


def test_ranks_meet_in_a_closed_folder_from_which_files_of_killed_ones_are_removed_some_day(folder: Path) -> None:
    places = [torch_group._place(Copy(rank, 4, rank % 2, 2, "8-1"), {}) for rank in range(4)]
    assert [place.gpu for place in places] == [0, 1, 0, 1]
    first, same = (Path(torch_group._meeting(Copy(1, 2, launch="8-1"), {})) for _ in range(2))
    assert first == same
    assert first.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    old, new = first.with_name("7-1---0"), first.with_name("7-2---0")
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 8 * 86400,) * 2)
    again = Path(torch_group._meeting(Copy(1, 2, launch="8-1"), {}, 1))
    assert again.parent == folder
    assert again.name != first.name
    assert list(folder.iterdir()) == [new]


ROTATED = ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2"]  # as dask-cuda has it: a worker sees its own first
SEEN: list[tuple[str | None, Rendezvous, bool, str | None, str]] = [
    *((own, Rendezvous(n, 4, n, local_size=4), False, str(n), "0") for n, own in enumerate(ROTATED)),
    # In a batch system each worker sees its own alone, which may be several.
    *((own, Rendezvous(n, 4, n, local_size=4), False, own, "0") for n, own in enumerate("3210")),
    ("2,3", Rendezvous(0, 4, 0, local_size=1), False, "2,3", "0"),
    ("1,0,10", Rendezvous(1, 2, 1, local_size=2), True, "0,1,10", "1"),
    ("3", Rendezvous(1, 2, 1, local_size=2), True, "3", "0"),
    # Where nothing is hidden it takes the one of its number.
    (None, Rendezvous(5, 8, 1, local_size=4), False, None, "1"),
]
"""The GPUs that a worker sees, its rank, whether all of the machine are asked for; those that a script sees, and its number there."""


def test_a_script_sees_the_gpu_of_its_worker_alone_or_all_of_its_machine(monkeypatch: Patch) -> None:
    for own, place, all_gpus, visible, number in SEEN:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if own is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        variables = rank_variables(place, all_gpus=all_gpus)
        assert int(variables["HALOTILE_LOCAL_RANK"]) == place.local_rank
        assert (variables.get("CUDA_VISIBLE_DEVICES"), variables["LOCAL_RANK"]) == (visible, number)


def test_a_group_has_its_own_gpu(monkeypatch: Patch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(opening, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    # Where nothing says which, a rank in a batch system may see its own alone.
    nowhere = replace(torch_group._place(Copy(1, 2), ELSEWHERE), rank=0, world_size=1)
    for place, count, gpu in (
        (Rendezvous(), 2, 0), (Rendezvous(gpu=1), 2, 1), (Rendezvous(gpu=5), 2, 1), (nowhere, 1, 0),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with opening.opened(place) as group:
            assert group.device == current.pop() == torch.device("cuda", gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 0 sees 2 GPUs.*HALOTILE_LOCAL_RANK"), opening.opened(nowhere):
        pass


def test_ranks_that_share_a_gpu_are_refused() -> None:
    for names, refused in ((("n1 a", "n1 b", "n2 a"), False), (("n1 a", "n2 b", "n2 b"), True)):
        store = dist.HashStore()
        for rank, gpu in enumerate(names):
            store.set(f"gpu-{rank}", gpu)
        for rank, gpu in enumerate(names):
            with pytest.raises(ConfigError, match="ranks 1, 2 share GPUs") if refused else nullcontext():
                opening.refuse_shared_gpu(store, Rendezvous(rank, 3), gpu)


def test_nccl_is_bound_to_the_interface_of_an_address(monkeypatch: Patch, tmp_path: Path) -> None:
    assert opening.interface_of("localhost") == opening.interface_of("127.0.0.1") == "lo"
    assert opening.interface_of("192.0.2.1") == ""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is as before afterwards
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    opening._connect(Rendezvous(meeting=str(tmp_path / "meeting")), "nccl")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


# --- scripts of torchrun, unchanged, on a cluster ---

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
def test_copies_of_exec_are_refused_with_the_command_that_works(launcher: str, monkeypatch: Patch) -> None:
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


def test_a_script_waits_for_all_workers_and_later_for_those_that_come(monkeypatch: Patch) -> None:
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


def test_a_script_waits_for_minutes_not_for_half_an_hour(monkeypatch: Patch) -> None:
    groups = dist.distributed_c10d
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(groups, name, timedelta(minutes=30))
    script._shorten_waits()
    assert groups._get_default_timeout("gloo") == groups._get_default_timeout("nccl") == timedelta(minutes=5)
