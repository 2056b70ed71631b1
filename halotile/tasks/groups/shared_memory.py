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
from halotile.tasks.lazy import torch

if TYPE_CHECKING:
    from halotile.tasks.groups.group import TorchGroup

SIGNAL = struct.Struct("=QQQQ")
"""Number of the exchange, size of the file, and first byte and number of bytes for the rank that it is for; a size of 0: it has read its part."""
LEAST_BYTES = 1 << 20
SECRET_BYTES = 8
NAME = "halotile"


class SharedMemory:
    """The memory of a rank that all others read, theirs, and a pipe from each to each.

    A rank has a file in memory, which has no name in any folder and ends with it. It fills it, and signals to each other rank by its pipe where its
    part lies; they signal when they have read it, and it waits for that before it fills the file again. The calls that write to and read from a
    pipe order what was written to memory before and is read after, on every processor.

    ``rank, world_size``: number of this rank, and of all ranks; ``timeout_seconds``: longest wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self.others = [other for other in range(world_size) if other != rank]
        self.turn = 0
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.incoming: dict[int, int] = {}
        self.given: dict[int, int] = {}
        """The ends of pipes that the others open, until they have."""
        self.outgoing: dict[int, int] = {}
        self.theirs: dict[int, _File] = {}
        self.own = _File(os.memfd_create(NAME))
        try:
            os.ftruncate(self.own.number, LEAST_BYTES)
            self.own.map(LEAST_BYTES)
            self.own.memory[:SECRET_BYTES] = self.secret
            for other in self.others:
                self.incoming[other], self.given[other] = os.pipe()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> list[int]:
        """Everything that the others need to open it: numbers of the process, its file and its pipes, and the secret."""
        ends = [self.given.get(other, 0) for other in range(len(self.others) + 1)]
        return [os.getpid(), self.own.number, *self.secret, *ends]

    def open(self, addresses: Sequence[Sequence[int]]) -> None:
        """Open the files and pipes of the others."""
        for other in self.others:
            process, number, *rest = addresses[other]
            secret, ends = bytes(rest[:SECRET_BYTES]), rest[SECRET_BYTES:]
            file, pipe = (f"/proc/{process}/fd/{each}" for each in (number, ends[self.rank]))
            # Where processes are numbered otherwise, both may be anything: what is not ours is not even opened for writing.
            if not os.readlink(file).startswith(f"/memfd:{NAME}") or not os.readlink(pipe).startswith("pipe:"):
                raise OSError(f"rank {other} is on another machine")
            self.theirs[other] = _File(os.open(file, os.O_RDWR))
            if os.pread(self.theirs[other].number, SECRET_BYTES, 0) != secret:
                raise OSError(f"rank {other} is on another machine")
            self.outgoing[other] = os.open(pipe, os.O_WRONLY)

    def close_given(self) -> None:
        """Close the ends that the others have opened: a pipe then ends with the rank that writes to it."""
        while self.given:
            os.close(self.given.popitem()[1])

    def exchange(self, parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Give each other rank its part, and copy theirs into places of their shapes; all are of one type, and neither has to be contiguous."""
        file = self.own
        for other in self.others if self.turn else ():
            self._receive_signal(other, is_read=True)
        self.turn += 1
        keys = {other: _identity(parts[other]) for other in self.others}
        distinct = {key: parts[other].detach() for other, key in keys.items()}
        file.hold(sum(part.nbytes for part in distinct.values()))
        starts, end = {}, 0
        for key, part in distinct.items():
            starts[key] = end, part.nbytes
            file.tensor(part, end).copy_(part)
            end += part.nbytes
        for other in self.others:
            self._send_signal(other, len(file.memory), *starts[keys[other]])
        for other in self.others:
            length, start, count = self._receive_signal(other)
            place = places[other]
            if count != place.nbytes:
                raise PeerLost(f"rank {other} sent {count} bytes, and {place.nbytes} were expected of it.")
            self.theirs[other].map(length)
            place.copy_(self.theirs[other].tensor(place, start))
            self._send_signal(other)

    def _send_signal(self, other: int, *what: int) -> None:
        try:  # so few bytes are written at once
            os.write(self.outgoing[other], SIGNAL.pack(self.turn, *(what or (0, 0, 0))))
        except OSError as error:
            raise PeerLost(f"rank {other} has ended.") from error

    def _receive_signal(self, other: int, *, is_read: bool = False) -> tuple[int, int, int]:
        """Return the place of another rank's part, or once it has read that of this rank, as soon as it signals that."""
        end, pipe = time.monotonic() + self.timeout_seconds, self.incoming[other]
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while not poll.poll(max(0.0, 1e3 * (end - time.monotonic()))):
            if time.monotonic() > end:
                raise PeerLost(f"timed out: rank {other} did not answer within {self.timeout_seconds:g} s.")
        signal = os.read(pipe, SIGNAL.size)
        if not signal:
            raise PeerLost(f"rank {other} has ended.")
        turn, length, start, count = SIGNAL.unpack(signal)
        if turn != self.turn or is_read != (length == 0):
            raise PeerLost(
                f"rank {other} is at another exchange ({turn}, and this one at {self.turn}): one of them failed before."
            )
        return length, start, count

    def close(self) -> None:
        """Close all files; this ends the wait of another rank at once."""
        self.close_given()
        for numbers in (self.outgoing, self.incoming):
            while numbers:
                os.close(numbers.popitem()[1])
        for file in (self.own, *self.theirs.values()):
            file.close()


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    """Two tensors with the same one are the same numbers: what all ranks get is written once."""
    return x.data_ptr(), x.shape, x.stride(), x.is_conj(), x.is_neg()


class _File:
    """A file in memory, by the number under which it is open, as far as it is mapped."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory: Any = b""

    def hold(self, size: int) -> None:
        """Make it long enough for so many bytes; by powers of two, since lengths differ a little from call to call."""
        if size > len(self.memory):
            length = 1 << size.bit_length()
            os.ftruncate(self.number, length)
            self.map(length)

    def map(self, length: int) -> None:
        """Map so many bytes of it."""
        if length > len(self.memory):
            self.memory = mmap.mmap(self.number, length)

    def tensor(self, like: torch.Tensor, start: int) -> torch.Tensor:
        """A part of it, as a tensor of the shape and the type of another one that shares its memory."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def close(self) -> None:
        """Close the file; its memory goes when no tensor shares it any more."""
        self.memory = b""
        if self.number >= 0:
            os.close(self.number)
        self.number = -1


def shared_by(group: TorchGroup) -> SharedMemory | None:
    """Connect the ranks of a group through memory; None on all of them where one cannot. Every rank calls it."""
    memory, address = None, [0] * (2 + SECRET_BYTES + group.world_size)
    with suppress(OSError, AttributeError):  # no such call: not Linux
        memory = SharedMemory(group.rank, group.world_size, group.timeout_seconds)
        address = memory.address
    agreed = False
    try:
        everyone = group.gather_parts(torch.tensor(address), [len(address)] * group.world_size)
        works = memory is not None
        if memory is not None:
            try:
                memory.open([each.tolist() for each in everyone])
            except OSError:
                works = False
        agreed = bool(group.all_reduce(torch.tensor(works), "min"))
    finally:
        if memory is not None:
            memory.close_given()
            if not agreed:
                memory.close()
    return memory if agreed else None
