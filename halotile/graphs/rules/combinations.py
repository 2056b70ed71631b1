"""Rules for parts of a job that have to agree, shared by several kinds of jobs.

A rule takes parts of a job by their names and yields faults with their places. A rule that takes a part
which is itself wrong is skipped.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from halotile.graphs.clusters.base import ADDRESS, AUTO, traits_of
from halotile.graphs.clusters.common.security import host_of, is_loopback
from halotile.graphs.kinds.base import Rule
from halotile.graphs.kinds.patterns import is_pattern
from halotile.graphs.kinds.sections import STEM, Cluster, Input, Output, Run, Size, Tile
from halotile.graphs.words import shown
from halotile.storage.disk.object_path import path_of
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.options import Auto

Faults = Iterator[tuple[tuple[str | int, ...], str]]
"""Places of faults, with their messages."""


def apply_rules(rules: Iterable[Rule], parts: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    """Return the faults of rules on the known parts, by place; the first rule to find a fault counts."""
    faults: dict[tuple[str | int, ...], str] = {}
    for rule in rules:
        parameters = inspect.signature(rule).parameters
        if parameters.keys() <= parts.keys():
            faults = dict(rule(**{name: parts[name] for name in parameters})) | faults
    return faults


def check_pattern(input: Input, output: Output) -> Faults:  # noqa: A002 - the name of the section
    """Yield a pattern of images that would all be written to one place."""
    if is_pattern(input.path) and STEM not in output.path:
        each = path_of(output.path).with_name(f"{STEM}.zarr")
        fault = f"{output.path} is one place, and input.path is a pattern; write {{stem}} for the name of each image, such as {each}"
        yield ("output", "path"), fault


def check_sizes(output: Output, tile: Tile, scale: int) -> Faults:
    """Yield sizes that are not multiples of one another as they have to be."""
    shard, chunk, block = output.shard, output.chunk, tile.block
    if message := _multiple(shard, chunk, "output.chunk", "a shard holds whole chunks"):
        yield ("output", "shard"), message
    elif scale == 1 and (message := _multiple(block, shard, "output.shard", "a block writes whole shards")):
        yield ("tile", "block"), message


def check_depth(tile: Tile, denoiser: Denoiser) -> Faults:
    """Yield a depth that conflicts with a denoiser which declares its receptive field."""
    needed = denoiser.receptive_field()
    if tile.depth == "auto" or tile.seams == "allow" or needed is None:
        return
    if min(_numbers(tile.depth)) < needed:
        fault = (
            f"{shown(tile.depth)} is less than {denoiser.title}'s receptive field {needed}: seams would show; "
            f"write {needed}, auto, or seams: allow"
        )
        yield ("tile", "depth"), fault


def _numbers(size: Size) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _multiple(size: Size | Auto, unit: Size | Auto, of: str, why: str) -> str | None:
    """Return the fault of a size that has to be a multiple of another, where both are given for the same axes."""
    if isinstance(size, str) or isinstance(unit, str):
        return None
    sizes, units = _numbers(size), _numbers(unit)
    axes = max(len(sizes), len(units))
    if not {len(sizes), len(units)} <= {1, axes}:
        return None
    pairs = list(zip(sizes * (axes // len(sizes)), units * (axes // len(units)), strict=True))
    if all(s % u == 0 for s, u in pairs):
        return None
    instead = [-(-s // u) * u for s, u in pairs]
    better = shown(instead[0] if len(sizes) == 1 and len(set(instead)) == 1 else instead)
    return f"{shown(size)} is no multiple of {of} {shown(unit)}; {why}: write {better}"


def _scheduler_of_cluster(cluster: Cluster) -> Faults:
    """Yield a scheduler's address that is missing, given twice, or not for this kind of cluster."""
    given = [key for key in ("address", "scheduler_file") if getattr(cluster, key) is not None]
    joins = traits_of(cluster.kind).joins
    if cluster.kind != AUTO and not joins:
        for key in given:
            fault = (
                f"is for cluster scheduler, and cluster.kind is {cluster.kind}; write kind: scheduler, or leave it out"
            )
            yield ("cluster", key), fault
    elif len(given) > 1:
        yield ("cluster", "address"), "is there twice, with scheduler_file; leave one of them out"
    elif joins and not given and ADDRESS not in os.environ:
        fault = "missing; write that of the running scheduler, such as tls://10.0.0.7:8786, or scheduler_file: FILE"
        yield ("cluster", "address"), fault


def _keys_of_cluster(cluster: Cluster) -> Faults:
    """Yield keys that have no meaning for a batch system."""
    for key in traits_of(cluster.kind).ignored:
        if (value := getattr(cluster, key)) is not None:
            fault = f"{shown(value)}, and {cluster.kind} has nothing of the kind; leave it out, or say it in cluster.directives"
            yield ("cluster", key), fault


def _gpus_of_cluster(cluster: Cluster) -> Faults:
    """Yield GPUs that are named where a number per worker is needed, or given where workers share one."""
    gpus = traits_of(cluster.kind).gpus
    if gpus == "shared" and cluster.gpus:
        fault = (
            f"{shown(cluster.gpus)}, which is not for cluster local, whose workers share the first GPU if run.device is cuda; leave it out, or "
            "write kind: local-cuda"
        )
        yield ("cluster", "gpus"), fault
    elif cluster.kind != AUTO and gpus == "number" and not isinstance(cluster.gpus, int):
        fault = f"{shown(cluster.gpus)}, which is for cluster local-cuda; cluster {cluster.kind} takes a number for each worker: write 1"
        yield ("cluster", "gpus"), fault


def _device_of_run(run: Run) -> Faults:
    """Yield number formats that CPUs do not support."""
    if run.precision == "tf32" and run.device == "cpu":
        fault = "tf32 is a format of GPUs, and run.device is cpu; write float32 or bfloat16"
        yield ("run", "precision"), fault


def _encryption_of_cluster(cluster: Cluster) -> Faults:
    """Yield connections beyond loopback that would not be encrypted."""
    remote = cluster.kind != AUTO and traits_of(cluster.kind).is_remote
    address = cluster.address or ""
    if not cluster.tls and (remote or (address and not is_loopback(host_of(address)))):
        where = address or f"cluster {cluster.kind}"
        fault = f"false, and {where} is reachable from other machines: anyone who connects can run code as you; leave it out"
        yield ("cluster", "tls"), fault
    elif cluster.tls and address.startswith("tcp://"):
        instead = "tls: false" if is_loopback(host_of(address)) else "one that begins with tls://"
        yield ("cluster", "address"), f"{address} is not encrypted; write {instead}"


def no_check_for_nan(run: Run) -> Faults:
    """Yield a check of the input that this kind of job does not make."""
    if run.on_nan != "propagate":
        fault = f"{run.on_nan}, and this kind of job does not search what it reads for NaN; leave it out"
        yield ("run", "on_nan"), fault


OF_CLUSTERS: tuple[Rule, ...] = (
    _scheduler_of_cluster,
    _keys_of_cluster,
    _gpus_of_cluster,
    _encryption_of_cluster,
    _device_of_run,
)
"""Rules for every kind of job."""


def workers_of_slots(slots: int, run: Run) -> Faults:
    """Yield more workers than parts of a batch."""
    if isinstance(run.workers, int) and run.workers > slots:
        fault = f"is {run.workers}, and a batch has {slots} parts; write slots: {run.workers}, or fewer workers"
        yield ("run", "workers"), fault
