"""``halotile.measurement``: a measurement of an image with its operator, for scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.job import OperatorChoice, whole_choice
from halotile.graphs.jobs.reconstruct.measurements.operators import make_operator
from halotile.graphs.rules.arguments import whole_path
from halotile.graphs.words import shown
from halotile.tasks.operators.base import Operator
from halotile.tasks.operators.deepinv import is_physics


def measurement(
    operator: str | Operator | Any, data: str | Path, *, noise_sigma: float = 1.0, **options: Any
) -> OperatorChoice:
    """Describe a measurement of an image: an entry of ``operators``, as in a job file.

    Parameters
    ----------
    operator : str, Operator or deepinv.physics.LinearPhysics
        Name of an operator, with ``options``; or an operator itself; or a physics of deepinv, which is the operator
        ``deepinv`` with ``physics=operator``: it takes ``reach`` as an option.
    data : path
        The measurement: Zarr, TIFF, ``.npy`` or HDF5. :func:`halotile.simulate` writes it. A relative path
        starts from the folder that the script was started in.
    noise_sigma : float
        Standard deviation of its noise, in the units of its pixels: the measurement is weighted by
        ``1 / noise_sigma²``.
    **options
        Options of the operator; for an array, such as a kernel, the array itself or the path of a file.

    Returns
    -------
    OperatorChoice
        For :func:`halotile.reconstruct` and :func:`halotile.simulate`.

    Raises
    ------
    ConfigError
        When there is no such operator, or it has no such options.
    InputError
        When a file that the options name does not exist.

    Examples
    --------
    >>> import halotile
    >>> import numpy as np
    >>> seen = halotile.measurement("blur", "/scans/y.zarr", kernel=np.ones((3, 3)) / 9, noise_sigma=0.02)
    >>> seen.name, seen.data, seen.noise_sigma
    ('blur', '/scans/y.zarr', 0.02)
    """
    if is_physics(operator):
        operator, options = "deepinv", {"physics": operator, **options}
    path = whole_path("data", data)
    if isinstance(operator, str):
        plain = {key: os.fspath(v) if isinstance(v, os.PathLike) else v for key, v in options.items()}
        choice = OperatorChoice(name=operator, data=path, noise_sigma=noise_sigma, options=plain)
    elif options:
        raise ConfigError(
            f"{next(iter(options))} is given beside an operator, which has its options already. Leave it out."
        )
    elif not hasattr(operator, "measured"):
        raise ConfigError(
            f"operator is {shown(operator)}: that is neither a name nor an operator, nor a physics of deepinv. Write a name such as 'blur'."
        )
    else:
        choice = OperatorChoice(
            name=operator.name,
            data=path,
            noise_sigma=noise_sigma,
            options={"operator": operator},
        )
    absolute = whole_choice(choice)
    make_operator(absolute)
    return absolute
