"""Planning of a job of any kind: checked, planned by its kind, refused where it does not fit."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.clusters.base import AUTO
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.kinds.base import PlanRequest, kind_of
from halotile.graphs.kinds.patterns import takes_many
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.choices import computed_by
from halotile.graphs.plans.identity import as_stored, differences_of_runs, may_be_same
from halotile.graphs.plans.needs import (
    check_device,
    cluster_for,
    device_of,
    is_here,
    machine_bytes,
    note_of_cluster,
    with_workers,
)
from halotile.graphs.plans.plan import Computing, Earlier, J, Plan, Planned, documents_of, existing_parent
from halotile.graphs.rules.check import check_job
from halotile.graphs.waiting import Report, no_report
from halotile.storage.disk.object_path import ObjectPath, OutputPath, full_path, lies_in
from halotile.storage.disk.place import check_dots, check_parents
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output_disk import MOST_PUT_BYTES
from halotile.tasks.denoisers.base import Denoiser


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
    kind = kind_of(job)
    if same_input and not kind.inputs:
        raise ConfigError(
            f"--same-input is not for job {job.kind}, which does not compute each block from its own place of one input. "
            "Leave it out, or start over with --fresh."
        )
    request = PlanRequest(fresh, same_input, probe, makes_folder, report)
    kind.check_places(job)
    begun = begin(job, request)
    plan = _finish(kind.make_plan(job, begun, request), begun, request)
    _check_apart(plan)
    _check_puts(plan)
    if refuse:
        plan.check_fits()
    return plan


def _finish(planned: Planned, begun: Begun, request: PlanRequest) -> Plan:
    """Add what all plans have."""
    job, computing = planned.job, planned.computing
    identity, earlier = relate(job, planned.identity, begun, request)
    if earlier.differs and planned.discards_others:
        earlier = replace(earlier, is_discarded=True)
    notes = (
        *planned.notes,
        *(planned.notes_of_resumed() if earlier.resumes else ()),
        *computing.ignored,
        *note_of_cluster(job, computing.cluster, computing.device),
    )
    own = vars(planned) | {"identity": identity, "notes": notes}
    documents = documents_of(job, computing.requested, planned.given, planned.decided)
    free = shutil.disk_usage(existing_parent(begun.directory.path)).free
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


@dataclass(frozen=True)
class Begun:
    """The first output of a job, and the plan that an earlier run left there."""

    output: OutputPath  # its absolute path, or its place in a store
    directory: RunDirectory  # directory beside it
    previous: dict[str, Any] | None  # plan of an earlier run of this kind of job
    other_kind: str | None = None  # kind of an earlier run of another job


def begin(job: Job, request: PlanRequest) -> Begun:
    """Inspect the output path of a job."""
    check_dots(job.place)
    output = full_path(job.place)
    check_parents(output, may_make=request.makes_folder)
    directory = RunDirectory.beside(output)
    previous = None if request.fresh else directory.read_valid_plan()
    kind = (previous or {}).get("job", job.kind)
    return Begun(output, directory, previous) if kind == job.kind else Begun(output, directory, None, kind)


def compute_on(job: J, denoiser: Denoiser | None, *, trains: bool = False) -> Computing[J]:
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
    return Computing(job, requested, cluster, device, precision, notes, machine)


def compute_ranks_on(job: J, slots: int) -> Computing[J]:
    """Decide workers and device of a program of ranks: no more than a batch has slots, and one where they would share a GPU."""
    computing = compute_on(job, None, trains=True)
    most, why = slots, "one for each of the slots"
    job, cluster = computing.job, computing.cluster
    if computing.on_gpu and is_here(cluster) and not cluster_kind_of(cluster).traits.has_worker_per_gpu:
        most, why = 1, "one for the GPU"
        if computing.requested.workers != AUTO and job.run.count > 1:
            raise ConfigError(
                f"run.workers is {job.run.count}, and workers of this job cannot share a GPU. Write cluster: {{kind: local-cuda}} "
                "for a worker on each GPU, or run.workers: 1."
            )
    if job.run.count <= most:
        return computing
    requested = computing.requested._replace(why=why)
    return replace(computing, job=replace(job, run=replace(job.run, workers=most)), requested=requested)


def relate(job: Job, identity: dict[str, Any], begun: Begun, request: PlanRequest) -> tuple[dict[str, Any], Earlier]:
    """Return the identity of a job, and its relation to the run that exists at its output.

    Where the input was accepted as the same image as that of the earlier run, the identity describes it as
    that run did.
    """
    identity = as_stored(identity)
    if begun.other_kind is not None:
        return identity, Earlier(differs=(f"job was {begun.other_kind}, is {job.kind}",))
    previous = begun.previous
    if previous is None:
        return identity, Earlier(is_discarded=request.fresh)
    kind = kind_of(job)
    before, inputs = previous["identity"], kind.inputs
    same_inputs: list[dict[str, Any]] = previous.get("same_inputs", [])
    if may_be_same(before, identity, inputs):
        images = {name: identity[name] for name in inputs}
        images_before = {name: before[name] for name in inputs}
        if request.same_input and images not in [images_before, *same_inputs]:
            same_inputs = [*same_inputs, images]
        if images in same_inputs:
            identity = identity | images_before
    differs = tuple(differences_of_runs(kind, begun.directory, before, identity))
    return identity, Earlier(not differs, differs, tuple(same_inputs), is_discarded=request.fresh)
