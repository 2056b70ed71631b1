"""Axes that a denoising job tiles: those that are space, and z only where its distances are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.storage.arrays import Source
from halotile.storage.rim import Readable
from halotile.storage.spacing import voxel_shape
from halotile.storage.views import ChannelAxis
from halotile.tasks.denoisers.base import Denoiser, Spaced
from halotile.tasks.roles import Roles

FLAT = 2.0
"""Ratio of the distances along z and within a plane from which planes are denoised one by one."""


class Tiled(NamedTuple):
    """The image as it is tiled."""

    roles: Roles
    source: Readable
    """The image with the axes that the denoiser takes."""
    denoiser: Denoiser
    """The denoiser, with the shape of the voxels."""
    notes: tuple[str, ...]
    """Decisions where the job and the file leave it open."""


def assign_axes(job: Denoising, denoiser: Denoiser, source: Source) -> Tiled:
    """Decide the role of each axis.

    Raises
    ------
    ConfigError
        When the job names axes that the image lacks, or not as many as the denoiser takes.
    InputError
        When the denoiser takes another number of channels.
    """
    letters, notes = _tiled_letters(job, denoiser, source)
    if "z" in letters and (shape := _voxel_shape(job, source, letters)):
        denoiser = denoiser.with_spacing(shape)
    if isinstance(denoiser, Spaced):
        denoiser.spacing_along(len(letters))
    readable: Readable = source
    axes = source.axes
    channels = denoiser.channels[0]
    if denoiser.channels == (1, 1):
        return Tiled(_roles(axes, letters, None), readable, denoiser, notes)
    if "c" not in axes:
        if channels != 1:
            raise InputError(
                f"{denoiser.title} takes {channels} channels, the image has axes {''.join(axes)!r} without c. "
                "Name its channel axis with input.axes, or use a network of one channel."
            )
        readable, axes = ChannelAxis(source), ("c", *axes)
    channel = axes.index("c")
    if readable.shape[channel] != channels:
        raise InputError(
            f"{denoiser.title} takes {channels} channels, the image has {readable.shape[channel]}. "
            "Use a network of as many channels."
        )
    return Tiled(_roles(axes, letters, channel), readable, denoiser, notes)


def _roles(axes: tuple[str, ...], letters: Sequence[str], channel: int | None) -> Roles:
    return Roles(axes, tuple(sorted(axes.index(a) for a in letters)), channel)


def _tiled_letters(job: Denoising, denoiser: Denoiser, source: Source) -> tuple[str, tuple[str, ...]]:
    """Return the letters of the tiled axes, and notes."""
    axes = "".join(source.axes)
    letters, notes = job.tile.axes, []
    if letters == "auto":
        space = "".join(letter for letter in "zyx" if letter in axes)
        dims_wanted = next((dims for dims in denoiser.dims if dims <= len(space)), denoiser.dims[-1])
        letters = space[-dims_wanted:]
        if "z" in letters and 2 in denoiser.dims and (why := _flatness(job, source, letters)):
            letters, notes = letters.replace("z", ""), [why]
    if any(letter not in axes for letter in letters):
        raise ConfigError(
            f"tile.axes is {letters!r}, the image's axes are {axes!r}. Write some of these, or input.axes if they are others."
        )
    if len(letters) not in denoiser.dims:
        instead = (
            f"input.axes: {'zyx' if len(axes) == 3 else 'one letter for each'}"
            if job.tile.axes == "auto"
            else "that many of them"
        )
        raise ConfigError(
            f"tile.axes is {letters!r}: {denoiser.title} works on {' or '.join(map(str, denoiser.dims))} axes of space. "
            f"The image has {axes!r}; write {instead}."
        )
    return letters, tuple(notes)


def _voxel_shape(job: Denoising, source: Source, letters: str) -> tuple[float, ...] | None:
    """Return the distances of pixels along the tiled axes, the smallest as 1; None where they are not known."""
    at = [source.axes.index(letter) for letter in source.axes if letter in letters]
    given = set(letters) & set(job.input.spacing)
    units = [source.units[i] for i in at]
    is_partly = bool(given) and given != set(letters) and None in units
    shape = None
    if not is_partly:
        shape = voxel_shape([source.scale[i] for i in at], units, is_given=bool(given))
    if "z" in given and shape is None:
        raise ConfigError(
            f"input.spacing is {dict(job.input.spacing)}, which does not tell the shape of a voxel along {letters}. "
            "Write the size along each of these axes, all with a unit of length, or all without."
        )
    return shape


def _flatness(job: Denoising, source: Source, letters: str) -> str:
    """Return why planes along z are better denoised one by one; empty where a volume is."""
    shape = _voxel_shape(job, source, letters)
    if shape is None:
        return (
            "planes along z are denoised one by one: their distance is not known. To denoise the volume, write "
            "input.spacing: {z: 0.3 um, y: 0.1 um, x: 0.1 um} with the sizes of your voxels"
        )
    along = dict(zip((letter for letter in source.axes if letter in letters), shape, strict=True))
    ratio = along.pop("z") / min(along.values())
    if ratio < FLAT:
        return ""
    return (
        f"planes along z are {ratio:.3g} times as far apart as pixels, and denoised one by one; tile.axes: {letters} "
        "denoises the volume, where neighbours along z count less"
    )
