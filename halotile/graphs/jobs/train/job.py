"""The job ``train`` as plain frozen values, its checks and rules, and its plan and result as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from halotile.graphs.kinds.base import Check, Figures, Row
from halotile.graphs.kinds.sections import Input, Job, NamedChoice
from halotile.graphs.plans.rows import cost_rows
from halotile.graphs.rules.values import Above, AtLeast, Faults, filled, seed, workers_of_slots
from halotile.graphs.watching.progress import describe_figures
from halotile.graphs.words import counted, seconds_text, shape_text
from halotile.tasks.options import Auto, OwnPath, ReadPath


@dataclass(frozen=True, kw_only=True)
class NetworkChoice(NamedChoice):
    """A network by name, with its options."""

    registry: ClassVar[str] = "networks"
    attribute: ClassVar[str] = "NETWORK"

    name: str = "unet"
    """Name of a file in halotile.tasks.networks or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that network."""


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """The trained weights."""

    path: OwnPath
    """Path of the file to write, .safetensors."""
    overwrite: bool = False
    """Replace an existing file at this path."""


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """A training job. Of steps, epochs and minutes one is written at most."""

    kind: ClassVar[str] = "train"
    joins_images: ClassVar[bool] = True

    input: Input
    output: WeightsFile
    method: Literal["noise2void", "noise2void2", "noise2self", "noise2noise"] = "noise2void"
    """noise2void, noise2void2, noise2self: from noisy images alone, whose noise differs from pixel to pixel; noise2noise: from pairs."""
    structure: Literal["none", "x", "y"] | Auto = "auto"
    """Axis along which neighbouring pixels share noise: pixels are hidden with those beside them along it. auto: measured."""
    second: ReadPath | None = None
    """noise2noise: the same as the input, with other noise."""
    network: NetworkChoice = field(default_factory=NetworkChoice)
    steps: int | Auto = "auto"
    """Number of steps, each with one batch; auto: 1000."""
    epochs: float | None = None
    """In place of steps: how often, on average, a pixel is in a patch."""
    minutes: float | None = None
    """In place of steps: as many as take about so long on this machine, by a trial."""
    patch: int = 64
    """Edge of a patch in pixels."""
    batch: int = 16
    """Number of patches in a step."""
    slots: int = 4
    """Parts of a batch that workers share: no more workers can take part. The weights depend on it, and not on the number of workers."""
    lr: float = 1e-3
    """Learning rate of Adam in the first step; it falls to 0."""
    mode: Literal["exact", "fast"] = "exact"
    """exact: gradients are added in the order of the slots; fast: in that of the backend, and the weights depend on the number of workers."""
    seed: int = 0
    """The places of patches and all other random numbers follow from it."""

    @property
    def place(self) -> str:
        """Path of the weights."""
        return self.output.path

    def moved_to(self, place: str) -> Self:
        """Return the same job with its weights at another path."""
        return replace(self, output=replace(self.output, path=place))


def shortened(job: Training, rows: int) -> Training:
    """Return the same training with so many steps, each a row of its curve."""
    return replace(job, steps=rows, epochs=None, minutes=None)


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
        yield ((name,), f"conflicts with {names[0]}, which also sets the length of the training; leave one of them out")


def pairs(method: str, second: str | None) -> Faults:
    """Yield a second image that is missing, or that the method has no use for."""
    if method == "noise2noise" and second is None:
        yield (
            ("second",),
            "is not there, and method: noise2noise learns from pairs; write the path of the second image",
        )
    elif method != "noise2noise" and second is not None:
        yield (("second",), f"is for method: noise2noise, and method is {method}; leave it out, or write that method")


def structure_of_pairs(method: str, structure: str) -> Faults:
    """Yield an axis that the method has no use for."""
    if method == "noise2noise" and structure in ("x", "y"):
        yield (
            ("structure",),
            f"is {structure}, and method: noise2noise hides no pixels; leave it out, or write method: noise2void",
        )


def parts_of_batch(batch: int, slots: int) -> Faults:
    """Yield parts that do not divide a batch."""
    if batch % slots:
        yield ("slots",), f"is {slots}, which does not divide batch: {batch}; write a divisor"


def keys_of_input(input: Input) -> Faults:  # noqa: A002 - the name of the section
    """Yield keys of the input that a training has no use for."""
    unused = {"sides": {}, "spacing": {}, "stripes": "none", "defects": "none", "defects_in_output": "replaced"}
    for key, default in unused.items():
        if getattr(input, key) != default:
            yield ("input", key), "is for job: denoise; leave it out"


RULES = (one_length, pairs, structure_of_pairs, parts_of_batch, workers_of_slots, keys_of_input)


OTHER = "{name: tv, strength: 1.0, sigma: auto}"  # a denoiser that needs no training, to compare with
FAST = "mode fast: added in the order of the backend; the bits of the weights depend on the number of workers"


HIDDEN = {"none": ""} | {axis: f", pixels hidden with their neighbours along {axis}" for axis in "xy"}


def title(job: Training) -> str:
    """Describe a job in a few words."""
    return f"{job.network.name} trained by {job.method} on {job.input.path}"


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    steps, workers = counted(figures["steps"], "step"), counted(figures["workers"], "worker")
    return f"{figures['network']} trained by {figures['method']} on {_images(figures)}: {steps}, {workers}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    second = figures["second"]
    rows = [("input", str(figures["input"])), ("", _images(figures))]
    if second:
        rows.append(("second", str(second)))
    took = figures["seconds_per_step"]
    length = (
        f"{counted(figures['steps'], 'step')} of {figures['batch']} patches of {figures['patch']} × {figures['patch']}"
    )
    return [
        *rows,
        ("output", str(figures["output"])),
        ("network", f"{figures['network']}, {figures['channels_text']}, on {figures['device_text']}"),
        ("method", f"{figures['method']}{HIDDEN[figures['structure']]}"),
        *([("gradients", FAST)] if figures["mode"] == "fast" else []),
        ("", ""),
        ("length", f"{length}: {figures['epochs']:.3g} epochs"),
        *([("", f"about {seconds_text(took * figures['steps'])}, by a trial")] if took else []),
        ("", ""),
        *cost_rows(figures),
    ]


def result_rows(last: Mapping[str, float], denoiser: Mapping[str, Any], examples: Path) -> list[Row]:
    """Return the end of a training as a table.

    >>> last = {"loss": 0.25, "validation": 0.3, "error": 0.0412, "tv": 0.05, "nlm": 0.06}
    >>> rows = result_rows(last, {"name": "unet", "weights": "unet.safetensors"}, Path("examples.png"))
    >>> for row in rows:
    ...     print(*row)
    loss 0.25, on held-out patches 0.3
    error 0.0412 of that of the noisy image, by an unbiased estimate on a held-out crop; tv 0.05, nlm 0.06
    examples examples.png
    denoise with denoiser: {name: unet, weights: unet.safetensors}
    compare a short training may be worse than tv. With a job file denoise.yaml of that denoiser: recon-cli try denoise.yaml --set "denoiser={name: unet, weights: unet.safetensors},{name: tv, strength: 1.0, sigma: auto}"
    """
    held_out = f", on held-out patches {last['validation']:.4g}" if "validation" in last else ""
    keys = ", ".join(f"{key}: {value}" for key, value in denoiser.items())
    rows = [("loss", f"{last['loss']:.4g}{held_out}")] if "loss" in last else []
    if "error" in last:
        others = ", ".join(f"{name} {last[name]:.3g}" for name in ("tv", "nlm"))
        rows.append(
            (
                "error",
                f"{last['error']:.3g} of that of the noisy image, by an unbiased estimate on a held-out crop; {others}",
            )
        )
    compare = f'recon-cli try denoise.yaml --set "denoiser={{{keys}}},{OTHER}"'
    return [
        *rows,
        ("examples", str(examples)),
        ("denoise with", f"denoiser: {{{keys}}}"),
        ("compare", f"a short training may be worse than tv. With a job file denoise.yaml of that denoiser: {compare}"),
    ]


HUB = "library_name: halotile"
CARD = """---
{licence}
{hub}
pipeline_tag: image-to-image
tags: [denoising, {method}, {network}]
---
# {weights}

