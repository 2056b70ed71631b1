"""Formats that scans come in: arrays that a user names, CXI files as cxidb.org defines them, and PtyD, as ptypy prepares scans."""

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import ConfigError, InputError
from halotile.storage.scans.known import CHARGE, KnownValues, wavelength_of
from halotile.storage.scans.scan import LONGEST, Scan, check_there, dataset_in, is_scan, load_h5py, opened, reading

FILES = (".npy", ".csv", ".txt")


class StoredPatterns:
    """Patterns of positions in a row, or of a raster row by row: (rows of positions, columns of positions, rows, columns)."""

    def __init__(self, array: Any, *, last: bool = False) -> None:
        # last: the axes of the positions come after those of the patterns
        self.array, self.last = array, last
        self.raster = array.shape[2:] if last else array.shape[:-2]
        self.shape = (math.prod(self.raster), *(array.shape[:2] if last else array.shape[-2:]))

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """Parts of some patterns; of a raster the rectangle that has them is read."""
        chosen, *pixels = index
        numbers = np.arange(self.shape[0])[chosen]
        if len(self.raster) == 1:
            return self._read(getattr(self.array, "oindex", self.array), (numbers,), pixels)  # of Zarr
        places = np.stack(np.divmod(numbers, self.raster[1]))
        (top, left), (bottom, right) = places.min(1).tolist(), places.max(1).tolist()
        block = self._read(self.array, (slice(top, bottom + 1), slice(left, right + 1)), pixels)
        return block[places[0] - top, places[1] - left]

    def _read(self, array: Any, places: tuple[Any, ...], pixels: list[slice]) -> NDArray[Any]:
        if not self.last:
            return np.asarray(array[(*places, *pixels)])
        return np.moveaxis(np.asarray(array[(*pixels, *places)]), (0, 1), (-2, -1))

    def remarks(self) -> list[tuple[str, str]]:
        """Say which axes of a raster were taken for what, and where they may be others."""
        if len(self.raster) != 2:
            return []
        where = "last" if self.last else "first"
        said = f"{_by(self.raster)} positions, the {where} two axes of {_by(self.array.shape)}"
        note = (
            "there are more rows and columns of positions than of pixels. Where the file has the pixels first and then the positions, "
            "write --positions-last"
        )
        is_odd = not self.last and self.shape[1] < self.raster[0] and self.shape[2] < self.raster[1]
        return [("raster", said), *([("note", note)] if is_odd else [])]


def _by(lengths: tuple[int, ...]) -> str:
    return " × ".join(map(str, lengths))


def read_named(container: Any, path: str, known: KnownValues) -> tuple[Scan, StoredPatterns]:
    """Read a scan whose arrays are named; ``container`` has the datasets, or is itself the patterns."""
    stored = container
    if not hasattr(container, "shape"):
        stored = _dataset(container, path, known.patterns, "--patterns")
    if stored.dtype.kind not in "iuf":
        raise InputError(
            f"{path}: the patterns are {stored.dtype}, which are not counts. Name an array of numbers: --patterns"
        )
    if len(stored.shape) not in (3, 4):
        raise InputError(
            f"{path}: the patterns have shape {list(stored.shape)}, and a scan has (positions, rows, columns), or a raster of such."
        )
    patterns = StoredPatterns(stored, last=known.positions_last)
    _check_given(path, known)
    scan = Scan(
        known.wavelength or 0.0,
        known.distance or 0.0,
        known.pixel or (0.0, 0.0),
        _positions(container, path, known, patterns),
        np.arange(patterns.shape[0]),
        mask=known.without_pixels(mask_of(container, path, known), patterns.shape[1:]),
        angles=known.angles,
        remarks=tuple(patterns.remarks()),
    )
    scan.check(patterns.shape, path)
    return scan, patterns


def mask_of(container: Any, path: str, known: KnownValues) -> NDArray[np.bool_] | None:
    """The mask of the images that are named, True where a pixel counts; None where there is none."""
    named = [(known.good, True), *((name, False) for name in known.bad_images)]
    masks = [(small_array(container, path, name) != 0) == good for name, good in named if name is not None]
    return np.asarray(np.logical_and.reduce(masks)) if masks else None


