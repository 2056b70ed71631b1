"""``halotile.simulate``: measurements of a true image as one call."""

from collections.abc import Sequence
from pathlib import Path

from distributed import Client

from halotile.graphs.jobs.reconstruct.call import listed
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.simulate.job import NoiseChoice, Simulation, Storage
from halotile.graphs.kinds.sections import Run
from halotile.graphs.rules.arguments import Words, whole_path
from halotile.graphs.runs.driver import run_call
from halotile.graphs.watching.progress import Observer
from halotile.storage.disk.object_path import full_path
from halotile.tasks.noise.simulated import Noise
from halotile.tasks.options import Auto


def simulate(
    measurements: Sequence[OperatorChoice],
    reference: str | Path,
    *,
    noise: Noise = "gaussian",
    gain: float = 1.0,
    background: float = 0.0,
    seed: int = 0,
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words | Client = "auto",
    overwrite: bool = False,
    fresh: bool = False,
    observer: Observer | None = None,
) -> tuple[Path, ...]:
    """Simulate the measurements of an image, ``y = A x`` with noise, from disk to disk.

    The noise of a pixel depends only on the seed, the operator's place in the list and the pixel's place: the
    result has the same bits for any number of workers. A measurement is written in place; its run directory
    shows whether it is complete. A call that was interrupted is resumed when it is repeated.

    Parameters
    ----------
    measurements : sequence of OperatorChoice
        Each from :func:`halotile.measurement`; its ``data`` is the Zarr to write.
    reference : path
        The true image.
    noise : str
        ``gaussian``, of the standard deviation ``noise_sigma`` of each measurement; ``poisson``, or ``none``.
    gain : float
        poisson: value of one count, so ``y = gain P((A x + background) / gain)``.
    background : float
        poisson: background added to ``A x``.
    seed : int
        Seed of the noise: 0 or more.
    workers : int or "auto"
        Number of worker processes; by default as the cores and the memory of this machine permit, or all of
        an allocation.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str, mapping or distributed.Client
        Kind of cluster, such as ``"slurm"``, or the cluster section of a job file. ``"auto"`` chooses as the
        environment indicates, else this machine. An open Client: its workers.
    overwrite : bool
        Replace existing Zarrs at the measurements' paths.
    fresh : bool
        Start over where a call was interrupted, instead of resuming it.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.watching.progress.Progress` about twice a second; by default a
        progress bar is shown at a terminal and in a notebook.

    Returns
    -------
    tuple of Path
        Paths of the measurements.

    Raises
    ------
    ConfigError, OutputRefused
        When an argument is not valid, or something exists at the path of a measurement.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> seen = halotile.measurement("blur", "y.zarr", kernel=[[0.5, 0.5]], noise_sigma=0.01)
    >>> halotile.simulate([seen], "truth.zarr", noise="poison")
    Traceback (most recent call last):
    halotile.errors.ConfigError: noise is 'poison': there is none of that name; did you mean poisson?
    >>> halotile.simulate([seen], "truth.zarr")  # doctest: +SKIP
    """
    job = Simulation(
        operators=listed(measurements),
        noise=NoiseChoice(name=noise, gain=gain, background=background, seed=seed),
        output=Storage(overwrite=overwrite),
        reference=whole_path("reference", reference),
        run=Run(workers=workers, memory_per_worker=memory_per_worker),
    )
    run_call(job, cluster, fresh=fresh, observer=observer)
    return tuple(Path(str(full_path(operator.data))) for operator in job.operators)
