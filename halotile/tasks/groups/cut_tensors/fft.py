"""Fourier transforms of a tensor that is cut along one of their axes among ranks.

Each axis is transformed where it is whole; :func:`~halotile.collectives.distributed_transpose` makes it so. All steps are linear and know their
adjoints, so that gradients of any order are right for every norm. Transforms of real tensors exchange the half spectrum where the layout permits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from halotile.errors import ConfigError
from halotile.tasks.groups.cut_tensors.transfers import distributed_transpose, even_sizes
from halotile.tasks.groups.group import TorchGroup

__all__ = ["fft2", "fftn", "ifft2", "ifftn", "irfft2", "irfftn", "rfft2", "rfftn"]

PLANE = (-2, -1)  # axes of two-dimensional transforms by default


def fftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], **options: Any
) -> torch.Tensor:
    """Transform of a tensor that is cut along one of the transformed axes.

    Parameters
    ----------
    x : Tensor
        The part of this rank, real or complex, with any further axes.
    group : TorchGroup
        The ranks.
    sizes : sequence of int
        Lengths of the parts of ``x`` along its cut axis.
    dim : sequence of int
        Two or more axes to transform.
    s : sequence of int, optional
        Lengths to which the axes of ``dim`` are padded with zeros or truncated, as in :func:`torch.fft.fftn`.
    norm : str
        ``backward`` by default, ``ortho`` or ``forward``, as in :func:`torch.fft.fftn`.
    cut : tuple of int
        Positions in ``dim`` of the axis along which ``x`` is cut, and of the one along which the result is; by default ``(0, 0)``.
        Of two axes, different ones save an exchange.
    new_sizes : sequence of int, optional
        Lengths of the parts of the result; left out, ``sizes`` where the axis and its length are the same, else even ones.

    Raises
    ------
    ConfigError
        When axes, lengths or parts do not fit.

    Examples
    --------
    >>> x = torch.rand(4, 6)
    >>> torch.allclose(fftn(x, TorchGroup(), [4], dim=(0, 1)), torch.fft.fft2(x), atol=1e-6)
    True
    """
    return _transformed(x, group, sizes, _cut_last(dim, options), torch.fft.fft, dim=dim, **options)


def ifftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], **options: Any
) -> torch.Tensor:
    """Inverse of :func:`fftn`; parameters as there."""
    return _transformed(x, group, sizes, _cut_last(dim, options), torch.fft.ifft, dim=dim, **options)


def rfftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], **options: Any
) -> torch.Tensor:
    """Transform of a real tensor, whose last axis of ``dim`` becomes n // 2 + 1 numbers; parameters as for :func:`fftn`.

    >>> x = torch.rand(2, 4, 6)
    >>> torch.allclose(rfftn(x, TorchGroup(), [2], dim=(0, 1, 2)), torch.fft.rfftn(x), atol=1e-6)
    True
    """
    order = reversed(range(len(dim)))
    return _transformed(x, group, sizes, order, _of_last(dim, _rfft, torch.fft.fft), dim=dim, **options)


def irfftn(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int], **options: Any
) -> torch.Tensor:
    """Inverse of :func:`rfftn`, a real tensor; parameters as for :func:`fftn`.

    Without ``s``, the last axis of the result has the even one of the two lengths that have this spectrum.

    >>> x = torch.rand(4, 7)
    >>> spectrum = rfftn(x, TorchGroup(), [4], dim=(0, 1))
    >>> torch.allclose(irfftn(spectrum, TorchGroup(), [4], dim=(0, 1), s=(4, 7)), x, atol=1e-6)
    True
    """
    order = range(len(dim))
    return _transformed(x, group, sizes, order, _of_last(dim, _irfft, torch.fft.ifft), dim=dim, **options)


def fft2(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int] = PLANE, **options: Any
) -> torch.Tensor:
    """:func:`fftn` along two axes."""
    return fftn(x, group, sizes, dim=dim, **options)


def ifft2(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int] = PLANE, **options: Any
) -> torch.Tensor:
    """:func:`ifftn` along two axes."""
    return ifftn(x, group, sizes, dim=dim, **options)


def rfft2(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int] = PLANE, **options: Any
) -> torch.Tensor:
    """:func:`rfftn` along two axes."""
    return rfftn(x, group, sizes, dim=dim, **options)


def irfft2(
    x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], *, dim: Sequence[int] = PLANE, **options: Any
) -> torch.Tensor:
    """:func:`irfftn` along two axes."""
    return irfftn(x, group, sizes, dim=dim, **options)


def _cut_last(dim: Sequence[int], options: dict[str, Any]) -> list[int]:
    """Return the positions of all axes, the last one first, and that of the cut axis last."""
    cut = options.get("cut", (0, 0))[0]
    return sorted(range(len(dim)), key=lambda axis: (axis == cut, -axis))


def _of_last(
    axes: Sequence[int], last: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda x, *, dim, **options: (last if dim == axes[-1] else other)(x, dim=dim, **options)


def _transformed(
    x: torch.Tensor,
    group: TorchGroup,
    sizes: Sequence[int],
    order: Iterable[int],
    transform: Callable[..., torch.Tensor],
    *,
    dim: Sequence[int],
    s: Sequence[int] | None = None,
    norm: str = "backward",
    cut: tuple[int, int] = (0, 0),
    new_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Transform the axes in order, each where it is whole."""
    last = len(dim) - 1
    if last < 1:
        raise ConfigError(
            f"dim is {list(dim)}: a transform needs an axis that is cut and one that is whole. Write two or more."
        )
    if s is not None and len(s) != len(dim):
        raise ConfigError(f"s is {list(s)}, and dim is {list(dim)}. Write a length for each axis.")
    if not all(0 <= axis <= last for axis in cut):
        raise ConfigError(f"cut is {cut}, and dim has {len(dim)} axes. Write numbers from 0 to {last}.")
    at, parts = cut[0], sizes

    def moved(to: int) -> tuple[torch.Tensor, int, Sequence[int]]:
        length = x.shape[dim[to]]
        new = even_sizes(length, group.world_size)
        for axis, wanted in zip(cut, (sizes, new_sizes), strict=True):
            if to == axis and wanted is not None and sum(wanted) == length:
                new = [*wanted]
        return distributed_transpose(x, group, parts, dim[at], dim[to], new), to, new

    done: list[int] = []
    for axis in order:
        if axis == at:  # to an axis that is not needed any more, if possible the one at which the result is cut
            free = done or [other for other in (cut[1], last, 0) if other != at]
            x, at, parts = moved(cut[1] if cut[1] in free else free[0])
        done.append(axis)
        x = transform(x, dim=dim[axis], n=None if s is None else s[axis], norm=norm)
    if at != cut[1]:
        x, at, parts = moved(cut[1])
    if new_sizes is not None and [*parts] != [*new_sizes]:
        raise ConfigError(
            f"new_sizes are {list(new_sizes)}, and the result has {sum(parts)} along that axis. Write lengths that add up to it."
        )
    return x


