"""OME-Zarr 0.5 metadata of an image."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halotile.errors import ConfigError

VERSION = "0.5"
FINEST = "0"  # name of the array of the finest level inside the group

# One mapping for each channel with some of label, color (six hexadecimal digits) and window (lowest and highest value
# shown).
Channels = tuple[Mapping[str, Any], ...]
RGB = {"red": "FF0000", "green": "00FF00", "blue": "0000FF"}  # channels of a colour image
OPACITY = "opacity"  # name of a fourth one

WHITE = "FFFFFF"
PAIR = ("FF00FF", "00FF00")
MANY = ("00FFFF", "FFFF00", "FF00FF", "FF0000", "00FF00", "0000FF")  # colours of two channels, and of more

_TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
_COLOUR = "[0-9a-fA-F]{6}"
_WINDOW = ("start", "end", "min", "max")


@dataclass(frozen=True)
class OmeImage:
    """OME metadata of an image other than axes, scale and units."""

    # physical position of the first pixel along each axis; empty if unknown
    translation: tuple[float, ...] = ()
    name: str | None = None
    omero: Mapping[str, Any] | None = None  # display settings of the channels: labels, colours and windows


def fits(axes: Sequence[str]) -> bool:
    """Return True when OME-Zarr permits these axes: time, then channel, then two or three spatial axes.

    >>> fits("tczyx"), fits("yxc")
    (True, False)
    """
    types = [_TYPES.get(axis, "other") for axis in axes]
    while types and types[-1] == "space":
        types.pop()
    further = types[1:] if types[:1] == ["time"] else types
    return len(axes) - len(types) in (2, 3) and further in ([], ["channel"], ["other"])


def order(axes: Sequence[str]) -> tuple[int, ...]:
    """The order in which OME-Zarr permits these axes; unchanged when no order is permitted.

    >>> order("zcyx"), order("yxc"), order("tzcyx"), order("qcyx")
    ((1, 0, 2, 3), (2, 0, 1), (0, 2, 1, 3, 4), (0, 1, 2, 3))
    """
    ranks = {"t": 0, "z": 2, "y": 3, "x": 4}
    wanted = tuple(sorted(range(len(axes)), key=lambda axis: ranks.get(axes[axis], 1)))
    return wanted if fits([axes[axis] for axis in wanted]) else tuple(range(len(axes)))


def viewer_names(axes: Sequence[str]) -> tuple[str, ...]:
    """Names of permitted axes in the metadata: an axis that nothing names is t, or c beside one, because viewers know no others.

    >>> viewer_names("qyx"), viewer_names("tqyx"), viewer_names("tczyx")
    (('t', 'y', 'x'), ('t', 'c', 'y', 'x'), ('t', 'c', 'z', 'y', 'x'))
    """
    spare = iter(letter for letter in "tc" if letter not in axes)
    return tuple(axis if axis in _TYPES else next(spare, axis) for axis in axes)


def own_axes(attributes: Mapping[str, Any], names: Sequence[Any]) -> tuple[str, ...] | None:
    """The axes that halotile recorded beside :func:`viewer_names`; None where there are none, or names that others have changed since."""
    own = attributes.get("halotile")
    match own.get("axes") if isinstance(own, dict) else None:
        case [*axes] if all(isinstance(axis, str) for axis in axes) and fits(axes):
            return tuple(axes) if viewer_names(axes) == tuple(names) else None
    return None


def check_axes(axes: tuple[str, ...]) -> None:
    """Refuse axes that OME-Zarr does not permit."""
    if not fits(axes):
        raise ConfigError(
            f"axes are {','.join(axes)}: OME-Zarr {VERSION} requires t, then c (or one axis of another name), "
            "then two or three of z, y, x. Reorder the axes, or write output.format: zarr."
        )


def output_fields(
    image: OmeImage | None,  # metadata of the input
    axes: tuple[str, ...],  # axes of the output; the input may lack the leading ones
    wanted: str = "auto",  # `ome-zarr`, `zarr`, or `auto`: the first where it permits the axes
    *,
    scale: Sequence[float],  # size of an input pixel along each axis of the output
    factor: Sequence[int],  # number of output pixels for each input pixel along each axis
    channels: int | None,  # length of the output's channel axis, if it has one
) -> dict[str, Any]:
    """The layout fields of an output that preserve the OME metadata of its input.

    >>> output_fields(OmeImage((5.0, 5.0), "cells"), ("y", "x"), scale=(1.0, 1.0), factor=(2, 2), channels=None)
    {'ome': True, 'translation': (4.75, 4.75), 'name': 'cells', 'omero': None}
    """
    if wanted == "zarr" or (wanted == "auto" and not fits(axes)):
        return {"ome": False}
    image = image or OmeImage()
    shown = len(image.omero["channels"]) if image.omero else None
    if channels is None and "c" in viewer_names(axes):  # which has as many channels, for viewers
        shown = None
    return {
        "ome": True,
        "translation": _scaled_translation(image.translation, scale, factor),
        "name": image.name,
        "omero": image.omero if shown == (channels or 1) else None,
    }


def _scaled_translation(
    translation: tuple[float, ...], scale: Sequence[float], factor: Sequence[int]
) -> tuple[float, ...]:
    """The position of the first pixel's centre after every pixel was divided into ``factor`` pixels."""
    if not translation and all(f == 1 for f in factor):
        return ()
    padded = (0.0,) * (len(scale) - len(translation)) + translation
    return tuple(t - s * (f - 1) / (2 * f) for t, s, f in zip(padded, scale, factor, strict=True))


