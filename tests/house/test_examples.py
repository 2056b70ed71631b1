"""The examples work: the scene is a function of coordinates, the demo improves the image."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from nbclient import NotebookClient

import halotile
from halotile.graphs.clusters.base import RunningCluster
from halotile.storage.grid import Grid, Region
from tests.faults import run_python
from tests.support import read_zarr

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """An example as a module: they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "examples" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scene = load("scene.py")


@settings(deadline=None, max_examples=8)
@given(
    block=st.tuples(st.integers(60, 400), st.integers(60, 400)),
    corner=st.tuples(st.integers(0, 70_000), st.integers(0, 70_000)),
    seed=st.integers(0, 2**32),
)
def test_a_scene_has_the_same_bits_however_it_is_cut(
    block: tuple[int, int], corner: tuple[int, int], seed: int
) -> None:
    shape = (330, 350)
    whole = scene.noisy_at(Region((0, 0), shape).shift(corner), seed)
    pieces = np.empty(shape, np.float32)
    for piece in Grid(shape, block, ((0, 0), (0, 0))):
        pieces[piece.core.slices] = scene.noisy_at(piece.core.shift(corner), seed)
    assert np.array_equal(whole, pieces)


def test_the_truth_stays_in_range_and_the_noise_has_the_strength_that_was_asked_for() -> None:
    region = Region((100, 200), (700, 900))
    truth = scene.truth_at(region, seed=1)
    noise = scene.noisy_at(region, seed=1, sigma=0.2) - truth
    assert noise.std() == pytest.approx(0.2, rel=0.01)
    assert abs(noise.mean()) < 0.002
    assert 0 <= truth.min() < truth.max() <= 1
    assert truth.std() > 0.05
    assert not np.array_equal(truth, scene.truth_at(region, 0))


def test_a_scene_of_70000_pixels_is_written_in_places(tmp_path: Path) -> None:
    regions = scene.write_scene(tmp_path, 70_000, sparse=3, shard=512)
    truth, noisy = (zarr.open_array(tmp_path / f"{name}.zarr", mode="r") for name in ("truth", "noisy"))
    assert noisy.shape == (70_000, 70_000)
    assert regions[-1].stop == (70_000, 70_000)
    for region in regions:
        assert np.array_equal(truth[region.slices], scene.truth_at(region))
        assert np.array_equal(noisy[region.slices], scene.noisy_at(region))
    written = [path for path in (tmp_path / "truth.zarr/c").rglob("*") if path.is_file()]
    assert len(written) == 3


@pytest.mark.cluster
def test_the_demo_denoises_a_real_image_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load("retina.py")
    monkeypatch.setattr(sys, "argv", ["retina.py", "--out", str(tmp_path), "--size", "400", "--workers", "1"])
    for _ in range(2):
        demo.main()
        before, after = (float(x) for x in re.findall(r"([\d.]+) dB (?:before|after)", capsys.readouterr().out))
        assert after > before + 10
        assert (tmp_path / "before-after.png").stat().st_size > 10_000
        assert read_zarr(tmp_path / "clean.zarr").shape == (400, 400)


@pytest.mark.cluster
@pytest.mark.thorough
def test_noise_that_a_job_names_comes_out_better_than_as_plain_noise(tmp_path: Path) -> None:
    """The picture of docs/noise.md, with the errors below it."""
    lines = run_python(str(ROOT / "examples/noises.py"), "--out", str(tmp_path)).stdout.splitlines()
    errors = {line[:20].strip(): [float(number) for number in re.findall(r"\d+\.\d+", line)] for line in lines}
    assert [*errors] == ["photons of a camera", "hot pixels", "column stripes"]
    assert all(own < plain < noisy for noisy, plain, own in errors.values())
    assert errors["hot pixels"][2] < 0.4 * errors["hot pixels"][1]
    assert errors["column stripes"][2] < 0.75 * errors["column stripes"][1]
    assert (tmp_path / "noises.png").stat().st_size > 100_000


@pytest.mark.cluster
@pytest.mark.thorough
def test_a_scan_becomes_a_picture_with_one_command(tmp_path: Path) -> None:
    for _ in range(2):
        done = run_python(str(ROOT / "examples/ptychography/star.py"), "--out", str(tmp_path), "--epochs", "6")
        assert done.returncode == 0, done.stderr
        lines = re.findall(r"epoch (\d+): loss ([\d.]+), resolution", done.stdout)
        assert [int(epoch) for epoch, _ in lines] == [1, 2, 3, 4, 5, 6]
        assert float(lines[-1][1]) < 0.7 * float(lines[0][1])
        assert (tmp_path / "star.png").stat().st_size > 20_000


