"""Checks of a job before any image is opened: every value, and all parts that have to agree, each with its error message.

Job files and scripts both use these checks, so the same value gets the same message. The planner checks
what depends on the image, and a denoiser checks its own options. A rule takes parts of a job by their names and yields faults with their
places; one that takes a part which is itself wrong is skipped.
"""

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from halotile import registry
from halotile.graphs.clusters.base import ADDRESS, AUTO, traits_of
from halotile.graphs.clusters.common.security import host_of, is_loopback
from halotile.graphs.clusters.launches.batch_system import is_walltime
from halotile.graphs.kinds.base import Check, JobKind, Rule, kind_of
from halotile.graphs.kinds.sections import STEM, Cluster, Input, Job, Output, Run, Size, Tile, is_pattern, parse_bytes
from halotile.graphs.rules.keys import PlacedFaults, faults_in, keys_of, raise_faults
from halotile.graphs.words import KeyPath, nearest, shown
from halotile.storage.disk.object_path import SCHEMES, credentials_fault, path_of
from halotile.storage.spacing import parse_size
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.options import Auto

LEAST_MEMORY_BYTES = 64 * 2**20
_DTYPES = ("auto", "uint8", "uint16", "int8", "int16", "uint32", "int32", "float16", "float32", "float64")


# Longest name of an output, in bytes. File systems allow 255, and the names beside an output are longer.
_LONGEST_NAME = 230
# Command that writes a file of each name, and what it is.
_COMMANDS = {".tif": ("export", "a TIFF"), ".tiff": ("export", "a TIFF"), ".png": ("preview", "a PNG")}
_ODD_IN_ADDRESS = re.compile(r"[?#%+\\*]|//|(?<![^/])\.\.?(?![^/])")
"""Characters that a URL escapes, an empty part, and parts that lead elsewhere."""
_OTHER_FORMATS = re.compile(r"\.(tiff?|png|jpe?g|bmp|gif|np[yz]|h5|hdf5?|nc|mat|zip)", re.IGNORECASE)


@dataclass(frozen=True)
class AtLeast:
    """A check that a number, or each number of a list, is large enough; "auto" passes.

    >>> AtLeast(1)([256, 0])
    '[256, 0] is too small; write at least 1'
    >>> AtLeast(1)("auto")
    """

    least: int

    def __call__(self, value: Any) -> str | None:
        """Return the fault of the value, if it has one."""
        numbers = value if isinstance(value, list | tuple) else [value]
        if len(numbers) > 0 and all(isinstance(n, str) or self.least <= n < math.inf for n in numbers):
            return None
        if math.inf in numbers:
            return f"{shown(value)} is not finite; write a number of at least {self.least}"
        return f"{shown(value)} is too small; write at least {self.least}"


@dataclass(frozen=True)
class Above:
    """A check that a number is larger than another."""

    bound: float

    def __call__(self, value: float | str) -> str | None:
        """Return the fault of the value, if it has one."""
        if isinstance(value, str) or self.bound < value < math.inf:
            return None
        if not math.isfinite(value):
            return f"{shown(value)} is not finite; write a number above {self.bound:g}"
        return f"{value} is too small; write more than {self.bound:g}"


MOST_SEED = 2**63 - 1


def seed(value: int) -> str | None:
    """Refuse a seed that no random generator takes."""
    return None if 0 <= value <= MOST_SEED else f"is {value}; write 0 to {MOST_SEED}"


@dataclass(frozen=True)
class Named:
    """A check that a word names an extension. It is looked up by name only: importing it would load Dask.

    >>> Named("solver", "solvers", without=("lanczos",))("fitsa")
    'no solver is called fitsa; did you mean fista?'
    """

    word: str
    registry: str
    without: tuple[str, ...] = ()  # names that jobs cannot use
    besides: tuple[str, ...] = ()  # other words that are accepted

    @property
    def names(self) -> list[str]:
        """Return the accepted words."""
        return [*self.besides, *(name for name in registry.names(self.registry) if name not in self.without)]

    def __call__(self, value: str) -> str | None:
        """Return the fault of the value, if it has one."""
        if value in self.names:
            return None
        near = nearest(value, self.names, likeness=0.5)  # the names are short
        hint = f"did you mean {near}?" if near else f"write one of {', '.join(self.names)}"
        return f"no {self.word} is called {value}; {hint}"


