"""Convolution by transforms: the direct sum to 1e-6, cells that lie still, transforms of kernels kept within bounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from halotile.storage.grid import Region
from halotile.tasks.convolution.overlap_save import _Spectra, cell_edges, engine_for, snapped
from halotile.tasks.operators.base import InMemory, Operator, read_all, with_engine
from halotile.tasks.operators.blur import RULES, Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.downsample import Downsample
from halotile.tasks.operators.normal import Normal
from halotile.tasks.operators.sum import WeightedSum
from tests.tasks.operators.test_operators import KERNELS, TOLERANCE, kernel, numbers

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
LARGE = (1100, 90)
"""Longer than a period of cells."""


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a.astype(float) - b.astype(float)) / np.linalg.norm(b.astype(float)))


@pytest.mark.parametrize("boundary", RULES)
def test_transforms_are_the_direct_sum_and_a_region_has_the_bits_of_the_whole(boundary: str) -> None:
    for shape, (dtype, tolerance) in itertools.product(KERNELS, TOLERANCE.items()):
        direct = Blur(kernel=kernel(*shape), boundary=boundary, engine="direct")
        fft = Blur(kernel=kernel(*shape), boundary=boundary, engine="fft")
        x = InMemory(numbers(2, 70, 65).astype(dtype))
        y = InMemory(numbers(*direct.measured(x.shape), seed=3).astype(dtype))
        assert distance(read_all(fft.forward(x)), read_all(direct.forward(x))) < tolerance
        adjoints = read_all(fft.adjoint(y, x.shape)), read_all(direct.adjoint(y, x.shape))
        assert distance(*adjoints) < tolerance
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


def test_cells_lie_where_they_lie_whatever_is_asked_for() -> None:
    everywhere = set(cell_edges(-3000, 9000))
    for start in (-40, -32, 0, 31, 32, 511, 992, 1024, 3000):
        first, last = snapped(start, start + 100, -40, 5000)
        assert first <= start < start + 100 <= last
        assert {first, last} <= everywhere | {-40, 5000}
        assert set(cell_edges(first, last)) <= everywhere | {first, last}
    assert snapped(2048 - 32, 4096 + 32, 0, 9999) == (2016, 4128)


def test_transforms_of_kernels_are_kept_up_to_a_size() -> None:
    spectra = _Spectra(limit_bytes=5000)
    kernels = [kernel(3, 3 + n).astype("float32") for n in range(4)]
    first = [spectra.of(k, (16, 16)) for k in kernels]
    assert spectra.cached_bytes <= 5000
    assert spectra.of(kernels[-1], (16, 16)) is first[-1]
    assert np.array_equal(spectra.of(kernels[0], (16, 16)), first[0])


def test_large_kernels_that_need_not_be_exact_go_by_transforms() -> None:
    assert engine_for((12, 12), SINGLE, False) == engine_for((3, 13, 13), SINGLE, False) == "fft"
    assert engine_for((4, 4), DOUBLE, False) == "fft"
    assert engine_for((11, 13), SINGLE, False) == engine_for((3, 5), DOUBLE, False) == "direct"
    assert engine_for((31, 31), SINGLE, True) == "direct"


def test_engines_are_decided_wherever_they_stand() -> None:
    large, small = Blur(kernel=kernel(15, 15)), Blur(kernel=kernel(3, 3))
    strided = Blur(kernel=kernel(15, 15), factor=2)
    chosen = Blur(kernel=kernel(15, 15), engine="direct")
    parts: tuple[Operator, ...] = (large, small, strided, chosen, Downsample())
    normal = Normal(operators=(Blur(kernel=kernel(9, 9)),), weights=(1.0,))
    for holder in (Composition((*parts, normal)), WeightedSum((*parts, normal), (1.0,) * 6)):
        decided = with_engine(holder, SINGLE, exact=False)
        engines = [getattr(operator, "engine", None) for operator in decided.operators]
        assert engines == ["fft", "direct", "direct", "direct", None, "fft"]
