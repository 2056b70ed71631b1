"""Every operator: adjoint, tiled as the whole, shapes, pickling, and sums of operators. A new one enters by a line in OPERATORS."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.tasks.convolution.overlap_save import EngineName
from halotile.tasks.fidelities import l2, poisson
from halotile.tasks.fidelities.base import Fidelity
from halotile.tasks.image_task import Scope, Shared, cells_of
from halotile.tasks.operators import base, blur, composition, crop, downsample, own, shift
from halotile.tasks.operators.mask import Mask
from halotile.tasks.operators.normal import Normal
from halotile.tasks.operators.sum import WeightedSum
from halotile.tasks.terms import MISFIT, FoldedGradient, Gradient, Term, share_of
from tests.tasks.denoising import Counted

IMAGE = (2, 40, 33)


TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random(shape)


def kernel(*shape: int) -> Any:
    values = numbers(*shape, seed=sum(shape))
    return values / values.sum(axis=(-2, -1), keepdims=True)


def mask(*shape: int) -> Mask:
    return Mask(mask=base.InMemory(numbers(*shape)))


def normal(boundaries: list[str], engine: EngineName) -> Normal:
    sizes = [(5, 5), (2, 4, 6)]
    blurs = tuple(blur.Blur(kernel=kernel(*size), boundary=b) for size, b in zip(sizes, boundaries, strict=True))
    return Normal(operators=blurs, weights=(1.0, 0.25), engine=engine)


ENGINES: tuple[EngineName, ...] = ("direct", "fft")


SIZES = ((3, 3), (5, 5), (4, 6), (1, 7), (9, 2), (15, 15), (1, 1), (2, 5, 3))
DOWN = [("reflect", 2), ("replicate", 3), ("zero", 4), ("valid", 3), ("reflect", 1)]
OPERATORS: dict[str, base.Operator] = {
    **{f"blur {b} {size}": blur.Blur(kernel=kernel(*size), boundary=b) for b in blur.RULES for size in SIZES},
    **{f"blur {b} {size} fft": blur.Blur(kernel=kernel(*size), boundary=b, engine="fft") for b in blur.RULES for size in SIZES[4::3]},
    **{f"downsampling {b} {n}": blur.Blur(kernel=kernel(5, 4), boundary=b, factor=n) for b in blur.RULES if b != "circular" for n in (2, 3)},
    **{f"anti-aliased {b} {n}": downsample.Downsample(factor=n, boundary=b) for b, n in DOWN},
    **{f"shift {b}": shift.Shift(shift=(1.3, -2.6), boundary=b) for b in blur.RULES if b != "valid"},
    **{f"crop {b}": shift.Shift(shift=(10.25, -3.5), size=(20, 44), boundary=b) for b in ("reflect", "replicate", "zero")},
    **{f"normal {b} {other} {engine}": normal([b, other], engine) for b, other in (("circular",) * 2, ("reflect", "zero")) for engine in ENGINES},
    "own": own.Own(import_="halotile.tasks.operators.shift:Shift", options={"shift": (1.3, -2.6), "boundary": "zero"}),
    "window": crop.Crop(origin=(3, 7), size=(30, 20)),
    "windows": WeightedSum((crop.Crop(origin=(0, 0), size=(9, 9)), crop.Crop(origin=(31, 24), size=(9, 9))), (1.0, 2.0)),
    "window of a blur": composition.Composition((blur.Blur(kernel=kernel(5, 3)), crop.Crop(origin=(4, 0), size=(30, 20)))),
    "blur in a window": composition.Composition((crop.Crop(origin=(3, 7), size=(30, 20)), blur.Blur(kernel=kernel(5, 3)))),
    "mask": mask(40, 33),
    "mask of each plane": mask(2, 40, 33),
    "sum": WeightedSum((blur.Blur(kernel=kernel(5, 3)), blur.Blur(kernel=kernel(7, 7), boundary="reflect"), mask(40, 33)), (2.0, -0.5, 1.0)),
    "composition": composition.Composition(
        (blur.Blur(kernel=kernel(5, 3), boundary="reflect"), mask(40, 33), shift.Shift(shift=(0.5, 2.0), size=(30, 30)), blur.Blur(kernel=kernel(4, 4), boundary="replicate", factor=2))
    ),
}  # fmt: skip


def pair(operator: base.Operator, dtype: str, image: tuple[int, ...] = IMAGE) -> tuple[Any, Any, Readable, Readable]:
    """An image, a measurement, and what the operator makes of them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(image).astype(dtype)
    y = rng.standard_normal(operator.measured(image)).astype(dtype)
    return x, y, operator.forward(base.InMemory(x)), operator.adjoint(base.InMemory(y), image)


