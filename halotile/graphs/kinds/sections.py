"""Sections that several kinds of jobs share, as plain frozen values; and a job for each image that a pattern such as ``scans/*.tif`` matches.

These dataclasses are the only definition of the configuration. The command line validates YAML
against them, a script builds them directly. A field left at ``"auto"`` is decided by the planner.
"""

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import PurePath
from typing import Any, ClassVar, Literal, Self, TypeVar

from halotile import registry
from halotile.errors import ConfigError, InputError
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.options import Auto, OwnPath, ReadPath

STEM = "{stem}"  # stands for the name of each image, without its suffix
Size = int | tuple[int, ...]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes of a size such as ``4GiB``.

    >>> parse_bytes("1.5GiB"), parse_bytes("300 MB"), parse_bytes(42)
    (1610612736, 300000000, 42)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", str(text).lower())
    if not match:
        raise ValueError(f"{text!r} is not a size. Write a number and a unit, such as 4GiB or 512MB.")
    return int(float(match[1]) * _UNITS[match[2] or ""])


@dataclass(frozen=True, kw_only=True)
class Input:
    """The image that is read."""

    path: ReadPath
    """Zarr array or OME-Zarr group; TIFF, .npy, HDF5, PNG or JPEG file, or a microscope's. A pattern such as "scans/*.tif": each of these images."""
    level: int = 0
    """Resolution level of an OME-Zarr or pyramidal TIFF; 0 is the finest."""
    dataset: str | int | None = None
    """Path of the dataset inside an HDF5 file, of the array or image inside a Zarr, number of a TIFF's series, or scene of a microscope's file."""
    axes: str | None = None
    """One letter for each axis, such as "zyx" or "tcyx", where the file does not name them."""
    channels: tuple[str | int, ...] = ()
    """Channels that are read, by name or by number from 0, such as [DAPI, 2]; left out: all of them."""
    spacing: Mapping[str, float | str] = field(default_factory=dict)
    """Size of a pixel along some axes, with a unit or without, such as {z: 0.3 um}, where the file does not know it."""
    nodata: float | Literal["auto", "nan", "none"] = "auto"
    """Value of pixels without a measurement, besides NaN: they stay as they are, and no other pixel depends on them. auto: as the file says
    (GDAL_NODATA, _FillValue, GDAL's mask); none: every value is a measurement."""
    range: tuple[float, float] | Auto = "auto"
    """Values mapped to 0 and 1 before denoising, and back after. auto: the range of an integer type, floats unchanged; for weights from `job: train`, the range used in training."""
    stripes: Mapping[str, str | bool] | Literal["auto", "none"] = "none"
    """Offsets of whole lines that are removed first: {axis: x} where columns differ, {axis: y} where rows do; with gain: true factors as well.
    auto: where samples show them clearly."""
    sides: Mapping[str, ReadPath] = field(default_factory=dict)
    """Per-pixel inputs tiled with the image, name to path: sigma (a noise map), mask (0 = keep the pixel)."""
    defects: Literal["none", "auto"] | ReadPath = "none"
    """Hot, dead and other pixels that the noise does not explain, which are replaced before anything is computed. auto: found in the image; a path: an
    image that is not 0 where one is, of the shape of the image, or of its tiled axes."""
    defects_in_output: Literal["replaced", "kept"] = "replaced"
    """replaced: the result has the denoiser's value there; kept: that of the image."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The result: an OME-Zarr, or a sharded Zarr v3 array."""

    path: OwnPath
    """Path of the Zarr to write, or its place in an object store, such as s3://bucket/clean.zarr."""
    overwrite: bool = False
    """Replace an existing Zarr at this path."""
    format: Literal["auto", "ome-zarr", "zarr"] = "auto"
    """ome-zarr: a group with axes, units and resolution levels, which viewers open; zarr: a bare array. auto: ome-zarr where its axes allow it."""
    levels: int | Auto = "auto"
    """Most resolution levels of an OME-Zarr, each half as large as the one before; auto: until 1024 pixels are left; 1: full resolution only."""
    shard: Size | Auto = "auto"
    """Edge of one shard file in pixels: the unit of safe write."""
    chunk: Size | Auto = "auto"
    """Edge of the inner chunks in pixels, the unit of decode; auto: 256, or 64 where three axes are tiled."""
    codec: Literal["lz4", "zstd", "none"] = "lz4"
    """Compression of the inner chunks; a crc32c checksum is always added."""
    dtype: str = "auto"
    """Type of the result; auto: that of the input, float32 for bool and for denoised images of few whole numbers, but photographs. Integers are rounded and clipped."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The cutting of the image into tiles and blocks."""

    size: Size | Auto = "auto"
    """Edge of one compute tile in pixels."""
    depth: Size | Auto = "auto"
    """Halo width in pixels; auto: the denoiser's receptive field."""
    boundary: Literal["auto", "reflect", "nearest", "periodic", "constant", "cut"] = "auto"
    """Values past the edge of the image; auto: the denoiser's own rule."""
    batch: int | Auto = "auto"
    """Tiles computed at once."""
    channels_last: bool | Auto = "auto"
    """Memory layout of a network's activations on a GPU; auto: the faster one in a trial on the GPU."""
    block: Size | Auto = "auto"
    """Edge of one super-block in pixels, a whole number of shards: the unit of work."""
    axes: str | Auto = "auto"
    """Axes that are tiled, such as "yx"; the other axes are looped over."""
    seams: Literal["refuse", "allow"] = "refuse"
    """allow: accept a depth smaller than the receptive field; refuse: report an error."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Execution of the job: workers, memory, device and precision."""

    workers: int | Auto = "auto"
    """Number of worker processes; auto: as the cores and the memory of this machine permit, or all of an allocation."""
    memory_per_worker: str | int = "4GiB"
    """Memory that one worker may use, such as 4GiB; a bare number is bytes."""
    retries: int = 3
    """Number of times that a failed block is tried again."""
    on_bad_block: Literal["fail", "quarantine"] = "fail"
    """fail: the run ends with exit code 1; quarantine: with exit code 3. The good blocks stay either way."""
    on_nan: Literal["propagate", "fail"] = "propagate"
    """Effect of a NaN or infinity in the input: propagate computes with it (a NaN that is no hole), fail ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: CPUs or GPUs. auto: GPUs where the cluster has them for its workers."""
    precision: Literal["float32", "tf32", "float16", "bfloat16"] = "float32"
    """Precision of networks; other denoisers compute in float32. tf32 needs a GPU. `plan --probe` shows the speed and the error of each."""
    stall_seconds: float = 300.0
    """Time without a finished block after which the cluster is restarted; a worker that is silent for as long is replaced."""

    @property
    def count(self) -> int:
        """The number of workers, once it is decided."""
        assert isinstance(self.workers, int), "a plan decides it"
        return self.workers


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that the workers belong to."""

    kind: str = "auto"
    """Kind of cluster: a name in halotile.graphs.clusters. auto: as the environment indicates, else this machine."""
    dashboard: bool = True
    """Serve the scheduler's dashboard, on 127.0.0.1."""
    tls: bool = True
    """Encrypt all connections and refuse strangers; false is allowed on loopback only."""
    interface: str | None = None
    """Network interface that scheduler and workers listen on, such as ib0, where they are on several machines."""
    address: str | None = None
    """scheduler: address of the running scheduler, such as tls://10.0.0.7:8786."""
    scheduler_file: OwnPath | None = None
    """scheduler: file written by `dask scheduler --scheduler-file`, instead of an address."""
    queue: str | None = None
    """Batch systems: queue or partition."""
    account: str | None = None
    """Batch systems: account or project to charge."""
    walltime: str | None = None
    """Batch systems: time limit of a job, such as "04:00:00"; a job of `submit` continues in a further one."""
    cores: int = 1
    """Batch systems: cores for each worker."""
    gpus: int | Literal["all"] | tuple[int, ...] = 0
    """Batch systems: GPUs for each worker. local-cuda: all, or a list of GPUs, such as [0, 2]."""
    prologue: tuple[str, ...] = ()
    """Batch systems: lines of the job script before the worker starts, such as "module load cuda"."""
    directives: tuple[str, ...] = ()
    """Batch systems: further directives, such as "--constraint=v100"."""
    directives_skip: tuple[str, ...] = ()
    """Batch systems: text of directives to leave out, such as "--mem"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a kind from another package; for a batch system, further arguments of its dask-jobqueue class."""


