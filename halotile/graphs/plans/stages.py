"""First steps of planning any job: its output, the plan of an earlier run there, and its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.clusters.base import AUTO
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.kinds.base import PlanRequest
from halotile.graphs.kinds.finder import kind_of
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.choices import computed_by
from halotile.graphs.plans.identity import as_stored, differences_of_runs, may_be_same
from halotile.graphs.plans.plan import Computing, Earlier, J
from halotile.graphs.plans.resources.devices import check_device, cluster_for, device_of, is_here
from halotile.graphs.plans.resources.memory import machine_bytes
from halotile.graphs.plans.resources.worker_count import with_workers
from halotile.storage.disk.object_path import OutputPath, full_path
from halotile.storage.disk.place import check_dots, check_parents
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.denoisers.base import Denoiser


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


def relate(
    job: Job, identity: dict[str, Any], begun: Begun, request: PlanRequest
) -> tuple[dict[str, Any], Earlier]:
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
