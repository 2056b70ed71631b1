"""Values of a job that cannot be, each with the words that say so.

A job file and a script both come by here, so the same value gets the same words. The planner checks what
takes the picture to know, and a denoiser its own options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from halotile import registry
from halotile.errors import ConfigError
from halotile.graphs.job import Auto, Job, Output, Size, Tile, parse_bytes
from halotile.graphs.words import expected, fits, nearest, shown
from halotile.tasks.denoisers.base import Denoiser

Check = Callable[[Any], str | None]
"""What is wrong with a value, or None. It sees only values of the right type."""

LEAST_MEMORY_BYTES = 64 * 2**20
_DTYPES = ("auto", "uint8", "uint16", "int8", "int16", "uint32", "int32", "float16", "float32", "float64")


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
        if len(numbers) > 0 and all(isinstance(n, str) or n >= self.least for n in numbers):
            return None
        return f"{shown(value)} is too small; write at least {self.least}"


@dataclass(frozen=True)
class Above:
    """A check that a number is larger than another."""

    bound: float

    def __call__(self, value: float) -> str | None:
        """What is wrong with the value, if anything."""
        return None if value > self.bound else f"{value} is too small; write more than {self.bound:g}"


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
        return f"{shown(value)} cannot hold a denoised picture; write auto, or a float or integer type"
    near = nearest(value, _DTYPES)
    return f"{shown(value)} is not one of {', '.join(_DTYPES)}" + (f"; did you mean {near}?" if near else "")


def _filled(value: str) -> str | None:
    return None if value.strip() else "is empty; write a path"


def _output(value: str) -> str | None:
    if "://" in value:
        return f"{shown(value)} is an address, and outputs go to a disk of this machine; write a path"
    return _filled(value)


def _cluster(value: str) -> str | None:
    """The kind is looked up by name only: to import it would load Dask."""
    known = registry.names("clusters")
    if value in known:
        return None
    near = nearest(value, known)
    return f"no cluster is called {value}; " + (
        f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
    )


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
    ("cluster", "kind"): _cluster,
}
"""By section and key."""


def check_sizes(output: Output, tile: Tile, denoiser: Denoiser) -> Mapping[tuple[str, str], str]:
    """What is wrong with sizes that have to fit one another, by section and key; a picture may add to it.

    Examples
    --------
    >>> from halotile.graphs.job import Output, Tile
    >>> from halotile.tasks.denoisers.median import Median
    >>> check_sizes(Output(path="a", shard=1000, chunk=256), Tile(block=1000), Median(size=3))
    {('output', 'shard'): '1000 is no multiple of output.chunk 256; a shard holds whole chunks: write 1024'}
    """
    shard, chunk, block = output.shard, output.chunk, tile.block
    if message := _multiple(shard, chunk, "output.chunk", "a shard holds whole chunks"):
        return {("output", "shard"): message}
    if denoiser.scale == 1 and (
        message := _multiple(block, shard, "output.shard", "a block writes whole shards")
    ):
        return {("tile", "block"): message}
    return {}


def check_depth(tile: Tile, denoiser: Denoiser) -> str | None:
    """What is wrong with the depth for a denoiser that declares how far it looks."""
    needed = denoiser.receptive_field()
    if tile.depth == "auto" or tile.seams == "allow" or needed is None:
        return None
    least = min(_numbers(tile.depth))
    return (
        f"{shown(tile.depth)} is less than {denoiser.title}'s receptive field {needed}: seams would show; "
        f"write {needed}, auto, or seams: allow"
        if least < needed
        else None
    )


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


_SECTIONS = ("input", "output", "tile", "run", "cluster")


def check_job(job: Job) -> None:
    """Refuse a job with values that no picture could make right.

    Raises
    ------
    ConfigError
        With every such value, one a line.

    Examples
    --------
    >>> from halotile.graphs.job import DenoiserChoice, Input, Output, Run
    >>> check_job(Job(input=Input(path="a"), output=Output(path="b"), denoiser=DenoiserChoice(name="tv"),
    ...               run=Run(workers=0)))
    Traceback (most recent call last):
    halotile.errors.ConfigError: run.workers: 0 is too small; write at least 1
    """
    faults = [
        f"{section}.{key}: {message}"
        for section in _SECTIONS
        for key, message in _faults(section, getattr(job, section))
    ]
    if len(faults) > 1:
        faults.insert(0, f"{len(faults)} problems in the job; nothing was started")
    if faults:
        raise ConfigError("\n".join(faults))


def _faults(section: str, part: Any) -> list[tuple[str, str]]:
    """Keys of one section with what is wrong there."""
    hints, found = get_type_hints(type(part)), []
    for field in dataclasses.fields(part):
        value, hint = getattr(part, field.name), hints[field.name]
        check = CHECKS.get((section, field.name))
        if not fits(value, hint):
            found.append((field.name, f"{shown(value)} is not {expected(hint)}"))
        elif check is not None and (message := check(value)):
            found.append((field.name, message))
    return found