@contextmanager
def container_of(path: str) -> Iterator[Any]:
    """Open a file that holds arrays, or the patterns alone."""
    check_there(path)
    if path.endswith(".npy"):
        with reading(path):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        yield array
    elif Path(path).is_dir():
        import zarr

        try:
            found: Any = zarr.open(path, mode="r")
        except Exception as error:
            raise InputError(f"{path} is no Zarr: {error}.") from error
        yield found
    else:
        with opened(path) as file:
            yield file


def _positions(container: Any, path: str, known: KnownValues, patterns: StoredPatterns) -> NDArray[np.float64]:
    if known.positions is None:
        if len(patterns.raster) != 2 or known.step is None:
            what = "--step, or --positions" if len(patterns.raster) == 2 else "--positions"
            raise ConfigError(f"{path}: nothing says where the beam was. Write {what}.")
        return known.placed(np.indices(patterns.raster).reshape(2, -1).T * known.step / known.unit)
    if known.step is not None:
        raise ConfigError(f"{path}: --positions and --step both say where the beam was. Leave one of them out.")
    parts = [small_array(container, path, name.strip()) for name in known.positions.split(",")]
    if len(parts) == 1 and parts[0].ndim == 2 and parts[0].shape[1] in (2, 3):
        return known.placed(parts[0])
    if len(parts) == 2 and parts[0].size == parts[1].size:
        return known.placed(np.stack([part.reshape(-1) for part in parts], 1))
    shapes = " and ".join(str(list(part.shape)) for part in parts)
    raise InputError(
        f"{path}: the positions have shape {shapes}. Name an array of (positions, 2), or two arrays with a comma between their names."
    )


def small_array(container: Any, path: str, name: str) -> NDArray[Any]:
    """An array that is small, of this file or of one of its own."""
    if name.endswith(FILES) and not (hasattr(container, "keys") and name in container):
        try:
            delimiter = "," if name.endswith(".csv") else None
            load = np.load if name.endswith(".npy") else partial(np.loadtxt, delimiter=delimiter)
            array = np.asarray(load(name))
        except Exception as error:
            raise InputError(f"{name} cannot be read: {error}.") from error
    else:
        array = np.asarray(_dataset(container, path, name, "the name")[...])
    if array.dtype.kind not in "biufc":
        raise InputError(f"{path}: {name} is of type {array.dtype}. Name an array of numbers.")
    return array


def _dataset(container: Any, path: str, name: str | None, option: str) -> Any:
    """A dataset of a file by its name."""
    if not hasattr(container, "keys"):
        raise ConfigError(
            f"{path} has one array, and {name} is none of it. Write the path of a file that ends with {', '.join(FILES)}."
        )
    found = None if name is None else dataset_in(container, name, kinds="")
    if found is None:
        what = f"{path} is no CXI file" if name is None else f"{path} has no dataset {name}"
        raise ConfigError(
            f"{what}. Write for {option} one of {', '.join(_names(container)) or 'its datasets: it has none'}."
        )
    return found


def _names(container: Any) -> list[str]:
    """Names of all datasets, as far as they fit into a message."""
    found: list[str] = []
    if hasattr(container, "visititems"):
        container.visititems(lambda name, item: found.append(name) if hasattr(item, "shape") else None)
    else:
        found = [str(name) for name, _ in container.arrays()]
    return found if len(found) <= 20 else [*found[:20], "..."]


def _check_given(path: str, known: KnownValues) -> None:
    given = {"--energy": known.wavelength, "--distance": known.distance, "--pixel": known.pixel}
    if missing := [option for option, value in given.items() if value is None]:
        raise ConfigError(f"{path} does not say the geometry of the scan. Write {', '.join(missing)}.")


ENTRY, INSTRUMENT = "entry_1", "entry_1/instrument_1"
DETECTOR, SOURCE = f"{INSTRUMENT}/detector_1", f"{INSTRUMENT}/source_1"
GOOD = (0, 0x1000)  # flags of a mask that a pixel may have and count: none, and that it has a signal


