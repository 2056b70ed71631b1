"""A log-normal field of unknown correlation, and likelihoods of what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from halotile.errors import InputError
from halotile.tasks.posterior.residuals import Tree, check, numbers


class GaussianLikelihood:
    """Data with independent Gaussian noise of known standard deviation.

    Parameters
    ----------
    data : Tensor or ndarray
        Measured values, of the shape that the model returns; on the device of the latent position.
    std : float, Tensor or ndarray, optional
        Standard deviation of the noise; infinite where nothing was measured. Give this or `weights`.
    weights : float, Tensor or ndarray, optional
        ``1 / std²``; 0 where nothing was measured.

    Raises
    ------
    ConfigError
        For a standard deviation of 0 or less, or weights below 0.
    InputError
        For data that are not finite where they have a weight.

    Examples
    --------
    >>> float(GaussianLikelihood([1.0, 2.0], std=0.5).energy(torch.tensor([1.5, 2.0])))
    0.5
    """

    def __init__(self, data: Any, std: Any = None, weights: Any = None) -> None:
        check((std is None) != (weights is None), "noise has std, or weights, 1 / std². Write one of them.")
        self.data = numbers(data)
        given = numbers(std if weights is None else weights).to(self.data.device, torch.float64)
        self.root = given.reciprocal() if weights is None else given.sqrt()
        is_good = (self.root.isfinite() & (self.root >= 0)).all()
        check(is_good, "std has values that are not above 0, or weights some below 0. Write inf, or 0, for holes.")
        is_good = given.shape in ((), self.data.shape)
        check(is_good, f"noise has shape {list(given.shape)}, and the data {list(self.data.shape)}. Write the same.")
        self.root = self.root.expand(self.data.shape)
        _check_data(
            self.data, self.data.isfinite() | (self.root == 0), "std=inf or weights=0 where nothing was measured"
        )
        self.data = torch.where(self.root > 0, self.data, 0)

    def energy(self, signal: torch.Tensor) -> torch.Tensor:
        """Half the sum of squared residuals, in standard deviations."""
        return ((signal - self.data) * self.root).square().sum() / 2

    def metric_root(self, signal: torch.Tensor) -> torch.Tensor:
        """``1 / std``."""
        return self.root.to(signal.dtype)

    def transformation(self, signal: torch.Tensor) -> torch.Tensor:
        """The signal, in standard deviations."""
        return self.root.to(signal.dtype) * signal


class PoissonLikelihood:
    """Counts with a Poisson distribution whose rate is the signal.

    Parameters
    ----------
    counts : Tensor or ndarray
        Numbers of events, of the shape that the model returns; on the device of the latent position. The model returns rates above 0.

    Raises
    ------
    InputError
        For counts that are not finite, or below 0.

    Examples
    --------
    >>> float(PoissonLikelihood([2, 0]).energy(torch.tensor([1.0, 3.0])))
    4.0
    """

    def __init__(self, counts: Any) -> None:
        self.data = numbers(counts)
        _check_data(
            self.data, self.data.isfinite() & (self.data >= 0), "counts of 0 or more, and a background in the model"
        )

    def energy(self, signal: torch.Tensor) -> torch.Tensor:
        """Sum of the rates minus that of counts times logarithms of rates."""
        return (signal - torch.xlogy(self.data, signal)).sum()

    def metric_root(self, signal: torch.Tensor) -> torch.Tensor:
        """One over the root of the rate."""
        return signal.rsqrt()

    def transformation(self, signal: torch.Tensor) -> torch.Tensor:
        """Twice the root of the rate."""
        return 2 * signal.sqrt()


def _check_data(data: torch.Tensor, is_good: torch.Tensor, instead: str) -> None:
    if not is_good.all():
        place = torch.nonzero(~is_good)[0].tolist()
        raise InputError(f"the data have {float(data[tuple(place)]):g} at {place}, which cannot be. Write {instead}.")


@dataclass(frozen=True)
class CorrelatedField:
    """A positive periodic field whose logarithm is Gaussian, with a power-law spectrum that is inferred as well.

    ``field = exp(offset + zero_mode z + fluctuations * noise correlated by |k|^slope)``. It is a function of a latent position: a dictionary of tensors
    that are standard normal before anything is measured.

    Parameters
    ----------
    shape : sequence of int
        Pixels along each axis. The field is periodic: give more pixels than the image has, and cut the image out in the model.
    offset : float
        Mean of the logarithm.
    zero_mode : pair of float
        Mean and standard deviation of the strength of the logarithm's constant part, which is log-normal. One image hardly tells it, so it is fixed by default.
    fluctuations : pair of float
        Mean and standard deviation of the logarithm's standard deviation from pixel to pixel, which is log-normal.
    slope : pair of float
        Mean and standard deviation of the exponent of the power spectrum, which is normal; -4 is a smooth image.
    distances : float or sequence of float
        Sizes of a pixel along the axes.

    Examples
    --------
    >>> field = CorrelatedField((32, 32), offset=2.0)
    >>> latent = field.start()
    >>> {name: list(part.shape) for name, part in latent.items()}
    {'fluctuations': [], 'slope': [], 'zero_mode': [], 'white': [32, 32]}
    >>> field(latent).shape, bool((field(latent) > 0).all())
    (torch.Size([32, 32]), True)
    """

    shape: Sequence[int]
    offset: float = 0.0
    zero_mode: tuple[float, float] = (1.0, 0.0)
    fluctuations: tuple[float, float] = (1.0, 0.3)
    slope: tuple[float, float] = (-4.0, 0.5)
    distances: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        check(np.ndim(self.shape) == 1, f"shape is {self.shape}. Write the pixels along each axis, such as (64, 64).")
        spacings = np.shape(self.distances)
        check(
            spacings in ((), (len(self.shape),)),
            f"distances is {self.distances}. Write one number, or one for each axis of {tuple(self.shape)}.",
        )
        sizes = *self.shape, *np.broadcast_to(self.distances, len(self.shape)), self.zero_mode[0], self.fluctuations[0]
        is_good = min(sizes) > 0 <= min(self.zero_mode[1], self.fluctuations[1]) and math.prod(self.shape) > 1
        check(
            is_good,
            f"{self} cannot be. Write two pixels or more, distances and means above 0, deviations of 0 or more.",
        )

    @cached_property
    def _log_k(self) -> torch.Tensor:
        """Logarithms of the wave numbers, in units of the least one; 0 for the constant part."""
        axes = zip(self.shape, np.broadcast_to(self.distances, len(self.shape)), strict=True)
        waves = torch.meshgrid(*(torch.fft.fftfreq(n, float(d), dtype=torch.float64) for n, d in axes), indexing="ij")
        k = torch.stack(waves).square().sum(0).sqrt()
        return torch.log(torch.where(k > 0, k / k[k > 0].min(), 1))

    def start(self, seed: int = 0) -> Tree:
        """A latent position to begin with: the priors' centers, and a tenth of white noise."""
        white = np.random.default_rng(seed).standard_normal(tuple(self.shape))
        zeros = {n: torch.zeros((), dtype=torch.float64) for n in ("fluctuations", "slope", "zero_mode")}
        return {**zeros, "white": torch.from_numpy(0.1 * white)}

    def amplitudes(self, latent: Tree) -> torch.Tensor:
        """Standard deviation of each Fourier coefficient of the logarithm, that of the constant part first."""
        varies = torch.ones_like(self._log_k).to(latent["white"])
        varies.view(-1)[0] = 0
        slope = self.slope[0] + self.slope[1] * latent["slope"]
        law = varies * torch.exp(slope / 2 * self._log_k.to(varies))
        scale = _log_normal(*self.fluctuations, latent["fluctuations"]) / law.square().sum().sqrt()
        return scale * law + (1 - varies) * _log_normal(*self.zero_mode, latent["zero_mode"])

    def spectrum(self, latent: Tree) -> torch.Tensor:
        """Power of the logarithm at each multiple of the least wave number along the first axis."""
        along = slice(1, self.shape[0] // 2 + 1), *(0 for _ in self.shape[1:])
        return self.amplitudes(latent)[along].square()

    def logarithm(self, latent: Tree) -> torch.Tensor:
        """Logarithm of the field."""
        waves = torch.fft.fftn(self.amplitudes(latent) * latent["white"], dim=tuple(range(-len(self.shape), 0)))
        return self.offset + waves.real + waves.imag

    def __call__(self, latent: Tree) -> torch.Tensor:
        return torch.exp(self.logarithm(latent))


def _log_normal(mean: float, std: float, white: torch.Tensor) -> torch.Tensor:
    """A positive number of that mean and standard deviation, for one that is standard normal."""
    spread = math.log1p((std / mean) ** 2)
    return torch.exp(math.log(mean) - spread / 2 + math.sqrt(spread) * white)
