"""``halotile.samples``: mean and standard deviation of an image as one call."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client

from halotile.graphs.jobs.denoise.call import denoiser_of
from halotile.graphs.jobs.denoise.job import NoiseModel
from halotile.graphs.jobs.reconstruct.call import listed
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, OperatorChoice
from halotile.graphs.jobs.samples.job import FieldPrior, MapOutput, MeasuredOperator, PosteriorOptions, Sampling
from halotile.graphs.kinds.sections import Input, Run, Tile
from halotile.graphs.rules.arguments import Words, section, whole_path
from halotile.graphs.runs.driver import Outcome, run_call
from halotile.graphs.watching.progress import Observer
from halotile.tasks.options import Auto


def samples(
    measurements: Sequence[OperatorChoice] | str | Path,
    output: str | Path,
    *,
    std: str | Path | None = None,
    draws: str | Path | None = None,
    prior: str | Words = "matern",
    fidelity: str | Words = "l2",
    denoiser: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    depth: int | None = None,
    noise: str | Words = "gaussian",
    posterior: Words | None = None,
    shape: tuple[int, ...] | None = None,
    exact: bool = False,
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words | Client = "auto",
    overwrite: bool = False,
    fresh: bool = False,
    observer: Observer | None = None,
) -> Outcome:
    """Compute mean and standard deviation of an image, given its measurements and a prior, from disk to disk; or a denoised image and that of its error.

    With a prior, noise and prior are Gaussian. With a denoiser, each block is denoised again on redrawn noise. The draws behind the standard deviation depend on the seed and the place of each pixel: the
    result has the same bits for any number of workers. After an interruption, the same call resumes the run.

    Parameters
    ----------
    measurements : sequence of OperatorChoice, or path
        With a denoiser, the path of the noisy image. Else the measurements, each from :func:`halotile.measurement`. Its ``noise_sigma`` is a number; the path of an image
        of the measurement's shape, with the standard deviation of each pixel and 0 or NaN where nothing was measured; or
        ``"auto"``, the default: estimated.
    output : path
        Zarr to write: the mean.
    std : path, optional
        Zarr to write: the standard deviation of each pixel, in the units of the image.
    draws : path, optional
        Zarrs to write: the draws, with a number after the name: ``draws.zarr`` becomes ``draws-000.zarr``, and so on.
    prior : str or mapping
        Prior of the image: ``{"name": "matern", "std": 0.5, "range": 12.0, "mean": 1.0}``, each ``"auto"`` by default.
    fidelity : str or mapping
        ``"l2"`` for the noise of ``noise_sigma``; ``{"name": "poisson", "background": 2.0}`` for counts.
    denoiser, depth, noise
        As of :func:`halotile.denoise`; options of the denoiser stand in a mapping with its name, such as ``{"name": "tv", "strength": 0.5}``.
    posterior : mapping, optional
        Section ``posterior`` of a job file, such as ``{"count": 16, "tol": 1e-2}``.
    shape : tuple of int, optional
        Shape of the image in pixels, where it does not follow from the measurements.
    exact : bool
        Use direct convolutions, whose bits do not depend on the shards of the output.
    workers : int or "auto"
        Number of worker processes; by default as the cores and the memory of this machine permit, or all of
        an allocation.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str, mapping or distributed.Client
        Kind of cluster, such as ``"slurm"``, or the cluster section of a job file. ``"auto"`` chooses as the
        environment indicates, else this machine. An open Client: its workers.
    overwrite : bool
        Replace existing Zarrs.
    fresh : bool
        Start over, even where an earlier run can be resumed.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.watching.progress.Progress` about twice a second; by default a
        progress bar is shown at a terminal and in a notebook.

    Returns
    -------
    Outcome
        Blocks done, and seconds.

    Raises
    ------
    ConfigError
        When an argument is not valid: the message has the names of a job file.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> seen = halotile.measurement("blur", "y.zarr", kernel=[[0.5, 0.5]], noise_sigma="auto")
    >>> halotile.samples([seen], "mean.zarr", std="std.zarr", prior="tv")
    Traceback (most recent call last):
    halotile.errors.ConfigError: prior.name: tv, which leaves no Gaussian posterior; write matern
    >>> halotile.samples([seen], "mean.zarr", std="std.zarr", posterior={"count": 32})  # doctest: +SKIP
    >>> halotile.samples("noisy.zarr", "clean.zarr", std="std.zarr", denoiser={"name": "median", "size": 3})  # doctest: +SKIP
    """
    mean = whole_path("output", output)
    deviation, drawn = (None if p is None else whole_path(key, p) for key, p in (("std", std), ("draws", draws)))
    given: dict[str, Any] = {} if denoiser is None else {"denoiser": denoiser_of(denoiser, depth, {})}
    if isinstance(measurements, str | os.PathLike):
        given["input"], measurements = Input(path=whole_path("measurements", measurements)), ()
    else:
        measurements = listed(measurements, "neither a path nor a", "the path of a noisy image, with a denoiser, or ")
    # What the script left out has the default of this kind of job.
    operators = ({key: value for key, value in vars(each).items() if value is not None} for each in measurements)
    job = Sampling(
        output=MapOutput(path=mean, overwrite=overwrite, std=deviation, samples=drawn),
        operators=tuple(MeasuredOperator(**each) for each in operators),
        prior=section("prior", FieldPrior, prior),
        fidelity=section("fidelity", FidelityChoice, fidelity),
        posterior=section("posterior", PosteriorOptions, posterior or {}),
        noise=section("noise", NoiseModel, noise, "model"),
        tile=Tile(depth="auto" if depth is None else depth),
        **given,
        exact=exact,
        shape="auto" if shape is None else tuple(shape) if isinstance(shape, Sequence) else shape,
        run=Run(workers=workers, memory_per_worker=memory_per_worker),
    )
    return run_call(job, cluster, fresh=fresh, observer=observer)
