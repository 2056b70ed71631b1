"""OME-Zarr 0.5 metadata of an image with one resolution level."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halotile.errors import ConfigError

VERSION = "0.5"
LEVEL = "0"
"""Name of the array inside the group."""

_TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
_WINDOW = ("start", "end", "min", "max")


@dataclass(frozen=True)
class OmeImage:
    """What the OME metadata of an image say besides axes, scale and units."""

    translation: tuple[float, ...] = ()
    """Physical place of the first pixel along each axis; empty where it is not told."""
    name: str | None = None
    omero: Mapping[str, Any] | None = None
    """How viewers show the channels: their labels, colours and windows."""


def fits(axes: Sequence[str]) -> bool:
    """Whether OME-Zarr can hold these axes: it wants time, then channel, then two or three of space.

    Examples
    --------
    >>> fits("tczyx"), fits("yxc")
    (True, False)
    """
    types = [_TYPES.get(axis, "") for axis in axes]
    ordered = sorted(types, key=lambda kind: kind == "space")
    timely = "time" not in types or types[0] == "time"
    others = sum(kind in ("channel", "") for kind in types)
    return (
        types.count("space") in (2, 3)
        and types == ordered
        and timely
        and types.count("time") <= 1
        and others <= 1
    )


def order(axes: Sequence[str]) -> tuple[int, ...]:
    """The order in which OME-Zarr can hold these axes; as they are, where it can hold them in none.

    Examples
    --------
    >>> order("zcyx"), order("yxc"), order("tzcyx"), order("qcyx")
    ((1, 0, 2, 3), (2, 0, 1), (0, 2, 1, 3, 4), (0, 1, 2, 3))
    """
    ranks = {"t": 0, "z": 2, "y": 3, "x": 4}
    wanted = tuple(sorted(range(len(axes)), key=lambda place: ranks.get(axes[place], 1)))
    return wanted if fits([axes[place] for place in wanted]) else tuple(range(len(axes)))


def check_axes(axes: tuple[str, ...]) -> None:
    """Refuse axes that OME-Zarr cannot hold.

    Raises
    ------
    ConfigError
        When they do not fit.
    """
    if not fits(axes):
        raise ConfigError(
            f"axes are {','.join(axes)}: OME-Zarr {VERSION} wants t, then c (or one axis of another name), "
            "then two or three of z, y, x. Reorder the axes, or write a plain Zarr."
        )


def packed(
    image: OmeImage | None,
    axes: tuple[str, ...],
    *,
    scale: Sequence[float],
    factor: Sequence[int],
    channels: int | None,
) -> dict[str, Any]:
    """What an output keeps of the OME metadata of its input, as fields of its layout.

    Parameters
    ----------
    image : OmePicture or None
        The input's.
    axes : tuple of str
        The output's; the input may lack those in front.
    scale : sequence of float
        Size of an input pixel along each axis of the output.
    factor : sequence of int
        Output pixels for each input pixel along each axis.
    channels : int or None
        Length of the output's channel axis, if it has one.

    Examples
    --------
    >>> carried(OmePicture((5.0, 5.0), "cells"), ("y", "x"), scale=(1.0, 1.0), factor=(2, 2), channels=None)
    {'ome': True, 'translation': (4.75, 4.75), 'name': 'cells', 'omero': None}
    """
    if image is None or not fits(axes):
        return {"ome": False}
    shown = len(image.omero["channels"]) if image.omero else None
    return {
        "ome": True,
        "translation": _moved(image.translation, scale, factor),
        "name": image.name,
        "omero": image.omero if shown == (channels or 1) else None,
    }


def _moved(
    translation: tuple[float, ...], scale: Sequence[float], factor: Sequence[int]
) -> tuple[float, ...]:
    """The place of the first pixel when every pixel is cut into ``factor``: a translation is of pixel centres."""
    if not translation and all(f == 1 for f in factor):
        return ()
    known = (0.0,) * (len(scale) - len(translation)) + translation
    return tuple(t - s * (f - 1) / (2 * f) for t, s, f in zip(known, scale, factor, strict=True))


def checked_omero(omero: Any) -> Mapping[str, Any] | None:
    """The ``omero`` attribute, where it is what OME-Zarr asks for; None otherwise.

    Its version is left out: since 0.5 the group alone has one.
    """
    channels = omero.get("channels") if isinstance(omero, dict) else None
    if not isinstance(channels, list) or not channels or not all(map(_is_channel, channels)):
        return None
    return {key: value for key, value in omero.items() if key != "version"}


def _is_channel(channel: Any) -> bool:
    """Whether a channel has a colour and a window."""
    if not isinstance(channel, dict) or not isinstance(channel.get("window"), dict):
        return False
    ends = [channel["window"].get(word) for word in _WINDOW]
    finite = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
    return finite and re.fullmatch(r"[0-9a-fA-F]{6}", str(channel.get("color"))) is not None


def group_attributes(
    axes: tuple[str, ...],
    scale: tuple[float, ...],
    units: tuple[str | None, ...],
    image: OmeImage | None = None,
) -> dict[str, Any]:
    """The attributes of the group: its axes, the size of a pixel along each, and what ``image`` says.

    Examples
    --------
    >>> group_attributes(("y", "x"), (0.5, 0.5), ("micrometer", None))["ome"]["multiscales"][0]["axes"]
    [{'name': 'y', 'type': 'space', 'unit': 'micrometer'}, {'name': 'x', 'type': 'space'}]
    """
    image = image or OmeImage()
    transformations: list[dict[str, Any]] = [{"type": "scale", "scale": list(scale)}]
    if image.translation:
        transformations.append({"type": "translation", "translation": list(image.translation)})
    multiscale: dict[str, Any] = {
        "axes": [_axis(name, unit) for name, unit in zip(axes, units, strict=True)],
        "datasets": [{"path": LEVEL, "coordinateTransformations": transformations}],
    }
    if image.name is not None:
        multiscale["name"] = image.name
    ome: dict[str, Any] = {"version": VERSION, "multiscales": [multiscale]}
    if image.omero is not None:
        ome["omero"] = dict(image.omero)
    return {"ome": ome}


def read_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The fields of a layout, from what :func:`group_attributes` made."""
    ome = attributes["ome"]
    multiscale = ome["multiscales"][0]
    steps = {step["type"]: step for step in multiscale["datasets"][0]["coordinateTransformations"]}
    return {
        "scale": tuple(map(float, steps["scale"]["scale"])),
        "units": tuple(axis.get("unit") for axis in multiscale["axes"]),
        "translation": tuple(map(float, steps.get("translation", {}).get("translation", ()))),
        "name": multiscale.get("name"),
        "omero": ome.get("omero"),
    }


def _axis(name: str, unit: str | None) -> dict[str, str]:
    axis = {"name": name}
    if name in _TYPES:
        axis["type"] = _TYPES[name]
    return axis | ({"unit": unit} if unit is not None else {})
