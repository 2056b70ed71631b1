"""Measured patterns beside those that a reconstruction expects, for halotile's model, CDTools and a user's own torch module."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.cli.screens import scan_views
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.clusters.base import RunningCluster
from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import read_result
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography import program
from halotile.tasks.ptychography.opened import SimulatedScan
from tests.faults import REPOSITORY
from tests.graphs.scans import compute, job, opened, plan, small_scan, words, write_small_scan

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small scan."""
    return write_small_scan(tmp_path)


def begun_with_truth(folder: Path, truth: SimulatedScan, **model: Any) -> Any:
    """A scan that is opened with its true object, probe and positions; patterns begin 4 pixels from the rim of either object."""
    rows, columns = opened(folder, margin=4, **model).object.shape
    image = np.ones((rows, columns), np.complex64)
    known = truth.image[: rows - 2, : columns - 2]
    image[2 : 2 + len(known), 2 : 2 + len(known[0])] = known
    return opened(folder, {"object": image, "probe": truth.probe}, margin=4, **model)


@pytest.mark.parametrize("field", ["far", "near"])
def test_patterns_of_the_true_object_are_the_measured_ones(tmp_path: Path, field: Any) -> None:
    """But for the faint background of the first guess."""
    truth = SimulatedScan(field=field, raster=(4, 4), pattern=32, step=3.0, modes=2)
    write_scan(str(tmp_path / "scan.zarr"), truth.scan, truth)
    found = begun_with_truth(tmp_path, truth, field=field, modes=2).compare([11, 3])
    assert found.numbers.tolist() == [11, 3]
    assert np.array_equal(found.measured, truth.patterns(np.array([11, 3])))
    assert np.abs(found.simulated - found.measured).max() < 2e-3 * found.measured.max()
    assert found.loss.max() < 1e-3 * found.measured.mean()


def test_the_losses_of_all_patterns_are_that_of_the_next_epoch(folder: Path) -> None:
    """Of one batch, before its step; and some at a time give the values of all at once."""
    scan = opened(folder)
    with pytest.raises(ConfigError, match=r"Write numbers such as \[0, 1\]"):
        scan.compare()
    before = scan.compare(range(64))
    alone = scan.compare([63])
    assert np.allclose(before.simulated[63], alone.simulated[0], rtol=1e-5)
    with halotile.ptychography.SGD(scan) as sgd:
        (loss,) = sgd.optimize(1, lr=1e-9, batch_size=64)
    assert loss == pytest.approx(before.loss.mean(), rel=1e-5)
    order = before.loss.argsort()
    assert np.array_equal(scan.compare().numbers, order[[0, 32, 63]])
    with pytest.raises(ConfigError, match=r"no pattern 64\. Write some of its 64, which are from 0 to 63"):
        scan.compare([3, 64])


def test_pixels_that_do_not_count_are_nan_and_without_loss(folder: Path) -> None:
    mask = np.ones((32, 32), bool)
    mask[5, 7] = False
    scan = replace(small_scan().scan, mask=mask)
    write_scan(str(folder / "scan.zarr"), scan, small_scan(), overwrite=True)
    found = opened(folder).compare([0])
    assert np.argwhere(np.isnan(found.measured[0])).tolist() == [[5, 7]]
    expected = np.square(np.sqrt(found.measured) - np.sqrt(found.simulated))
    assert found.loss[0] == pytest.approx(np.nanmean(expected), rel=1e-4)


