"""Linear systems without a solution are refused with a message."""

from __future__ import annotations

import pytest
import torch

from halotile.errors import ConfigError, InputError
from halotile.tasks.distributed.stacks.krylov import conjugate_gradients, largest_eigenvalue

BROKEN = float("nan")


def test_a_right_hand_side_that_is_not_finite_is_reported() -> None:
    with pytest.raises(InputError, match="NaN or infinities in the right-hand side: check the measurements"):
        conjugate_gradients(lambda x: x, torch.tensor([[1.0, BROKEN]]), 1e-3, 9)


def test_operators_that_return_nan_are_reported() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x * BROKEN

    with pytest.raises(InputError, match="the result of the operators for a finite image"):
        conjugate_gradients(broken, torch.ones(1, 3), 1e-3, 9)
    with pytest.raises(InputError, match="the result of the operators for a finite image"):
        largest_eigenvalue(broken, torch.ones(1, 3), 1e-3, 9)


def test_an_adjoint_of_the_wrong_sign_is_reported() -> None:
    with pytest.raises(ConfigError, match="A_adjoint is not the adjoint of A"):
        conjugate_gradients(lambda x: -x, torch.ones(1, 3), 1e-3, 9)


def test_a_singular_system_is_solved_where_it_can_be() -> None:
    seen = torch.tensor([[1.0, 0.0, 2.0]])
    x, residual = conjugate_gradients(lambda x: seen * x, torch.tensor([[1.0, 0.0, 4.0]]), 1e-6, 9)
    assert residual <= 1e-6
    torch.testing.assert_close(x, torch.tensor([[1.0, 0.0, 2.0]]))
