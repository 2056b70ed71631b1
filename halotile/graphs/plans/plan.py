"""A plan: a job with every size decided, checked against memory and disk, ready to run or refused."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from halotile.errors import DiskRefused, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.jobs.sections import Cluster, DenoiserChoice, Job, Output, Run, parse_bytes
from halotile.graphs.plans.gpu_trials import written_tiles
from halotile.graphs.plans.memory import MIB, Footprint, check_share
from halotile.graphs.plans.opening import describe_denoiser
from halotile.graphs.plans.receptive_field import Reach
from halotile.graphs.plans.worker_count import Requested, check_allocation
from halotile.graphs.runs.identity import fingerprint
from halotile.storage.arrays import Source
from halotile.storage.grid import Grid
from halotile.storage.sharded.output import Layout
from halotile.tasks.denoise_block import DenoiseTask
from halotile.tasks.trials.gpu_findings import Tuned

SMALLER = "a smaller output.shard, tile.size or tile.batch"


class RunPlan(Protocol):
    """What every run needs to know of its plan: what it is, where it writes, what it reads."""

    @property
    def wanted(self) -> Output:
        """The output as it was asked for."""
        ...

    @property
    def output(self) -> Path:
        """Where it is."""
        ...

    @property
    def run_directory(self) -> Path:
        """The directory beside it."""
        ...

    @property
    def layout(self) -> Layout:
        """Everything about the output but its pixels."""
        ...

    @property
    def grid(self) -> Grid:
        """The blocks of a sweep."""
        ...

    @property
    def sweeps(self) -> int:
        """Times that all blocks are gone through, at most."""
        ...

    @property
    def run(self) -> Run:
        """How it is run."""
        ...

    @property
    def cluster(self) -> Cluster:
        """Where its workers live."""
        ...

    @property
    def output_bytes(self) -> int:
        """The most that the output can take."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that can change a bit of the output."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the identity: a journal belongs to one."""
        ...

    @property
    def same_inputs(self) -> tuple[dict[str, Any], ...]:
        """What else has been called the images that the job reads."""
        ...

    @property
    def sources(self) -> Sequence[Source]:
        """The arrays that workers read."""
        ...

    @property
    def fresh(self) -> bool:
        """Whether what an earlier run left is thrown away."""
        ...

    def check_fits(self) -> None:
        """Refuse what needs more memory or disk than there is."""
        ...

    def summary(self) -> dict[str, Any]:
        """The figures, for people and for programs."""
        ...

    def reads(self) -> Iterator[Path]:
        """Files that the job reads besides images that the planner has looked after."""
        ...

    def job_json(self) -> dict[str, Any]:
        """The job as a configuration: the same shape as the YAML, with an absolute output."""
        ...

    def resolved_json(self) -> dict[str, Any]:
        """The job as a configuration in which every size is decided."""
        ...


@dataclass(frozen=True)
class Plan:
    """A job that can start: what a worker does with a block, where it goes, and what it will cost."""

    job: Job
    cluster: Cluster
    """Where its workers live: that of the job, or what is better for it where the job leaves that open."""
    task: DenoiseTask
    sources: tuple[Source, ...]
    """The image and the side inputs."""
    layout: Layout
    reach: Reach
    output: Path
    run_directory: Path
    identity: dict[str, Any]
    same_inputs: tuple[dict[str, Any], ...]
    """What else has been called the images that this job reads: see :func:`make_plan`."""
    differs: tuple[str, ...]
    resumes: bool
    fresh: bool
    footprint: Footprint
    free_disk_bytes: int
    machine_bytes: int | None
    """Memory that the workers share; None where they run on other machines."""
    requested: Requested
    """How many workers the job asks for."""
    tuned: Tuned | None
    """What a trial of the device found, where there was one."""
    notes: tuple[str, ...]

    @property
    def grid(self) -> Grid:
        """The blocks of the job."""
        return self.task.grid

    @property
    def wanted(self) -> Output:
        """The output as it was asked for."""
        return self.job.output

    @property
    def run(self) -> Run:
        """How it is run."""
        return self.job.run

    @property
    def sweeps(self) -> int:
        """Every block is denoised once."""
        return 1

    @property
    def fingerprint(self) -> str:
        """Digest of the identity: a journal belongs to one."""
        return fingerprint(self.identity)

    @property
    def memory_bytes(self) -> int:
        """Memory that one worker may use."""
        return parse_bytes(self.job.run.memory_per_worker)

    @property
    def output_bytes(self) -> int:
        """Size of the output without compression: the most it can take, but for a few checksums."""
        return self.layout.size_bytes

    def check_fits(self) -> None:
        """Refuse a plan that needs more memory or disk than there is.

        Raises
        ------
        MemoryRefused, DiskRefused
            With the figures, and what to write instead.
        """
        needed = self.footprint
        if needed.total_bytes > self.memory_bytes:
            raise MemoryRefused(
                f"run.memory_per_worker is {self.job.run.memory_per_worker}; one block of {list(self.grid.block)} needs "
                f"{bytes_text(needed.total_bytes)}, of which {needed.describe()}.{self._words_of_depth()} "
                f"{self._ways_to_fit(needed)}"
            )
        check_allocation(self.run, self.cluster)
        check_share(
            self.job.run.count,
            self.machine_bytes,
            needed.total_bytes,
            needed.describe(),
            SMALLER,
            self._words_of_depth(),
        )
        if not self.resumes:
            check_inodes(self.layout.inodes, existing_parent(self.output))
        # What a resumed run has written is not counted twice.
        if not self.resumes and self.output_bytes > self.free_disk_bytes:
            raise DiskRefused(
                f"the output takes up to {bytes_text(self.output_bytes)} and {existing_parent(self.output)} has "
                f"{bytes_text(self.free_disk_bytes)} free. Write output.path on a larger disk, or a smaller output.dtype."
            )

    def _ways_to_fit(self, needed: Footprint) -> str:
        """What to write instead where a block takes more than a worker has: what can help, and nothing else."""
        tile, window = tile_window(self.task)
        is_deep = math.prod(window) > 4 * math.prod(tile)
        enough, machine = needed.total_bytes, self.machine_bytes
        ways = {
            f"write run.memory_per_worker: {-(-enough // MIB)}MiB": machine is None or enough <= machine,
            f"write {SMALLER}": self.memory_bytes > needed.fixed_bytes and not is_deep,
            "choose a denoiser that looks less far": is_deep and self.memory_bytes > needed.fixed_bytes,
            "store the input in smaller chunks": enough - needed.decode_bytes <= self.memory_bytes,
        }
        helping = (
            ", or ".join(way for way, helps in ways.items() if helps) or "use a machine with more memory"
        )
        return f"{helping[0].upper()}{helping[1:]}."

    def _words_of_depth(self) -> str:
        """What a depth that is large beside the tile does."""
        tile, window = tile_window(self.task)
        if math.prod(window) <= 2 * math.prod(tile):
            return ""
        edges, reached = (" x ".join(map(str, shape)) for shape in (tile, window))
        deepest = max(itertools.chain.from_iterable(self.task.tiling.depth))
        return f" With depth {deepest}, a tile of {edges} pixels computes {reached}."

    def reads(self) -> Iterator[Path]:
        """The files of the denoiser, and the side inputs."""
        yield from self.task.denoiser.files()
        for name in self.task.sides:
            yield Path(self.job.input.sides[name])

    def job_json(self) -> dict[str, Any]:
        """The job as a configuration: the same shape as the YAML, with an absolute output."""
        parts = {
            name: asdict(getattr(self.job, name)) for name in ("input", "output", "tile", "run", "cluster")
        }
        parts["run"]["workers"] = self.requested.workers
        parts["output"]["path"] = str(self.output)
        choice = self.job.denoiser
        return {
            "version": 1,
            "job": "denoise",
            **parts,
            "denoiser": {"name": choice.name, **choice.options}
            if isinstance(choice, DenoiserChoice)
            else describe_denoiser(choice),
            "allow_import": self.job.allow_import,
            "import_folder": self.job.import_folder,
        }

    def resolved_json(self) -> dict[str, Any]:
        """The job as a configuration in which every size is decided; it makes the same output."""
        job, task = self.job_json(), self.task
        spatial = task.roles.spatial

        def edges(sizes: tuple[int, ...]) -> list[int]:
            return [sizes[i] for i in spatial]

        # A file cannot allow itself to run code.
        del job["allow_import"], job["import_folder"]
        block = edges(task.grid.block)
        if (
            task.tiling.scale == 1
        ):  # a block that ends with the image is as good as one that ends with its shard
            block = [-(-b // s) * s for b, s in zip(block, edges(self.layout.shard), strict=True)]
        job["denoiser"] = describe_denoiser(task.denoiser)
        job["output"] |= {
            "shard": edges(self.layout.shard),
            "chunk": edges(self.layout.chunk),
            "dtype": self.layout.dtype,
        }
        job["tile"] |= {
            **written_tiles(task),
            "depth": [max(pair) for pair in task.tiling.depth],
            "boundary": task.rim.rules[spatial[0]],
            "block": block,
            "axes": "".join(task.roles.axes[i] for i in spatial),
        }
        return job

    def summary(self) -> dict[str, Any]:
        """The figures of the plan, for people and for ``--json``."""
        grid, task = self.grid, self.task
        middle = grid.middle
        roles = task.roles
        spatial_core = roles.spatial_part(middle.core).size
        spatial_window = roles.spatial_part(task.rim.reach(middle.window, grid.shape)).size
        tile, window = map(math.prod, tile_window(task))
        return {
            "input": self.job.input.path,
            "output": str(self.output),
            "shape": list(grid.shape),
            "axes": "".join(roles.axes),
            "tiled_axes": "".join(roles.axes[i] for i in roles.spatial),
            "dtype": str(task.source.dtype),
            "output_shape": list(self.layout.shape),
            "output_dtype": self.layout.dtype,
            "denoiser": task.denoiser.name,
            "blocks": len(grid),
            "block": list(grid.block),
            "shard": list(self.layout.shard),
            "chunk": list(self.layout.chunk),
            "codec": self.layout.codec,
            "tile": list(task.tiling.tile),
            "batch": task.tiling.batch,
            "device": task.device,
            "precision": task.precision,
            "device_memory_bytes": self.tuned.device_bytes if self.tuned and task.device != "cpu" else None,
            "tuned": self.tuned.to_json() if self.tuned else None,
            "depth": [list(d) for d in task.tiling.depth],
            "depth_from": self.reach.origin,
            "boundary": task.rim.rules[roles.spatial[0]],
            "read_amplification": round(spatial_window / spatial_core, 4),
            "compute_redundancy": round(window / tile, 4),
            "peak_memory_per_worker_bytes": self.footprint.total_bytes,
            "memory_per_worker_bytes": self.memory_bytes,
            "output_bytes": self.output_bytes,
            "scratch_bytes": 0,
            "free_disk_bytes": self.free_disk_bytes,
            "files": self.layout.files,
            "inodes": self.layout.inodes,
            "free_inodes": free_inodes(existing_parent(self.output)),
            "workers": self.job.run.count,
            "workers_from": self.requested.why,
            "resumes": self.resumes,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }


def tile_window(task: DenoiseTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the largest tile, and of what is computed for it: no more than the image where it is cut there."""
    tiling = task.tiling
    tile = tuple(min(t, n) for t, n in zip(tiling.tile, tiling.image, strict=True))
    rules = [task.rim.rules[i] for i in task.roles.spatial]
    grown = [t + a + b for t, (a, b) in zip(tile, tiling.depth, strict=True)]
    window = tuple(
        min(g, n) if rule == "cut" else g for g, n, rule in zip(grown, tiling.image, rules, strict=True)
    )
    return tile, window


def free_inodes(place: Path) -> int | None:
    """Files and folders that a file system has room for; None where it does not count them, as btrfs."""
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def check_inodes(needed: int, place: Path) -> None:
    """Refuse more files and folders than a file system has room for.

    Raises
    ------
    DiskRefused
        With the figures, and what to write instead.
    """
    free = free_inodes(place)
    if free is not None and needed > free:
        raise DiskRefused(
            f"the run makes {needed:,} files and folders, and {place} has room for {free:,} (`df -i`). Write a larger output.shard, or "
            "output.path on another disk."
        )


def run_directory_of(output: str | Path) -> Path:
    """The run directory beside an output: ``clean.zarr.run`` for ``clean.zarr``."""
    path = Path(output)
    return path.with_name(path.name + ".run")


def existing_parent(path: Path) -> Path:
    """The nearest folder above a path that is there already."""
    return next(parent for parent in path.parents if parent.exists())
