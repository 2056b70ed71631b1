"""The code for a GPU, run on the CPU: the same bits, through buffers that are reused; models that stay in a worker."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch

from halotile.graphs.plans.plan import make_plan
from halotile.storage.grid import Region
from halotile.storage.sharded.output import create_output
from halotile.tasks import image_task
from halotile.tasks.block import BlockRunner, Receipt
from halotile.tasks.denoise_block import DenoiseStages
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.devices.device import LOST, Device, Download
from halotile.tasks.devices.gpu import BufferRing, CudaStreams, Gpu
from halotile.tasks.image_task import Denoised, ImageTask, View
from halotile.tasks.inner_tiles import QueuedCore, TileRunner, Tiling
from tests.cases import thorough
from tests.graphs.solving import denoised_by, scene
from tests.support import DTYPES, dncnn_weights, job_of, noisy_image, read_zarr, work_of, write_zarr
from tests.tasks.test_inner_tiles import blur, tiling


class Overwritten(BufferRing):
    """Buffers whose content is overwritten as soon as they are returned."""

    def give(self, memory: Any, mark: Any = None) -> None:
        """Overwrite the buffer, then return it."""
        memory.fill_(255)
        super().give(memory, mark)


def gpu_device(made: Any = None, **options: Any) -> Any:
    """A GPU with such buffers."""
    made = made or Gpu("cpu", **options)
    rings = [Overwritten(made.streams.pinned) for _ in range(3)]
    made._upload_buffers, made._download_buffers, made._small_buffers = rings
    return made


WHOLE = Region.whole((100, 120))


def on_cpu(pixels: Any, core: Region = WHOLE, form: Tiling | None = None) -> Any:
    """The blurred pixels, without a GPU."""
    return TileRunner(blur, Device(), form or tiling(), "blur")(pixels, WHOLE, core, 1, {})


def image(dtype: str, shape: tuple[int, ...] = (2, 1, 100, 120)) -> np.ndarray[Any, Any]:
    """Noise."""
    return (np.random.default_rng(0).random(shape) * 100).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_of_every_type_get_there_and_back_and_a_block_has_the_same_bits(dtype: str) -> None:
    device, pixels, core = gpu_device(), image(dtype), Region((20, 30), (90, 80))
    for given in (pixels, pixels[..., ::-1], np.asfortranarray(pixels)):
        np.testing.assert_array_equal(device.fetch(device.take(device.stage(given))).pixels(), given)
    for batch, records in itertools.product((1, 5, 64), (False, True)):
        form = tiling(batch=batch, range=(0.0, 100.0))
        there = TileRunner(blur, gpu_device(records=records), form, "blur")(pixels, WHOLE, core, 1, {})
        np.testing.assert_array_equal(there, on_cpu(pixels, core, form))


def test_what_cannot_be_recorded_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pixels = gpu_device(records=True), image("float32")
    refuse = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(device.streams, "record", refuse)
    got = TileRunner(blur, device, tiling(), "blur")(pixels, WHOLE, WHOLE, 1, {})
    np.testing.assert_array_equal(got, on_cpu(pixels))
    assert not device.records


def test_each_margin_has_a_recording_of_its_own(tmp_path: Path) -> None:
    """A stack of convolutions computes less where a margin is not wanted, and each batch finds what was recorded for it."""
    denoiser = DnCNN(weights=str(dncnn_weights(tmp_path / "w.safetensors", 3, 8)), depth=3, width=8)
    device, pixels = gpu_device(records=True), image("float32", (1, 1, 100, 120))
    plain, runner = (TileRunner(denoiser.build(), on, tiling(batch=2), "dncnn") for on in (Device(), device))
    expected = plain(pixels, WHOLE, WHOLE, 1, {})
    for _ in range(2):
        np.testing.assert_array_equal(runner(pixels, WHOLE, WHOLE, 1, {}), expected)
    assert len(device._recorded) > 1


def test_blocks_that_are_on_their_way_at_once_do_not_mix() -> None:
    """As with the io threads of a worker: one block is read while another is computed and a third one written."""
    runner, images = TileRunner(blur, gpu_device(), tiling(), "blur"), [image("float32") + n for n in range(6)]
    staged, written = runner.stage(images[0], {}), list[Future[Any]]()
    with ThreadPoolExecutor(1) as writer:
        for following in (*images[1:], None):
            read = None if following is None else runner.stage(following, {})
            computed = runner.launch(staged, WHOLE, WHOLE, 1)
            wait(written)
            written.append(writer.submit(computed.collect))
            staged = read or staged
    for pixels, block in zip(images, written, strict=True):
        np.testing.assert_array_equal(block.result(), on_cpu(pixels))


class Full(Gpu):
    """A GPU whose memory runs out in one place, a given number of times."""

    def __init__(self, place: str, times: int) -> None:
        super().__init__("cpu")
        gpu_device(self)
        self.where, self.times = place, times

    def _perhaps(self, place: str) -> None:
        if place == self.where and self.times:
            self.times -= 1
            raise RuntimeError("CUDA error: out of memory")

    def stage(self, pixels: np.ndarray[Any, Any]) -> Any:
        self._perhaps("upload")
        return super().stage(pixels)

    def fetch(self, tensor: torch.Tensor) -> Download:
        self._perhaps("download" if tensor.ndim > 1 else "sums")
        return super().fetch(tensor)

    def run(self, model: Any, batch: torch.Tensor, sides: Any) -> torch.Tensor:
        self._perhaps("model")
        return super().run(model, batch, sides)


def test_wherever_memory_runs_out_the_batch_is_halved_and_nothing_is_lost() -> None:
    pixels = image("float32")
    want = on_cpu(pixels)

    def runner_of(place: str, times: int, batch: int = 16) -> TileRunner:
        return TileRunner(blur, Full(place, times), tiling(batch=batch), "blur")

    for place in ("model", "download", "sums"):
        runner = runner_of(place, 3)
        for _ in range(2):
            np.testing.assert_array_equal(runner(pixels, WHOLE, WHOLE, 1, {}), want)
            assert runner.batch == 2
    waiting, asked = runner_of("upload", 2), runner_of("upload", 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            waiting.stage(pixels, {})  # a block that has no room is tried again with a smaller batch
        with pytest.raises(RuntimeError, match="out of memory"):
            asked(pixels, WHOLE, WHOLE, 1, {})  # a region that is waited for makes room before it goes over
    np.testing.assert_array_equal(waiting(pixels, WHOLE, WHOLE, 1, {}), want)
    asked(pixels, WHOLE, WHOLE, 1, {})
    assert (waiting.batch, asked.batch) == (8, 4)
    # Memory comes back whatever fails; else the computing thread would wait for a buffer for ever.
    for place in ("download", "sums"):
        runner = runner_of(place, 5, 1)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="out of memory"):
                runner(pixels, WHOLE, WHOLE, 1, {})
        assert runner(pixels, WHOLE, WHOLE, 1, {}).shape == pixels.shape
    runner = TileRunner(lambda batch: batch[..., 1:], device := gpu_device(), tiling(), "wrong")
    for _ in range(5):
        with pytest.raises(RuntimeError):
            runner(pixels, WHOLE, WHOLE, 1, {})
    np.testing.assert_array_equal(device.fetch(device.take(device.stage(pixels))).pixels(), pixels)


def test_a_process_whose_gpu_is_lost_ends() -> None:
    """Every further call and block would fail."""
    program = (
        "from halotile.tasks.devices.gpu import Gpu\n"
        "from halotile.tasks.devices.device import unless_lost\n"
        "gpu = Gpu('cpu')\n"
        "def lost(): raise RuntimeError('an illegal memory access was encountered')\n"
        "try:\n"
        "    with unless_lost(gpu): raise ValueError('the model')\n"
        "except ValueError: print('goes on')\n"
        "gpu.streams.check_device = lost\n"
        "with unless_lost(gpu): lost()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (LOST, "goes on\n")


def test_the_precision_is_set_where_it_is_computed() -> None:
    """Two GPUs in one process each keep their own precision."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    rows = [("float32", False, False), ("tf32", True, True), ("float16", False, True), ("bfloat16", False, True)]
    for precision, tf32, by_stopwatch in rows:
        before = cuda.allow_tf32, cudnn.benchmark, cudnn.deterministic
        with gpu_device(precision="float32" if tf32 else "tf32").computing():
            pass
        with gpu_device(precision=precision).computing():
            settings = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, not cudnn.deterministic
        assert settings == (tf32, tf32, by_stopwatch, by_stopwatch)
        with gpu_device().computing():  # as for the others
            pass
        cuda.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def test_memory_that_cannot_be_locked_is_no_full_gpu() -> None:
    """The batch would be halved for good."""

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(*shape, **options)

    streams = CudaStreams.__new__(CudaStreams)
    streams.torch = SimpleNamespace(empty=empty, uint8=torch.uint8, inference_mode=torch.inference_mode)
    assert len(streams.pinned(100)) == 100


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_worker_writes_the_same_image_with_a_gpu(dtype: str, tmp_path: Path) -> None:
    """All three threads: read and upload, compute, download and write; where blocks have holes, at an edge and elsewhere."""
    pixels = image(dtype, (700, 610))
    if dtype == "float32":
        pixels[120:140, :50] = np.nan
    source = write_zarr(tmp_path / "in.zarr", pixels)
    written = []
    for name, device in (("cpu", Device()), ("gpu", gpu_device())):
        plan = make_plan(job_of(source, tmp_path / f"{name}.zarr", "tv", {"strength": 0.2}, tile={"block": 128}))
        create_output(plan.output, plan.layout)
        task = work_of(plan).task
        stages = partial(DenoiseStages, task, device)
        staged: Any = SimpleNamespace(grid=task.grid, batch=task.batch, overlap=True, io_threads=1, stages=stages)
        receipt = BlockRunner(staged).run(range(len(plan.grid)))
        assert (sorted(receipt.done), receipt.bad) == (list(range(len(plan.grid))), [])
        assert receipt.compute_seconds > 0
        written.append(read_zarr(plan.output))
    np.testing.assert_array_equal(written[0], written[1])


