"""The context of distributed objects: a cluster, a folder for arrays in transit, and one driver."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distributed import Client

from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.clusters.base import Cluster, Order, Start
from halotile.graphs.clusters.connection.arrival import await_workers
from halotile.graphs.clusters.connection.credentials import private_base
from halotile.graphs.clusters.detection.cluster_kind import ADDRESS, DEFAULT, Kind, check_one_script, kind_of
from halotile.graphs.clusters.detection.cores import cores_here
from halotile.graphs.clusters.scheduler import joined
from halotile.graphs.distributed import dask_arrays
from halotile.graphs.distributed.memory_check import check_holds, task_bytes
from halotile.graphs.distributed.rank import OneRank
from halotile.graphs.futures import await_all, results
from halotile.graphs.jobs import sections
from halotile.graphs.jobs.sections import parse_bytes
from halotile.graphs.plans.memory import machine_bytes
from halotile.graphs.rules.arguments import Words, cluster_of
from halotile.graphs.tree_sum import groups_of, key_of, plan_sums
from halotile.registry import find
from halotile.storage.grid import Region
from halotile.tasks.devices.device import choose_device, seed_everything
from halotile.tasks.distributed.stacks.windows import Late
from halotile.tasks.distributed.tiling.processed import Processed
from halotile.tasks.distributed.tiling.tiles import Tiles
from halotile.tasks.distributed.transport.calls import Call
from halotile.tasks.distributed.transport.stored import Array, Stored, store
from halotile.tasks.distributed.transport.work import Parts, Work

RESULTS = "results"
"""Of the private folder: where results lie that are not to stay."""
MOST_WORKERS = 4
"""Workers that are started unasked."""
DEATHS = 2
"""Workers that may die with a task before it is given up: one may be ended by others on its machine."""


class DistributedContext(OneRank):
    """A cluster of workers for :func:`halotile.distribute`, with one driver: the process that opens it.

    It stands in the place of ``deepinv.distributed.DistributedContext``. There the script runs once on every rank;
    here it runs once, so ``rank`` is 0, every index is local, and collectives have nothing to do.

    Parameters
    ----------
    backend : str, optional
        Accepted for deepinv's sake; Dask has none to choose.
    cleanup : bool
        Whether the folder for arrays is removed at the end.
    seed : int, optional
        For torch in this process, and for what workers draw: the same for any number of workers.
    seed_offset : bool
        Accepted for deepinv's sake: there is one rank.
    deterministic : bool
        Whether torch is to use deterministic algorithms of cuDNN.
    device_mode : str, optional
        ``cpu``, ``gpu``, or None: a GPU where there is one.
    workers : int, optional
        Processes to start on this machine. Left out, the cluster that the environment variable
        ``DASK_SCHEDULER_ADDRESS`` names is joined; where it is not set, up to four processes start.
    cluster : Cluster, distributed.Client, str or mapping, optional
        A running cluster, which is used, and left running; or what to start: a kind such as ``"slurm"``, or the cluster section of
        a job file.
    memory_per_worker : str or int, optional
        Such as ``4GB``: a worker that grows past it is ended. By default an equal share of the machine.
    scratch : path, optional
        Where a private folder for arrays is made. Workers on other machines have to see it; left out, it is in your home's
        cache for a cluster of them.
    results : path, optional
        Where calls on paths write what they give, each under a name that tells what it is, such as ``A_adjoint-0001.zarr``.
        Left out, it is written to the private folder, and goes with it.
    split_every : int
        Partial sums that one task adds up.
    accumulate : str, optional
        ``float64`` keeps sums over operators in double precision until the last.
    stall_seconds : float
        Give up when no task ends for so long.

    Raises
    ------
    ConfigError
        For options that cannot be, and when workers cannot start.

    Examples
    --------
    >>> import torch
    >>> from halotile import DistributedContext, distribute
    >>> with DistributedContext(workers=1) as ctx:
    ...     smooth = distribute(torch.nn.AvgPool2d(3, 1, 1), ctx, type_object="denoiser", patch_size=8, overlap=1)
    ...     ctx.rank, ctx.world_size, tuple(smooth(torch.ones(1, 1, 20, 20)).shape)
    (0, 1, (1, 1, 20, 20))
    """

    def __init__(
        self,
        backend: str | None = None,
        cleanup: bool = True,
        seed: int | None = None,
        seed_offset: bool = True,
        deterministic: bool = False,
        device_mode: str | None = None,
        *,
        workers: int | None = None,
        cluster: Cluster | Client | sections.Cluster | str | Words | None = None,
        memory_per_worker: str | int | None = None,
        scratch: str | os.PathLike[str] | None = None,
        results: str | os.PathLike[str] | None = None,
        split_every: int = 4,
        accumulate: str | None = None,
        stall_seconds: float = 300.0,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers is {workers}: somebody has to work. Write workers=1 or more.")
        if split_every < 2:
            raise ConfigError(
                f"split_every is {split_every}: a sum has two parts. Write split_every=2 or more."
            )
        if accumulate not in (None, "float64"):
            raise ConfigError(f"accumulate is {accumulate!r}. Write accumulate='float64', or leave it out.")
        self.backend = backend
        self.cleanup = cleanup
        self.seed = seed
        self.seed_offset = seed_offset
        self.deterministic = deterministic
        self.device_mode = device_mode
        self.device: Any = choose_device(device_mode)
        self.split_every = split_every
        self.accumulate = accumulate
        self.stall_seconds = stall_seconds
        self.world_size = workers or 1
        self.most_alive = 0
        """The largest number of partial sums that lay on the disk at once, so far."""
        self._streams = 0
        self._workers = workers
        self._given = cluster
        self._memory = memory_per_worker
        self._scratch = scratch
        self._results = None if results is None else Path(results).absolute()
        self._held = ExitStack()
        self._folder: Path | None = None
        self._client: Client | None = None
        self.task_bytes: int | None = None
        """What a task may hold; None where nobody set a bound."""

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self._folder = held.enter_context(self._private_folder())
            self._client, self.world_size = held.enter_context(self._cluster())
            held.enter_context(self._client.as_current())
            self.task_bytes = task_bytes(self._client)
            seed_everything(self.seed, self.deterministic)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client = None
        self._folder = None
        self._held.close()

    @contextmanager
    def _private_folder(self) -> Iterator[Path]:
        """A folder that nobody else may read."""
        elsewhere = self._choice is not None and self._kind(self._choice).name != DEFAULT
        base = self._scratch or (private_base() if elsewhere else None)
        folder = Path(tempfile.mkdtemp(prefix="halotile-", dir=base))
        try:
            yield folder
        finally:
            if self.cleanup:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _cluster(self) -> Iterator[tuple[Client, int]]:
        given = self._given
        choice = self._choice
        if choice is not None:
            with self._started(choice) as started:
                await_workers(started, warnings.warn)
                yield started.client, started.workers
        elif given is None:
            with joined(ADDRESS, os.environ[ADDRESS]) as client:
                yield client, count_workers(client)
        elif isinstance(given, Client):
            yield given, count_workers(given)
        elif not isinstance(given, sections.Cluster | str | Mapping):
            yield given.client, given.workers

    @property
    def _choice(self) -> sections.Cluster | None:
        """What is started, in the words of a job; None where a cluster is joined."""
        if isinstance(self._given, sections.Cluster | str | Mapping):
            return cluster_of(self._given)
        joins = self._given is not None or (self._workers is None and ADDRESS in os.environ)
        return None if joins else sections.Cluster(dashboard=False)

    @staticmethod
    def _kind(choice: sections.Cluster) -> Kind:
        # Workers that were asked for are not those that run somewhere already.
        return kind_of(choice, {name: word for name, word in os.environ.items() if name != ADDRESS})

    def _started(self, choice: sections.Cluster) -> AbstractContextManager[Cluster]:
        count = self._workers or min(MOST_WORKERS, cores_here())
        share = machine_bytes() // count
        kind = self._kind(choice)
        check_one_script(kind)
        start: Start = find("clusters", kind.name).start
        return start(
            Order(
                workers=count,
                memory_bytes=share if self._memory is None else parse_bytes(self._memory),
                choice=choice,
                folder=self._folder,
                deaths=DEATHS,
            )
        )

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
        """Where arrays and objects lie while workers need them; of mode 0700."""
        assert self.client is not None
        assert self._folder is not None
        return self._folder

    def result_path(self, name: str) -> Path:
        """Where the next result of this name goes, without its suffix; nothing that is there is overwritten.

        Raises
        ------
        OutputRefused
            Where the folder of results cannot be made.
        """
        folder = self._results or self.folder / RESULTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputRefused(
                f"results is {folder}, which cannot be a folder ({error.strerror}). Write the path of one, or of one to be made."
            ) from error
        taken = {path.name.removesuffix(".zarr") for path in folder.glob(f"{name}-*")}
        numbers = (int(each.split("-")[1]) for each in taken if each.split("-")[1].isdecimal())
        return folder / f"{name}-{max(numbers, default=0) + 1:04d}"

    def stream(self) -> int:
        """A number that no other distributed object of this context has, for its random numbers."""
        self._streams += 1
        return self._streams

    def put(self, array: Array, kind: str) -> Stored:
        """Write an array where workers can read it."""
        return store(array, self.folder, kind)

    def run(
        self, phase: str, calls: Sequence[Call], inputs: Sequence[Stored], what: str
    ) -> dict[int, Stored]:
        """Evaluate calls on the workers; what goes to the same slot is added up, in the order of the calls.

        Raises
        ------
        TaskFailed
            At once, when a call fails; with its number.
        MemoryRefused
            Before they start, when one that works on whole images needs more than a worker has.
        """
        wide = self.accumulate is not None
        sizes = [os.path.getsize(each.path) for each in inputs]
        check_holds(what, calls, sizes, self.task_bytes)
        folder = tempfile.mkdtemp(dir=self.folder)
        work = Work(folder, tuple(inputs), phase, what, wide, str(self.device))
        groups, are_added = groups_of(calls, sum(sizes))
        parts = self._sum(work, groups) if are_added else self._each(work, groups)
        self.most_alive = max([self.most_alive, *(part.alive for part in parts)])
        return {slot: stored for part in parts for slot, stored in part.arrays.items()}

    def _sum(self, work: Work, groups: Sequence[Sequence[Call]]) -> list[Parts]:
        task = plan_sums(work, groups, self.split_every, self.world_size)
        futures = self.client.compute([task], optimize_graph=False)
        return results(self.client, futures, self.stall_seconds)

    def _each(self, work: Work, groups: Sequence[Sequence[Call]]) -> list[Parts]:
        """Tasks that do not depend on one another."""
        token = uuid.uuid4().hex[:8]
        names = [key_of(work, group, token) for group in groups]
        futures = self.client.map(work.file, groups, names, key=names, pure=False)
        await_all(self.client, futures, self.stall_seconds)
        return [work.filed(name) for name in names]

    def is_lazy(self, thing: Any) -> bool:
        """Whether it is a dask array."""
        return dask_arrays.is_lazy(thing)

    def later(self, phase: str, calls: Sequence[Call], arrays: Sequence[Any], slots: int) -> list[Any]:
        """The totals of calls on dask arrays, as dask arrays."""
        return [*dask_arrays.calls_on(calls, arrays, slots, self.split_every, phase)]

    def blocks_later(
        self, phase: str, lates: Sequence[Late], places: Sequence[Sequence[Region]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Dask arrays of blocks that are computed from their windows."""
        return [*dask_arrays.blocks_on(lates, places, arrays, phase)]

    def tiles_later(self, phase: str, image: Any, processed: Processed, tiles: Tiles) -> Any:
        """A dask array, processed tile by tile when it is computed."""
        return dask_arrays.tiles_on(image, processed, tiles, phase)

    def __deepcopy__(self, memo: Any) -> Self:
        """The same: a copy of a distributed object works with the same workers."""
        return self


def count_workers(client: Client) -> int:
    """How many workers a cluster has now, one at least."""
    return max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
