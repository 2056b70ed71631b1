"""GDAL's masks of pixels without a measurement: pages of a TIFF, or a file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halotile.storage.formats.base import Header

MASK = "mask"
"""Dataset of the mask in the file of an image."""


def split_series(file: Any) -> tuple[list[Any], list[Any]]:
    """The series that are images, and those that are masks; masks without an image are images."""
    masks = [one for one in file.series if one.keyframe.is_mask]
    images = [one for one in file.series if not one.keyframe.is_mask]
    return (images, masks) if images else (masks, [])


def with_mask(header: Header, masks: Sequence[Any], level: int, path: str) -> Header:
    """The header of an image, with its mask of the same level, or a remark on one that is not read."""
    beside = Path(f"{path}.msk")
    if masks:
        sizes = [
            dict(zip(one.axes, one.shape, strict=True))
            for mask in masks
            for one in mask.levels[level : level + 1]
        ]
        if [(size.get("Y"), size.get("X")) for size in sizes] == [header.rows_and_columns]:
            remark = "the file has a mask: a denoising job leaves pixels where it is 0 as they are. To denoise them too, write input.nodata: none"
            return replace(header, mask=MASK, remarks=(*header.remarks, remark))
        remark = "the file has masks that are not read. Write them to a file of their own, and input: {sides: {mask: its path}}"
    elif beside.exists():
        remark = f"its mask is not read: it is in a file of its own. To leave those pixels as they are, write input: {{sides: {{mask: {beside}}}}}"
    else:
        return header
    return replace(header, remarks=(*header.remarks, remark))
