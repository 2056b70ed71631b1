"""A plan: a job of any kind with every size decided, checked against memory and disk, ready to run or refused."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halotile.errors import ConfigError, DiskRefused, MemoryRefused, OutputRefused
from halotile.graphs.clusters.base import AUTO
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.kinds import base
from halotile.graphs.kinds.sections import Job, NamedChoice, Run, parse_bytes, takes_many
from halotile.graphs.plans.choices import computed_by
from halotile.graphs.plans.identity import as_stored, differences_of_runs, fingerprint, may_be_same
from halotile.graphs.plans.needs import (
    SHARED_BYTES,
    check_allocation,
    check_device,
    cluster_for,
    device_of,
    is_here,
    machine_bytes,
    note_of_cluster,
    share_bytes,
    with_workers,
    workers_that_fit,
)
from halotile.graphs.rules.values import check_job
from halotile.graphs.waiting import Report, no_report
from halotile.graphs.words import bytes_text, html_table
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path, lies_in
from halotile.storage.disk.place import check_dots, check_parents
from halotile.storage.grid import Grid
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output_disk import MOST_PUT_BYTES
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.options import job_key

J = TypeVar("J", bound=Job)
PRIVATE = ("allow_import", "import_folder")  # keys that no file may set: a file must not allow itself to run code
WHOLE = ("denoiser", "channels")  # keys whose values are decided as a whole


def documents_of(
    job: Job,  # with its number of workers decided
    requested: base.Requested,  # number of workers that was asked for
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


@dataclass(frozen=True, kw_only=True)
class Plan(base.Planned):
    """A job that can start."""

    documents: Documents  # job as configurations
    earlier: Earlier  # relation to the run whose directory exists already
    free_disk_bytes: int  # free space on the file system of the output

    @cached_property
    def kind(self) -> base.JobKind:
        return base.kind_of(self.job)

    @property
    def counted(self) -> str:
        """Unit of the counts in a progress."""
        return self.kind.steps.counted if self.kind.steps else "block"

    @property
    def outputs(self) -> tuple[base.JobOutput, ...]:
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
    def largest_need(self) -> base.Need:
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
        needed, machine, workers = largest.total_bytes, self.placement.machine_bytes, self.run.count
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
            "workers_from": self.placement.requested.why,
            "resumes": self.resumes,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }
        if len(self.outputs) > 1:
            common["outputs"] = [str(output.path) for output in self.outputs]
        return {"job": self.job.kind, "shape": list(grid.shape), **self.figures, **common}

    def _repr_html_(self) -> str:
        return html_table(self.kind.rows(self.summary()))


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


def make_plan(
    job: Job,  # job, of any kind
    *,
    fresh: bool = False,  # plan from scratch, even where the run directory of an unfinished run exists
    refuse: bool = True,  # raise for a plan that does not fit; otherwise `check_fits` does
    # accept the input as the images of the existing run, repaired, copied or moved, if their shapes, types and axes
    # agree. The run remembers this
    same_input: bool = False,
    probe: bool = False,  # try the device also where nothing has to be decided, in every precision
    makes_folder: bool = False,  # the caller makes the folder of the output where only that is missing
    report: Report = no_report,  # called with a line about each slow operation
) -> Plan:
    """Decide every size of a job and check that it fits.

    Reads metadata, not pixels, unless a noise level or a receptive field has to be estimated, or a GPU is tried.
    """
    check_job(job)
    if takes_many(job):
        raise ConfigError(
            "input.path is a pattern, which `recon-cli run`, `plan` and `submit` take image by image, on one cluster. "
            "In Python make one call for each of glob.glob."
        )
    kind = base.kind_of(job)
    if same_input and not kind.inputs:
        raise ConfigError(
            f"--same-input is not for job {job.kind}, whose blocks are not each computed from the same place of one input. "
            "Leave it out, or start over with --fresh."
        )
    request = base.PlanRequest(fresh, same_input, probe, makes_folder, report)
    kind.check_places(job)
    state = inspect_output(job, request)
    plan = _finish(kind.make_plan(job, state, request), state, request)
    _check_apart(plan)
    _check_puts(plan)
    if refuse:
        plan.check_fits()
    return plan


def _finish(planned: base.Planned, state: base.OutputState, request: base.PlanRequest) -> Plan:
    """Add what all plans have."""
    job, placement = planned.job, planned.placement
    identity, earlier = compare_with_earlier(job, planned.identity, state, request)
    if earlier.differs and planned.discards_others:
        earlier = replace(earlier, is_discarded=True)
    notes = (
        *planned.notes,
        *(planned.notes_of_resumed() if earlier.resumes else ()),
        *placement.ignored,
        *note_of_cluster(job, placement.cluster, placement.device),
    )
    own = vars(planned) | {"identity": identity, "notes": notes}
    documents = documents_of(job, placement.requested, planned.given, planned.decided)
    free = shutil.disk_usage(existing_parent(state.directory.path)).free
    return Plan(**own, documents=documents, earlier=earlier, free_disk_bytes=free)


def _check_apart(plan: Plan) -> None:
    """Refuse outputs at one place, or in one another."""
    for first, second in itertools.combinations(plan.outputs, 2):
        one, other = first.path.resolve(), second.path.resolve()
        if lies_in(one, other) or lies_in(other, one):
            raise OutputRefused(
                f"{second.key} is {second.path}, and {first.key} is {first.path}: one output would be inside the other. "
                "Write another path."
            )


def _check_puts(plan: Plan) -> None:
    """Refuse shards that cannot be put into a store at once."""
    for output in plan.outputs:
        layout = output.layout
        if not isinstance(output.path, ObjectPath) or not isinstance(layout, Layout):
            continue
        shard_bytes = math.prod(map(min, layout.shard, layout.shape)) * np.dtype(layout.dtype).itemsize
        if shard_bytes > MOST_PUT_BYTES:
            raise ConfigError(
                f"output.shard is {list(layout.shard)}, {bytes_text(shard_bytes)} each, and a store takes {bytes_text(MOST_PUT_BYTES)} "
                "at once. Write a smaller one."
            )


def inspect_output(job: Job, request: base.PlanRequest) -> base.OutputState:
    """Inspect the output path of a job."""
    check_dots(job.place)
    output = full_path(job.place)
    check_parents(output, may_make=request.makes_folder)
    directory = RunDirectory.beside(output)
    previous = None if request.fresh else directory.read_valid_plan()
    kind = (previous or {}).get("job", job.kind)
    return (
        base.OutputState(output, directory, previous)
        if kind == job.kind
        else base.OutputState(output, directory, None, kind)
    )


def place_job(job: J, denoiser: Denoiser | None, *, trains: bool = False) -> base.Placement[J]:
    """Decide workers and device of a job, with this denoiser if it has one; without one, the CPU, unless it trains a network."""
    precision_requested = job.run.precision
    if denoiser is None:
        why = "denoising: a training computes in float32" if trains else "networks: this job has none"
        remark = f"run.precision is {precision_requested}, which is for {why}"
        device, precision = device_of(job.run, job.cluster) if trains else "cpu", "float32"
        notes: tuple[str, ...] = (remark,) if precision_requested != "float32" else ()
        if trains:
            check_device(job.run, job.cluster, device)
    else:
        device, precision, notes = computed_by(denoiser, device_of(job.run, job.cluster), precision_requested)
        check_device(job.run, job.cluster, device)
    cluster = cluster_for(job.cluster, device)
    job, requested = with_workers(job, cluster, device)
    machine = machine_bytes() if is_here(cluster) else None
    return base.Placement(job, requested, cluster, device, precision, notes, machine)


def place_ranks(job: J, slots: int) -> base.Placement[J]:
    """Decide workers and device of a program of ranks: no more than a batch has slots, and one where they would share a GPU."""
    placement = place_job(job, None, trains=True)
    most, why = slots, "one for each of the slots"
    job, cluster = placement.job, placement.cluster
    if placement.on_gpu and is_here(cluster) and not cluster_kind_of(cluster).traits.has_worker_per_gpu:
        most, why = 1, "one for the GPU"
        if placement.requested.workers != AUTO and job.run.count > 1:
            raise ConfigError(
                f"run.workers is {job.run.count}, and workers of this job cannot share a GPU. Write cluster: {{kind: local-cuda}} "
                "for a worker on each GPU, or run.workers: 1."
            )
    if job.run.count <= most:
        return placement
    requested = placement.requested._replace(why=why)
    return replace(placement, job=replace(job, run=replace(job.run, workers=most)), requested=requested)


def compare_with_earlier(
    job: Job, identity: dict[str, Any], state: base.OutputState, request: base.PlanRequest
) -> tuple[dict[str, Any], Earlier]:
    """Return the identity of a job, and its relation to the run that exists at its output.

    Where the input was accepted as the same image as that of the earlier run, the identity describes it as
    that run did.
    """
    identity = as_stored(identity)
    if state.other_kind is not None:
        return identity, Earlier(differs=(f"job was {state.other_kind}, is {job.kind}",))
    previous = state.previous
    if previous is None:
        return identity, Earlier(is_discarded=request.fresh)
    kind = base.kind_of(job)
    before, inputs = previous["identity"], kind.inputs
    same_inputs: list[dict[str, Any]] = previous.get("same_inputs", [])
    if may_be_same(before, identity, inputs):
        images = {name: identity[name] for name in inputs}
        images_before = {name: before[name] for name in inputs}
        if request.same_input and images not in [images_before, *same_inputs]:
            same_inputs = [*same_inputs, images]
        if images in same_inputs:
            identity = identity | images_before
    differs = tuple(differences_of_runs(kind, state.directory, before, identity))
    return identity, Earlier(not differs, differs, tuple(same_inputs), is_discarded=request.fresh)
