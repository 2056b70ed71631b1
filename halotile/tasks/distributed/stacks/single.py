"""One operator of a distributed stack."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from deepinv.physics import LinearPhysics, Physics

from halotile.tasks.distributed.stacks.operators import Operators


class Stack(Protocol):
    """What operators stand in together."""

    operators: Operators

    def applied_by(
        self, number: int, name: str, tensors: list[torch.Tensor], words: dict[str, Any]
    ) -> torch.Tensor:
        """What a method of one of them gives."""
        ...


class OnePhysics(Physics):  # type: ignore[misc]
    """One operator of a stack, on the workers.

    Parameters
    ----------
    stack : Stack
        Whose operator it is.
    number : int
        Which one.
    """

    def __init__(self, stack: Stack, number: int) -> None:
        here = stack.operators.here
        words = (
            {"noise_model": here[number].noise_model, "sensor_model": here[number].sensor_model}
            if here
            else {}
        )
        super().__init__(**words)
        self._stack = (stack,)
        self.number = number

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i x``."""
        return self._applied("A", [x], kwargs)

    def A_vjp(self, x: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``J_i^T v`` with the derivative at ``x``."""
        return self._applied("A_vjp", [x, v], kwargs)

    def _applied(self, name: str, tensors: list[torch.Tensor], words: dict[str, Any]) -> torch.Tensor:
        (stack,) = self._stack
        return stack.applied_by(self.number, name, tensors, words)


class OneOperator(OnePhysics, LinearPhysics):  # type: ignore[misc]
    """The same of a stack of linear operators."""

    def A_adjoint(self, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T y``."""
        return self._applied("A_adjoint", [y], kwargs)

    def A_adjoint_A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T A_i x``."""
        return self._applied("A_adjoint_A", [x], kwargs)
