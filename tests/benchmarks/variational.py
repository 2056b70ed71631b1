"""An iteration of variational inference against NIFTy, in processes of their own."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.measuring import Result, printed
from tests.tasks.poisson_field import OFFSET, counts, transfer

NIFTY = Path(sys.prefix) / "nifty" / "bin" / "python"
"""The Python that `make bench ARGS=variational` installs NIFTy for."""
ITERATIONS = 6


def ours(folder: Path, edge: int, pairs: str) -> Result:
    """Processor seconds of an iteration with linear samples of a log-normal field behind a blur, seen in photons: the median but for the first two."""
    import torch

    from halotile import posterior

    torch.set_num_threads(1)  # as the docs have it; a second one costs more processor time than it saves
    sky = posterior.CorrelatedField(
        (edge, edge), OFFSET, zero_mode=(0.3, 0.1), fluctuations=(1.0, 0.3), slope=(-4.0, 0.3)
    )
    blur, seen = torch.as_tensor(transfer(edge)), posterior.Poisson(torch.as_tensor(counts(edge)))

    def rate(latent: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(sky(latent)) * blur, s=(edge, edge)).clamp(min=1e-6)

    start = {name: 0.1 * part for name, part in sky.start(seed=1).items()}
    states = posterior.optimize_kl(rate, seen, start, iterations=ITERATIONS, samples=int(pairs), mode="linear")
    ends = [time.process_time() for _ in states]
    return {"cpu_seconds": statistics.median(np.diff(ends[1:]).tolist())}


def nifty(folder: Path, edge: int, pairs: str) -> Result:
    """The same by NIFTy, with the same tolerances."""
    if not NIFTY.exists():
        raise SystemExit(f"there is no {NIFTY}. Write: make bench ARGS=variational")
    command = [str(NIFTY), str(Path(__file__).parents[1] / "tasks/nifty_side.py"), str(edge), pairs]
    result: Result = json.loads(printed("NIFTy", command))
    return result


def _row(edge: int, pairs: int, bar: float) -> tuple[str, str, str, str, int, float, int, str]:
    title = f"an iteration of variational inference, {edge}² photon counts, {pairs} pairs / NIFTy: CPU time"
    return "variational", title, f"variational.ours {pairs}", f"variational.nifty {pairs}", edge, bar, 3, "cpu_seconds"


VARIATIONAL_ROWS = [_row(32, 8, 1.0), _row(256, 2, 0.7)]
