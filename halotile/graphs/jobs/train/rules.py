"""Checks and rules for the values and parts of a training job."""

from __future__ import annotations

from collections.abc import Mapping

from halotile.graphs.kinds.base import Check
from halotile.graphs.kinds.sections import Input
from halotile.graphs.rules.combinations import Faults, workers_of_slots
from halotile.graphs.rules.values import Above, AtLeast, filled, seed
from halotile.tasks.options import Auto

SUFFIX = ".safetensors"
LEAST_PATCH = 16


def _weights_path(path: str) -> str | None:
    if "://" in path:
        return f"{path} is in an object store, and weights are written to a disk; write a path"
    return None if path.endswith(SUFFIX) else f"{path} does not end with {SUFFIX}; write that of weights"


CHECKS: Mapping[tuple[str, str], Check] = {
    ("output", "path"): _weights_path,
    ("", "second"): filled,
    ("", "steps"): AtLeast(1),
    ("", "epochs"): Above(0),
    ("", "minutes"): Above(0),
    ("", "patch"): AtLeast(LEAST_PATCH),
    ("", "batch"): AtLeast(1),
    ("", "slots"): AtLeast(1),
    ("", "lr"): Above(0),
    ("", "seed"): seed,
}


def one_length(steps: int | Auto, epochs: float | None, minutes: float | None) -> Faults:
    """Yield a second length of the training."""
    given = {"steps": None if steps == "auto" else steps, "epochs": epochs, "minutes": minutes}
    names = [name for name, value in given.items() if value is not None]
    for name in names[1:]:
        yield (
            (name,),
            f"stands beside {names[0]}, which says how long to train as well; leave one of them out",
        )


def pairs(method: str, second: str | None) -> Faults:
    """Yield a second image that is missing, or that the method has no use for."""
    if method == "noise2noise" and second is None:
        yield (
            ("second",),
            "is not there, and method: noise2noise learns from pairs; write the path of the second image",
        )
    elif method != "noise2noise" and second is not None:
        yield (
            ("second",),
            f"is for method: noise2noise, and method is {method}; leave it out, or write that method",
        )


def parts_of_batch(batch: int, slots: int) -> Faults:
    """Yield parts that do not divide a batch."""
    if batch % slots:
        yield ("slots",), f"is {slots}, which does not divide batch: {batch}; write a divisor"


def keys_of_input(input: Input) -> Faults:  # noqa: A002 - the name of the section
    """Yield keys of the input that a training has no use for."""
    for key in ("sides", "spacing"):
        if getattr(input, key):
            yield ("input", key), "is for job: denoise; leave it out"


RULES = (one_length, pairs, parts_of_batch, workers_of_slots, keys_of_input)
