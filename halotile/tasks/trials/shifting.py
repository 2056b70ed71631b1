"""Whether a denoiser's result shifts with the image, and by which shifts: its alignment."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from halotile.errors import ConfigError
from halotile.tasks.denoisers.base import NARROW, ROUNDING
from halotile.tasks.devices.device import is_out_of_memory
from halotile.tasks.trials.trial import Trial

if TYPE_CHECKING:
    import torch

ALIGNMENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 27, 28, 32, 36, 40, 48, 54, 56, 64)
"""Total strides to try."""
COMPARED = 48
"""Least number of pixels compared between an image and its shifted copy."""
CLEAR = 1e-3
"""Difference of a shifted result in single precision, relative to the largest pixel, that rounding cannot explain."""


def alignment_along(trial: Trial, axis: int, reach: int, likely: int) -> int:
    """The likely shift, if the result shifts with the window by it, else the least shift for which it does."""
    rough = Shifting(trial, axis, reach)
    exact: Shifting | None = None
    for shift in dict.fromkeys((likely, *ALIGNMENTS)):
        change = rough.change(shift)
        if change and change <= CLEAR:
            # Double precision takes ten times as long: it decides only where bits of single precision differ.
            exact = exact or Shifting.in_double(trial, axis, reach)
            change = 0.0 if exact.follows(shift) else math.inf
        if not change:
            return shift
    raise ConfigError(
        f"the result of {trial.name} does not shift with the image by any usual stride of up to {ALIGNMENTS[-1]} "
        "pixels: it depends on the position of the tile. A position encoding does that, and upsampling "
        "with align_corners=True. Write a network without them; or, if its total stride is another number, receptive_field and alignment."
    )


@dataclass
class Shifting:
    """Comparison of a model's result for a window with that for the window shifted along an axis."""

    trial: Trial
    axis: int
    reach: int
    tolerance: float = ROUNDING
    """Difference, relative to the largest pixel; contributions below it are hidden."""
    is_double: bool = False
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    """Results of windows that are not shifted, by their length."""

    @classmethod
    def in_double(cls, trial: Trial, axis: int, reach: int) -> Shifting:
        """With a copy of the model in double precision; in single precision if the model cannot be converted."""
        import torch

        single = cls(trial, axis, reach)
        if not isinstance(trial.model, torch.nn.Module):
            return single
        try:
            double = replace(trial, model=copy.deepcopy(trial.model).double())
            with torch.inference_mode():
                double.run(double.noise(double.shape(0, NARROW[trial.dims])).double())
        except Exception as error:  # it creates tensors in single precision, or cannot be copied
            if is_out_of_memory(error):
                raise
            return single
        return cls(double, axis, reach, 1e-9, is_double=True)

    def follows(self, shift: int) -> bool:
        """Return whether shifting the window shifts the result."""
        return self.change(shift) <= self.tolerance

    def change(self, shift: int) -> float:
        """The largest change, relative to the largest pixel, away from the ends of the window."""
        # With a stride of the shift, other pixels may look as much farther.
        margin = self.reach + shift
        length = -(-(2 * margin + shift + COMPARED) // 64) * 64
        scale, kept = self.trial.scale, length - 2 * margin
        if length not in self.before:
            self.before[length] = self._result(length, 0)
        before = self.before[length].narrow(2 + self.axis, (margin + shift) * scale, (kept - shift) * scale)
        after = self._result(length, shift).narrow(2 + self.axis, margin * scale, (kept - shift) * scale)
        return float((before - after).abs().max()) / (float(before.abs().max()) or 1.0)

    def _result(self, length: int, start: int) -> torch.Tensor:
        import torch

        image = self.trial.noise(self.trial.shape(self.axis, length + ALIGNMENTS[-1]))
        window = image.narrow(2 + self.axis, start, length)
        with torch.inference_mode():
            return self.trial.run(window.double() if self.is_double else window)
