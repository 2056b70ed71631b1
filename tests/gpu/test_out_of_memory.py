"""A GPU that is full: the batch is halved, stays so, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from halotile.storage.grid import Region
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.inner_tiles import TileRunner, Tiling

pytestmark = pytest.mark.gpu

WHOLE = Region.whole((512, 512))
CHANNELS = 512
FORM = Tiling(
    tile=(128, 128),
    depth=((0, 0), (0, 0)),
    align=(1, 1),
    least=(1, 1),
    image=WHOLE.shape,
    scale=1,
    batch=16,
    range=None,
    work_dtype="float32",
)
PIXELS = np.random.default_rng(0).random((1, *WHOLE.shape), dtype=np.float32)


def test_the_batch_is_halved_when_the_model_runs_out_of_memory(gpu_device: Gpu) -> None:
    batches: list[int] = []

    def hungry(batch: torch.Tensor) -> torch.Tensor:
        batches.append(len(batch))
        if len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    runner = TileRunner(hungry, gpu_device, FORM, "hungry")
    np.testing.assert_array_equal(runner(PIXELS, WHOLE, WHOLE, 1, {}), PIXELS)
    assert batches[:3] == [16, 8, 4]
    assert runner.batch == 4
    runner(PIXELS, WHOLE, WHOLE, 1, {})
    assert max(batches[3:]) == 4


@pytest.fixture
def little_memory(gpu: str) -> Iterator[None]:
    """Limit the GPU memory to what torch has taken already and a quarter of a whole batch."""
    if gpu == "cpu":
        pytest.skip("a rehearsal on the CPU: its memory cannot be limited")
    torch.cuda.empty_cache()
    room = FORM.batch * 128 * 128 * 4 * CHANNELS // 4 + 64 * 2**20
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("little_memory")
def test_the_batch_is_halved_when_the_gpu_is_out_of_memory(gpu_device: Gpu) -> None:
    def wide(batch: torch.Tensor) -> torch.Tensor:
        return batch.repeat(1, CHANNELS, 1, 1)[:, :1]

    runner = TileRunner(wide, gpu_device, FORM, "wide")
    np.testing.assert_array_equal(runner(PIXELS, WHOLE, WHOLE, 1, {}), PIXELS)
    assert 1 <= runner.batch <= FORM.batch // 4
