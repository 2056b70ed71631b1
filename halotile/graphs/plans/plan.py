"""A plan: a job with every size decided, checked against memory and disk, ready to run or refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from halotile.errors import DiskRefused, MemoryRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.kinds.base import JobKind, JobOutput, Work, kind_of
from halotile.graphs.kinds.sections import Cluster, Job, NamedChoice, Run, parse_bytes
from halotile.graphs.plans.identity import fingerprint
from halotile.graphs.plans.needs import SHARED_BYTES, Need, Requested, check_allocation, share_bytes, workers_that_fit
from halotile.storage.arrays import Source
from halotile.storage.disk.object_path import OutputPath, full_path
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import Layout
from halotile.tasks.options import job_key

J = TypeVar("J", bound=Job)
PRIVATE = ("allow_import", "import_folder")
"""Keys that no file may set: a file must not allow itself to run code."""
WHOLE = ("denoiser", "channels")
"""Keys whose values are decided as a whole."""


def documents_of(
    job: Job,  # with its number of workers decided
    requested: Requested,  # number of workers that was asked for
    given: Mapping[str, Any] | None = None,  # parts that are written differently from their fields
    # keys of sections whose values were decided, by section; for values outside sections the value itself
    resolved: Mapping[str, Any] | None = None,
) -> Documents:
    """Return a job in the shape of a job file, with an absolute output."""
    job = job.moved_to(str(full_path(job.place)))
    parts: dict[str, Any] = {f.name: _written(getattr(job, f.name)) for f in fields(job)}
    parts["run"]["workers"] = requested.workers
    requested_document = {"version": 1, "job": job.kind, **parts, **(given or {})}
    decided = {key: value for key, value in requested_document.items() if key not in PRIVATE}
    for key, value in (resolved or {}).items():
        decided[key] = decided[key] | value if isinstance(decided.get(key), dict) and key not in WHOLE else value
    return Documents(requested_document, decided)


def _written(part: Any) -> Any:
    """Return a part of a job as a file has it: a choice by name as one mapping."""
    if isinstance(part, NamedChoice):
        choice = asdict(part)  # type: ignore[call-overload]  # every choice is a dataclass
        options = {key: _written(value) for key, value in part.options.items()}
        return {**{key: value for key, value in choice.items() if key != "options"}, **options}
    if is_dataclass(part) and not isinstance(part, type):
        return {job_key(item.name): _written(getattr(part, item.name)) for item in fields(part)}
    if isinstance(part, tuple | list):
        return [_written(item) for item in part]
    return {key: _written(item) for key, item in part.items()} if isinstance(part, Mapping) else part


@dataclass(frozen=True)
class Documents:
    """A job as configurations: as it was asked for, and with every size decided."""

    asked: dict[str, Any]
    resolved: dict[str, Any]


@dataclass(frozen=True)
class Computing(Generic[J]):
    """Workers and device of a job."""

    job: J  # job with its number of workers decided
    requested: Requested  # number of workers that was asked for
    cluster: Cluster  # cluster of the workers
    device: str  # device, precision: device and precision of the denoiser
    precision: str
    ignored: tuple[str, ...]  # notes on settings that have no effect
    machine_bytes: int | None  # memory that the workers share; None where they run on other machines

    @property
    def on_gpu(self) -> bool:
        """True where GPUs compute."""
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Decisions of a kind of job on its plan; :func:`~halotile.graphs.plans.make.make_plan` adds what all plans have."""

    # job with its number of workers decided, and the cluster: that of the job, or a better one where the job leaves
    # that open
    computing: Computing[Any]
    work: Work  # its outputs and passes
    identity: dict[str, Any]  # everything that can change a bit of an output
    needs: tuple[Need, ...]  # memory of a worker in each kind of task
    figures: Mapping[str, Any]  # figures of the kind of job, by name
    sources: tuple[Source, ...]  # arrays that workers read
    smaller: str  # advice by which a worker needs less, as the end of a sentence
    files: tuple[Path, ...] = ()  # other files that the job reads
    notes: tuple[str, ...] = ()  # sentences about trial results, or what the result will lack or cost
    scratch_bytes: int = 0  # scratch_bytes, scratch_inodes: size and files of scratch arrays, at most
    scratch_inodes: int = 0
    smaller_output: str = ""  # advice by which the output becomes smaller, as the end of a sentence
    # given, decided: parts of the job that a job file writes differently, and those whose values were decided
    given: Mapping[str, Any] = field(default_factory=dict)
    decided: Mapping[str, Any] = field(default_factory=dict)
    # returns notes for a run that goes on with an earlier one
    notes_of_resumed: Callable[[], Sequence[str]] = tuple
    discards_others: bool = False  # earlier run of another job is discarded

    @property
    def job(self) -> Any:
        """The job with its number of workers decided."""
        return self.computing.job

    @property
    def cluster(self) -> Cluster:
        """Cluster of the workers."""
        return self.computing.cluster


