"""TIFF, BigTIFF and OME-TIFF files, decoded strip by strip or tile by tile."""

import itertools
import logging
import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError, MissingPackage
from halotile.storage.formats.base import OPACITY_REMARK, Header, Source, file_identity, make_header, starts_with
from halotile.storage.formats.parts import tiff_tags
from halotile.storage.formats.parts.tiff_tags import MASK, Sizes, check_tiff, has_opacity, split_series
from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.storage.sharded.ome_metadata import OmeImage, order
from halotile.storage.spacing import converted, downsampling
from halotile.storage.stored_array import StoredArray

ALL = "all"  # dataset of the series of equal shape as one image
_MINISWHITE, _UPRIGHT = 0, 1
_PALETTE = 3
_JPEG, _BAND_BY_BAND = 7, 2
MOST_LISTED = 4  # series that are listed one by one
_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def claims(path: Path) -> bool:
    """Return True for a TIFF or BigTIFF signature at the start."""
    return starts_with(path, *_MAGICS)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open one level of one series of a TIFF; ``dataset`` is its number, 0 by default, or ``all`` for a stack of them, or ``mask``."""
    if dataset is not None and dataset not in (ALL, MASK) and not dataset.isdecimal():
        raise InputError(
            f"dataset is {dataset!r}, but the series of a TIFF have numbers. Write 0 for the first, or all."
        )
    series = dataset if dataset in (ALL, MASK) else int(dataset or 0)
    image = StoredArray(path, "tiff", TiffReader, level=level, series=series, axes=axes)
    # Microscopes often store axes in an order that OME-Zarr, in which the output is written, does not allow.
    return image.in_order(order(image.axes)) if image.ome is not None and axes is None else image


def series_shapes(path: str) -> list[tuple[int, ...]]:
    """Shape of every series of a TIFF: images of different sizes in one file."""
    import tifffile

    with _open(tifffile, path) as file:
        return [tuple(series.shape) for series in split_series(file)[0]]


class TiffReader:
    """An open TIFF.

    Uncompressed pages are memory-mapped; others are read through tifffile's Zarr view, which decodes the strips
    or tiles that a region overlaps.
    """

    def __init__(self, path: str, *, level: int, series: int | str, axes: str | None) -> None:
        import tifffile

        check_tiff(path)
        file = _open(tifffile, path)
        weakref.finalize(self, file.close)
        images, masks = split_series(file)
        if series == MASK and not masks:
            raise InputError("dataset is mask, but the file has none. Leave dataset out.")
        file.series[:] = masks if series == MASK else images
        numbers = range(len(file.series)) if series == ALL else [0 if series == MASK else int(series)]
        chosen = [_pick(_pick(file.series, n, "dataset (series)").levels, level, "level") for n in numbers]
        for one in chosen:
            _refuse_missing_pages(file, one)
            _refuse_palette(one.keyframe)
        header = _header(file, chosen, numbers[0], level, axes, path)
        if series == MASK:
            header = replace(header, identity={**header.identity, "series": MASK})
        else:
            header = tiff_tags.with_mask(header, masks, level, path)
        opened = [_pixels(file, one, path) for one in chosen]
        if decoded := [one for one in opened if not isinstance(one, MappedPages)]:
            chunks = (*(1,) * (len(header.shape) - decoded[0].ndim), *decoded[0].chunks)
            header = replace(header, chunks=chunks, mapped=False)
        self.pixels: Any = StackedSeries(opened) if len(opened) > 1 else opened[0]
        self.header = header

    def read(self, region: Region) -> Pixels:
        pixels: Pixels = self.pixels[region.slices]
        return pixels


class StackedSeries:
    """Series of equal shape, along a first axis."""

    def __init__(self, series: Sequence[Any]) -> None:
        self._series = series

    def __getitem__(self, slices: tuple[slice, ...]) -> Pixels:
        return np.stack([one[slices[1:]] for one in self._series[slices[0]]])


def _pixels(file: Any, series: Any, path: str) -> Any:
    """The pixels of one series: memory-mapped, or else a Zarr array."""
    mapped = mapped_pages(file, series, path)
    if mapped is not None:
        return mapped
    import tifffile
    import zarr

    page = series.keyframe
    _refuse_missing_codec(tifffile, page)
    if page.compression == _JPEG and page.planarconfig == _BAND_BY_BAND:
        # Each JPEG is grey, whatever the bands are together.
        page.photometric = tifffile.PHOTOMETRIC.MINISBLACK
    return zarr.open_array(series.aszarr(level=0), mode="r")


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for tifffile's complaint of a value of holes that it cannot convert, which :func:`_nodata` reads."""
    return "GDAL_NODATA" not in record.getMessage()


