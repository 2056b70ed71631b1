"""JPEG files, decoded whole."""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from halotile.errors import DamagedData, InputError
from halotile.registry import optional
from halotile.storage.formats.base import Reader, Source, refuse_option, starts_with, whole_image
from halotile.storage.rim import Pixels
from halotile.storage.stored_array import StoredArray

_MAGIC, _END = b"\xff\xd8\xff", b"\xff\xd9"
_ORIENTATION = 274
_TURNED = {2: (False, 1, -1), 3: (False, -1, -1), 4: (False, -1, 1), 5: (True, 1, 1),
           6: (True, 1, -1), 7: (True, -1, -1), 8: (True, -1, 1)}  # fmt: skip
"""By EXIF orientation: True where rows and columns are exchanged, then the steps along y and x."""


def claims(path: Path) -> bool:
    """Return True for a JPEG signature at the start."""
    return starts_with(path, _MAGIC)


def open(path: str, *, level: int = 0, dataset: str | None = None, axes: str | None = None) -> Source:  # noqa: A001 - common to all formats
    """Open the image in a JPEG file."""
    refuse_option("JPEG", "a JPEG file holds one image at one resolution", level=level, dataset=dataset)
    return StoredArray(path, "jpeg", open_jpeg, axes=axes)


def open_jpeg(path: str, *, axes: str | None) -> Reader:
    """The reader of a JPEG file, which has decoded nothing yet."""
    codecs = optional("a JPEG is read with imagecodecs", "imagecodecs", '"halotile[images]"')
    pillow = optional("a JPEG is read with Pillow", "PIL.JpegImagePlugin", '"halotile[images]"')
    with _opened(pillow, path) as image:
        scan, (width, height), mode = image.fp.tell(), image.size, image.mode
        turned = _TURNED.get(_orientation(image))
    if mode not in ("L", "RGB"):
        raise InputError(f"its colours are {mode}, amounts of ink for print. Convert it to RGB first.")
    sides = (width, height) if turned and turned[0] else (height, width)
    shape = sides if mode == "L" else (*sides, 3)
    remark = ("the JPEG is read upright, as its EXIF orientation says and as it is shown",) if turned else ()

    def decode() -> Pixels:
        content = Path(path).read_bytes()
        if content.rfind(_END) < scan:
            raise DamagedData("the JPEG is cut short: its end is missing. Copy it again from its origin.")
        pixels: Pixels = codecs.jpeg8_decode(content)
        exchanged, down, right = turned or (False, 1, 1)
        return (pixels.swapaxes(0, 1) if exchanged else pixels)[::down, ::right]

    return whole_image(path, shape, np.uint8, decode, axes=axes, remarks=remark)


def _opened(pillow: Any, path: str) -> Any:
    """The file in Pillow, with its header read. ``Image.open`` would refuse large images."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF, which is left out
            return pillow.JpegImageFile(path)
    except SyntaxError as error:
        raise InputError(f"Pillow cannot read this JPEG: {error}. Save it again, as a PNG or TIFF.") from error


def _orientation(image: Any) -> int:
    """The EXIF orientation; 1, which is upright, where the file has none that can be read."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1
