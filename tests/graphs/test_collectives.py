"""Collectives and Fourier transforms over ranks: the numbers of one process, and their adjoints as gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from halotile import DistributedContext
from halotile.errors import ConfigError, RankFailed
from halotile.tasks.groups import collectives
from halotile.tasks.groups.cut_tensors import fft
from halotile.tasks.groups.cut_tensors.fft import with_real_ends
from halotile.tasks.groups.group import TorchGroup
from tests.cases import thorough
from tests.graphs import collecting

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

RANKS = pytest.mark.parametrize("ranks", [1, thorough(2), 3, thorough(4)])


WAYS = pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "gloo"])


@WAYS
@RANKS
def test_every_rank_gets_what_one_process_computes(four: DistributedContext, ranks: int, is_shared: bool) -> None:
    found = four.run_torch(collecting.by_way, collecting.forward_faults, is_shared, ranks=ranks)
    assert found == [[]] * ranks


@WAYS
@RANKS
def test_gradients_are_adjoints_and_have_gradients(four: DistributedContext, ranks: int, is_shared: bool) -> None:
    for gaps in four.run_torch(collecting.by_way, collecting.dot_gaps, is_shared, ranks=ranks):
        assert len(gaps) == 55
        assert {name: gap for name, gap in gaps.items() if gap > 1e-12} == {}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transforms_of_real_tensors_send_half_a_spectrum(four: DistributedContext, ranks: int) -> None:
    rows, columns = 12, 64
    program = partial(collecting.sent_bytes, rows=rows, columns=columns)
    sent = four.run_torch(collecting.by_way, program, False, ranks=ranks)
    total = {name: np.sum([each[name] for each in sent], axis=0).tolist() for name in sent[0]}
    column = 8 * rows * (ranks - 1) // ranks  # bytes of a complex column that change their rank
    half = column * (columns // 2 + 1)
    assert total == {
        "fft2": [2 * column * columns] * 2,
        "rfft2": [2 * half] * 2,
        "rfft2, cut anew": [half] * 2,
        "irfft2": [2 * half] * 2,
    }


def test_halves_are_summed_in_float32(four: DistributedContext) -> None:
    for large in range(3):  # 2048 + 1 is 2048 in float16
        assert four.run_torch(collecting.half_sums, large, ranks=3) == [(2050.0, 2050.0, 2050.0)] * 3


def test_a_pass_that_reaches_no_marked_parameter_is_said_to_be_the_cause(four: DistributedContext) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed(?s:.)*reached none of the parameters that mark_shared"):
        four.run_torch(collecting.unreached_on_first, False, ranks=2, timeout_seconds=2.0)
    assert four.run_torch(collecting.unreached_on_first, True, ranks=2) == [[[1.0, 1.0]]] * 2


def test_gradients_of_shared_parameters_are_summed_once_a_pass(four: DistributedContext) -> None:
    alone, *_ = four.run_torch(collecting.shared_gradients, ranks=1)
    for end in four.run_torch(collecting.shared_gradients, ranks=3):
        weight = torch.tensor(end["first"][2])
        torch.testing.assert_close(weight, 6 * torch.tensor(alone["first"][2]))
        torch.testing.assert_close(torch.tensor(end["second"][2]), 2 * weight)
        assert end["first"][0] == [0.0, 0.0]
        assert end["first"][1] == [float("inf")]  # 9e4 is too large for the parameter's own type
        assert end["loss"] == (1.0, 3.0)


def test_a_pass_that_failed_does_not_end_the_sums(four: DistributedContext) -> None:
    ends = four.run_torch(collecting.after_a_failed_pass, ranks=2)
    assert ends == [[[[1.0, 1.0]], None, [[3.0, 3.0]]], [[[2.0, 2.0]], None, [[3.0, 3.0]]]]


def test_the_gradient_of_a_copy_is_summed(four: DistributedContext) -> None:
    assert four.run_torch(collecting.copied, ranks=3) == [([1.0, 2.0], [12.0, 24.0])] * 3


@RANKS
def test_transforms_between_any_two_layouts_for_every_norm(four: DistributedContext, ranks: int) -> None:
    assert four.run_torch(collecting.layout_faults, ranks=ranks) == [[]] * ranks


WRONG: tuple[tuple[Callable[[torch.Tensor, TorchGroup], object], str], ...] = (
    (lambda x, g: collectives.all_gather_v(x, g, [2]), r"rank 0 has 3 along axis 0, and sizes are \[2\]"),
    (lambda x, g: collectives.all_gather_v(x, g, [3, 0]), r"sizes are \[3, 0\], and there are 1 ranks"),
    (lambda x, g: collectives.scatter_v(x, g, [4]), r"sizes are \[4\], and the tensor has 3"),
    (lambda x, g: collectives.all_to_all_v(x, g, [[1, 2]]), r"a row of 1 lengths"),
    (lambda x, g: collectives.halo_exchange(x, g, [3], 0, 1, 1, "mirror"), r"'mirror'\. Write one of cut"),
    (lambda x, g: collectives.halo_exchange(x, g, [4], 0, 1, 1), r"has 3 along axis 0"),
    (lambda x, g: collectives.scatter_v(x, g, [3], source=5), r"source is 5: write a rank.* 0 to 0"),
    (lambda x, g: collectives.gather_v(x, g, [3], destination=-1), r"destination is -1: write a rank"),
    (
        lambda x, g: collectives.indexed_all_to_all_v(x, g, [torch.arange(3)], [[2]]),
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
    unmark = collectives.mark_shared(layer, TorchGroup())
    with pytest.raises(ConfigError, match="summed twice"):
        collectives.mark_shared(torch.nn.Sequential(layer), TorchGroup())
    unmark()
    collectives.mark_shared(torch.nn.Sequential(layer), TorchGroup())


@pytest.mark.parametrize("length", [1, thorough(2), 5, thorough(8)])
def test_a_half_spectrum_with_real_ends_is_that_of_the_same_signal(length: int) -> None:
    x = torch.randn(3, length // 2 + 1, 2, dtype=torch.complex128, requires_grad=True)

    def signal(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(with_real_ends(x, length, 1), length, 1)

    ends = with_real_ends(x, length, 1).detach().imag
    assert not ends[:, 0].any()
    assert length % 2 or not ends[:, -1].any()
    torch.testing.assert_close(signal(x), torch.fft.irfft(x, length, 1), rtol=0, atol=0)
    assert torch.autograd.gradcheck(signal, (x,))
    assert torch.autograd.gradgradcheck(lambda x: signal(x).square(), (x,))
