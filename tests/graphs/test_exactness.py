"""The tiled result has the bits of the whole image, however it is cut and whoever computes it; what is not local is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.data import retina

from halotile.errors import ConfigError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.plans.trials import denoiser_trials
from halotile.graphs.runs.driver import run
from halotile.tasks.denoisers.dncnn import DnCNN
from halotile.tasks.denoisers.torch import UserNetwork
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.trials.provenance import build_digest, is_own
from halotile.tasks.trials.trial import sides_as_channels
from tests import deceptive
from tests.cases import all_of, thorough
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, run_inline, whole_picture, work_of, write_zarr

DENOISERS: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 1.7},
    "median": {"size": 5},
    "tv": {"strength": 0.1, "iterations": 12},
    "nlm": {"strength": 0.1, "patch": 3, "distance": 4},
    "dncnn": {"depth": 5, "width": 8},
}
EDGES, F = (301, 270), "float32"
CASES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    **{dtype: (dtype, EDGES, {}) for dtype in (F, "uint16", "uint8", "float16")},
    **{str(shape): (F, shape, {}) for shape in ((17, 19), (1, 300), (129, 130), (64, 200), (300, 3))},
    "tiles of 77": (F, EDGES, {"size": 77, "batch": 3}),
    "tiles and blocks": (F, EDGES, {"size": (50, 90), "block": (128, 256)}),
    "depth of 40": (F, EDGES, {"depth": 40}),
    "tiles of 64": (F, EDGES, {"size": 64}),
    "tiles of 100": (F, EDGES, {"size": 100, "batch": 1}),
    "tiles of 512": (F, EDGES, {"size": 512}),
    "large blocks": (F, EDGES, {"size": 64, "block": 256}),
}
SELDOM = ("uint8", "float16", "(64, 200)", "(300, 3)", "tiles of 64", "tiles of 100", "tiles of 512", "large blocks")


def options_of(name: str, folder: Path) -> dict[str, Any]:
    extra = {"weights": str(dncnn_weights(folder / "w.safetensors"))} if name == "dncnn" else {}
    return DENOISERS[name] | extra


def depth_of(job: Denoising) -> int:
    return int(work_of(make_plan(job)).task.tiling.depth[0][0])


@pytest.mark.parametrize("case", all_of(CASES, thorough=SELDOM))
@pytest.mark.parametrize("name", DENOISERS)
def test_tiles_have_the_bits_of_the_whole_picture_however_it_is_cut(name: str, case: str, tmp_path: Path) -> None:
    dtype, shape, cut = CASES[case]
    pixels = noisy_image(shape, dtype)
    source, options = write_zarr(tmp_path / "in.zarr", pixels), options_of(name, tmp_path)
    plain = job_of(source, tmp_path / "out.zarr", name, options)
    result = run_inline(replace(plain, tile=Tile(**cut)))
    assert np.array_equal(result, whole_picture(plain, pixels, depth_of(plain)))


@pytest.mark.parametrize("kernel", [thorough(1), 3])
@pytest.mark.parametrize(
    "name", all_of(["Mish", "Sigmoid", "Softplus", "SiLU", "GELU"], thorough=["Mish", "Softplus", "SiLU"])
)
def test_activations_have_their_bits_wherever_a_tile_ends(name: str, kernel: int, tmp_path: Path) -> None:
    pixels = noisy_image((153, 177), "float32")
    options = {"import": "tests.networks:activated", "options": {"name": name, "kernel": kernel}}
    source = write_zarr(tmp_path / "in.zarr", pixels)
    for number, cut in enumerate(({"size": 75}, {"size": 64, "batch": 3})):
        job = job_of(source, tmp_path / f"{number}.zarr", "torch", options, tile=cut)
        assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth=2))


@pytest.mark.parametrize("name", ["gaussian", "median", thorough("tv")])
def test_volumes_are_tiled_on_three_axes(name: str, tmp_path: Path) -> None:
    pixels, tile = noisy_image((40, 70, 60)), {"size": 24, "axes": "zyx"}
    source = write_zarr(tmp_path / "in.zarr", pixels, chunk=32, axes="zyx")
    job = job_of(source, tmp_path / "out.zarr", name, DENOISERS[name], shard=32, chunk=16, tile=tile)
    assert make_plan(job).summary()["tiled_axes"] == "zyx"
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth_of(job), spatial=3))


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "workers"), [("tv", 2), ("dncnn", 2), ("dncnn", 4), thorough("dncnn", 1)])
def test_any_workers_give_the_same_bits(name: str, workers: int, cluster: RunningCluster, tmp_path: Path) -> None:
    pixels, options = noisy_image((401, 330)), options_of(name, tmp_path)
    source = write_zarr(tmp_path / "in.zarr", pixels)
    job = job_of(source, tmp_path / "out.zarr", name, options, run={"workers": workers})
    plan = make_plan(job)
    order = Order(workers=workers, memory_bytes=4 * 2**30)
    with nullcontext(cluster) if workers == 2 else local.start(order) as several:
        outcome = run(plan, cluster=several)
    assert outcome.done == outcome.total == len(plan.grid)
    assert np.array_equal(read_zarr(plan.output), whole_picture(job, pixels, depth_of(job)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "depth", "width", "tile"),
    [((1500, 1700), 7, 32, 700), ((1100, 1300), 9, 64, 512), ((110, 1100), 17, 64, 512)],
)
def test_networks_of_the_widths_that_people_use_have_the_bits_of_the_whole(
    tmp_path: Path, shape: tuple[int, int], depth: int, width: int, tile: int
) -> None:
    pixels, source = noisy_image(shape), write_zarr(tmp_path / "in.zarr", noisy_image(shape))
    weights = str(dncnn_weights(tmp_path / "w.safetensors", depth, width))
    options = {"weights": weights, "depth": depth, "width": width}
    job = job_of(source, tmp_path / "out.zarr", "dncnn", options, tile={"size": tile})
    assert work_of(make_plan(job)).task.tiling.tile != shape
    assert np.array_equal(run_inline(job), whole_picture(job, pixels, depth))


# --- what is not local is refused when the job is planned, however local it looks --------------

Patch = pytest.MonkeyPatch

MODULE = "tests.deceptive"
KNOWN: dict[str, Any] = {"receptive_field": 70, "alignment": 1}
LARGE, SMALL = (700, 660), (300, 250)
GATED = {"options": {"below": 0.35}}
WHOLE, OTHER = "looks at the whole image", "other pixels in tiles than on"
FAR = "looks farther than its depth of 8, or at the whole image"
PERIODIC = {"boundary": "periodic"}


def job(folder: Path, name: str, shape: tuple[int, int], options: dict[str, Any], **parts: Any) -> Denoising:
    source = write_zarr(folder / "in.zarr", np.random.default_rng(0).random(shape, np.float32), chunk=256)
    kind = "torch" if isinstance(getattr(deceptive, name), type) else "function"
    given, tile = {"import": f"{MODULE}:{name}", **options}, {"size": 128} | parts.pop("tile", {})
    return job_of(source, folder / "out.zarr", kind, given, shard=512, chunk=256, tile=tile, **parts)


NOT_LOCAL: list[Any] = [
    ("Negatives", SMALL, {}, WHOLE),
    thorough("Counts", SMALL, {}, WHOLE),
    thorough("Background", SMALL, {}, WHOLE),
    ("AcrossTheBatch", SMALL, {}, "in one batch with another tile"),
    ("InParts", LARGE, {}, OTHER + " a whole image"),
    thorough("Backwards", LARGE, {}, OTHER + " a whole image"),
    thorough("InSevens", (1293, 1103), {}, OTHER + " a whole image"),
    ("FarPadding", SMALL, {}, "failed on a window of .*write receptive_field and alignment"),
    ("Circular", SMALL, {}, "with circular padding write tile.boundary: periodic"),
    ("in_parts", LARGE, {"depth": 1}, "looks farther than its depth of 1"),
    ("Gated", SMALL, GATED, OTHER),
    thorough("FarRolled", SMALL, {}, OTHER),
    ("without_dark_level", SMALL, {"depth": 8}, FAR),
    thorough("without_background", SMALL, {"depth": 8}, FAR),
    thorough("without_commonest", SMALL, {"depth": 8}, FAR),
    thorough("by_its_size", LARGE, {"depth": 8}, FAR),
    ("Missing", SMALL, {}, "returns NaN or infinity for pixels between 0 and 1"),
    ("rolled", SMALL, {"depth": 1}, "edge of an image .*other side.* write tile.boundary: periodic"),
    ("OneLevel", SMALL, {"sigma": 0.1}, WHOLE),  # the mean of its noise map
]


@pytest.mark.parametrize(("name", "shape", "options", "words"), NOT_LOCAL)
def test_what_is_not_local_is_refused(tmp_path: Path, name: str, shape: Any, options: Any, words: str) -> None:
    np.save(tmp_path / "sigma.npy", np.ones(SMALL, "float32"))
    sides = {"sides": {"sigma": str(tmp_path / "sigma.npy")}} if name == "OneLevel" else {}
    with pytest.raises(ConfigError, match=words):
        make_plan(job(tmp_path, name, shape, options, input=sides))


ODD: list[Any] = [
    ("Untrainable", SMALL, {}, {}),
    thorough("OneByOne", SMALL, {}, {}),
    ("FarPadding", SMALL, KNOWN, {}),
    thorough("ByNines", (1503, 1247), {}, {}),
    thorough("InSevens", (1295, 1106), {}, {}),
    thorough("Circular", SMALL, {}, PERIODIC),
    ("rolled", SMALL, {"depth": 1}, PERIODIC),
]


@pytest.mark.parametrize(("name", "shape", "options", "tile"), ODD)
def test_what_is_odd_has_the_bits_of_the_whole(tmp_path: Path, name: str, shape: Any, options: Any, tile: Any) -> None:
    result = run_inline(job(tmp_path, name, shape, options, tile=tile))
    call, pixels = getattr(deceptive, name), np.random.default_rng(0).random(shape, np.float32)
    if isinstance(call, type):
        with torch.inference_mode(), torch_threads():
            image = torch.from_numpy(pixels)[None, None].contiguous(memory_format=torch.channels_last)
            whole = call().eval().to(memory_format=torch.channels_last)(image)[0, 0].numpy()
    assert np.array_equal(result, whole if isinstance(call, type) else call(pixels))


def scene() -> NDArray[np.float32]:
    """A real image, dark at one side."""
    pixels: NDArray[np.float32] = retina()[200:900, 200:900, 1].astype(np.float32) / 255
    return pixels + 0.03 * np.random.default_rng(0).standard_normal(pixels.shape).astype(np.float32)


def test_what_only_the_image_itself_shows_is_refused(tmp_path: Path) -> None:
    """The threshold of the gate lies between places of this image, in its own units, and beyond any image of a trial."""
    one, other = (write_zarr(tmp_path / f"{scale}.zarr", scale * scene(), chunk=256) for scale in (1, 100))
    jobs = (
        job_of(one, tmp_path / "out.zarr", "function", {"import": f"{MODULE}:connected", "depth": 8}, shard=512, chunk=256),
        job_of(other, tmp_path / "out.zarr", "torch", {"import": f"{MODULE}:Gated", "options": {"below": 30.0}}, shard=512, chunk=256),
    )  # fmt: skip
    for given in jobs:
        with pytest.raises(ConfigError, match="than on a larger part of this image"):
            make_plan(given)
    make_plan(job_of(one, tmp_path / "out.zarr", "function", {"import": f"{MODULE}:missing", "depth": 0}))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Patch) -> Denoising:
    """A job whose trials are kept in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_zarr(tmp_path / "in.zarr", noisy_image((140, 130)))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors", depth=3)), "depth": 3, "width": 8}
    return job_of(tmp_path / "in.zarr", tmp_path / "out.zarr", "dncnn", options)


