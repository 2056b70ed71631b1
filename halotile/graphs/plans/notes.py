"""Notes of a plan: results of trials, and what the result will lack or cost."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.graphs.kinds.sections import Output
from halotile.graphs.plans.choices import kept_bytes
from halotile.graphs.words import bytes_text, counted
from halotile.storage.arrays import Source
from halotile.storage.disk.object_path import ObjectPath, OutputPath
from halotile.storage.disk.place import local_lock_reason
from halotile.storage.formats.base import packing_text
from halotile.storage.grid import Grid, Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.sharded.layout import MOST_FILES
from halotile.storage.sharded.ome_metadata import fits
from halotile.storage.sharded.output import Layout
from halotile.tasks.inner_tiles import Roles

MOST_LISTED = 8  # noise levels that are listed one by one
DECODED_AT_MOST = 4  # ratio of pixels decoded to pixels needed above which a plan has a note


def notes_of(original: Source, dtype: np.dtype[Any], *, layout: Layout, roles: Roles, grid: Grid) -> tuple[str, ...]:
    """The notes on the output of a plan and on the file of its input; ``dtype`` is that of the pixels as they are read."""
    return (
        *_metadata(layout),
        *note_of_packing(original),
        *_narrowing(dtype, np.dtype(layout.dtype)),
        *_decoding(original, roles, grid),
    )


def notes_of_levels(
    levels: NDArray[np.float64] | None, roles: Roles, values: tuple[float, float] | None
) -> tuple[str, ...]:
    """Return the noise levels that were estimated as a sentence, and one on planes without an estimate among others with one."""
    if levels is None:
        return ()
    places = [place_text(roles, place) for place in np.ndindex(levels.shape) if levels[place] == 0]
    named = "; ".join(places) if len(places) <= MOST_LISTED else counted(len(places), "plane")
    note = f"no noise can be estimated in {named}: left as it is"
    return (levels_text(levels, roles, values), *([note] if places else []))


def note_of_packing(
    source: Source, done: str = "denoised", result: str = "The output keeps the packing"
) -> tuple[str, ...]:
    """Return a note on values that the file stores packed, by the CF conventions."""
    if not (stated := packing_text(source.attributes)):
        return ()
    return (
        f"values are packed with {stated}, which are not applied: the stored numbers are {done}, and settings such as sigma are in "
        f"their units. {result}",
    )


def notes_of_place(output: OutputPath, directory: RunDirectory) -> tuple[str, ...]:
    """Return notes on an output in an object store, or on a disk where other machines do not see locks."""
    if isinstance(output, ObjectPath):
        return (
            f"the run directory is {directory.path}: start resume, status and verify in the folder that contains it",
        )
    why = local_lock_reason(output)
    return (f"locks are not seen by other machines, so start one run of this output at a time. {why}",) if why else ()


def note_of_files(layout: Layout, requested: Output, roles: Roles) -> tuple[str, ...]:
    """Return a note on more files than automatic shards would give: why they cannot be fewer, and what may help."""
    if requested.shard != "auto" or len(layout.arrays[0].grid) <= MOST_FILES:
        return ()
    counts = [-(-n // s) for n, s in zip(layout.shape, layout.shard, strict=True)]
    planes = math.prod(counts[i] for i in roles.looped)
    axes = "".join(layout.axes[i] for i in roles.looped)
    reasons = []
    if layout.files > planes:
        reasons.append("fewer, larger shards take more run.memory_per_worker")
    if planes > MOST_FILES:
        reasons.append(
            f"each of {counted(planes, 'plane')} along {axes} has files of its own, whatever output.shard is: write output.path on "
            "a file system that bears so many"
        )
    sentence = f"the output is {counted(layout.files, 'file')} and {counted(layout.inodes, 'inode')}"
    return (f"{sentence}: {'; and '.join(reasons)}",)


def levels_text(levels: NDArray[np.float64], roles: Roles, values: tuple[float, float] | None = None) -> str:
    """Return the noise levels of the planes of an image as a sentence, in the units of the file; and relative to a range of ``values``.

    >>> levels_text(np.array([0.02, 0.2]), Roles(("c", "y", "x"), (1, 2), None))
    'noise level 0.02, 0.2 of c 0 to 1, estimated channel by channel'
    >>> levels_text(np.array([0.02]), Roles(("y", "x"), (0, 1), None), (0, 255))
    'noise level 5.1 (0.02 of the range), estimated from the whole image'
    """
    width = values[1] - values[0] if values else 1
    relative = f" ({values_text(levels, roles)} of the range)" if width != 1 else ""
    return f"noise level {values_text(levels * width, roles)}{relative}{planes_text(levels, roles)}"


def values_text(values: NDArray[np.float64], roles: Roles) -> str:
    """Return the values of the planes of an image: one for each of a few, the range for each of a few channels, or that of all.

    >>> values_text(np.array([[1.0, 2.0], [1.0, 3.0]]), Roles(("t", "c", "y", "x"), (2, 3), None))
    '1, 2 to 3'
    """
    listed = _listed(values, roles)
    parts = [values] if listed is None else np.moveaxis(values, roles.looped.index(listed), 0)
    ranges = [(f"{part.min():.4g}", f"{part.max():.4g}") for part in parts]
    return ", ".join(low if low == high else f"{low} to {high}" for low, high in ranges)


def _listed(values: NDArray[np.float64], roles: Roles) -> int | None:
    """Return the axis along which values are listed: that of a few channels, or the only one."""
    several = [axis for axis, n in zip(roles.looped, values.shape, strict=False) if n > 1]
    for axis in several:
        is_listed = roles.axes[axis] == "c" or len(several) == 1
        if is_listed and values.shape[roles.looped.index(axis)] <= MOST_LISTED:
            return axis
    return None


def place_text(roles: Roles, place: tuple[int, ...]) -> str:
    """Return the name of a plane at these indices of the looped axes; empty where there are none.

    >>> place_text(Roles(("t", "c", "y", "x"), (2, 3), None), (0, 2))
    't=0, c=2'
    """
    return ", ".join(f"{roles.axes[axis]}={index}" for axis, index in zip(roles.looped, place, strict=True))


def planes_text(values: NDArray[np.float64], roles: Roles) -> str:
    """Return which planes were estimated, to follow :func:`values_text`."""
    if values.size == 1:
        return ", estimated from the whole image"
    letters = "".join(roles.axes[i] for i, n in zip(roles.looped, values.shape, strict=True) if n > 1)
    plane = plane_word(letters)
    listed = _listed(values, roles)
    of = ""
    if listed is not None:
        of = f" of {roles.axes[listed]} 0 to {values.shape[roles.looped.index(listed)] - 1}"
    all_listed = listed is not None and len(letters) == 1
    count = "" if all_listed else f" ({counted(values.size, plane)} along {letters})"
    return f"{of}, estimated {plane} by {plane}{count}"


def plane_word(letters: str) -> str:
    """Return the word for a plane at an index of these axes."""
    return "channel" if letters == "c" else "plane"


def _metadata(layout: Layout) -> tuple[str, ...]:
    """Return a note on axes that OME-Zarr cannot have."""
    if layout.ome or fits(layout.axes):
        return ()
    return (
        f"OME-Zarr has no room for the axes {''.join(layout.axes)}, which it wants as t, c, z, y, x: the output is a plain "
        "Zarr, with scale and units in attributes of its own",
    )


def _narrowing(input_dtype: np.dtype[Any], output_dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Return a note on an output of integers that cannot hold all values of the input."""
    if output_dtype.kind not in "iu" or np.can_cast(input_dtype, output_dtype):
        return ()
    limits = np.iinfo(output_dtype)
    holds = f"output.dtype {output_dtype} holds whole numbers from {limits.min} to {limits.max}"
    if input_dtype.kind == "f":
        return (
            f"{holds}: fractions are rounded and values beyond are cut off, so of an image between 0 and 1 only 0 and 1 are left",
        )
    input_limits = np.iinfo(input_dtype)
    return (
        f"{holds}, and the input's {input_dtype} goes from {input_limits.min} to {input_limits.max}: the rest is cut off",
    )


def _decoding(source: Source, roles: Roles, grid: Grid) -> tuple[str, ...]:
    """Return a note on an input stored in chunks much larger than the blocks that are read from it."""
    window = grid.middle.window.clip(Region.whole(grid.shape))
    chunk = (1,) * (len(roles.axes) - len(source.axes)) + tuple(source.chunks)
    decoded = math.prod(
        min(-(-b // p) * p, n) - a // p * p
        for a, b, n, p in zip(window.start, window.stop, grid.shape, chunk, strict=True)
    )
    if source.mapped or decoded <= DECODED_AT_MOST * window.size:
        return ()
    if source.keeps_chunk:
        return (
            f"the input is stored in chunks of {' × '.join(map(str, source.chunks))} pixels, which can only be decoded whole: "
            f"each worker does so, and keeps the last one ({bytes_text(kept_bytes([source]))})",
        )
    return (
        f"the input is stored in chunks of {' × '.join(map(str, source.chunks))} pixels, so each block decodes "
        f"{decoded / window.size:.0f} times the pixels it needs; from a copy in smaller chunks it would read faster",
    )
