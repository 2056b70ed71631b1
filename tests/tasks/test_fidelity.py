"""The gradient of a stack: any region as the whole, the slope of the misfit that it notes, the image read once for a block."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from halotile.storage.grid import Region
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.fidelities.l2 import L2
from halotile.tasks.fidelities.poisson import Poisson
from halotile.tasks.image_task import Scope, Shared, cells_of
from halotile.tasks.operators.base import InMemory, Operator, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.normal import Normal
from halotile.tasks.terms import MISFIT, FoldedGradient, Gradient, Term, share_of
from tests.tasks.denoising import Counted
from tests.tasks.operators.test_operators import IMAGE, OPERATORS, numbers, some_regions

STACKS = {
    "blurs": [f"blur {boundary} (5, 5)" for boundary in ("circular", "reflect", "zero")],
    "one boundary": [f"blur circular {shape}" for shape in ((3, 3), (4, 6), (15, 15))],
    "all kinds": ["crop zero", "mask", "sum", "composition", "anti-aliased reflect 2", "blur valid (9, 2)"],
}


FIDELITIES: dict[str, Fidelity] = {"l2": L2(), "poisson": Poisson(background=4.0)}


def terms_of(names: list[str], dtype: str, fidelity: Fidelity | None = None) -> tuple[Term, ...]:
    def term(operator: Operator, seed: int) -> Term:
        measured = numbers(*operator.measured(IMAGE), seed=seed).astype(dtype)
        return Term(operator, InMemory(measured), 1 / (seed + 1), fidelity or L2())

    return tuple(term(OPERATORS[name], seed) for seed, name in enumerate(names))


def misfit_of(image: Any, terms: tuple[Term, ...]) -> float:
    """The misfit, on the whole."""
    total = 0.0
    for term in terms:
        seen = read_all(term.operator.forward(InMemory(image)))
        total += term.weight * float(np.sum(term.fidelity.value(seen, read_all(term.measurement))))
    return total


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("stack", STACKS)
def test_a_gradient_is_the_slope_of_the_misfit_that_it_notes_in_any_region(stack: str, fidelity: str) -> None:
    """Against differences along random directions; each cell notes a share of every measurement, whatever its shape."""
    x, direction = numbers(*IMAGE, seed=9), numbers(*IMAGE, seed=10) - 0.5
    for dtype in ("float32", "float64"):
        terms = terms_of(STACKS[stack], dtype, FIDELITIES[fidelity])
        gradient = Gradient(InMemory(x.astype(dtype)), terms)
        whole = read_all(gradient)
        assert whole.dtype == np.dtype(dtype)
        for region in some_regions(whole.shape, 8):
            assert np.array_equal(gradient.read(region), whole[region.slices]), region
    slope = (misfit_of(x + 1e-4 * direction, terms) - misfit_of(x - 1e-4 * direction, terms)) / 2e-4
    assert np.isclose(np.sum(whole * direction), slope, rtol=1e-6)
    noted = []
    for block in cells_of(Region.whole(IMAGE), (2, 16, 24)):
        with Scope(list(cells_of(block, (2, 8, 12)))) as scope:
            gradient.read(block)
        noted += scope.sums()[MISFIT]
    assert np.isclose(sum(noted), misfit_of(x, terms), rtol=1e-12)


def test_a_misfit_does_not_depend_on_what_else_was_read() -> None:
    x, terms = numbers(*IMAGE, seed=9), terms_of(STACKS["blurs"], "float32")
    cell = Region((0, 8, 12), (2, 16, 24))
    sums = []
    for region in (cell, Region.whole(IMAGE)):
        with Scope([cell]) as scope:
            Gradient(InMemory(x.astype("float32")), terms).read(region)
        sums.append(scope.sums())
    assert sums[0] == sums[1]


def test_a_strip_beside_the_core_of_a_block_notes_nothing() -> None:
    """A rim that is folded asks for strips: their cells are noted by the read that holds them."""
    blur = Blur(kernel=np.full((3, 3), 1 / 9), boundary="reflect")
    x = InMemory(numbers(12, 10, seed=9))
    gradient = FoldedGradient(x, Normal(operators=(blur,), weights=(1.0,)), InMemory(numbers(12, 10, seed=2)))
    cell = Region((0, 0), (6, 10))
    sums = []
    for strips in ([], [Region((0, 0), (2, 10)), Region((4, 0), (8, 10))]):
        with Scope([cell]) as scope:
            for region in (*strips, cell):
                gradient.read(region)
        sums.append(scope.sums())
    assert sums[0] == sums[1]


def test_a_perfect_fit_has_no_misfit() -> None:
    counts = np.array([[0.0, 1.0, 7.0]])
    assert not Poisson().value(counts, counts).any()
    assert not L2().value(counts, counts).any()


def test_shares_fill_the_measurement() -> None:
    seen = np.zeros((5, 3), int)
    for cell in cells_of(Region.whole((11, 9)), (4, 2)):
        seen[share_of(cell, (11, 9), (5, 3)).slices] += 1
    assert (seen == 1).all()


def test_a_stack_reads_the_image_once() -> None:
    image = Counted(numbers(*IMAGE).astype("float32"))
    terms = terms_of(["blur reflect (3, 3)", "blur zero (5, 5)", "mask"], "float32")
    with Scope():
        Gradient(Shared(image, margin=10), terms).read(Region((0, 15, 12), (2, 20, 20)))
    assert len(image.reads) == 1


def test_a_gradient_travels() -> None:
    gradient = Gradient(InMemory(numbers(*IMAGE)), terms_of(STACKS["blurs"], "float64"))
    assert np.array_equal(read_all(pickle.loads(pickle.dumps(gradient))), read_all(gradient))


def test_it_is_read_again_only_where_what_was_read_does_not_reach() -> None:
    image = Counted(numbers(30, 40))
    shared = Shared(image, margin=3)
    with Scope() as scope:
        for region in (Region((10, 10), (20, 20)), Region((8, 7), (23, 22)), Region((0, 38), (9, 40))):
            assert np.array_equal(shared.read(region), image.pixels[region.slices])
    assert image.reads == [Region((7, 7), (23, 23)), Region((0, 35), (12, 40))]
    assert scope.read_bytes == (16 * 16 + 12 * 5) * 8
    assert (shared.shape, shared.dtype) == ((30, 40), np.dtype("float64"))


def test_each_block_reads_anew() -> None:
    image = Counted(numbers(30, 40))
    shared, region = Shared(image), Region((0, 0), (4, 4))
    for _ in range(2):
        with Scope():
            shared.read(region)
            shared.read(region)
    assert image.reads == [region] * 2
    shared.read(region)
    assert image.reads == [region] * 3, "outside a scope nothing is kept"


def test_a_scope_goes_on_where_it_was_left() -> None:
    image = Counted(numbers(30, 40))
    shared, region = Shared(image), Region((0, 0), (4, 4))
    with Scope() as scope:
        shared.read(region)
    with scope:
        shared.read(region)
    assert image.reads == [region]


def test_parts_of_a_sum_are_added_in_their_order() -> None:
    scope = Scope([Region((0,), (1,)), Region((1,), (2,))])
    for cell, part, value in [(1, 0, 5.0), (0, 1, 1e16), (0, 0, 1.0), (0, 2, -1e16), (1, 0, 5.0)]:
        scope.note("a", cell, part, value)
    assert scope.sums() == {"a": [(1.0 + 1e16) - 1e16, 5.0]}
