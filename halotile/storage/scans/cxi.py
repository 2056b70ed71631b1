"""Scans in CXI files, as cxidb.org defines them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.scans.hdf5 import dataset_in, load_h5py
from halotile.storage.scans.known import CHARGE, KnownValues, wavelength_of
from halotile.storage.scans.named import mask_of
from halotile.storage.scans.scan import LONGEST, Scan

ENTRY, INSTRUMENT = "entry_1", "entry_1/instrument_1"
DETECTOR, SOURCE = f"{INSTRUMENT}/detector_1", f"{INSTRUMENT}/source_1"
GOOD = (0, 0x1000)
"""Flags of a mask that a pixel may have and count: none, and that it has a signal."""


SHORTEST = 1e-13
"""Wavelength in metres of photons and electrons that no scan is made with."""
ALIKE = 1.02
"""Largest ratio of two values that stand for one."""
OPTIONS = {"energy": "--energy", "distance": "--distance", "_pixel_size": "--pixel"}
"""Options with which a value is given that a file lacks, by the end of its name there."""


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
