"""The denoiser of a job: described, and given a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.function import ArrayDenoiser
from halotile.tasks.options import option_fields
from halotile.tasks.user_code import qualified_name


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
    options = {key: getattr(denoiser, field.name) for key, field in option_fields(type(denoiser)).items()}
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
