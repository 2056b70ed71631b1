"""The step size is safe: what is found of the norm is never too small, and hardly too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halotile.graphs.solvers.base import Problem
from halotile.graphs.solvers.lanczos import Lanczos, begun, is_spent
from halotile.tasks.operators.base import InMemory, Operator, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask
from tests.cases import all_of
from tests.graphs.solving import Pixels, blurs, iterations_of, kernel, norm_of, problem_of, scene, terms_of

SHAPE = (96, 80)


def problem(*operators: Operator, shape: tuple[int, int] = SHAPE) -> Problem:
    image = scene(shape)
    return problem_of(image, terms_of(image, operators))


def circular(*kernels: Pixels) -> tuple[Problem, float]:
    """Convolutions have their spectrum."""
    power = sum(abs(np.fft.fft2(each, SHAPE)) ** 2 / (number + 1) for number, each in enumerate(kernels))
    return problem(*(Blur(kernel=each) for each in kernels)), float(np.max(power))


def along_the_rim(boundary: str) -> tuple[Problem, float]:
    """What has no spectrum, as a matrix."""
    mask = (np.random.default_rng(3).random((20, 16)) > 0.3).astype("float64")
    seen = Composition((Mask(mask=InMemory(mask)), Blur(kernel=np.ones((9, 9)) / 81, boundary=boundary)))
    small = problem(*blurs(boundary, (3, 5)), seen, shape=mask.shape)
    unit = np.eye(mask.size).reshape(-1, *mask.shape)
    matrix = np.array([read_all(small.normal(InMemory(each))).ravel() for each in unit])
    return small, float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


def weights() -> tuple[Problem, float]:
    numbers = np.random.default_rng(5).random(SHAPE).astype("float32")
    return problem(Mask(mask=InMemory(numbers))), float(numbers.max()) ** 2


CASES: dict[str, Callable[[], tuple[Problem, float]]] = {
    "gaussians": lambda: circular(kernel(5), kernel(9)),
    "no light": lambda: circular(np.random.default_rng(5).standard_normal((9, 7))),
    "an edge": lambda: circular(np.array([[-1.0, 0.0, 1.0]])),
    "weights": weights,
    "reflect": lambda: along_the_rim("reflect"),
    "replicate": lambda: along_the_rim("replicate"),
    "zero": lambda: along_the_rim("zero"),
}


@pytest.mark.parametrize("name", all_of(CASES, thorough=["replicate", "zero"]))
def test_the_norm_is_bounded_from_above_and_not_by_much(tmp_path: Path, name: str) -> None:
    given, largest = CASES[name]()
    assert largest <= norm_of(given, tmp_path) <= 1.02 * largest


def test_it_ends_where_nothing_new_is_left(tmp_path: Path) -> None:
    given = problem(Mask(mask=InMemory(np.full((32, 32), 2, "float32"))), shape=(32, 32))
    run = iterations_of(Lanczos(), begun(given), tmp_path, block=32)
    assert len(list(run.run(15, lambda state, _: is_spent(state)))) <= 3
    assert 4 <= norm_of(given, tmp_path / "again") <= 4.01
