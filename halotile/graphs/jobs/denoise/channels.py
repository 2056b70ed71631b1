"""Channels with denoisers of their own: each group of them is planned as a job with these channels alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.jobs.denoise.pixels import faults_of_noise
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.graphs.plans.choices import choices_of_channels, make_chosen
from halotile.graphs.plans.cutting import Halo
from halotile.graphs.plans.make import Begun
from halotile.graphs.words import flow
from halotile.storage.arrays import Source
from halotile.storage.grid import Depth, Grid
from halotile.storage.images.planes import channel_names


@dataclass(frozen=True)
class ChannelPart:
    """Channels with the same denoiser."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    job: Denoising
    """The job of these channels alone."""

    @property
    def setting(self) -> str:
        """The denoiser, as a job file has it."""
        given = self.job.denoiser
        return flow({"name": given.name, **given.options}) if isinstance(given, DenoiserChoice) else given.title

    def begun(self, begun: Begun, place: int) -> Begun:
        """Return what an earlier run left of these channels, the part at this place of its identity."""
        if begun.previous is None:
            return begun
        identity: dict[str, Any] = begun.previous["identity"]
        own = identity.get("channels", [])[place : place + 1] or [{}]
        return replace(begun, previous={**begun.previous, "identity": identity | own[0]})

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Name the channels in errors."""
        try:
            yield
        except (ConfigError, InputError) as error:
            raise type(error)(f"{', '.join(self.names)}: {error}") from error


def parts_of(job: Denoising, source: Source) -> list[ChannelPart]:
    """Return the channels of an image by their denoisers, those of the main one first; a single part where all have the same."""
    choices = choices_of_channels(job.denoiser, job.channels, source)
    if len(choices) == 1:
        return [ChannelPart((), (), replace(job, denoiser=choices[0], channels={}))]
    names = [f"c={name}" if name.isdecimal() else name for name in channel_names(source)]
    found: list[tuple[Any, Any, list[int]]] = []
    for number, choice in enumerate(choices):
        with ChannelPart((number,), (names[number],), job).naming_errors():
            made = make_chosen(choice, job) if isinstance(choice, DenoiserChoice) else choice
        alike = next((numbers for other, _, numbers in found if other == made), None)
        if alike is None:
            found.append((made, choice, alike := []))
        alike.append(number)
    if len(found) == 1:
        return [ChannelPart((), (), replace(job, denoiser=found[0][1], channels={}))]
    without = [bool(faults_of_noise(job, made, job.noise)) for made, *_ in found]
    taken = {"mask"}.union(*(made.side_inputs for made, *_ in found))
    parts = []
    for (made, choice, numbers), is_without in zip(found, without, strict=True):
        named = tuple(names[number] for number in numbers)
        if made.channels != (1, 1) or made.scale != 1:
            changes = (
                f"takes {made.channels[0]} channels together" if made.scale == 1 else "changes the size of the image"
            )
            raise ConfigError(
                f"{', '.join(named)}: {made.title} {changes}, and a channel with a denoiser of its own is denoised by itself, at its size. "
                "Write one denoiser for all channels, or a job for each group of them with input.channels."
            )
        noise = NoiseModel() if is_without and not all(without) else job.noise
        others = taken - {"mask", *made.side_inputs}
        sides = {name: path for name, path in job.input.sides.items() if name not in others}
        own = replace(job, input=replace(job.input, sides=sides), denoiser=choice, channels={}, noise=noise)
        parts.append(ChannelPart(tuple(numbers), named, own))
    return sorted(parts, key=lambda part: part.job.denoiser.name != job.denoiser.name)


def check_alike(computing: Sequence[tuple[str, str]], parts: Sequence[ChannelPart]) -> None:
    """Refuse channels that would be computed on different devices or in different precisions."""
    for part, (device, precision) in zip(parts, computing, strict=True):
        if (device, precision) != computing[0]:
            raise ConfigError(
                f"{', '.join(part.names)} would be computed on {device} in {precision}, and {', '.join(parts[0].names)} on {computing[0][0]} in "
                f"{computing[0][1]}. Write run: {{device: cpu, precision: float32}}, or a job for each with input.channels."
            )


def widest(halos: Sequence[Halo]) -> Halo:
    """Return a halo that suffices for all channels."""
    deepest = max(halos, key=lambda halo: max(map(max, halo.depth)))
    depth = _deepest([halo.depth for halo in halos])
    align = math.lcm(*(halo.align for halo in halos))
    return replace(deepest, depth=depth, align=align, probed=None, notes=(), difference=0.0)


def _deepest(depths: Sequence[Depth]) -> Depth:
    return tuple((max(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*depths, strict=True))


def cut_for_all(grid: Grid, grids: Sequence[Grid]) -> Grid:
    """Return a grid whose blocks read what each of several grids reads."""
    return replace(
        grid,
        depth=_deepest([each.depth for each in grids]),
        align=tuple(math.lcm(*axis) for axis in zip(*(each.align for each in grids), strict=True)),
        least=tuple(max(axis) for axis in zip(*(each.least for each in grids), strict=True)),
    )


def notes_of_parts(parts: Sequence[ChannelPart], notes: Sequence[Sequence[str]]) -> list[str]:
    """Return the notes on all channels, with names where they are on some."""
    common = set.intersection(*map(set, notes))
    found = []
    for part, own in zip(parts, notes, strict=True):
        numbered = dict(enumerate(part.names))

        def name(match: re.Match[str], numbered: dict[int, str] = numbered) -> str:
            return numbered.get(int(match[1]), match[0])

        for note in own:
            text = re.sub(r" of c 0 to \d+", "", re.sub(r"\bc=(\d+)", name, note))
            found.append(note if note in common else f"{', '.join(part.names)}: {text}")
    return list(dict.fromkeys(found))


def described(parts: Sequence[ChannelPart], denoisers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the denoiser of each channel by its number, as a job file has them."""
    of_channel = {n: each for part, each in zip(parts, denoisers, strict=True) for n in part.numbers}
    return {str(number): of_channel[number] for number in sorted(of_channel)}
