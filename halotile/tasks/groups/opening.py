"""Ranks of a program: the variables by which launchers number them, and their connections, which open through a file that only their user may read."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from halotile.errors import ConfigError
from halotile.tasks.devices.device import choose_device
from halotile.tasks.groups.group import TorchGroup, gloo_options, peer_errors, shared_by
from halotile.tasks.lazy import dist, torch

OWN_RANK = "HALOTILE_RANK"
# Together with HALOTILE_RANK it takes precedence over the variables of any launcher; it also gives the number that PMIx
# and PALS may leave out.
OWN_SIZE = "HALOTILE_SIZE"
OWN_LOCAL = "HALOTILE_LOCAL_RANK"  # it gives the number among the copies of a machine where a launcher leaves it out
# Set by launchers that number their copies, and may leave their count to a library.
UNCOUNTED = ("PMIX_RANK", "PALS_RANKID")


@dataclass(frozen=True)
class Launcher:
    """The names of one launcher's variables."""

    rank: str  # rank, size: variables with the number of this copy, and with the number of copies
    size: str
    local_rank: str  # local_rank, local_size: same among the copies on this machine
    local_size: str
    launch: tuple[str, ...] = ()  # variables that distinguish two launches
    by_slurm: bool = False  # true if `srun` may have set them


def _launcher(names: str, launch: str = "", *, by_slurm: bool = False) -> Launcher:
    """A launcher by its variables: four in their order, or a prefix of _RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE."""
    ends = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    words = [f"{names}_{end}" for end in ends] if " " not in names else [*names.split(), "", ""]
    rank, size, local_rank, local_size = words[:4]
    return Launcher(rank, size, local_rank, local_size, tuple(launch.split()), by_slurm)


# The innermost first: `mpirun` may stand in a batch job, and `torchrun` in a step of `srun`.
LAUNCHERS = {
    "an override": _launcher("HALOTILE"),
    "Open MPI": _launcher("OMPI_COMM_WORLD", "OMPI_MCA_ess_base_jobid PMIX_NAMESPACE"),
    "MVAPICH2": _launcher("MV2_COMM_WORLD", "MPIRUN_ID"),
    "MVAPICH": _launcher("MVP_COMM_WORLD", "MPIRUN_ID"),
    "PALS": _launcher("PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PMI_LOCAL_SIZE", "PALS_APID", by_slurm=True),
    "MPICH": _launcher("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", "PMI_JOBID SLURM_STEP_ID", by_slurm=True),
    "torchrun": _launcher("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID MASTER_PORT"),
    "srun": _launcher(
        "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID", by_slurm=True
    ),
    "PMIx": _launcher(f"PMIX_RANK {OWN_SIZE}", "PMIX_NAMESPACE"),
    "PALS alone": _launcher(f"PALS_RANKID {OWN_SIZE} PALS_LOCAL_RANKID", "PALS_APID", by_slurm=True),
}


@dataclass(frozen=True)
class Copy:
    """One of several copies of a command."""

    rank: int  # rank, size: its number, and the number of copies
    size: int
    # local_rank, local_size: same among the copies on this machine, where that is known
    local_rank: int | None = None
    local_size: int | None = None
    launch: str = ""  # name of the launch, where it has one


def copy_of(environment: Mapping[str, str] = os.environ) -> Copy | None:
    """This copy of the command; None where there is only one.

    >>> copy_of({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    Copy(rank=2, size=3, local_rank=None, local_size=None, launch='7-0')
    >>> copy_of({"SLURM_PROCID": "0"})
    """

    def number(name: str) -> int | None:
        word = environment.get(name, "")
        return int(word) if word.isdecimal() else None

    counted = False
    for launcher in LAUNCHERS.values():
        rank, size = number(launcher.rank), number(launcher.size)
        if rank is None or size is None:
            continue
        counted = True
        if size > 1 and not (launcher.by_slurm and _is_interactive(environment)):
            words = (environment.get(name, "") for name in ("SLURM_JOB_ID", *launcher.launch))
            launch = "-".join(word.replace("/", "_") for word in words if word)
            local = number(launcher.local_rank)
            return Copy(rank, size, number(OWN_LOCAL) if local is None else local, number(launcher.local_size), launch)
        if launcher.rank == OWN_RANK:
            return None
    uncounted = next((name for name in UNCOUNTED if name in environment), None)
    if uncounted and not counted:
        raise ConfigError(
            f"{uncounted} is {environment[uncounted]}: this is one of several copies of the command, and no variable has their "
            f"count. Set {OWN_SIZE} to their number for all of them."
        )
    return None