class NamedChoice:
    """A part of a job that is a name with its options as neighbouring keys.

    Its own fields besides ``name`` and ``options`` are keys that every name has.
    """

    registry: ClassVar[str]
    """Registry of the name, such as ``denoisers``."""
    attribute: ClassVar[str]
    """Name of the class in a module of that registry."""
    hidden: ClassVar[tuple[str, ...]] = ()
    """Names that jobs cannot use."""

    name: str
    options: Mapping[str, Any]

    @classmethod
    def word(cls) -> str:
        """Return the noun for what is named."""
        return registry.singular(cls.registry)

    @classmethod
    def accepted(cls) -> list[str]:
        """Return the names that a job may write."""
        return [name for name in registry.names(cls.registry) if name not in cls.hidden]

    @classmethod
    def declared(cls, name: str) -> type:
        """Return the class that a name refers to."""
        declared: type = getattr(registry.find(cls.registry, name), cls.attribute)
        return declared

    @classmethod
    def own_keys(cls) -> set[str]:
        """Return the keys that every name has."""
        return {own.name for own in fields(cls)} - {"name", "options"}  # type: ignore[arg-type]  # is a dataclass

    @classmethod
    def from_mapping(cls, written: Mapping[str, Any]) -> Self:
        """Return the choice in a mapping as a job file has it.

        >>> DenoiserChoice.from_mapping({"name": "tv", "strength": 1.0})
        DenoiserChoice(name='tv', options={'strength': 1.0})
        """
        own = {key: value for key, value in written.items() if key == "name" or key in cls.own_keys()}
        options = {key: value for key, value in written.items() if key not in own}
        return cls(**own, **({"options": options} if options else {}))

    @classmethod
    def nested(cls, written: Mapping[str, Any]) -> Self:
        """Return the choice in a mapping among the options of another one."""
        return cls.from_mapping(written)


