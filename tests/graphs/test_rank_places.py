"""The folder in which ranks meet is closed to others, and each rank computes on a GPU of its own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halotile import torch_group
from halotile.errors import ConfigError
from halotile.graphs.clusters import local_cuda
from halotile.graphs.clusters.base import Order
from halotile.graphs.clusters.common import machine as gpus
from halotile.graphs.clusters.common.machine import Gpus
from halotile.graphs.kinds.sections import Cluster
from halotile.graphs.plans import needs
from halotile.graphs.runs.passes.torch_ranks import TorchProgram
from halotile.graphs.torch_script import run_rank_of_script
from halotile.tasks.groups import opening
from halotile.tasks.groups.opening import Copy, Rendezvous
from halotile.tasks.groups.script import rank_variables

NOBODY = 65534
STEP = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which ranks of this user meet, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/halotile/ranks"


def readable_by_the_group(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o740)


def of_another_user(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


def linked(folder: Path) -> None:
    theirs = folder.parents[2] / "theirs"
    theirs.mkdir(mode=0o700)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(theirs)


@pytest.mark.parametrize("made", [readable_by_the_group, of_another_user, linked])
def test_ranks_do_not_meet_where_others_could_join_them(
    made: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if made is of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    for name, word in STEP.items():
        monkeypatch.setenv(name, word)
    made(folder)
    with pytest.raises(ConfigError, match=r"ranks, which is not a folder of yours alone"), torch_group.join():
        pass


def test_ranks_meet_in_a_folder_that_is_closed_to_others(folder: Path) -> None:
    for _ in range(2):  # made by the first, found by the others
        meeting = Path(torch_group._meeting(Copy(1, 2, launch="8-1"), {}))
    assert meeting.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def seen_by(own: str, number: int, size: int = 4) -> tuple[str, str]:
    """The GPUs that a script sees on a worker that sees some, as rank ``number`` of its machine, and its number there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", own)
        variables = rank_variables(Rendezvous(number, 4, number, local_size=size))
    assert int(variables["HALOTILE_LOCAL_RANK"]) == number
    return variables["CUDA_VISIBLE_DEVICES"], variables["LOCAL_RANK"]


def test_a_script_sees_the_gpu_of_its_worker_alone() -> None:
    rotated = ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2"]  # as dask-cuda has it: a worker sees its own first
    assert [seen_by(own, number) for number, own in enumerate(rotated)] == [(own, "0") for own in "0123"]
    # In a batch system each worker sees its own alone, which may be several.
    assert [seen_by(own, number) for number, own in enumerate("3210")] == [(own, "0") for own in "3210"]
    assert seen_by("2,3", 0, size=1) == ("2,3", "0")


def test_where_nothing_is_hidden_a_script_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variables = rank_variables(Rendezvous(5, 8, 1, local_size=4))
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert variables["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(("place", "gpu"), [(Rendezvous(), 0), (Rendezvous(gpu=1), 1), (Rendezvous(gpu=5), 1)])
def test_a_group_has_the_gpu_of_its_rank(place: Rendezvous, gpu: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(opening, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with opening.opened(place) as group:
        assert [group.device] == current == [torch.device("cuda", gpu)]


def test_a_rank_takes_no_gpu_where_nothing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    place = torch_group._place(Copy(1, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    alone = replace(place, rank=0, world_size=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # in a batch system a rank may see its own alone
    with opening.opened(alone) as group:
        assert group.device == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 0 sees 2 GPUs.*HALOTILE_LOCAL_RANK"), opening.opened(alone):
        pass


def test_ranks_that_share_a_gpu_are_refused() -> None:
    for names, refused in ((("n1 a", "n1 b", "n2 a"), False), (("n1 a", "n2 b", "n2 b"), True)):
        store = dist.HashStore()
        for rank, gpu in enumerate(names):
            store.set(f"gpu-{rank}", gpu)
        for rank, gpu in enumerate(names):
            expected = pytest.raises(ConfigError, match="ranks 1, 2 share GPUs") if refused else nullcontext()
            with expected:
                opening.refuse_shared_gpu(store, Rendezvous(rank, 3), gpu)


def test_the_interface_of_a_name_is_that_of_its_address() -> None:
    assert opening.interface_of("localhost") == opening.interface_of("127.0.0.1") != ""
    assert opening.interface_of("192.0.2.1") == ""


@pytest.mark.usefixtures("folder")
def test_ranks_of_a_launcher_share_the_gpus_of_their_machine() -> None:
    places = [torch_group._place(Copy(rank, 4, rank % 2, 2, "8-1"), {}) for rank in range(4)]
    assert [place.gpu for place in places] == [0, 1, 0, 1]


TAKEN = """
import os, sys
from pathlib import Path

gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
Path(sys.argv[1], os.environ["RANK"]).write_text(gpu)
"""


@pytest.mark.cluster
@pytest.mark.thorough
def test_ranks_of_a_script_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda", reason="the extra cuda is not installed")
    for module in (needs, gpus):
        monkeypatch.setattr(module, "gpus_here", lambda: Gpus(("4", "7")))
    # There is no GPU to ask for its memory and its cores.
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")
    script, taken = tmp_path / "taken.py", tmp_path / "taken"
    script.write_text(TAKEN)
    taken.mkdir()
    order = Order(workers=2, memory_bytes=2**31, choice=Cluster(kind="local-cuda"))
    with local_cuda.start(order) as cluster:
        program = TorchProgram(partial(run_rank_of_script, str(script), (str(taken),)), tmp_path)
        program.run(cluster.client, 2, 0)
    assert {path.name: path.read_text() for path in taken.iterdir()} == {"0": "4", "1": "7"}