SHORTEST = 1e-13  # wavelength in metres of photons and electrons that no scan is made with
ALIKE = 1.02  # largest ratio of two values that stand for one
# Options with which a value is given that a file lacks, by the end of its name there.
OPTIONS = {"energy": "--energy", "distance": "--distance", "_pixel_size": "--pixel"}


def encode_cxi(
    contents: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]], links: Mapping[str, str]
) -> bytes:
    """Return the content of a CXI file.

    ``contents``: arrays, numbers and text by their places in the entry; with a leading slash, in the file; ``attributes``: attributes of groups in
    the entry; ``links``: short names at the root of the file, and the places in the entry that they lead to.

    >>> encode_cxi({"image_1/data": np.ones(2)}, {"image_1": {"pixel_size": 1e-9}}, {"object": "image_1/data"})[1:4]
    b'HDF'
    """
    h5py = load_h5py()
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["cxi_version"] = 160
        entry = file.create_group(ENTRY)
        for name, value in contents.items():
            entry[name] = value
        for name, values in attributes.items():
            entry[name].attrs.update(values)
        for name, place in links.items():
            file[name] = h5py.SoftLink(f"/{ENTRY}/{place}")
    return content.getvalue()


def holds_scan(file: Any) -> bool:
    """Return True for a file with patterns and translations of the sample."""
    has_patterns = any(name in file for name in (f"{ENTRY}/data_1/data", f"{DETECTOR}/data"))
    return has_patterns and _shot(file, "translation") is not None


