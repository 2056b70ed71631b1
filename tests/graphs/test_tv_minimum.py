"""FISTA with total variation comes to the minimum of ``|A x - y|² / 2 + w TV(x)``, found by other means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.jobs.reconstruct.job import PriorChoice, Reconstruction
from halotile.graphs.kinds.sections import Output
from halotile.graphs.plans.choices import make_chosen
from halotile.graphs.solvers.fista import Fista
from halotile.tasks.operators.base import InMemory
from halotile.tasks.operators.blur import Blur
from halotile.tasks.priors.tv import Variation
from halotile.tasks.terms import Term
from tests.cases import thorough
from tests.graphs.solving import Pixels, denoised_by, in_memory, kernel, problem_of

pytestmark = pytest.mark.usefixtures("as_in_a_worker")

EDGE = 48


def scene() -> Pixels:
    """Even parts with edges, and a slope."""
    y, x = np.mgrid[:EDGE, :EDGE] / EDGE
    image: Pixels = (
        0.2
        + 0.5 * ((x - 0.4) ** 2 + (y - 0.5) ** 2 < 0.09)
        + 0.3 * ((abs(x - 0.6) < 0.2) & (abs(y - 0.4) < 0.15))
        + 0.1 * x
    )
    return image


def gradient(image: Pixels) -> Pixels:
    slopes = np.zeros((2, *image.shape))
    slopes[0, :-1], slopes[1, :, :-1] = np.diff(image, axis=0), np.diff(image, axis=1)
    return slopes


def divergence(dual: Pixels) -> Pixels:
    flow: Pixels = np.zeros(dual.shape[1:])
    for axis, part in enumerate(dual):
        flow += part - np.roll(part, 1, axis)  # its last entry is 0
    return flow


def minimum(spectrum: Pixels, measured: Pixels, weight: float) -> Pixels:
    """By FISTA in double precision whose prox goes on from its last dual image; the gap of the prox is gone."""
    largest = float(np.max(np.abs(spectrum) ** 2))
    strength = weight / largest
    x = ahead = np.zeros_like(measured)
    dual, t = np.zeros((2, *x.shape)), 1.0
    for _ in range(800):
        residual = spectrum * np.fft.fft2(ahead) - np.fft.fft2(measured)
        target = ahead - np.fft.ifft2(np.conj(spectrum) * residual).real / largest
        beside, s = dual, 1.0
        for _ in range(30):
            moved = beside + gradient(divergence(beside) + target / strength) / 8
            moved /= np.maximum(1, np.sqrt(np.sum(moved**2, axis=0)))
            before, s = s, (1 + math.sqrt(1 + 4 * s * s)) / 2
            beside, dual = moved + (before - 1) / s * (moved - dual), moved
        before, t = t, (1 + math.sqrt(1 + 4 * t * t)) / 2
        made = target + strength * divergence(dual)
        ahead, x = made + (before - 1) / t * (made - x), made
    return x


@pytest.mark.thorough
@pytest.mark.parametrize("weight", [0.002, thorough(0.004)])
def test_fista_with_tv_ends_at_the_minimum(tmp_path: Path, weight: float) -> None:
    taps, image = kernel(5).astype("float64"), scene()
    spectrum = np.fft.fft2(np.roll(np.pad(taps, (0, EDGE - 5)), (-2, -2), (0, 1)))
    noise = 0.01 * np.random.default_rng(0).standard_normal(image.shape)
    measured = np.fft.ifft2(spectrum * np.fft.fft2(image)).real + noise
    wanted = minimum(spectrum, measured, weight)

    job = Reconstruction(
        output=Output(path=str(tmp_path)), operators=(), prior=PriorChoice(name="tv", options={"weight": weight})
    )
    denoiser: Any = make_chosen(job.prior).computed_by()
    pixels = measured.astype("float32")
    prior = Variation(denoised=denoised_by(denoiser, pixels, EDGE, EDGE), weight=weight)
    problem = problem_of(pixels, (Term(Blur(kernel=taps), InMemory(pixels)),), prior)
    found, _ = in_memory(Fista(), problem, 300)
    assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
