"""The context of distributed objects: a cluster, a folder for arrays in transit, and one driver."""

import itertools
import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakSet

import dask.array as da
from dask import delayed
from dask.delayed import Delayed
from distributed import Client, default_client

from halotile.errors import ConfigError, MemoryRefused, OutputRefused
from halotile.graphs.clusters.base import ADDRESS, DEFAULT, ChosenCluster, Order, RunningCluster
from halotile.graphs.clusters.common.answers import await_workers, present_workers
from halotile.graphs.clusters.common.cluster_kind import check_one_script, cluster_kind_of
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.clusters.common.security import owned_folder, private_base
from halotile.graphs.clusters.scheduler import JoinedWorkers, joined
from halotile.graphs.kinds import sections
from halotile.graphs.kinds.sections import parse_bytes
from halotile.graphs.plans.needs import IMPORTS_BYTES, MIB, machine_bytes
from halotile.graphs.rules.arguments import Words, cluster_of
from halotile.graphs.runs.passes.stream import await_all, results
from halotile.graphs.runs.passes.torch_ranks import TorchProgram, call_with_group
from halotile.graphs.tree_sum import groups_of, key_of, plan_sums, tree
from halotile.graphs.words import bytes_text
from halotile.storage.disk.stored import Stored
from halotile.tasks.devices.device import choose_device, seed_everything
from halotile.tasks.distributed.transport.calls import (
    Call,
    CallWork,
    PartialSums,
    add_arrays,
    run_named_task,
    working_bytes,
)
from halotile.tasks.groups.opening import END_SECONDS
from halotile.tasks.options import check_above_zero, check_whole


