"""A function that looks farther than its depth, or at the whole image, is found out before it is run in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.trials.receptive_field import Halo, rehearsed
from halotile.tasks.denoisers.function import GivenFunction
from tests.cases import thorough

Image = NDArray[Any]


def above_noise(image: Image, times: float = 2.0) -> Image:
    level = np.median(np.abs(image - np.median(image)))
    return np.where(image > times * level, image, 0)


def logarithm(image: Image) -> Any:
    with np.errstate(invalid="ignore"):
        return np.log(image - 0.1)


def by_twos(image: Image) -> Image:
    for axis, length in enumerate(image.shape):
        every_other = image.take(range(0, length, 2), axis)
        image = every_other.repeat(2, axis).take(range(length), axis)
    return image


def stretched(image: Image) -> Any:
    return (image - image.min()) / (image.max() - image.min())


SOUND: dict[str, tuple[Callable[[Image], Image], int]] = {
    "running sums": (lambda image: ndimage.uniform_filter(image, 9), 4),
    "median": (lambda image: ndimage.median_filter(image, 5), 2),
    "gaussian": (lambda image: ndimage.gaussian_filter(image, 2, truncate=4), 8),
    "threshold": (lambda image: np.where(image > 0.25, image, 0), 0),
    "logarithm": (logarithm, 0),
    "zero": (lambda image: image * 0, 0),
}
WRONG: dict[str, tuple[Callable[[Image], Image], int]] = {
    "farther": (lambda image: ndimage.uniform_filter(image, 9), 3),
    "mean": (lambda image: image - image.mean(), 4),
    "least and most": (stretched, 8),
    "noise level": (above_noise, 8),
    "three deviations": (lambda image: above_noise(image, 3 * 1.4826), 8),
    "bright": (lambda image: np.where(image > image.mean(), image, np.nan), 4),
    "by twos": (by_twos, 2),
    "large depth": (lambda image: image - image.mean(), 70),
}


def tried(call: Callable[[Image], Image], depth: int, dims: int, tile: Tile | None = None) -> Halo:
    halo = Halo(((depth, depth),) * dims, 1, "given")
    return rehearsed(tile or Tile(), GivenFunction(call=call, depth=depth), halo, (500,) * dims)


@pytest.mark.parametrize("dims", [2, thorough(3)])
@pytest.mark.parametrize("name", SOUND)
def test_a_function_with_the_right_depth_is_accepted(name: str, dims: int) -> None:
    tried(*SOUND[name], dims)


def test_a_depth_that_exceeds_the_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"depth of 4000000: an image to check that on.*needs more memory than a worker has"
    ):
        tried(lambda image: image, 4_000_000, 2)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_one_that_looks_farther_is_refused(name: str, dims: int) -> None:
    depth = WRONG[name][1]
    with pytest.raises(
        ConfigError, match=rf"looks farther than its depth of {depth}, or at the whole.*seams: allow"
    ):
        tried(*WRONG[name], dims)


def test_one_whose_seams_are_allowed_is_taken() -> None:
    tried(*WRONG["mean"], 2, Tile(seams="allow"))


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned complex numbers \(complex64\).*modulus"):
        tried(lambda image: image + 1j, 0, 2)