logging.getLogger("tifffile").addFilter(_is_news)


def _open(tifffile: Any, path: str) -> Any:
    try:
        return tifffile.TiffFile(path)
    except OSError:
        raise
    except Exception as error:  # tifffile raises many types for a broken header
        raise DamagedData(f"tifffile cannot open it: {error}. Copy it again from its origin.") from error


def _pick(entries: Sequence[Any], number: int, key: str) -> Any:
    """Return entry ``number``."""
    if number < len(entries):
        return entries[number]
    shown = "; ".join(f"{n} {entry.shape}" for n, entry in enumerate(entries))
    raise InputError(
        f"{key} is {number}, but the TIFF has {len(entries)} of them, counted from 0. Write one of: {shown or 'none'}."
    )


def _refuse_missing_pages(file: Any, series: Any) -> None:
    """Raise when a plane is in a file that is missing or truncated, as it would read as zeros."""
    pages = list(series.pages)
    if missing := sum(page is None for page in pages):
        raise DamagedData(
            f"{missing} of the {len(pages)} planes of this image are in none of its files. "
            "Put all files of the set in one folder."
        )
    for other in _other_files(file, series):
        check_tiff(other)


def _other_files(file: Any, series: Any) -> list[str]:
    """Paths of the other files with planes of the series."""
    return sorted({page.parent.filehandle.path for page in series.pages} - {file.filehandle.path})


def _refuse_palette(page: Any) -> None:
    """Raise when pixels are indices into a palette, unless it contains increasing grey values."""
    if page.photometric != _PALETTE:
        return
    colours = np.asarray([] if page.colormap is None else page.colormap, "i8")
    if colours.size and (colours == colours[0]).all() and (np.diff(colours[0]) >= 0).all():
        return
    raise InputError(
        "its pixels are indices into a palette, which cannot be averaged. Convert to RGB first, or to grey "
        "values where the palette only tints them."
    )


def _header(file: Any, chosen: Sequence[Any], number: int, level: int, axes: str | None, path: str) -> Header:
    """The header of the chosen series; the first, where several have that number."""
    series, is_stack = chosen[0], len(chosen) > 1
    if series.dtype is None:
        raise InputError("its pixels have a number of bits that cannot be read. Save it with 8, 16 or 32 bits.")
    if any((one.shape, one.dtype, one.axes) != (series.shape, series.dtype, series.axes) for one in chosen):
        raise InputError(f"dataset is all, and its series differ: {_listed(chosen)}. Write the number of one.")
    letters = str(series.axes).replace("I", "Q")  # tifffile has two letters for unnamed axes
    named: list[str | None] = list(letters if "C" in letters else letters.replace("S", "C"))
    others = sorted({other for one in chosen for other in _other_files(file, one)})
    header = make_header(
        (len(chosen), *series.shape) if is_stack else series.shape,
        series.dtype,
        requested=axes,
        named=[None, *named] if is_stack else named,
        identity={"series": ALL if is_stack else number, "level": level, **file_identity(path, others)},
        ome=OmeImage() if file.is_ome else None,
        fill=_nodata(series.keyframe),
        attributes={} if is_stack else tiff_tags.plane_attributes(file, number),
    )
    header = replace(header, channels=tiff_tags.channels_of(file, number))
    finest = (*((len(chosen),) if is_stack else ()), *file.series[number].shape)
    sizes, on_sizes = tiff_tags.pixel_sizes(file, number)
    header = _with_scale(header, sizes, finest)
    if len(finest) == len(header.shape) and not is_stack:
        header = _with_position(header, tiff_tags.positions(file, number), finest)
    header = _with_place(header, file.series[number].keyframe, finest)
    of_stack = (f"dataset is all: its {len(chosen)} series are one axis, {header.axes[0]}",)
    about = of_stack if is_stack else _series_remark(file, number)
    return replace(header, remarks=(*about, *_display_remarks(series.keyframe), *on_sizes, *header.remarks))


