"""What the words of a job mean for this image: its denoiser, axes, side inputs, values and noise level."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from halotile.errors import ConfigError, DamagedData, InputError, OutputRefused, ResumeRefused
from halotile.graphs.amounts import counted
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.sections import DenoiserChoice
from halotile.graphs.plans.plan import run_directory_of
from halotile.registry import find
from halotile.storage.arrays import Source, open_source
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.views import ChannelAxis
from halotile.tasks.denoisers.base import Denoiser, Leveled
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.finite import describe_range
from halotile.tasks.noise.estimate import estimate_noise_level
from halotile.tasks.options import description_of, import_from, job_key, required_keys
from halotile.tasks.roles import Roles
from halotile.tasks.trials.user_code import qualified_name


class Imports(Protocol):
    """Whether a job may import code of the user's own, and from where."""

    @property
    def allow_import(self) -> bool:
        """Whether it may."""
        ...

    @property
    def import_folder(self) -> str | None:
        """The folder that imports start from, before all others."""
        ...


def make_denoiser(choice: Any, job: Imports) -> Denoiser:
    """The denoiser that a job names, with its options checked; one that was given from Python, as it is.

    Raises
    ------
    UnknownName
        When there is none of that name.
    ConfigError
        When its options are wrong, or it would run the user's code without being allowed to.
    """
    if not isinstance(choice, DenoiserChoice):
        given: Denoiser = choice
        return given
    kind = find("denoisers", choice.name).DENOISER
    fields = {job_key(field.name): field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(choice.options) - set(fields))
    if unknown:
        raise ConfigError(
            f"denoiser {choice.name} has no option {unknown[0]!r}. Write some of {', '.join(sorted(fields))}."
        )
    if "import" in fields:
        allow_imports(f"denoiser {choice.name}", choice.options, job)
    left_out = [key for key in required_keys(kind) if key not in choice.options]
    if left_out:
        told = "".join(f" {key} is {what}." for key in left_out if (what := description_of(kind, key)))
        raise ConfigError(
            f"denoiser {choice.name}: write {' and '.join(left_out)}, which has no default.{told}"
        )
    try:
        # A file has lists where the options are tuples.
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in choice.options.items()}
        denoiser: Denoiser = kind(**{fields[key]: value for key, value in options.items()})
    except TypeError as error:
        raise ConfigError(f"denoiser {choice.name}: {error}. `recon-cli schema` lists its options.") from None
    return denoiser


def allow_imports(what: str, options: Mapping[str, Any], job: Imports) -> None:
    """Have code of the user's own be found beside the job file, or refuse to run it."""
    if not job.allow_import:
        raise ConfigError(
            f"{what} runs code of your own ({options.get('import')}). If you trust this job file, add --allow-import."
        )
    import_from(job.import_folder)


def computed_by(denoiser: Denoiser, device: str, precision: str) -> tuple[str, str, tuple[str, ...]]:
    """What computes a denoiser, how exactly, and what is to be said where that is not what was asked for."""
    notes = []
    if device != "cpu" and isinstance(denoiser, ArrayDenoiser):
        device = "cpu"
        notes.append(f"{denoiser.title} is a function of arrays and computes on CPUs")
    if precision != "float32" and not denoiser.convolutional:
        notes.append(
            f"run.precision is {precision}, which is for networks: {denoiser.title} computes in float32"
        )
        precision = "float32"
    elif precision == "tf32" and device == "cpu":
        notes.append("run.precision is tf32, which is a format of GPUs: CPUs compute in float32")
        precision = "float32"
    return device, precision, tuple(notes)


