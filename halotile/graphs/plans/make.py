"""Planning of a job of any kind: checked, planned by its kind, refused where it does not fit."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import replace

import numpy as np

from halotile.errors import ConfigError, OutputRefused
from halotile.graphs.amounts import bytes_text
from halotile.graphs.kinds.base import PlanRequest
from halotile.graphs.kinds.finder import kind_of
from halotile.graphs.kinds.patterns import takes_many
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.plan import Plan, Planned, documents_of, existing_parent
from halotile.graphs.plans.resources.devices import note_of_cluster
from halotile.graphs.plans.stages import Begun, begin, relate
from halotile.graphs.rules.check import check_job
from halotile.graphs.waiting import Report, no_report
from halotile.storage.disk.object_path import ObjectPath, lies_in
from halotile.storage.sharded.layout import Layout
from halotile.storage.sharded.output_disk import MOST_PUT_BYTES


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