def rgb_channels(dtype: np.dtype[Any], samples: int) -> Channels:
    """The channels of a colour image, 3 or with opacity 4, else none: one contrast for all, or the colours would change."""
    if samples not in (3, 4):
        return ()
    whole = {"window": (0.0, float(np.iinfo(dtype).max if dtype.kind in "iu" else 1))}
    colours: list[Any] = [{"label": name, "color": colour, **whole} for name, colour in RGB.items()]
    opacity = {"label": OPACITY, "color": "FFFFFF", "active": False, **whole}
    return tuple([*colours, opacity][:samples])


def shown_colours(channels: Channels) -> list[str]:
    """The colours of channels; those that viewers choose, which repeat, where a channel has none, and where all are white: nobody chose that.

    >>> shown_colours(({}, {"color": "0000FF"})), shown_colours(({"color": "FFFFFF"},) * 2)
    (['FF00FF', '0000FF'], ['FF00FF', '00FF00'])
    """
    defaults = {1: (WHITE,), 2: PAIR}.get(len(channels), MANY)
    colours = [channel.get("color", own) for channel, own in zip(channels, itertools.cycle(defaults))]
    return list(itertools.islice(itertools.cycle(defaults), len(channels))) if set(colours) == {WHITE} else colours


def are_colours(channels: Channels) -> bool:
    """Return True for channels in red, green and blue, with opacity or without."""
    colours = [channel.get("color") for channel in channels[:3]]
    return colours == list(RGB.values()) and [c.get("label") for c in channels[3:]] in ([], [OPACITY])


def is_photo(channels: Channels) -> bool:
    """Return True where they are also called so: others are shown in these colours."""
    return are_colours(channels) and [str(c.get("label")).lower() for c in channels[:3]] == list(RGB)


def checked_omero(omero: Any) -> Mapping[str, Any] | None:
    """The ``omero`` attribute without its version, which belongs to the group since 0.5; None when it is invalid."""
    channels = omero.get("channels") if isinstance(omero, dict) else None
    if not isinstance(channels, list) or not channels or not all(map(_is_channel, channels)):
        return None
    return {key: value for key, value in omero.items() if key != "version"}


def valid_parts(omero: Any) -> Channels:
    """The label, colour and window of each channel where they are valid, of an ``omero`` attribute that is not.

    >>> valid_parts({"channels": [{"label": "DAPI", "color": "blue"}, None]}), valid_parts("none")
    (({'label': 'DAPI'}, {}), ())
    """
    entries = omero.get("channels") if isinstance(omero, dict) else None
    return tuple(map(_valid_part, entries)) if isinstance(entries, list) else ()


