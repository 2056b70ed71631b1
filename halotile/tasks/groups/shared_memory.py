"""Tensors between the ranks of one machine through memory that they share: a copy in and a copy out, without the sockets and threads of gloo."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from halotile.errors import PeerLost

if TYPE_CHECKING:
    import torch

    from halotile.tasks.groups.group import TorchGroup

SIGNAL = struct.Struct("=QQQ")
"""Size of the file, and first byte and number of bytes for the rank that is told."""
LEAST_BYTES = 1 << 20
SECRET_BYTES = 8


class SharedMemory:
    """The memory of a rank that all others read, theirs, and a pipe from each to each.

    A rank has two files in memory, which have no name and end with it. It fills them in turn, and tells each other rank by its pipe where its
    part lies. It may fill a file again once the others have told of their next part: each of them has read the last one by then. The calls
    that write to and read from a pipe order what was written to memory before and is read after, on every processor.

    Parameters
    ----------
    rank, world_size : int
        Number of this rank, and of all ranks.
    timeout_seconds : float
        Longest wait for another rank.

    Raises
    ------
    OSError
        When the system has no such files.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.others = [other for other in range(world_size) if other != rank]
        self.turn = 0
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.own = [_File(os.memfd_create("halotile")) for _ in range(2)]
        self.pipes = {other: os.pipe() for other in self.others}
        """Where each other rank tells of its parts: the end to read, and the end that it opens."""
        self.theirs: dict[int, list[_File]] = {}
        self.outgoing: dict[int, int] = {}
        for file in self.own:
            file.hold(LEAST_BYTES)
            file.memory[:SECRET_BYTES] = self.secret

    @property
    def address(self) -> list[int]:
        """What the others need to open it: numbers of the process, its files and its pipes, and the secret."""
        ends = [self.pipes[other][1] if other in self.pipes else 0 for other in range(len(self.others) + 1)]
        return [os.getpid(), *(file.number for file in self.own), *self.secret, *ends]

    def open(self, addresses: Sequence[Sequence[int]]) -> None:
        """Open the files and pipes of the others.

        Raises
        ------
        OSError
            When they are those of another machine, or may not be opened.
        """
        for other in self.others:
            process, *numbers = addresses[other]
            secret, ends = bytes(numbers[2 : 2 + SECRET_BYTES]), numbers[2 + SECRET_BYTES :]
            folder = f"/proc/{process}/fd"
            self.theirs[other] = [_File(os.open(f"{folder}/{number}", os.O_RDWR)) for number in numbers[:2]]
            for file in self.theirs[other]:
                file.hold(LEAST_BYTES)
                if file.memory[:SECRET_BYTES] != secret:
                    raise OSError(f"rank {other} is on another machine")
            self.outgoing[other] = os.open(f"{folder}/{ends[self.rank]}", os.O_WRONLY)

    def close_given(self) -> None:
        """Close the ends that the others have opened: a pipe then ends with the rank that writes to it."""
        for _, end in self.pipes.values():
            os.close(end)

    def exchange(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Give each rank its part, flat and of one type, and return theirs, whose lengths are known.

        Raises
        ------
        PeerLost
            When another rank has ended, or does not answer in time.
        """
        import torch

        mine, turn = parts[self.rank], self.turn % 2
        self.turn += 1
        file, size = self.own[turn], mine.element_size()
        starts: dict[int, tuple[int, int]] = {}
        distinct = {id(part): part for rank, part in enumerate(parts) if rank != self.rank}
        total = sum(part.nbytes for part in distinct.values())
        file.hold(1 << total.bit_length())  # more than enough: lengths differ a little from call to call
        end = 0
        for key, part in distinct.items():
            starts[key] = end, part.nbytes
            if part.nbytes:
                file.tensor(torch.uint8, end, part.nbytes).copy_(part.detach().contiguous().view(torch.uint8))
            end += part.nbytes
        for other in self.others:
            self._tell(other, SIGNAL.pack(len(file.memory), *starts[id(parts[other])]))
        found = [mine] * len(parts)
        for other in self.others:
            length, start, count = SIGNAL.unpack(self._told(other))
            if count != size * sizes[other]:
                raise PeerLost(
                    f"rank {other} sent {count} bytes, and {size * sizes[other]} were expected of it."
                )
            file = self.theirs[other][turn]
            file.hold(length)
            found[other] = file.tensor(mine.dtype, start, sizes[other]).clone()
        return found

    def _tell(self, other: int, signal: bytes) -> None:
        try:
            os.write(self.outgoing[other], signal)  # so few bytes are written as one
        except OSError as error:
            raise PeerLost(f"rank {other} has ended.") from error

    def _told(self, other: int) -> bytes:
        """What another rank tells, once it does."""
        end, (pipe, _) = time.monotonic() + self.timeout_seconds, self.pipes[other]
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while not poll.poll(max(0.0, 1e3 * (end - time.monotonic()))):
            if time.monotonic() > end:
                raise PeerLost(f"rank {other} did not answer within {self.timeout_seconds:g} s.")
        if signal := os.read(pipe, SIGNAL.size):
            return signal
        raise PeerLost(f"rank {other} has ended.")

    def close(self) -> None:
        """Close all files; another rank that waits for this one is told by that."""
        files = [*self.own, *(file for pair in self.theirs.values() for file in pair)]
        for number in (*self.outgoing.values(), *(pipe for pipe, _ in self.pipes.values())):
            with suppress(OSError):
                os.close(number)
        for file in files:
            file.close()


class _File:
    """A file in memory, by the number under which it is open, as far as it is mapped."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory: Any = b""

    def hold(self, size: int) -> None:
        """Map at least so many bytes; make the file longer if it is shorter."""
        if size <= len(self.memory):
            return
        length = max(size, os.fstat(self.number).st_size)
        if length > os.fstat(self.number).st_size:
            os.ftruncate(self.number, length)
        self.memory = mmap.mmap(self.number, length)

    def tensor(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """A part of it, as a tensor that shares its memory."""
        import torch

        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)

    def close(self) -> None:
        """Close the file; its memory goes when no tensor shares it any more."""
        self.memory = b""
        os.close(self.number)


def shared_by(group: TorchGroup) -> SharedMemory | None:
    """Connect the ranks of a group through memory; None on all of them where one cannot. Every rank calls it."""
    import torch

    memory, address = None, [0] * (3 + SECRET_BYTES + group.world_size)
    with suppress(OSError, AttributeError):  # no such call: not Linux
        memory = SharedMemory(group.rank, group.world_size, group.timeout_seconds)
        address = memory.address
    everyone = group.gather_parts(torch.tensor(address), [len(address)] * group.world_size)
    works = memory is not None
    try:
        if memory is not None:
            memory.open([each.tolist() for each in everyone])
    except OSError:
        works = False
    agreed = bool(group.all_reduce(torch.tensor(works), "min"))
    if memory is not None:
        memory.close_given()
        if not agreed:
            memory.close()
    return memory if agreed else None
