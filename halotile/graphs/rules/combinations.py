"""Parts of a job that have to agree, each disagreement with the words that say so.

A rule takes the parts of a job that it names, and tells what is wrong by where it stands. One that names a part
that is wrong itself is left out.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.amounts import counted
from halotile.graphs.clusters.connection.addresses import host_of, is_loopback
from halotile.graphs.clusters.detection.cluster_kind import ADDRESS, AUTO, traits_of
from halotile.graphs.jobs.sections import (
    Aim,
    Auto,
    Cluster,
    FidelityChoice,
    Job,
    OperatorChoice,
    Output,
    PriorChoice,
    Reconstruction,
    Run,
    Size,
    SolverChoice,
    Tile,
)
from halotile.graphs.rules.values import MOST_PER_SWEEP, check_job
from halotile.graphs.rules.words import dotted, shown
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.tv import TotalVariation

MEMORYLESS = ("gd", "pgd")
"""Solvers that carry nothing but the image from one iteration to the next."""

Place = tuple[str | int, ...]
Faults = Iterator[tuple[Place, str]]
"""Where, and what is wrong there."""


def disagreements(kind: type, parts: Mapping[str, Any]) -> dict[Place, str]:
    """What is wrong with a job of this kind, as far as its parts are known.

    Parameters
    ----------
    kind : type
        The dataclass of the job.
    parts : mapping
        Its sections by name; a denoiser that it names, as ``denoiser``; what stands in no section, as ``aim``.

    Examples
    --------
    >>> disagreements(Reconstruction, {"solver": SolverChoice(name="cg"), "prior": PriorChoice(name="l1")})
    {('prior', 'name'): 'l1 with solver cg, which knows no prior; write none, or solver.name: pgd or fista'}
    """
    found: dict[Place, str] = {}
    for rule in RULES[kind]:
        wanted = inspect.signature(rule).parameters
        if wanted.keys() <= parts.keys():
            found = dict(rule(**{name: parts[name] for name in wanted})) | found
    return found


def check_reconstruction(job: Reconstruction) -> None:
    """Refuse a reconstruction that no measurement could make right.

    Raises
    ------
    ConfigError
        With everything that is wrong, one a line.
    """
    check_job(job)
    parts = {name: getattr(job, name) for name in vars(job)} | {"aim": job}
    faults = [
        f"{dotted(place)}: {message}" for place, message in disagreements(Reconstruction, parts).items()
    ]
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} problems in the job; nothing was started")
    if faults:
        raise ConfigError("\n".join(faults))


def _sizes_of_input(output: Output, tile: Tile, denoiser: Denoiser) -> Faults:
    yield from _sizes(output, tile, denoiser.scale)


def _sizes_of_image(output: Output, tile: Tile) -> Faults:
    yield from _sizes(output, tile, 1)


def _sizes(output: Output, tile: Tile, scale: int) -> Faults:
    """Sizes that have to be multiples of one another."""
    shard, chunk, block = output.shard, output.chunk, tile.block
    if message := _multiple(shard, chunk, "output.chunk", "a shard holds whole chunks"):
        yield ("output", "shard"), message
    elif scale == 1 and (message := _multiple(block, shard, "output.shard", "a block writes whole shards")):
        yield ("tile", "block"), message


def _depth(tile: Tile, denoiser: Denoiser) -> Faults:
    """A depth for a denoiser that declares how far it looks."""
    needed = denoiser.receptive_field()
    if tile.depth == "auto" or tile.seams == "allow" or needed is None:
        return
    if min(_numbers(tile.depth)) < needed:
        yield (
            ("tile", "depth"),
            f"{shown(tile.depth)} is less than {denoiser.title}'s receptive field {needed}: seams would show; "
            f"write {needed}, auto, or seams: allow",
        )


def _depth_of_variation(tile: Tile, prior: PriorChoice) -> Faults:
    # How far it looks does not depend on its strength, which may be wrong itself.
    if prior.name == "tv" and prior.iterations > 0:
        yield from _depth(tile, TotalVariation(strength=1.0, iterations=prior.iterations))


def _numbers(size: Size) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _multiple(size: Size | Auto, unit: Size | Auto, of: str, why: str) -> str | None:
    """What is wrong with a size that has to be a multiple of another, where both are told on the same axes."""
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


def _some_operator(operators: tuple[OperatorChoice, ...]) -> Faults:
    if not operators:
        yield (
            ("operators",),
            "is empty; write what was measured: - {name: blur, kernel: psf.npy, data: y.zarr}",
        )


def _prior_with_its_options(prior: PriorChoice) -> Faults:
    """What is written for a prior that it does not use."""
    plugged = prior.name == "pnp"
    if plugged and prior.denoiser is None:
        yield (
            ("prior", "denoiser"),
            "missing; prior pnp is a denoiser: write `denoiser: {name: dncnn, weights: w.safetensors}`, say",
        )
    for key in ("denoiser", "sigma"):
        if not plugged and getattr(prior, key) is not None:
            yield (
                ("prior", key),
                f"is for prior pnp, and prior.name is {prior.name}; write pnp, or leave it out",
            )
    if prior.name == "none" and prior.weight != 1.0:
        yield ("prior", "weight"), "there is no prior to count; write prior.name: tv, say, or leave it out"


def _prior_of_solver(prior: PriorChoice, solver: SolverChoice) -> Faults:
    if solver.name == "cg" and prior.name != "none":
        yield (
            ("prior", "name"),
            f"{prior.name} with solver cg, which knows no prior; write none, or solver.name: pgd or fista",
        )
    elif prior.name == "pnp" and prior.weight != 1.0 and solver.name != "gd":
        yield (
            ("prior", "weight"),
            f"a denoiser in the place of a prox has no weight, and solver {solver.name} has a prox; leave it out, or "
            "write solver.name: gd",
        )


def _step_of_solver(solver: SolverChoice) -> Faults:
    if solver.name == "cg" and solver.step != "auto":
        yield ("solver", "step"), f"{solver.step:g}, and cg finds its own; write auto, or leave it out"


def _checkpoints_of_solver(solver: SolverChoice, aim: Aim) -> Faults:
    every, left = solver.checkpoint_every, solver.iterations % max(1, solver.checkpoint_every)
    if not 1 < every <= MOST_PER_SWEEP:
        return
    place = ("solver", "checkpoint_every")
    if solver.name not in MEMORYLESS:
        yield (
            place,
            f"{every} with solver {solver.name}, which has to know more of an iteration than its image; write 1, or "
            f"solver.name: {' or '.join(MEMORYLESS)}",
        )
    elif aim.fuse is False:
        yield (
            place,
            f"{every} with fuse: false, and a gradient that is stored needs a stored image; write 1, or fuse: auto",
        )
    elif left:
        yield (
            ("solver", "iterations"),
            f"{solver.iterations} is no multiple of solver.checkpoint_every {every}: the image of the last one would not "
            f"be stored; write {solver.iterations + every - left}",
        )


def _fidelity_of_solver(fidelity: FidelityChoice, solver: SolverChoice) -> Faults:
    if solver.name == "cg" and fidelity.name != "l2":
        yield (
            ("fidelity", "name"),
            f"{fidelity.name} with solver cg, which solves linear equations; write l2, or solver.name: fista",
        )


def _fidelity_with_its_options(fidelity: FidelityChoice) -> Faults:
    if fidelity.name != "poisson" and fidelity.background:
        yield (
            ("fidelity", "background"),
            f"is for fidelity poisson, and fidelity.name is {fidelity.name}; write poisson, or leave it out",
        )


def _start_of_fidelity(fidelity: FidelityChoice, aim: Aim) -> Faults:
    if fidelity.name == "poisson" and aim.start is None:
        yield (
            ("fidelity", "name"),
            "poisson divides by what the image gives, and zeros give nothing; write start: FILE, an image above 0 such as "
            "a measurement",
        )


def _exact_engines(operators: tuple[OperatorChoice, ...], aim: Aim) -> Faults:
    for number, choice in enumerate(operators):
        if aim.exact and choice.options.get("engine") == "fft":
            yield (
                ("operators", number, "engine"),
                "fft with exact: true, which wants direct sums; leave one of them out",
            )


def _one_weight_each(operators: tuple[OperatorChoice, ...]) -> Faults:
    for number, choice in enumerate(operators):
        yield from _weights_in(choice.name, choice.options, ("operators", number))


def _weights_in(name: str, options: Mapping[str, Any], place: tuple[str | int, ...]) -> Faults:
    """Of a sum, and of those inside of others."""
    parts, weights = options.get("operators", ()), options.get("weights", ())
    if name == "sum" and isinstance(weights, list | tuple) and len(parts) != len(weights):
        yield (
            (*place, "weights"),
            f"has {counted(len(weights), 'number')} for {counted(len(parts), 'operator')}; write one for each",
        )
    for number, part in enumerate(parts):
        if isinstance(part, Mapping):
            yield from _weights_in(part.get("name", ""), part, (*place, "operators", number))


def _every_block(run: Run) -> Faults:
    """Settings of a run that have no meaning for a solver."""
    if run.on_bad_block != "fail":
        yield (
            ("run", "on_bad_block"),
            f"{run.on_bad_block}, and an iteration needs every block of the one before; write fail, or leave it out",
        )
    if run.on_nan != "propagate":
        yield (
            ("run", "on_nan"),
            f"{run.on_nan}, and a solver stops by itself at numbers that are not finite; leave it out",
        )


def _planes(tile: Tile) -> Faults:
    if tile.axes != "auto" and tile.axes.lower() != "yx":
        yield ("tile", "axes"), f"{shown(tile.axes)}, and operators work on planes; write yx, or leave it out"


def _scheduler_of_cluster(cluster: Cluster) -> Faults:
    """Where a running scheduler is, of which there is one."""
    given = [key for key in ("address", "scheduler_file") if getattr(cluster, key) is not None]
    joins = traits_of(cluster.kind).joins
    if cluster.kind != AUTO and not joins:
        for key in given:
            yield (
                ("cluster", key),
                f"is for cluster scheduler, and cluster.kind is {cluster.kind}; write kind: scheduler, or leave it out",
            )
    elif len(given) > 1:
        yield ("cluster", "address"), "is there twice, with scheduler_file; leave one of them out"
    elif joins and not given and ADDRESS not in os.environ:
        yield (
            ("cluster", "address"),
            "missing; write that of the running scheduler, such as tls://10.0.0.7:8786, or scheduler_file: FILE",
        )


def _keys_of_cluster(cluster: Cluster) -> Faults:
    """What some batch systems have nothing of."""
    for key in traits_of(cluster.kind).ignored:
        if (value := getattr(cluster, key)) is not None:
            yield (
                ("cluster", key),
                f"{shown(value)}, and {cluster.kind} has nothing of the kind; leave it out, or say it in cluster.directives",
            )


def _gpus_of_cluster(cluster: Cluster) -> Faults:
    """Which GPUs are said on one machine, how many for each worker elsewhere."""
    gpus = traits_of(cluster.kind).gpus
    if gpus == "shared" and cluster.gpus:
        yield (
            ("cluster", "gpus"),
            f"{shown(cluster.gpus)}, which is not for cluster local, whose workers share the first GPU if run.device is cuda; leave it out, or "
            "write kind: local-cuda",
        )
    elif cluster.kind != AUTO and gpus == "number" and not isinstance(cluster.gpus, int):
        yield (
            ("cluster", "gpus"),
            f"{shown(cluster.gpus)}, which is for cluster local-cuda; cluster {cluster.kind} takes a number for each worker: write 1",
        )


def _device_of_run(run: Run) -> Faults:
    """Formats that CPUs have none of."""
    if run.precision == "tf32" and run.device == "cpu":
        yield (
            ("run", "precision"),
            "tf32 is a format of GPUs, and run.device is cpu; write float32 or bfloat16",
        )


def _encryption_of_cluster(cluster: Cluster) -> Faults:
    """Who may be without: nobody beyond loopback."""
    remote = cluster.kind != AUTO and traits_of(cluster.kind).is_remote
    address = cluster.address or ""
    if not cluster.tls and (remote or (address and not is_loopback(host_of(address)))):
        where = address or f"cluster {cluster.kind}"
        yield (
            ("cluster", "tls"),
            f"false, and {where} is reached from other machines: whoever connects could run code as you; leave it out",
        )
    elif cluster.tls and address.startswith("tcp://"):
        instead = "tls: false" if is_loopback(host_of(address)) else "one that begins with tls://"
        yield ("cluster", "address"), f"{address} is not encrypted; write {instead}"


Rule = Callable[..., Faults]

_OF_CLUSTERS = (
    _scheduler_of_cluster,
    _keys_of_cluster,
    _gpus_of_cluster,
    _encryption_of_cluster,
    _device_of_run,
)

RULES: Mapping[type, tuple[Rule, ...]] = {
    Cluster: _OF_CLUSTERS,
    Job: (_sizes_of_input, _depth, *_OF_CLUSTERS),
    Reconstruction: (
        _some_operator,
        _sizes_of_image,
        _depth,
        _depth_of_variation,
        _prior_with_its_options,
        _prior_of_solver,
        _step_of_solver,
        _checkpoints_of_solver,
        _fidelity_of_solver,
        _fidelity_with_its_options,
        _start_of_fidelity,
        _exact_engines,
        _one_weight_each,
        _every_block,
        _planes,
        *_OF_CLUSTERS,
    ),
}
"""By the dataclass of the job; a cluster may stand alone."""
