"""Ends of ranks that are neither a result nor an error, and several groups in the life of one process."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from distributed import Client
from torch.utils.data import DataLoader, Dataset

from halotile import DistributedContext, collectives, torch_group
from halotile.errors import DiskRefused, PeerLost, RankFailed, WorkerDied
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.clusters.common.answers import Unanswered, ask, fetch, present_workers
from halotile.graphs.runs.passes import torch_ranks
from halotile.graphs.runs.passes.cluster_passes import _peak_of
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, run_rank
from halotile.graphs.torch_script import execute_torch, run_rank_of_script
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.groups import opening, script
from halotile.tasks.groups.group import TorchGroup, talking
from halotile.tasks.groups.opening import Copy, Rendezvous
from tests.cases import thorough
from tests.graphs import ranks as programs
from tests.graphs import scans
from tests.graphs.trainings import train, training, write_images

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def leave(group: TorchGroup, code: Any) -> None:
    """One rank ends the program; the others wait for it."""
    if group.rank == group.world_size - 1:
        sys.exit(code)
    group.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_exits_fails_with_its_words_and_keeps_its_worker(four: DistributedContext, ranks: int) -> None:
    before = four.run_torch(lambda _: os.getpid())
    with pytest.raises(RankFailed, match=rf"rank {ranks - 1} of {ranks} failed: (?s:.)*SystemExit: no such data"):
        four.run_torch(leave, "no such data", ranks=ranks)
    assert four.run_torch(lambda _: os.getpid()) == before


def test_a_rank_on_a_full_disk_is_a_refusal(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a.zarr.run")
    with directory.lock():
        group, full = cast(TorchGroup, None), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        call = partial(_peak_of, group, Mock(side_effect=full), directory, directory.driver())
        end = run_rank(lambda _: call(), Rendezvous())
    assert isinstance(end.cause, DiskRefused)
    assert "the disk ran full: a rank cannot keep what it has computed" in str(end.cause)


def test_a_program_without_any_worker_is_lost_and_no_fault_of_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch_ranks, "present_workers", lambda _, **__: {})
    monkeypatch.setattr(torch_ranks, "RETURN_SECONDS", 0.1)
    client: Any = None
    with pytest.raises(WorkerDied, match=r"no worker came back within 0\.1 s") as caught:
        TorchProgram(lambda _: None, tmp_path).run(client, None, 0, usual=2)
    assert isinstance(caught.value, ConnectionError)  # for which a run starts its cluster anew


@pytest.mark.filterwarnings("default")
@pytest.mark.thorough
def test_ranks_that_are_still_at_work_long_after_others_returned_are_named_again_and_again(
    four: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ranks, "LINGER_SECONDS", 1.0)
    words = (
        r"rank 1 is still at work, and the other ranks of 3 returned more than \d+ s ago\. "
        r"The place in the code:\nStack(?s:.)* in late\n +time\.sleep"
    )
    with pytest.warns(UserWarning, match=words) as said:
        assert len(four.run_torch(programs.late, 1, 9.0, ranks=3)) == 3
    assert len([each for each in said if "still at work" in str(each.message)]) >= 2


@pytest.mark.thorough
def test_a_script_that_others_left_behind_is_named_and_gets_no_signal(
    four: DistributedContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch_ranks, "LINGER_SECONDS", 1.0)
    path, said = tmp_path / "lingers.py", list[str]()
    # A signal without a handler ends a process: so does one that comes while the script begins or ends.
    path.write_text(
        "import faulthandler, os, signal, time\nfaulthandler.unregister(signal.SIGUSR2)\n"
        "time.sleep(7 if os.environ['RANK'] == '1' else 0)\n"
    )
    call = partial(run_rank_of_script, str(path), ())
    TorchProgram(call, four.folder, report=said.append).run(four.client, 2, 0)
    assert said
    assert all(text.startswith("rank 1 is still at work, and the other ranks of 2 returned") for text in said)


def test_ranks_that_all_work_are_not_named(
    four: DistributedContext, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(torch_ranks, "LINGER_SECONDS", 0.5)
    four.run_torch(lambda _: time.sleep(4), ranks=2)
    assert not [each for each in recwarn if "at work" in str(each.message)]


def test_a_killed_worker_is_lost_also_where_the_scheduler_has_not_missed_it(
    four: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = present_workers(four.client)
    with monkeypatch.context() as patched:
        patched.setattr(four.client.cluster.scheduler, "allowed_failures", 0)
        patched.setattr(torch_ranks, "present_workers", lambda _, **__: present)
        with pytest.raises(RankFailed, match=r"rank 1 of 3 failed: its worker tls://\S+ died: it was killed"):
            four.run_torch(programs.fail, "killed", 1, ranks=3)
    four.client.wait_for_workers(4, timeout=60)


def load_in_processes(_: TorchGroup) -> float:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return float(sum(pool.map(abs, [-1, 2])))


def interrupt(group: TorchGroup) -> None:
    if group.rank == 1:
        raise KeyboardInterrupt
    group.barrier()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (interrupt, r"rank 1 of 2 failed: Traceback(?s:.)*KeyboardInterrupt"),
        (lambda _: threading.Lock(), r"the result of the rank, a lock, cannot be pickled: "),
    ],
)
def test_a_rank_that_fails_in_an_unusual_way_is_reported_in_words(
    four: DistributedContext, function: Callable[[TorchGroup], Any], words: str
) -> None:
    before = set(present_workers(four.client))
    with pytest.raises(RankFailed, match=words):
        four.run_torch(function, ranks=2)
    assert set(present_workers(four.client)) == before


def load_by_workers(_: TorchGroup) -> float:
    class Own(Dataset):  # type: ignore[misc]
        """A class that cannot be pickled, as those of a script cannot."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.ones(2)

    return sum(float(batch.sum()) for batch in DataLoader(Own(), batch_size=2, num_workers=2))


