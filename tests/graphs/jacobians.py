"""Ranks that compare gradients, and gradients of gradients, with differences of what all ranks compute together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck

from halotile.tasks.groups import collectives as c
from halotile.tasks.groups.group import TorchGroup
from tests.graphs.collecting import Function, linear_operators, transforms

# Differences of linear functions are exact for any step, and for a wide one they lose no digits.
LINEAR = {"eps": 0.5, "atol": 1e-11, "rtol": 1e-11, "fast_mode": True, "check_undefined_grad": False}


class _Part(torch.autograd.Function):  # type: ignore[misc]
    """The part of this rank of a vector that all ranks have; its gradient is joined."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TorchGroup, sizes: Sequence[int]) -> torch.Tensor:
        ctx.cut = group, sizes
        return x.split([*sizes])[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Joined.apply(*gradients, *ctx.cut), None, None


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """The vector of all parts, on every rank; its gradient, which all ranks have, is cut."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: TorchGroup, sizes: Sequence[int]) -> torch.Tensor:
        ctx.cut = group, sizes
        return c.all_gather_v(part, group, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Part.apply(*gradients, *ctx.cut), None, None


def _together(group: TorchGroup, operator: Function, part: torch.Tensor) -> tuple[Function, int]:
    """An operator on the parts of all ranks as a function of one vector, which every rank computes, and the length of that."""

    def lengths(x: torch.Tensor) -> list[int]:
        own = torch.tensor([x.numel()])
        return [int(length) for length in c.all_gather_v(own, group, [1] * group.world_size)]

    before, after = lengths(part), lengths(operator(part))

    def function(x: torch.Tensor) -> torch.Tensor:
        result = operator(_Part.apply(x, group, before).view(part.shape))
        joined: torch.Tensor = _Joined.apply(result.reshape(-1), group, after)
        return joined

    return function, sum(before)


def gradient_faults(group: TorchGroup) -> list[str]:
    """Collectives and transforms with a wrong gradient, or a wrong gradient of their gradient."""
    collectives = {
        name: (operator, shape, torch.float64) for name, (operator, shape) in linear_operators(group).items()
    }
    faults = []
    for name, (operator, shape, dtype) in (collectives | transforms(group)).items():
        function, length = _together(group, operator, torch.zeros(shape, dtype=dtype))
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(length, dtype=dtype, generator=generator, requires_grad=True)
        y = function(x)
        v = torch.randn(y.shape, dtype=y.dtype, generator=generator, requires_grad=True)
        try:
            gradcheck(function, x, **LINEAR)
            gradgradcheck(function, x, v, **LINEAR)
        except GradcheckError as error:
            faults.append(f"{name}: {error}")
    return faults