def test_a_result_has_the_patterns_that_tell_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best, the median and the worst: on the sheet, and the worst ones in the outcome; with one that was spoilt as the worst."""
    patterns = small_scan().patterns(np.arange(64))
    patterns[27] = patterns[27, ::-1]
    write_scan(str(folder / "scan.zarr"), small_scan().scan, patterns, overwrite=True)
    path = str(job(folder, model={"modes": 2}))
    done = CliRunner().invoke(app, ["run", path, "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert "worst patterns 27, " in words(done)
    result = read_result(str(folder / "result.cxi"))
    with h5py.File(folder / "result.cxi") as file:
        losses = file["entry_1/process_1/pattern_loss"][:]
    assert losses.argmax() == 27
    assert result.compared is not None
    assert result.compared.numbers.tolist() == losses.argsort(kind="stable")[[0, 32, 63]].tolist()
    scan = opened(folder, modes=2, start=folder / "result.cxi")
    again = scan.compare(result.compared.numbers.tolist())
    assert np.allclose(again.simulated, result.compared.simulated, rtol=1e-3, atol=1e-3 * again.simulated.max())
    drawn: list[Any] = []
    monkeypatch.setattr(scan_views, "_comparison", lambda axes, result, n: drawn.append(axes.get_title()))
    sheet = CliRunner().invoke(app, ["export", str(folder / "result.cxi"), str(folder / "sheet.png")])
    assert sheet.exit_code == 0, sheet.output
    assert drawn[2].startswith("pattern 27, largest amplitude_mse: ")


def test_compared_patterns_stand_apart_with_their_names_and_scales(folder: Path) -> None:
    path = str(job(folder))
    done = CliRunner().invoke(app, ["run", path, "--workers", "1"])
    assert done.exit_code == 0, done.output
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    scan_views._comparison(axes, read_result(str(folder / "result.cxi")), 0)
    edges = [image.get_extent()[:2] for image in axes.images]
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(edges))
    names = {label.get_text(): label.get_position()[0] for label in axes.get_xticklabels()}
    assert list(names) == ["measured", "simulated", "difference"]
    assert list(names.values()) == [sum(both) / 2 for both in edges]
    assert [bar.get_xlabel() for bar in axes.child_axes] == ["root of counts", "photon noise"]


@pytest.mark.parametrize(
    ("field", "model"),
    [("far", {"modes": 2}), ("far", {"oversampling": 2}), ("near", {}), ("far", {"variations": 1})],
    ids=["far", "oversampled", "near", "variations"],
)
def test_cdtools_opens_a_result(tmp_path: Path, field: Any, model: dict[str, Any]) -> None:
    """Its model expects the same patterns, and sees the same positions; that of a probe which varies is not there."""
    data, models = (pytest.importorskip(f"cdtools.{name}") for name in ("tools.data", "models"))
    truth = SimulatedScan(field=field, raster=(4, 4), pattern=32, step=3.0, photons=1e4)
    mask = np.ones((32, 32), bool)
    mask[5, 7] = False
    write_scan(str(tmp_path / "scan.zarr"), replace(truth.scan, mask=mask), truth)
    scan = opened(tmp_path, field=field, refine=["object", "probe", "background", "positions", "intensities"], **model)
    with halotile.ptychography.Adam(scan) as adam:
        list(adam.optimize(4, lr=0.02, batch_size=8))
    scan.save(tmp_path / "result.cxi")
    found = data.h5_to_nested_dict(str(tmp_path / "result.cxi"))
    assert np.array_equal(found["obj"], scan.object)
    assert np.array_equal(found["probe"], scan.probe)
    assert np.array_equal(found["background"], scan.background)
    pixels = np.linalg.pinv(found["obj_basis"]) @ (found["translations"] - found["original_translations"]).T
    moved = scan.positions - opened(tmp_path, field=field, **model).positions
    assert np.allclose(pixels.T, moved, atol=1e-5)
    assert np.abs(moved).max() > 1e-3
    assert ("state_dict" in found) == ("variations" not in model)
    if "variations" in model:
        return
    theirs = models.FancyPtycho.from_results_h5(str(tmp_path / "result.cxi"))
    numbers = torch.arange(16)
    with torch.no_grad():
        simulated = theirs(numbers, theirs.original_translations[numbers]).numpy()
    expected = scan.compare(range(16)).simulated
    assert np.allclose(simulated, expected, rtol=1e-3, atol=1e-4 * expected.max())
    assert np.array_equal(theirs.mask.numpy(), mask)
    again = opened(tmp_path, field=field, start=tmp_path / "result.cxi", **model)
    assert np.array_equal(again.object, scan.object)


@pytest.mark.parametrize("loss", ["amplitude_mse", "intensity_mse", "poisson_nll"])
def test_the_worst_pattern_is_the_one_that_fits_least_however_bright_it_is(tmp_path: Path, loss: Any) -> None:
    truth = SimulatedScan(raster=(4, 4), pattern=32, step=3.0)
    light = np.geomspace(0.01, 10, 16)
    patterns = np.random.default_rng(0).poisson(truth.patterns(np.arange(16)) * light[:, None, None])
    patterns[2] = np.roll(patterns[2], 1, 0)
    # Light that the true probe has: intensities are relative to their mean.
    write_scan(
        str(tmp_path / "scan.zarr"), replace(truth.scan, intensities=light), (patterns / light.mean()).astype("float32")
    )
    scan = begun_with_truth(tmp_path, truth, loss=loss)
    with halotile.ptychography.SGD(scan) as sgd:
        list(sgd.optimize(1, lr=1e-12, batch_size=16))
    found = scan.compare()
    assert found.numbers[2] == 2
    assert np.array_equal(scan.compare(range(16)).loss.argsort()[[0, 8, 15]], found.numbers)


OWN = '''
import torch

class Own(torch.nn.Module):
    """A far field by automatic differentiation, at whole pixels."""

    def __init__(self, scan, patterns, scale=1.0):
        super().__init__()
        count, rows, columns = patterns.shape
        pixel = [scan.wavelength * scan.distance / (n * p) for n, p in zip((rows, columns), scan.pixel)]
        places = torch.from_numpy((scan.positions - scan.positions.min(0)) / pixel).round().long()
        self.register_buffer("places", places)
        self.image = torch.nn.Parameter(torch.ones(*(places.amax(0) + torch.tensor([rows, columns])), dtype=torch.complex64))
        mean = torch.from_numpy(patterns[:].mean(0)).float()
        light = torch.fft.fftshift(torch.fft.ifft2(torch.fft.ifftshift(mean.sqrt()), norm="ortho"))
        self.norm = float(light.abs().max())
        self.beam = torch.nn.Parameter((scale * light / self.norm)[None].to(torch.complex64))
        self.frame = rows, columns

    def forward(self, numbers):
        rows, columns = self.frame
        seen = torch.stack([self.image[r : r + rows, c : c + columns] for r, c in self.places[numbers].tolist()])
        wave = torch.fft.fft2(self.probe[None] * seen[:, None], norm="ortho")
        return torch.fft.fftshift(wave.abs().square().sum(1), (-2, -1))

    @property
    def object(self):
        return self.image

    @property
    def probe(self):
        return self.norm * self.beam

def build(scan, patterns, **options):
    return Own(scan, patterns, **options)

class wrong(Own):
    def forward(self, numbers):
        return super().forward(numbers)[:, :, :-1]

class flat(Own):
    @property
    def probe(self):
        return super().probe[0]

def none(scan, patterns):
    return torch.nn.Linear(2, 2)
'''
FANCY = re.search(r"```text\n(# fancy\.py\n.*?)```", (REPOSITORY / "docs/pattern-models.md").read_text(), re.DOTALL)
STAGES: list[dict[str, Any]] = [{"epochs": 20, "lr": 0.03, "batch": 8}]


@pytest.fixture
def with_modules(tmp_path: Path) -> Path:
    """A folder with a far field of a small raster, on whole pixels, and modules of a user."""
    simulated = SimulatedScan(raster=(6, 6), pattern=24, step=3.0)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    (tmp_path / "own.py").write_text(OWN)
    assert FANCY
    (tmp_path / "fancy.py").write_text(FANCY[1])
    return tmp_path


def of_module(folder: Path, name: str, module: str, options: Any = None, **parts: Any) -> Path:
    """A job with a module of one's own."""
    return job(folder, name, **{"stages": STAGES, "model": {"import": module, "options": options or {}}} | parts)


