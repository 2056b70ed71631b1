"""How far a run is: one immutable value, handed to whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a run. Counts are blocks unless a name says otherwise."""

    phase: str
    done: int
    resumed: int
    total: int
    pixels_done: int
    pixels_total: int
    seconds: float
    read_bytes: int = 0
    written_bytes: int = 0
    workers: int = 0
    peak_memory_bytes: int = 0
    start_seconds: float = 0.0
    """From the beginning of the run until its workers were there; :attr:`seconds` follow."""
    device_peak_bytes: int = 0
    """The most that a worker's tensors held on a GPU."""
    compute_seconds: float = 0.0
    """Of all workers, each by the clock of what computes there."""
    retried: int = 0
    failed: int = 0
    message: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What a solver's last iteration came to: iteration, iterations, misfit, change, psnr."""

    @property
    def megapixels_per_second(self) -> float:
        """Pixels denoised by this run, per second of it."""
        return self.pixels_done / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """Bytes read and written by this run, per second of it."""
        return (self.read_bytes + self.written_bytes) / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Time left at the rate of the blocks that this run itself has done. None before the first."""
        own = self.done - self.resumed
        if own <= 0:
            return None
        return (self.total - self.done) * self.seconds / own

    def to_json(self) -> dict[str, Any]:
        """The value and what is derived from it, for status files."""
        return asdict(self) | {
            "megapixels_per_second": self.megapixels_per_second,
            "megabytes_per_second": self.megabytes_per_second,
            "eta_seconds": self.eta_seconds,
        }


Observer = Callable[[Progress], None]
"""Called from the driver about twice a second, and whenever there is a message."""


_FIGURES = {
    "misfit": "misfit {:.4g}",
    "objective": "objective {:.4g}",
    "residual": "residual {:.3g}",
    "change": "change {:.3g}",
    "psnr": "PSNR {:.2f} dB",
}


def describe_figures(figures: Mapping[str, float]) -> str:
    """What an iteration came to, in a line.

    Examples
    --------
    >>> describe_figures({"iteration": 3, "misfit": 1234.5, "change": 0.01234, "psnr": 27.31, "seconds": 1.5})
    'misfit was 1234, change 0.0123, PSNR 27.31 dB'
    >>> describe_figures({"iteration": 3, "misfit": 1234.5, "residual": 0.01234})
    'misfit 1234, residual 0.0123'
    """
    # A gradient tells the misfit of the image that the iteration began with; cg knows that of the one it made.
    was = ("misfit", "objective") if "residual" not in figures else ()
    texts = _FIGURES | {name: f"{name} was {{:.4g}}" for name in was}
    return ", ".join(text.format(figures[name]) for name, text in texts.items() if name in figures)
