"""A denoiser of white noise applied to photon noise: transformed, denoised, and transformed back, in rounds.

Only single additions, multiplications, divisions and roots, each rounded the same in every lane: bits do not depend on tiles.
"""

from __future__ import annotations

import math

import torch

from halotile.tasks.denoisers.base import Model, number_like

SHARES = (1.0, 0.6, 0.4)  # share of the image in the mixture with the last estimate that each round denoises

LEAST = 0.375  # variance of the noise at the least, in squares of the gain, where it is taken from an estimate


class PhotonRounds(torch.nn.Module):  # type: ignore[misc]  # torch has no types
    """``x_k = T⁻¹ D(T(a_k z + (1 - a_k) x_(k-1)))``, T the generalised Anscombe transform and T⁻¹ its exact unbiased inverse.

    A mixture of the image with an estimate is again like counts, of less noise: divided by ``a²``, its variance is its mean.
    A denoiser that keeps the mean needs T in the first round alone. In the others it takes the mixture itself, with a map of
    its noise from the last estimate: what is averaged across an edge after T comes out too dark.
    Where the gain is 0, noise has one level, and the first round is all: ``x = D(z)``.

    ``model``: ``D``, with the noise level as a side input; ``gain, variance``: the noise of a pixel ``z`` has the variance ``gain * z + variance``,
    unless there are side inputs of these names; ``white``: the value of the image that the denoiser sees as 1; ``keeps_mean``: the denoiser keeps
    the mean.

    References
    ----------
    M. Mäkitalo, A. Foi, Optimal inversion of the generalized Anscombe transformation for Poisson-Gaussian noise,
    IEEE Trans. Image Process. 22 (2013) 91-103. L. Azzari, A. Foi, Variance stabilization for noisy+estimate
    combination in iterative Poisson denoising, IEEE Signal Process. Lett. 23 (2016) 1086-1090.
    """

    def __init__(self, model: Model, gain: float, variance: float, white: float, *, keeps_mean: bool = False) -> None:
        super().__init__()
        self.model, self.keeps_mean = model, keeps_mean
        self.gain, self.variance, self.white = gain, variance, white

    def forward(
        self,
        batch: torch.Tensor,
        gain: torch.Tensor | None = None,
        variance: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Denoise a batch, in the units of the image."""
        gain = number_like(self.gain if gain is None else gain, batch)
        variance = number_like(self.variance if variance is None else variance, batch)
        estimate, counts = batch, gain > 0
        for share in SHARES:
            mixture = batch if share == 1 else (batch * share).add_(estimate * (1 - share))
            if self.keeps_mean and share < 1:
                noise = (gain * estimate).add_(variance).maximum(gain * gain * LEAST).sqrt_().mul_(share)
                found = self._denoised_by_map(mixture, noise, valid)
            else:
                found = self._denoised(mixture, gain * share**2, variance * share**2, valid)
            estimate = found if share == 1 else torch.where(counts, found, estimate)
        return estimate

    def _denoised_by_map(self, image: torch.Tensor, noise: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Denoise an image whose noise is known at each pixel."""
        sides = {"sigma": noise[:, :1].div(self.white)}
        image = image.div(self.white)
        if valid is not None:
            sides["valid"] = valid
            image.mul_(valid)
        return self.model(image, **sides).to(image.dtype).mul_(self.white)

    def _denoised(
        self, image: torch.Tensor, gain: torch.Tensor, variance: torch.Tensor, valid: torch.Tensor | None
    ) -> torch.Tensor:
        """Denoise an image whose noise has the variance ``gain * image + variance``, transformed where that grows."""
        counts, level = gain > 0, variance.clamp_min(0).sqrt_().div_(self.white)
        at_zero = (gain * gain).mul_(0.375).add_(variance)
        unit = (gain * self.white).add_(at_zero).clamp_min_(0).maximum(gain * gain).sqrt_()
        transformed = (image * gain).add_(at_zero).clamp_min_(0).sqrt_().div_(unit)
        transformed = torch.where(counts, transformed, image.div(self.white))
        sides = {"sigma": torch.where(counts, (gain / unit).mul_(0.5), level).expand_as(image[:, :1])}
        if valid is not None:
            transformed.mul_(valid)
            sides["valid"] = valid
        denoised = self.model(transformed, **sides).to(image.dtype)
        inverse = exact_inverse(denoised * (unit * 2).div_(gain)).mul_(gain).sub_(variance / gain)
        return torch.where(counts, inverse, denoised.mul_(self.white))


def exact_inverse(d: torch.Tensor) -> torch.Tensor:
    """Mean of the Poisson counts whose roots, ``2 sqrt(count + 3/8)``, have the mean ``d``: a closed form that is 0 at the least ``d``."""
    d = d.clamp_min(2 * math.sqrt(0.375))
    square = d * d
    counts = (square * 0.25).add_(d.reciprocal() * (math.sqrt(1.5) / 4)).sub_(square.reciprocal() * 1.375)
    return counts.add_((square * d).reciprocal_().mul_(0.625 * math.sqrt(1.5))).sub_(0.125)