def _is_interactive(environment: Mapping[str, str]) -> bool:
    """Return True in the shell of `srun --pty`, which alone has a terminal: its other tasks and steps started from it have none."""
    if "SLURM_PTY_PORT" not in environment:
        return False
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False


BACKENDS = ("auto", "gloo", "nccl")
# A rank that ends early waits for the others as long as they work. One that fails breaks its connections, which ends
# the wait at once; the loss of a whole machine, which breaks none, is noticed by what started the ranks.
END_SECONDS = 10 * 365 * 86400.0


@dataclass(frozen=True)
class Rendezvous:
    """One rank of a program, and how it finds the others."""

    # rank, world_size, local_rank: number of this rank, of all ranks, and number among those on its machine
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    # file that does not exist yet, in a folder that all ranks see and only their user may read; `env://`: the store
    # that torchrun started; or `tcp://HOST:PORT`: an address of rank 0
    meeting: str = ""
    host: str = "127.0.0.1"  # address of this machine to which the other ranks connect
    backend: str = "auto"  # `gloo`, `nccl`, or `auto`: nccl for GPUs
    device_mode: str | None = None  # `cpu`, `gpu`, or None: a GPU if there is one
    timeout_seconds: float = 60.0  # longest wait for the other ranks
    local_size: int = 1  # number of ranks on its machine
    # number of its GPU among those that it sees: a worker sees its own first. None where it is not known
    gpu: int | None = 0
    end_seconds: float = END_SECONDS  # longest time that a rank which is done waits for those that still work
    machine: int = 0  # number of its machine
    # number of groups that its process has joined before, in the store of a launcher, which keeps what they left
    turn: int = 0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend is {self.backend!r}. Write one of {', '.join(BACKENDS)}.")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank} of {self.world_size}: write 0 to {self.world_size - 1}.")


