"""Ranks of torch programs: right sums, the same bits for any number of ranks, memory that they share, rows that are cut among them, and one end for all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader

from halotile import DistributedContext, collectives, torch_group
from halotile.errors import ConfigError, DiskRefused, PeerLost, RankFailed, WorkerDied
from halotile.graphs.clusters.common.answers import Unanswered, ask, fetch, present_workers
from halotile.graphs.runs.passes import torch_ranks
from halotile.graphs.runs.passes.cluster_passes import _peak_of
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, run_rank
from halotile.graphs.torch_script import run_rank_of_script
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.denoisers.common.layers import BlindUNet
from halotile.tasks.groups.group import SharedMemory, TorchGroup, peer_errors
from halotile.tasks.groups.opening import Rendezvous
from tests.benchmarks.unets import PlainUNet
from tests.cases import thorough
from tests.graphs import ranks

Patch = pytest.MonkeyPatch

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_rank_gets_the_combination_of_all(four: DistributedContext, count: int) -> None:
    ends = four.run_torch(ranks.everything, ranks=count)
    factors = torch.arange(1.0, count + 1)
    for rank, end in enumerate(ends):
        torch.testing.assert_close(end.pop("mean of integers"), torch.tensor([3, (count - 1) / 2]))
        assert end == {
            "rank": (rank, count, rank, "cpu"),
            "sum": [float(factors.sum()), -2 * float(factors.sum())],
            "mean": [float(factors.mean()), -2 * float(factors.mean())],
            "min": [1.0, -2.0 * count],
            "max": [float(count), -2.0],
            "product": [float(factors.prod()), (-2.0) ** count * float(factors.prod())],
            "copy": [float(count), -2.0 * count],
            "left as it was": [rank + 1.0, -2.0 * (rank + 1)],
        }
    assert list(four.folder.glob("ranks-*")) == [], "they met there"


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


def test_ranks_meet_in_a_private_folder_and_listen_where_their_worker_does(four: DistributedContext) -> None:
    """With a GPU each, which is the first that their worker sees."""
    program = TorchProgram(ranks.place_of, four.folder, device_mode="cpu")
    assert program.run(four.client, 4, 0) == [(0o700, 0, ["127.0.0.1"])] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_early_or_ends_early_waits_for_the_others(four: DistributedContext, rank: int) -> None:
    ends = four.run_torch(ranks.late, rank, 1.2, ranks=3, timeout_seconds=0.5)
    assert all(ends[rank] - end > 1 for number, end in enumerate(ends) if number != rank)


def test_a_barrier_waits_no_longer_than_it_says(four: DistributedContext, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"barrier: another rank ended, or did not answer in time"):
        four.run_torch(ranks.barrier_without, 1, str(tmp_path), ranks=3)
    waited = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(waited) == ["0", "2"]
    assert all(0.4 < seconds < 2.5 for seconds in waited.values())


DIED = r"its worker tls://127\.0\.0\.1:\d+ died"
ENDS: list[Any] = [
    ("raises", r"rank 2 of 4 failed: Traceback(?s:.)*ValueError: the seventh patch is empty\n"),
    ("exits", r"rank 2 of 4 failed: (?s:.)*SystemExit: no such data"),
    ("is interrupted", r"rank 2 of 4 failed: Traceback(?s:.)*KeyboardInterrupt"),
    ("returns a lock", r"rank 2 of 4 failed: (?s:.)*the result of the rank, a lock, cannot be pickled: "),
    ("is killed", rf"rank 2 of 4 failed: {DIED}"),
    (
        "hangs",
        r"rank 2 of 4 did not answer the others in time, and its worker was started anew\. It was here:\n"
        r"Stack(?s:.)* in fail\n +time\.sleep(?s:.)*The first that waited for it:\n",
    ),
    thorough("returns", r"another rank ended, or did not answer in time"),
]
"""The way in which rank 2 ends while the others wait for it, and the words of the error."""


@pytest.mark.parametrize(("way", "message"), ENDS)
def test_a_rank_that_fails_ends_all_others(four: DistributedContext, way: str, message: str) -> None:
    workers = set(present_workers(four.client))
    began = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        four.run_torch(ranks.fail, way, 2, timeout_seconds=2.0)
    assert time.monotonic() - began < 25
    assert way in ("is killed", "hangs", "returns") or set(present_workers(four.client)) == workers
    four.client.wait_for_workers(4, timeout=60)
    assert len(four.run_torch(ranks.everything)) == 4


OTHERS = "a tensor of another size or dtype"
DTYPES: list[tuple[Callable[[torch.Tensor, TorchGroup], Any], str]] = [
    (lambda x, group: group.all_reduce(x), rf"rank 0 of 2 failed: {DIED}(?s:.)* passed a collective another dtype"),
    (lambda x, group: group.broadcast(x, 1), f"rank 1 broadcast {OTHERS}"),
    (lambda x, group: group.broadcast(x), rf"rank 0 broadcast {OTHERS}: rank 1 expects 4 values of torch\.float64"),
    (lambda x, group: group.sum_slots({group.rank: x}, 2), "rank 1 sent 16 bytes, and 8 were expected of it"),
    (lambda x, group: collectives.all_gather_v(x, group, [4, 4]), "rank 1 sent 32 bytes, and 16 were expected"),
]


@pytest.mark.parametrize(("call", "words"), DTYPES)
def test_another_dtype_on_one_rank_is_reported_in_words(four: DistributedContext, call: Any, words: str) -> None:
    kinds = (torch.float32, torch.float64)
    with pytest.raises(RankFailed, match=words):
        four.run_torch(lambda group: call(torch.ones(4, dtype=kinds[group.rank]), group), ranks=2)
    four.client.wait_for_workers(4, timeout=60)


def test_a_killed_worker_is_lost_before_the_scheduler_misses_it(four: DistributedContext, monkeypatch: Patch) -> None:
    present = present_workers(four.client)
    with monkeypatch.context() as patched:
        patched.setattr(four.client.cluster.scheduler, "allowed_failures", 0)
        patched.setattr(torch_ranks, "present_workers", lambda _, **__: present)
        with pytest.raises(RankFailed, match=r"rank 2 of 3 failed: its worker tls://\S+ died: it was killed"):
            four.run_torch(ranks.fail, "is killed", 2, ranks=3)
    four.client.wait_for_workers(4, timeout=60)


@pytest.mark.filterwarnings("default")
@pytest.mark.thorough
def test_ranks_that_are_still_at_work_long_after_others_returned_are_named_again_and_again(
    four: DistributedContext, monkeypatch: Patch, tmp_path: Path
) -> None:
    """A script gets no signal for it: one without a handler ends a process, as one does that comes while the script begins or ends."""
    monkeypatch.setattr(torch_ranks, "LINGER_SECONDS", 1.0)
    words = r"the other ranks of 3 returned more than \d+ s ago\. The place in the code:\nStack(?s:.)* in late\n +time"
    with pytest.warns(UserWarning, match=f"rank 1 is still at work, and {words}") as said:
        assert len(four.run_torch(ranks.late, 1, 9.0, ranks=3)) == 3
    assert len([each for each in said if "still at work" in str(each.message)]) >= 2
    path, texts = tmp_path / "lingers.py", list[str]()
    path.write_text(
        "import faulthandler, os, signal, time\nfaulthandler.unregister(signal.SIGUSR2)\ntime.sleep(7 * int(os.environ['RANK']))\n"
    )
    TorchProgram(partial(run_rank_of_script, str(path), ()), four.folder, report=texts.append).run(four.client, 2, 0)
    assert {text.partition(" returned")[0] for text in texts} == {"rank 1 is still at work, and the other ranks of 2"}


def test_ranks_that_all_work_are_not_named(four: DistributedContext, monkeypatch: Patch, recwarn: Any) -> None:
    monkeypatch.setattr(torch_ranks, "LINGER_SECONDS", 0.3)
    four.run_torch(lambda _: time.sleep(2), ranks=2)
    assert not [each for each in recwarn if "at work" in str(each.message)]


def test_numbers_that_mean_nothing_are_refused(four: DistributedContext) -> None:
    numbers: list[tuple[str, Any]] = [("retries", -1), ("timeout_seconds", 0), ("end_seconds", -1)]
    for name, value in [("ranks", 0), ("ranks", -1), ("ranks", True), ("ranks", 1.5), *numbers]:
        with pytest.raises(ConfigError, match=f"{name} is {value}: "):
            four.run_torch(ranks.everything, **{name: value})
    with pytest.raises(ConfigError, match=r"ranks is 5, and the cluster has 4 workers.*ranks=4"):
        four.run_torch(ranks.everything, ranks=5)


@pytest.mark.parametrize("wanted", [3, None, 4])
def test_another_attempt_goes_on_from_a_checkpoint_and_without_a_worker_that_does_not_come_back(
    four: DistributedContext, tmp_path: Path, monkeypatch: Patch, wanted: int | None
) -> None:
    if wanted == 3:
        assert four.run_torch(ranks.once_killed, str(tmp_path), ranks=3, retries=1) == [(4, 45.0)] * 3
        return
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


def test_a_rank_may_start_processes(four: DistributedContext) -> None:
    def load(_: TorchGroup) -> float:
        return float(next(iter(DataLoader([1.0, 2.0], batch_size=2, num_workers=1))).sum())

    assert four.run_torch(load, ranks=2) == [3.0] * 2


def test_workers_that_die_with_the_results_of_ranks_end_no_wait_for_ever(monkeypatch: Patch) -> None:
    """After a first rank has ended, and before the driver fetches its result."""
    pids: list[int] = []

    def kill_and_fetch(client: Any, futures: Any, **limits: Any) -> Any:
        if not pids:
            pids.extend(ask(client, client.run, os.getpid).values())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return fetch(client, futures, **limits)

    monkeypatch.setattr(torch_ranks, "fetch", kill_and_fetch)
    with DistributedContext(workers=2, device_mode="cpu", memory_per_worker="2GiB") as ctx:
        with pytest.raises(RankFailed, match=r"rank 0 of 2 failed: its worker \S+ died"):
            ctx.run_torch(lambda group: group.rank)
        assert ctx.run_torch(lambda group: group.rank, retries=1) == [0, 1]
    assert len(pids) == 2


def test_wrong_arguments_are_refused_with_what_to_write() -> None:
    group, one = TorchGroup(), torch.ones(1)
    wrong: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
        (group.all_reduce, (one, "average"), r"op is 'average'.*sum, mean"),
        (group.mesh, ({"data": 3},), r"lengths multiply to 3, and the number of ranks is 1\."),
        (group.mesh, ({"data": 2, "space": -1},), r"'space': -1}: its other lengths multiply to 2, .* ranks is 1\."),
        (group.mesh, ({"a": -1, "b": 1, "c": -1},), r"2 of its lengths are -1, and only one may be\."),
        (group.mesh, ({"data": 0, "space": -1},), r"lengths of at least 1, or one of -1\."),
        (group.mesh, ({},), r"lengths of at least 1"),
        (group.broadcast, (one, 1), r"source is 1.*0 to 0"),
        (group.sum_slots, ({1: one}, 2), r"slots \[1\] of 2.*\[0, 1\]"),
    ]
    for call, arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call(*arguments)


def test_a_rank_on_a_full_disk_is_a_refusal(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a.zarr.run")
    with directory.lock():
        group, full = cast(TorchGroup, None), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        call = partial(_peak_of, group, Mock(side_effect=full), directory, directory.driver())
        end = run_rank(lambda _: call(), Rendezvous())
    assert isinstance(end.cause, DiskRefused)
    assert "the disk ran full: a rank cannot keep what it has computed" in str(end.cause)


def test_a_program_without_any_worker_is_lost(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_ranks, "present_workers", lambda _, **__: {})
    monkeypatch.setattr(torch_ranks, "RETURN_SECONDS", 0.1)
    client: Any = None
    with pytest.raises(WorkerDied, match=r"no worker came back within 0\.1 s") as caught:
        TorchProgram(lambda _: None, tmp_path).run(client, None, 0, usual=2)
    assert isinstance(caught.value, ConnectionError)  # for which a run starts its cluster anew


def test_a_time_limit_of_what_is_asked_is_not_that_of_the_cluster(four: DistributedContext) -> None:
    async def impatient() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        ask(four.client, impatient, seconds=60)
    with pytest.raises(Unanswered, match=r"does not answer within 0\.2 s"):
        ask(four.client, partial(asyncio.sleep, 60), seconds=0.2)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_exchange_what_they_exchange_through_gloo(four: DistributedContext, count: int) -> None:
    for is_shared, faults in four.run_torch(ranks.exchanged, ranks=count):
        assert is_shared
        assert faults == []
    assert not any(four.client.run(ranks.memory_files).values())


def test_a_rank_that_is_missed_in_an_exchange_ends_the_others(four: DistributedContext) -> None:
    rows: list[tuple[int, str, str]] = [
        (1, "killed", "rank 1 of 3 failed"),
        (1, "raised", "no such pattern"),
        (1, "late", "rank 1 did not answer within 1 s"),
        (0, "late", "rank 0 did not answer within 1 s"),
    ]
    for rank, how, message in rows:
        began = time.monotonic()
        with pytest.raises(RankFailed, match=message):
            four.run_torch(ranks.gathering_without, rank, how, ranks=3, timeout_seconds=1.0)
        assert time.monotonic() - began < 20
        four.client.wait_for_workers(4, timeout=60)
        assert not any(four.client.run(ranks.memory_files).values())


def connected() -> tuple[SharedMemory, SharedMemory]:
    """Two ranks in this process."""
    both = SharedMemory(0, 2, 0.2), SharedMemory(1, 2, 0.2)
    addresses = [each.address for each in both]
    for each in both:
        each.open(addresses)
    for each in both:
        each.close_given()
    return both


def files_of(memory: SharedMemory) -> set[tuple[int, int]]:
    """Device and inode of everything that it has open."""
    numbers = [memory.own.number, *(file.number for file in memory.theirs.values())]
    numbers += [*memory.incoming.values(), *memory.outgoing.values()]
    return {(found.st_dev, found.st_ino) for found in map(os.fstat, numbers)}


def open_files() -> set[tuple[int, int]]:
    """Device and inode of everything that this process has open; other threads open and close files meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(number))
            found.add((status.st_dev, status.st_ino))
    return found


