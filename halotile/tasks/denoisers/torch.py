"""A user's own network as a denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from halotile.errors import ConfigError, WeightsError
from halotile.tasks.convolution.stable import make_steady, spread
from halotile.tasks.denoisers.base import Leveled, Model
from halotile.tasks.denoisers.common.weights import load_weights, shape_mismatches, shapes_of, summarize
from halotile.tasks.lazy import torch
from halotile.tasks.options import (
    Auto,
    OwnPath,
    check_above_zero,
    check_channels,
    check_reference,
    check_weights,
    check_whole,
    import_reference,
)
from halotile.tasks.user_code import imported_digest, value_digest, whole_digest


@dataclass(frozen=True, kw_only=True)
class UserNetwork(Leveled):
    """The ``nn.Module`` that the function named by ``import`` returns for ``options``.

    The module is called as ``module(batch)``, or as ``module(batch, sigma)`` if a noise level is
    given: a number, or a map of shape (tiles, 1, *spatial). It must be local: its receptive
    field and alignment are probed unless they are declared. Building it runs the user's code,
    which a job may do only if imports are allowed.

    >>> UserNetwork(import_="my_lab.networks:unet", receptive_field_=44, alignment_=8).receptive_field()
    44
    """

    name: ClassVar[str] = "torch"
    dims: ClassVar[tuple[int, ...]] = (2, 3)
    boundary: ClassVar[str] = "cut"
    convolutional: ClassVar[bool] = True
    tried_apart: ClassVar[bool] = True

    sigma: float | Auto | None = None
    """Noise level that the network is called with: a number, or auto to have it estimated. An image of several
    planes, such as channels, has a level for each, and calls it with a map. Omitted: the network takes the pixels alone."""
    import_: str
    """The function that builds the network: "package.module:build"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for that function."""
    weights: OwnPath | None = None
    """Weights file to load into the network: .safetensors, or .pth with nothing but tensors in it."""
    sha256: str | None = None
    """Checksum that the weights file must have."""
    receptive_field_: int | Auto = "auto"
    """Receptive field of the network, in pixels; auto: probed."""
    alignment_: int | Auto = "auto"
    """The network's total stride, in pixels; auto: probed."""
    scale: int = 1
    """Output pixels for each input pixel, on every spatial axis: 2 for super-resolution by two."""
    channels: tuple[int, int] = (1, 1)
    """Numbers of channels in and out: [1, 1] runs the network on each channel by itself."""
    bytes_per_pixel_: float = 2048.0
    """Working memory to plan for each input pixel of a tile, in bytes: about 32 times the channels of the
    widest layer at full resolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.import_)
        check_channels(self.channels)
        check_whole("scale", self.scale, 1)
        check_above_zero("bytes_per_pixel", self.bytes_per_pixel_)
        if self.receptive_field_ != "auto":
            check_whole("receptive_field", self.receptive_field_, 0)
        if self.alignment_ != "auto":
            check_whole("alignment", self.alignment_, 1)
        check_weights(self.weights, self.sha256)

    @property
    def title(self) -> str:
        """Name of the function that builds the network."""
        return self.import_

    @property
    def alignment(self) -> int:
        """The total stride; 1 until it has been probed."""
        return 1 if self.alignment_ == "auto" else self.alignment_

    @property
    def side_inputs(self) -> tuple[str, ...]:
        """A noise map, if the network takes a noise level."""
        return () if self.sigma is None else ("sigma",)

    def receptive_field(self) -> int | None:
        """The declared or probed value; None if the network still has to be probed."""
        if self.receptive_field_ == "auto" or self.alignment_ == "auto":
            return None
        return self.receptive_field_

    def probed(self, receptive_field: int, alignment: int) -> Self:
        """The denoiser with the values found by the probe in place of ``auto``."""
        return replace(
            self,
            receptive_field_=receptive_field if self.receptive_field_ == "auto" else self.receptive_field_,
            alignment_=alignment if self.alignment_ == "auto" else self.alignment_,
        )

    def files(self) -> tuple[Path, ...]:
        return () if self.weights is None else (Path(self.weights),)

    def bytes_per_pixel(self) -> float:
        return self.bytes_per_pixel_

    def check(self) -> Mapping[str, str]:
        """Build the network twice, and return digests of its code, its weights, and everything else that it holds."""
        code = imported_digest(self.import_, import_reference(self.import_))
        # One after the other: a large network need not be in memory twice.
        (weights, whole), again = _digests(self._network()), _digests(self._network())
        if weights != again[0]:
            raise ConfigError(
                f"{self.import_} builds a different network at each call: its weights are drawn anew. "
                "Write weights: FILE, or seed them in the function (torch.manual_seed)."
            )
        digests = {self.import_: code, self.weights_name: weights}
        # Some parts are numbered anew at each call, such as hooks.
        return digests | {f"network built by {self.import_}": whole} if whole and whole == again[1] else digests

    @property
    def weights_name(self) -> str:
        """Name of the digest of the weights that the function builds."""
        return f"weights built by {self.import_}"

    def weights_digest(self) -> str:
        """Digest of the weights that the function builds now: it may read them from files of its own."""
        return _weights_digest(self._network())

    def build(self) -> Model:
        """Import the function, call it, load the weights. Runs the user's code."""
        from halotile.tasks.convolution.activations import SteadyNetwork

        module = self._network()
        make_steady(module)
        return self._with_sigma(SteadyNetwork(_frozen(module)))

    def reference(self) -> Model:
        """The network as it was written, rounded as with several threads. Raises as :meth:`build` does."""
        return self._with_sigma(_frozen(spread(self._network())))

    def _with_sigma(self, module: Any) -> Model:
        """The module with its noise level, if there is one."""
        model: Model = module if self.sigma is None else _with_level(module, self.strength_at)
        return model

    def _network(self) -> Any:
        """The user's module with its weights, as it was written."""
        function = import_reference(self.import_)
        try:
            module = function(**self.options)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.import_} with options {dict(self.options)} failed: {type(error).__name__}: {error}. "
                "Correct the options, or the function."
            ) from error
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"import is {self.import_!r}, which returned a {type(module).__name__}. "
                "Write a function that returns a torch.nn.Module."
            )
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in module.parameters()):
            raise ConfigError(
                f"{self.import_} returned a network with lazy layers, whose weights are drawn at the first call. "
                "Write layers with a number of channels."
            )
        if self.weights is not None:
            self._load_into(module)
        return module

    def _load_into(self, module: Any) -> None:
        """Load the weights, all of them and nothing else."""
        tensors = load_weights(str(self.weights), self.sha256)
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            problems = shape_mismatches(shapes_of(module.state_dict()), shapes_of(tensors))
            raise WeightsError(
                f"{self.weights!r} does not fit the network of {self.import_}: {summarize(problems) or error}. "
                "Write the options that the weights were trained with."
            ) from error


def _weights_digest(network: Any) -> str:
    # Buffers by name as well: some are not in the state dictionary.
    return value_digest([dict(network.state_dict()), dict(network.named_buffers())])


def _digests(network: Any) -> tuple[str, str | None]:
    """Digests of the weights of a network, and of all that it holds; None where a part cannot be inspected."""
    return _weights_digest(network), whole_digest(network, with_code=False)


def _frozen(module: Any) -> Any:
    """Freeze a module, in single precision. A scripted module accepts ``requires_grad_`` only on its tensors."""
    for tensor in module.parameters():
        tensor.requires_grad_(False)
    return module.float().eval()


def _with_level(module: Any, strength_at: Any) -> Model:
    """Wrap a module to call it with its noise level: a number, or the map that is passed."""

    class AtLevel(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: torch.Tensor, sigma: torch.Tensor | None = None) -> Any:
            return self.module(batch, strength_at(1.0, sigma, batch.dtype))

    return AtLevel()


DENOISER = UserNetwork