LOOKING = """
import os
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent

class Looking(nn.Module):
    def __init__(self, note):
        super().__init__()
        try:
            open(HERE / "absent")
        except FileNotFoundError:
            pass
        assert (HERE / "radius.py").read_text()  # it is read again later on
    def forward(self, x):
        with open(HERE / "calls", "a") as calls:
            calls.write(".")
        radius = int((HERE / "radius.py").read_text()) + int(os.environ.get("MORE_RADIUS", 0))
        return nn.functional.avg_pool2d(x, 2 * radius + 1, 1, radius, count_include_pad=False)
"""


@pytest.mark.usefixtures("kept")
def test_what_a_network_reads_or_finds_is_in_the_key(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "looking_networks.py").write_text(LOOKING)
    named = {"import": "looking_networks:Looking", "options": {"note": 300 * "a"}}  # no file has such a name
    made = replace(job_of(tmp_path / "in.zarr", tmp_path / "out.zarr", "torch", named), import_folder=str(tmp_path))
    # What is read and found in the environment; the radius, and whether the network was called for it.
    steps = [("1", "", 1, True), ("1", "", 1, False), ("4", "", 4, True), ("4", "SSH_TTY", 4, False)]
    for radius, variable, found, is_called in [*steps, ("4", "MORE_RADIUS", 6, True)]:
        (tmp_path / "radius.py").write_text(radius)
        (tmp_path / "calls").write_text("")
        if variable:
            monkeypatch.setenv(variable, "2")
        assert make_plan(made).identity["probed"][0] == found
        assert bool((tmp_path / "calls").read_text()) == is_called