class Elsewhere(Gpu):
    """A device with shapes and dtypes but no values: tensors that are not copied there, and requests for values, fail."""

    def __init__(self) -> None:
        super().__init__("meta")

    def fetch(self, tensor: torch.Tensor) -> Download:
        """Return without a copy."""
        return Download(tensor)


STAY = [
    ("gaussian", {"sigma": 2}, ()), ("median", {"size": 5}, ()), thorough("tv", {"strength": 0.1}, ()),
    thorough("tv", {"strength": 1.0}, ("sigma",)), thorough("nlm", {"strength": 0.5, "sigma": 0.1}, ()),
    ("nlm", {"strength": 0.5}, ("sigma", "mask")), ("tv", {"strength": 1.0, "sigma": "auto"}, ("photons",)),
    thorough("nlm", {"strength": 0.8, "sigma": "auto"}, ("photons", "mask")), thorough("dncnn", {"depth": 5, "width": 8}, ()),
    ("torch", {"import": "tests.networks:unet"}, ()), ("torch", {"import": "tests.networks:by_sigma", "sigma": "auto"}, ("photons",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "sides"), STAY)
def test_every_denoiser_stays_on_its_device(name: str, options: Any, sides: tuple[str, ...], tmp_path: Path) -> None:
    """No pixel or number is copied back in between: the GPU would be idle meanwhile."""
    source = write_zarr(tmp_path / "in.zarr", image("uint16", (300, 260)))
    if name == "dncnn":
        options = options | {"weights": str(dncnn_weights(tmp_path / "w.safetensors", 5, 8))}
    level, images = np.full((300, 260), 0.1, "float32"), {*sides} - {"photons"}
    paths = {side: str(write_zarr(tmp_path / f"{side}.zarr", level)) for side in images}
    noise: dict[str, Any] = {"model": "poisson-gaussian", "gain": 9.0} if "photons" in sides else {}
    job = job_of(source, tmp_path / "out.zarr", name, options, tile={"block": 128}, input={"sides": paths}, noise=noise)
    stages = DenoiseStages(work_of(make_plan(job)).task, Elsewhere())
    stages.check()
    for block in (stages.task.grid.block_at(0), stages.task.grid.block_at(4)):
        computed = stages.compute(block, stages.read(block), Receipt()).computed
        assert isinstance(computed, QueuedCore)
        assert computed._output.tensor.device.type == "meta"


def test_a_gpu_whose_bits_change_is_seen() -> None:
    """The fixed batch has the shape of the first one; its bits are those of any worker, until the device rounds differently."""

    class Fickle(Gpu):
        off = 0.0

        def run(self, model: Any, batch: torch.Tensor, sides: Any) -> torch.Tensor:
            return super().run(model, batch, sides) + self.off

    found, pixels, whole = [], image("float32")[:1, :, :64, :64], Region((0, 0), (64, 64))
    for _ in range(2):
        runner = TileRunner(blur, device := Fickle("cpu"), tiling(image=(64, 64)), "blur")
        runner.finish(nothing := Receipt())
        assert not nothing.bits
        runner(pixels, whole, whole, 1, {})
        for device.off in (0.0, 0.0, 1e-6):
            runner.finish(receipt := Receipt())
            found.append(receipt.bits)
    assert found[:3] == found[3:]
    assert found[0] == found[1] != found[2]
    assert [shape[:4] for shape in found[0]] == ["4×1×"]


class FakeGpu(Gpu):
    """A device of the kind ``gpu`` that computes on the CPU."""

    def __init__(self, *_: Any) -> None:
        super().__init__("cpu")
        self.kind = "gpu"
        self.resets = 0

    def reset_peak(self) -> None:
        """Count the resets."""
        self.resets += 1


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_task, "_runners", WeakValueDictionary())
    monkeypatch.setattr(image_task, "_cached", {})