class FirstModule:
    """The patterns of a detector of one module, (positions, 1, rows, columns), without its axis."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, array.dtype
        self.shape = (array.shape[0], *array.shape[2:])

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Any:
        """Parts of some patterns."""
        chosen, rows, columns = index
        return self.array[chosen, 0, rows, columns]


def read_cxi(file: Any, known: KnownValues = KnownValues()) -> tuple[Scan, Any]:
    """Read a scan and find its patterns in an open file; what is known replaces what the file says.

    The columns of ``basis_vectors`` are the steps on the detector from row to row and from column to column. The translations are those
    of the sample: the beam moves the other way over it.
    """
    patterns = _first(file, f"{ENTRY}/data_1/data", f"{DETECTOR}/data", kinds="iuf")
    is_module = patterns.ndim == 4 and patterns.shape[1] == 1  # one of a detector
    if is_module:
        patterns = FirstModule(patterns)
    if len(patterns.shape) != 3:
        raise InputError(
            f"{file.filename}: the patterns have shape {list(patterns.shape)}, and a scan has (positions, rows, columns)."
        )
    translation = _shot(file, "translation")
    if translation is None or translation.ndim != 2 or translation.shape[1] not in (2, 3):
        raise InputError(f"{file.filename} has no translation of the sample, (positions, 3), in metres.")
    basis = _basis(file, known)
    pixel = np.linalg.norm(basis, axis=0) if known.pixel is None else np.array(known.pixel)
    steps = np.zeros((len(translation), 3))
    steps[:, : translation.shape[1]] = translation
    positions = known.placed(-steps @ np.linalg.pinv(basis / np.linalg.norm(basis, axis=0)).T)
    named = mask_of(file, file.filename, known)
    mask, dark = (_of_detector(file, name, is_module) for name in ("mask", "data_dark"))
    intensities = _shot(file, "intensities")
    if named is None and mask is not None:
        named = np.isin(mask, GOOD)
    named = known.without_pixels(named, patterns.shape[1:])
    scan = Scan(
        known.wavelength or _wavelength(file),
        known.distance or _alike(file, _first(file, f"{DETECTOR}/distance")),
        (float(pixel[0]), float(pixel[1])),
        positions,
        np.arange(len(positions)),
        mask=named,
        angles=known.angles,
        background=None if dark is None else _mean_of_frames(dark, named),
        intensities=None if intensities is None else np.asarray(intensities, np.float64).reshape(-1),
    )
    scan.check(patterns.shape, file.filename)
    return scan, patterns


def _of_detector(file: Any, name: str, is_module: bool) -> NDArray[Any] | None:
    """An array of the detector if there is one, without the axis of its modules."""
    if (found := dataset_in(file, f"{DETECTOR}/{name}")) is None:
        return None
    array = np.asarray(found[()])
    return array[..., 0, :, :] if is_module and array.ndim > 2 and array.shape[-3] == 1 else array


def _first(file: Any, *names: str, kinds: str = "biuf") -> Any:
    if (found := dataset_in(file, *names, kinds=kinds)) is None:
        raise _missing(file, names[0])
    return found


def _option(name: str) -> str:
    """The option that gives a value; empty for one that no option gives."""
    return next((flag for end, flag in OPTIONS.items() if name.endswith(end)), "")


def _missing(file: Any, name: str) -> InputError:
    remedy = f" Write it as {option}." if (option := _option(name)) else ""
    return InputError(f"{file.filename} has no {name}, which a scan in a CXI file has.{remedy}")


def _shot(file: Any, name: str) -> NDArray[Any] | None:
    """Values of each pattern, which files have in one of three places."""
    groups = f"{ENTRY}/data_1", f"{ENTRY}/sample_1/geometry_1", DETECTOR
    found = dataset_in(file, *(f"{group}/{name}" for group in groups))
    return None if found is None else np.asarray(found[()], np.float64)


def _of_source(file: Any, name: str) -> float:
    """A value of the source; 0 where it is not known."""
    found = dataset_in(file, f"{SOURCE}/{name}")
    return 0.0 if found is None else _alike(file, found)


def _alike(file: Any, dataset: Any) -> float:
    """A number, of any shape: it may be there for each pattern."""
    values, name = np.asarray(dataset[()], np.float64), dataset.name.strip("/")
    if values.size and not abs(values).max() > ALIKE * abs(values).min():
        return float(values.mean())
    option = _option(name) or "--energy"
    kind = {"--energy": "wavelength", "--pixel": "pixel size"}.get(option, "distance")
    said = f"from {values.min():g} to {values.max():g}" if values.size else "empty"
    raise InputError(
        f"{file.filename}: {name} is {said}, and all patterns of a scan have one {kind}. "
        f"Write the one that is right as {option}, or leave out the others in the file."
    )


def _wavelength(file: Any) -> float:
    said, energy = (_of_source(file, name) for name in ("wavelength", "energy"))
    by_energy = [wavelength_of(energy / CHARGE, electrons=each) for each in (False, True) if energy > 0]
    if not said and not by_energy:
        raise _missing(file, f"{SOURCE}/wavelength or {SOURCE}/energy")
    wavelength = said or by_energy[0]
    if not SHORTEST < wavelength < LONGEST:
        raise InputError(
            f"{file.filename}: the wavelength is {wavelength:g} m by {SOURCE}, whose wavelength is in metres and whose energy in joules. Write it as --energy."
        )
    if by_energy and not any(wavelength / ALIKE < length < wavelength * ALIKE for length in by_energy):
        raise InputError(
            f"{file.filename}: the wavelength is {wavelength:g} m, and by the energy it is {by_energy[0]:g} m. Write the one that is right as --energy."
        )
    return wavelength


def _basis(file: Any, known: KnownValues) -> NDArray[np.float64]:
    """The steps between pixels, (3, 2) in metres; where only sizes are known, rows go down and columns to the left, as cxidb.org draws them."""
    if (found := dataset_in(file, f"{DETECTOR}/basis_vectors")) is not None:
        basis = np.asarray(found[()], np.float64)
        basis = basis.T if basis.shape == (2, 3) else basis
        if basis.shape != (3, 2) or not (np.linalg.norm(basis, axis=0) > 0).all():
            raise InputError(
                f"{file.filename}: a basis vector of the detector has no length, or not three parts: correct {DETECTOR}/basis_vectors."
            )
        return basis
    places = (f"{DETECTOR}/{axis}_pixel_size" for axis in "yx")
    height, width = known.pixel or (_alike(file, _first(file, place)) for place in places)
    return np.array([[0, -width], [-height, 0], [0, 0]])


def _mean_of_frames(dark: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    """The mean of dark frames; 0 in pixels that do not count, which detectors mark with -1 or NaN."""
    mean = np.asarray(dark.mean(0) if dark.ndim == 3 else dark, np.float32)
    return mean if mask is None or mask.shape != mean.shape else np.where(mask, mean, np.float32(0))


PROBES = (f"{SOURCE}/illumination", f"{SOURCE}/probe")  # usual names of a probe in CXI files
SUFFIXES = (".cxi", ".ptyd", ".h5", ".hdf5")

FARTHEST = 1.0  # metres between two positions of a scan


@dataclass(frozen=True)
class FoundScan:
    """A scan in an open file."""

    scan: Scan  # everything but the patterns
    patterns: Any  # read some at once
    center: tuple[int, int] | None = None  # pixel of the beam, where it is not the middle


@contextmanager
def opened_scan(path: str, known: KnownValues = KnownValues()) -> Iterator[FoundScan]:
    """Open the scan in a file or a Zarr."""
    if is_scan(path) and known.patterns is None:
        raise InputError(
            f"{path} is a scan of halotile already: there is nothing to convert. `recon-cli plan` and `run` take it as the input.path of a "
            f"`job: ptychography`; `recon-cli info {path}` shows a configuration. To crop or bin it, convert its original file with these options."
        )
    with container_of(path) as container:
        with reading(path):
            has_names = hasattr(container, "keys") and known.patterns is None
            of_cxi = has_names and (path.endswith(".cxi") or holds_scan(container))
            of_ptyd = has_names and not of_cxi and is_ptyd(container)
            if (of_cxi or of_ptyd) and (known.positions or known.step):
                raise ConfigError(
                    f"{path} says where the beam was. Leave --positions and --step out, or name --patterns as well: then nothing else is read of it."
                )
            if known.positions_last and (of_cxi or of_ptyd):
                raise ConfigError(
                    f"{path} has its positions first. Leave --positions-last out, or name --patterns as well."
                )
            if of_cxi:
                found = FoundScan(*read_cxi(container, known))
            elif of_ptyd:
                found = FoundScan(*read_ptyd(container, known), center_of(container))
            else:
                found = FoundScan(*read_named(container, path, known))
            if not len(found.scan.positions):
                raise InputError(f"{path} has no patterns: nothing was recorded, or another dataset has them.")
            if (extent := float(np.ptp(found.scan.positions, axis=0).max())) > FARTHEST:
                raise InputError(
                    f"{path}: the positions are {extent:.4g} m apart at most, and those of a scan are within {FARTHEST:g} m. Write their unit, such as --position-unit um, or correct the wrong one."
                )
            found = replace(found, scan=_with_probe(found, container, path, known))
        yield found


def _with_probe(found: FoundScan, container: Any, path: str, known: KnownValues) -> Scan:
    """The scan with the first guess of its probe that is named, or with a remark that the file has one."""
    if known.probe is None:
        there = [name for name in PROBES if hasattr(container, "keys") and name in container]
        text = "the file has a probe: --probe {} lets reconstructions begin with it"
        remarks = [("note", text.format(name)) for name in there[:1]]
        return replace(found.scan, remarks=(*found.scan.remarks, *remarks))
    values = small_array(container, path, known.probe)
    modes = values[None] if values.ndim == 2 else values
    _, *pattern = found.patterns.shape
    if modes.ndim != 3 or list(modes.shape[1:]) != pattern or not np.isfinite(modes).all() or not modes.any():
        raise InputError(
            f"{path}: {known.probe} has shape {list(values.shape)}, and a probe is finite, not 0 everywhere, and has {pattern}, or (modes, rows, columns). Leave --probe out: a guess is made."
        )
    return replace(found.scan, probe=modes.astype(np.complex64))


def knows_scan(path: str) -> bool:
    """Return True for a file whose format says that it is a scan."""
    if not path.endswith(SUFFIXES) or not Path(path).is_file():
        return False
    with container_of(path) as container, reading(path):
        return holds_scan(container) or is_ptyd(container)


class JoinedPatterns:
    """The patterns of some arrays, (positions, rows, columns), one after the other."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(array) for array in arrays])
        self.dtype = np.result_type(*(array.dtype for array in arrays))
        self.shape = (int(self.ends[-1]), *arrays[0].shape[1:])

    def __getitem__(self, index: tuple[Any, slice, slice]) -> NDArray[Any]:
        """Parts of some patterns of rising numbers."""
        chosen, rows, columns = index
        numbers = np.arange(self.shape[0])[chosen]
        within = np.searchsorted(self.ends, numbers, "right")
        starts = self.ends - [len(array) for array in self.arrays]
        parts = [self.arrays[n][numbers[within == n] - starts[n], rows, columns] for n in np.unique(within)]
        return np.concatenate(parts).astype(self.dtype, copy=False)


