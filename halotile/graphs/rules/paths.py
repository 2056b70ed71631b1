"""Paths given by a script, made absolute for the job, so that a run can be resumed from any folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError


def whole_path(argument: str, place: Any) -> str:
    """Return a path as text: ``~`` expanded, relative paths resolved against the starting folder of the script.

    Addresses such as ``s3://`` stay as they are.

    Parameters
    ----------
    argument : str
        Name of the argument in the script.
    place : str or path
        The path.

    Raises
    ------
    ConfigError
        When it is not a path.

    Examples
    --------
    >>> whole_path("data", "/scans/y.zarr"), whole_path("data", "s3://scans/y.zarr")
    ('/scans/y.zarr', 's3://scans/y.zarr')
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(
            f"{argument} is of type {type(place).__name__}, and the work goes from disk to disk. "
            "Write the array to a Zarr or .npy, and give its path."
        )
    text = os.path.expanduser(os.fspath(place))
    return text if "://" in text or not text else str(Path.cwd() / text)
