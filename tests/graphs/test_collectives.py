"""Collectives and Fourier transforms over ranks: the numbers of one process, and their adjoints as gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from halotile import DistributedContext
from halotile.errors import ConfigError, RankFailed
from halotile.tasks.groups import collectives as c
from halotile.tasks.groups.cut_tensors import fft
from halotile.tasks.groups.group import TorchGroup
from tests.cases import thorough

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int32, torch.int64,
)  # fmt: skip
SIZES = {1: [5], 2: [4, 1], 3: [2, 0, 5], 4: [3, 1, 0, 4]}
"""Uneven lengths of the parts, with empty ones."""
Function = Callable[[torch.Tensor], torch.Tensor]


def by_way(group: TorchGroup, program: Callable[[TorchGroup], Any], is_shared: bool) -> Any:
    """Run a program of ranks that exchange through memory, or through gloo."""
    if group.world_size > 1 and group.shared is None:
        raise ValueError("these ranks have no memory in common")
    return program(group if is_shared else replace(group, shared=None))


def whole(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same small integers on every rank, which all types represent."""
    numbers = torch.randint(-4, 5, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)


def part_of(x: torch.Tensor, group: TorchGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    return x.split([*sizes], dim)[group.rank].contiguous()


def forward_faults(group: TorchGroup) -> list[str]:
    """Collectives whose result differs from that of one process."""
    ranks, faults = group.world_size, []
    sizes, last = SIZES[ranks], ranks - 1
    total = sum(sizes)
    table = [[(a + 2 * b) % 3 for b in range(ranks)] for a in range(ranks)]

    def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if actual.dtype != expected.dtype or not torch.equal(actual, expected):
            faults.append(f"{name} {expected.dtype}")

    for dtype in DTYPES:
        for dim, shape in ((0, (total, 3)), (1, (2, total, 3)), (-1, (2, total))):
            x = whole(shape, dtype)
            part = part_of(x, group, sizes, dim)
            given = x if group.rank == last else x.narrow(dim, 0, 0)
            check("scatter_v", c.scatter_v(given, group, sizes, dim, last), part)
            check("gather_v", c.gather_v(part, group, sizes, dim, last), given)
            check("all_gather_v", c.all_gather_v(part, group, sizes, dim), x)
            everybody = [whole(shape, dtype, seed=rank) for rank in range(ranks)]
            added = torch.stack(everybody).sum(0).to(dtype)
            own = everybody[group.rank]
            check("all_reduce_v", c.all_reduce_v(own, group, sizes, dim), part_of(added, group, sizes, dim))
            check("all_reduce", c.all_reduce(own, group), added)
        rows = [whole((sum(row), 2), dtype, seed=rank) for rank, row in enumerate(table)]
        mine = [rows[a].split(table[a])[group.rank] for a in range(ranks)]
        check("all_to_all_v", c.all_to_all_v(rows[group.rank], group, table), torch.cat(mine))
        indices = [[torch.arange(n) * (b + 1) % 4 for b, n in enumerate(row)] for row in table]
        sources = [whole((4, 2), dtype, seed=rank) for rank in range(ranks)]
        chosen = [sources[a][indices[a][group.rank]] for a in range(ranks)]
        actual = c.indexed_all_to_all_v(sources[group.rank], group, indices[group.rank], table)
        check("indexed_all_to_all_v", actual, torch.cat(chosen))
        x, new = whole((2, total, 7), dtype), c.even_sizes(7, ranks)
        turned = c.distributed_transpose(part_of(x, group, sizes, 1), group, sizes, 1, 2)
        check("distributed_transpose", turned, part_of(x, group, new, 2))
        faults += halo_faults(group, sizes, dtype)
    return faults


def halo_faults(group: TorchGroup, sizes: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Halos, some of them longer than the parts, that differ from those of the whole."""
    x, faults = whole((2, sum(sizes), 3), dtype), []
    start = sum(sizes[: group.rank])
    stop = start + sizes[group.rank]
    for before, after in ((1, 1), (0, 3), (4, 2)):
        around = torch.cat([x] * 7, 1)[:, 3 * x.shape[1] + start - before : 3 * x.shape[1] + stop + after]
        zeros = torch.nn.functional.pad(x, (0, 0, before, after))[:, start : stop + before + after]
        expected = {"circular": around, "cut": x[:, max(0, start - before) : stop + after], "zero": zeros}
        for rule, halo in expected.items():
            got = c.halo_exchange(part_of(x, group, sizes, 1), group, sizes, 1, before, after, rule)
            if not torch.equal(got, halo if start < stop else x[:, :0]):
                faults.append(f"halo_exchange {rule} {before} {after} {dtype}")
    return faults


def linear_operators(group: TorchGroup) -> dict[str, tuple[Function, tuple[int, ...]]]:
    """Every collective as a linear operator on the part of a rank, and the shape of that."""
    ranks, sizes = group.world_size, SIZES[group.world_size]
    own, total = sizes[group.rank], sum(sizes)
    table = [[(a + 2 * b) % 3 for b in range(ranks)] for a in range(ranks)]
    indices = [torch.arange(n) * (b + 1) % 4 for b, n in enumerate(table[group.rank])]
    at_last = total if group.rank == ranks - 1 else 0
    return {
        "scatter_v": (lambda x: c.scatter_v(x, group, sizes, 0, ranks - 1), (at_last, 2)),
        "gather_v": (lambda x: c.gather_v(x, group, sizes, 1, ranks - 1), (2, own)),
        "all_gather_v": (lambda x: c.all_gather_v(x, group, sizes), (own, 2)),
        "all_reduce_v": (lambda x: c.all_reduce_v(x, group, sizes), (total, 2)),
        "all_reduce": (lambda x: c.all_reduce(x, group), (3, 2)),
        "all_to_all_v": (lambda x: c.all_to_all_v(x, group, table), (sum(table[group.rank]), 2)),
        "indexed": (lambda x: c.indexed_all_to_all_v(x, group, indices, table), (4, 2)),
        "transpose": (lambda x: c.distributed_transpose(x, group, sizes, 0, 1), (own, 3)),
        **{f"halo {rule}": (partial(_halo, group, sizes, rule), (own, 2)) for rule in ("cut", "zero", "circular")},
    }


def _halo(group: TorchGroup, sizes: Sequence[int], rule: str, x: torch.Tensor) -> torch.Tensor:
    return c.halo_exchange(x, group, sizes, 0, 4, 2, rule)


def transforms(group: TorchGroup) -> dict[str, tuple[Function, tuple[int, ...], torch.dtype]]:
    """Every transform as a linear operator on the part of a rank, with the shape and the type of that."""
    sizes = SIZES[group.world_size]
    own, columns = sizes[group.rank], c.even_sizes(3, group.world_size)[group.rank]
    real, full = torch.float64, torch.complex128
    found: dict[str, tuple[Function, tuple[int, ...], torch.dtype]] = {}
    for norm in ("backward", "ortho", "forward"):
        of_rows: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], torch.dtype]] = {
            "fft2": (fft.fft2, (own, 3), real),
            "ifft2": (fft.ifft2, (own, 3), full),
            "rfft2": (fft.rfft2, (own, 4), real),
            "rfft2, cut along the last axis": (partial(fft.rfft2, cut=(0, 1)), (own, 5), real),
            "rfft2 of a longer one": (partial(fft.rfft2, s=(sum(sizes) + 1, 7)), (own, 5), real),
            "irfft2": (partial(fft.irfft2, s=(sum(sizes), 5)), (own, 3), full),
            "rfftn": (partial(fft.rfftn, dim=(0, 1, 2), s=(sum(sizes), 3, 3)), (own, 2, 4), real),
            "irfftn": (partial(fft.irfftn, dim=(0, 2, 1)), (own, 3, 3), full),
            "fftn": (partial(fft.fftn, dim=(0, 2, 1)), (own, 2, 3), full),
            "ifftn": (partial(fft.ifftn, dim=(0, 1, 2)), (own, 2, 3), full),
        }  # fmt: skip
        for name, (function, shape, dtype) in of_rows.items():
            found[f"{name} {norm}"] = partial(function, group=group, sizes=sizes, norm=norm), shape, dtype
        of_columns = partial(
            fft.irfft2, group=group, sizes=c.even_sizes(3, group.world_size), s=(sum(sizes), 4), cut=(1, 0), new_sizes=sizes,
        )  # fmt: skip
        found[f"irfft2 of columns {norm}"] = partial(of_columns, norm=norm), (sum(sizes), columns), full
    return found


def operators(group: TorchGroup) -> dict[str, tuple[Function, tuple[int, ...], torch.dtype]]:
    """Everything that has a gradient, with the shape and the type of the part of this rank."""
    found = transforms(group)
    for (name, part), dtype in itertools.product(linear_operators(group).items(), (torch.float64, torch.complex128)):
        found[f"{name} {dtype}"] = (*part, dtype)
    return found


def dot_gaps(group: TorchGroup) -> dict[str, float]:
    """Relative difference of <A x, v> and <x, Aᵀ v> over all ranks, and of A w and the gradient of the gradient."""
    gaps: dict[str, float] = {}
    for name, (operator, shape, dtype) in operators(group).items():
        x, v, w = _draws(group, operator, shape, dtype)
        y = operator(x)
        (back,) = torch.autograd.grad(y, x, v, create_graph=True)
        (twice,) = torch.autograd.grad(back, v, w)
        left, right = (group.all_reduce(value.detach()) for value in (_dot(y, v), _dot(x, back)))
        again = operator(w).detach()
        apart = float((twice.detach() - again).abs().max() / again.abs().max()) if again.numel() else 0.0
        gaps[name] = max(float((left - right).abs() / left.abs().clamp_min(1e-300)), apart)
    return gaps


def _draws(group: TorchGroup, operator: Function, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + group.rank)
    x = torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True)
    y = operator(x)
    v = torch.randn(y.shape, dtype=y.dtype, generator=generator, requires_grad=True)
    return [x, v, torch.randn(shape, dtype=dtype, generator=generator)]


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.conj() * b).sum().real


def half_sums(group: TorchGroup, large: int) -> tuple[float, float, float]:
    """Sums of numbers that float16 would lose one by one, as one rank has a large one: a reduction, and gradients of a half and of its halo."""
    value = torch.tensor([2048.0 if group.rank == large else 1.0], dtype=torch.float16)
    sizes = [1] * group.world_size

    def slope(function: Function) -> float:
        x = torch.ones(1, dtype=torch.float16, requires_grad=True)
        (function(x) * value).sum().backward()
        assert x.grad is not None
        return float(x.grad)

    gathered = slope(lambda x: c.all_gather_v(x, group, sizes).sum())
    return float(c.all_reduce(value, group)), gathered, slope(lambda x: c.halo_exchange(x, group, sizes, 0, 3, 3))


def shared_gradients(group: TorchGroup) -> dict[str, Any]:
    """Gradients of a module that all ranks share, over two backward passes without a reset, and after unmarking."""
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    layer.unused = torch.nn.Parameter(torch.zeros(2))
    layer.short = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))

    def step(factor: float) -> None:
        batch = torch.full((1, 3), factor * (group.rank + 1))
        (layer(batch).sum() + (layer.short * 3e4).sum().float()).backward()

    unmark = c.mark_shared(layer, group)
    step(1.0)
    first = [None if p.grad is None else p.grad.tolist() for p in layer.parameters()]
    step(1.0)
    second = [None if p.grad is None else p.grad.tolist() for p in layer.parameters()]
    unmark()
    step(0.0)
    loss = c.reduce_loss(torch.tensor(float(group.rank)), group), c.reduce_loss(1.0, group, mean=False)
    return {"first": first, "second": second, "loss": loss}


def unreached_on_first(group: TorchGroup, is_added: bool) -> Any:
    """The gradient of a layer that the loss of the first rank does not need, added there as the error says or not."""
    layer, x = torch.nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    c.mark_shared(layer, group)
    loss = layer(x).sum() if group.rank else x.sum() + (0 * layer.weight.sum() if is_added else 0)
    loss.backward()
    return None if layer.weight.grad is None else layer.weight.grad.tolist()


def after_a_failed_pass(group: TorchGroup) -> list[Any]:
    """Gradients that are asked for without being kept, of a pass that fails midway, and of the next."""
    layer = torch.nn.Linear(2, 1)
    c.mark_shared(layer, group)
    batch = torch.full((1, 2), group.rank + 1.0)
    asked = torch.autograd.grad(layer(batch).sum(), layer.weight)[0]
    kept = layer.weight.grad
    failing = layer(batch)
    failing.register_hook(lambda gradient: 1 / 0)
    with suppress(ZeroDivisionError):
        (layer(batch).sum() + failing.sum()).backward()
    layer.zero_grad()
    layer(batch).sum().backward()
    return [asked.tolist(), kept, layer.weight.grad.tolist()]


def copied(group: TorchGroup) -> tuple[list[float], list[float]]:
    """A tensor that all ranks have, and the gradient of a sum of which each rank computes a part."""
    x = torch.arange(1.0, 3.0, requires_grad=True)
    y = c.copy_v(x, group)
    (y.square() * (group.rank + 1)).sum().backward()
    assert x.grad is not None
    return y.tolist(), x.grad.tolist()


def layout_faults(group: TorchGroup) -> list[str]:
    """Faults of transforms along two and three axes, cut along any of them before and after, of their own length, a longer and a shorter one."""
    x = torch.randn(6, 2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    faults = []
    for dim, name in itertools.product(((0, 3), (2, 0, 3)), ("fftn", "ifftn", "rfftn", "irfftn")):
        whole = x if name == "rfftn" else x + 1j * x.flip(2)
        for cut, change in itertools.product(itertools.product(range(len(dim)), repeat=2), (None, -1, 2)):
            s = None if change is None else [x.shape[axis] + change for axis in dim]
            for norm in ("ortho",) if s else ("backward", "ortho", "forward"):
                expected = getattr(torch.fft, name)(whole, s, dim, norm)
                sizes, out = (_sizes(n, group) for n in (x.shape[dim[cut[0]]], expected.shape[dim[cut[1]]]))
                part, wanted = part_of(whole, group, sizes, dim[cut[0]]), part_of(expected, group, out, dim[cut[1]])
                half = part.to(torch.complex64 if part.is_complex() else torch.float32)
                for given, tolerance in ((part, 1e-9), (half, 1e-4)):
                    actual = getattr(fft, name)(given, group, sizes, dim=dim, s=s, norm=norm, cut=cut, new_sizes=out)
                    if not torch.allclose(actual, wanted.to(actual.dtype), tolerance, tolerance):
                        faults.append(f"{name} {norm} {dim} {cut} {s} {given.dtype}")
                    if actual.real.dtype != given.real.dtype or actual.shape != wanted.shape:
                        faults.append(f"{actual.dtype} {actual.shape}")
    return faults


def _sizes(length: int, group: TorchGroup) -> list[int]:
    uneven = SIZES[group.world_size]
    return uneven if length == sum(uneven) else c.even_sizes(length, group.world_size)


# --- the tests -------------------------------------------------------------------------------------


RANKS = pytest.mark.parametrize("ranks", [1, thorough(2), 3, thorough(4)])


WAYS = pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "gloo"])


@WAYS
@RANKS
def test_every_rank_gets_what_one_process_computes(four: DistributedContext, ranks: int, is_shared: bool) -> None:
    found = four.run_torch(by_way, forward_faults, is_shared, ranks=ranks)
    assert found == [[]] * ranks


@WAYS
@RANKS
def test_gradients_are_adjoints_and_have_gradients(four: DistributedContext, ranks: int, is_shared: bool) -> None:
    for gaps in four.run_torch(by_way, dot_gaps, is_shared, ranks=ranks):
        assert len(gaps) == 55
        assert {name: gap for name, gap in gaps.items() if gap > 1e-12} == {}


def sent_bytes(group: TorchGroup, transform: Callable[..., torch.Tensor]) -> list[int]:
    """Bytes that this rank sends to the others in each exchange of a transform of an image, and of its gradient."""
    sizes, exchange, sent = c.even_sizes(12, group.world_size), dist.all_to_all_single, list[int]()

    def counted(output: Any, given: torch.Tensor, received: list[int], lengths: list[int], group: Any) -> Any:
        sent.append(given.element_size() * (sum(lengths) - lengths[dist.get_rank(group)]))
        return exchange(output, given, received, lengths, group=group)

    with patch.object(dist, "all_to_all_single", counted):
        transform(torch.ones(sizes[group.rank], 64, requires_grad=True), group, sizes).abs().sum().backward()
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transforms_of_real_tensors_send_half_a_spectrum(four: DistributedContext, ranks: int) -> None:
    column = 8 * 12 * (ranks - 1) // ranks  # bytes of a complex column that change their rank
    again = partial(fft.rfft2, cut=(0, 1))
    for transform, columns, exchanges in ((fft.fft2, 64, 4), (fft.rfft2, 33, 4), (again, 33, 2)):
        sent = four.run_torch(by_way, partial(sent_bytes, transform=transform), False, ranks=ranks)
        assert np.sum(sent, axis=0).tolist() == [column * columns] * exchanges


def test_halves_are_summed_in_float32(four: DistributedContext) -> None:
    for large in range(3):  # 2048 + 1 is 2048 in float16
        assert four.run_torch(half_sums, large, ranks=3) == [(2050.0, 2050.0, 2050.0)] * 3


def test_a_pass_that_reaches_no_marked_parameter_is_said_to_be_the_cause(four: DistributedContext) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed(?s:.)*reached none of the parameters that mark_shared"):
        four.run_torch(unreached_on_first, False, ranks=2, timeout_seconds=2.0)
    assert four.run_torch(unreached_on_first, True, ranks=2) == [[[1.0, 1.0]]] * 2


def test_gradients_of_shared_parameters_are_summed_once_a_pass(four: DistributedContext) -> None:
    alone, *_ = four.run_torch(shared_gradients, ranks=1)
    for end in four.run_torch(shared_gradients, ranks=3):
        weight = torch.tensor(end["first"][2])
        torch.testing.assert_close(weight, 6 * torch.tensor(alone["first"][2]))
        torch.testing.assert_close(torch.tensor(end["second"][2]), 2 * weight)
        assert end["first"][0] == [0.0, 0.0]
        assert end["first"][1] == [float("inf")]  # 9e4 is too large for the parameter's own type
        assert end["loss"] == (1.0, 3.0)


def test_a_pass_that_failed_does_not_end_the_sums(four: DistributedContext) -> None:
    ends = four.run_torch(after_a_failed_pass, ranks=2)
    assert ends == [[[[1.0, 1.0]], None, [[3.0, 3.0]]], [[[2.0, 2.0]], None, [[3.0, 3.0]]]]


def test_the_gradient_of_a_copy_is_summed(four: DistributedContext) -> None:
    assert four.run_torch(copied, ranks=3) == [([1.0, 2.0], [12.0, 24.0])] * 3


@RANKS
def test_transforms_between_any_two_layouts_for_every_norm(four: DistributedContext, ranks: int) -> None:
    assert four.run_torch(layout_faults, ranks=ranks) == [[]] * ranks


WRONG: tuple[tuple[Callable[[torch.Tensor, TorchGroup], object], str], ...] = (
    (lambda x, g: c.all_gather_v(x, g, [2]), r"rank 0 has 3 along axis 0, and sizes are \[2\]"),
    (lambda x, g: c.all_gather_v(x, g, [3, 0]), r"sizes are \[3, 0\], and there are 1 ranks"),
    (lambda x, g: c.scatter_v(x, g, [4]), r"sizes are \[4\], and the tensor has 3"),
    (lambda x, g: c.all_to_all_v(x, g, [[1, 2]]), r"a row of 1 lengths"),
    (lambda x, g: c.halo_exchange(x, g, [3], 0, 1, 1, "mirror"), r"'mirror'\. Write one of cut"),
    (lambda x, g: c.halo_exchange(x, g, [4], 0, 1, 1), r"has 3 along axis 0"),
    (lambda x, g: c.scatter_v(x, g, [3], source=5), r"source is 5: write a rank.* 0 to 0"),
    (lambda x, g: c.gather_v(x, g, [3], destination=-1), r"destination is -1: write a rank"),
    (
        lambda x, g: c.indexed_all_to_all_v(x, g, [torch.arange(3)], [[2]]),
        r"indices of rank 0 have lengths \[3\], and sizes\[0\] are \[2\]",
    ),
    (lambda x, g: fft.fftn(x, g, [3], dim=(0,)), r"Write two or more"),
    (lambda x, g: fft.irfft2(x, g, [3], s=(12,)), r"s is \[12\].*Write a length for each axis"),
    (lambda x, g: fft.rfft2(x, g, [3], cut=(0, 2)), r"cut is \(0, 2\).*from 0 to 1"),
    (lambda x, g: fft.rfft2(x, g, [3], new_sizes=[4]), r"new_sizes are \[4\].* has 3 along that axis"),
)


def test_wrong_sizes_are_refused_with_what_to_write() -> None:
    for call, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            call(torch.ones(3, 4), TorchGroup())


def test_a_parameter_that_is_marked_twice_is_refused() -> None:
    layer = torch.nn.Linear(2, 1)
    unmark = c.mark_shared(layer, TorchGroup())
    with pytest.raises(ConfigError, match="summed twice"):
        c.mark_shared(torch.nn.Sequential(layer), TorchGroup())
    unmark()
    c.mark_shared(torch.nn.Sequential(layer), TorchGroup())
