"""The cases that PhysicsNeMo 2.2 tests its distributed functions with, where it has GPUs, for ranks of ours."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch import nn

from halotile.tasks.groups import collectives as c
from halotile.tasks.groups.group import TorchGroup
from tests.graphs.collecting import Function, part_of

FIELD = (2, 10, 720, 1440)
"""Samples, variables, latitudes and longitudes."""


def collective_faults(group: TorchGroup) -> list[str]:
    """Collectives that give another result, or another gradient where that of every number of the result is -1."""
    ranks, rank = group.world_size, group.rank
    sizes = [r + 2 for r in range(ranks)]
    parts = [torch.full((length, 4), r + 1.0) for r, length in enumerate(sizes)]
    own, whole = parts[rank], torch.cat(parts)
    sent = torch.arange(1.0, ranks + 1).repeat_interleave(rank + 1)[:, None].expand(-1, 4)
    indices = [torch.nonzero(sent[:, 0] == r + 1).view(-1) for r in range(ranks)]
    table = [[r + 1] * ranks for r in range(ranks)]
    received = torch.full((sum(range(ranks + 1)), 4), rank + 1.0)
    cases: dict[str, tuple[Function, torch.Tensor, torch.Tensor, float]] = {
        "scatter_v": (lambda x: c.scatter_v(x, group, sizes), whole, own, 0.0 if rank else -1.0),
        "gather_v": (lambda x: c.gather_v(x, group, sizes), own, whole[:0] if rank else whole, -1.0),
        "all_gather_v": (lambda x: c.all_gather_v(x, group, sizes), own, whole, -float(ranks)),
        "indexed": (lambda x: c.indexed_all_to_all_v(x, group, indices, table), sent, received, -1.0),
    }
    faults = []
    for name, (function, given, expected, slope) in cases.items():
        x = given.clone().requires_grad_()
        result = function(x)
        result.backward(torch.full_like(result, -1.0))
        if not torch.equal(result, expected):
            faults.append(name)
        if x.grad is None or not torch.equal(x.grad, torch.full_like(x, slope)):
            faults.append(f"gradient of {name}")
    if c.reduce_loss(1.0, group, mean=False) != ranks:
        faults.append("reduce_loss")
    return faults


def shared_layer_faults(group: TorchGroup) -> list[str]:
    """Gradients of a network that are not summed over the ranks while their layer is marked, or are while it is not."""
    torch.manual_seed(42 * group.world_size + group.rank)
    layers = {"lin_1": nn.Linear(4, 2), "tanh": nn.Tanh(), "lin_2": nn.Linear(2, 4), "sigmoid": nn.Sigmoid()}
    network = nn.Sequential(OrderedDict(layers))

    def gradients() -> dict[str, torch.Tensor]:
        network.zero_grad()
        network(torch.ones(4)).backward(torch.ones(4))
        return {name: parameter.grad for name, parameter in network.named_parameters()}

    own, faults = gradients(), []
    sums = {name: group.all_reduce(gradient) for name, gradient in own.items()}
    for marked in ("lin_1", "lin_2", ""):  # the last is the whole network
        unmark = c.mark_shared(network.get_submodule(marked), group)
        for name, gradient in gradients().items():
            if not torch.allclose(gradient, (sums if name.startswith(marked) else own)[name]):
                faults.append(f"{name} while '{marked}' is marked")
        unmark()
        faults += [f"{name} afterwards" for name, a in gradients().items() if not torch.equal(a, own[name])]
    return faults


def field_faults(group: TorchGroup, dtype: torch.dtype, norm: str) -> list[str]:
    """Transforms of a field, cut along one axis or the other, that differ from one process, or whose gradients do.

    As in PhysicsNeMo, rfft2 takes longitudes that are cut, halves them, and leaves latitudes that are cut; irfft2 goes back. It tries
    single precision and ortho alone, with an absolute tolerance of 1e-3.
    """
    generator = torch.Generator().manual_seed(13)
    field = torch.rand(FIELD, generator=generator, dtype=dtype)
    heights, widths = (c.even_sizes(length, group.world_size) for length in FIELD[-2:])
    cases: tuple[tuple[str, torch.Tensor, Function, Function, tuple[list[int], int], tuple[list[int], int]], ...] = (
        (
            "rfft2", field,
            lambda x: torch.fft.rfft2(x, norm=norm),
            lambda x: c.fft.rfft2(x, group, widths, norm=norm, cut=(1, 0)),
            (widths, -1), (heights, -2),
        ),
        (
            "irfft2", torch.fft.rfft2(field, norm=norm),
            lambda x: torch.fft.irfft2(x, norm=norm),
            lambda x: c.fft.irfft2(x, group, heights, norm=norm, cut=(0, 1)),
            (heights, -2), (widths, -1),
        ),
    )  # fmt: skip
    faults = []
    for name, given, whole, cut, before, after in cases:
        part = part_of(given, group, *before).requires_grad_()
        actual = cut(part)
        shape = list(actual.shape)
        shape[after[1]] = sum(after[0])
        v = torch.rand(shape, dtype=actual.dtype, generator=generator)
        (back,) = torch.autograd.grad(actual, part, part_of(v, group, *after))
        for at in itertools.product(*map(range, FIELD[:2])):  # one at a time, for its memory
            x = given[at].clone().requires_grad_()
            expected = whole(x)
            (wanted,) = torch.autograd.grad(expected, x, v[at])
            for what, a, b, kept in (
                ("", actual[at], expected, after), ("gradient of ", back[at], wanted, before),
            ):  # fmt: skip
                limits = (1e-12, 1e-12 * float(b.abs().max())) if dtype == torch.float64 else (1e-3, 1e-4)
                if not torch.allclose(a, part_of(b, group, *kept), *limits):
                    faults.append(f"{what}{name} at {at}")
    return faults
