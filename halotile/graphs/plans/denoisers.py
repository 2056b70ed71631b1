"""The denoiser that a job names: made, described, and given a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import DenoiserChoice
from halotile.registry import find
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.options import description_of, import_from, job_key, required_keys
from halotile.tasks.user_code import qualified_name


class Imports(Protocol):
    """Permission of a job to import the user's own code, and the folder of that code."""

    @property
    def allow_import(self) -> bool:
        """True where such imports are allowed."""
        ...

    @property
    def import_folder(self) -> str | None:
        """Folder that imports search first."""
        ...


def make_denoiser(choice: Any, job: Imports) -> Denoiser:
    """Return the denoiser that a job names, with its options checked; an object from a script as it is.

    Raises
    ------
    UnknownName
        When there is no denoiser of that name.
    ConfigError
        When its options are wrong, or it would run the user's code without permission.
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
        hints = "".join(f" {key} is {text}." for key in left_out if (text := description_of(kind, key)))
        raise ConfigError(
            f"denoiser {choice.name}: write {' and '.join(left_out)}, which has no default.{hints}"
        )
    try:
        # A file has lists where the options are tuples.
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in choice.options.items()}
        denoiser: Denoiser = kind(**{fields[key]: value for key, value in options.items()})
    except TypeError as error:
        raise ConfigError(f"denoiser {choice.name}: {error}. `recon-cli schema` lists its options.") from None
    return denoiser


def allow_imports(what: str, options: Mapping[str, Any], job: Imports) -> None:
    """Make the user's own code beside the job file importable, or refuse to run it."""
    if not job.allow_import:
        raise ConfigError(
            f"{what} runs code of your own ({options.get('import')}). If you trust this job file, add --allow-import."
        )
    import_from(job.import_folder)


def computed_by(denoiser: Denoiser, device: str, precision: str) -> tuple[str, str, tuple[str, ...]]:
    """Return device and precision of a denoiser, with notes where these differ from what was asked for."""
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
    """Return a denoiser as JSON: its name and every option. A function is represented by its name."""
    options = {
        job_key(field.name): getattr(denoiser, field.name)
        for field in dataclasses.fields(denoiser)  # type: ignore[arg-type]  # every denoiser has to be a dataclass
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
