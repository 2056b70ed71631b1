"""``halotile.denoise``: the main job as one call."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client

from halotile.errors import ConfigError
from halotile.graphs.jobs.denoise.job import Denoising, NoiseModel
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run, Tile
from halotile.graphs.rules.arguments import Words, section, whole_path
from halotile.graphs.runs.driver import Outcome, run_call
from halotile.graphs.watching.progress import Observer
from halotile.graphs.words import shown
from halotile.tasks.denoisers.function import GivenFunction
from halotile.tasks.options import Auto


def denoise(
    source: str | Path,
    output: str | Path,
    denoiser: str | Mapping[str, Any] | Callable[..., Any],
    *,
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words | Client = "auto",
    depth: int | None = None,
    boundary: str = "auto",
    overwrite: bool = False,
    fresh: bool = False,
    observer: Observer | None = None,
    sides: Mapping[str, str | Path] | None = None,
    channels: Sequence[str | int] | Mapping[str | int, Mapping[str, Any]] = (),
    noise: str | Words = "gaussian",
    device: str = "auto",
    precision: str = "float32",
    **options: Any,
) -> Outcome:
    """Denoise an image of any size from disk to disk, on worker processes of this machine or of a cluster.

    The result has the same bits as the denoiser gives on the whole image. After an interruption,
    the same call resumes the run.

    Parameters
    ----------
    source : path
        Zarr, OME-Zarr, TIFF, ``.npy`` or HDF5, two or more axes. ``~`` is your home folder, here and in every
        other path.
    output : path
        Zarr to write: shape of the source (times the denoiser's scale), and its dtype (float32 for bool,
        and for integers where rounding would cost more than a denoiser leaves).
    denoiser : str, mapping or callable
        Name of a denoiser, with ``options``; or the denoiser section of a job file, as for an option that is named like an argument
        here: ``{"name": "dncnn", "weights": "dncnn.safetensors", "depth": 9}``; or a function from ndarray to ndarray of the same
        shape, which then needs ``depth``: its receptive field in pixels.
    workers : int or "auto"
        Number of worker processes; by default as the cores and the memory of this machine permit, or all of
        an allocation.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str, mapping or distributed.Client
        Kind of cluster, such as ``"slurm"``, or the cluster section of a job file. ``"auto"`` chooses as the
        environment indicates, else this machine. An open Client: its workers.
    depth : int, optional
        Halo width in pixels, not a number of layers; by default the denoiser's receptive field.
    boundary : str
        ``reflect``, ``nearest``, ``periodic``, ``constant`` or ``cut``; by default the denoiser's own.
    overwrite : bool
        Replace an existing Zarr at ``output``.
    fresh : bool
        Start over, even where an earlier run can be resumed.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.watching.progress.Progress` about twice a second; by default a
        progress bar is shown at a terminal and in a notebook.
    sides : mapping, optional
        Per-pixel inputs, name to path: ``sigma``, ``mask``.
    channels : sequence or mapping, optional
        Names or numbers of the channels to read; or other denoisers of some, such as ``{"FISH": {"name": "none"}}``. An option may have a value
        for each channel as well: ``strength={"DAPI": 1.0, "FISH": 0.5}``.
    noise : str or mapping
        Model of the noise, for a denoiser with ``sigma="auto"``: ``"gaussian"``, ``"poisson-gaussian"`` for counted
        photons, ``"auto"``, or the noise section of a job file with ``gain``, ``offset`` and ``read_sigma``.
    device : str
        ``cpu``, ``cuda``, or ``auto``: GPUs where the cluster has them for its workers.
    precision : str
        Precision of networks: ``float32``, ``tf32``, ``float16`` or ``bfloat16``.
    **options
        Options of the denoiser.

    Returns
    -------
    Outcome
        Blocks done, seconds, throughput, peak memory of a worker.

    Raises
    ------
    ConfigError
        When an argument is not valid: the message has the names of a job file.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> halotile.denoise("noisy.zarr", "clean.zarr", "tv", strength=1.0, sigma="auto")  # doctest: +SKIP
    """
    choice = denoiser_of(denoiser, depth, options)
    others = channels if isinstance(channels, Mapping) else {}
    if wrong := [name for name, other in others.items() if not isinstance(other, Mapping) or "name" not in other]:
        raise ConfigError(
            f"channels[{wrong[0]!r}] is {shown(others[wrong[0]])}. Write a mapping with a name, such as {{'name': 'none'}}."
        )
    job = Denoising(
        input=Input(
            path=_path("source", source),
            channels=() if isinstance(channels, Mapping) else tuple(channels),
            sides={name: _path(f"sides[{name!r}]", path) for name, path in (sides or {}).items()},
        ),
        output=Output(path=_path("output", output), overwrite=overwrite),
        denoiser=choice,
        channels={str(name): DenoiserChoice.from_mapping(other) for name, other in others.items()},
        noise=section("noise", NoiseModel, noise, "model"),
        tile=Tile(boundary=boundary, depth="auto" if depth is None else depth),  # type: ignore[arg-type]  # looked at in the plan
        # Other values are refused when the plan is made.
        run=Run(
            workers=workers,
            memory_per_worker=memory_per_worker,
            device=device,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
        ),
    )
    return run_call(job, cluster, fresh=fresh, observer=observer)


def denoiser_of(denoiser: Any, depth: int | None, options: dict[str, Any]) -> DenoiserChoice | GivenFunction:
    """Return the denoiser that a name, a mapping or a function describes."""
    if isinstance(denoiser, Mapping):
        options = {**denoiser, **options}
        denoiser = options.pop("name", None)
    if isinstance(denoiser, str):
        if isinstance(options.get("weights"), str | os.PathLike):
            options["weights"] = _path("weights", options["weights"])
        return DenoiserChoice(name=denoiser, options=options)
    if not callable(denoiser):
        raise ConfigError(
            f"denoiser is {shown(denoiser)}: that is neither a name nor a function. Write a name such as 'tv'."
        )
    if depth is None:
        raise ConfigError("a function needs depth: how far, in pixels, it looks. Write depth=8, say.")
    return GivenFunction(call=partial(denoiser, **options) if options else denoiser, depth=depth)


def _path(argument: str, path: Any) -> str:
    """Return a path as absolute text, so that the run can be resumed from any folder."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"{argument} is of type {type(path).__name__}, and denoise goes from disk to disk. "
            'Give a path, such as "scan.npy" or "scan.zarr"; for arrays use halotile.map_overlap.'
        )
    return whole_path(argument, path)
