"""The folded stack is the stack, near the rim and far from it, and reads no more than it needs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.convolution.overlap_save import EngineName
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import RULES, Blur
from halotile.tasks.operators.normal import Normal, around, can_fold, weighted_adjoint
from tests.tasks.operators.test_operators import OPERATORS, TOLERANCE, kernel, numbers

SHAPE = (70, 65)
SMALL = (12, 9)
"""A shape in which no pixel is far from the rim."""
STACKS = {boundary: [boundary] * 3 for boundary in RULES} | {"mixed": ["circular", "reflect", "zero"]}


def whole(source: Readable) -> NDArray[Any]:
    return np.asarray(read_all(source))


def stack(name: str, engine: EngineName = "direct") -> Normal:
    sizes = [(5, 5), (8, 3), (1, 6)]
    blurs = (Blur(kernel=kernel(*size), boundary=b) for size, b in zip(sizes, STACKS[name], strict=True))
    return Normal(operators=tuple(blurs), weights=(1.5, 0.25, 4.0), engine=engine)


@pytest.mark.parametrize("name", STACKS)
def test_it_is_the_stack(name: str) -> None:
    engines: tuple[EngineName, ...] = ("direct", "fft")
    for engine, shape, dtype in itertools.product(engines, (SHAPE, SMALL, (2, *SHAPE)), TOLERANCE):
        normal, x = stack(name, engine), InMemory(numbers(*shape).astype(dtype))
        folded, plain, tolerance = whole(normal(x)), whole(normal.plain(x)), TOLERANCE[dtype]
        assert folded.dtype == np.dtype(dtype)
        assert np.linalg.norm(folded - plain) <= tolerance * np.linalg.norm(plain)
        assert np.abs(folded - plain).max() <= 2 * tolerance * np.abs(plain).max()


@pytest.mark.parametrize("name", STACKS)
def test_it_is_exact_at_the_rim(name: str) -> None:
    normal, x = stack(name), InMemory(numbers(*SHAPE).astype("float32"))
    interior = normal.interior(SHAPE)
    down, across = {"circular": (0, 0), "valid": (7, 5), "mixed": (7, 5)}.get(name, (5, 4))
    assert interior == Region((down, across), (SHAPE[0] - down, SHAPE[1] - across))
    if name != "circular":
        folded, plain = read_all(normal(x)), read_all(normal.plain(x))
        rim = np.ones(SHAPE, bool)
        rim[interior.slices] = False
        assert np.array_equal(folded[rim], plain[rim])


def test_a_kernel_for_each_plane_is_folded_for_each() -> None:
    normal = Normal(operators=(Blur(kernel=kernel(2, 5, 3)), Blur(kernel=kernel(4, 4))), weights=(1.0, 2.0))
    x = InMemory(numbers(2, *SHAPE))
    assert normal.kernel.shape == (2, 9, 7)
    assert np.allclose(read_all(normal(x)), read_all(normal.plain(x)), rtol=0, atol=1e-13)


def test_the_kernel_is_the_sum_of_autocorrelations() -> None:
    one, other = kernel(5, 3), kernel(2, 7)
    normal = Normal(operators=(Blur(kernel=one), Blur(kernel=other)), weights=(2.0, -0.5))

    def autocorrelation(k: Any, dy: int, dx: int) -> float:
        padded = np.pad(k, 7)
        return float(np.sum(padded * np.roll(padded, (dy, dx), (0, 1))))

    expected = [
        [2.0 * autocorrelation(one, dy, dx) - 0.5 * autocorrelation(other, dy, dx) for dx in range(-6, 7)]
        for dy in range(-4, 5)
    ]
    assert np.allclose(normal.kernel[0], expected, rtol=0, atol=1e-15)


def test_what_the_measurements_say_is_summed_on_any_region() -> None:
    operators = [OPERATORS[name] for name in ("blur reflect (5, 5)", "window", "anti-aliased reflect 2")]
    image, weights = (2, 40, 33), [1.0, 0.5, 2.0]
    ys = [InMemory(numbers(*o.measured(image), seed=n)) for n, o in enumerate(operators)]
    b = weighted_adjoint(operators, ys, weights, image)
    terms = (w * whole(o.adjoint(y, image)) for o, y, w in zip(operators, ys, weights, strict=True))
    assert np.allclose(whole(b), sum(terms))
    region = Region((0, 3, 20), (1, 17, 33))
    assert np.array_equal(b.read(region), whole(b)[region.slices])


def test_a_region_is_cut_around_its_centre() -> None:
    for centre in (((2, 3), (5, 8)), ((0, 3), (9, 8)), ((2, 0), (5, 10)), ((0, 0), (9, 10))):
        hits = np.zeros((9, 10), int)
        for part in (Region(*centre), *around(Region((0, 0), (9, 10)), Region(*centre))):
            hits[part.slices] += 1
        assert (hits == 1).all(), centre


def test_operators_that_fold_are_known_in_advance() -> None:
    folding = {name for name, operator in OPERATORS.items() if can_fold(operator)}
    assert {"blur zero (5, 5)", "blur valid (9, 2) fft"} <= folding
    assert not folding & {"mask", "sum", "downsampling reflect 2", "crop zero", "window"}
