"""Progress of a run, one immutable value for all observers, and the bar that scripts and notebooks show by default."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from halotile.graphs.words import counted
from halotile.storage.lengths import shown_resolution

if TYPE_CHECKING:
    from tqdm.std import tqdm


@contextmanager
def progress_shown(observer: Observer | None) -> Iterator[Observer | None]:
    """Yield the observer; without one a bar, at a terminal or in a notebook."""
    if observer is not None or not (_in_notebook() or sys.stderr.isatty()):
        yield observer
        return
    bar = _bar_class()(dynamic_ncols=True, smoothing=0)
    try:
        yield lambda progress: _show(bar, progress)
    finally:
        bar.close()


def _show(bar: tqdm, progress: Progress) -> None:
    if progress.message:
        bar.write(progress.message, file=sys.stderr)
    bar.total, bar.initial = progress.total, progress.resumed
    bar.unit = f" {progress.counted}s"
    bar.set_description(progress.phase, refresh=False)
    if progress.pixels_done:
        bar.set_postfix_str(f"{progress.megapixels_per_second:.3g} Mpix/s", refresh=False)
    bar.n = progress.done
    bar.refresh()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


def _bar_class() -> type[tqdm]:
    """A bar of widgets in notebooks that have them, of text elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing widgets
        from tqdm.auto import tqdm as kind
    return kind  # type: ignore[no-any-return]


# Properties of a progress that are derived from its fields.
RATES = ("megapixels_per_second", "megabytes_per_second", "eta_seconds")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run at one moment. Counts are blocks, or what ``counted`` names, unless a name shows otherwise."""

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
    # Time from the beginning of the run until its workers were ready; seconds begin then.
    start_seconds: float = 0.0
    device_peak_bytes: int = 0  # peak size of a worker's tensors on a GPU
    compute_seconds: float = 0.0  # sum over all workers, each by the clock of its device
    retried: int = 0
    failed: int = 0
    holes: int = 0  # pixels of this run's blocks that were left as they are: without a measurement, or masked
    defects: int = 0  # pixels of this run's blocks that were replaced before anything was computed
    counted: str = "block"  # unit of the counts, such as step
    message: str = ""
    # Figures of a solver's last iteration: iteration, iterations, misfit, change, psnr.
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def megapixels_per_second(self) -> float:
        """Pixels denoised by this run, per second."""
        return self.pixels_done / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """Bytes read and written by this run, per second."""
        return (self.read_bytes + self.written_bytes) / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Remaining time at the rate of the blocks that this run itself has done. None before the first."""
        own_blocks = self.done - self.resumed
        if own_blocks <= 0:
            return None
        return (self.total - self.done) * self.seconds / own_blocks

    def to_json(self) -> dict[str, Any]:
        """Return the value and the rates derived from it, for status files."""
        return asdict(self) | {name: getattr(self, name) for name in RATES}


Observer = Callable[[Progress], None]  # called from the driver about twice a second, and whenever there is a message


_FIGURES = {
    "misfit": "misfit {:.4g}",
    "objective": "objective {:.4g}",
    "residual": "residual {:.3g}",
    "change": "change {:.3g}",
    "psnr": "PSNR {:.2f} dB",
    "loss": "loss {:.4g}",
    "validation": "{:.4g} on held-out patches",
    "error": "error {:.3g} on a crop",
    "tv": "that of tv {:.3g}",
    "nlm": "of nlm {:.3g}",
}


def describe_figures(figures: Mapping[str, float]) -> str:
    """Describe the figures of an iteration in a line.

    >>> describe_figures({"iteration": 3, "misfit": 1234.5, "change": 0.01234, "psnr": 27.31, "seconds": 1.5})
    'misfit was 1234, change 0.0123, PSNR 27.31 dB'
    >>> describe_figures({"iteration": 3, "misfit": 1234.5, "residual": 0.01234})
    'misfit 1234, residual 0.0123'
    """
    # A gradient records the misfit of the image that the iteration began with; cg knows that of the new image.
    was = ("misfit", "objective") if "residual" not in figures else ()
    texts = _FIGURES | {name: f"{name} was {{:.4g}}" for name in was}
    shown = [text.format(figures[name]) for name, text in texts.items() if name in figures]
    if "resolution" in figures:
        shown.append(f"resolution {shown_resolution(figures['resolution'], figures.get('resolution_bound', 0))}")
    return ", ".join(shown)


def pixel_rows(progress: Progress) -> list[tuple[str, str]]:
    """Return the number of pixels that were replaced before anything was computed, and of those that were left as they are."""
    since = " in the blocks of this run" if progress.resumed else ""
    numbers = {
        "defects": (progress.defects, "replaced before anything was computed"),
        "holes": (progress.holes, "left as they are: no measurement, or masked"),
    }
    return [(name, f"{counted(n, 'pixel')}{since} {end}") for name, (n, end) in numbers.items() if n]
