"""OME-Zarr 0.5 metadata of an image with one resolution level."""

from __future__ import annotations

from typing import Any

from halotile.errors import ConfigError

VERSION = "0.5"
LEVEL = "0"
"""Name of the array inside the group."""

_TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}


def check_axes(axes: tuple[str, ...]) -> None:
    """Refuse axes that OME-Zarr cannot hold: it wants time, then channel, then two or three of space.

    Raises
    ------
    ConfigError
        When they are others, or in another order.
    """
    types = [_TYPES.get(axis, "") for axis in axes]
    spatial = types.count("space")
    ordered = sorted(types, key=lambda kind: kind == "space")
    timely = "time" not in types or types[0] == "time"
    others = sum(kind in ("channel", "") for kind in types)
    if spatial not in (2, 3) or types != ordered or not timely or types.count("time") > 1 or others > 1:
        raise ConfigError(
            f"axes are {','.join(axes)}: OME-Zarr {VERSION} wants t, then c (or one axis of another name), "
            "then two or three of z, y, x. Reorder the axes, or write a plain Zarr."
        )


def group_attributes(
    axes: tuple[str, ...], scale: tuple[float, ...], units: tuple[str | None, ...]
) -> dict[str, Any]:
    """The attributes of the group: its axes, and the size of a pixel along each.

    Examples
    --------
    >>> group_attributes(("y", "x"), (0.5, 0.5), ("micrometer", None))["ome"]["multiscales"][0]["axes"]
    [{'name': 'y', 'type': 'space', 'unit': 'micrometer'}, {'name': 'x', 'type': 'space'}]
    """
    transformations = [{"type": "scale", "scale": list(scale)}]
    multiscale = {
        "axes": [_axis(name, unit) for name, unit in zip(axes, units, strict=True)],
        "datasets": [{"path": LEVEL, "coordinateTransformations": transformations}],
    }
    return {"ome": {"version": VERSION, "multiscales": [multiscale]}}


def read_attributes(attributes: dict[str, Any]) -> tuple[tuple[float, ...], tuple[str | None, ...]]:
    """Scale and units, from what :func:`group_attributes` made."""
    multiscale = attributes["ome"]["multiscales"][0]
    scale = multiscale["datasets"][0]["coordinateTransformations"][0]["scale"]
    return tuple(map(float, scale)), tuple(axis.get("unit") for axis in multiscale["axes"])


def _axis(name: str, unit: str | None) -> dict[str, str]:
    axis = {"name": name}
    if name in _TYPES:
        axis["type"] = _TYPES[name]
    return axis | ({"unit": unit} if unit is not None else {})
