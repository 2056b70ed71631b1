"""TIFF, BigTIFF and OME-TIFF files, read strip by strip or tile by tile."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.formats._tiff_scale import pixel_sizes
from halotile.storage.formats.base import Header, Source, file_identity, identity_of, make_header
from halotile.storage.grid import Region
from halotile.storage.images.tiff_check import check_tiff
from halotile.storage.rim import Pixels
from halotile.storage.sharded.ome_metadata import OmeImage, order
from halotile.storage.stored_array import StoredArray

_PALETTE = 3
_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def claims(path: Path) -> bool:
    """Whether the file starts as a TIFF or BigTIFF does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) in _MAGICS


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - what every format has
    """One level of one series of a TIFF; ``dataset`` is the number of the series, 0 when left out."""
    return StoredArray(path, "tiff", TiffReader, level=level, series=_number(dataset), axes=axes)


def series_shapes(path: str) -> list[tuple[int, ...]]:
    """Shape of every series of a TIFF: images of different sizes in one file."""
    import tifffile

    with _opened(tifffile, path) as file:
        return [tuple(series.shape) for series in file.series]


def _number(dataset: str | None) -> int:
    if dataset is None or dataset.isdecimal():
        return int(dataset or 0)
    raise InputError(f"dataset is {dataset!r}, but the series of a TIFF have numbers. Write 0 for the first.")


class TiffReader:
    """An open TIFF.

    Uncompressed pages are memory-mapped; others go through tifffile's Zarr view, which decodes the strips
    or tiles that a region touches.
    """

    def __init__(self, path: str, *, level: int, series: int, axes: str | None) -> None:
        import tifffile

        check_tiff(path)
        file = _opened(tifffile, path)
        weakref.finalize(self, file.close)
        chosen = _pick(_pick(file.series, series, "dataset (series)").levels, level, "level")
        _refuse_missing_pages(file, chosen)
        _refuse_palette(chosen.keyframe)
        self.header = _header(file, chosen, series, level, axes, path)
        self.pixels: Any = mapped_pages(file, chosen, path)
        if self.pixels is None:
            _refuse_missing_codec(tifffile, chosen.keyframe)
            self.pixels = _zarr_view(chosen)
            self.header = _with_chunks(self.header, self.pixels.chunks)
        # Files of microscopes often hold their axes in an order that OME-Zarr, where they go to, does not know.
        self.order = tuple(range(len(self.header.axes)))
        if self.header.ome is not None and axes is None:
            self.order = order(self.header.axes)
            self.header = _reordered(self.header, self.order)

    def read(self, region: Region) -> Pixels:
        """The pixels of ``region``."""
        stored = np.argsort(self.order)
        pixels: Pixels = self.pixels[tuple(region.slices[axis] for axis in stored)]
        return pixels.transpose(self.order)


def _opened(tifffile: Any, path: str) -> Any:
    try:
        return tifffile.TiffFile(path)
    except OSError:
        raise
    except Exception as error:  # whatever tifffile stumbles over in a broken header
        raise DamagedData(f"tifffile cannot open it: {error}. Copy it again from its origin.") from error


def _pick(entries: Sequence[Any], number: int, word: str) -> Any:
    """The entry of this number."""
    if number < len(entries):
        return entries[number]
    shown = "; ".join(f"{n} {entry.shape}" for n, entry in enumerate(entries))
    raise InputError(
        f"{word} is {number}, but the TIFF has {len(entries)} of them, counted from 0. Write one of: {shown or 'none'}."
    )


def _refuse_missing_pages(file: Any, series: Any) -> None:
    """Raise where a plane lies in a file that is not here, or not whole: it would read as zeros."""
    pages = list(series.pages)
    missing = sum(page is None for page in pages)
    if missing:
        raise DamagedData(
            f"{missing} of the {len(pages)} planes of this image are in none of its files. "
            "Put all files of the set side by side."
        )
    for other in _other_files(file, series):
        check_tiff(other)


def _other_files(file: Any, series: Any) -> list[str]:
    """Paths of the other files that hold planes of the series."""
    return sorted({page.parent.filehandle.path for page in series.pages} - {file.filehandle.path})


def _refuse_palette(page: Any) -> None:
    """Raise where pixels are numbers of colours. A palette of greys in their order is an image as it is."""
    if page.photometric != _PALETTE:
        return
    colours = np.asarray([] if page.colormap is None else page.colormap, "i8")
    if colours.size and (colours == colours[0]).all() and (np.diff(colours[0]) >= 0).all():
        return
    raise InputError(
        "its pixels are numbers of colours in a palette, which cannot be averaged. Convert to RGB first, or to grey "
        "values where the palette only tints them."
    )


def _header(file: Any, series: Any, number: int, level: int, axes: str | None, path: str) -> Header:
    """What the chosen series says of itself."""
    if series.dtype is None:
        raise InputError(
            "its pixels have a number of bits that cannot be read. Save it with 8, 16 or 32 bits."
        )
    letters = str(series.axes).replace("I", "Q")  # tifffile has two letters for pages that nothing is said of
    named = list(letters if "C" in letters else letters.replace("S", "C"))
    header = make_header(
        series.shape,
        series.dtype,
        requested=axes,
        named=named,
        identity={
            "series": number,
            "level": level,
            **file_identity(path),
            **identity_of(_other_files(file, series)),
        },
        ome=OmeImage() if file.is_ome else None,
    )
    return _with_scale(header, pixel_sizes(file, number), file.series[number].shape)


