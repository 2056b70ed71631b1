"""A ptychographic scan in a Zarr group: patterns, positions and geometry; HDF5 files of scans; values that a reconstruction begins with; and its result as images that viewers open."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, DamagedData, HalotileError, InputError, OutputRefused
from halotile.registry import optional
from halotile.storage.arrays import Source, open_source
from halotile.storage.disk.durable import DISK
from halotile.storage.disk.place import check_place
from halotile.storage.formats.parts.hdf5_files import other_files
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory, replacing
from halotile.storage.sharded.output import Layout, ShardWriter, create_output
from halotile.storage.sharded.ownership import stored_digest
from halotile.storage.stored_array import read_error

SUFFIXES = (".cxi", ".h5", ".hdf5")  # ends of the names of results


def fault_of_name(path: str) -> str | None:
    """Return what is wrong with the name of a result, and what to write."""
    if path.endswith(SUFFIXES):
        return None
    return f"{path} does not end with {', '.join(SUFFIXES)}; write one of them"


def load_h5py() -> Any:
    """Return the module."""
    return optional("a CXI file is read and written with h5py", "h5py", '"halotile[hdf5]"')


def check_there(path: str) -> None:
    """Refuse a path where nothing is, or nothing yet."""
    if not os.path.exists(path):
        raise InputError(f"there is no file {path}. Write the path of one that is there.")
    run = RunDirectory.beside(Path(path).absolute()).path
    if run.is_dir() and os.path.isfile(path) and not os.path.getsize(path):
        raise InputError(
            f"{path} is empty: the run in {run} has not written it yet. Wait for it, or go on with `recon-cli resume {shlex.quote(str(run))}`."
        )


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an HDF5 file for reading."""
    check_there(path)
    h5py = load_h5py()
    if os.path.isfile(path) and not h5py.is_hdf5(path):
        raise InputError(f"{path} is no HDF5 file. Write the path of one.")
    with reading(path):
        file = h5py.File(path, "r")
    with file:
        yield file


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert everything that h5py, zarr or NumPy raise for the contents of a file."""
    try:
        yield
    except (HalotileError, MemoryError):
        raise
    except Exception as error:
        raise read_error(f"{path}: it cannot be read", error) from error


def dataset_in(file: Any, *names: str, kinds: str = "biuf", ndim: int | None = None, tail: tuple[int, ...] = ()) -> Any:
    """The first dataset that an HDF5 file or a Zarr group has under some names; None where there is none.

    ``kinds``: kinds of NumPy types that it may have; empty: any; ``ndim``: number of its axes; ``tail``: lengths of the last ones.
    """
    is_hdf5 = hasattr(file, "filename")
    path = os.path.abspath(file.filename) if is_hdf5 else file.store_path
    for name in names:
        found = file.get(name)  # None also for a link that leads nowhere
        if found is None:
            link = file.get(name, getlink=True) if is_hdf5 and name in file else None
            if missing := getattr(link, "filename", None):
                raise InputError(f"{path}: {name} is in another file, {missing}, which cannot be opened.")
            continue
        shape = getattr(found, "shape", None)
        right = shape is not None and ndim in (None, len(shape)) and shape[len(shape) - len(tail) :] == tail
        if not right or (kinds and found.dtype.kind not in kinds):
            what = "it is a group, or empty" if shape is None else f"it has {found.dtype}, {list(shape)}"
            lengths = ", ".join(["n"] * ((ndim or 0) - len(tail)) + [str(length) for length in tail])
            axes = "" if ndim is None else f" of shape [{lengths}]"
            raise InputError(f"{path}: {name} is no array of numbers{axes}: {what}.")
        if is_hdf5 and (found.is_virtual or found.external):
            other_files(found.file, os.path.abspath(found.file.filename), found.name)
        return found
    return None


MARK = "halotile_scan"  # attribute of the group, with the version of this layout
VERSION = 1
PATTERNS = "patterns"
MEAN, MAXIMUM = "mean", "maximum"  # arrays for inspection: over all patterns
# Options of `recon-cli convert` that give a length.
LENGTHS = {"wavelength": "energy", "distance": "distance", "pixel": "pixel"}
SHORTEST, LONGEST = 1e-15, 1e-3  # wavelengths in metres beyond which nothing has one that diffracts
ARRAYS = {
    "positions": ("f", 2), "numbers": ("iu", 1), "mask": ("b", 2), "background": ("f", 2), "probe": ("c", 3), "intensities": ("f", 1)
}  # fmt: skip
"""Arrays besides the patterns: kinds of their types, and numbers of axes."""
OPTIONAL = tuple(ARRAYS)[2:]
VALUES = ("wavelength", "distance", "pixel", "angles", "full", "remarks")  # attributes with the other fields of a scan
# Attributes with the digest of the files of the patterns, and with those of the other arrays by their names.
SHARDS, DIGESTS = "shards", "arrays"


def digest_of_arrays(arrays: Mapping[str, NDArray[Any] | None], start: str = "") -> str:
    """Digest of values by their names."""
    found = hashlib.sha256(start.encode())
    for name, array in arrays.items():
        found.update(f"{name} {None if array is None else array.shape}".encode())
        found.update(b"" if array is None else array.tobytes())
    return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Scan:
    """Everything about a scan but its patterns."""

    wavelength: float  # wavelength, distance: of the light, and from the sample to the detector, in metres
    distance: float
    pixel: tuple[float, float]  # size of a pixel of the detector along rows and columns, in metres
    # place of the beam on the sample along rows and columns of the detector, in metres
    positions: NDArray[np.float64]
    numbers: NDArray[np.int64]  # number of each pattern in the file that it came from
    mask: NDArray[np.bool_] | None = None  # true where a pixel of the detector counts
    background: NDArray[np.float32] | None = None  # counts without a beam
    probe: NDArray[np.complex64] | None = None  # guess of the complex wave on the sample
    intensities: NDArray[np.float64] | None = None  # intensity of the beam at each position, relative to any
    # true where the pixels were given as angles, so that the distance is not known: it is 1 m, and the pixels are
    # their sizes there
    angles: bool = False
    # pixels that the mask leaves out since they reach the largest number of their type in a pattern
    full: int = 0
    # what a user should know of the patterns: a label and a text each
    remarks: tuple[tuple[str, str], ...] = ()

    def without_arrays(self) -> Scan:
        """Return the geometry alone."""
        no_places = np.empty((0, 2)), np.empty(0, np.int64)
        return Scan(self.wavelength, self.distance, self.pixel, *no_places, angles=self.angles)

    def digest(self) -> str:
        """Digest of every value."""
        start = json.dumps([self.wavelength, self.distance, self.pixel])
        return digest_of_arrays({name: getattr(self, name) for name in ARRAYS}, start)

    def check(self, shape: tuple[int, ...], path: str) -> None:
        """Refuse values that cannot be, for patterns of a shape (positions, rows, columns)."""
        lengths = {"wavelength": self.wavelength, "distance": self.distance, "pixel": min(self.pixel)}
        for name, length in lengths.items():
            if not 0 < length < np.inf:
                raise InputError(
                    f"{path}: the {name} is {length:g} m, which is no length. Give the right one: --{LENGTHS[name]}."
                )
        if not SHORTEST < self.wavelength < LONGEST:
            raise InputError(
                f"{path}: the wavelength is {self.wavelength:g} m, and that of photons and electrons is from 1 fm to 1 mm. Write the right one as --energy."
            )
        count, *pattern = shape
        expected = {"positions": [count, 2], "numbers": [count], "intensities": [count]}
        expected |= {"mask": pattern, "background": pattern}
        for name, wanted in expected.items():
            if (array := getattr(self, name)) is None:
                continue
            if list(array.shape) != wanted:
                raise InputError(
                    f"{path}: {name} has shape {list(array.shape)}, and {count:,} patterns of {pattern} need {wanted}."
                )
            if not np.isfinite(array).all():
                raise InputError(f"{path}: {name} has values that are not finite.")
        if self.probe is not None and self.probe.shape[-2:] != tuple(pattern):
            raise InputError(
                f"{path}: the probe has shape {list(self.probe.shape)}, and the patterns {pattern}. Leave it out: a guess is made."
            )
        if self.mask is not None and not self.mask.any():
            raise InputError(f"{path}: the mask leaves no pixel that counts.")
        if self.intensities is not None and not (self.intensities > 0).all():
            raise InputError(f"{path}: an intensity of the beam is not above 0.")
        if self.background is not None and (self.background < 0).any():
            raise InputError(f"{path}: the background has values below 0.")


def is_scan(path: str | Path) -> bool:
    """Return True for the group of a scan."""
    try:
        attributes = json.loads((Path(path) / "zarr.json").read_bytes()).get("attributes", {})
        return MARK in attributes
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def write_values(part: Path, scan: Scan, source: str, summary: Mapping[str, NDArray[Any]]) -> None:
    """Write everything of a scan into the group of its patterns, and the arrays for inspection."""
    import zarr

    attributes = {name: getattr(scan, name) for name in VALUES} | {"source": os.path.basename(source)}
    attributes |= {MARK: VERSION, SHARDS: stored_digest(part / PATTERNS).hex()}
    group = zarr.open_group(str(part), mode="a", attributes=attributes)
    for name, array in {**{name: getattr(scan, name) for name in ARRAYS}, **summary}.items():
        if array is not None:
            group.create_array(name, data=np.asarray(array))
    group.attrs[DIGESTS] = _digests_of(_arrays_in(group))


def _arrays_in(group: Any) -> dict[str, NDArray[Any]]:
    """Read every array of a scan but its patterns."""
    expected = ARRAYS | dict.fromkeys((MEAN, MAXIMUM), ("f", 2))
    found = {name: dataset_in(group, name, kinds=kind, ndim=n) for name, (kind, n) in expected.items()}
    return {name: array[:] for name, array in found.items() if array is not None}


def _digests_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Digest of each array: of its type, its shape and its values."""
    kinds = {name: f"{array.dtype.str} {array.shape}".encode() for name, array in arrays.items()}
    return {name: hashlib.sha256(kinds[name] + arrays[name].tobytes()).hexdigest() for name in arrays}


