"""PNG files, decoded whole."""

import os
import struct
from pathlib import Path

import numpy as np

from halotile.errors import DamagedData
from halotile.registry import optional
from halotile.storage.formats.base import OPACITY_REMARK, Reader, Source, refuse_option, starts_with, whole_image
from halotile.storage.rim import Pixels
from halotile.storage.stored_array import StoredArray

_MAGIC = b"\x89PNG\r\n\x1a\n"
# Values per pixel by colour type: grey, RGB, RGB by a palette, grey with opacity, RGB with opacity.
_SAMPLES = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_PALETTE = 3
_ADVICE = "Copy it again from its origin."


def claims(path: Path) -> bool:
    """Return True for a PNG signature at the start."""
    return starts_with(path, _MAGIC)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open the image in a PNG file."""
    refuse_option("PNG", "a PNG file holds one image at one resolution", level=level, dataset=dataset)
    return StoredArray(path, "png", open_png, axes=axes)


def open_png(path: str, *, axes: str | None) -> Reader:
    """The reader of a PNG file, which has decoded nothing yet."""
    codecs = optional("a PNG is read with imagecodecs", "imagecodecs", '"halotile[images]"')
    shape, dtype, remarks = _describe(path)

    def decode() -> Pixels:
        pixels: Pixels = codecs.png_decode(Path(path).read_bytes())
        return pixels.astype(bool) if dtype is bool else pixels

    return whole_image(path, shape, dtype, decode, axes=axes, remarks=remarks)


def _describe(path: str) -> tuple[tuple[int, ...], type, list[str]]:
    """Shape, type and remarks, from the header and the kinds of the chunks of the file, which all have to be there."""
    with Path(path).open("rb") as file:
        start = file.read(33)
        kinds: set[bytes] = set()
        file.seek(len(_MAGIC))
        while b"IEND" not in kinds:
            head = file.read(8)
            length = int.from_bytes(head[:4])
            if len(head) < 8 or file.seek(length + 4, os.SEEK_CUR) > os.fstat(file.fileno()).st_size:
                raise DamagedData(f"the PNG is cut short: its last chunk is missing. {_ADVICE}")
            kinds.add(head[4:])
    width, height, bits, colour = struct.unpack(">IIBB", start[16:26].ljust(10, b"\xff"))
    if start[12:16] != b"IHDR" or colour not in _SAMPLES:
        raise DamagedData(f"the PNG has no valid header. {_ADVICE}")
    # The value of transparent pixels becomes an opacity for each pixel.
    samples = _SAMPLES[colour] + (b"tRNS" in kinds)
    dtype = bool if bits == 1 == samples else np.uint16 if bits == 16 else np.uint8
    shape = (height, width) if samples == 1 else (height, width, samples)
    return shape, dtype, _remarks(kinds, colour, samples)


def _remarks(kinds: set[bytes], colour: int, samples: int) -> list[str]:
    """Remarks on what is not read as it is stored."""
    remarks = []
    if b"acTL" in kinds:
        remarks.append("the PNG is an animation: its first image is read. For the others, save them as a TIFF")
    if colour == _PALETTE:
        remarks.append("its pixels are indices into a palette, and are read as the colours there")
    if samples in (2, 4):
        remarks.append(OPACITY_REMARK)
    return remarks
