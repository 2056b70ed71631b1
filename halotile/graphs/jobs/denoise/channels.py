"""Channels of an image that have denoisers of their own."""

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
from halotile.graphs.words import flow
from halotile.storage.arrays import Source
from halotile.storage.images.planes import channel_titles
from halotile.tasks.denoisers.base import Denoiser


@dataclass(frozen=True)
class ChannelGroup:
    """Channels with the same denoiser: some, by their numbers and names, or the whole image."""

    job: Denoising  # that of these channels alone
    given: Denoiser  # denoiser as the job has it
    denoiser: Denoiser  # the same for the voxels of the image
    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The names as one; empty for the whole image."""
        return ", ".join(self.names)

    @property
    def setting(self) -> str:
        """The denoiser, as a job file has it."""
        given = self.job.denoiser
        return flow({"name": given.name, **given.options}) if isinstance(given, DenoiserChoice) else given.title


@contextmanager
def naming(title: str) -> Iterator[None]:
    """Name the channels in errors; nothing where all are meant."""
    try:
        yield
    except (ConfigError, InputError) as error:
        if not title:
            raise
        raise type(error)(f"{title}: {error}") from error


def channels_of(job: Denoising, source: Source) -> list[ChannelGroup]:
    """Return the channels of an image by their denoisers, those of the main one first; the whole image where all have the same."""
    choices = choices_of_channels(job.denoiser, job.channels, source)
    names = channel_titles(source)
    made: list[Denoiser] = []
    for name, choice in zip(names, choices, strict=False):
        with naming(name if len(choices) > 1 else ""):
            made.append(make_chosen(choice, job) if isinstance(choice, DenoiserChoice) else choice)
    alike = [[n for n, other in enumerate(made) if other == denoiser] for denoiser in made]
    groups = [group for number, group in enumerate(alike) if group[0] == number]
    if len(groups) == 1:
        return [ChannelGroup(replace(job, denoiser=choices[0], channels={}), made[0], made[0])]
    without = [bool(faults_of_noise(job, made[group[0]], job.noise)) for group in groups]
    found = []
    for group, is_without in zip(groups, without, strict=True):
        noise = NoiseModel() if is_without and not all(without) else job.noise
        own = replace(job, denoiser=choices[group[0]], channels={}, noise=noise)
        denoiser, named = made[group[0]], tuple(names[number] for number in group)
        part = ChannelGroup(own, denoiser, denoiser, tuple(group), named)
        if denoiser.channels != (1, 1) or denoiser.scale != 1:
            takes = f"takes {denoiser.channels[0]} channels together"
            changes = takes if denoiser.scale == 1 else "changes the size of the image"
            raise ConfigError(
                f"{part.title}: {denoiser.title} {changes}, but a channel with its own denoiser is denoised separately and has to keep its size. "
                "Write one denoiser for all channels, or a job for each group of them with input.channels."
            )
        found.append(part)
    return sorted(found, key=lambda part: part.job.denoiser.name != job.denoiser.name)


def check_alike(computing: Sequence[tuple[str, str]], parts: Sequence[ChannelGroup]) -> None:
    """Refuse channels that would be computed on different devices or in different precisions."""
    for part, (device, precision) in zip(parts, computing, strict=True):
        if (device, precision) != computing[0]:
            raise ConfigError(
                f"{part.title} would be computed on {device} in {precision}, and {parts[0].title} on {computing[0][0]} in {computing[0][1]}. "
                "Write run: {device: cpu, precision: float32}, or a job for each with input.channels."
            )


def previous_of(previous: Mapping[str, Any] | None, place: int) -> dict[str, Any] | None:
    """Return what an earlier run left of some channels, those at this place of its identity."""
    if previous is None:
        return None
    identity = previous["identity"]
    own = identity.get("channels", [])[place : place + 1] or [{}]
    return {**previous, "identity": identity | own[0]}


def notes_of_parts(parts: Sequence[tuple[ChannelGroup, Sequence[str]]]) -> list[str]:
    """Return the notes on all channels, with names where they are on some."""
    common = set.intersection(*(set(own) for _, own in parts))
    found = []
    for part, own in parts:
        for note in own:
            if note not in common:
                text = re.sub(r" of c 0 to \d+", "", note)
                text = re.sub(r"\bc=(\d+)", lambda match, names=part.names: names[int(match[1])], text)  # type: ignore[misc]
                note = f"{part.title}: {text}"
            found.append(note)
    return list(dict.fromkeys(found))