def _check_digests(arrays: Mapping[str, NDArray[Any]], expected: Any, path: str) -> None:
    """Refuse arrays other than those that were converted; older versions noted no digests."""
    if not isinstance(expected, Mapping):
        return
    found = _digests_of(arrays)
    if wrong := [name for name in {**expected, **found} if found.get(name) != expected.get(name)]:
        raise DamagedData(
            f"{path}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not what the conversion wrote: files are lost, or something "
            "changed them. Restore them from a copy, or convert the scan again."
        )


def open_summary(path: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read the mean and the maximum of all patterns, (rows, columns) each; errors as of :func:`open_scan`."""
    import zarr

    _, patterns = open_scan(path)
    with reading(path):
        group = zarr.open_group(path, mode="r")
        found = [dataset_in(group, name, kinds="f") for name in (MEAN, MAXIMUM)]
        mean, maximum = (np.zeros(0, np.float32) if each is None else each[:] for each in found)
    if {mean.shape, maximum.shape} != {patterns.shape[1:]}:
        raise InputError(
            f"{path} is of an earlier halotile, which did not keep the mean of the patterns, or it is damaged. Convert it again."
        )
    return mean, maximum


def open_scan(path: str) -> tuple[Scan, Source]:
    """Open a scan and its patterns, (positions, rows, columns)."""
    import zarr

    if not is_scan(path):
        is_file = Path(path).is_file()
        source, target = (path, f"{Path(path).stem}.zarr") if is_file else ("scan.cxi", path)
        raise InputError(f"{path} is no scan in a Zarr. Make one of a file: recon-cli convert {source} {target}")
    with reading(path):
        group = zarr.open_group(path, mode="r")
        attributes: dict[str, Any] = dict(group.attrs)
        arrays = _arrays_in(group)
    if attributes[MARK] != VERSION:
        raise InputError(
            f"{path} is a scan of version {attributes[MARK]}, and this halotile reads {VERSION}. Convert it again."
        )
    _check_digests(arrays, attributes.get(DIGESTS), path)
    try:
        height, width = map(float, attributes["pixel"])
        scan = Scan(
            float(attributes["wavelength"]),
            float(attributes["distance"]),
            (height, width),
            angles=bool(attributes.get("angles")),
            full=int(attributes.get("full", 0)),
            remarks=tuple((str(label), str(text)) for label, text in attributes.get("remarks", ())),
            **{name: arrays[name] for name in ARRAYS if name in arrays},
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedData(f"{path}: its attributes are damaged. Convert the scan again.") from None
    folder = f"{path.rstrip('/')}/{PATTERNS}"
    patterns = open_source(folder)
    scan.check(patterns.shape, path)
    digest = stored_digest(folder, "or convert the scan again.").hex()
    if digest != attributes.get(SHARDS, digest):
        raise DamagedData(f"{folder} has files of another scan or another conversion. Convert it again.")
    return scan, patterns


PROCESS = "entry_1/process_1"


@dataclass(frozen=True, eq=False)
class StartValues:
    """Values to begin with; None: the first guess. Values of patterns are in the order of the file that the scan came from."""

    object: NDArray[Any] | None = None  # complex
    obj: NDArray[Any] | None = None  # same with margins of any width around the scan, as CDTools writes it
    probe: NDArray[Any] | None = None  # complex; beside an object in roots of counts, alone in any unit
    first_pixel: NDArray[Any] | None = None  # place of each pattern on the object in pixels
    amplitude: NDArray[Any] | None = None  # amplitude of the beam, relative
    background: NDArray[Any] | None = None  # counts without a beam
    variations: NDArray[Any] | None = None  # modes that are added to the first one
    shares: NDArray[Any] | None = None  # their shares in each pattern

    OF_ANY: ClassVar[dict[str, str]] = {name: name for name in ("object", "obj", "probe")}
    # left alone in other files, which may have them in another order
    OF_RESULTS: ClassVar[dict[str, str]] = {
        "first_pixel": f"{PROCESS}/first_pixel",
        "amplitude": f"{PROCESS}/amplitude",
        "background": "entry_1/instrument_1/detector_1/background",
        "variations": f"{PROCESS}/probe_variations",
        "shares": f"{PROCESS}/probe_shares",
    }

    @classmethod
    def read(cls, path: str) -> StartValues:
        """Read what a file has of them."""
        with opened(path) as file, reading(path):
            is_result = cls.OF_RESULTS["first_pixel"] in file
            places = cls.OF_ANY | (cls.OF_RESULTS if is_result else {})
            there = {name: dataset_in(file, place, kinds="iufc") for name, place in places.items()}
            if is_result:
                del there["obj"]  # its object by another name
            found = {name: np.asarray(each[()]) for name, each in there.items() if each is not None}
        if not cls.OF_ANY.keys() & found.keys():
            raise InputError(f"{path} has neither an object nor a probe to begin with, under these names.")
        for name, values in found.items():
            if not np.isfinite(values).all():
                raise InputError(f"{path}: its {name} has values that are not finite.")
        for name in cls.OF_ANY.keys() & found.keys():
            if not found[name].any():
                raise InputError(
                    f"{path}: its {name} is 0 everywhere, which no epoch would change. Give another one, or leave it out."
                )
        if "obj" in found and (found["obj"].ndim != 2 or "object" in found):
            raise InputError(
                f"{path}: its obj has shape {list(found['obj'].shape)}, and a start is one object, (rows, columns). Write it as object, or leave the other out."
            )
        if "probe" in found and found["probe"].ndim == 2:
            found["probe"] = found["probe"][None]
        return cls(**found)

    def check(self, path: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse values of other shapes than these; a probe has any number of modes."""
        for name, wanted in shapes.items():
            values = getattr(self, name)
            found = () if values is None else values.shape[1:] if name == "probe" else values.shape
            if values is not None and found != wanted:
                raise InputError(
                    f"{path}: its {name} has shape {list(values.shape)}, and this reconstruction has {list(wanted)}. Begin with a result of the same "
                    "scan, margin, oversampling and variations, or leave input.start out."
                )

    def digest(self) -> str:
        """Digest of every value."""
        return digest_of_arrays(vars(self))


IMAGES = {"object": "yx", "probe": "cyx"}  # the images of a result and their axes: modes are channels
# Values of the Fourier ring correlation, where a result has it.
RINGS = ("ring_frequency", "ring_correlation", "ring_threshold", "resolution", "resolution_bound")
CHUNK = 256
WORST = 3  # patterns with the greatest loss that are named


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