def is_ptyd(file: Any) -> bool:
    """Return True for an open HDF5 file with chunks of patterns."""
    return "meta" in file and "chunks/0/data" in file


def read_ptyd(file: Any, known: KnownValues) -> tuple[Scan, JoinedPatterns]:
    """Read a scan and find its patterns; frames without a position are refused."""
    chunks = sorted(filter(str.isdecimal, file["chunks"]), key=int)
    pattern = _of_chunk(file, chunks[0], "data", 3).shape[1:]
    patterns = JoinedPatterns([_of_chunk(file, chunk, "data", 3, pattern) for chunk in chunks])
    columns = _of_chunk(file, chunks[0], "positions", 2).shape[1:]
    places = [_of_chunk(file, chunk, "positions", 2, columns)[()] for chunk in chunks]
    positions = np.concatenate(places).astype(np.float64)
    height, width = known.pixel or _meta(file, "psize", 2)
    scan = Scan(
        known.wavelength or wavelength_of(1e3 * _meta(file, "energy")[0]),
        known.distance or _meta(file, "distance")[0],
        (float(height), float(width)),
        known.placed(positions),
        np.arange(len(positions)),
        mask=known.without_pixels(_mask(file, chunks, pattern, known), pattern),
        angles=known.angles,
    )
    scan.check(patterns.shape, file.filename)
    return scan, patterns


