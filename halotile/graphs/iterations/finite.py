"""Check that the data that are read are numbers: the sums of a first pass show whether they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from halotile.errors import InputError
from halotile.graphs.solvers.base import ERROR, State


def check_finite(sums: Mapping[str, float], state: State, epoch: int = 1) -> None:
    """Refuse the input when sums of a solver are not finite in its first epoch; later ones are caused by the solver itself.

    Raises
    ------
    InputError
        With the places to look at.

    Examples
    --------
    >>> check_finite({"misfit": float("nan")}, State(passes=1))
    >>> check_finite({"misfit": 2.0, "error": float("nan")}, State())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    halotile.errors.InputError: the first pass gave error nan: some pixel of the reference is NaN or infinite. ...
    """
    wild = [name for name, value in sums.items() if not math.isfinite(value)]
    if not wild or state.passes >= epoch:
        return
    which = f"pass {state.passes + 1}" if state.passes else "the first pass"
    came = f"{which} gave {wild[0]} {sums[wild[0]]}"
    if wild == [ERROR]:
        raise InputError(
            f"{came}: some pixel of the reference is NaN or infinite. Replace it by a number, or leave the reference out."
        )
    raise InputError(
        f"{came}: some pixel of the data, of start, or of what an operator reads (a mask) is NaN or infinite. Replace it "
        "by a number; one that is to be left out, by 0 under a mask that is 0 there."
        + (" Or write a smaller solver.step, if it is not auto." if state.passes else "")
    )
