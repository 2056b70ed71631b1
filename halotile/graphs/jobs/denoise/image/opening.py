"""The words of a denoising job for its image: side inputs, values and noise level."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.plans.inputs import check_whole
from halotile.storage.arrays import Source, open_source
from halotile.storage.rim import Readable
from halotile.storage.sharded.ome_metadata import order
from halotile.storage.spacing import voxel_shape
from halotile.storage.views import ChannelAxis, PlaneValues
from halotile.tasks.denoise_block import describe_range
from halotile.tasks.denoisers.base import Denoiser, Leveled, Spaced
from halotile.tasks.noise.estimate import estimate_noise_levels
from halotile.tasks.options import Auto
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
    """Decide the role of each axis."""
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


Levels = NDArray[np.float64]


def open_input(job: Denoising) -> Source:
    """Open the image of a job, with the pixel sizes that it gives, and its axes in the order that OME-Zarr wants."""
    source = open_source(
        job.input.path, level=job.input.level, dataset=job.input.dataset, axes=job.input.axes
    )
    if job.output.format != "zarr":
        source = source.in_order(order(source.axes))
    return source.with_sizes(job.input.spacing) if job.input.spacing else source


def open_sides(
    job: Denoising, denoiser: Denoiser, original: Source, source: Readable, roles: Roles
) -> dict[str, Source]:
    """Open the side inputs of a job, of which the mask may be in the file of the image."""
    sides: dict[str, Source] = {}
    paths = dict(job.input.sides)
    own = original.mask if job.input.nodata != "none" else None
    if own and "mask" in paths:
        raise ConfigError(
            f"input.sides.mask is {paths['mask']}, and {original.path} has a mask of its own. Leave yours out; or write one that is 0 wherever "
            "one of them is, to go with input.nodata: none, or with a copy of the image without its mask."
        )
    if own:
        paths["mask"] = original.path
    allowed = {*denoiser.side_inputs, "mask"}
    spatial_shape = tuple(source.shape[i] for i in roles.spatial)
    for name, path in paths.items():
        is_own = name == "mask" and own is not None
        key = "the file's own mask" if is_own else f"input.sides.{name}"
        without = " Or write input.nodata: none, which does without it." if is_own else ""
        if name not in allowed:
            raise ConfigError(
                f"input.sides.{name}: {denoiser.title} has no such side input. Write one of {', '.join(sorted(allowed))}."
            )
        if name == "mask" and (denoiser.scale != 1 or denoiser.channels[0] != denoiser.channels[1]):
            raise ConfigError(
                f"{key}: {denoiser.title} changes the image's shape, so no pixel can be kept. "
                f"{without.strip() or 'Leave the mask out.'}"
            )
        side = open_source(path, level=job.input.level, dataset=own) if is_own else _open_side(key, path)
        check_whole(side.path)
        # It has its axes as the file of the image has them.
        if len(side.shape) == len(original.shape) and side.order == tuple(range(len(side.shape))):
            moved = side.in_order(original.order)
            side = moved if moved.shape == original.shape else side
        if side.shape not in (source.shape, spatial_shape):
            raise InputError(
                f"{key} has shape {side.shape}. Give it the image's shape {source.shape} "
                f"or that of its tiled axes {spatial_shape}.{without}"
            )
        sides[name] = side
    return sides


def _open_side(key: str, path: str) -> Source:
    """Open the file of a side input, which has no dataset to choose."""
    try:
        return open_source(path)
    except InputError as error:
        problem, asked, names = str(error).partition("Write dataset: one of ")
        if not asked:
            raise
        is_group = os.path.isdir(path) or "://" in path
        instead = (
            f"the path of one, such as {path}/NAME" if is_group else "one to a file of its own, and its path"
        )
        raise InputError(
            f"{key}: {problem}A side input has no dataset to choose. Write {instead}: {names}"
        ) from error


def value_range(
    requested: tuple[float, float] | Auto, dtype: np.dtype[Any], trained: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Return the values that are mapped to 0 and 1 before denoising, unless given: as a network was trained, or those of an integer type."""
    if requested != "auto":
        return (float(requested[0]), float(requested[1]))
    if trained is not None:
        return None if trained == (0.0, 1.0) else trained
    return (0.0, float(np.iinfo(dtype).max)) if dtype.kind in "iu" else None


def check_units(
    denoiser: Denoiser, values: tuple[float, float] | None, sides: Mapping[str, Readable]
) -> None:
    """Refuse a noise level, or a strength in its place, that is in other units than the image that is denoised."""
    if values is None:
        return
    sigma = getattr(denoiser, "sigma", None)
    is_known = sigma is not None or "sigma" in sides
    in_units = {
        "sigma": sigma if "sigma" in denoiser.side_inputs else None,
        "strength": getattr(denoiser, "strength", None)
        if isinstance(denoiser, Leveled) and not is_known
        else None,
    }
    for key, setting in in_units.items():
        if isinstance(setting, int | float) and setting > 1:
            quantity, instead = ("noise", "auto") if key == "sigma" else ("strength", "sigma: auto beside it")
            raise ConfigError(
                f"denoiser.{key} is {setting:g}. {describe_range(values, quantity)} "
                f"Write {key}: {setting / (values[1] - values[0]):.3g}, or {instead}."
            )


def choose_noise_level(
    denoiser: Denoiser,
    source: Readable,
    roles: Roles,
    values: tuple[float, float] | None,
    sides: Mapping[str, Readable],
    previous: Mapping[str, Any] | None,
) -> tuple[Denoiser, Levels | None]:
    """Return the denoiser, and the noise level of each plane if it wants one; it is set where there is only one.

    A noise map of the job takes the place of an estimate. A resumed run keeps the estimate that it began with.

    Returns
    -------
    (Denoiser, ndarray or None)
        Levels in the units that the denoiser computes in, one for each index of the looped axes.
    """
    if not denoiser.wants_noise_level or "sigma" in sides:
        return denoiser, None
    known = previous["identity"].get("noise_level") if previous else None
    levels = np.asarray(known, float)
    if known is None or levels.shape != tuple(source.shape[i] for i in roles.looped):
        low, high = values or (0.0, 1.0)
        levels = estimate_noise_levels(source, roles.spatial, roles.looped) / (high - low)
    return denoiser.with_noise_level(float(levels.flat[0])) if levels.size == 1 else denoiser, levels


def level_sides(levels: Levels | None, roles: Roles) -> dict[str, PlaneValues]:
    """Return the side input of noise levels that differ from plane to plane; none for a single level."""
    return {} if levels is None or levels.size == 1 else {"sigma": plane_values(levels, roles)}


def plane_values(values: Levels, roles: Roles) -> PlaneValues:
    """Return a number for each index of the looped axes as a side input."""
    shape = [1] * len(roles.axes)
    for axis, length in zip(roles.looped, values.shape, strict=True):
        shape[axis] = length
    return PlaneValues(values.reshape(shape))