def _memory(value: str | int) -> str | None:
    try:
        count = parse_bytes(value)
    except ValueError:
        return f"{shown(value)} is not a size; write a number and a unit, such as 4GiB or 512MB"
    if count < LEAST_MEMORY_BYTES:
        return f"{value} is {count:,} bytes, less than a worker needs to start; give it a unit such as 4GiB"
    return None


def _range(value: Any) -> str | None:
    if value == "auto":
        return None
    if not math.isfinite(value[1] - value[0]):
        return f"{shown(value)} is not finite; write two numbers [low, high] with low < high"
    if not value[0] < value[1]:
        return f"{shown(value)} runs backwards; write [low, high] with low < high"
    return None


def _axes(value: str | None) -> str | None:
    if value in (None, "auto"):
        return None
    letters = str(value)
    if not letters or not letters.isalpha() or len({*letters.lower()}) != len(letters):
        return f"{shown(letters)} does not name axes; write one different letter for each, such as yx or tczyx"
    return None


def _spacing(value: Mapping[str, float | str]) -> str | None:
    for axis, size in value.items():
        if len(axis) != 1 or not axis.isalpha():
            return f"{shown(axis)} is not an axis; write letters of axes, such as {{z: 0.3 um, y: 0.1 um, x: 0.1 um}}"
        if parse_size(size) is None:
            return f"{shown(size)} is not the size of a pixel; write a number above 0, with a unit or without, such as 0.3 um"
    return None


def _dtype(value: str) -> str | None:
    if value in _DTYPES:
        return None
    if value.startswith("complex"):
        return f"{shown(value)} cannot hold a denoised image; write auto, or a float or integer type"
    near = nearest(value, _DTYPES)
    return f"{shown(value)} is not one of {', '.join(_DTYPES)}" + (f"; did you mean {near}?" if near else "")


def filled(value: str) -> str | None:
    return None if value.strip() else "is empty; write a path"


def output_path(value: str) -> str | None:
    if not value.isprintable():
        return f"{shown(value)} has characters in it that no screen shows; write a path without"
    return (_address_fault(value) if "://" in value else None) or _output_name(value) or filled(value)


def _address_fault(value: str) -> str | None:
    """Return the fault of an output's place in a store, if it has one.

    >>> _address_fault("https://host/clean.zarr")
    '"https://host/clean.zarr" can be read at most; write a place in a store, such as s3://bucket/clean.zarr, or a path'
    """
    scheme, _, rest = value.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        return (
            f"{shown(value)} can be read at most; write a place in a store, such as s3://bucket/clean.zarr, or a path"
        )
    if not bucket or not key.strip("/"):
        return (
            f"{shown(value)} names no output in a bucket; write one such as {scheme}://{bucket or 'bucket'}/clean.zarr"
        )
    if odd := _ODD_IN_ADDRESS.search(rest):
        return f"{shown(value)} has {odd[0]} in it, which addresses and names of files do not take alike; write letters, digits, - and _"
    if len(os.fsencode(value)) > _LONGEST_NAME:
        return f"{shown(value)} is of {len(os.fsencode(value))} bytes, and its run directory is named after it; write at most {_LONGEST_NAME}"
    return None


