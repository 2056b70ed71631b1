"""The result of a ptychographic reconstruction as images that viewers open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError, OutputRefused
from halotile.registry import optional
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.place import check_place
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import replacing
from halotile.storage.scans.hdf5 import SUFFIXES, dataset_in, fault_of_name, opened, reading
from halotile.storage.scans.start import PROCESS, StartValues
from halotile.storage.sharded.output import Layout, ShardWriter, create_output

IMAGES = {"object": "yx", "probe": "cyx"}
"""The images of a result and their axes: modes are channels."""
RINGS = ("ring_frequency", "ring_correlation", "ring_threshold", "resolution", "resolution_bound")
"""Values of the Fourier ring correlation, where a result has it."""
CHUNK = 256
WORST = 3
"""Patterns with the greatest loss that are named."""


class PatternComparison(NamedTuple):
    """Measured patterns, and those that a reconstruction expects."""

    numbers: NDArray[np.int64]  # number of each in the file that the scan came from, (patterns,)
    measured: NDArray[np.float32]  # counts, (patterns, rows, columns); NaN in pixels that do not count
    simulated: NDArray[np.float32]  # expected counts, (patterns, rows, columns)
    loss: NDArray[np.float32]  # mean `amplitude_mse` of a pixel, (patterns,)


def check_result_place(path: Path) -> None:
    """Refuse a path to which no result can be written, or only in place of something else."""
    if fault := fault_of_name(str(path)):
        raise ConfigError(f"{fault}.")
    if not path.parent.is_dir():
        raise OutputRefused(f"{path.parent} is no folder. Make it, or write another path.")
    if path.exists() and not _is_own(path):
        raise OutputRefused(f"{path} holds no result, and is not replaced. Remove it, or write another path.")


def _is_own(path: Path) -> bool:
    """True for a result as halotile writes it: others may have an object and a probe as well."""
    with suppress(InputError), opened(str(path)) as file, reading(str(path)):
        return StartValues.OF_RESULTS["first_pixel"] in file
    return False


def is_result(path: str) -> bool:
    """Return True for a CXI file with an object and a probe."""
    if not path.endswith(SUFFIXES) or not Path(path).is_file():
        return False
    with opened(path) as file, reading(path):
        return all(name in file for name in IMAGES)


@dataclass(frozen=True)
class ScanResult:
    """The parts of a result that are drawn."""

    image: NDArray[Any]  # complex object
    probe: NDArray[Any]  # complex modes of the probe
    pixel: tuple[float, float]  # size of a pixel of the object in metres
    losses: NDArray[Any]  # mean loss of a pixel
    before: NDArray[Any]  # before, after: place of the beam on the sample along rows and columns, in metres
    after: NDArray[Any]
    scanned: tuple[slice, ...]  # rectangle of the object that the middle of the beam covered
    # frequency, correlation and threshold of each ring, the resolution in metres, and which bound it is if it is one
    rings: Mapping[str, Any] | None
    compared: PatternComparison | None = None  # patterns with the least, the median and the greatest loss

    @property
    def extent(self) -> tuple[float, float]:
        """Height and width of the object in micrometres."""
        height, width = (1e6 * n * size for n, size in zip(self.image.shape, self.pixel, strict=True))
        return height, width


def read_result(path: str) -> ScanResult:
    """Read the result of a job; errors as of :func:`export_result`."""
    _check_result(path)
    with opened(path) as file, reading(path):
        first = _values(file, f"{PROCESS}/first_pixel", 2, (2,))
        image, probe = (_values(file, name, len(axes)) for name, axes in IMAGES.items())
        middle = np.array(probe.shape[-2:]) / 2
        start, stop = (first.min(0) + middle).astype(int), (first.max(0) + middle).astype(int) + 1
        before, after = (
            _values(file, f"entry_1/sample_1/geometry_1/{name}", 2, (3,))[:, 1::-1]
            for name in ("translation_before", "translation")
        )
        rings = _all_of(file, PROCESS, RINGS)
        compared = _all_of(file, f"{PROCESS}/compared", PatternComparison._fields)
        pixel, losses, scanned = _pixel(file), _values(file, "loss", 1), tuple(map(slice, start, stop))
        patterns = PatternComparison(**compared) if compared else None
        return ScanResult(image, probe, pixel, losses, before, after, scanned, rings, patterns)


def _all_of(file: Any, group: str, names: Iterable[str]) -> dict[str, Any] | None:
    """Return these numbers of a group; None where one of them is missing."""
    found = {name: dataset_in(file, f"{group}/{name}", kinds="iufcb") for name in names}
    if any(each is None for each in found.values()):
        return None
    return {name: each[()] for name, each in found.items()}


def worst_patterns(path: str) -> dict[str, Any]:
    """Read which patterns of a result have the greatest loss, their losses, and median and mean of all; errors as of :func:`read_result`."""
    with opened(path) as file, reading(path):
        losses, numbers = (file[f"{PROCESS}/{name}"][()] for name in ("pattern_loss", "numbers"))
    used = np.flatnonzero(losses)
    worst = used[np.argsort(-losses[used], kind="stable")[:WORST]]
    found = {"worst_patterns": numbers[worst].tolist(), "worst_losses": losses[worst].tolist()}
    return found | {"median_loss": float(np.median(losses[used])), "mean_loss": float(losses[used].mean())}


def export_result(path: str, target: str, *, unwrap: bool = False, overwrite: bool = False) -> list[str]:
    """Write modulus and phase of object and probe as OME-Zarr images with their pixel size; return their paths.

    ``path``: result of a job; ``target``: the Zarr group to write: `object_modulus`, `object_phase`, `probe_modulus` and `probe_phase` in it;
    ``unwrap``: make the phase of the object go on where it passes π; ``overwrite``: replace a Zarr at that path.
    """
    _check_result(path)
    use = "phases are unwrapped with scikit-image"
    unwrapped = optional(use, "skimage.restoration", "scikit-image").unwrap_phase if unwrap else None
    check = partial(check_place, target, overwrite=overwrite, key="the path", remedy="--overwrite")
    with replacing(Path(target), check) as made:
        _write_group(made, path, unwrapped)
    return [f"{target}/{name}_{kind}" for name in IMAGES for kind in ("modulus", "phase")]


def _check_result(path: str) -> None:
    if not is_result(path):
        raise InputError(f"{path} has no object and probe: it is no result of a ptychography job.")


def _values(file: Any, name: str, ndim: int, tail: tuple[int, ...] = ()) -> NDArray[Any]:
    found = dataset_in(file, name, kinds="iufc", ndim=ndim, tail=tail)
    if found is None or not found.size:
        raise InputError(f"{file.filename} has no {name}, or nothing in it: it is no result of a job.")
    return np.asarray(found[()])


def _pixel(file: Any) -> tuple[float, float]:
    """Size of a pixel of the object in metres."""
    height, width = np.broadcast_to(file["entry_1/image_1"].attrs["pixel_size"], 2).tolist()
    if not (isinstance(height, float) and 0 < height < math.inf and 0 < width < math.inf):
        raise InputError(f"{file.filename}: pixel_size of entry_1/image_1 is {height}, {width}: no lengths.")
    return height, width


def _write_group(part: Path, path: str, unwrapped: Callable[[NDArray[Any]], Any] | None) -> None:
    part.mkdir()
    DISK.write_file(part / "zarr.json", [b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'])
    result = read_result(path)
    for (name, axes), waves in zip(IMAGES.items(), (result.image, result.probe), strict=True):
        phase = np.angle(waves)
        if unwrapped is not None and name == "object":
            phase = np.asarray(unwrapped(phase))
        for kind, pixels in (("modulus", np.abs(waves)), ("phase", phase)):
            _write(part / f"{name}_{kind}", pixels.astype(np.float32), axes, result.pixel)


def _write(path: Path, pixels: NDArray[np.float32], axes: str, pixel: Any) -> None:
    chunk = tuple(1 if axis == "c" else min(CHUNK, n) for axis, n in zip(axes, pixels.shape, strict=True))
    shard = tuple(-(-n // edge) * edge for n, edge in zip(pixels.shape, chunk, strict=True))
    scale = tuple(1.0 if axis == "c" else 1e6 * float(pixel["yx".index(axis)]) for axis in axes)
    units = tuple(None if axis == "c" else "micrometer" for axis in axes)
    layout = Layout(pixels.shape, "float32", shard, chunk, "lz4", tuple(axes), scale, units, ome=True)
    layout = layout.in_levels(pixels.shape)
    create_output(path, layout)
    ShardWriter(path, layout).write(Region.whole(pixels.shape), pixels)
