"""Memory that the ranks of one machine share: the tensors of gloo, nothing left behind, and an end with the rank that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from halotile import DistributedContext
from halotile.errors import PeerLost, RankFailed
from halotile.tasks.groups.group import SharedMemory
from tests.graphs import ranks

cluster = pytest.mark.cluster


@cluster
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_exchange_what_they_exchange_through_gloo(four: DistributedContext, count: int) -> None:
    for is_shared, faults in four.run_torch(ranks.exchanged, ranks=count):
        assert is_shared
        assert faults == []
    assert not any(four.client.run(ranks.memory_files).values())


@cluster
@pytest.mark.parametrize(
    ("rank", "how", "message"),
    [
        (1, "killed", "rank 1 of 3 failed"),
        (1, "raised", "no such pattern"),
        (1, "late", "rank 1 did not answer within 1 s"),
        (0, "late", "rank 0 did not answer within 1 s"),
    ],
)
def test_a_rank_that_is_missed_in_an_exchange_ends_the_others(
    four: DistributedContext, rank: int, how: str, message: str
) -> None:
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


def open_files() -> int:
    """Number of the open files of this process; their names have the number of the listing itself, which may be another each time."""
    return len(os.listdir("/proc/self/fd"))


def missed(memory: SharedMemory, *sizes: int) -> None:
    """An exchange that the other rank is not there for."""
    with pytest.raises(PeerLost, match=r"timed out: rank 1 did not answer within 0\.2 s"):
        given(memory, *map(torch.ones, sizes))


def given(memory: SharedMemory, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Places of the lengths of parts, after an exchange of these."""
    places = [torch.empty_like(part) for part in parts]
    memory.exchange(parts, places)
    return places


def test_a_part_of_another_length_than_expected_is_refused() -> None:
    first, second = connected()
    missed(first, 3, 3)
    with pytest.raises(PeerLost, match="rank 0 sent 12 bytes, and 16 were expected"):
        given(second, *[torch.ones(4)] * 2)
    for each in (first, second):
        each.close()


def test_ranks_that_missed_each_other_do_not_exchange_any_more() -> None:
    first, second = connected()
    missed(first, 3, 3)
    assert given(second, *[torch.zeros(3)] * 2)[0].tolist() == [1.0] * 3
    with pytest.raises(PeerLost, match="rank 1 is at another exchange"):
        given(first, *[torch.ones(3)] * 2)  # what waits for it is the part of the last exchange
    for each in (first, second):
        each.close()


def test_a_rank_that_has_closed_its_memory_is_lost_at_once() -> None:
    before = open_files()
    first, second = connected()
    second.close()
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        given(first, *[torch.ones(1)] * 2)
    first.close()
    assert open_files() == before


@pytest.mark.parametrize("kind", ["another secret", "an ordinary file"])
def test_the_memory_of_another_machine_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    before = open_files()
    memory, other = SharedMemory(0, 2, 1.0), SharedMemory(1, 2, 1.0)
    stranger = other.address
    (tmp_path / "data").write_bytes(b"measured")
    with open(tmp_path / "data", "rb") as data:
        if kind == "another secret":
            stranger[2] ^= 1
        else:
            stranger[1] = data.fileno()
        with pytest.raises(OSError, match="rank 1 is on another machine"):
            memory.open([memory.address, stranger])
    assert (tmp_path / "data").read_bytes() == b"measured"
    for each in (memory, other):
        each.close()
    assert open_files() == before
