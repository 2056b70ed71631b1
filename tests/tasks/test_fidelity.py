"""The step down the gradient of a stack: any region as the whole, the gradient that it says, the image read once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from halotile.storage.grid import Region
from halotile.storage.rim import Pixels
from halotile.tasks.fidelity import GradientStep, Term
from halotile.tasks.held import Held
from halotile.tasks.operators.base import InMemory, Operator, read_all
from tests.tasks.operators.test_operators import IMAGE, OPERATORS, numbers

STACKS = {
    "blurs": [f"blur {boundary} (5, 5)" for boundary in ("circular", "reflect", "zero")],
    "one boundary": [f"blur circular {shape}" for shape in ((3, 3), (4, 6), (15, 15))],
    "all kinds": ["crop zero", "mask", "sum", "composition", "anti-aliased reflect 2", "blur valid (9, 2)"],
}


def terms_of(names: list[str], dtype: str) -> tuple[Term, ...]:
    def term(operator: Operator, seed: int) -> Term:
        measured = numbers(*operator.measured(IMAGE), seed=seed).astype(dtype)
        return Term(operator, InMemory(measured), weight=1 / (seed + 1))

    return tuple(term(OPERATORS[name], seed) for seed, name in enumerate(names))


@dataclass
class Counted:
    """Counts what is read of an image."""

    pixels: Any
    regions: list[Region] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.pixels.shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        dtype: np.dtype[np.generic] = self.pixels.dtype
        return dtype

    def read(self, region: Region) -> Pixels:
        self.regions.append(region)
        pixels: Pixels = self.pixels[region.slices]
        return pixels


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stack", STACKS)
def test_any_region_has_the_bits_of_the_whole(stack: str, dtype: str) -> None:
    x = InMemory(numbers(*IMAGE, seed=9).astype(dtype))
    step = GradientStep(x, terms_of(STACKS[stack], dtype), step=0.3)
    whole, rng = read_all(step), np.random.default_rng(4)
    assert whole.dtype == np.dtype(dtype)
    for _ in range(12):
        start = [int(rng.integers(0, n)) for n in whole.shape]
        stop = [int(rng.integers(a + 1, n + 1)) for a, n in zip(start, whole.shape, strict=True)]
        region = Region(tuple(start), tuple(stop))
        assert np.array_equal(step.read(region), whole[region.slices]), region


@pytest.mark.parametrize("stack", STACKS)
def test_it_steps_down_the_gradient(stack: str) -> None:
    """Against differences of the sum of squares along random directions."""
    terms = terms_of(STACKS[stack], "float64")
    x, direction = numbers(*IMAGE, seed=9), numbers(*IMAGE, seed=10) - 0.5

    def value(image: Any) -> float:
        residuals = (
            np.subtract(read_all(t.operator.forward(InMemory(image))), read_all(t.measurement)) for t in terms
        )
        return sum(t.weight * float(np.sum(r**2)) / 2 for t, r in zip(terms, residuals, strict=True))

    gradient = (x - read_all(GradientStep(InMemory(x), terms, step=0.5))) / 0.5
    slope = (value(x + 1e-4 * direction) - value(x - 1e-4 * direction)) / 2e-4
    assert np.isclose(np.sum(gradient * direction), slope, rtol=1e-7)


def test_a_stack_reads_the_image_once() -> None:
    image = Counted(numbers(*IMAGE).astype("float32"))
    step = GradientStep(
        image, terms_of(["blur reflect (3, 3)", "blur zero (5, 5)", "mask"], "float32"), step=1.0
    )
    step.read(Region((0, 15, 12), (2, 20, 20)))
    assert len(image.regions) == 1


def test_a_step_travels() -> None:
    step = GradientStep(InMemory(numbers(*IMAGE)), terms_of(STACKS["blurs"], "float64"), step=0.3)
    assert np.array_equal(read_all(pickle.loads(pickle.dumps(step))), read_all(step))


def test_what_is_held_is_read_again_only_where_it_does_not_reach() -> None:
    image = Counted(numbers(30, 40))
    held = Held(image, slack=3)
    for region in (Region((10, 10), (20, 20)), Region((8, 7), (23, 22)), Region((0, 38), (9, 40))):
        assert np.array_equal(held.read(region), image.pixels[region.slices])
    assert image.regions == [Region((7, 7), (23, 23)), Region((0, 35), (12, 40))]
    assert (held.shape, held.dtype) == ((30, 40), np.dtype("float64"))
