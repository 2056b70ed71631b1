"""The job ``simulate`` as plain frozen values."""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, get_args

from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, Reconstruction, weighed
from halotile.graphs.kinds.sections import Job, Size
from halotile.graphs.words import nearest
from halotile.storage.disk.place import check_dots, check_parents
from halotile.tasks.noise.simulated import Noise
from halotile.tasks.options import Auto, ReadPath

OTHER_FORMATS = (".npy", ".tif", ".tiff", ".h5", ".hdf5", ".png")


@dataclass(frozen=True, kw_only=True)
class NoiseChoice:
    """The noise of simulated measurements."""

    name: Noise = "gaussian"
    """gaussian: of the operator's noise_sigma; poisson: counts; none."""
    gain: float = 1.0
    """poisson: value of one count, in units of the image."""
    background: float = 0.0
    """poisson: counts without the image."""
    seed: int = 0
    """Seed of the noise: 0 or more."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Noise):
            near = nearest(str(self.name), get_args(Noise), likeness=0.5)
            hint = f"did you mean {near}?" if near else f"write one of {', '.join(get_args(Noise))}."
            raise ConfigError(f"noise is {self.name!r}: there is none of that name; {hint}")
        # A value of another type is refused with the job.
        if isinstance(self.gain, int | float) and not (math.isfinite(self.gain) and self.gain > 0):
            raise ConfigError(f"gain is {self.gain:g}: a count has to be worth something. Write more than 0.")
        if isinstance(self.seed, int) and self.seed < 0:
            raise ConfigError(f"seed is {self.seed}: seeds count from 0. Write 0 or more.")

    def describe(self, sigma: float) -> str:
        """Describe the noise of a measurement.

        >>> NoiseChoice().describe(0.01), NoiseChoice(name="poisson", gain=0.5).describe(0.01)
        ('gaussian noise of 0.01', 'poisson noise, 0.5 for each count')
        """
        if self.name == "gaussian":
            return f"gaussian noise of {sigma:g}"
        return "no noise" if self.name == "none" else f"poisson noise, {self.gain:g} for each count"


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Storage of the measurements: sharded Zarr v3 arrays at the ``data`` of the operators."""

    overwrite: bool = False
    """Replace existing Zarrs at these paths."""
    shard: Size | Auto = "auto"
    """Edge of one shard file in pixels: the unit of safe write."""
    chunk: Size | Auto = "auto"
    """Edge of the inner chunks in pixels, the unit of decode."""
    codec: Literal["lz4", "zstd", "none"] = "lz4"
    """Compression of the inner chunks; a crc32c checksum is always added."""


@dataclass(frozen=True, kw_only=True)
class Simulation(Job):
    """Measurements of a true image, ``y = A x`` with noise."""

    kind: ClassVar[str] = "simulate"

    operators: tuple[OperatorChoice, ...]
    noise: NoiseChoice = field(default_factory=NoiseChoice)
    output: Storage = field(default_factory=Storage)
    reference: ReadPath
    """The true image."""
    exact: bool = False
    """Use direct convolutions only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", weighed(self.operators))

    @property
    def place(self) -> str:
        """Path of the first measurement."""
        return self.operators[0].data

    def moved_to(self, place: str) -> Self:
        """Return the same job with its first measurement at another path."""
        return replace(self, operators=(replace(self.operators[0], data=place), *self.operators[1:]))

    def moved_into(self, folder: str) -> Self:
        """Return the same job with all of its measurements in a folder."""
        paths = (os.path.join(folder, f"{n}-{os.path.basename(o.data)}") for n, o in enumerate(self.operators))
        moved = zip(self.operators, paths, strict=True)
        return replace(self, operators=tuple(replace(operator, data=path) for operator, path in moved))


def check_places(job: Simulation) -> None:
    """Refuse paths where a measurement cannot be written."""
    used_by: dict[str, str] = {os.path.realpath(job.reference): "the reference"}
    for number, choice in enumerate(job.operators):
        key = f"operators[{number}].data"
        if "://" in choice.data or Path(choice.data).suffix.lower() in OTHER_FORMATS:
            better = Path(choice.data).with_suffix(".zarr").name
            raise ConfigError(
                f"{key} is {choice.data}: measurements are written as Zarr on a disk of this machine. Write {better}, say."
            )
        path = os.path.realpath(choice.data)
        if path in used_by:
            raise ConfigError(f"{key} is {choice.data}, and so is {used_by[path]}. Write another path.")
        check_dots(choice.data, key)
        check_parents(os.path.abspath(choice.data), key)
        used_by[path] = key


def simulation_of(job: Reconstruction, noise: NoiseChoice, *, overwrite: bool = False) -> Simulation:
    """Return the job that simulates the measurements of a reconstruction from its reference."""
    if job.reference is None:
        raise ConfigError(
            "reference is not there: measurements are simulated from the true image. Write reference: truth.zarr."
        )
    background = job.fidelity.options.get("background", 0.0) if noise.name == "poisson" else 0.0
    storage = Storage(overwrite=overwrite, shard=job.output.shard, chunk=job.output.chunk, codec=job.output.codec)
    return Simulation(
        operators=job.operators,
        noise=replace(noise, background=background or noise.background),
        output=storage,
        reference=job.reference,
        exact=job.exact,
        run=job.run,
        cluster=job.cluster,
        allow_import=job.allow_import,
        import_folder=job.import_folder,
    )
