"""Fourier transforms of a tensor that is cut along one of their axes among ranks.

Each axis is transformed where it is whole; between the two lies a :func:`~halotile.collectives.distributed_transpose`. Both are linear and know their
adjoints, so that gradients of any order are right for every norm. Transforms of real tensors exchange the half spectrum alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.transfers import distributed_transpose, even_sizes
from halotile.tasks.groups.group import TorchGroup

__all__ = ["fft2", "fftn", "ifft2", "ifftn", "irfft2", "rfft2"]


def fft2(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    *,
    dim: tuple[int, int] = (-2, -1),
    norm: str = "backward",
    keep: bool = True,
) -> torch.Tensor:
    """Two-dimensional transform of a tensor that is cut along ``dim[0]``.

    Parameters
    ----------
    x : Tensor
        The part of this rank, real or complex, with any further axes.
    group : TorchGroup
        The ranks.
    sizes : sequence of int
        Lengths of the parts along ``dim[0]``.
    dim : tuple of int
        The axes to transform.
    norm : str
        ``backward``, ``ortho`` or ``forward``, as in :func:`torch.fft.fft2`.
    keep : bool
        True: the result is cut like ``x``. False: it is cut along ``dim[1]`` into even parts, which saves an exchange.

    Examples
    --------
    >>> x = torch.rand(4, 6)
    >>> torch.allclose(fft2(x, TorchGroup(), [4]), torch.fft.fft2(x))
    True
    """
    return _two_axes(x, group, sizes, dim, norm, (torch.fft.fft, torch.fft.fft), keep)


def ifft2(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    *,
    dim: tuple[int, int] = (-2, -1),
    norm: str = "backward",
    keep: bool = True,
) -> torch.Tensor:
    """Inverse of :func:`fft2`; parameters as there."""
    return _two_axes(x, group, sizes, dim, norm, (torch.fft.ifft, torch.fft.ifft), keep)


def rfft2(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    *,
    dim: tuple[int, int] = (-2, -1),
    norm: str = "backward",
    keep: bool = True,
) -> torch.Tensor:
    """Transform of a real tensor, cut along ``dim[0]``; ``dim[1]`` of the result has n // 2 + 1 numbers. Parameters as for :func:`fft2`."""
    return _two_axes(x, group, sizes, dim, norm, (_rfft, torch.fft.fft), keep)


def irfft2(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    *,
    length: int | None = None,
    dim: tuple[int, int] = (-2, -1),
    norm: str = "backward",
    is_cut_along_last: bool = False,
) -> torch.Tensor:
    """Inverse of :func:`rfft2`: a real tensor that is cut along ``dim[0]``.

    Parameters
    ----------
    x : Tensor
        The part of this rank of a half spectrum.
    group : TorchGroup
        The ranks.
    sizes : sequence of int
        Lengths of the parts along ``dim[0]``, of the result as well.
    length : int, optional
        Length of the result along ``dim[1]``; left out, the even one of the two that have this spectrum.
    dim, norm
        As for :func:`fft2`.
    is_cut_along_last : bool
        True: the spectrum is cut along ``dim[1]`` into even parts, as ``rfft2(..., keep=False)`` leaves it.

    Examples
    --------
    >>> x = torch.rand(4, 7)
    >>> spectrum = rfft2(x, TorchGroup(), [4])
    >>> torch.allclose(irfft2(spectrum, TorchGroup(), [4], length=7), x, atol=1e-6)
    True
    """
    first, last = dim
    if is_cut_along_last and length is None:
        raise ConfigError(
            "the spectrum is cut along its last axis, and its whole length is unknown. Write length=, that of the result."
        )
    total = x.shape[last] if length is None else length // 2 + 1
    if not is_cut_along_last and total > x.shape[last]:
        raise ConfigError(
            f"length is {length}, which takes a spectrum of {total} numbers, and this one has {x.shape[last]}. Write a smaller one."
        )
    if not is_cut_along_last:
        x = distributed_transpose(x.narrow(last, 0, min(total, x.shape[last])), group, sizes, first, last)
    x = torch.fft.ifft(x, dim=first, norm=norm)
    x = distributed_transpose(x, group, even_sizes(total, group.world_size), last, first, sizes)
    return _irfft(x, 2 * (total - 1) if length is None else length, last, norm)


def fftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], norm: str = "backward"
) -> torch.Tensor:
    """Transform along any two or more axes, of which the first is cut and stays so; parameters as for :func:`fft2`."""
    return _many_axes(x, group, sizes, dim, torch.fft.fftn, fft2, norm)


def ifftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], norm: str = "backward"
) -> torch.Tensor:
    """Inverse of :func:`fftn`."""
    return _many_axes(x, group, sizes, dim, torch.fft.ifftn, ifft2, norm)


ADJOINT = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
"""Norm of the inverse that is the adjoint, up to the weights of the half spectrum."""


class _RealTransform(torch.autograd.Function):  # type: ignore[misc]
    """torch.fft.rfft, with a gradient that is a transform to real numbers too: torch pads it, and makes twice as many complex ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, norm: str) -> torch.Tensor:
        ctx.length, ctx.dim, ctx.norm = x.shape[dim], dim, norm
        return torch.fft.rfft(x, dim=dim, norm=norm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        weights = torch.full(
            (gradient.shape[ctx.dim],), 0.5, dtype=gradient.real.dtype, device=gradient.device
        )
        weights[0] = 1.0
        if ctx.length % 2 == 0:
            weights[-1] = 1.0
        weighted = (gradient.movedim(ctx.dim, -1) * weights).movedim(-1, ctx.dim)
        return _irfft(weighted, ctx.length, ctx.dim, ADJOINT[ctx.norm]), None, None


def _rfft(x: torch.Tensor, *, dim: int, norm: str) -> torch.Tensor:
    result: torch.Tensor = _RealTransform.apply(x, dim, norm)
    return result


def _many_axes(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    dim: Sequence[int],
    whole_axes: Callable[..., torch.Tensor],
    two: Callable[..., torch.Tensor],
    norm: str,
) -> torch.Tensor:
    if len(dim) < 2:
        raise ConfigError(
            f"dim is {list(dim)}: a transform needs an axis that is cut and one that is whole. Write two or more."
        )
    if len(dim) > 2:
        x = whole_axes(x, dim=[*dim[2:]], norm=norm)
    return two(x, group, sizes, dim=(dim[0], dim[1]), norm=norm)


def _two_axes(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    dim: tuple[int, int],
    norm: str,
    transforms: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]],
    keep: bool,
) -> torch.Tensor:
    """Transform the whole axis by the first transform, then the one that is cut by the second."""
    first, last = dim
    x = transforms[0](x, dim=last, norm=norm)
    length = x.shape[last]
    x = transforms[1](distributed_transpose(x, group, sizes, first, last), dim=first, norm=norm)
    if not keep:
        return x
    return distributed_transpose(x, group, even_sizes(length, group.world_size), last, first, sizes)


def _irfft(x: torch.Tensor, length: int, dim: int, norm: str) -> torch.Tensor:
    """torch.fft.irfft that gives on a GPU what it gives on a CPU."""
    result: torch.Tensor = torch.fft.irfft(
        with_real_ends(x, length, dim) if x.is_cuda else x, length, dim, norm
    )
    return result


def with_real_ends(x: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """A half spectrum without the imaginary parts that no real signal of a length has: of its first number and, if even, of its last.

    On a CPU they do not count. cuFFT takes them to be 0, and what it makes of others depends on the length.

    Examples
    --------
    >>> with_real_ends(torch.full((3,), 1 + 1j), 4, 0).tolist()
    [(1+0j), (1+1j), (1+0j)]
    """
    real = x.clone()
    for end in {0, length // 2} if length % 2 == 0 else {0}:
        real.select(dim, end).imag.zero_()
    return real