# Norm of the inverse that is the adjoint, up to the weights of the half spectrum.
ADJOINT = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


class _RealTransform(torch.autograd.Function):  # type: ignore[misc]
    """torch.fft.rfft, with a gradient that is a transform to real numbers too: torch pads it, and makes twice as many complex ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, norm: str) -> torch.Tensor:
        ctx.length, ctx.dim, ctx.norm = x.shape[dim], dim, norm
        return torch.fft.rfft(x, dim=dim, norm=norm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        weights = torch.full((gradient.shape[ctx.dim],), 0.5, dtype=gradient.real.dtype, device=gradient.device)
        weights[0] = 1.0
        if ctx.length % 2 == 0:
            weights[-1] = 1.0
        weighted = (gradient.movedim(ctx.dim, -1) * weights).movedim(-1, ctx.dim)
        return _irfft(weighted, dim=ctx.dim, n=ctx.length, norm=ADJOINT[ctx.norm]), None, None


def _rfft(x: torch.Tensor, *, dim: int, n: int | None, norm: str) -> torch.Tensor:
    length = x.shape[dim] if n is None else n
    if length > x.shape[dim]:
        rest = [*x.shape]
        rest[dim] = length - x.shape[dim]
        x = torch.cat((x, x.new_zeros(rest)), dim)
    result: torch.Tensor = _RealTransform.apply(x.narrow(dim, 0, length), dim, norm)
    return result


def _irfft(x: torch.Tensor, *, dim: int, n: int | None, norm: str) -> torch.Tensor:
    """torch.fft.irfft that gives on a GPU what it gives on a CPU."""
    length = 2 * (x.shape[dim] - 1) if n is None else n
    if x.is_cuda:
        x = with_real_ends(x, length, dim)
    result: torch.Tensor = torch.fft.irfft(x, length, dim, norm)
    return result


def with_real_ends(x: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """A half spectrum without the imaginary parts that no real signal of a length has: of its first number and, if even, of its last.

    On a CPU they do not count. cuFFT takes them to be 0, and what it makes of others depends on the length.

    >>> with_real_ends(torch.full((3,), 1 + 1j), 4, 0).tolist()
    [(1+0j), (1+1j), (1+0j)]
    """
    real = x.clone()
    for end in {0, length // 2} if length % 2 == 0 and length // 2 < x.shape[dim] else {0}:
        real.select(dim, end).imag.zero_()
    return real
