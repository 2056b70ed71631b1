"""Ordered subsets: the operators that an iteration takes, from its number and a seed alone."""

from typing import Literal

import numpy as np

from halotile.errors import ConfigError
from halotile.tasks.options import check_whole, check_word

SubsetOrder = Literal["cyclic", "random"]
ORDERS: tuple[SubsetOrder, ...] = ("cyclic", "random")


def ordered_subset(
    count: int, subsets: int, iteration: int, *, order: str = "cyclic", seed: int = 0
) -> tuple[int, ...]:
    """Return the numbers of the operators that an iteration takes: one of several interleaved subsets.

    Every ``subsets`` iterations, an epoch, take each of them once.

    Parameters
    ----------
    count : int
        Number of operators.
    subsets : int
        Number of subsets; subset ``s`` has the operators ``s``, ``s + subsets``, ``s + 2 subsets`` ...
    iteration : int
        Number of the iteration, from 0.
    order : str
        ``cyclic``: in their order; ``random``: in one that each epoch draws anew.
    seed : int
        Seed of the random orders, which follow from it and the epoch alone.

    Raises
    ------
    ConfigError
        For a value that is out of range.

    References
    ----------
    H. Hudson, R. Larkin, Accelerated image reconstruction using ordered subsets of projection data, IEEE Trans. Med.
    Imaging 13 (1994) 601-609.

    Examples
    --------
    >>> [ordered_subset(5, 2, iteration) for iteration in range(3)]
    [(0, 2, 4), (1, 3), (0, 2, 4)]
    >>> sorted(ordered_subset(4, 4, iteration, order="random", seed=7)[0] for iteration in range(4))
    [0, 1, 2, 3]
    """
    check_order(order, seed)
    check_whole("subsets", subsets, 1)
    if subsets > count:
        raise ConfigError(f"subsets is {subsets}, and there are {count} operators. Write 1 to {count}.")
    if iteration < 0:
        raise ConfigError(f"iteration is {iteration}. Write 0 or more.")
    epoch, place = divmod(iteration, subsets)
    if order == "random":
        place = int(np.random.default_rng((seed, epoch)).permutation(subsets)[place])
    return tuple(range(place, count, subsets))


def check_order(order: str, seed: int) -> None:
    """Refuse an unknown order, and a seed that is none."""
    check_word("order", order, ORDERS)
    check_whole("seed", seed, 0)