@dataclass(frozen=True, kw_only=True)
class DenoiserChoice(NamedChoice):
    """A denoiser by name, with its options."""

    registry: ClassVar[str] = "denoisers"
    attribute: ClassVar[str] = "DENOISER"

    name: str
    """Name of a file in halotile.tasks.denoisers or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that denoiser."""


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """Fields of every kind of job. A kind adds its own sections, lists and values."""

    kind: ClassVar[str]
    """Name of the kind: that of its folder or entry point."""
    joins_images: ClassVar[bool] = False
    """True where several images that a pattern matches are the input of one job."""

    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    allow_import: bool = False
    """Allow the job to import the user's own code."""
    import_folder: str | None = None
    """Folder that such imports search first: that of the job file."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Path of the first output; the run directory is beside it."""

    @abstractmethod
    def moved_to(self, place: str) -> Self:
        """Return the same job with its first output at another path."""

    def moved_into(self, folder: str) -> Self:
        """Return the same job with all of its outputs in a folder; a kind with several outputs moves the others too."""
        return self.moved_to(os.path.join(folder, os.path.basename(os.path.normpath(self.place))))


AJob = TypeVar("AJob", bound=Job)


@dataclass(frozen=True, kw_only=True)
class OutputJob(Job):
    """A job whose first output is that of its section ``output``."""

    output: Output

    @property
    def place(self) -> str:
        """Path of the output."""
        return self.output.path

    def moved_to(self, place: str) -> Self:
        """Return the same job with its output at another path."""
        return replace(self, output=replace(self.output, path=place))


@dataclass(frozen=True, kw_only=True)
class TiledJob(OutputJob):
    """A job that computes tiles, on CPUs or GPUs."""

    tile: Tile = field(default_factory=Tile)


def is_pattern(path: str) -> bool:
    """Return True for a path with ``*``, ``?`` or ``[`` that is no file's name, and matches some.

    >>> is_pattern("/*"), is_pattern("/"), is_pattern("s3://scans/*.zarr")
    (True, False, False)
    """
    if "://" in path or not glob.has_magic(path) or os.path.lexists(path):
        return False
    return any(glob.iglob(path, recursive=True))


def takes_many(job: Job) -> bool:
    """Return True where the input of a job is a pattern."""
    section = getattr(job, "input", None)
    return section is not None and not job.joins_images and is_pattern(section.path)


def jobs_of(job: AJob) -> dict[str, AJob]:
    """Return a job for each image that the pattern matches, by its path, in the order of the paths.

    Outputs of these jobs and their run directories are left out, so that they may be beside the images.
    """
    section: Any = job.input  # type: ignore[attr-defined]
    pattern = section.path
    jobs = {
        path: for_its_image(replace(job, input=replace(section, path=path)))  # type: ignore[call-arg]
        for path in sorted(glob.glob(pattern, recursive=True))
    }
    places, real_folder = {path: one.place for path, one in jobs.items()}, cache(os.path.realpath)

    def resolved(path: str) -> str:
        folder, name = os.path.split(path)
        return os.path.join(real_folder(folder), name)

    own = str(RunDirectory.beside(job.place).path)  # that of a batch job for all images
    made = {resolved(own): {""}}
    for path, place in places.items():
        for name in (place, str(RunDirectory.beside(place).path)):
            made.setdefault(resolved(name), set()).add(path)
    jobs = {path: one for path, one in jobs.items() if made.get(resolved(path), set()) <= {path}}
    if not jobs:
        raise InputError(f"input.path is {pattern}: no image matches. Write a pattern of names that exist.")
    first: dict[str, str] = {}
    for path in jobs:
        if (other := first.setdefault(places[path], path)) != path:
            raise ConfigError(
                f"{other} and {path} would both be written to {places[path]}: {STEM} is the name without its suffix. "
                "Write a pattern that matches one of them."
            )
    return jobs


def first_job(job: AJob) -> AJob:
    """Return the job, or that of the first image where its input is a pattern."""
    return next(iter(jobs_of(job).values())) if takes_many(job) else job


def for_its_image(job: AJob) -> AJob:
    """Return a job with the stem of its image in place of ``{stem}``, in the paths of its output, of side inputs and of defects."""
    section: Any = getattr(job, "input", None)
    if section is None:
        return job
    if "://" in section.path and "*" in section.path:
        raise ConfigError(
            f"input.path is {section.path}: patterns are for files on a disk. Write the address of one image."
        )
    word = stem(section.path)
    moved: AJob = job.moved_to(job.place.replace(STEM, word))
    if not hasattr(section, "sides"):
        return moved
    sides = {name: side.replace(STEM, word) for name, side in section.sides.items()}
    defects = section.defects.replace(STEM, word)
    return replace(moved, input=replace(section, sides=sides, defects=defects))  # type: ignore[call-arg]


def stem(path: str) -> str:
    """Return the name of an image without its suffix.

    >>> stem("scans/a.tif"), stem("scans/a.b.ome.zarr")
    ('a', 'a.b')
    """
    return PurePath(path).stem.removesuffix(".ome")