def given(memory: SharedMemory, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Places of the lengths of parts, after an exchange of these."""
    places = [torch.empty_like(part) for part in parts]
    memory.exchange(parts, places)
    return places


def test_ranks_that_missed_each_other_do_not_exchange_any_more_and_a_part_of_another_length_is_refused() -> None:
    files: set[tuple[int, int]] = set()
    for length in (3, 4):
        first, second = connected()
        files |= files_of(first) | files_of(second)
        with pytest.raises(PeerLost, match=r"timed out: rank 1 did not answer within 0\.2 s"):
            given(first, *[torch.ones(3)] * 2)
        if length == 4:
            with pytest.raises(PeerLost, match="rank 0 sent 12 bytes, and 16 were expected"):
                given(second, *[torch.ones(4)] * 2)
        else:
            assert given(second, *[torch.zeros(3)] * 2)[0].tolist() == [1.0] * 3
            with pytest.raises(PeerLost, match="rank 1 is at another exchange"):
                given(first, *[torch.ones(3)] * 2)  # what waits for it is the part of the last exchange
        first.close()
        second.close()
    first, second = connected()
    files |= files_of(first) | files_of(second)
    second.close()
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        given(first, *[torch.ones(1)] * 2)
    first.close()
    assert len(files) == 3 * 4  # of each pair: two files in memory, two pipes
    assert not files & open_files()


def test_the_memory_of_another_machine_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"measured")
    for kind in ("another secret", "an ordinary file"):
        memory, other = SharedMemory(0, 2, 1.0), SharedMemory(1, 2, 1.0)
        stranger = other.address
        with open(tmp_path / "data", "rb") as data:
            stranger[2] ^= kind == "another secret"
            stranger[1] = data.fileno() if kind == "an ordinary file" else stranger[1]
            with pytest.raises(OSError, match="rank 1 is on another machine"):
                memory.open([memory.address, stranger])
        memory.close()
        other.close()
    assert (tmp_path / "data").read_bytes() == b"measured"


def check_small(found: list[dict[str, float]], most: float = 1e-9) -> None:
    """Assert that no rank has a gap."""
    for gaps in found:
        named = gaps if isinstance(gaps, dict) else dict(enumerate(gaps))
        assert {name: gap for name, gap in named.items() if gap > most} == {}


CUT = [(40, "zeros", True), (36, "circular", False), thorough(32, "reflect", True), thorough(44, "replicate", False)]


@pytest.mark.parametrize("count", [1, 2, thorough(3), thorough(4)])
@pytest.mark.parametrize(("rows", "mode", "training"), CUT)
def test_a_cut_image_gives_the_numbers_of_the_whole(
    four: DistributedContext, count: int, rows: int, mode: str, training: bool
) -> None:
    check_small(four.run_torch(ranks.compared, rows, mode, training, ranks=count))


PARTS: dict[str, tuple[tuple[Any, ...], int]] = {
    **{
        f"{make.func.__name__}, training: {training}": ((ranks.network_gaps, make, 42, 4, training), 3)
        for make in (partial(BlindUNet, 1, 8, 2), partial(PlainUNet, (8, 16, 32)))
        for training in (False, True)
    },  # networks that pad their image and take that off again
    **{f"transposed convolutions, {count} ranks": ((ranks.transposed,), count) for count in (1, 2, 3)},
    **{f"computed again, {way}": ((ranks.checkpointed_gaps, way), 3) for way in (False, True)},
    "pools": ((ranks.pools,), 3),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_networks_may_be_cut(four: DistributedContext, name: str) -> None:
    call, count = PARTS[name]
    most = {"Unet": 1e-9, "pools": 0.0}.get("Unet" if "training" in name else name, 1e-12)
    check_small(four.run_torch(*call, ranks=count), most)


def test_arguments_may_have_names_and_other_ways_of_mixing_rows_are_refused(four: DistributedContext) -> None:
    for found in four.run_torch(ranks.accepted, ranks=2):
        assert found == dict.fromkeys(ranks.ACCEPTED, True)
    for found in four.run_torch(ranks.refusals, ranks=2):
        assert set(found) == {*ranks.REFUSED, "script", "trace"}
        assert all(text.startswith("ConfigError: the network ") for text in found.values()), found
        for name in ("dropout1d", "dropout2d", "feature_dropout"):
            assert f"calls {name} in training" in found[name]
        assert "calls flip," in found["flip(input=)"]
        assert "calls randn," in found["randn"]
        words = "reflects 4 rows at the edge of an image of 8, and the ranks there have too few ([4, 4])"
        assert words in found["as many rows as are reflected"]


def test_a_rank_without_rows_is_refused_on_all_ranks_whatever_layer_comes_first(four: DistributedContext) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="a rank has no rows of an image of 4 rows"):
        four.run_torch(ranks.compared, 4, "zeros", False, ranks=2)
    assert time.monotonic() - began < 20
    words = "a rank has no rows of an image of 44 rows here ([4, 0, 32, 8]). Take fewer ranks, or a larger image."
    assert four.run_torch(ranks.said_of_parts, [4, 0, 32, 8], ranks=4) == [[words] * 4] * 4
    assert torch_group.aligned_sizes(9, 3, 4) == [4, 4, 1]
    with pytest.raises(ConfigError, match=r"8 rows that is cut at multiples of 4 among 4 ranks\. Take 2 at most"):
        torch_group.aligned_sizes(8, 4, 4)


def test_a_peer_that_does_not_connect_is_lost() -> None:
    with pytest.raises(PeerLost, match=r"meeting: another rank ended.*\(Connect timeout \[127"), peer_errors("meeting"):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:12] Connect timeout [127.0.0.1]:1234")
