"""``halotile.reconstruct``: a reconstruction as one call; and ``halotile.measurement``: a measurement of an image, with its operator."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from halotile.errors import ConfigError
from halotile.graphs.jobs.reconstruct.job import (
    Bounds,
    FidelityChoice,
    OperatorChoice,
    PriorChoice,
    Reconstruction,
    SolverChoice,
    whole_choice,
)
from halotile.graphs.jobs.reconstruct.measurements import make_operator
from halotile.graphs.kinds.sections import Output, Run
from halotile.graphs.rules.arguments import Words, section, whole_path
from halotile.graphs.runs.driver import Outcome, run_call
from halotile.graphs.watching.progress import Observer
from halotile.graphs.words import shown
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.operators.base import Operator
from halotile.tasks.operators.deepinv import is_physics
from halotile.tasks.options import Auto


def reconstruct(
    measurements: Sequence[OperatorChoice],
    output: str | Path,
    *,
    prior: str | Words = "none",
    solver: str | Words = "pgd",
    fidelity: str | Words = "l2",
    shape: tuple[int, ...] | None = None,
    start: str | Path | None = None,
    reference: str | Path | None = None,
    bounds: Bounds | Auto = "auto",
    exact: bool = False,
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words | Client = "auto",
    overwrite: bool = False,
    fresh: bool = False,
    observer: Observer | None = None,
) -> Outcome:
    """Reconstruct the image that fits all measurements, from disk to disk, on this machine or a cluster.

    ``prior``, ``solver`` and ``fidelity`` are sections of a job file as mappings, or their names alone. After an
    interruption, the same call resumes the run.

    Parameters
    ----------
    measurements : sequence of OperatorChoice
        The measurements, each from :func:`halotile.measurement`.
    output : path
        Zarr to write: the image. Relative paths start from the folder that the script was started in, ``~``
        is your home folder, here and in every other path.
    prior : str or mapping
        Prior of the image, such as ``{"name": "tv", "weight": 30.0}``. The ``denoiser`` of ``pnp`` is a mapping
        as well; a function of your own is ``{"name": "function", "call": f, "depth": 8}``, from ndarray to ndarray of
        the same shape, with a receptive field of ``depth`` pixels.
    solver : str or mapping
        Solver, such as ``{"name": "fista", "iterations": 40}``.
    fidelity : str or mapping
        Data fidelity: ``"l2"``, or ``{"name": "poisson", "background": 2.0}``.
    shape : tuple of int, optional
        Shape of the image in pixels, where it does not follow from the measurements.
    start : path, optional
        An image to start from; by default zeros.
    reference : path, optional
        The true image, to report the PSNR of every iteration: with a peak of 1 for floats, of the range for integer types.
    bounds : pair of float or None, or "auto"
        Least and greatest value of a pixel, None for none. ``"auto"``: 0 and none for ``poisson``, otherwise none.
    exact : bool
        Use the plain form of the gradient and direct convolutions only.
    workers : int or "auto"
        Number of worker processes; by default as the cores and the memory of this machine permit, or all of
        an allocation.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str, mapping or distributed.Client
        Kind of cluster, such as ``"slurm"``, or the cluster section of a job file. ``"auto"`` chooses as the
        environment indicates, else this machine. An open Client: its workers.
    overwrite : bool
        Replace an existing Zarr at ``output``.
    fresh : bool
        Start over, even where an earlier run can be resumed.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.watching.progress.Progress` about twice a second; by default a
        progress bar is shown at a terminal and in a notebook.

    Returns
    -------
    Outcome
        Blocks done, seconds, and in ``figures`` those of the last iteration.

    Raises
    ------
    ConfigError
        When an argument is not valid: the message has the names of a job file.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> seen = halotile.measurement("blur", "y.zarr", kernel=[[0.5, 0.5]], noise_sigma=0.01)
    >>> halotile.reconstruct([seen], "x.zarr", prior={"name": "tv", "wieght": 30.0})
    Traceback (most recent call last):
    halotile.errors.ConfigError: prior.wieght: unknown key; did you mean weight?
    >>> halotile.reconstruct([seen], "x.zarr", prior={"name": "tv", "weight": 30.0})  # doctest: +SKIP
    """
    job = Reconstruction(
        output=Output(path=os.path.expanduser(os.fspath(output)), overwrite=overwrite),
        operators=listed(measurements),
        fidelity=section("fidelity", FidelityChoice, fidelity),
        prior=_prior(prior),
        solver=section("solver", SolverChoice, solver),
        shape="auto" if shape is None else tuple(shape) if isinstance(shape, Sequence) else shape,
        start=None if start is None else os.fspath(start),
        reference=None if reference is None else os.fspath(reference),
        bounds=bounds,
        exact=exact,
        run=Run(workers=workers, memory_per_worker=memory_per_worker),
    )
    return run_call(job, cluster, fresh=fresh, observer=observer)


def listed(measurements: Any, none: str = "no", instead: str = "") -> tuple[OperatorChoice, ...]:
    """Return the measurements of a script, refused if they are something else; ``none, instead``: words about what else may be written."""
    if not isinstance(measurements, list | tuple) or not all(isinstance(m, OperatorChoice) for m in measurements):
        raise ConfigError(
            f"measurements is {shown(measurements)}: that is {none} list of measurements. Write {instead}[halotile.measurement(...)]."
        )
    return tuple(measurements)


def _prior(written: str | Words) -> PriorChoice:
    """Return a prior from the keys of a job file; its denoiser may be a function that the script passes."""
    choice = section("prior", PriorChoice, written)
    denoiser = choice.options.get("denoiser")
    if isinstance(denoiser, str):
        raise ConfigError(f'prior: denoiser is {denoiser!r}, without its options. Write {{"name": {denoiser!r}, ...}}.')
    if not (isinstance(denoiser, Mapping) and "call" in denoiser):
        return choice
    if "depth" not in denoiser:
        raise ConfigError('a function needs depth: how far, in pixels, it looks. Write "depth": 8, say.')
    given = GivenFunction(call=denoiser["call"], depth=denoiser["depth"])
    return dataclasses.replace(choice, options={**choice.options, "denoiser": given})


def measurement(
    operator: str | Operator | Any, data: str | Path, *, noise_sigma: float | str | Path | None = None, **options: Any
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
    noise_sigma : float, "auto" or path, optional
        Standard deviation of its noise, in the units of its pixels: the measurement is weighted by
        ``1 / noise_sigma²``. A path: an image with that of each pixel, and 0 or NaN where nothing was measured. By default 1; in
        :func:`halotile.samples` ``"auto"``, estimated.
    **options
        Options of the operator; for an array, such as a kernel, the array itself or the path of a file.

    Returns
    -------
    OperatorChoice
        For :func:`halotile.reconstruct`, :func:`halotile.samples` and :func:`halotile.simulate`.

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
    level: Any = noise_sigma if isinstance(noise_sigma, float | int | None) else os.fspath(noise_sigma)
    if isinstance(operator, str):
        plain = {key: os.fspath(v) if isinstance(v, os.PathLike) else v for key, v in options.items()}
        choice = OperatorChoice(name=operator, data=path, noise_sigma=level, options=plain)
    elif options:
        raise ConfigError(
            f"{next(iter(options))} is given beside an operator, which has its options already. Leave it out."
        )
    elif not hasattr(operator, "measured"):
        raise ConfigError(
            f"operator is {shown(operator)}: that is neither a name nor an operator, nor a physics of deepinv. Write a name such as 'blur'."
        )
    else:
        choice = OperatorChoice(name=operator.name, data=path, noise_sigma=level, options={"operator": operator})
    absolute = whole_choice(choice)
    make_operator(absolute)
    return absolute
