"""Functions that run as ranks of a torch program in the tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from halotile import collectives, torch_group
from halotile.errors import PeerLost
from halotile.graphs.clusters.workers.fork_server import ensure_forks
from halotile.tasks.groups import opening
from halotile.tasks.groups.group import TorchGroup

SLOTS = 12


class Ended(NamedTuple):
    """End of a process: its exit code, and the result of its function."""

    code: int | None
    result: Any


def launched(function: Callable[..., Any], environments: Sequence[Mapping[str, str]], *args: Any) -> list[Ended]:
    """Call a function in processes as those of a launcher, each with variables of its own."""
    ensure_forks()  # with torch, whose import takes seconds
    context = multiprocessing.get_context("forkserver")
    started = []
    for own in environments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_launched, args=(sender, dict(own), function, args))
        process.start()
        sender.close()
        started.append((process, receiver))
    ended = []
    for process, receiver in started:
        result = None
        with suppress(EOFError):
            result = receiver.recv() if receiver.poll(120) else None
        process.join(60)
        ended.append(Ended(process.exitcode, result))
    return ended


def _launched(sender: Connection, own: Mapping[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update(own)
    sender.send(function(*args))


def turns() -> list[list[str]]:
    """Join the ranks of a launcher three times; return rank, size, a sum and the addresses listened at of each."""
    said = []
    for turn in range(3):
        with torch_group.join(device_mode="cpu", timeout_seconds=60) as group:
            total = float(group.all_reduce(torch.tensor(group.rank + 10.0 * turn)))
            places = _listened_at()
            said.append([str(group.rank), str(group.world_size), str(total), ",".join(places)])
    return said


def waited_for() -> float | None:
    """Seconds for which rank 0 waits at its end for another that is killed."""
    try:
        with torch_group.join(device_mode="cpu") as group:
            if group.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
    except PeerLost:
        return time.monotonic() - began
    return None


def left_at_once(meeting: str) -> None:
    """Meet, and end without torch, which removes the file with its last rank."""
    with opening.opened(opening.Rendezvous(int(os.environ["RANK"]), 2, meeting=meeting, device_mode="cpu")):
        kept = dist.distributed_c10d._get_default_store()
    os._exit(kept is None)


def own_group(meeting: str) -> list[tuple[Any, ...]]:
    """Join the groups of a program that made them itself: all ranks, and those along two axes of a mesh."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(os.environ.pop("RANK")), world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "space"))
    found = []
    for given in (None, mesh.get_group("space"), mesh.get_group("data")):
        with torch_group.join(device_mode="cpu", process_group=given) as group:
            total = float(group.all_reduce(torch.tensor(dist.get_rank() + 1.0)))
            part = collectives.all_gather_v(torch.ones(1), group, [1] * group.world_size)
            group.barrier()
            inner = group.mesh({"left": 1, "rest": -1})["rest"].world_size
        found.append((group.rank, group.world_size, total, len(part), inner))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _listened_at() -> list[str]:
    """Addresses at which this process listens for TCP."""
    found = psutil.Process().net_connections("tcp")
    return sorted({entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN})