def prior(sigma: float, device: str = "cuda") -> Denoised:
    """A denoised image."""
    return replace(denoised_by(Gaussian(sigma=sigma), scene(), 64, 32), device=device)


def solver_step(*parts: Denoised) -> ImageTask:
    """A step of a solver that uses these denoised images."""
    grid = parts[0].grid if parts else prior(1.0).grid
    return ImageTask(grid=grid, images=(), sums=(), stored=(), view=View(), denoised=parts, overlap=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace GPUs by :class:`FakeGpu`."""
    monkeypatch.setattr(image_task, "open_device", lambda kind, *given: FakeGpu() if kind == "cuda" else Device("cpu"))


@pytest.mark.usefixtures("gpus")
def test_what_an_earlier_job_left_on_a_gpu_goes_and_the_rest_stays(tmp_path: Path) -> None:
    kept = image_task._cached.values()
    (here,) = solver_step(prior(1.0, "cpu")).stages().runners
    (before,) = solver_step(prior(1.0)).stages().runners
    assert isinstance(before.device, FakeGpu)
    resets = before.device.resets
    assert solver_step(prior(1.0)).stages().runners == [before]
    assert before.device.resets == resets + 1, "its memory is measured anew"
    assert not solver_step().stages().runners
    assert [*kept] == [here, before], "a step without a denoiser drops nothing"
    (now,) = solver_step(prior(2.0)).stages().runners
    assert [*kept] == [here, now], "models on a CPU are not dropped"
    assert solver_step(prior(2.0)).stages().runners == [now]
    one, other = prior(1.0), prior(2.0)  # two jobs at work side by side keep their models
    first, second = solver_step(one).stages(), solver_step(other).stages()
    assert (one.runner(), other.runner()) == (first.runners[0], second.runners[0])
    del here, before, now, first, second
    source = write_zarr(tmp_path / "in.zarr", noisy_image((100, 90)))  # a denoising job has the GPU for itself
    work_of(make_plan(job_of(source, tmp_path / "out.zarr", "gaussian", {"sigma": 1}))).task.stages()
    assert not image_task._cached
    assert not image_task._runners, "and nothing is left in memory"


def test_a_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(image_task, "check_purity", lambda denoiser, dims, model, dtype: checked.append(denoiser))
    for sigma in (1.0, 1.0, 2.0):
        solver_step(prior(sigma, "cpu")).stages().check()
    assert [denoiser.sigma for denoiser in checked] == [1.0, 2.0]
