"""Sums of operators: the folded stack, convolution by transforms, and the gradient of a stack."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.convolution.overlap_save import EngineName
from halotile.tasks.fidelities import base, l2, poisson
from halotile.tasks.image_task import Scope, Shared, cells_of
from halotile.tasks.operators.base import InMemory, Operator, read_all, with_engine
from halotile.tasks.operators.blur import RULES, Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.downsample import Downsample
from halotile.tasks.operators.normal import Normal
from halotile.tasks.operators.sum import WeightedSum
from halotile.tasks.terms import MISFIT, FoldedGradient, Gradient, Term, share_of
from tests.tasks.denoising import Counted
from tests.tasks.operators.test_operators import (
    ENGINES,
    IMAGE,
    OPERATORS,
    SIZES,
    TOLERANCE,
    kernel,
    numbers,
    some_regions,
)

SHAPE = (70, 65)


SMALL = (12, 9)


"""A shape in which no pixel is far from the rim."""


FOLDED = {boundary: [boundary] * 3 for boundary in RULES} | {"mixed": ["circular", "reflect", "zero"]}


def whole(source: Readable) -> NDArray[Any]:
    return np.asarray(read_all(source))


def stack(name: str, engine: EngineName = "direct") -> Normal:
    sizes = [(5, 5), (8, 3), (1, 6)]
    blurs = (Blur(kernel=kernel(*size), boundary=b) for size, b in zip(sizes, FOLDED[name], strict=True))
    return Normal(operators=tuple(blurs), weights=(1.5, 0.25, 4.0), engine=engine)


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_stack_is_the_stack_and_exact_at_the_rim(name: str) -> None:
    for engine, shape, dtype in itertools.product(ENGINES, (SHAPE, SMALL, (2, *SHAPE)), TOLERANCE):
        normal, x = stack(name, engine), InMemory(numbers(*shape).astype(dtype))
        folded, plain, tolerance = whole(normal(x)), whole(normal.plain(x)), TOLERANCE[dtype]
        assert folded.dtype == np.dtype(dtype)
        assert np.linalg.norm(folded - plain) <= tolerance * np.linalg.norm(plain)
        assert np.abs(folded - plain).max() <= 2 * tolerance * np.abs(plain).max()
        if engine == "direct" and shape == SHAPE and name != "circular":
            rim = np.ones(SHAPE, bool)
            rim[normal.interior(SHAPE).slices] = False
            assert np.array_equal(folded[rim], plain[rim])
    down, across = {"circular": (0, 0), "valid": (7, 5), "mixed": (7, 5)}.get(name, (5, 4))
    assert normal.interior(SHAPE) == Region((down, across), (SHAPE[0] - down, SHAPE[1] - across))


LARGE = (1100, 90)


"""Longer than a period of cells."""


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a.astype(float) - b.astype(float)) / np.linalg.norm(b.astype(float)))


@pytest.mark.parametrize("boundary", RULES)
def test_transforms_are_the_direct_sum_and_a_region_has_the_bits_of_the_whole(boundary: str) -> None:
    for shape, (dtype, tolerance) in itertools.product(SIZES, TOLERANCE.items()):
        direct = Blur(kernel=kernel(*shape), boundary=boundary, engine="direct")
        fft = Blur(kernel=kernel(*shape), boundary=boundary, engine="fft")
        x = InMemory(numbers(2, 70, 65).astype(dtype))
        y = InMemory(numbers(*direct.measured(x.shape), seed=3).astype(dtype))
        assert distance(read_all(fft.forward(x)), read_all(direct.forward(x))) < tolerance
        assert distance(*(read_all(fft.adjoint(y, x.shape)), read_all(direct.adjoint(y, x.shape)))) < tolerance
    blur = Blur(kernel=kernel(9, 6), boundary=boundary, engine="fft")
    x = InMemory(numbers(*LARGE).astype("float32"))
    y = InMemory(numbers(*blur.measured(LARGE), seed=3).astype("float32"))
    regions = [((0, 0), (33, 1)), ((500, 20), (1030, 40)), ((985, 31), (1092, 84)), ((1060, 2), (1061, 3))]
    for source in (blur.forward(x), blur.adjoint(y, LARGE)):
        whole = read_all(source)
        for region in (Region(*pair) for pair in regions):
            assert np.array_equal(source.read(region), whole[region.slices]), region


def test_threads_change_no_bit() -> None:
    source = Blur(kernel=kernel(9, 6), engine="fft").forward(InMemory(numbers(*LARGE).astype("float32")))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = read_all(source)
    torch.set_num_threads(3)
    together = read_all(source)
    torch.set_num_threads(before)
    assert np.array_equal(alone, together)


def test_engines_are_decided_wherever_they_stand() -> None:
    large, small = Blur(kernel=kernel(15, 15)), Blur(kernel=kernel(3, 3))
    strided = Blur(kernel=kernel(15, 15), factor=2)
    parts: tuple[Operator, ...] = (large, small, strided, Blur(kernel=kernel(15, 15), engine="direct"), Downsample())
    normal = Normal(operators=(Blur(kernel=kernel(9, 9)),), weights=(1.0,))
    for holder in (Composition((*parts, normal)), WeightedSum((*parts, normal), (1.0,) * 6)):
        decided = with_engine(holder, np.dtype("float32"), exact=False)
        engines = [getattr(operator, "engine", None) for operator in decided.operators]
        assert engines == ["fft", "direct", "direct", "direct", None, "fft"]


STACKS = {
    "blurs": [f"blur {boundary} (5, 5)" for boundary in ("circular", "reflect", "zero")],
    "one boundary": [f"blur circular {shape}" for shape in ((3, 3), (4, 6), (15, 15))],
    "all kinds": ["crop zero", "mask", "sum", "composition", "anti-aliased reflect 2", "blur valid (9, 2)"],
}


FIDELITIES: dict[str, base.Fidelity] = {"l2": l2.L2(), "poisson": poisson.Poisson(background=4.0)}


def terms_of(names: list[str], dtype: str, fidelity: base.Fidelity | None = None) -> tuple[Term, ...]:
    def term(operator: Operator, seed: int) -> Term:
        measured = numbers(*operator.measured(IMAGE), seed=seed).astype(dtype)
        return Term(operator, InMemory(measured), 1 / (seed + 1), fidelity or l2.L2())

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
    blur, x = Blur(kernel=np.full((3, 3), 1 / 9), boundary="reflect"), InMemory(numbers(12, 10, seed=9))
    gradient = FoldedGradient(x, Normal(operators=(blur,), weights=(1.0,)), InMemory(numbers(12, 10, seed=2)))
    cell = Region((0, 0), (6, 10))
    sums = []
    for strips in ([], [Region((0, 0), (2, 10)), Region((4, 0), (8, 10))]):
        with Scope([cell]) as scope:
            for region in (*strips, cell):
                gradient.read(region)
        sums.append(scope.sums())
    assert sums[0] == sums[1]


def test_shares_fill_the_measurement_and_a_perfect_fit_has_no_misfit() -> None:
    seen, counts = np.zeros((5, 3), int), np.array([[0.0, 1.0, 7.0]])
    for cell in cells_of(Region.whole((11, 9)), (4, 2)):
        seen[share_of(cell, (11, 9), (5, 3)).slices] += 1
    assert (seen == 1).all()
    assert not any(fidelity.value(counts, counts).any() for fidelity in (poisson.Poisson(), l2.L2()))


def test_a_stack_reads_the_image_once() -> None:
    image = Counted(numbers(*IMAGE).astype("float32"))
    terms = terms_of(["blur reflect (3, 3)", "blur zero (5, 5)", "mask"], "float32")
    with Scope():
        Gradient(Shared(image, margin=10), terms).read(Region((0, 15, 12), (2, 20, 20)))
    assert len(image.reads) == 1


def test_an_image_is_read_once_for_a_block_and_again_only_where_what_was_read_does_not_reach() -> None:
    image = Counted(numbers(30, 40))
    shared, region = Shared(image, margin=3), Region((0, 0), (4, 4))
    with Scope() as scope:
        for part in (Region((10, 10), (20, 20)), Region((8, 7), (23, 22)), Region((0, 38), (9, 40))):
            assert np.array_equal(shared.read(part), image.pixels[part.slices])
    assert image.reads == [Region((7, 7), (23, 23)), Region((0, 35), (12, 40))]
    assert scope.read_bytes == (16 * 16 + 12 * 5) * 8
    assert (shared.shape, shared.dtype) == ((30, 40), np.dtype("float64"))
    shared = Shared(image)
    first, second = Scope(), Scope()
    # Anew in each, outside nothing is kept.
    for each, reads in ((first, 1), (second, 1), (second, 0), (nullcontext(), 2)):
        image.reads.clear()
        with each:
            shared.read(region)
            shared.read(region)
        assert image.reads == [region] * reads


def test_parts_of_a_sum_are_added_in_their_order() -> None:
    scope = Scope([Region((0,), (1,)), Region((1,), (2,))])
    for cell, part, value in [(1, 0, 5.0), (0, 1, 1e16), (0, 0, 1.0), (0, 2, -1e16), (1, 0, 5.0)]:
        scope.note("a", cell, part, value)
    assert scope.sums() == {"a": [(1.0 + 1e16) - 1e16, 5.0]}