def describe_denoiser(denoiser: Denoiser) -> dict[str, Any]:
    """A denoiser as JSON: its name and every option. A function is told by its name."""
    options = {
        job_key(field.name): getattr(denoiser, field.name)
        for field in dataclasses.fields(denoiser)  # type: ignore[arg-type]  # as every denoiser has to be
    }
    return {"name": denoiser.name} | {key: _as_json(value) for key, value in options.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, partial):
        return {
            "call": _as_json(value.func),
            "args": _as_json(value.args),
            "kwargs": _as_json(value.keywords),
        }
    if callable(value):
        return qualified_name(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def check_paths(source: Source, output: Path) -> None:
    """Refuse an output that is the input, lies in it, or holds it."""
    check_whole(source.path)
    read, written = Path(source.path).resolve(), output.resolve()
    if read == written:
        raise OutputRefused(f"output.path is {output}: that is the input. Write another path.")
    if read in written.parents:
        raise OutputRefused(
            f"output.path is {output}: that lies inside the input {read}. Write it elsewhere."
        )
    if written in read.parents:
        raise OutputRefused(f"output.path is {output}: the input {read} lies inside it. Write it elsewhere.")


def check_whole(path: str) -> None:
    """Refuse an input that a run has begun to write and not finished: some of its blocks are not there.

    Raises
    ------
    InputError
        With what is done, and how to go on.
    """
    for output in (Path(path), Path(path).parent):  # of an OME-Zarr group, a level is read
        if (
            not output.name
            or not (directory := RunDirectory(run_directory_of(output))).journal_path.is_file()
        ):
            continue
        with suppress(DamagedData, ResumeRefused):  # damaged, or of another version: nobody knows
            journal = Journal.open_any(directory.journal_path)
            if left := journal.total - len(journal.done):
                raise InputError(
                    f"{output} is the output of a run that has {left:,} of {counted(journal.total, 'block')} left to do. "
                    f"`recon-cli resume {shlex.quote(str(output))}` finishes it; move {directory.path} away to read it as it is."
                )


def assign_axes(job: Denoising, denoiser: Denoiser, source: Source) -> tuple[Roles, Readable]:
    axes = source.axes
    space = [letter for letter in axes if letter in "zyx"]
    if job.tile.axes != "auto":
        tiled = list(job.tile.axes)
    else:
        wanted = next((dims for dims in denoiser.dims if dims <= len(space)), denoiser.dims[-1])
        tiled = space[-wanted:]
    missing = [letter for letter in tiled if letter not in axes]
    if missing:
        raise ConfigError(
            f"tile.axes is {''.join(tiled)!r}, the image's axes are {''.join(axes)!r}. Write some of these."
        )
    if len(tiled) not in denoiser.dims:
        raise ConfigError(
            f"tile.axes is {''.join(tiled)!r}: {denoiser.title} works on {' or '.join(map(str, denoiser.dims))} axes. "
            f"The image has {''.join(axes)!r}; choose that many of them."
        )
    readable: Readable = source
    channels = denoiser.channels[0]
    if denoiser.channels == (1, 1):
        return Roles(axes, tuple(sorted(axes.index(a) for a in tiled)), None), readable
    if "c" not in axes:
        if channels != 1:
            raise InputError(
                f"{denoiser.title} takes {channels} channels, the image has axes {''.join(axes)!r} without c. "
                "Name its channel axis with input.axes, or use a network of one channel."
            )
        readable, axes = ChannelAxis(source), ("c", *axes)
    channel = axes.index("c")
    if readable.shape[channel] != channels:
        raise InputError(
            f"{denoiser.title} takes {channels} channels, the image has {readable.shape[channel]}. "
            "Use a network of as many channels."
        )
    return Roles(axes, tuple(sorted(axes.index(a) for a in tiled)), channel), readable


def open_sides(job: Denoising, denoiser: Denoiser, source: Readable, roles: Roles) -> dict[str, Source]:
    sides: dict[str, Source] = {}
    allowed = {*denoiser.side_inputs, "mask"}
    spatial_shape = tuple(source.shape[i] for i in roles.spatial)
    for name, path in job.input.sides.items():
        if name not in allowed:
            raise ConfigError(
                f"input.sides.{name}: {denoiser.title} has no such side input. Write one of {', '.join(sorted(allowed))}."
            )
        if name == "mask" and (denoiser.scale != 1 or denoiser.channels[0] != denoiser.channels[1]):
            raise ConfigError(
                f"input.sides.mask: {denoiser.title} changes the image's shape, so no pixel can be kept. Leave the mask out."
            )
        side = open_source(path)
        if side.shape not in (source.shape, spatial_shape):
            raise InputError(
                f"input.sides.{name} has shape {side.shape}. Give it the image's shape {source.shape} "
                f"or that of its tiled axes {spatial_shape}."
            )
        sides[name] = side
    return sides


def value_range(job: Denoising, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    given = job.input.range
    if given != "auto":
        return (float(given[0]), float(given[1]))
    return (0.0, float(np.iinfo(dtype).max)) if dtype.kind in "iu" else None


def check_units(
    denoiser: Denoiser, values: tuple[float, float] | None, sides: Mapping[str, Readable]
) -> None:
    """Refuse a noise level, or a strength in the place of one, that counts in other numbers than the image that is denoised.

    Raises
    ------
    ConfigError
        Saying what to write.
    """
    if values is None:
        return
    sigma = getattr(denoiser, "sigma", None)
    is_known = sigma is not None or "sigma" in sides
    in_units = {
        "sigma": sigma if "sigma" in denoiser.side_inputs else None,
        "strength": getattr(denoiser, "strength", None)
        if isinstance(denoiser, Leveled) and not is_known
        else None,
    }
    for key, given in in_units.items():
        if isinstance(given, int | float) and given > 1:
            what, instead = ("noise", "auto") if key == "sigma" else ("strength", "sigma: auto beside it")
            raise ConfigError(
                f"denoiser.{key} is {given:g}. {describe_range(values, what)} "
                f"Write {key}: {given / (values[1] - values[0]):.3g}, or {instead}."
            )


def choose_noise_level(
    denoiser: Denoiser,
    source: Readable,
    values: tuple[float, float] | None,
    previous: Mapping[str, Any] | None,
) -> tuple[Denoiser, float | None]:
    """The denoiser told the noise level, if it wants one: estimated once, for the whole image.

    A resumed run keeps the estimate it began with.
    """
    if not denoiser.wants_noise_level:
        return denoiser, None
    level = previous["identity"].get("noise_level") if previous else None
    if level is None:
        low, high = values or (0.0, 1.0)
        level = estimate_noise_level(source) / (high - low)
    return denoiser.with_noise_level(level), level