def task_bytes(client: Client) -> int | None:
    """Return the memory of one task: the smallest limit of a worker per thread; None without limits."""
    workers = present_workers(client).values()
    shares = [w["memory_limit"] // max(1, w["nthreads"]) for w in workers if w.get("memory_limit")]
    return min(shares, default=None)


def check_memory(what: str, calls: Sequence[Call], sizes: Sequence[int], allowed: int | None) -> None:
    """Refuse calls if one needs more than the memory of a task, which includes the worker's imports.

    ``sizes`` are the bytes of the arrays that calls refer to, and ``what`` is the unit that their numbers count.
    """
    if allowed is None:
        return
    needs = [working_bytes(call.function, [sizes[place] for place in call.inputs]) for call in calls]
    needed = max(needs, default=0)
    total = needed + IMPORTS_BYTES
    if total <= allowed:
        return
    call = calls[needs.index(needed)]
    input_bytes = sum(sizes[place] for place in call.inputs)
    raise MemoryRefused(
        f"{what} {call.number} works on whole images: with inputs of {bytes_text(input_bytes)}, one task needs about "
        f"{bytes_text(needed)} beside {bytes_text(IMPORTS_BYTES)} of imports, and has {bytes_text(allowed)}. Write "
        f"DistributedContext(memory_per_worker='{-(-total // MIB)}MiB'), with fewer workers if need be, or smaller images."
    )


Value = TypeVar("Value")


class SingleRank:
    """Collectives of a single rank, which has no others to communicate with.

    >>> rank = SingleRank()
    >>> rank.rank, rank.local_indices(3), rank.all_reduce(5)
    (0, [0, 1, 2], 5)
    """

    rank = 0
    local_rank = 0
    use_dist = False
    created_dist = False
    world_size = 1

    @property
    def local_world_size(self) -> int:
        """Number of workers, the same as ``world_size``."""
        return self.world_size

    def local_indices(self, num_items: int) -> list[int]:
        """List the items of this rank, which are all of them."""
        return list(range(num_items))

    def all_reduce(self, x: Value, op: Any = None, group: Any = None) -> Value:
        """Return the input: there is nothing to add to it."""
        return x

    def broadcast(self, x: Value, src: int = 0, group: Any = None) -> Value:
        """Return the input."""
        return x

    def all_gather(self, x: Any, group: Any = None) -> Any:
        """Return the input with a leading axis of one rank."""
        return x[None]

    def all_gather_object(self, obj_list: list[Any], obj: Any, group: Any = None) -> None:
        """Put the object in the first place of the list."""
        if obj_list:
            obj_list[0] = obj

    def broadcast_object_list(self, object_list: list[Any], src: int = 0, device: Any = None) -> list[Any]:
        """Return the list."""
        return object_list

    def barrier(self) -> None:
        """Return at once: there is no other rank to wait for."""

    def get_backend(self) -> str:
        """Return ``dask``."""
        return "dask"


RESULTS = "results"  # folder of temporary results, in the private folder
MAX_WORKERS = 4  # workers that are started by default
_CURRENT: WeakSet[Client] = WeakSet()  # clients that contexts made Dask's default
DEATHS = 2  # workers that may die with a task before it fails: one may be ended by other processes on its machine


@dataclass(eq=False, repr=False)
class DistributedContext(SingleRank):
    """A cluster of workers for :func:`halotile.distribute`, with one driver: the process that opens it.

    It replaces ``deepinv.distributed.DistributedContext``. There the script runs once on every rank;
    here it runs once, so ``rank`` is 0, every index is local, and collectives have nothing to do.

    Within the context, Dask arrays are computed on its workers. Where you have opened a client before, it stays Dask's default and computes
    them, unless ``cluster`` is a running one.

    Parameters
    ----------
    backend : str, optional
        Accepted for compatibility with deepinv; Dask has no choice of backends.
    cleanup : bool
        Remove the folder for arrays at the end.
    seed : int, optional
        Seed of torch in this process and of random numbers on workers: the same for any number of workers.
    seed_offset : bool
        Accepted for compatibility with deepinv: there is one rank.
    deterministic : bool
        Let torch use deterministic algorithms of cuDNN.
    device_mode : str, optional
        ``cpu``, ``gpu``, or None: a GPU if there is one.
    workers : int, optional
        Processes to start on this machine. Left out, the context joins the cluster that the environment
        variable ``DASK_SCHEDULER_ADDRESS`` names; where it is not set, up to four processes start.
    cluster : RunningCluster, distributed.Client, str or mapping, optional
        A running cluster, which is used and left running; or one to start: a kind such as ``"slurm"``, or the
        cluster section of a job file.
    memory_per_worker : str or int, optional
        Such as ``4GB``: a worker that grows past it is ended. By default an equal share of the machine.
    scratch : path, optional
        Parent of a private folder for arrays, which workers on other machines must be able to read. Left out,
        it is in the cache of your home folder for a cluster of other machines.
    results : path, optional
        Folder for the results of calls on paths, each named after its method, such as
        ``A_adjoint-0001.zarr``. Left out, they are written to the private folder, and are deleted with it.
    split_every : int
        Partial sums that one task adds up.
    accumulate : str, optional
        ``float64`` keeps sums over operators in double precision until the last.
    stall_seconds : float
        Give up when no task ends for this long.

    Raises
    ------
    ConfigError
        For invalid options, and when workers cannot start.

    Examples
    --------
    >>> import torch
    >>> from halotile import DistributedContext, distribute
    >>> with DistributedContext(workers=1) as ctx:
    ...     pool = torch.nn.AvgPool2d(3, 1, 1)
    ...     smooth = distribute(pool, ctx, type_object="denoiser", patch_size=8, overlap=1)
    ...     ctx.rank, ctx.world_size, tuple(smooth(torch.ones(1, 1, 20, 20)).shape)
    (0, 1, (1, 1, 20, 20))
    """

    backend: str | None = None
    cleanup: bool = True
    seed: int | None = None
    seed_offset: bool = True
    deterministic: bool = False
    device_mode: str | None = None
    _: KW_ONLY
    workers: int | None = None
    cluster: RunningCluster | Client | sections.Cluster | str | Words | None = None
    memory_per_worker: str | int | None = None
    scratch: str | os.PathLike[str] | None = None
    results: str | os.PathLike[str] | None = None
    split_every: int = 4
    accumulate: str | None = None
    stall_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers is {self.workers}: at least one is needed. Write workers=1 or more.")
        if self.split_every < 2:
            raise ConfigError(f"split_every is {self.split_every}: sums have two terms. Write 2 or more.")
        if self.accumulate not in (None, "float64"):
            raise ConfigError(f"accumulate is {self.accumulate!r}. Write 'float64', or leave it out.")
        self.results = None if self.results is None else Path(self.results).absolute()
        self.device: Any = choose_device(self.device_mode)
        self.world_size = self.workers or 1
        self.most_alive = 0
        """Largest number of partial sums on disk at once, so far."""
        self.task_bytes: int | None = None
        """Memory of one task; None without a limit."""
        self.streams = itertools.count(1)
        """Numbers that tell the random numbers of distributed objects apart."""
        self._resources = ExitStack()
        self._folder: Path | None = None
        self._client: Client | None = None

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            self._folder = resources.enter_context(self._private_folder())
            running = resources.enter_context(self._connect())
            self._client, self.world_size = running.client, running.workers
            is_given = self.cluster is not None and self._choice is None
            if is_given or not _is_default_taken():
                resources.enter_context(self._client.as_current())
                _CURRENT.add(self._client)
            self.task_bytes = task_bytes(self._client)
            seed_everything(self.seed, self.deterministic)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._client = None
        self._folder = None
        self._resources.close()

    @contextmanager
    def _private_folder(self) -> Iterator[Path]:
        """Make a folder that only its owner may read."""
        is_remote = self._choice is not None and self._kind(self._choice).name != DEFAULT
        base = Path(self.scratch or (private_base() if is_remote else tempfile.gettempdir()))
        if self.cleanup:
            with owned_folder(base, "halotile-context-") as folder:
                yield folder
        else:
            yield Path(tempfile.mkdtemp(prefix="halotile-", dir=base))

    @contextmanager
    def _connect(self) -> Iterator[RunningCluster]:
        """Start or join the cluster."""
        cluster, choice = self.cluster, self._choice
        if choice is not None:
            count = self.workers or min(MAX_WORKERS, cores_here())
            kind = self._kind(choice)
            share = machine_bytes() // count
            check_one_script(kind)
            order = Order(
                workers=count,
                memory_bytes=share if self.memory_per_worker is None else parse_bytes(self.memory_per_worker),
                choice=choice,
                folder=self._folder,
                deaths=DEATHS,
                stall_seconds=self.stall_seconds,
            )
            with kind.start(order) as started:
                await_workers(started, warnings.warn)
                yield started
        elif cluster is None:
            with joined(ADDRESS, os.environ[ADDRESS]) as client:
                yield JoinedWorkers(client)
        elif isinstance(cluster, Client):
            yield JoinedWorkers(cluster)
        elif not isinstance(cluster, sections.Cluster | str | Mapping):
            yield cluster

    @property
    def _choice(self) -> sections.Cluster | None:
        """The cluster to start, as a section of a job; None if a cluster is joined."""
        if isinstance(self.cluster, sections.Cluster | str | Mapping):
            return cluster_of(self.cluster)
        is_joined = self.cluster is not None or (self.workers is None and ADDRESS in os.environ)
        return None if is_joined else sections.Cluster(dashboard=False)

    @staticmethod
    def _kind(choice: sections.Cluster) -> ChosenCluster:
        # The address names workers that run already, not those that are to start.
        return cluster_kind_of(choice, {name: value for name, value in os.environ.items() if name != ADDRESS})

    @property
    def client(self) -> Client:
        """The connection to the cluster.

        Raises
        ------
        ConfigError
            Outside the ``with`` block.
        """
        if self._client is None:
            raise ConfigError(
                "this DistributedContext is not open. Write `with DistributedContext(...) as ctx:` around its uses."
            )
        return self._client

    @property
    def folder(self) -> Path:
        """Folder of arrays and objects while workers need them; of mode 0700."""
        assert self.client is not None
        assert self._folder is not None
        return self._folder

    def result_path(self, name: str) -> Path:
        """Return a new path for a result of this name, without its suffix.

        Raises
        ------
        OutputRefused
            If the folder of results cannot be made.
        """
        folder = Path(self.results or self.folder / RESULTS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputRefused(
                f"results is {folder}, which cannot be a folder ({error.strerror}). Write the path of an existing or new folder."
            ) from error
        endings = (path.name.removesuffix(".zarr").split("-")[1] for path in folder.glob(f"{name}-*"))
        numbers = (int(ending) for ending in endings if ending.isdecimal())
        return folder / f"{name}-{max(numbers, default=0) + 1:04d}"

    def run(self, phase: str, calls: Sequence[Call], inputs: Sequence[Stored], what: str) -> dict[int, Stored]:
        """Evaluate calls on the workers, and add up the values of each slot in the order of the calls.

        Raises
        ------
        TaskFailed
            As soon as a call fails; with its number.
        MemoryRefused
            Before they start, if a call on whole images needs more memory than a worker has.
        """
        sizes = [os.path.getsize(stored.path) for stored in inputs]
        check_memory(what, calls, sizes, self.task_bytes)
        folder = tempfile.mkdtemp(dir=self.folder)
        work = CallWork(folder, tuple(inputs), phase, what, self.accumulate is not None, str(self.device))
        groups, are_added = groups_of(calls, sum(sizes))
        sums: list[PartialSums]
        if are_added:
            task = plan_sums(work, groups, self.split_every, self.world_size)
            futures = self.client.compute([task], optimize_graph=False)
            sums = results(self.client, futures, self.stall_seconds)
        else:
            token = uuid.uuid4().hex[:8]
            names = [key_of(work, group, token) for group in groups]
            futures = self.client.map(work.compute_to_file, groups, names, key=names, pure=False)
            await_all(self.client, futures, self.stall_seconds)
            sums = [work.take_from_file(name) for name in names]
        self.most_alive = max([self.most_alive, *(part.alive for part in sums)])
        return {slot: stored for part in sums for slot, stored in part.arrays.items()}

    def run_torch(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        backend: str = "auto",
        timeout_seconds: float = 60.0,
        end_seconds: float = END_SECONDS,
        retries: int = 0,
    ) -> list[Any]:
        """Run a function as the ranks of a torch program, one on each worker; return their results in order.

        Parameters
        ----------
        function : callable
            Called on each worker as ``function(group, *args)``, with its :class:`~halotile.tasks.groups.group.TorchGroup`.
        *args
            Further arguments, the same for all ranks.
        ranks : int, optional
            Number of ranks; left out, one on each worker.
        backend : str
            ``gloo``, ``nccl``, or ``auto``: nccl for GPUs.
        timeout_seconds : float
            Longest time that a rank waits for the others.
        end_seconds : float
            Longest time that ranks whose function has returned wait for the others to return; left out, as long as these work. A warning names
            ranks that are still at work a minute or two after others have returned, and again later.
        retries : int
            Further attempts after a rank has failed; the function begins anew, from a checkpoint of its own if it wrote one.

        Raises
        ------
        RankFailed
            When a rank failed; the message begins with its traceback. All other ranks are ended within seconds.
        WorkerDied
            When no worker is left.
        ConfigError
            When there are fewer workers than ranks, or a number is out of range.

        Examples
        --------
        >>> import torch
        >>> with DistributedContext(workers=2, device_mode="cpu") as ctx:
        ...     ctx.run_torch(lambda group: float(group.all_reduce(torch.tensor(group.rank + 1.0))))
        [3.0, 3.0]
        """
        if ranks is not None:
            check_whole("ranks", ranks, 1)
        check_whole("retries", retries, 0)
        check_above_zero("timeout_seconds", timeout_seconds)
        check_above_zero("end_seconds", end_seconds)
        call = partial(call_with_group, function, args)
        program = TorchProgram(call, self.folder, backend, self.device_mode, timeout_seconds, end_seconds)
        return program.run(self.client, ranks, retries, self.world_size)

    def is_lazy(self, value: Any) -> bool:
        """Return True for a Dask array."""
        return isinstance(value, da.Array)

    def run_lazily(
        self, phase: str, calls: Sequence[Call], arrays: Sequence[Any], like: Sequence[Any], what: str
    ) -> list[da.Array]:
        """Return the totals of calls as Dask arrays with the shapes and dtypes of ``like``.

        Each call reads its arrays whole. Nothing is computed before the result is.
        """
        token = uuid.uuid4().hex[:8]
        whole = [_whole(array) for array in arrays]
        parts: list[list[Delayed]] = [[] for _ in like]
        for call in calls:
            key = f"{phase}-{token}-{call.number}"
            # Bound by partial: Dask would search every field of every argument for tasks.
            run = partial(run_named_task, f"{phase} of {what} {call.number}", call.function)
            values = delayed(run, pure=False)(*(whole[place] for place in call.inputs), dask_key_name=key)
            for place, slot in enumerate(call.slots):
                parts[slot].append(delayed(getitem)(values, place, dask_key_name=f"{key}-{place}"))
        sums = (tree(part, add_arrays, self.split_every, f"{token}-{n}") for n, part in enumerate(parts))
        return [da.from_delayed(s, each.shape, each.dtype) for s, each in zip(sums, like, strict=True)]

    def __deepcopy__(self, memo: Any) -> Self:
        """Return the context itself: a copy of a distributed object uses the same workers."""
        return self


def _is_default_taken() -> bool:
    """Return True where the user has a client of their own, on which collections may be persisted."""
    with suppress(ValueError):
        return default_client() not in _CURRENT
    return False


def _whole(array: Any) -> Delayed:
    """Return an array as a single delayed block."""
    if not isinstance(array, da.Array):
        return delayed(array)
    return array.rechunk(-1).to_delayed().item()
