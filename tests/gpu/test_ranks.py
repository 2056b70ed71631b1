"""A rank that nccl connects with itself: sums, exchanges and transforms on a GPU, and their gradients, are those of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halotile.tasks.groups.group import TorchGroup
from tests.benchmarks.gpu_ranks import COLLECTIVES, connected, ranks
from tests.graphs import collecting

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect nccl on loopback."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def test_collectives_compute_on_a_gpu_what_they_compute_on_a_cpu(gpu: str, tmp_path: Path) -> None:
    gaps = ranks(tmp_path, 4096 if gpu == "cuda" else 256, gpu)  # cuFFT differs by the length
    assert sorted(gaps) == sorted(COLLECTIVES)
    assert {name: gap for name, gap in gaps.items() if gap > 1e-5} == {}


def test_every_collective_and_its_gradient_has_the_numbers_of_a_cpu(gpu: str, tmp_path: Path) -> None:
    expected = with_gradients(TorchGroup())
    with connected(tmp_path, gpu) as group:
        actual = with_gradients(group)
    assert len(actual) == 55
    for name, tensors in expected.items():
        torch.testing.assert_close(actual[name], tensors, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def with_gradients(group: TorchGroup) -> dict[str, list[torch.Tensor]]:
    """What each gives on the device of a group, and its gradient, brought to the CPU, where all numbers are drawn."""
    found = {}
    for name, (operator, shape, dtype) in collecting.operators(group).items():
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(shape, dtype=dtype, generator=generator).to(group.device).requires_grad_()
        y = operator(x)
        v = torch.randn(y.shape, dtype=y.dtype, generator=generator).to(group.device)
        (gradient,) = torch.autograd.grad(y, x, v)
        assert y.device.type == gradient.device.type == torch.device(group.device).type
        found[name] = [y.detach().cpu(), gradient.cpu()]
    return found
