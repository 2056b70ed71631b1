"""One operator of a distributed stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepinv.physics import LinearPhysics

from halotile.tasks.distributed.calls import Call, Method
from halotile.tasks.distributed.evaluate import Batch, evaluate
from halotile.tasks.distributed.operators import carry_words
from halotile.tasks.distributed.physics import ADJOINT, FORWARD, DistributedStackedPhysics


class OneOperator(LinearPhysics):  # type: ignore[misc]
    """One operator of a stack, on the workers.

    Parameters
    ----------
    stack : DistributedStackedPhysics
        Whose operator it is.
    number : int
        Which one.
    """

    def __init__(self, stack: DistributedStackedPhysics, number: int) -> None:
        super().__init__()
        self._stack = (stack,)
        self.number = number

    def A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i x``."""
        return self._applied(FORWARD, "A", [x], kwargs)

    def A_adjoint(self, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T y``."""
        return self._applied(ADJOINT, "A_adjoint", [y], kwargs)

    def A_vjp(self, x: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``J_i^T v`` with the derivative at ``x``."""
        return self._applied(ADJOINT, "A_vjp", [x, v], kwargs)

    def A_adjoint_A(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``A_i^T A_i x``."""
        return self._applied(ADJOINT, "A_adjoint_A", [x], kwargs)

    def _applied(self, phase: str, name: str, tensors: Sequence[torch.Tensor], words: Any) -> torch.Tensor:
        (stack,) = self._stack
        method = Method(
            stack.operators.things[self.number], name, carry_words(stack.ctx, words), kind=stack.kind
        )
        call = Call(method, tuple(range(len(tensors))), (0,), self.number)
        return evaluate(Batch(stack.ctx, phase, (call,), 1), tensors)[0]
