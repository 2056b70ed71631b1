"""A function that looks farther than its depth, or at the whole picture, is found out before it is run in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from halotile.errors import ConfigError, MemoryRefused
from halotile.graphs.jobs.sections import Tile
from halotile.graphs.plans.receptive_field import Reach, rehearsed
from halotile.tasks.denoisers.function import GivenFunction

Picture = NDArray[Any]


def above_noise(picture: Picture, times: float = 2.0) -> Picture:
    level = np.median(np.abs(picture - np.median(picture)))
    return np.where(picture > times * level, picture, 0)


def logarithm(picture: Picture) -> Any:
    with np.errstate(invalid="ignore"):
        return np.log(picture - 0.1)


def by_twos(picture: Picture) -> Picture:
    for axis, length in enumerate(picture.shape):
        every_other = picture.take(range(0, length, 2), axis)
        picture = every_other.repeat(2, axis).take(range(length), axis)
    return picture


def stretched(picture: Picture) -> Any:
    return (picture - picture.min()) / (picture.max() - picture.min())


SOUND: dict[str, tuple[Callable[[Picture], Picture], int]] = {
    "running sums": (lambda picture: ndimage.uniform_filter(picture, 9), 4),
    "median": (lambda picture: ndimage.median_filter(picture, 5), 2),
    "gaussian": (lambda picture: ndimage.gaussian_filter(picture, 2, truncate=4), 8),
    "threshold": (lambda picture: np.where(picture > 0.25, picture, 0), 0),
    "logarithm": (logarithm, 0),
    "zero": (lambda picture: picture * 0, 0),
}
WRONG: dict[str, tuple[Callable[[Picture], Picture], int]] = {
    "farther": (lambda picture: ndimage.uniform_filter(picture, 9), 3),
    "mean": (lambda picture: picture - picture.mean(), 4),
    "least and most": (stretched, 8),
    "noise level": (above_noise, 8),
    "three deviations": (lambda picture: above_noise(picture, 3 * 1.4826), 8),
    "bright": (lambda picture: np.where(picture > picture.mean(), picture, np.nan), 4),
    "by twos": (by_twos, 2),
    "large depth": (lambda picture: picture - picture.mean(), 70),
}


def tried(call: Callable[[Picture], Picture], depth: int, dims: int, tile: Tile | None = None) -> Reach:
    reach = Reach(((depth, depth),) * dims, 1, "given")
    return rehearsed(tile or Tile(), GivenFunction(call=call, depth=depth), reach, (500,) * dims)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", SOUND)
def test_a_function_that_looks_as_far_as_it_says_is_taken(name: str, dims: int) -> None:
    tried(*SOUND[name], dims)


def test_a_depth_that_no_memory_is_enough_for_is_told_as_that() -> None:
    with pytest.raises(
        MemoryRefused, match=r"depth of 4000000: a picture to try that on.*needs more memory than is free"
    ):
        tried(lambda picture: picture, 4_000_000, 2)


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
    with pytest.raises(ConfigError, match=r"made complex numbers \(complex64\).*modulus"):
        tried(lambda picture: picture + 1j, 0, 2)
