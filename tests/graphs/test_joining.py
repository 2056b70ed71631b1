"""Scripts join the ranks that a launcher started: where they meet, at which addresses they listen, and how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from halotile import torch_group
from halotile.errors import ConfigError
from tests.cases import thorough

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

JOIN = """
import psutil, torch, halotile
with halotile.torch_group.join(device_mode="cpu", timeout_seconds=60) as group:
    total = float(group.all_reduce(torch.tensor(group.rank + 1.0)))
    sockets = psutil.Process().net_connections("tcp")
    places = {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}
    print(f"{group.rank} {group.world_size} {total} {','.join(places)}\\n", end="", flush=True)
"""

STEP = {"ID": "1", "NUM_TASKS": "2", "TASKS_PER_NODE": "2"}
SLURM = {"SLURM_JOB_ID": "7"} | {f"SLURM_STEP_{name}": value for name, value in STEP.items()}
OPENMPI = {"PMIX_NAMESPACE": "prterun-a-7@1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ELSEWHERE = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
"""An address of no machine, where nobody can meet."""
OVERRIDE = {"HALOTILE_SIZE": "2", "HALOTILE_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def printed(folder: Path, text: str, *words: object, environments: Sequence[Mapping[str, str]] = ({}, {})) -> list[str]:
    """What a script prints as each of two ranks, the numbers of which are its last words."""
    script = folder / "script.py"
    script.write_text(text)
    started = [
        subprocess.Popen(
            [sys.executable, script, *map(str, words), str(rank)], env=os.environ | dict(own), stdout=subprocess.PIPE, text=True
        )
        for rank, own in enumerate(environments)
    ]  # fmt: skip
    return [process.communicate(timeout=120)[0] for process in started]


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        (SLURM | ELSEWHERE, "SLURM_PROCID"),
        thorough(OPENMPI | ELSEWHERE, "OMPI_COMM_WORLD_RANK"),
        thorough(OVERRIDE, "HALOTILE_RANK"),
    ],
)
def test_a_script_joins_the_ranks_of_its_launcher_and_listens_on_loopback_alone(
    launcher: dict[str, str], rank: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        launcher = {"MASTER_PORT": str(free.getsockname()[1])} | launcher
    said = printed(tmp_path, JOIN, environments=[launcher | {rank: str(number)} for number in range(2)])
    lines = [text.split() for text in said]
    assert lines == [["0", "2", "3.0", "127.0.0.1"], ["1", "2", "3.0", "127.0.0.1"]]


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in {**OVERRIDE, **ELSEWHERE, "HALOTILE_RANK": "0"}.items():
        monkeypatch.setenv(name, word)
    with (
        pytest.raises(ConfigError, match=r"rank 0 cannot listen at MASTER_ADDR 192\.0\.2\.1, MASTER_PORT 29500"),
        torch_group.join(device_mode="cpu"),
    ):
        pass


END = """
import os, signal, time, torch, halotile
began = None
try:
    with halotile.torch_group.join(device_mode="cpu") as group:
        if group.rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
except halotile.errors.PeerLost:
    print(time.monotonic() - began)
"""


def test_a_rank_that_has_ended_does_not_wait_for_one_that_died(tmp_path: Path) -> None:
    """Nobody ends it: not every launcher does when another rank fails."""
    step = SLURM | {"SLURM_STEP_ID": "2"}
    environments = [step | {"SLURM_PROCID": str(number)} for number in range(2)]
    waited, _ = printed(tmp_path, END, environments=environments)
    assert 0.5 < float(waited) < 20


def test_a_script_joins_the_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=120, check=True).stdout
    assert sorted(said.splitlines()) == ["0 2 3.0 127.0.0.1", "1 2 3.0 127.0.0.1"]  # the store is torchrun's


OWN_GROUP = """
import sys, torch, halotile
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "space"))
for given in (None, mesh.get_group("space"), mesh.get_group("data")):
    with halotile.torch_group.join(device_mode="cpu", process_group=given) as group:
        total = float(group.all_reduce(torch.tensor(dist.get_rank() + 1.0)))
        part = halotile.collectives.all_gather_v(torch.ones(1), group, [1] * group.world_size)
        group.barrier()
        inner = group.mesh({"left": 1, "rest": -1})["rest"].world_size
    print(group.rank, group.world_size, total, len(part), inner)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_program_that_has_a_process_group_keeps_it(tmp_path: Path) -> None:
    lines = [text.splitlines() for text in printed(tmp_path, OWN_GROUP, tmp_path / "meet")]
    both = [[f"{rank} 2 3.0 2 2"] * 2 for rank in range(2)]
    assert lines == [[*both[0], "0 1 1.0 1 1"], [*both[1], "0 1 2.0 1 1"]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("mesh", r"process_group is DeviceMesh.* not a torch ProcessGroup\. Write .*mesh\.get_group\('space'\)"),
        ("space", r"process_group is 'space', which is not a torch ProcessGroup\. Write "),
        (dist.GroupMember.NON_GROUP_MEMBER, r"this rank is not a member of process_group"),
        (None, ""),
    ],
)
def test_a_process_group_that_is_none_is_refused(given: Any, expected: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "space"))
        chosen = mesh if given == "mesh" else given
        with (
            pytest.raises(ConfigError, match=expected) if expected else nullcontext(),
            torch_group.join(device_mode="cpu", process_group=chosen) as group,
        ):
            assert group.world_size == 1
    finally:
        dist.destroy_process_group()


def test_ranks_without_a_place_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOTILE_RANK", "0")
    monkeypatch.setenv("HALOTILE_SIZE", "2")
    with pytest.raises(ConfigError, match=r"rank 0 of 2, and nothing says where.*MASTER_ADDR"), torch_group.join():
        pass
