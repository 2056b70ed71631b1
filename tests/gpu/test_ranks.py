"""A rank that nccl connects with itself: sums and transforms on a GPU are those of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.gpu_ranks import COLLECTIVES, ranks

pytestmark = pytest.mark.gpu


def test_collectives_compute_on_a_gpu_what_they_compute_on_a_cpu(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    gaps = ranks(tmp_path, 4096 if gpu == "cuda" else 256, gpu)  # cuFFT differs by the length
    assert sorted(gaps) == sorted(COLLECTIVES)
    assert {name: gap for name, gap in gaps.items() if gap > 1e-5} == {}