def _with_scale(
    header: Header, sizes: dict[str, tuple[float, str | None]], finest: tuple[int, ...]
) -> Header:
    """The header with physical sizes, which grow where a level has fewer pixels than the finest."""
    scale, units = [], []
    finest = finest if len(finest) == len(header.shape) else header.shape
    for axis, now, full in zip(header.axes, header.shape, finest, strict=True):
        size, unit = sizes.get(axis, (1.0, None))
        scale.append(size * _ratio(full, now))
        units.append(unit)
    return replace(header, scale=tuple(scale), units=tuple(units))


def _ratio(full: int, now: int) -> float:
    """Pixels of the finest level in one of a coarser: a whole number where the shapes leave room for it."""
    whole = max(1, round(full / now))
    return whole if abs(full / whole - now) <= 1 else full / now


def _with_chunks(header: Header, chunks: Sequence[int]) -> Header:
    return replace(header, chunks=tuple(chunks), mapped=False)


def _reordered(header: Header, order: tuple[int, ...]) -> Header:
    """The header of the same pixels with their axes in another order."""
    return replace(
        header,
        shape=tuple(header.shape[axis] for axis in order),
        axes=tuple(header.axes[axis] for axis in order),
        chunks=tuple(header.chunks[axis] for axis in order),
        scale=tuple(header.scale[axis] for axis in order),
        units=tuple(header.units[axis] for axis in order),
    )


def _refuse_missing_codec(tifffile: Any, page: Any) -> None:
    """Raise when the compression needs a package that is not installed."""
    known = page.compression == 1 or page.compression in tifffile.TIFF.DECOMPRESSORS
    if not known or (page.predictor != 1 and page.predictor not in tifffile.TIFF.UNPREDICTORS):
        raise MissingPackage(
            f"this TIFF is compressed with {page.compression!r} (predictor {page.predictor!r}), which tifffile "
            'decodes with the package imagecodecs. Write: pip install "halotile[tiff]"'
        )


def _zarr_view(series: Any) -> Any:
    """tifffile's view of one level as a Zarr array: decodes what is touched."""
    import zarr

    return zarr.open_array(series.aszarr(level=0), mode="r")


class MappedPages:
    """Uncompressed pages as one array; indexing copies only the pixels asked for."""

    def __init__(
        self, path: str, dtype: np.dtype[Any], offsets: Sequence[int], shape: tuple[int, ...]
    ) -> None:
        leading, count = 0, 1
        while count < len(offsets):
            count *= shape[leading]
            leading += 1
        self._data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._dtype, self._offsets, self._shape, self._leading = dtype, offsets, shape, leading

    def __getitem__(self, slices: tuple[slice, ...]) -> Pixels:
        outer, inner = slices[: self._leading], slices[self._leading :]
        pixels = np.empty([s.stop - s.start for s in slices], self._dtype.newbyteorder("="))
        counts = self._shape[: self._leading]
        for place in itertools.product(*(range(s.stop - s.start) for s in outer)):
            index = tuple(s.start + i for s, i in zip(outer, place, strict=True))
            page = int(np.ravel_multi_index(index, counts)) if counts else 0
            pixels[place] = self._page(page)[inner]
        return pixels

    def _page(self, number: int) -> Pixels:
        """One page, still on disk."""
        shape = self._shape[self._leading :]
        return np.ndarray(shape, self._dtype, self._data.data, self._offsets[number])


def mapped_pages(file: Any, series: Any, path: str) -> MappedPages | None:
    """The series as mapped pages; None where it is compressed, or its pixels do not lie in one piece."""
    if not series.keyframe.is_final or series.transform is not None:
        return None
    offsets = _page_offsets(file, series)
    if offsets is None or math.prod(series.shape) % len(offsets):
        return None
    page_bytes = math.prod(series.shape) // len(offsets) * series.dtype.itemsize
    size_bytes = file.filehandle.size
    if max(offsets) + page_bytes > size_bytes:
        raise DamagedData(
            f"the TIFF is cut short: it has {size_bytes} bytes, and its pixels go on to byte "
            f"{max(offsets) + page_bytes}. Copy it again from its origin."
        )
    dtype = np.dtype(series.dtype).newbyteorder(file.byteorder)
    return MappedPages(path, dtype, offsets, tuple(series.shape))


def _page_offsets(file: Any, series: Any) -> list[int] | None:
    """Where each page starts: one entry when all pixels lie in one piece; None when a page does not."""
    if series.dataoffset is not None and not series.is_multifile:
        return [series.dataoffset]
    for page in series.pages:
        ends = np.add(page.dataoffsets, page.databytecounts)
        if page.parent is not file or not len(ends) or (ends[:-1] != page.dataoffsets[1:]).any():
            return None
        if page.dataoffsets[0] == 0 or sum(page.databytecounts) != series.keyframe.nbytes:
            return None
    return [page.dataoffsets[0] for page in series.pages]
