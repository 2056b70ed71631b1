"""Shared images are read once for a block, and kept no longer."""

from __future__ import annotations

import numpy as np

from halotile.storage.grid import Region
from halotile.tasks.shared import Scope, Shared
from tests.tasks.operators.test_operators import numbers
from tests.tasks.test_fidelity import Counted


def test_it_is_read_again_only_where_what_was_read_does_not_reach() -> None:
    image = Counted(numbers(30, 40))
    shared = Shared(image, margin=3)
    with Scope() as scope:
        for region in (Region((10, 10), (20, 20)), Region((8, 7), (23, 22)), Region((0, 38), (9, 40))):
            assert np.array_equal(shared.read(region), image.pixels[region.slices])
    assert image.regions == [Region((7, 7), (23, 23)), Region((0, 35), (12, 40))]
    assert scope.read_bytes == (16 * 16 + 12 * 5) * 8
    assert (shared.shape, shared.dtype) == ((30, 40), np.dtype("float64"))


def test_each_block_reads_anew() -> None:
    image = Counted(numbers(30, 40))
    shared, region = Shared(image), Region((0, 0), (4, 4))
    for _ in range(2):
        with Scope():
            shared.read(region)
            shared.read(region)
    assert image.regions == [region] * 2
    shared.read(region)
    assert image.regions == [region] * 3, "outside a scope nothing is kept"


def test_a_scope_goes_on_where_it_was_left() -> None:
    image = Counted(numbers(30, 40))
    shared, region = Shared(image), Region((0, 0), (4, 4))
    with Scope() as scope:
        shared.read(region)
    with scope:
        shared.read(region)
    assert image.regions == [region]


def test_parts_of_a_sum_are_added_in_their_order() -> None:
    scope = Scope([Region((0,), (1,)), Region((1,), (2,))])
    for cell, part, value in [(1, 0, 5.0), (0, 1, 1e16), (0, 0, 1.0), (0, 2, -1e16), (1, 0, 5.0)]:
        scope.note("a", cell, part, value)
    assert scope.sums() == {"a": [(1.0 + 1e16) - 1e16, 5.0]}