@pytest.mark.parametrize(("function", "result"), [(load_in_processes, 3.0), (load_by_workers, 8.0)])
def test_a_rank_may_start_processes(
    four: DistributedContext, function: Callable[[TorchGroup], float], result: float
) -> None:
    assert four.run_torch(function, ranks=2) == [result] * 2


ABORTED = r"rank 0 of 2 failed: its worker \S+ died(?s:.)* passed a collective another dtype"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, group: group.all_reduce(x), ABORTED),
        (lambda x, group: group.broadcast(x, 1), r"rank 1 broadcast a tensor of another size or dtype"),
        (
            lambda x, group: group.broadcast(x),
            r"rank 0 broadcast a tensor of another size or dtype: rank 1 expects 4 values of torch\.float64",
        ),
        (lambda x, group: group.sum_slots({group.rank: x}, 2), r"rank 1 sent 16 bytes, and 8 were expected of it"),
        (lambda x, group: collectives.all_gather_v(x, group, [4, 4]), r"rank 1 sent 32 bytes, and 16 were expected"),
    ],
    ids=["all_reduce", "broadcast of more", "broadcast of less", "sum_slots", "all_gather_v"],
)
def test_another_dtype_on_one_rank_is_reported_in_words(
    four: DistributedContext, call: Callable[[torch.Tensor, TorchGroup], Any], words: str
) -> None:
    def program(group: TorchGroup) -> None:
        call(torch.ones(4, dtype=torch.float64 if group.rank else torch.float32), group)

    with pytest.raises(RankFailed, match=words):
        four.run_torch(program, ranks=2)
    four.client.wait_for_workers(4, timeout=60)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Workers that were killed after a first rank had ended, and before the driver fetched its result."""
    pids: list[int] = []

    def kill_and_fetch(client: Client, futures: Any, **limits: Any) -> Any:
        if not pids:
            pids.extend(ask(client, client.run, os.getpid).values())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return fetch(client, futures, **limits)

    monkeypatch.setattr(torch_ranks, "fetch", kill_and_fetch)
    return pids


def function_once_more(folder: Path) -> None:
    with DistributedContext(workers=2, device_mode="cpu", memory_per_worker="2GiB") as ctx:
        with pytest.raises(RankFailed, match=r"rank 0 of 2 failed: its worker \S+ died"):
            ctx.run_torch(lambda group: group.rank)
        assert ctx.run_torch(lambda group: group.rank, retries=1) == [0, 1]


def script_once_more(folder: Path) -> None:
    (folder / "rank.py").write_text("import os\nprint(os.environ['RANK'])\n")
    lines: list[str] = []
    execute_torch(str(folder / "rank.py"), (), Order(workers=2, memory_bytes=2**31), retries=1, line=lines.append)
    assert {"[0] 0", "[1] 1"} <= set(lines)


def training_from_its_checkpoint(folder: Path) -> None:
    outcome, _ = train(training(write_images(folder), folder))
    assert outcome.done == outcome.total


def ptychography_from_its_checkpoint(folder: Path) -> None:
    run = {"workers": 2, "memory_per_worker": "3GiB"}
    done = scans.run(scans.job(scans.write_small_scan(folder), run=run))
    assert done.exit_code == 0, done.output
    assert (folder / "result.cxi").exists()


@pytest.mark.parametrize(
    "program",
    [
        function_once_more,
        thorough(script_once_more),
        thorough(training_from_its_checkpoint),
        thorough(ptychography_from_its_checkpoint),
    ],
)
def test_workers_that_die_with_the_results_of_ranks_end_no_wait_for_ever(
    program: Callable[[Path], None], killed: list[int], tmp_path: Path
) -> None:
    program(tmp_path)
    assert len(killed) == 2


def test_a_peer_that_does_not_connect_is_lost() -> None:
    with pytest.raises(PeerLost, match=r"meeting: another rank ended.*\(Connect timeout \[127"), talking("meeting"):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:12] Connect timeout [127.0.0.1]:1234")


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
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("0", ""),
        thorough("3", "ended with exit code 3. Its last line: done"),
        ("x", "ended with exit code 1. Its last line: ValueError"),
    ],
)
def test_a_script_ends_before_what_it_leaves_running_and_its_files_are_written(
    tmp_path: Path, code: str, words: str
) -> None:
    path, log, lines = tmp_path / "leaves.py", tmp_path / "log", list[str]()
    path.write_text(BACKGROUND)
    began, failure = time.monotonic(), ""
    try:
        script.run_script(str(path), (code, str(log)), opening.Rendezvous(), lines.append)
    except RankFailed as error:
        failure = str(error)
    assert time.monotonic() - began < 15
    assert lines[0] == "done"
    assert words in failure
    assert bool(words) == bool(failure)
    assert log.read_text() == "epoch 1"


TURNS = """
import torch, halotile
for turn in range(6):
    with halotile.torch_group.join(device_mode="cpu", timeout_seconds=20) as group:
        total = float(group.all_reduce(torch.tensor(group.rank + 10.0 * turn)))
    print(f"{total}\\n", end="", flush=True)  # in one piece: ranks of torchrun write to one pipe