def _valid_part(channel: Any) -> dict[str, Any]:
    given = channel if isinstance(channel, dict) else {}
    part = {key: given[key] for key in ("label", "color") if isinstance(given.get(key), str)}
    if not re.fullmatch(_COLOUR, part.get("color", "000000")):
        del part["color"]
    match given.get("window"):
        case {"start": float() | int() as low, "end": float() | int() as high}:
            if -math.inf < low < high < math.inf:
                part["window"] = (low, high)
    return part


def _is_channel(channel: Any) -> bool:
    """Return True when a channel has a colour and a window."""
    if not isinstance(channel, dict) or not isinstance(channel.get("window"), dict):
        return False
    ends = [channel["window"].get(word) for word in _WINDOW]
    finite = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
    return finite and re.fullmatch(_COLOUR, str(channel.get("color"))) is not None


def group_attributes(
    axes: tuple[str, ...],
    scale: tuple[float, ...],
    units: tuple[str | None, ...],
    image: OmeImage | None = None,
    levels: int = 1,
    factor: Sequence[int] = (),
) -> dict[str, Any]:
    """The attributes of the group: axes, pixel sizes of each level and the metadata of ``image``.

    Pixels of a level cover ``factor`` of the one before along each axis; a position is that of a pixel's centre.

    >>> group_attributes(("y", "x"), (0.5, 0.5), ("micrometer", None))["ome"]["multiscales"][0]["axes"]
    [{'name': 'y', 'type': 'space', 'unit': 'micrometer'}, {'name': 'x', 'type': 'space'}]
    """
    image = image or OmeImage()
    steps = (transformations(scale, image.translation, [f**n for f in factor]) for n in range(levels))
    datasets = [{"path": str(n), "coordinateTransformations": step} for n, step in enumerate(steps)]
    multiscale: dict[str, Any] = {
        "axes": [_axis(*axis) for axis in zip(viewer_names(axes), axes, units, strict=True)],
        "datasets": datasets,
    }
    if image.name is not None:
        multiscale["name"] = image.name
    ome: dict[str, Any] = {"version": VERSION, "multiscales": [multiscale]}
    if image.omero is not None:
        ome["omero"] = dict(image.omero)
    return {"ome": ome}


def transformations(
    scale: Sequence[float], translation: Sequence[float], covered: Sequence[float]
) -> list[dict[str, Any]]:
    """Size and position of the pixels of a level; each covers some of the finest ones."""
    if not covered or max(covered) == 1:
        first = [{"type": "translation", "translation": list(translation)}] if translation else []
        return [{"type": "scale", "scale": list(scale)}, *first]
    start = translation or (0.0,) * len(scale)
    sizes = [s * n for s, n in zip(scale, covered, strict=True)]
    centres = [t + s * (n - 1) / 2 for t, s, n in zip(start, scale, covered, strict=True)]
    return [{"type": "scale", "scale": sizes}, {"type": "translation", "translation": centres}]


def read_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The layout fields in attributes made by :func:`group_attributes`; levels that were added later are left out."""
    ome = attributes["ome"]
    multiscale = ome["multiscales"][0]
    transforms = (level["coordinateTransformations"] for level in multiscale["datasets"])
    levels = [{step["type"]: step for step in steps} for steps in transforms]
    steps, scale = levels[0], levels[0]["scale"]["scale"]
    coarser: dict[str, Any] = {}
    own = attributes.get("halotile", {})
    if len(levels) > 1 and "block" in own:
        ratios = tuple(round(b / a) for a, b in zip(scale, levels[1]["scale"]["scale"], strict=True))
        coarser = {"levels": own.get("levels", len(levels)), "factor": ratios, "block": tuple(own["block"])}
    return {
        **coarser,
        "scale": tuple(map(float, scale)),
        "units": tuple(axis.get("unit") for axis in multiscale["axes"]),
        "translation": tuple(map(float, steps.get("translation", {}).get("translation", ()))),
        "name": multiscale.get("name"),
        "omero": ome.get("omero"),
    }


def _axis(name: str, axis: str, unit: str | None) -> dict[str, str]:
    """An axis under its name for viewers; without a type where nothing says what it is."""
    kind = {"type": _TYPES[axis]} if axis in _TYPES else {}
    return {"name": name, **kind, **({} if unit is None else {"unit": unit})}
