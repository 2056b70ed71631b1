"""The job ``train`` as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from halotile.graphs.kinds.sections import Input, Job, NamedChoice
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