def center_of(file: Any) -> tuple[int, int] | None:
    """The pixel of the beam, where the file says it and it is not the middle."""
    said = dataset_in(file, "meta/center", kinds="")
    if said is None or (said.dtype.kind in "OS" and said.size == 1 and said[()] == b"fftshift"):  # the middle
        return None
    center = [round(value) for value in _meta(file, "center", 2)]
    shape = _of_chunk(file, "0", "data", 3).shape[1:]
    return None if center == [n // 2 for n in shape] else (center[0], center[1])


def _of_chunk(file: Any, chunk: str, name: str, ndim: int, tail: tuple[int, ...] = ()) -> Any:
    found = dataset_in(file, f"chunks/{chunk}/{name}", kinds="iuf", ndim=ndim, tail=tail)
    if found is None:
        raise InputError(f"{file.filename} has no chunks/{chunk}/{name}, or a file that it links is not there.")
    return found


def _meta(file: Any, name: str, count: int = 1) -> list[float]:
    """Finite numbers among the metadata; there may be one for all."""
    option = "pixel" if name == "psize" else name
    if (found := dataset_in(file, f"meta/{name}")) is None:
        raise InputError(f"{file.filename} has no meta/{name}. Write --{option}.")
    values = np.asarray(found[()], np.float64).ravel()
    is_odd = values.size not in (1, count) or not np.isfinite(values).all()
    if is_odd or (name == "energy" and not values.all()):
        raise InputError(f"{file.filename}: meta/{name} is {values.tolist()}. Write --{option}.")
    return [float(value) for value in np.broadcast_to(values, count)]


def _mask(file: Any, chunks: list[str], pattern: tuple[int, ...], known: KnownValues) -> NDArray[Any] | None:
    """True where the weight is above 0 in every pattern."""
    if known.good or known.bad_images:
        return mask_of(file, file.filename, known)
    counts = None
    for chunk in chunks:
        name = f"chunks/{chunk}/weights"
        if getattr(file.get(name), "ndim", 0) == 3:
            counts = np.ones(pattern, bool) if counts is None else counts
            for frame in dataset_in(file, name, ndim=3, tail=pattern):
                counts &= frame > 0
    if counts is not None:
        return counts
    for name in ("meta/weight2d", "info/weight2d"):
        found = dataset_in(file, name, kinds="")
        if found is not None and found.ndim == 2 and found.dtype.kind in "biuf":
            return np.asarray(found[()] > 0)
    return None
