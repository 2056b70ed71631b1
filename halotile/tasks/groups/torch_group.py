"""Ranks of a torch program, for scripts: the same script on a Dask cluster, under torchrun, srun or mpirun, and alone.

Examples
--------
>>> import torch
>>> from halotile import torch_group
>>> with torch_group.join() as group:
...     total = group.all_reduce(torch.ones(2))
>>> total.tolist()
[1.0, 1.0]
"""

import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from halotile.errors import ConfigError
from halotile.storage.cache import is_private, user_cache
from halotile.tasks.devices.device import choose_device
from halotile.tasks.groups.cut_tensors.spatial import aligned_sizes, spatial
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.opening import END_SECONDS, Copy, Rendezvous, copy_of, opened
from halotile.tasks.groups.training.fit import fit

HOST = "HALOTILE_TORCH_HOST"  # environment variable with the address at which a rank listens
# Age at which a file in which ranks met is removed. A program that still runs needs its own to make further groups.
OLD_SECONDS = 7 * 86400.0
_TURNS = itertools.count()
MEETING = "HALOTILE_TORCH_MEETING"  # environment variable with the file in which the ranks of a script meet

__all__ = ["TorchGroup", "aligned_sizes", "fit", "join", "spatial"]


@contextmanager
def join(
    *,
    backend: str = "auto",
    device_mode: str | None = None,
    timeout_seconds: float = 60.0,
    end_seconds: float = END_SECONDS,
    process_group: Any = None,
) -> Iterator[TorchGroup]:
    """Join the ranks that a launcher started, for the length of the context; alone where there is none.

    torchrun, srun and mpirun are known by their environment variables; ``HALOTILE_RANK`` and ``HALOTILE_SIZE``, with ``HALOTILE_LOCAL_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, take precedence. A program that has a process group of torch already keeps it: its ranks are used, and
    nothing is ended with the context.

    Parameters
    ----------
    backend : str
        ``gloo``, ``nccl``, or ``auto``: nccl for GPUs.
    device_mode : str, optional
        ``cpu``, ``gpu``, or left out: a GPU if there is one.
    timeout_seconds : float
        Longest wait for the other ranks.
    end_seconds : float
        Longest wait at the end of the context for ranks that still work; left out, as long as they work.
    process_group : ProcessGroup, optional
        Some of the ranks of a program that has a process group, such as ``device_mesh.get_group("space")``; left out, all of them.

    Raises
    ------
    PeerLost
        When the others do not come, or end, in time.
    ConfigError
        Where ranks are numbered, and it is not known how many there are, or where they meet; for a `process_group` that is none of this rank.
    """
    _check_process_group(process_group)
    if dist.is_initialized():
        yield _existing(process_group, device_mode, timeout_seconds)
        return
    if process_group is not None:
        raise ConfigError("process_group is given, and this program has none. Call init_process_group() before.")
    copy = copy_of()
    place = _place(copy, os.environ, next(_TURNS) if copy else 0)
    chosen = replace(
        place, backend=backend, device_mode=device_mode, timeout_seconds=timeout_seconds, end_seconds=end_seconds
    )
    with opened(chosen) as group:
        yield group


def _check_process_group(given: Any) -> None:
    """Refuse anything but a process group of torch."""
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this rank is not a member of process_group. Call join() only on the ranks of the group.")
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is {given!r}, which is not a torch ProcessGroup. Write that of one axis of a DeviceMesh, mesh.get_group('space'), "
            "or what torch.distributed.new_group([0, 1]) returns; or leave it out for all ranks."
        )


def _existing(process_group: Any, device_mode: str | None, timeout_seconds: float) -> TorchGroup:
    """The ranks of a process group that the program started itself."""
    device = choose_device(device_mode)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # the choice of the program
    whole: Any = process_group or dist.group.WORLD
    try:
        backend = whole._get_backend(device).name()
    except RuntimeError as error:
        raise ConfigError(
            f"the process group of this program does not connect {device.type} tensors ({error}). Write device_mode='cpu' or 'gpu', or "
            "init_process_group('cpu:gloo,cuda:nccl')."
        ) from error
    copy = copy_of()
    return TorchGroup(
        dist.get_rank(process_group),
        dist.get_world_size(process_group),
        copy.local_rank or 0 if copy else 0,
        device,
        backend,
        timeout_seconds,
        _host(copy, os.environ),
        process_group,
    )


def _host(copy: Copy | None, environment: Mapping[str, str]) -> str:
    is_here = copy is None or copy.local_size == copy.size
    return environment.get(HOST) or ("127.0.0.1" if is_here else socket.getfqdn())


def _place(copy: Copy | None, environment: Mapping[str, str], turn: int = 0) -> Rendezvous:
    """The rank of this process among the copies that a launcher started.

    >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    >>> place = _place(Copy(1, 2, 1, 2, "none"), torchrun)
    >>> place.rank, place.meeting, place.host
    (1, 'env://', '127.0.0.1')
    """
    if copy is None:
        return Rendezvous()
    return Rendezvous(
        copy.rank,
        copy.size,
        copy.local_rank or 0,
        _meeting(copy, environment, turn),
        _host(copy, environment),
        local_size=copy.local_size or 1,
        gpu=copy.local_rank,
        turn=turn,
    )


def _meeting(copy: Copy, environment: Mapping[str, str], turn: int = 0) -> str:
    """A file in a private folder of the home, which machines of a cluster share; under torchrun its store; an address where there is nothing else."""
    by_torchrun = environment.get("RANK"), environment.get("WORLD_SIZE")
    if "MASTER_ADDR" in environment and by_torchrun == (str(copy.rank), str(copy.size)):
        return f"{environment[MEETING]}-{turn}" if MEETING in environment else "env://"
    # By the number of a Slurm job alone, a later program of the job would meet at the same file.
    if copy.launch in ("", environment.get("SLURM_JOB_ID")):
        if environment.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
            return f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise ConfigError(
            f"this is rank {copy.rank} of {copy.size}, and nothing says where the ranks meet. Set MASTER_ADDR and MASTER_PORT, or start them "
            "with torchrun, srun or mpirun."
        )
    folder = user_cache() / "ranks"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if not is_private(folder.lstat()):
        raise ConfigError(
            f"the ranks of a program meet in {folder}, which is not a folder of yours alone: whoever reads there could join them. Remove it, "
            "or set XDG_CACHE_HOME to a folder of yours."
        )
    for left in folder.iterdir():  # by ranks that were killed
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - OLD_SECONDS:
                left.unlink()
    # A job that is requeued has the numbers of its first attempt, and two Slurms may have the same home.
    further = (environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"))
    return str(folder / "-".join((copy.launch, *further, str(turn))))
