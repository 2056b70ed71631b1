"""Adam, without the compiler that the optimizers of torch import: a second and 150 MB in each process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

DECAYS = 0.9, 0.999
"""Of the means of gradients, and of their squares."""
EPSILON = 1e-8


class AdamOptimizer:
    """Steps by the mean of past gradients over the root of the mean of their squares.

    Parameters
    ----------
    parameters : iterable of Parameter
        Numbers to train.
    rate : callable
        Returns the learning rate from the number of steps that are done.

    References
    ----------
    D. P. Kingma, J. Ba, Adam: a method for stochastic optimization, ICLR (2015).

    Examples
    --------
    >>> x = torch.nn.Parameter(torch.tensor([3.0]))
    >>> adam = AdamOptimizer([x], lambda step: 0.1)
    >>> x.square().sum().backward()
    >>> adam.step()
    >>> x.tolist()
    [2.9000000953674316]
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: Callable[[int], float]) -> None:
        self.parameters = list(parameters)
        self.rate = rate
        self.steps = 0
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Change the parameters by their gradients; one that has none counts as zero."""
        rate = self.rate(self.steps)
        self.steps += 1
        of_means, of_squares = (1 - decay**self.steps for decay in DECAYS)
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean.lerp_(gradient, 1 - DECAYS[0])
            square.lerp_(gradient.square(), 1 - DECAYS[1])
            spread = square.sqrt().div_(math.sqrt(of_squares)).add_(EPSILON)
            parameter.addcdiv_(mean, spread, value=-rate / of_means)

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint."""
        return {"steps": self.steps, "means": self.means, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        ValueError
            When it is that of other parameters.
        """
        moments = [
            pair
            for name in ("means", "squares")
            for pair in zip(getattr(self, name), state[name], strict=True)
        ]
        for tensor, stored in moments:
            if tensor.shape != stored.shape:
                raise ValueError(
                    f"the moments of a parameter of shape {list(tensor.shape)} have shape {list(stored.shape)}"
                )
        for tensor, stored in moments:
            tensor.copy_(stored)
        self.steps = state["steps"]
