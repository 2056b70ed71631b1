"""A group of ranks: which one this is, and sums, copies and waits across all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from halotile.errors import ConfigError, PeerLost
from halotile.tasks.lazy import dist, torch

if TYPE_CHECKING:
    from halotile.tasks.groups.shared_memory import SharedMemory


_THREADS = 2
LABEL_BYTES = 40
"""Length of the words about a tensor that go before it in a broadcast."""
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
def talking(action: str) -> Iterator[None]:
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
        with talking(f"all_reduce of a tensor of shape {list(x.shape)}"):
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
            with talking(f"exchange of {sum(map(len, parts))} numbers"):
                for call in dist.batch_isend_irecv(calls):
                    call.wait()
        return received

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of rank ``source``; those of the others give shape and dtype, and stay as they are."""
        check_rank("source", source, self)
        if self.is_alone:
            return x

        copy = x.contiguous().clone()
        with talking(f"broadcast of a tensor of shape {list(x.shape)}"):
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
        with talking("barrier"):
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
        with talking(f"connecting ranks {ranks}"):
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