def test_a_trained_network_is_one_that_a_job_can_use(tmp_path: Path) -> None:
    import torch

    from halotile.tasks.denoisers.dncnn import DnCNN

    trainer = load("train_dncnn.py")
    stack = trainer.network(depth=3, width=4)
    checksum = trainer.save(stack, tmp_path / "tiny.safetensors")
    model = DnCNN(weights=str(tmp_path / "tiny.safetensors"), sha256=checksum, depth=3, width=4).build()
    image = torch.rand(1, 1, 20, 20)
    with torch.no_grad():
        assert torch.allclose(model(image), image - stack(image), atol=1e-6)


def output_of(name: str, options: list[str], capsys: pytest.CaptureFixture[str], **names: object) -> str:
    """Run an example of ``examples/distributed`` with some of its names replaced; return its output."""
    folder = str(ROOT / "examples/distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = load(f"distributed/{name}.py")
        patch.setattr(sys, "argv", [name, "--size", "160", *options])
        for attribute, value in names.items():
            patch.setattr(module, attribute, value)
        module.main()
    return capsys.readouterr().out


@pytest.fixture(params=["halotile", "deepinv"])
def import_line(request: pytest.FixtureRequest, cluster: RunningCluster) -> dict[str, object]:
    """The two names from halotile, or from deepinv: the only change to a script."""
    peer = pytest.importorskip("deepinv.distributed")
    if request.param == "deepinv":
        return {"DistributedContext": peer.DistributedContext, "distribute": peer.distribute}
    return {"DistributedContext": functools.partial(halotile.DistributedContext, cluster=cluster)}


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")  # deepinv warns about its own defaults
def test_the_physics_example_is_the_plain_stack(
    import_line: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of("physics", [], capsys, **import_line)
    assert "3 of 3 operators here" in output
    distances = [float(number) for number in re.findall(r"^A\S*: +(\S+)", output, re.MULTILINE)]
    assert len(distances) == 3
    assert max(distances) < 1e-5


@functools.cache
def trained_once(steps: int, sigma: float) -> object:
    """The network of the examples, trained once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples/distributed"))
        return load("distributed/images.py").trained(60, 0.1)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_the_denoiser_example_denoises_without_seams(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("deepinv")
    image = tmp_path / "row.png"
    context = functools.partial(halotile.DistributedContext, cluster=cluster)
    options = ["--patch", "64", "--save", str(image)]
    output = output_of("denoiser", options, capsys, DistributedContext=context, trained=trained_once)
    (before, after), seam = improvement(output), re.findall(r"at most (\S+) from", output)
    assert after > before + 3
    assert float(seam[0]) < 1e-5
    assert image.stat().st_size > 10_000


@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_plug_and_play_example_reconstructs_by_hand_as_by_deepinv(
    import_line: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of("pnp", ["--iterations", "4"], capsys, trained=trained_once, **import_line)
    before, after = improvement(output)
    assert after > before + 1
    assert re.findall(r"by optim_builder: ([\d.]+) dB", output) == [f"{after:.1f}"]


def improvement(output: str) -> tuple[float, float]:
    """PSNR before and after."""
    ((before, after),) = re.findall(r"([\d.]+) dB before, ([\d.]+) dB after", output)
    return float(before), float(after)


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["first-result", "own-network", "scan"])
def test_a_notebook_runs_and_shows_pictures(name: str, tmp_path: Path) -> None:
    book = nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", 4)
    NotebookClient(book, timeout=240, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [found for cell in book.cells for found in cell.get("outputs", ())]
    assert [found for found in shown if "warning" in found.get("text", "").lower()] == []
    drawn = [
        data for found in shown if "image/png" in (data := found.get("data", {})) or "<img" in data.get("text/html", "")
    ]
    assert len(drawn) == (2 if name == "first-result" else 1)
    last = [found.get("text", "") + found.get("data", {}).get("text/plain", "") for found in shown][-1]
    assert {"first-result": "before", "own-network": "True", "scan": "Figure"}[name] in last
