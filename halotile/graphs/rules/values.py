"""Values of a job that cannot be, each with the words that say so.

A job file and a script both come by here, so the same value gets the same words. The planner checks what
takes the image to know, and a denoiser its own options.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, get_type_hints

from halotile import registry
from halotile.errors import ConfigError
from halotile.graphs.clusters.launches.walltime import is_walltime
from halotile.graphs.jobs.sections import Aim, AnyJob, Reconstruction, parse_bytes
from halotile.graphs.rules.words import expected, fits, nearest, shown

Check = Callable[[Any], str | None]
"""What is wrong with a value, or None. It sees only values of the right type."""

LEAST_MEMORY_BYTES = 64 * 2**20
SIGMAS = (1e-15, 1e15)
"""Noise levels whose inverse square can be computed with in single precision."""
_DTYPES = ("auto", "uint8", "uint16", "int8", "int16", "uint32", "int32", "float16", "float32", "float64")


_LONGEST_NAME = 230
"""Bytes of the name of an output. File systems take 255, and what lies beside it has a longer one."""
_PREVIEWS = {".tif": "a TIFF", ".tiff": "a TIFF", ".png": "a PNG"}
_OTHER_FORMATS = re.compile(r"\.(tiff?|png|jpe?g|bmp|gif|np[yz]|h5|hdf5?|nc|mat|zip)", re.IGNORECASE)
MOST_PER_SWEEP = 4
"""Iterations of a solver in one pass. At the rim of a periodic image each of them reads across the end what the one before made of
all sides."""


@dataclass(frozen=True)
class AtLeast:
    """A check that a number, or each number of a list, is large enough; "auto" passes.

    Examples
    --------
    >>> AtLeast(1)([256, 0])
    '[256, 0] is too small; write at least 1'
    >>> AtLeast(1)("auto")
    """

    least: int

    def __call__(self, value: Any) -> str | None:
        """What is wrong with the value, if anything."""
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
        """What is wrong with the value, if anything."""
        if isinstance(value, str) or self.bound < value < math.inf:
            return None
        if not math.isfinite(value):
            return f"{shown(value)} is not finite; write a number above {self.bound:g}"
        return f"{value} is too small; write more than {self.bound:g}"


@dataclass(frozen=True)
class NoiseLevel(Above):
    """A check that one over the square of a number can be computed with."""

    def __call__(self, value: float | str) -> str | None:
        """What is wrong with the value, if anything."""
        low, high = SIGMAS
        if isinstance(value, str) or value <= 0 or not math.isfinite(value) or low <= value <= high:
            return super().__call__(value)
        return (
            f"{value:g} counts by 1 / noise_sigma², which single precision cannot compute with; write a number from {low:g} to "
            f"{high:g}, and give the data in units that suit it"
        )


@dataclass(frozen=True)
class Named:
    """A check that a word names an extension. It is looked up by name only: to import it would load Dask.

    Examples
    --------
    >>> Named("solver", "solvers", without=("lanczos",))("fitsa")
    'no solver is called fitsa; did you mean fista?'
    """

    word: str
    registry: str
    without: tuple[str, ...] = ()
    """Names that are not for jobs."""
    besides: tuple[str, ...] = ()
    """Words that may be written as well."""

    @property
    def names(self) -> list[str]:
        """What may be written."""
        return [*self.besides, *(name for name in registry.names(self.registry) if name not in self.without)]

    def __call__(self, value: str) -> str | None:
        """What is wrong with the value, if anything."""
        if value in self.names:
            return None
        near = nearest(value, self.names, likeness=0.5)  # they are short
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
    if value != "auto" and not value[0] < value[1]:
        return f"{shown(value)} runs backwards; write [low, high] with low < high"
    return None


def _axes(value: str | None) -> str | None:
    if value in (None, "auto"):
        return None
    letters = str(value)
    if not letters or not letters.isalpha() or len({*letters.lower()}) != len(letters):
        return (
            f"{shown(letters)} does not name axes; write one different letter for each, such as yx or tczyx"
        )
    return None


def _dtype(value: str) -> str | None:
    if value in _DTYPES:
        return None
    if value.startswith("complex"):
        return f"{shown(value)} cannot hold a denoised image; write auto, or a float or integer type"
    near = nearest(value, _DTYPES)
    return f"{shown(value)} is not one of {', '.join(_DTYPES)}" + (f"; did you mean {near}?" if near else "")


def _filled(value: str) -> str | None:
    return None if value.strip() else "is empty; write a path"


def _output(value: str) -> str | None:
    if not value.isprintable():
        return f"{shown(value)} has characters in it that no screen shows; write a path without"
    if "://" in value:
        return f"{shown(value)} is an address, and outputs go to a disk of this machine; write a path"
    return _output_name(PurePath(value)) or _filled(value)


def _output_name(path: PurePath) -> str | None:
    """What is wrong with the last part of an output's path.

    Examples
    --------
    >>> _output_name(PurePath("scans/out.tif"))
    'scans/out.tif is no name for the Zarr that a run writes; write scans/out.zarr, and `recon-cli preview scans/out.zarr scans/out.tif` makes a TIFF of it'
    """
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        return f"{shown(path.name)} is a name of {len(os.fsencode(path.name))} bytes; write one of at most {_LONGEST_NAME}"
    if not _OTHER_FORMATS.fullmatch(path.suffix):
        return None
    zarr = path.with_suffix(".zarr")
    image = path if path.suffix.lower() in _PREVIEWS else path.with_suffix(".tif")
    kind = _PREVIEWS[image.suffix.lower()]
    return (
        f"{path} is no name for the Zarr that a run writes; write {zarr}, and "
        f"`recon-cli preview {zarr} {image}` makes {kind} of it"
    )


def _address(value: str) -> str | None:
    if re.fullmatch(r"(tls|tcp)://(\[[0-9a-fA-F:]+\]|[^:/\s]+):\d+", value):
        return None
    return f"{shown(value)} is not the address of a scheduler; write one such as tls://10.0.0.7:8786"


def _walltime(value: str) -> str | None:
    if is_walltime(value):
        return None
    return f'{shown(value)} is not a time; write hours, minutes and seconds, such as "04:00:00", or with days "2-00:00:00"'


def _one_line(value: str) -> str | None:
    """It stands in a job script, where what follows on another line is a command."""
    return (
        None
        if value.isprintable() and value.strip()
        else f"{shown(value)} is not a name; write a word of one line"
    )


def _directives(value: Any) -> str | None:
    for each in value:
        if not each.isprintable():
            return f"{shown(each)} is more than a line; write an entry for each directive"
        if each.lstrip().startswith("#"):
            instead = each.lstrip("# ").partition(" ")[2]
            return (
                f"{shown(each)} has the mark of a directive before it, which is added; write {shown(instead)}"
            )
    return None


def _shape(value: Any) -> str | None:
    if value != "auto" and len(value) < 2:
        return f"{shown(value)} is no image; write its length along each axis, such as [4096, 4096]"
    return AtLeast(1)(value)


def _tolerance(value: float) -> str | None:
    if value >= 1:
        return (
            f"{shown(value)} would end the solver at once: it is a part of the image's length; write less than 1, such as "
            "1.0e-4, or 0 to do all iterations"
        )
    return AtLeast(0)(value)


def _every(value: int) -> str | None:
    if value > MOST_PER_SWEEP:
        return (
            f"{value} is too large: so many iterations look far beside each block, and compute more than they save; "
            f"write at most {MOST_PER_SWEEP}"
        )
    return AtLeast(1)(value)


CHECKS: Mapping[tuple[str, str], Check] = {
    ("input", "path"): _filled,
    ("input", "level"): AtLeast(0),
    ("input", "axes"): _axes,
    ("input", "range"): _range,
    ("output", "path"): _output,
    ("output", "shard"): AtLeast(1),
    ("output", "chunk"): AtLeast(1),
    ("output", "dtype"): _dtype,
    ("tile", "size"): AtLeast(1),
    ("tile", "depth"): AtLeast(0),
    ("tile", "batch"): AtLeast(1),
    ("tile", "block"): AtLeast(1),
    ("tile", "axes"): _axes,
    ("run", "workers"): AtLeast(1),
    ("run", "retries"): AtLeast(0),
    ("run", "memory_per_worker"): _memory,
    ("run", "stall_seconds"): Above(0),
    ("cluster", "kind"): Named("cluster", "clusters", besides=("auto",)),
    ("cluster", "address"): _address,
    ("cluster", "walltime"): _walltime,
    ("cluster", "queue"): _one_line,
    ("cluster", "account"): _one_line,
    ("cluster", "interface"): _one_line,
    ("cluster", "directives"): _directives,
    ("cluster", "cores"): AtLeast(1),
    ("cluster", "gpus"): AtLeast(0),
    ("operators", "data"): _filled,
    ("operators", "noise_sigma"): NoiseLevel(0),
    ("fidelity", "background"): AtLeast(0),
    ("prior", "sigma"): Above(0),
    ("prior", "weight"): Above(0),
    ("prior", "iterations"): AtLeast(1),
    ("solver", "name"): Named("solver", "solvers", without=("lanczos",)),
    ("solver", "iterations"): AtLeast(1),
    ("solver", "step"): Above(0),
    ("solver", "tol"): _tolerance,
    ("solver", "checkpoint_every"): _every,
    ("", "shape"): _shape,
    ("", "start"): _filled,
    ("", "reference"): _filled,
}
"""By section and key; keys that stand in no section are in the section "". Nothing is checked that is left empty."""


_SECTIONS = ("input", "output", "fidelity", "prior", "solver", "tile", "run", "cluster")


def check_job(job: AnyJob) -> None:
    """Refuse a job with values that no image could make right.

    Raises
    ------
    ConfigError
        With every such value, one a line.

    Examples
    --------
    >>> from halotile.graphs.jobs.sections import DenoiserChoice, Input, Job, Output, Run
    >>> check_job(Job(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...               run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    faults = [f"{path}: {message}" for path, message in _job_faults(job)]
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} problems in the job; nothing was started")
    if faults:
        raise ConfigError("\n".join(faults))


def _job_faults(job: AnyJob) -> Iterator[tuple[str, str]]:
    for section in _SECTIONS:
        for key, message in _faults(section, getattr(job, section, None)):
            yield f"{section}.{key}", message
    if isinstance(job, Reconstruction):
        for number, choice in enumerate(job.operators):
            for key, message in _faults("operators", choice):
                yield f"operators[{number}].{key}", message
        yield from _faults("", job, Aim)


def _faults(section: str, part: Any, schema: type | None = None) -> list[tuple[str, str]]:
    """Keys of one section with what is wrong there."""
    if part is None:
        return []
    kind, found = schema or type(part), []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value, hint = getattr(part, field.name), hints[field.name]
        check = CHECKS.get((section, field.name))
        if not fits(value, hint):
            found.append((field.name, f"{shown(value)} is not {expected(hint)}"))
        elif check is not None and value is not None and (message := check(value)):
            found.append((field.name, message))
    return found
