"""A window of the image: what is seen of it, what is read for it, and what kind it makes of what holds it."""

from __future__ import annotations

import numpy as np

from halotile.storage.grid import Region
from halotile.tasks.operators.base import InMemory, Operator, OperatorKind, read_all, window_of
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.crop import Crop
from halotile.tasks.operators.mask import Mask
from halotile.tasks.operators.sum import WeightedSum
from tests.tasks.denoising import Counted
from tests.tasks.operators.test_operators import IMAGE, kernel, numbers

CROP = Crop(origin=(10, 8), size=(12, 9))
BLUR = Blur(kernel=kernel(5, 3))
HALF = Blur(kernel=kernel(5, 3), boundary="zero", factor=2)
MASK = Mask(mask=InMemory(numbers(40, 33)))

KINDS: dict[str, tuple[Operator, OperatorKind, Region]] = {
    "crop": (CROP, "windowed", Region((0, 10, 8), (2, 22, 17))),
    "blur": (BLUR, "local", Region.whole(IMAGE)),
    "blur in a window": (Composition((CROP, BLUR)), "windowed", Region((0, 10, 8), (2, 22, 17))),
    "window of a blur": (Composition((BLUR, CROP)), "windowed", Region((0, 8, 6), (2, 24, 19))),
    "window at the rim of a blur": (Composition((BLUR, Crop(origin=(1, 8), size=(12, 9)))), "windowed", Region((0, 0, 6), (2, 40, 19))),
    "window of fewer pixels": (Composition((HALF, Crop(origin=(6, 6), size=(3, 3)))), "windowed", Region.whole(IMAGE)),
    "local after local": (Composition((BLUR, MASK)), "local", Region.whole(IMAGE)),
    "two windows": (WeightedSum((CROP, Crop(origin=(0, 20), size=(12, 9))), (1.0, 1.0)), "windowed", Region((0, 0, 8), (2, 22, 29))),
    "a window and a neighbourhood": (WeightedSum((Crop(origin=(0, 0), size=(40, 33)), BLUR), (1.0, 1.0)), "local", Region.whole(IMAGE)),
}  # fmt: skip


def test_an_operator_declares_its_window_and_nothing_outside_it_is_seen_or_changed() -> None:
    for name, (operator, kind, window) in KINDS.items():
        assert (operator.kind, window_of(operator, IMAGE)) == (kind, window), name
        hidden = numbers(*IMAGE)
        hidden[window.slices] = 0
        assert not np.any(read_all(operator.forward(InMemory(hidden)))), name
        adjoint = np.array(read_all(operator.adjoint(InMemory(numbers(*operator.measured(IMAGE))), IMAGE)))
        adjoint[window.slices] = 0
        assert not np.any(adjoint), name


def test_outside_the_window_nothing_is_read() -> None:
    y = Counted(numbers(2, 12, 9))
    adjoint = CROP.adjoint(y, IMAGE)
    adjoint.read(Region((0, 0, 0), (2, 10, 33)))
    assert y.reads == []
    adjoint.read(Region((1, 5, 12), (2, 12, 33)))
    assert y.reads == [Region((1, 0, 4), (2, 2, 9))]


def test_a_window_holds_the_pixels_of_the_image() -> None:
    x = numbers(*IMAGE)
    assert np.array_equal(read_all(CROP.forward(InMemory(x))), x[:, 10:22, 8:17])
