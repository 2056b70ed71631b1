"""The model of a pattern: a probe times a part of the object, propagated; its loss and its gradients in closed form."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any, NamedTuple

import torch

from halotile.tasks.ptychography.losses import LOSSES, amplitude_mse
from halotile.tasks.ptychography.propagators import Propagator, propagator_of
from halotile.tasks.ptychography.recipe import PARTS, VARYING, ScanRecipe

Box = tuple[slice, slice]
# Parts that each pattern has for itself; its loss is beside the gradients.
OWN_PARTS = ("positions", "intensities", "shares", "pattern_loss")


@dataclass(frozen=True)
class Positions:
    """Some positions of a scan, by the first object pixel that each pattern sees."""

    pixel: torch.Tensor  # whole pixels, (positions, 2), on the CPU: slices of the object are cut there
    fraction: torch.Tensor  # fractions of a pixel, in [0, 1), (positions, 2)
    weight: torch.Tensor  # amplitude of the beam relative to the mean, (positions,)
    # Shares of the variations in the first mode of the probe, (positions, variations).
    shares: torch.Tensor | None = None

    @classmethod
    def at(cls, place: torch.Tensor, weight: torch.Tensor, shares: torch.Tensor | None = None) -> Positions:
        """Positions at places in pixels, (positions, 2), on the CPU."""
        pixel = place.floor()
        return cls(pixel.to(torch.int64), (place - pixel).to(weight), weight, shares)

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        """Concatenate several parts."""
        shares = [part.shares for part in parts if part.shares is not None]
        pixel, fraction, weight = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("pixel", "fraction", "weight")
        )
        return cls(pixel, fraction, weight, torch.cat(shares) if shares else None)

    def some(self, part: slice) -> Positions:
        """A part of them."""
        shares = None if self.shares is None else self.shares[part]
        return Positions(self.pixel[part], self.fraction[part], self.weight[part], shares)

    def box(self, pattern: tuple[int, int]) -> Box:
        """The part of the object that patterns of a shape see there."""
        if not len(self.pixel):
            return slice(0, 0), slice(0, 0)
        top, left, bottom, right = self._ends
        return slice(top, bottom + pattern[0]), slice(left, right + pattern[1])

    @cached_property
    def _ends(self) -> tuple[int, int, int, int]:
        """The first and the last pixel along each axis."""
        (top, left), (bottom, right) = self.pixel.amin(0).tolist(), self.pixel.amax(0).tolist()
        return top, left, bottom, right


@dataclass(frozen=True)
class PatternGradients:
    """Loss of some patterns and its gradients by part, in the convention of torch: twice the derivative by the conjugate.

    That of the object is in the box that the patterns see; those of positions are by pixels.
    """

    loss: torch.Tensor
    box: Box
    parts: Mapping[str, torch.Tensor]


def zero_gradients(like: PatternGradients, box: Box, count: int) -> PatternGradients:
    parts = {}
    for name, part in like.parts.items():
        shape: tuple[int, ...] = part.shape
        if name == "object":
            shape = tuple(edge.stop - edge.start for edge in box)
        elif name in OWN_PARTS:
            shape = (count, *part.shape[1:])
        parts[name] = part.new_zeros(shape)
    return PatternGradients(torch.zeros_like(like.loss), box, parts)


def added_gradients(total: PatternGradients, found: PatternGradients, some: slice) -> PatternGradients:
    """Add the gradients of some patterns to those of more, in place but for the loss."""
    inside = tuple(
        slice(own.start - outer.start, own.stop - outer.start) for own, outer in zip(found.box, total.box, strict=True)
    )
    for name, part in found.parts.items():
        if name == "object":
            total.parts[name][inside] += part
        elif name in OWN_PARTS:
            total.parts[name][some] = part
        else:
            total.parts[name].add_(part)
    return PatternGradients(total.loss + found.loss, total.box, total.parts)


@dataclass(frozen=True)
class PatternModel:
    """A propagator, a loss, and the pixels that count."""

    propagator: Propagator  # from the sample to the detector
    # `amplitude_mse`, `intensity_mse` or `poisson_nll`, summed over the pixels that count
    loss: str = "amplitude_mse"
    mask: torch.Tensor | None = None  # 1 where a pixel of the detector counts, else 0
    # samples of the wave along each axis of a pixel, whose intensities it counts together
    oversampling: int = 1

    @classmethod
    def from_recipe(cls, recipe: ScanRecipe, mask: torch.Tensor | None, device: Any) -> PatternModel:
        """The model of a reconstruction."""
        propagator = propagator_of(recipe.optics, recipe.frame, device)
        return cls(propagator, recipe.loss, mask, recipe.oversampling)

    def gradients(
        self,
        image: torch.Tensor,  # object, complex
        probe: torch.Tensor,  # modes of the probe, complex, whose intensities add
        background: torch.Tensor,  # root of the intensity that is always there
        positions: Positions,  # positions of the patterns
        patterns: torch.Tensor,  # counted intensities
        groups: Sequence[slice],  # positions of each group
        wanted: Collection[str] = PARTS,  # parts whose gradients are needed
        # modes that are added to the first one with the shares of the positions
        variations: torch.Tensor | None = None,
        # true for pixels that have no part in the gradients; their loss is the part `held_out`
        held_out: torch.Tensor | None = None,
    ) -> list[PatternGradients]:
        """Loss and gradients of each group of patterns.

        What is of one pattern is computed of all at once, and sums are made of each group. The loss of each pattern is `amplitude_mse`: others depend on its brightness.
        """
        waves = self._waves(image, probe, positions, groups, variations)
        wave = waves.on_detector
        intensity = self._counted(wave) + background.square()
        loss, slope = LOSSES[self.loss](intensity, patterns)
        ranked = loss if self.loss == "amplitude_mse" else amplitude_mse(intensity, patterns)[0]
        if self.mask is not None:
            loss, slope, ranked = loss * self.mask, slope * self.mask, ranked * self.mask
        if held_out is not None:
            slope = slope.masked_fill(held_out, 0)
        # From here on all are conjugates: see Propagator. Waves that are no longer needed are overwritten: memory is what the cores share.
        gradient = _conjugate_product_(wave, 2 * _repeated(slope, self.oversampling))
        back, back_spectrum = self.propagator.adjoint(gradient, waves.factor)
        on_object = _summed(waves.light * back) if "object" in wanted else None
        unmoved = turned = None
        on_light = back.mul_(waves.seen)
        if not {"probe", "positions", *VARYING}.isdisjoint(wanted):
            weighted = on_light if waves.weight is None else on_light * waves.weight
            on_spectrum = torch.fft.ifft2(weighted, norm="forward")
            if "positions" in wanted:
                product = on_spectrum * waves.shifted
                if waves.spectrum is not None:
                    product -= back_spectrum * waves.spectrum
                turned = _summed(product).imag
            unmoved = on_spectrum.mul_(waves.ramp)
        found = []
        for some in groups:
            own = positions.some(some)
            parts = {}
            if on_object is not None:
                parts["object"] = _added(on_object[some], own).conj().resolve_conj()
            if "background" in wanted:
                parts["background"] = 2 * background * slope[some].sum(0)
            if "intensities" in wanted:
                parts["intensities"] = _real_product(waves.light[some], on_light[some]) / own.weight
            if turned is not None:
                parts["positions"] = _moments(turned[some]) / turned[0].numel()
            if unmoved is not None:
                parts["probe"] = torch.fft.ifft2(unmoved[some].sum(0).conj())
                if own.shares is not None and waves.variations is not None:
                    parts |= _of_variations(unmoved[some, 0].conj().resolve_conj(), own.shares, waves.variations)
            kept = {name: parts[name] for name in PARTS if name in wanted and name in parts}
            if held_out is not None:
                kept["held_out"] = (ranked[some] * held_out[some]).sum(dtype=torch.float64).float().view(1)
            kept["pattern_loss"] = ranked[some].sum((1, 2))
            box = own.box((probe.shape[-2], probe.shape[-1]))
            found.append(PatternGradients(loss[some].sum(dtype=torch.float64), box, kept))
        return found

    def intensity(
        self,
        image: torch.Tensor,
        probe: torch.Tensor,
        background: torch.Tensor,
        positions: Positions,
        variations: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Expected counts, (positions, rows, columns), of arguments as of :meth:`gradients`."""
        waves = self._waves(image, probe, positions, (slice(0, len(positions.pixel)),), variations)
        return self._counted(waves.on_detector) + background.square()

    def _counted(self, wave: torch.Tensor) -> torch.Tensor:
        """Intensity of all modes in each pixel of the detector."""
        squares = torch.view_as_real(wave).square()
        intensity = _summed(squares[..., 0] + squares[..., 1])
        if self.oversampling == 1:
            return intensity
        rows, columns = (n // self.oversampling for n in intensity.shape[1:])
        bins = intensity.view(-1, rows, self.oversampling, columns, self.oversampling)
        return bins.sum((2, 4))

    def _waves(
        self,
        image: torch.Tensor,
        probe: torch.Tensor,
        positions: Positions,
        groups: Sequence[slice],
        variations: torch.Tensor | None = None,
    ) -> _Waves:
        rows, columns = probe.shape[-2:]
        # A sine may have other bits at the end of an array: those of a group do not depend on the others.
        ramps = [_ramps(positions.fraction[some], (rows, columns), probe.dtype) for some in groups]
        of_rows, of_columns = (torch.cat(each) for each in zip(*ramps, strict=True))
        ramp = (of_rows[:, :, None] * of_columns[:, None])[:, None]
        spectra, varied = torch.fft.fft2(probe)[None], None
        if variations is not None and positions.shares is not None:
            varied = torch.fft.fft2(variations)
            # A product of matrices may add in another order where there are more of them.
            added = [
                torch.view_as_real(more) * share[:, None, None, None]
                for share, more in zip(positions.shares.unbind(1), varied, strict=True)
            ]
            first = spectra[:, :1] + torch.view_as_complex(sum(added[1:], added[0]))[:, None]
            spectra = torch.cat([first, spectra[:, 1:].expand(len(first), -1, -1, -1)], 1)
        shifted = spectra * ramp
        light, weight = torch.fft.ifft2(shifted), None
        if bool((positions.weight != 1).any()):
            weight = positions.weight[:, None, None, None]
            light = light * weight
        seen = torch.stack([image[r : r + rows, c : c + columns] for r, c in positions.pixel.tolist()])[:, None]
        factor = self.propagator.factor(ramp)
        wave, spectrum = self.propagator.forward(light * seen, factor)
        return _Waves(ramp, factor, weight, shifted, light, seen, wave, spectrum, varied)


class _Waves(NamedTuple):
    """The waves of some patterns, (positions, modes, rows, columns)."""

    ramp: torch.Tensor  # factors of frequencies that shift by the fraction of a pixel
    factor: Any  # tensors of the propagation
    weight: torch.Tensor | None  # amplitude of the beam, (positions, 1, 1, 1); None where it is 1
    shifted: torch.Tensor  # the spectrum of the probe, shifted
    light: torch.Tensor  # the wave on the sample
    seen: torch.Tensor  # the object below it
    on_detector: torch.Tensor
    spectrum: Any  # kept by the propagator for the gradient of a place
    variations: torch.Tensor | None  # the spectra of the variations, not shifted


def _ramps(fraction: torch.Tensor, shape: tuple[int, int], kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of frequencies that shift by fractions of a pixel, (positions, rows) and (positions, columns): their product rounds once."""
    of_rows, of_columns = (
        torch.polar(torch.ones_like(turn), -turn).to(kind)
        for turn in (
            fraction[:, axis : axis + 1].double() * frequencies(n, fraction.device) for axis, n in enumerate(shape)
        )
    )
    return of_rows, of_columns


def _repeated(slope: torch.Tensor, oversampling: int) -> torch.Tensor:
    """The slope of a pixel for each of its samples."""
    if oversampling == 1:
        return slope
    return slope.repeat_interleave(oversampling, 1).repeat_interleave(oversampling, 2)


def _of_variations(unmoved: torch.Tensor, shares: torch.Tensor, varied: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the variations and of their shares, from the spectrum of that of the first mode of each position."""
    of_modes = torch.einsum("pv,prc->vrc", shares.to(unmoved.dtype), unmoved)
    own, common = (torch.view_as_real(wave).flatten(1).double() for wave in (unmoved, varied))
    products = (own @ common.T / unmoved[0].numel()).to(shares.dtype)
    return {"variations": torch.fft.ifft2(of_modes), "shares": products}


@cache
def frequencies(count: int, device: Any) -> torch.Tensor:
    """Radians per pixel of the frequencies along an axis, in double precision."""
    return 2 * math.pi * torch.fft.fftfreq(count, dtype=torch.float64, device=device)


def _conjugate_product_(wave: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The conjugate of a wave, (positions, modes, rows, columns), times real factors, (positions, rows, columns), in its place."""
    return wave.conj_physical_().mul_(factor[:, None])


def _summed(waves: torch.Tensor) -> torch.Tensor:
    """The sum over modes, several times as fast as ``sum``."""
    return reduce(torch.add, waves.unbind(1))


def _real_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The real part of the product of two waves, summed over each position."""
    return (a.real * b.real - a.imag * b.imag).sum((1, 2, 3))


def _moments(turned: torch.Tensor) -> torch.Tensor:
    """Sums over the frequencies of each pattern, times those of rows and of columns, (positions, 2)."""
    row, column = (frequencies(n, turned.device).to(turned.dtype) for n in turned.shape[-2:])
    return torch.stack([turned.sum(2) @ row, turned.sum(1) @ column], 1)


def _added(parts: torch.Tensor, positions: Positions) -> torch.Tensor:
    """Sum patches at positions on the object, one after the other, in the box that they cover."""
    rows, columns = parts.shape[-2:]
    box = positions.box((rows, columns))
    total = parts.new_zeros([part.stop - part.start for part in box])
    top, left = (part.start for part in box)
    for part, (r, c) in zip(parts, positions.pixel.tolist(), strict=True):
        total[r - top : r - top + rows, c - left : c - left + columns] += part
    return total