def check_adjoint(pair: tuple[Any, Any, Any, Any], dtype: str, tolerance: float) -> None:
    """Assert that the operator and its adjoint have one product, and the shapes and types of what they get."""
    x, y, ax, aty = pair
    assert (ax.shape, aty.shape) == (y.shape, x.shape)
    assert ax.dtype == aty.dtype == np.dtype(dtype)
    left = np.sum(ax.astype(float) * y.astype(float))
    assert abs(left - np.sum(x.astype(float) * aty.astype(float))) <= tolerance * np.linalg.norm(ax) * np.linalg.norm(y)


def some_regions(shape: tuple[int, ...], count: int) -> Iterator[Region]:
    """Boxes at random places of an array."""
    rng = np.random.default_rng(2)
    for _ in range(count):
        start = [int(rng.integers(0, n)) for n in shape]
        stop = [int(rng.integers(a + 1, n + 1)) for a, n in zip(start, shape, strict=True)]
        yield Region(tuple(start), tuple(stop))


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_its_adjoint_the_bits_of_the_whole_in_any_region_and_travels(name: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        x, y, forward, adjoint = pair(OPERATORS[name], dtype)
        wholes = base.read_all(forward), base.read_all(adjoint)
        check_adjoint((x, y, *wholes), dtype, tolerance)
        for source, whole in zip((forward, adjoint), wholes, strict=True):
            for region in some_regions(whole.shape, 8):
                assert np.array_equal(source.read(region), whole[region.slices]), region
        travelled = pickle.loads(pickle.dumps(OPERATORS[name]))
        assert np.array_equal(base.read_all(travelled.forward(base.InMemory(x))), wholes[0])


@pytest.mark.parametrize("boundary", blur.RULES)
def test_blurs_and_downsamplings_are_those_of_deepinv(boundary: str) -> None:
    physics = pytest.importorskip("deepinv.physics")
    theirs = {"zero": "constant"}.get(boundary, boundary)
    for shape in ((3, 3), (4, 6), (15, 15)):
        x, _, forward, _ = pair(blur.Blur(kernel=kernel(*shape), boundary=boundary), "float32")
        there = physics.Blur(filter=torch.from_numpy(kernel(*shape)).float()[None, None], padding=theirs)
        assert np.allclose(base.read_all(forward), there.A(torch.from_numpy(x)[:, None])[:, 0].numpy(), atol=1e-6)
    x = np.random.default_rng(1).standard_normal((2, 48, 36)).astype("float32")
    for factor in (2, 3, 4) if boundary != "zero" else ():
        there = physics.Downsampling(img_size=(1, 48, 36), filter="bicubic", factor=factor, padding=boundary)
        here = base.read_all(downsample.Downsample(factor=factor, boundary=boundary).forward(base.InMemory(x)))
        assert np.allclose(here, there.A(torch.from_numpy(x)[:, None])[:, 0].numpy(), atol=1e-5), factor


def test_a_circular_blur_takes_every_second_pixel_and_a_shift_by_whole_pixels_is_a_roll() -> None:
    x = numbers(40, 32)
    both = (blur.Blur(kernel=kernel(5, 4), factor=factor).forward(base.InMemory(x)) for factor in (1, 2))
    all_pixels, half = map(whole, both)
    assert np.array_equal(half, all_pixels[::2, ::2])
    moved = shift.Shift(shift=(3, -4), boundary="circular").forward(base.InMemory(x.astype("float32")))
    assert np.array_equal(base.read_all(moved), np.roll(x.astype("float32"), (-3, 4), (0, 1)))


REFUSED: dict[str, tuple[Any, str]] = {
    "boundary": (lambda: blur.Blur(kernel=kernel(3, 3), boundary="cyclic"), "write one of circular, reflect"),
    "kernel without pixels": (lambda: blur.Blur(kernel=np.ones((0, 3))), "kernel has shape"),
    "kernel longer than the image": (lambda: blur.Blur(kernel=np.ones((50, 3)), boundary="valid").measured(IMAGE), "Crop the kernel"),
    "kernels for other planes": (lambda: blur.Blur(kernel=np.ones((3, 5, 5))).measured(IMAGE), r"one for each of 3 planes, but the image of shape \(2, 40, 33\) has 2 planes"),
    "kernels for planes of an image without": (lambda: blur.Blur(kernel=np.ones((2, 5, 5))).measured(IMAGE[1:]), "has no axis in front of y and x. Write a kernel of rows and columns"),
    "reflected beyond the image": (lambda: blur.Blur(kernel=np.ones((81, 3)), boundary="reflect").measured(IMAGE), "write boundary: zero"),
    "circular and odd": (lambda: blur.Blur(kernel=kernel(3, 3), factor=2).measured(IMAGE), "Crop the image"),
    "unknown engine": (lambda: blur.Blur(kernel=kernel(3, 3), engine=cast(Any, "fast")), "write one of auto, direct, fft"),
    "transforms of what is left out": (lambda: blur.Blur(kernel=kernel(3, 3), factor=2, engine="fft"), "Write engine: direct"),
    "window outside the image": (lambda: crop.Crop(origin=(30, 0), size=(11, 9)).measured(IMAGE), "Move it"),
    "window without pixels": (lambda: crop.Crop(origin=(0, 0), size=(0, 9)), "size is .* 1 or more"),
    "window before the image": (lambda: crop.Crop(origin=(-1, 0), size=(5, 9)), "origin is .* 0 or more"),
    "normal form of a mask": (lambda: Normal(operators=(blur.Blur(kernel=kernel(3, 3)), cast(Any, mask(40, 33))), weights=(1, 1)), r"operator 1 \(mask\) cannot be folded"),
    "normal form of a downsampling": (lambda: Normal(operators=(blur.Blur(kernel=kernel(3, 3), factor=2),), weights=(1,)), "only blurs with factor 1"),
    "normal form without weights": (lambda: Normal(operators=(blur.Blur(kernel=kernel(3, 3)),), weights=()), "one weight for each"),
    "mask of another shape": (lambda: mask(40, 30).measured(IMAGE), "Write a mask of the image's shape"),
    "no factor": (lambda: downsample.Downsample(factor=0), "whole number of at least 1"),
    "unknown boundary of a downsampling": (lambda: downsample.Downsample(boundary="odd"), "write one of circular"),
    "valid shift": (lambda: shift.Shift(shift=(1, 1), boundary="valid"), "circular, reflect, replicate, zero"),
    "shift by nothing": (lambda: shift.Shift(shift=(float("nan"), 1)), "two numbers"),
    "shift beyond the image": (lambda: shift.Shift(shift=(0.5, 33)).measured(IMAGE), r"shift is \(0\.5, 33\) and the image is 33 pixels long: only the zeros"),
    "shift before the image": (lambda: shift.Shift(shift=(-30, 0), size=(30, 9)).measured(IMAGE), "Write a smaller shift"),
    "circular crop": (lambda: shift.Shift(shift=(1, 1), size=(9, 9), boundary="circular").measured(IMAGE), "Omit size"),
    "sum of different shapes": (lambda: WeightedSum((blur.Blur(kernel=kernel(3, 3)), blur.Blur(kernel=kernel(3, 3), boundary="valid")), (1, 1)).measured(IMAGE), "stack them"),
}  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    for attempt, words in REFUSED.values():
        with pytest.raises(ConfigError, match=words):
            attempt()


CROP = crop.Crop(origin=(10, 8), size=(12, 9))


BLUR = blur.Blur(kernel=kernel(5, 3))


HALF = blur.Blur(kernel=kernel(5, 3), boundary="zero", factor=2)


MASK = Mask(mask=base.InMemory(numbers(40, 33)))


KINDS: dict[str, tuple[base.Operator, base.OperatorKind, Region]] = {
    "crop": (CROP, "windowed", Region((0, 10, 8), (2, 22, 17))),
    "blur": (BLUR, "local", Region.whole(IMAGE)),
    "blur in a window": (composition.Composition((CROP, BLUR)), "windowed", Region((0, 10, 8), (2, 22, 17))),
    "window of a blur": (composition.Composition((BLUR, CROP)), "windowed", Region((0, 8, 6), (2, 24, 19))),
    "window at the rim of a blur": (composition.Composition((BLUR, crop.Crop(origin=(1, 8), size=(12, 9)))), "windowed", Region((0, 0, 6), (2, 40, 19))),
    "window of fewer pixels": (composition.Composition((HALF, crop.Crop(origin=(6, 6), size=(3, 3)))), "windowed", Region.whole(IMAGE)),
    "local after local": (composition.Composition((BLUR, MASK)), "local", Region.whole(IMAGE)),
    "two windows": (WeightedSum((CROP, crop.Crop(origin=(0, 20), size=(12, 9))), (1.0, 1.0)), "windowed", Region((0, 0, 8), (2, 22, 29))),
    "a window and a neighbourhood": (WeightedSum((crop.Crop(origin=(0, 0), size=(40, 33)), BLUR), (1.0, 1.0)), "local", Region.whole(IMAGE)),
}  # fmt: skip


def test_an_operator_declares_its_window_and_nothing_outside_it_is_seen_or_changed() -> None:
    for name, (operator, kind, window) in KINDS.items():
        assert (operator.kind, base.window_of(operator, IMAGE)) == (kind, window), name
        hidden = numbers(*IMAGE)
        hidden[window.slices] = 0
        assert not np.any(base.read_all(operator.forward(base.InMemory(hidden)))), name
        adjoint = np.array(base.read_all(operator.adjoint(base.InMemory(numbers(*operator.measured(IMAGE))), IMAGE)))
        adjoint[window.slices] = 0
        assert not np.any(adjoint), name


def test_a_window_holds_the_pixels_of_the_image_and_outside_it_nothing_is_read() -> None:
    x, y = numbers(*IMAGE), Counted(numbers(2, 12, 9))
    assert np.array_equal(base.read_all(CROP.forward(base.InMemory(x))), x[:, 10:22, 8:17])
    adjoint = CROP.adjoint(y, IMAGE)
    adjoint.read(Region((0, 0, 0), (2, 10, 33)))
    assert y.reads == []
    adjoint.read(Region((1, 5, 12), (2, 12, 33)))
    assert y.reads == [Region((1, 0, 4), (2, 2, 9))]


SHAPE = (70, 65)


SMALL = (12, 9)


"""A shape in which no pixel is far from the rim."""


FOLDED = {boundary: [boundary] * 3 for boundary in blur.RULES} | {"mixed": ["circular", "reflect", "zero"]}


def whole(source: Readable) -> NDArray[Any]:
    return np.asarray(base.read_all(source))


def stack(name: str, engine: EngineName = "direct") -> Normal:
    sizes = [(5, 5), (8, 3), (1, 6)]
    blurs = (blur.Blur(kernel=kernel(*size), boundary=b) for size, b in zip(sizes, FOLDED[name], strict=True))
    return Normal(operators=tuple(blurs), weights=(1.5, 0.25, 4.0), engine=engine)


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_stack_is_the_stack_and_exact_at_the_rim(name: str) -> None:
    for engine, shape, dtype in itertools.product(ENGINES, (SHAPE, SMALL, (2, *SHAPE)), TOLERANCE):
        normal, x = stack(name, engine), base.InMemory(numbers(*shape).astype(dtype))
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


@pytest.mark.parametrize("boundary", blur.RULES)
def test_transforms_are_the_direct_sum_and_a_region_has_the_bits_of_the_whole(boundary: str) -> None:
    for shape, (dtype, tolerance) in itertools.product(SIZES, TOLERANCE.items()):
        direct = blur.Blur(kernel=kernel(*shape), boundary=boundary, engine="direct")
        fft = blur.Blur(kernel=kernel(*shape), boundary=boundary, engine="fft")
        x = base.InMemory(numbers(2, 70, 65).astype(dtype))
        y = base.InMemory(numbers(*direct.measured(x.shape), seed=3).astype(dtype))
        assert distance(*(base.read_all(each.forward(x)) for each in (fft, direct))) < tolerance
        assert distance(*(base.read_all(each.adjoint(y, x.shape)) for each in (fft, direct))) < tolerance
    soft = blur.Blur(kernel=kernel(9, 6), boundary=boundary, engine="fft")
    x = base.InMemory(numbers(*LARGE).astype("float32"))
    y = base.InMemory(numbers(*soft.measured(LARGE), seed=3).astype("float32"))
    regions = [((0, 0), (33, 1)), ((500, 20), (1030, 40)), ((985, 31), (1092, 84)), ((1060, 2), (1061, 3))]
    for source in (soft.forward(x), soft.adjoint(y, LARGE)):
        whole = base.read_all(source)
        for region in (Region(*pair) for pair in regions):
            assert np.array_equal(source.read(region), whole[region.slices]), region


def test_threads_change_no_bit() -> None:
    source = blur.Blur(kernel=kernel(9, 6), engine="fft").forward(base.InMemory(numbers(*LARGE).astype("float32")))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = base.read_all(source)
    torch.set_num_threads(3)
    together = base.read_all(source)
    torch.set_num_threads(before)
    assert np.array_equal(alone, together)


def test_engines_are_decided_wherever_they_stand() -> None:
    large, small = blur.Blur(kernel=kernel(15, 15)), blur.Blur(kernel=kernel(3, 3))
    strided = blur.Blur(kernel=kernel(15, 15), factor=2)
    direct, nine = replace(large, engine="direct"), blur.Blur(kernel=kernel(9, 9))
    normal = Normal(operators=(nine,), weights=(1.0,))
    parts: tuple[base.Operator, ...] = (large, small, strided, direct, downsample.Downsample(), normal)
    for holder in (composition.Composition(parts), WeightedSum(parts, (1.0,) * 6)):
        decided = base.with_engine(holder, np.dtype("float32"), exact=False)
        engines = [getattr(operator, "engine", None) for operator in decided.operators]
        assert engines == ["fft", "direct", "direct", "direct", None, "fft"]


STACKS = {
    "blurs": [f"blur {boundary} (5, 5)" for boundary in ("circular", "reflect", "zero")],
    "one boundary": [f"blur circular {shape}" for shape in ((3, 3), (4, 6), (15, 15))],
    "all kinds": ["crop zero", "mask", "sum", "composition", "anti-aliased reflect 2", "blur valid (9, 2)"],
}


FIDELITIES: dict[str, Fidelity] = {"l2": l2.L2(), "poisson": poisson.Poisson(background=4.0)}


def terms_of(names: list[str], dtype: str, fidelity: Fidelity | None = None) -> tuple[Term, ...]:
    def term(operator: base.Operator, seed: int) -> Term:
        measured = numbers(*operator.measured(IMAGE), seed=seed).astype(dtype)
        return Term(operator, base.InMemory(measured), 1 / (seed + 1), fidelity or l2.L2())

    return tuple(term(OPERATORS[name], seed) for seed, name in enumerate(names))


def misfit_of(image: Any, terms: tuple[Term, ...]) -> float:
    """The misfit, on the whole."""
    total = 0.0
    for term in terms:
        seen = base.read_all(term.operator.forward(base.InMemory(image)))
        total += term.weight * float(np.sum(term.fidelity.value(seen, base.read_all(term.measurement))))
    return total


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("stack", STACKS)
def test_a_gradient_is_the_slope_of_the_misfit_that_it_notes_in_any_region(stack: str, fidelity: str) -> None:
    """Against differences along random directions; each cell notes a share of every measurement, whatever its shape."""
    x, direction = numbers(*IMAGE, seed=9), numbers(*IMAGE, seed=10) - 0.5
    for dtype in ("float32", "float64"):
        terms = terms_of(STACKS[stack], dtype, FIDELITIES[fidelity])
        gradient = Gradient(base.InMemory(x.astype(dtype)), terms)
        whole = base.read_all(gradient)
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


def test_a_strip_beside_the_core_of_a_block_notes_nothing() -> None:
    """A rim that is folded asks for strips: their cells are noted by the read that holds them."""
    soft, x = blur.Blur(kernel=np.full((3, 3), 1 / 9), boundary="reflect"), base.InMemory(numbers(12, 10, seed=9))
    gradient = FoldedGradient(x, Normal(operators=(soft,), weights=(1.0,)), base.InMemory(numbers(12, 10, seed=2)))
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