def _display_remarks(page: Any) -> tuple[str, ...]:
    """Remarks on tags that change how viewers show the pixels."""
    turned = getattr(page.tags.get("Orientation"), "value", _UPRIGHT) != _UPRIGHT
    as_white = "a tag of the file shows 0 as white: values are read as they are stored, and are shown with 0 as black"
    remarks = {
        OPACITY_REMARK: has_opacity(page),
        "a tag of the file turns it for viewers: rows and columns are read as they are stored": turned,
        as_white: page.photometric == _MINISWHITE,
    }
    return tuple(text for text, applies in remarks.items() if applies)


def _nodata(page: Any) -> str | None:
    """The text of GDAL's tag for pixels without a measurement."""
    tag = page.tags.get(tiff_tags.NODATA)
    return None if tag is None else str(tag.value).strip("\0 ")


def _series_remark(file: Any, number: int) -> tuple[str, ...]:
    """A remark on a file of several images, which says what is read of it."""
    if len(file.series) < 2:
        return ()
    alike = len({(one.shape, one.dtype, one.axes) for one in file.series}) == 1
    together = ", or all for one image of them" if alike else ""
    return (
        f"the file has {len(file.series)} series, {_listed(file.series)}: this is series {number}. For another, write "
        f"input.dataset: {1 if number == 0 else 0}{together}",
    )


def _listed(series: Sequence[Any]) -> str:
    """Numbers and shapes of the first few series."""
    shown = [f"{n} of {' × '.join(map(str, one.shape))}" for n, one in enumerate(series[:MOST_LISTED])]
    return ", ".join([*shown, "..."] if len(series) > MOST_LISTED else shown)


def _with_scale(header: Header, sizes: Sizes, finest: tuple[int, ...]) -> Header:
    """The header with the physical pixel sizes, which are larger at coarser levels."""
    finest = finest if len(finest) == len(header.shape) else header.shape
    scale, units = zip(*(sizes.get(axis, (1.0, None)) for axis in header.axes), strict=True)
    factors = map(downsampling, finest, header.shape)
    return replace(header, scale=tuple(s * f for s, f in zip(scale, factors, strict=True)), units=units)


def _with_position(header: Header, places: Sizes, finest: tuple[int, ...]) -> Header:
    """The header with the position of the centre of the first pixel, in the units of the pixel sizes."""
    units = zip(header.axes, header.units, strict=True)
    known = [converted(*places[axis], unit) if axis in places else None for axis, unit in units]
    if header.ome is None or not any(at is not None for at in known):
        return header
    shifts = (
        size * (1 - 1 / downsampling(longest, length)) / 2
        for size, longest, length in zip(header.scale, finest, header.shape, strict=True)
    )
    centres = tuple((at or 0.0) + shift for at, shift in zip(known, shifts, strict=True))
    return replace(header, ome=OmeImage(centres))


