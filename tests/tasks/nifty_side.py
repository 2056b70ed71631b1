"""NIFTy's side, in an environment of its own: ``pip install -r requirements-nifty.txt``.

``python tests/tasks/nifty_side.py tests/tasks/nifty_samples.npz`` writes the standard deviations of its samples at a position of its own, for
test_variational.py; ``nifty_side.py 32 8`` prints the processor seconds of an iteration on 32 × 32 pixels with 8 pairs as JSON, for the benchmarks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from nifty import re as jft

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tasks.poisson_field import OFFSET, counts, transfer

N, PAIRS = 24, 100


def problem(n: int) -> tuple[Any, Any, Any, Any]:
    """The logarithm of a field, the rate, counts and their likelihood."""
    jax.config.update("jax_enable_x64", True)
    maker = jft.CorrelatedFieldMaker("")
    maker.set_amplitude_total_offset(offset_mean=OFFSET, offset_std=(0.3, 0.1))
    shape: Any = {"fluctuations": (1.0, 0.3), "loglogavgslope": (-4.0, 0.3), "non_parametric_kind": "power"}
    maker.add_fluctuations((n, n), 1 / n, prefix="", **shape)
    logarithm = maker.finalize()

    class Rate(jft.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(init=logarithm.init)

        def __call__(self, latent: Any) -> Any:
            waves = jnp.fft.rfft2(jnp.exp(logarithm(latent))) * transfer(n)
            return jnp.maximum(jnp.fft.irfft2(waves, s=(n, n)), 1e-6)

    data, rate = counts(n), Rate()
    return logarithm, rate, data, jft.Poissonian(jnp.asarray(data)).amend(rate)


def options(size: int, mode: str, iterations: int, pairs: int) -> dict[str, Any]:
    """Tolerances in standard deviations that halotile has by default, as differences of energies."""
    solver: Any = {"cg_kwargs": {"absdelta": 1e-6 * size, "maxiter": 500}}
    bending: Any = {"minimize_kwargs": {"xtol": 1e-6, "cg_kwargs": {}, "maxiter": 20}}
    steps: Any = {"n_total_iterations": iterations, "n_samples": pairs, "sample_mode": mode}
    steps |= {"kl_kwargs": {"minimize_kwargs": {"absdelta": 1e-4 * size, "maxiter": 20}}}
    return {**steps, "draw_linear_kwargs": solver, "nonlinearly_update_kwargs": bending}


def write(path: str) -> None:
    """Find a mean by linear samples; draw linear and bent samples there."""
    logarithm, rate, data, likelihood = problem(N)
    keys = jax.random.split(jax.random.PRNGKey(42), 3)
    start = 0.1 * jft.Vector(likelihood.init(keys[0]))
    found = options(jft.size(start), "linear_resample", 4, 8)
    position = jft.optimize_kl(likelihood, start, key=keys[1], **found)[0].pos
    kept = {"data": data, "rate": np.asarray(rate(position))}
    kept |= {f"position_{name}": np.asarray(value) for name, value in position.tree.items()}
    inference = jft.OptimizeVI(likelihood, 1, linear_minimizer_jit=False)
    drawing = {name: found[name] for name in ("draw_linear_kwargs", "nonlinearly_update_kwargs")}
    for mode in ("linear", "nonlinear"):
        given = {"sample_mode": f"{mode}_resample", "n_samples": PAIRS, "point_estimates": (), **drawing}
        drawn, _ = inference.draw_samples(jft.Samples(pos=position, samples=None, keys=None), key=keys[2], **given)
        maps = np.array([np.asarray(logarithm(sample)) for sample in drawn])
        kept |= {f"{mode}_std": maps.std(0).astype("f4"), f"{mode}_mean": maps.mean(0).astype("f4")}
    np.savez_compressed(path, **kept)


def seconds(n: int, pairs: int, iterations: int = 6) -> float:
    """Processor seconds of an iteration with linear samples: the median of those after the first two, which compile."""
    *_, likelihood = problem(n)
    keys, ends = jax.random.split(jax.random.PRNGKey(42)), list[float]()
    start = 0.1 * jft.Vector(likelihood.init(keys[0]))
    given = options(jft.size(start), "linear_resample", iterations, pairs)
    jft.optimize_kl(likelihood, start, key=keys[1], callback=lambda *_: ends.append(time.process_time()), **given)
    return statistics.median(np.diff(ends[1:]).tolist())


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(sys.argv[1])
    else:
        print(json.dumps({"cpu_seconds": seconds(*map(int, sys.argv[1:]))}))
