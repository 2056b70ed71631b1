"""Propagation of a wave from the sample to the detector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from halotile.tasks.ptychography.recipe import Optics


class Propagator(Protocol):
    """A linear map of exit waves, (..., rows, columns), with its adjoint.

    A wave in the near field is shifted back by the fraction of a pixel by which its probe was shifted; a ``ramp`` is the spectrum
    of that shift. The far field of a shifted wave has the same intensity. Gradients are conjugates: the program needs no others, and a
    product with a conjugate costs a copy of it.
    """

    def factor(self, ramp: torch.Tensor) -> torch.Tensor | None:
        """The factors of frequencies that :meth:`forward` and :meth:`adjoint` take."""
        ...

    def forward(self, wave: torch.Tensor, factor: Any) -> tuple[torch.Tensor, Any]:
        """The wave on the detector, and what its gradient by the shift needs."""
        ...

    def adjoint(self, gradient: torch.Tensor, factor: Any) -> tuple[torch.Tensor, Any]:
        """The conjugate gradient by the exit wave, and what that by the shift needs; of a conjugate gradient."""
        ...


@dataclass(frozen=True)
class FarField:
    """A Fourier transform that keeps the energy; the detector's corner, not its middle, is the direction of the beam.

    >>> wave = torch.ones(2, 2, dtype=torch.complex64)
    >>> FarField().forward(wave, None)[0].abs().tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """

    def factor(self, ramp: torch.Tensor) -> None:
        """None."""

    def forward(self, wave: torch.Tensor, factor: Any) -> tuple[torch.Tensor, None]:
        """The Fourier transform."""
        return torch.fft.fft2(wave, norm="ortho"), None

    def adjoint(self, gradient: torch.Tensor, factor: Any) -> tuple[torch.Tensor, None]:
        """The conjugate of the inverse Fourier transform."""
        return torch.fft.fft2(gradient, norm="ortho"), None


@dataclass(frozen=True)
class NearField:
    """The angular spectrum method: each plane-wave component acquires the phase of its path.

    References
    ----------
    J. W. Goodman, Introduction to Fourier Optics, section 3.10.
    """

    transfer: torch.Tensor  # factor of each frequency, in the order of `fft2`

    @classmethod
    def from_frame(
        cls, shape: tuple[int, int], pixel: tuple[float, float], wavelength: float, distance: float
    ) -> NearField:
        """The propagation over a distance; lengths have one unit."""
        row, column = (torch.fft.fftfreq(n, step, dtype=torch.float64) for n, step in zip(shape, pixel, strict=True))
        squared = 1 / wavelength**2 - row[:, None] ** 2 - column**2
        # The common phase of all waves is left out: it is millions of turns.
        phase = 2 * math.pi * distance * (squared.clamp(min=0).sqrt() - 1 / wavelength)
        return cls(torch.polar((squared > 0).to(torch.float64), phase).to(torch.complex64))

    def factor(self, ramp: torch.Tensor) -> torch.Tensor:
        """The way to the detector, and the shift back."""
        return self.transfer * ramp.conj()

    def forward(self, wave: torch.Tensor, factor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The propagated wave, and its spectrum."""
        spectrum = torch.fft.fft2(wave) * factor
        return torch.fft.ifft2(spectrum), spectrum

    def adjoint(self, gradient: torch.Tensor, factor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The conjugate of the wave that is propagated back, and of the spectrum of the gradient."""
        spectrum = torch.fft.ifft2(gradient, norm="forward")
        return torch.fft.fft2(spectrum * factor, norm="forward"), spectrum


def propagator_of(optics: Optics, shape: tuple[int, int], device: Any) -> Propagator:
    """The propagation of waves of a shape from the sample to the detector."""
    if optics.field == "far":
        return FarField()
    near = NearField.from_frame(shape, optics.pixel, optics.wavelength, optics.distance)
    return NearField(near.transfer.to(device))