@dataclass(frozen=True, kw_only=True)
class Plan(Planned):
    """A job that can start."""

    documents: Documents  # job as configurations
    earlier: Earlier  # relation to the run whose directory exists already
    free_disk_bytes: int  # free space on the file system of the output

    @cached_property
    def kind(self) -> JobKind:
        return kind_of(self.job)

    @property
    def counted(self) -> str:
        """Unit of the counts in a progress."""
        return self.kind.steps.counted if self.kind.steps else "block"

    @property
    def outputs(self) -> tuple[JobOutput, ...]:
        """The arrays that are written; messages and status name the first."""
        return self.work.outputs

    @property
    def output(self) -> OutputPath:
        """Path of the first output."""
        return self.outputs[0].path

    @property
    def layout(self) -> Layout:
        """Layout of the first output, an array."""
        layout = self.outputs[0].layout
        assert isinstance(layout, Layout)
        return layout

    @property
    def grid(self) -> Grid:
        """Blocks of the first output."""
        return self.outputs[0].grid

    @property
    def run_directory(self) -> Path:
        """The directory beside the first output."""
        return RunDirectory.beside(self.output).path

    @property
    def run(self) -> Run:
        """The execution section of the job."""
        run: Run = self.job.run
        return run

    @property
    def blocks(self) -> int:
        """Number of blocks of all outputs."""
        return sum(len(output.grid) for output in self.outputs)

    @property
    def output_bytes(self) -> int:
        """Size of the outputs without compression: the most they can need, except for a few checksums."""
        return sum(output.layout.size_bytes for output in self.outputs)

    @property
    def disk_bytes(self) -> int:
        """Space on the disk that the run needs at most: for outputs that are not in a store, and scratch arrays."""
        outputs = sum(output.layout.size_bytes for output in self.outputs if isinstance(output.path, Path))
        return outputs + self.scratch_bytes

    @property
    def inodes(self) -> int:
        """Number of files and folders on the disk, those of scratch arrays included."""
        outputs = sum(output.layout.inodes for output in self.outputs if isinstance(output.path, Path))
        return outputs + self.scratch_inodes

    @property
    def largest_need(self) -> Need:
        """Memory of the task that needs most."""
        return max(self.needs, key=lambda need: need.total_bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory that one worker needs at most."""
        return self.largest_need.total_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the identity, to which journals are tied."""
        return fingerprint(self.identity)

    @property
    def resumes(self) -> bool:
        """True where the run resumes the earlier one."""
        return self.earlier.resumes

    @property
    def fresh(self) -> bool:
        """True where the results of an earlier run are discarded."""
        return self.earlier.is_discarded

    def check_fits(self) -> None:
        """Refuse a plan that needs more memory or disk than there is."""
        allowed, largest = parse_bytes(self.run.memory_per_worker), self.largest_need
        for need in self.needs:
            if need.total_bytes > allowed:
                raise MemoryRefused(f"run.memory_per_worker is {self.run.memory_per_worker}; {need.refusal()}")
        check_allocation(self.run, self.cluster)
        needed, machine, workers = largest.total_bytes, self.computing.machine_bytes, self.run.count
        if machine is not None and needed > share_bytes(machine, workers):
            fit = workers_that_fit(machine, needed)
            raise MemoryRefused(
                f"run.workers is {workers}; each needs {bytes_text(needed)}, including {largest.describe()}. "
                f"{bytes_text(SHARED_BYTES)} of that are one copy for all; this machine has {bytes_text(machine)}."
                f"{largest.remark} "
                + (f"Write run.workers: {fit}, or {self.smaller}." if fit else f"Write {self.smaller}.")
            )
        if not self.resumes:  # what a resumed run has written is not counted twice
            self._check_disk()

    def _check_disk(self) -> None:
        folder, scratch = existing_parent(self.run_directory), self.scratch_bytes
        check_inodes(self.inodes, folder)
        if self.disk_bytes <= self.free_disk_bytes:
            return
        besides = f" and scratch arrays {bytes_text(scratch)}" if scratch else ""
        smaller = f", or {self.smaller_output}" if self.smaller_output else ""
        raise DiskRefused(
            f"the output takes up to {bytes_text(self.output_bytes)}{besides}, and {folder} has "
            f"{bytes_text(self.free_disk_bytes)} free. Write {self.outputs[0].key} on a larger disk{smaller}."
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures of the plan, for people and for ``--json``."""
        grid = self.grid
        common = {
            "output": str(self.output),
            "blocks": self.blocks,
            "block": list(grid.block),
            **self.outputs[0].layout.describe(),
            "peak_memory_per_worker_bytes": self.memory_bytes,
            "memory_per_worker_bytes": parse_bytes(self.run.memory_per_worker),
            "output_bytes": self.output_bytes,
            "scratch_bytes": self.scratch_bytes,
            "free_disk_bytes": self.free_disk_bytes,
            "files": sum(output.layout.files for output in self.outputs),
            "inodes": self.inodes,
            "free_inodes": free_inodes(existing_parent(self.run_directory)),
            "workers": self.run.count,
            "workers_from": self.computing.requested.why,
            "resumes": self.resumes,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }
        if len(self.outputs) > 1:
            common["outputs"] = [str(output.path) for output in self.outputs]
        return {"job": self.job.kind, "shape": list(grid.shape), **self.figures, **common}


@dataclass(frozen=True)
class Earlier:
    """Relation of a plan to the run whose directory exists beside its output."""

    resumes: bool = False  # the plan resumes that run
    differs: tuple[str, ...] = ()  # differences between the identities, one line each
    # other descriptions that were accepted for the input of that run
    same_inputs: tuple[dict[str, Any], ...] = ()
    is_discarded: bool = False  # that run is discarded


def free_inodes(place: Path) -> int | None:
    """Return the free inodes of a file system; None where it does not count them, as btrfs."""
    statistics = os.statvfs(place)
    return statistics.f_favail if statistics.f_files else None


def check_inodes(needed: int, place: Path) -> None:
    """Refuse more files and folders than a file system has room for."""
    free = free_inodes(place)
    if free is not None and needed > free:
        raise DiskRefused(
            f"the run makes {needed:,} files and folders, and {place} has room for {free:,} (`df -i`). Write a larger output.shard, or "
            "output.path on another disk."
        )


def existing_parent(path: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    return next(parent for parent in path.parents if parent.exists())