def slot(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor of a slot; its sums depend on their order."""
    numbers = torch.randn(7, 143, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (numbers * 10.0 ** (number % 5)).to(dtype)


def slot_sums(group: TorchGroup) -> list[torch.Tensor]:
    """Sums over slots in several types."""
    return [
        group.sum_slots({number: slot(number, dtype) for number in group.slots(SLOTS)}, SLOTS)
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64)
    ]


def everything(group: TorchGroup) -> dict[str, Any]:
    """Every method once."""
    x = torch.tensor([1.0, -2.0]) * (group.rank + 1)
    group.barrier()
    return {
        "rank": (group.rank, group.world_size, group.local_rank, group.device.type),
        **{op: group.all_reduce(x, op).tolist() for op in ("sum", "mean", "min", "max", "product")},
        "copy": group.broadcast(x, group.world_size - 1).tolist(),
        "left as it was": x.tolist(),
        "mean of integers": group.all_reduce(torch.tensor([3, group.rank]), "mean"),
    }


def along_mesh(group: TorchGroup) -> dict[str, Any]:
    """Ranks of the own groups of a mesh, by their sums; and those of a mesh within one of them."""
    number = torch.tensor(10.0**group.rank)
    mesh = group.mesh({"data": 2, "space": -1})
    wide = group.mesh({"left": 1, "all": group.world_size})
    inner = wide["all"].mesh({"rows": 2, "columns": 2})["columns"].mesh({"rows": 2, "columns": 1})
    return {
        **{name: (part.rank, float(part.all_reduce(number))) for name, part in mesh.items()},
        "inner": [float(part.all_reduce(number)) for part in inner.values()],
        "copied": float(mesh["data"].broadcast(number, 1)),
    }


def late(group: TorchGroup, rank: int, seconds: float) -> float:
    """One rank comes to a barrier late, and ends late; both times it is longer than the timeout of the group."""
    if group.rank == rank:
        time.sleep(seconds)
    group.barrier(60.0)
    if group.rank == rank:
        time.sleep(seconds)
    return time.monotonic()


def barrier_without(group: TorchGroup, rank: int, folder: str) -> None:
    """One rank never comes to a barrier; the others write how long they waited there."""
    if group.rank == rank:
        time.sleep(3)  # it ends by itself: no worker has to be started anew
        return
    began = time.monotonic()
    try:
        group.barrier(0.5)
    except PeerLost:
        Path(folder, str(group.rank)).write_text(str(time.monotonic() - began))
        raise


def place_of(place: opening.Rendezvous) -> tuple[int, int | None, list[str]]:
    """Mode of the folder in which ranks meet, the number of a rank's GPU, and the addresses at which it listens beside Dask.

    Also for what connects ranks on GPUs beside nccl.
    """
    with opening.opened(place) as group:
        opening._beside(group).barrier()
        return stat.S_IMODE(Path(place.meeting).parent.stat().st_mode), place.gpu, _listened_at()


def fail(group: TorchGroup, way: str, rank: int) -> Any:
    """One rank ends in some way while the others wait for it."""
    if group.rank != rank:
        return group.barrier() if way == "returns a lock" else group.all_reduce(torch.ones(3))
    match way:
        case "raises":
            raise ValueError("the seventh patch is empty")
        case "exits":
            sys.exit("no such data")
        case "is interrupted":
            raise KeyboardInterrupt
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
        case "returns a lock":
            group.barrier()
            return threading.Lock()
    return None


def once_killed(group: TorchGroup, folder: str) -> tuple[int, float]:
    """A loop with a checkpoint, one rank of which is killed in the first attempt."""
    checkpoint = Path(folder, "checkpoint")
    step, total = torch.load(checkpoint) if checkpoint.exists() else (0, torch.zeros(()))
    first = step
    for number in range(step, 6):
        total = total + group.all_reduce(torch.tensor(float(number)))
        if group.rank == 0:
            torch.save((number + 1, total), checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
        group.barrier()
        if number == 3 and first == 0 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return first, float(total)


def exchanged(group: TorchGroup) -> tuple[bool, list[str]]:
    """Whether the ranks share memory, and what they exchange that has other bits without it: lengths and types that change, and none."""
    apart, faults = replace(group, shared=None), []
    for turn, dtype in enumerate((torch.float32, torch.complex128, torch.int64, torch.bool, torch.float16) * 2):
        for length in (5, 0, 70_001 * (turn + 1)):
            sizes = [(rank * length + turn) * (rank != 1) for rank in range(group.world_size)]
            own = torch.arange(sizes[group.rank]).add(group.rank).to(dtype)
            found, expected = (each.gather_parts(own, sizes) for each in (group, apart))
            parts = [own[rank:] for rank in range(group.world_size)]
            ours = [max(0, size - group.rank) for size in sizes]
            found += group._exchange(parts, ours)
            expected += apart._exchange(parts, ours)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                faults.append(f"{dtype} {length}")
    ones = {number: torch.ones(3, requires_grad=True) for number in group.slots(5)}
    if any(each.sum_slots(ones, 5).requires_grad for each in (group, apart)):
        faults.append("a gradient of the own slots alone")
    return group.shared is not None, faults


def memory_files() -> int:
    """Number of files of this process that are memory of ranks."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum("memfd:halotile" in os.readlink(link) for link in links if link.is_symlink())


def gathering_without(group: TorchGroup, rank: int, how: str) -> None:
    """One rank ends before an exchange, or comes too late for it."""
    if group.rank == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise RuntimeError("no such pattern")
        time.sleep(3)
    group.gather_parts(torch.ones(1), [1] * group.world_size)
