"""``halotile.train``: the training of a denoiser as one call."""

from pathlib import Path
from typing import Any

from distributed import Client

from halotile.graphs.jobs.train.job import NetworkChoice, Training, WeightsFile
from halotile.graphs.kinds.sections import Input, Run
from halotile.graphs.rules.arguments import Words, whole_path
from halotile.graphs.runs.driver import Outcome, run_call
from halotile.graphs.watching.progress import Observer
from halotile.tasks.options import Auto


def train(
    source: str | Path,
    output: str | Path,
    *,
    method: Any = "noise2void",
    second: str | Path | None = None,
    network: Words | str = "unet",
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words | Client = "auto",
    device: Any = "auto",
    overwrite: bool = False,
    fresh: bool = False,
    observer: Observer | None = None,
    **length: Any,
) -> Outcome:
    """Train a denoiser on noisy images of any size, on worker processes of this machine or of a cluster.

    On CPUs the weights have the same bits for any number of workers. After an interruption, the same call goes on from its last checkpoint.

    Parameters
    ----------
    source : path
        The noisy image; or a pattern, such as ``"scans/*.tif"``, of several that one network learns from. Planes of any number of channels.
    output : path
        The weights to write, ``.safetensors``, for ``denoiser: {name: unet, weights: ...}``.
    method : str
        ``noise2void``, ``noise2void2`` or ``noise2self``: from the image alone; ``noise2noise``: with ``second``, the same with other noise.
    second : path, optional
        The second image, or a pattern.
    network : str or mapping
        Name of the network, or as a job file has it: ``{"name": "unet", "width": 32}``.
    workers : int or "auto"
        Number of worker processes, at most that of the slots.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str, mapping or distributed.Client
        Kind of cluster, or the cluster section of a job file; or an open Client, whose workers are used.
    device : str
        ``cpu``, ``cuda`` or ``auto``.
    overwrite : bool
        Replace an existing file.
    fresh : bool
        Start over where a call was interrupted, instead of resuming it.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.watching.progress.Progress` about twice a second.
    **length
        Further keys of the job: ``steps``, ``epochs`` or ``minutes``; ``structure``, ``patch``, ``batch``, ``slots``,
        ``lr``, ``mode``, ``seed``.

    Raises
    ------
    ConfigError, OutputRefused
        When an argument is not valid, or something exists at ``output``.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> halotile.train("noisy.zarr", "unet.safetensors", method="noise2noise")
    Traceback (most recent call last):
    halotile.errors.ConfigError: second: is not there, and method: noise2noise learns from pairs; write the path of the second image
    >>> halotile.train("noisy.zarr", "unet.safetensors", minutes=10)  # doctest: +SKIP
    """
    job = Training(
        input=Input(path=whole_path("source", source)),
        output=WeightsFile(path=whole_path("output", output), overwrite=overwrite),
        method=method,
        second=None if second is None else whole_path("second", second),
        network=NetworkChoice.from_mapping({"name": network} if isinstance(network, str) else network),
        run=Run(workers=workers, memory_per_worker=memory_per_worker, device=device),
        **length,
    )
    return run_call(job, cluster, fresh=fresh, observer=observer)