Weights of a denoiser for images like these, from a training of halotile without clean ones.

| | |
|---|---|
{facts}

```yaml
denoiser: {{{keys}}}
```

## Curve

{curve}
"""
LICENCE = "license:  # the licence of these weights, for you to fill in, such as cc-by-4.0"
CARD_ROWS = 10


def describe_weights(
    plan: Mapping[str, Any], denoiser: Mapping[str, Any], sha256: str, rows: Sequence[Figures], before: str
) -> str:
    """Return a description of weights as Markdown, with a header as model hubs read it.

    ``plan``: that of the run directory; ``denoiser``: its keys with the name of the file; ``rows``: curve; ``before``: the card of earlier weights,
    whose licence stays.
    """
    figures = plan["summary"]
    shown = [("data", f"`{Path(figures[key]).name}`") for key in ("input", "second") if figures[key]]
    shown += [row for row in plan_rows(figures) if row[0] in ("network", "method", "length")]
    shown += [
        ("pixels", f"{sum(math.prod(shape) for shape in figures['shapes']):,} ({_images(figures)})"),
        ("noise level", ", ".join(f"{level:.4g}" for level in figures["noise_levels"]) + ", in the units of the data"),
        ("sha256", f"`{sha256}`"),
        ("versions", ", ".join(f"{name} {version}" for name, version in plan["identity"]["code"].items())),
    ]
    step = -(-len(rows) // CARD_ROWS) or 1
    return CARD.format(
        licence=next((line for line in before.splitlines() if line.startswith("license:")), LICENCE),
        hub=HUB,
        **figures | denoiser,
        facts="\n".join(f"| {name} | {text} |" for name, text in shown),
        keys=", ".join(f"{key}: {value}" for key, value in denoiser.items()),
        curve="\n".join(f"- step {row['iteration']}: {describe_figures(row)}" for row in rows[::-step][::-1]),
    )


def _images(figures: Figures) -> str:
    shapes = figures["shapes"]
    return shape_text(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} images, the first {shape_text(shapes[0])}"