def test_a_module_is_refined_to_the_same_bits_by_any_workers(with_modules: Path, cluster: RunningCluster) -> None:
    folder, stages = with_modules, [*STAGES, {"solver": "lbfgs", "epochs": 3}]
    first, second = (
        compute(of_module(folder, f"{n}.cxi", "own:build", {"scale": 0.9}, stages=stages), cluster, n) for n in (1, 2)
    )
    assert first == second
    with h5py.File(folder / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        parameters = file["entry_1/process_1/parameters"]
        assert np.array_equal(parameters["image"][:], file["object"][:])
        assert sorted(parameters) == ["beam", "image"]
    assert (folder / "1.cxi.run" / "examples.png").exists()
    assert CliRunner().invoke(app, ["export", str(folder / "1.cxi"), str(folder / "sheet.png")]).exit_code == 0
    done = plan(folder / "1.cxi.yaml", "--allow-import")
    assert done.exit_code == 0, done.output


def test_a_module_is_spoilt_by_the_light_of_its_patterns(with_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "built_module", lambda recipe: torch.nn.Linear(2, 2))
    mean = SimulatedScan(raster=(6, 6), pattern=24, step=3.0).patterns(np.arange(36)).mean()
    for loss, power in (("amplitude_mse", 1), ("intensity_mse", 2)):
        recipe = opened(with_modules, loss=loss).recipe
        scale = program.ModuleRefinement(recipe, TorchGroup()).first_state().scale
        assert scale == pytest.approx(mean**power, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"n_modes": 1}, {"probe": (1, 24, 24)}),
        ({"n_modes": 2, "n_obj_modes": 2}, {"probe": (2, 24, 24), "obj": (2,)}),
        ({"probe_fourier_crop": 4}, {"probe": (1, 16, 16)}),
    ],
    ids=["one mode", "modes of the object", "a cropped spectrum"],
)
def test_a_model_of_cdtools_is_refined(
    with_modules: Path, cluster: RunningCluster, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    pytest.importorskip("cdtools")
    given = options | {"obj_padding": 10}
    first, second = (compute(of_module(with_modules, f"{n}.cxi", "fancy:Fancy", given), cluster, n) for n in (1, 2))
    assert first == second
    with h5py.File(with_modules / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        for name, shape in shapes.items():
            assert file[f"entry_1/process_1/parameters/model.{name}"].shape[: len(shape)] == shape


@pytest.mark.parametrize(
    ("module", "parts", "said"),
    [
        ("own:wrong", {}, r"and \[8, 24, 24\] were counted"),
        ("own:build", {"stages": [{"epochs": 1, "lr_factors": {"probe": 2}}]}, "are image, beam. Write some of them"),
        ("own:none", {}, "the object of own:none is missing"),
        ("own:flat", {}, r"the probe of own:flat is of shape \[24, 24\]"),
        ("own:missing", {}, "Write a name that the module defines"),
    ],
)
def test_a_module_that_does_not_fit_is_told(
    with_modules: Path, cluster: RunningCluster, module: str, parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(HalotileError, match=said):
        compute(of_module(with_modules, "result.cxi", module, slots=1, **parts), cluster)