def _with_place(header: Header, page: Any, finest: tuple[int, ...]) -> Header:
    """The header with the georeference, which is that of the finest level in the file, and the pixel sizes by it."""
    place = tiff_tags.georeference_of(page)
    header = replace(header, remarks=(*header.remarks, *tiff_tags.remarks_of(page, place)))
    at = [header.axes.index("y"), header.axes.index("x")]
    if place is None or len(finest) != len(header.shape) or at[0] > at[1]:
        return header
    place = place.resampled(*(downsampling(finest[axis], header.shape[axis]) for axis in at))
    unit, known = tiff_tags.unit_of(place), zip(header.axes, header.scale, header.units, strict=True)
    if unit is None or any(header.units[axis] for axis in at):
        return replace(header, georeference=place)
    sizes = [(place.pixel_size[axis], unit) if axis in "yx" else (size, u) for axis, size, u in known]
    scale, units = zip(*sizes, strict=True)
    return replace(header, scale=scale, units=units, georeference=place)


def _refuse_missing_codec(tifffile: Any, page: Any) -> None:
    """Raise when the compression needs a package that is not installed."""
    known = page.compression == 1 or page.compression in tifffile.TIFF.DECOMPRESSORS
    if not known or (page.predictor != 1 and page.predictor not in tifffile.TIFF.UNPREDICTORS):
        raise MissingPackage(
            f"this TIFF is compressed with {page.compression!r} (predictor {page.predictor!r}), which tifffile "
            'decodes with the package imagecodecs. Write: pip install "halotile[tiff]"'
        )


class MappedPages:
    """Memory-mapped uncompressed pages as one array; indexing copies only the selected pixels."""

    def __init__(self, path: str, dtype: np.dtype[Any], offsets: Sequence[int], shape: tuple[int, ...]) -> None:
        products = itertools.accumulate(shape, operator.mul, initial=1)
        self._leading = next(n for n, count in enumerate(products) if count >= len(offsets))
        self._data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._dtype, self._offsets, self._shape = dtype, offsets, shape

    def __getitem__(self, slices: tuple[slice, ...]) -> Pixels:
        outer, inner = slices[: self._leading], slices[self._leading :]
        pixels = np.empty([s.stop - s.start for s in slices], self._dtype.newbyteorder("="))
        counts, page_shape = self._shape[: self._leading], self._shape[self._leading :]
        for position in itertools.product(*(range(s.stop - s.start) for s in outer)):
            index = tuple(s.start + i for s, i in zip(outer, position, strict=True))
            offset = self._offsets[int(np.ravel_multi_index(index, counts)) if counts else 0]
            pixels[position] = np.ndarray(page_shape, self._dtype, self._data.data, offset)[inner]
        return pixels


def mapped_pages(file: Any, series: Any, path: str) -> MappedPages | None:
    """The series as mapped pages; None when it is compressed, or the pixels of a page are not contiguous."""
    if not series.keyframe.is_final or series.transform is not None:
        return None
    offsets = _page_offsets(file, series)
    if offsets is None or math.prod(series.shape) % len(offsets):
        return None
    page_bytes = math.prod(series.shape) // len(offsets) * series.dtype.itemsize
    size_bytes = file.filehandle.size
    if max(offsets) + page_bytes > size_bytes:
        raise DamagedData(
            f"the TIFF is cut short: it has {size_bytes} bytes, and its pixels extend to byte "
            f"{max(offsets) + page_bytes}. Copy it again from its origin."
        )
    dtype = np.dtype(series.dtype).newbyteorder(file.byteorder)
    return MappedPages(path, dtype, offsets, tuple(series.shape))


def _page_offsets(file: Any, series: Any) -> list[int] | None:
    """Offset of each page; a single entry when all pixels are contiguous, None when those of a page are not."""
    if series.dataoffset is not None and not series.is_multifile:
        return [series.dataoffset]
    for page in series.pages:
        ends = np.add(page.dataoffsets, page.databytecounts)
        if page.parent is not file or not len(ends) or (ends[:-1] != page.dataoffsets[1:]).any():
            return None
        if page.dataoffsets[0] == 0 or sum(page.databytecounts) != series.keyframe.nbytes:
            return None
    return [page.dataoffsets[0] for page in series.pages]
