"""Single operators of a distributed stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepinv.physics import LinearPhysics, Physics

if TYPE_CHECKING:
    from halotile.tasks.distributed.stacks.physics import DistributedStackedPhysics


class SingleOperator(Physics):  # type: ignore[misc]
    """One operator of a stack, on the workers.

    Parameters
    ----------
    stack : DistributedStackedPhysics
        The stack.
    number : int
        Number of the operator.
    """

    def __init__(self, stack: DistributedStackedPhysics, number: int) -> None:
        models = {}
        if local := stack.operators.local:
            models = {"noise_model": local[number].noise_model, "sensor_model": local[number].sensor_model}
        super().__init__(**models)
        self._stack = (stack,)  # in a tuple, so that it is not a submodule
        self.number = number

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i x``."""
        return self._remote_call("A", [x], kwargs)

    def A_vjp(self, x: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``J_i^T v`` with the derivative at ``x``."""
        return self._remote_call("A_vjp", [x, v], kwargs)

    def _remote_call(self, name: str, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor:
        return self._stack[0].apply_single(self.number, name, tensors, kwargs)


class SingleLinearOperator(SingleOperator, LinearPhysics):  # type: ignore[misc]
    """One operator of a stack of linear operators."""

    def A_adjoint(self, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T y``."""
        return self._remote_call("A_adjoint", [y], kwargs)

    def A_adjoint_A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T A_i x``."""
        return self._remote_call("A_adjoint_A", [x], kwargs)
