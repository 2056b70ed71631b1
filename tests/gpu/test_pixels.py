"""Pixels on a real GPU: copies there and back, blocks computed on it, and a batch that is halved where it is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from halotile.errors import BlockFailed
from halotile.storage.grid import Region
from halotile.tasks.devices.device import Device
from halotile.tasks.devices.gpu import Gpu
from halotile.tasks.inner_tiles import TileRunner, Tiling
from tests.faults import run_python
from tests.support import DTYPES
from tests.tasks import test_inner_tiles as tiles

pytestmark = pytest.mark.gpu


WHOLE = Region.whole((300, 260))


def image(dtype: str) -> np.ndarray[Any, Any]:
    """Noise, large enough for the buffers of large arrays."""
    return (np.random.default_rng(0).random((2, 1, *WHOLE.shape)) * 100).astype(dtype)


def tiling(batch: int = 4, values: tuple[float, float] | None = (0.0, 100.0)) -> Tiling:
    return tiles.tiling(tile=(64, 64), image=WHOLE.shape, batch=batch, range=values)


BLUR = torch.nn.AvgPool2d(7, 1, 3)
"""Mean over 7 x 7, zero outside the window: looks 3 pixels far."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_of_every_type_get_there_and_back(gpu_device: Gpu, dtype: str) -> None:
    pixels = image(dtype)
    given = [pixels, pixels[..., ::-1], np.asfortranarray(pixels), pixels[..., :1]]
    for _ in range(3):  # pinned memory is used again
        back = [gpu_device.fetch(gpu_device.take(gpu_device.stage(each))) for each in given[:2]]
        for got, want in zip(back, given, strict=False):
            np.testing.assert_array_equal(got.pixels(), want)
        for each in given[2:]:
            np.testing.assert_array_equal(gpu_device.fetch(gpu_device.take(gpu_device.stage(each))).pixels(), each)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_comes_out_as_on_the_cpu(any_gpu: Gpu, dtype: str) -> None:
    pixels, core = image(dtype), Region((20, 30), (290, 200))
    want, got = (
        TileRunner(device.place(BLUR), device, tiling(), "blur")(pixels, WHOLE, core, 1, {})
        for device in (Device(), any_gpu)
    )
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_recorded_has_the_same_bits(gpu_device: Gpu) -> None:
    recording = gpu_device.with_recording()
    requested, recorded = (
        TileRunner(BLUR, device, tiling(), "blur")(image("uint16"), WHOLE, WHOLE, 1, {})
        for device in (gpu_device, recording)
    )
    np.testing.assert_array_equal(recorded, requested)
    assert recording.records, "it could be recorded"


@pytest.mark.thorough
def test_a_model_that_asks_for_a_value_in_between_is_not_recorded(gpu: str) -> None:
    """In a process of its own: a recording that breaks may leave one that cannot allocate."""
    program = (
        "import sys, numpy as np\n"
        "from halotile.tasks.devices.gpu import Gpu\n"
        "from halotile.tasks.inner_tiles import TileRunner\n"
        "from tests.gpu.test_pixels import WHOLE, image, tiling\n"
        "gpu = Gpu(sys.argv[1]).with_recording()\n"
        "looking = lambda batch: batch * (2.0 if float(batch.max()) > 0 else 1.0)\n"
        "for _ in range(2):\n"
        "    got = TileRunner(looking, gpu, tiling(values=None), 'looking')(image('float32'), WHOLE, WHOLE, 1, {})\n"
        "    np.testing.assert_allclose(got, 2 * image('float32'), rtol=1e-6)\n"
        "assert gpu.records == (gpu.kind == 'cpu')\n"
    )
    device = "cuda:0" if gpu == "cuda" else "cpu"
    done = run_python("-c", program, device)
    assert done.returncode == 0, done.stderr


def test_blocks_that_are_on_their_way_at_once_do_not_mix(any_gpu: Gpu) -> None:
    """The next one is sent while one is computed and the one before comes back."""
    gpu_device = any_gpu
    runner = TileRunner(gpu_device.place(BLUR), gpu_device, tiling(values=None), "blur")
    plain = TileRunner(BLUR, Device(), tiling(values=None), "blur")
    images = [image("float32") + 1000 * number for number in range(6)]
    staged, before = runner.stage(images[0], {}), None
    for number, pixels in enumerate(images):
        computed = runner.launch(staged, WHOLE, WHOLE, 1)
        if number + 1 < len(images):
            staged = runner.stage(images[number + 1], {})
        if before is not None:
            np.testing.assert_allclose(before[0].collect(), before[1], rtol=1e-5)
            assert before[0].seconds > 0
        before = computed, plain(pixels, WHOLE, WHOLE, 1, {})
    assert before is not None
    np.testing.assert_allclose(before[0].collect(), before[1], rtol=1e-5)


def test_nan_on_finite_pixels_is_found_on_the_gpu(gpu_device: Gpu) -> None:
    runner = TileRunner(lambda batch: batch / 0, gpu_device, tiling(), "wrong")
    with pytest.raises(BlockFailed, match="NaN or infinity for finite pixels"):
        runner(image("float32"), WHOLE, WHOLE, 1, {})
    pixels = image("float32")
    pixels[0, 0, 5, 5] = np.nan
    kept = TileRunner(lambda batch: batch, gpu_device, tiling(), "same")(pixels, WHOLE, WHOLE, 1, {})
    assert np.isnan(kept).sum() == 1


LARGE = Region.whole((512, 512))


CHANNELS = 512


FORM = tiles.tiling(tile=(128, 128), depth=((0, 0), (0, 0)), image=LARGE.shape, batch=16)


PIXELS = np.random.default_rng(0).random((1, *LARGE.shape), dtype=np.float32)


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
    np.testing.assert_array_equal(runner(PIXELS, LARGE, LARGE, 1, {}), PIXELS)
    assert 1 <= runner.batch <= FORM.batch // 4