@contextmanager
def opened(place: Rendezvous) -> Iterator[TorchGroup]:
    """Connect a rank with all others, for the length of the context; a single rank connects to nothing."""
    device = choose_device(place.device_mode)
    if device.type == "cuda":
        if place.gpu is None and torch.cuda.device_count() > 1:
            raise ConfigError(
                f"rank {place.rank} sees {torch.cuda.device_count()} GPUs, and nothing says which is its own. Set HALOTILE_LOCAL_RANK to its "
                "number among the ranks of its machine, or write device_mode='cpu'."
            )
        device = torch.device("cuda", (place.gpu or 0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if place.backend == "nccl" and device.type == "cpu":
        raise ConfigError("backend is 'nccl', which connects GPUs, and this rank computes on the CPU. Write 'gloo'.")
    backend = place.backend if place.backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if place.world_size == 1:
        yield TorchGroup(device=device, timeout_seconds=place.timeout_seconds)
        return
    if dist.is_initialized():
        raise ConfigError(
            "this process has a process group of torch already. End it first: torch.distributed.destroy_process_group()."
        )
    with peer_errors(f"waiting for {place.world_size} ranks"):
        _connect(place, backend)
    shared = None
    try:
        group = TorchGroup(
            place.rank, place.world_size, place.local_rank, device, backend, place.timeout_seconds, place.host
        )
        if place.local_size == place.world_size and backend == "gloo":
            shared = shared_by(group)
            group = replace(group, shared=shared)
        # Its wait would keep a GPU busy, and nccl ends a process whose wait is longer than the timeout of its group.
        ending = group if backend == "gloo" else _beside(group)
        yield group
        wait_at_end(ending, place.end_seconds)
    finally:
        try:
            if shared:
                shared.close()
        finally:
            dist.destroy_process_group()
        # torch removes the file with the last rank, but not when two of them end at the same moment.
        if "://" not in place.meeting:
            with suppress(OSError):
                Path(place.meeting).unlink()


def wait_at_end(group: TorchGroup, seconds: float) -> None:
    """Wait until all ranks are done: nobody ends a connection that others still use. Who looks at a rank knows the wait by its name."""
    group.barrier(seconds)


def interface_of(host: str) -> str:
    """Name of the network interface with an address, or with one of those of a name; empty if there is none."""
    wanted = {host}
    with suppress(OSError):
        wanted |= {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if wanted.intersection(each.address for each in own)), "")


def _beside(group: TorchGroup) -> TorchGroup:
    """The same ranks, connected by gloo."""
    patience = timedelta(seconds=group.timeout_seconds)
    options = gloo_options(group.host, group.timeout_seconds)
    with peer_errors(f"connecting {group.world_size} ranks"):
        made = dist.new_group(timeout=patience, backend="gloo", pg_options=options)
    return replace(group, backend="gloo", process_group=made)


def _connect(place: Rendezvous, backend: str) -> None:

    patience = timedelta(seconds=place.timeout_seconds)
    ranks: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size, "timeout": patience}
    if backend == "nccl" and (interface := interface_of(place.host)):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if backend == "gloo":
        ranks["pg_options"] = gloo_options(place.host, place.timeout_seconds)
    store = dist.PrefixStore(f"turn-{place.turn}", _store(place, patience))
    if backend == "nccl" and torch.cuda.is_available():
        refuse_shared_gpu(store, place, f"{socket.gethostname()} {torch.cuda.get_device_properties().uuid}")
    try:
        dist.init_process_group(backend, store=store, **ranks)
    except BaseException:
        # torch numbers groups in their store, and goes on counting after one that failed: this rank would never meet new ones.
        dist.distributed_c10d._world.group_count = 0
        raise


def refuse_shared_gpu(store: Any, place: Rendezvous, gpu: str) -> None:
    """Refuse ranks with one GPU between them: nccl would end each of them with an error of its own.

    ``gpu``: machine and name of the GPU of this rank.
    """
    store.set(f"gpu-{place.rank}", gpu)
    all_gpus = [store.get(f"gpu-{rank}").decode() for rank in range(place.world_size)]
    sharing = [rank for rank, other in enumerate(all_gpus) if all_gpus.count(other) > 1]
    if sharing:
        raise ConfigError(
            f"ranks {', '.join(map(str, sharing[:8]))} share GPUs, and nccl needs one for each rank. Start as many ranks on each machine as it has "
            "GPUs, or write backend='gloo'."
        )


def _store(place: Rendezvous, patience: timedelta) -> Any:
    """The store in which ranks meet."""
    if place.meeting.startswith("tcp://"):
        store = _listening(place, patience)
    elif place.meeting == "env://":
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=patience))
    else:
        store = dist.FileStore(place.meeting, place.world_size)
    store.set_timeout(patience)
    return store


def _listening(place: Rendezvous, patience: timedelta) -> Any:
    """A store that listens at one address: torch's own choice would be every interface."""
    host, _, port = place.meeting.removeprefix("tcp://").rpartition(":")
    listener = None
    if place.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, int(port)), family=family).detach()
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen at MASTER_ADDR {host}, MASTER_PORT {port} ({error}). Set them to an address of its machine and a port that "
                "is free."
            ) from error
    return dist.TCPStore(host, int(port), place.world_size, place.rank == 0, patience, master_listen_fd=listener)