def _output_name(value: str) -> str | None:
    """Return the fault of the last part of an output's path, if it has one.

    >>> _output_name("scans/out.tif")
    'scans/out.tif is not the name of a Zarr, and a run writes one; write scans/out.zarr, and `recon-cli export scans/out.zarr scans/out.tif` makes a TIFF of it'
    """
    path = PurePath(value)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        return (
            f"{shown(path.name)} is a name of {len(os.fsencode(path.name))} bytes; write one of at most {_LONGEST_NAME}"
        )
    if not _OTHER_FORMATS.fullmatch(path.suffix):
        return None
    zarr = f"{value.removesuffix(path.suffix)}.zarr"
    image = path if path.suffix.lower() in _COMMANDS else path.with_suffix(".tif")
    command, kind = _COMMANDS[image.suffix.lower()]
    image = PurePath(image.name) if "://" in value else image
    return (
        f"{value} is not the name of a Zarr, and a run writes one; write {zarr}, and "
        f"`recon-cli {command} {zarr} {image}` makes {kind} of it"
    )


def _address(value: str) -> str | None:
    if re.fullmatch(r"(tls|tcp)://(\[[0-9a-fA-F:]+\]|[^:/\s]+):\d+", value):
        return None
    return f"{shown(value)} is not the address of a scheduler; write one such as tls://10.0.0.7:8786"


_LINES = [{"gain": gain, "axis": axis} for gain in (False, True) for axis in "xy"]


def _stripes(value: Any) -> str | None:
    if isinstance(value, str) or ({"gain": False} | dict(value) in _LINES):
        return None
    return f"{shown(dict(value))} names no axis; write {{axis: x}} if columns have offsets, or {{axis: y}} if rows do; add gain: true if they also differ by factors"


def _walltime(value: str) -> str | None:
    if is_walltime(value):
        return None
    return (
        f'{shown(value)} is not a time; write hours, minutes and seconds, such as "04:00:00", or with days "2-00:00:00"'
    )


def _one_line(value: str) -> str | None:
    """Refuse more than one line: the value is written into a job script, where a second line would be a command."""
    return None if value.isprintable() and value.strip() else f"{shown(value)} is not a name; write a word of one line"


def _directives(value: Any) -> str | None:
    for directive in value:
        if not directive.isprintable():
            return f"{shown(directive)} is more than a line; write an entry for each directive"
        if directive.lstrip().startswith("#"):
            instead = directive.lstrip("# ").partition(" ")[2]
            return f"{shown(directive)} has the mark of a directive before it, which is added; write {shown(instead)}"
    return None


# Checks of the sections that several kinds of jobs share, by type of the section and key. Empty values are not checked.
COMMON: Mapping[tuple[type, str], Check] = {
    (Input, "path"): filled,
    (Input, "level"): AtLeast(0),
    (Input, "axes"): _axes,
    (Input, "spacing"): _spacing,
    (Input, "range"): _range,
    (Input, "stripes"): _stripes,
    (Output, "path"): output_path,
    (Output, "levels"): AtLeast(1),
    (Output, "shard"): AtLeast(1),
    (Output, "chunk"): AtLeast(1),
    (Output, "dtype"): _dtype,
    (Tile, "size"): AtLeast(1),
    (Tile, "depth"): AtLeast(0),
    (Tile, "batch"): AtLeast(1),
    (Tile, "block"): AtLeast(1),
    (Tile, "axes"): _axes,
    (Run, "workers"): AtLeast(1),
    (Run, "retries"): AtLeast(0),
    (Run, "memory_per_worker"): _memory,
    (Run, "stall_seconds"): Above(0),
    (Cluster, "kind"): Named("cluster", "clusters", besides=("auto",)),
    (Cluster, "address"): _address,
    (Cluster, "walltime"): _walltime,
    (Cluster, "queue"): _one_line,
    (Cluster, "account"): _one_line,
    (Cluster, "interface"): _one_line,
    (Cluster, "directives"): _directives,
    (Cluster, "cores"): AtLeast(1),
    (Cluster, "gpus"): AtLeast(0),
}