def test_a_stored_answer_takes_no_process(kept: Denoising, monkeypatch: Patch) -> None:
    tried: list[str] = []

    def bounded(call: Callable[[], Any], title: str, *_: Any, **__: Any) -> Any:
        tried.append(title)
        return call()

    monkeypatch.setattr(denoiser_trials, "bounded", bounded)
    assert (make_plan(kept).identity, tried) == (make_plan(kept).identity, ["dncnn"])
    weights = Path(str(kept.denoiser.options["weights"]))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    make_plan(kept)
    make_plan(replace(kept, tile=replace(kept.tile, size=(32, 32))))
    assert tried == ["dncnn"] * 3


def test_only_options_and_files_tell_a_network_of_halotile(tmp_path: Path) -> None:
    weights = dncnn_weights(tmp_path / "w.safetensors")
    ours = DnCNN(weights=str(weights), depth=5, width=8)
    foreign = type("Derived", (DnCNN,), {})  # a network of another package, which may build anything
    alike = (ours, sides_as_channels(ours, ["sigma"]))
    others = (UserNetwork(import_="tests.networks:convolutions"), foreign(weights=str(weights), depth=5, width=8))
    assert [is_own(each) for each in (*alike, *others)] == [True, True, False, False]
    before = build_digest(ours)
    assert build_digest(replace(ours, residual="none")) != before
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert build_digest(ours) != before