"""
MPI = {"PMIX_NAMESPACE": "prterun-b-9@1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.parametrize(
    "starts",
    [
        [((sys.executable,), {**MPI, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(2)],
        thorough([(TORCHRUN, {})]),
    ],
    ids=["mpirun", "torchrun"],
)
def test_a_script_may_join_again_and_again(
    starts: Sequence[tuple[tuple[str, ...], dict[str, str]]], tmp_path: Path
) -> None:
    path = tmp_path / "turns.py"
    path.write_text(TURNS)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([*command, str(path)], env=os.environ | cache | environment, stdout=subprocess.PIPE, text=True)
        for command, environment in starts
    ]  # fmt: skip
    totals = [float(word) for process in started for word in process.communicate(timeout=180)[0].split()]
    assert sorted(totals) == sorted(2 * [1.0 + 20 * turn for turn in range(6)])


KEPT = """
import os, sys
from torch.distributed import distributed_c10d as torch_groups
from halotile.tasks.groups.opening import Rendezvous, opened
with opened(Rendezvous(int(sys.argv[1]), 2, meeting=sys.argv[2], device_mode="cpu")):
    kept = torch_groups._get_default_store()  # so that torch does not remove the file with its last rank
os._exit(0)
"""


def test_ranks_remove_the_file_in_which_they_met(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    ranks = [subprocess.Popen([sys.executable, "-c", KEPT, str(rank), str(meeting)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert not meeting.exists()


def test_what_killed_ranks_left_is_removed_some_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Path(torch_group._meeting(Copy(1, 2, launch="8-1"), {}))
    old, new = first.with_name("7-1---0"), first.with_name("7-2---0")
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 8 * 86400,) * 2)
    again = Path(torch_group._meeting(Copy(1, 2, launch="8-1"), {}, 1))
    assert (again.parent, again.name) != (first.parent, first.name)
    assert list(first.parent.iterdir()) == [new]


@pytest.mark.cluster
def test_a_time_limit_of_what_is_asked_is_not_that_of_the_cluster(cluster: RunningCluster) -> None:
    async def impatient() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        ask(cluster.client, impatient, seconds=60)

    async def silent() -> None:
        await asyncio.sleep(60)

    with pytest.raises(Unanswered, match=r"does not answer within 0\.2 s"):
        ask(cluster.client, silent, seconds=0.2)


def test_the_check_of_a_result_copies_no_tensor() -> None:
    result = {"weights": torch.nn.Parameter(torch.ones(2**20)), "means": torch.ones(2**20).to_sparse()}
    tracemalloc.start()
    torch_ranks._check_sendable(result)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20
    result["means"].lock = threading.Lock()
    with pytest.raises(TypeError, match="the result of the rank, a dict, cannot be pickled"):
        torch_ranks._check_sendable(result)