Faults = Iterator[tuple[tuple[str | int, ...], str]]  # places of faults, with their messages


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
            fault = f"{shown(value)}, but {cluster.kind} has no such setting; leave it out, or write it in cluster.directives"
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


# Rules for every kind of job.
OF_CLUSTERS: tuple[Rule, ...] = (
    _scheduler_of_cluster,
    _keys_of_cluster,
    _gpus_of_cluster,
    _encryption_of_cluster,
    _device_of_run,
)


def workers_of_slots(slots: int, run: Run) -> Faults:
    """Yield more workers than parts of a batch."""
    if isinstance(run.workers, int) and run.workers > slots:
        fault = f"is {run.workers}, and a batch has {slots} parts; write slots: {run.workers}, or fewer workers"
        yield ("run", "workers"), fault


def check_job(job: Job) -> None:
    """Refuse a job with values that are wrong for every image, or with parts that do not agree.

    >>> from halotile.graphs.jobs.denoise.job import Denoising
    >>> from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run
    >>> check_job(Denoising(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...                     run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    kind = kind_of(job)
    faults = _value_faults(job, kind) | dict(credentials_in(job))
    if not faults:
        names = [name for name, key in keys_of(type(job)).items() if key.type is not Any and name != "denoiser"]
        faults = apply_rules(rules_of(kind), {name: getattr(job, name) for name in names})
    raise_faults(faults)


def checks_of(section: str, schema: type, kind: JobKind | None = None) -> Mapping[str, Check]:
    """Return the checks of a section by key: those of its type, whatever its name, and those of the kind of job.

    >>> from halotile.graphs.kinds.sections import Output
    >>> sorted(checks_of("target", Output))
    ['chunk', 'dtype', 'levels', 'path', 'shard']
    """
    common = {key: check for (part, key), check in COMMON.items() if issubclass(schema, part)}
    own = kind.checks if kind else {}
    return common | {key: check for (part, key), check in own.items() if part == section}


def credentials_in(part: Any, position: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the fault of every address with credentials in it, except in the commands of the cluster section.

    >>> [place for place, _ in credentials_in({"input": {"path": "s3://me:secret@bucket/a.zarr"}, "cluster": {}})]
    [('input', 'path')]
    """
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    entries: Mapping[Any, Any] = part if isinstance(part, Mapping) else {}
    if isinstance(part, list | tuple):
        entries = dict(enumerate(part))
    for key, value in entries.items():
        if key != "cluster":
            yield from credentials_in(value, position if key == "options" else (*position, key))
    if isinstance(part, str) and (fault := credentials_fault(part)):
        yield position, fault


def rules_of(kind: JobKind) -> tuple[Rule, ...]:
    """Return the rules for the parts of a kind of job: its own first."""
    return (*kind.rules, *OF_CLUSTERS, *(() if kind.checks_nan else (no_check_for_nan,)))


def _value_faults(job: Job, kind: JobKind) -> PlacedFaults:
    """Return the faults of all values, section by section."""
    faults: PlacedFaults = {}
    values: dict[str, Any] = {}
    keys = keys_of(type(job))
    for name in keys:
        part = getattr(job, name)
        entries: dict[KeyPath, Any] = {(name,): part}
        if isinstance(part, tuple) and part and all(map(dataclasses.is_dataclass, part)):
            entries = {(name, number): entry for number, entry in enumerate(part)}
        elif not dataclasses.is_dataclass(part):
            values |= {} if keys[name].type is Any else {name: part}
            continue
        for place, entry in entries.items() if name != "denoiser" else ():
            given = {key: getattr(entry, own.field.name) for key, own in keys_of(type(entry)).items()}
            found = faults_in(keys_of(type(entry)), given, checks_of(name, type(entry), kind), in_file=False)
            faults |= {(*place, *inner): message for inner, message in found.items()}
    own_keys = {name: keys[name] for name in values}
    return faults | faults_in(own_keys, values, checks_of("", type(job), kind), in_file=False)
