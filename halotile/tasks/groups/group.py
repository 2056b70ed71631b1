"""A group of ranks: which one this is, and sums, copies and waits across all of them; on one machine through shared memory, without the sockets of gloo."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import secrets
import select
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from halotile.errors import ConfigError, PeerLost
from halotile.tasks.lazy import dist, torch

# Number of the exchange, size of the file, and first byte and number of bytes for the rank that it is for; a size of 0:
# it has read its part.
SIGNAL = struct.Struct("=QQQQ")
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


_THREADS = 2
LABEL_BYTES = 40  # length of the words about a tensor that go before it in a broadcast
LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
    "Connect timeout", "Wait timeout", "imed out", "monitoredBarrier", "Application timeout",
)  # fmt: skip
"""Words in errors of torch.distributed that mean that another rank ended or did not answer."""


def gloo_options(host: str, timeout_seconds: float) -> Any:
    """Options of gloo that listen at the address ``host``."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = _THREADS
    return options


def is_lost_peer(error: BaseException) -> bool:
    """Return True when an error of torch means that another rank ended or did not answer."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(words in str(error) for words in LOST_PEER)


OPERATIONS = ("sum", "mean", "min", "max", "product")


@contextmanager
def peer_errors(action: str) -> Iterator[None]:
    """Turn errors of torch about ranks that ended or do not answer into :class:`PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        reason = str(error).partition(". This is typically")[0].rpartition("] ")[2]
        raise PeerLost(f"{action}: another rank ended, or did not answer in time ({reason}).") from error


@dataclass(frozen=True, eq=False)
class TorchGroup:
    """Ranks of one program that exchange tensors. With one rank, every method returns its input.

    Parameters
    ----------
    rank, world_size : int
        Number of this rank, and of all ranks.
    local_rank : int
        Number of this rank among those on its machine.
    device : torch.device
        Device of this rank.
    backend : str
        ``gloo`` or ``nccl``; empty for a rank that is connected to nothing.
    timeout_seconds : float
        Longest wait for other ranks.
    host : str
        Address of this machine to which the other ranks connect.
    process_group : torch.distributed.ProcessGroup, optional
        The group for torch's own functions; None: that of all ranks.
    shared : SharedMemory, optional
        Memory through which ranks of one machine exchange slots and parts on CPUs.

    Examples
    --------
    >>> import torch
    >>> group = TorchGroup()
    >>> group.rank, group.world_size, group.all_reduce(torch.ones(2)).tolist()
    (0, 1, [1.0, 1.0])
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: Any = "cpu"
    backend: str = ""
    timeout_seconds: float = 60.0
    host: str = "127.0.0.1"
    process_group: Any = field(default=None, repr=False)
    shared: SharedMemory | None = field(default=None, repr=False)

    @property
    def is_alone(self) -> bool:
        """True for a single rank that is not connected with itself."""
        return self.world_size == 1 and not self.backend

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine the tensors of all ranks; every rank gets the same bits, and the same ranks always get them.

        Parameters
        ----------
        x : Tensor
            Of one shape and dtype on all ranks; it stays as it is.
        op : str
            ``sum``, ``mean``, ``min``, ``max`` or ``product``; the mean of integers is a float. Halves are summed in their own type, unlike by
            :func:`halotile.collectives.all_reduce`.

        Raises
        ------
        PeerLost
            When another rank has ended or does not answer.
        """
        if op not in OPERATIONS:
            raise ConfigError(f"op is {op!r}. Write one of {', '.join(OPERATIONS)}.")
        if self.is_alone:
            return x / 1 if op == "mean" else x

        name = "SUM" if op == "mean" else op.upper()
        total = x.contiguous().clone()
        with peer_errors(f"all_reduce of a tensor of shape {list(x.shape)}"):
            dist.all_reduce(total, getattr(dist.ReduceOp, name), group=self.process_group)
        return total / self.world_size if op == "mean" else total

    def slots(self, count: int) -> range:
        """Numbers of the slots of this rank, out of ``count`` that are shared evenly among the ranks.

        >>> [TorchGroup(rank, 3).slots(8) for rank in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
        """
        first, end = (rank * count // self.world_size for rank in (self.rank, self.rank + 1))
        return range(first, end)

    def sum_slots(self, parts: Mapping[int, torch.Tensor], count: int) -> torch.Tensor:
        """Sum tensors in the order of their slots: the same bits for any number of ranks.

        Each rank sums a part of every tensor, so that a step takes the time of an exchange and of a sum over its share.

        Parameters
        ----------
        parts : mapping of int to Tensor
            The tensors of this rank by the numbers of :meth:`slots`, all of one shape and dtype on all ranks. A rank without
            slots passes none: give at least as many slots as ranks.
        count : int
            Number of slots of all ranks together.

        Raises
        ------
        ConfigError
            When the slots are not those of this rank.
        PeerLost
            When another rank has ended or does not answer.

        Examples
        --------
        >>> import torch
        >>> TorchGroup().sum_slots({0: torch.ones(2), 1: torch.ones(2)}, 2).tolist()
        [2.0, 2.0]
        """
        own = self.slots(count)
        if count < self.world_size or sorted(parts) != list(own):
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} passes slots {sorted(parts)} of {count}. "
                f"Write those of group.slots({count}), {list(own)}, and at least as many slots as ranks."
            )
        first = parts[own[0]]
        length = first.numel()
        bounds = [rank * length // self.world_size for rank in range(self.world_size + 1)]
        flat = [parts[slot].reshape(-1) for slot in own]
        if self.is_alone:
            return _ordered_sum(flat).reshape(first.shape)
        counts = [len(replace(self, rank=rank).slots(count)) for rank in range(self.world_size)]
        edges = [b - a for a, b in itertools.pairwise(bounds)]
        mine = edges[self.rank]
        sent = [torch.cat([part[a:b] for part in flat]) for a, b in itertools.pairwise(bounds)]
        received = torch.cat(self._exchange(sent, [mine * n for n in counts]))
        total = _ordered_sum(list(received.reshape(count, mine)))
        return torch.cat(self.gather_parts(total, edges)).reshape(first.shape)

    def gather_parts(self, x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the flat tensors of all ranks, whose lengths every rank knows; without gradients.

        Raises
        ------
        PeerLost
            When another rank has ended or does not answer.

        >>> import torch
        >>> TorchGroup().gather_parts(torch.ones(2), [2])[0].tolist()
        [1.0, 1.0]
        """
        return self._exchange([x] * self.world_size, sizes)

    def memory_for(self, x: torch.Tensor) -> SharedMemory | None:
        """The memory through which the ranks exchange such a tensor; None: by torch.distributed."""
        return self.shared if x.device.type == "cpu" else None

    def _exchange(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Give each rank its part, flat and of one type, and return theirs, whose lengths are known."""
        mine, group = parts[self.rank].detach(), self.process_group
        received = [mine if rank == self.rank else mine.new_empty(size) for rank, size in enumerate(sizes)]
        if memory := self.memory_for(mine):
            memory.exchange(parts, received)
            return received
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        calls = [
            dist.P2POp(dist.isend, parts[rank], group=group, group_peer=rank) for rank in others if len(parts[rank])
        ]
        calls += [
            dist.P2POp(dist.irecv, received[rank], group=group, group_peer=rank) for rank in others if sizes[rank]
        ]
        if calls:
            with peer_errors(f"exchange of {sum(map(len, parts))} numbers"):
                for call in dist.batch_isend_irecv(calls):
                    call.wait()
        return received

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of rank ``source``; those of the others give shape and dtype, and stay as they are."""
        check_rank("source", source, self)
        if self.is_alone:
            return x

        copy = x.contiguous().clone()
        with peer_errors(f"broadcast of a tensor of shape {list(x.shape)}"):
            if x.device.type == "cpu":  # gloo takes fewer bytes than a rank waits for, and dies of more
                label = bytearray(f"{x.dtype} {x.numel()}".ljust(LABEL_BYTES).encode())
                own = torch.frombuffer(label, dtype=torch.uint8)
                seen = own.clone()
                dist.broadcast(seen, group=self.process_group, group_src=source)
                if not torch.equal(own, seen):
                    raise ConfigError(
                        f"rank {source} broadcast a tensor of another size or dtype: rank {self.rank} expects {x.numel()} values of {x.dtype}. "
                        "Pass tensors of the same shape and dtype on every rank."
                    )
            dist.broadcast(copy, group=self.process_group, group_src=source)
        return copy

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait until every rank has come here.

        Raises
        ------
        PeerLost
            When one does not come within ``timeout_seconds``, by default that of the group.
        """
        if self.is_alone:
            return

        patience = timedelta(seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        options = dist.BarrierOptions()
        options.timeout = patience
        with peer_errors("barrier"):
            if self.backend == "gloo":
                (self.process_group or dist.group.WORLD).barrier(options).wait()
            else:
                dist.barrier(self.process_group, True, [self.device.index]).wait(patience)

    def mesh(self, sizes: Mapping[str, int]) -> dict[str, TorchGroup]:
        """Cut the ranks into a grid; return the group of this rank along each of its axes.

        Ranks that differ in one coordinate only form a group, so groups along different axes are orthogonal. Neighbouring ranks differ in
        the last axis. All ranks of this group must call it.

        Parameters
        ----------
        sizes : mapping of str to int
            Name and length of each axis, such as ``{"data": 2, "space": 4}`` for 8 ranks. One length may be -1: what the others leave.

        Examples
        --------
        >>> {name: group.world_size for name, group in TorchGroup().mesh({"data": 1, "space": 1}).items()}
        {'data': 1, 'space': 1}
        """
        given = [length for length in sizes.values() if length != -1]
        ranks, left_open = math.prod(given), len(sizes) - len(given)
        problem = ""
        if left_open > 1:
            problem = f"{left_open} of its lengths are -1, and only one may be"
        elif not sizes or min(given, default=1) < 1:
            problem = "it needs axes with lengths of at least 1, or one of -1"
        elif self.world_size % ranks if left_open else ranks != self.world_size:
            problem = (
                f"its {'other ' * left_open}lengths multiply to {ranks}, and the number of ranks is {self.world_size}"
            )
        if problem:
            raise ConfigError(
                f"mesh is {dict(sizes)}: {problem}. Write lengths whose product is the number of ranks; one may be -1."
            )
        sizes = {name: self.world_size // ranks if length == -1 else length for name, length in sizes.items()}
        groups, stride = {}, self.world_size
        for name, length in sizes.items():
            stride //= length
            groups[name] = self._along(stride, length)
        return groups

    def _along(self, stride: int, length: int) -> TorchGroup:
        """The group of the ranks that are ``stride`` apart."""
        own = self.rank // stride % length
        if length == 1:
            return replace(self, rank=0, world_size=1, backend="", process_group=None, shared=None)
        if length == self.world_size:
            return self
        whole = dist.group.WORLD if self.process_group is None else self.process_group
        first = self.rank - own * stride
        ranks = [dist.get_global_rank(whole, first + step * stride) for step in range(length)]
        patience = timedelta(seconds=self.timeout_seconds)
        options = gloo_options(self.host, self.timeout_seconds) if self.backend == "gloo" else None
        with peer_errors(f"connecting ranks {ranks}"):
            made = dist.new_group(ranks, patience, self.backend, options, use_local_synchronization=True)
        return replace(self, rank=own, world_size=length, process_group=made, shared=None)


def check_rank(name: str, rank: int, group: TorchGroup) -> None:
    """Refuse the number of a rank that is not in the group."""
    if not 0 <= rank < group.world_size:
        raise ConfigError(f"{name} is {rank}: write a rank of this group, 0 to {group.world_size - 1}.")


def _ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum tensors one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
