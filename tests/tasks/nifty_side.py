"""Standard deviations of NIFTy's samples at a position of its own, for test_variational.py.

It runs in an environment of its own: ``pip install "nifty[re]==9.2.0" jax``, then ``python tests/tasks/nifty_side.py tests/tasks/nifty_samples.npz``.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from nifty import re as jft

N, PAIRS, OFFSET = 24, 100, math.log(20.0)


def transfer(n: int, sigma: float = 1.0) -> Any:
    """Gaussian blur of periodic images, for real Fourier transforms."""
    ky, kx = np.fft.fftfreq(n)[:, None], np.fft.rfftfreq(n)[None]
    return np.exp(-2 * (np.pi * sigma) ** 2 * (ky**2 + kx**2))


def counts(n: int, seed: int = 7) -> Any:
    """Counts of a blurred log-normal field."""
    rng = np.random.default_rng(seed)
    k = np.hypot(*np.meshgrid(*2 * [np.minimum(np.arange(n), n - np.arange(n))]))
    k[0, 0] = np.inf
    waves = np.fft.fft2((0.9 * k**-2 / math.sqrt((k**-4.0).sum())) * rng.standard_normal((n, n)))
    blurred = np.fft.irfft2(np.fft.rfft2(np.exp(OFFSET + waves.real + waves.imag)) * transfer(n), s=(n, n))
    return rng.poisson(blurred.clip(1e-6))


def main(path: str) -> None:
    """Find a mean by linear samples; draw linear and bent samples there."""
    jax.config.update("jax_enable_x64", True)
    maker = jft.CorrelatedFieldMaker("")
    maker.set_amplitude_total_offset(offset_mean=OFFSET, offset_std=(0.3, 0.1))
    shape: Any = {"fluctuations": (1.0, 0.3), "loglogavgslope": (-4.0, 0.3), "non_parametric_kind": "power"}
    maker.add_fluctuations((N, N), 1 / N, prefix="", **shape)
    logarithm = maker.finalize()

    class Rate(jft.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(init=logarithm.init)

        def __call__(self, latent: Any) -> Any:
            waves = jnp.fft.rfft2(jnp.exp(logarithm(latent))) * transfer(N)
            return jnp.maximum(jnp.fft.irfft2(waves, s=(N, N)), 1e-6)

    data, rate = counts(N), Rate()
    likelihood = jft.Poissonian(jnp.asarray(data)).amend(rate)
    keys = jax.random.split(jax.random.PRNGKey(42), 3)
    start = 0.1 * jft.Vector(likelihood.init(keys[0]))
    size = jft.size(start)
    drawing: Any = {
        "draw_linear_kwargs": {"cg_kwargs": {"absdelta": 1e-6 * size, "maxiter": 500}},
        "nonlinearly_update_kwargs": {"minimize_kwargs": {"xtol": 1e-6, "cg_kwargs": {}, "maxiter": 20}},
    }
    steps: Any = {"n_total_iterations": 4, "n_samples": 8, "sample_mode": "linear_resample"}
    steps |= {"kl_kwargs": {"minimize_kwargs": {"absdelta": 1e-4 * size, "maxiter": 20}}}
    position = jft.optimize_kl(likelihood, start, key=keys[1], **steps, **drawing)[0].pos
    kept = {"data": data, "rate": np.asarray(rate(position))}
    kept |= {f"position_{name}": np.asarray(value) for name, value in position.tree.items()}
    inference = jft.OptimizeVI(likelihood, 1, linear_minimizer_jit=False)
    for mode in ("linear", "nonlinear"):
        options = {"sample_mode": f"{mode}_resample", "n_samples": PAIRS, "point_estimates": (), **drawing}
        drawn, _ = inference.draw_samples(jft.Samples(pos=position, samples=None, keys=None), key=keys[2], **options)
        maps = np.array([np.asarray(logarithm(sample)) for sample in drawn])
        kept |= {f"{mode}_std": maps.std(0).astype("f4"), f"{mode}_mean": maps.mean(0).astype("f4")}
    np.savez_compressed(path, **kept)


if __name__ == "__main__":
    main(sys.argv[1])
