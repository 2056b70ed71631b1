"""Ptychography with a user's own torch module: the same bits for any number of workers, a real model of CDTools, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.storage.scans.convert import write_scan
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography import program
from halotile.tasks.ptychography.opened import SimulatedScan

pytestmark = [pytest.mark.cluster]

ROOT = Path(__file__).parents[2]
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
FANCY = re.search(r"```text\n(# fancy\.py\n.*?)```", (ROOT / "docs/pattern-models.md").read_text(), re.DOTALL)
STAGES = [{"epochs": 20, "lr": 0.03, "batch": 8}]


@pytest.fixture(scope="module")
def simulated() -> SimulatedScan:
    """A far field of a small raster, on whole pixels."""
    return SimulatedScan(raster=(6, 6), pattern=24, step=3.0)


@pytest.fixture
def folder(tmp_path: Path, simulated: SimulatedScan) -> Path:
    """A folder with that scan and the modules."""
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    (tmp_path / "own.py").write_text(OWN)
    assert FANCY
    (tmp_path / "fancy.py").write_text(FANCY[1])
    return tmp_path


def job(folder: Path, name: str, module: str, **parts: Any) -> str:
    """Write a job with a module of one's own."""
    model = {"import": module, **parts.pop("model", {})}
    content = {
        "version": 1,
        "job": "ptychography",
        "stages": STAGES,
        "cluster": {"dashboard": False},
        "model": model,
        **parts,
    }
    content |= {"input": {"path": str(folder / "scan.zarr")}, "output": {"path": str(folder / name)}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))
    return str(path)


def run(path: str, *options: str) -> Any:
    """Run a job in this process."""
    return CliRunner().invoke(app, ["run", path, "--quiet", "--allow-import", *options])


def test_a_module_is_refined_with_the_same_bits_for_any_number_of_workers(folder: Path) -> None:
    results = []
    for workers in (1, 2, 3):
        stages = [*STAGES, {"solver": "lbfgs", "epochs": 3}]
        done = run(
            job(folder, f"{workers}.cxi", "own:build", stages=stages, model={"options": {"scale": 0.9}}),
            "--workers",
            str(workers),
        )
        assert done.exit_code == 0, done.output
        results.append((folder / f"{workers}.cxi").read_bytes())
    assert all(result == results[0] for result in results)
    with h5py.File(folder / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        parameters = file["entry_1/process_1/parameters"]
        assert np.array_equal(parameters["image"][:], file["object"][:])
        assert sorted(parameters) == ["beam", "image"]
    assert (folder / "1.cxi.run" / "examples.png").exists()
    assert CliRunner().invoke(app, ["export", str(folder / "1.cxi"), str(folder / "sheet.png")]).exit_code == 0


def test_whether_a_module_is_spoilt_goes_by_the_light_that_its_patterns_have(
    folder: Path, simulated: SimulatedScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "built_module", lambda recipe: torch.nn.Linear(2, 2))
    for loss, power in (("amplitude_mse", 1), ("intensity_mse", 2)):
        recipe = halotile.ptychography.open(folder / "scan.zarr", loss=loss).recipe
        scale = program.ModuleRefinement(recipe, TorchGroup()).first_state().scale
        assert scale == pytest.approx(simulated.patterns(np.arange(36)).mean() ** power, rel=1e-4)


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
    folder: Path, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    pytest.importorskip("cdtools")
    options = options | {"obj_padding": 10}
    for workers in ("1", "2"):
        done = run(job(folder, f"{workers}.cxi", "fancy:Fancy", model={"options": options}), "--workers", workers)
        assert done.exit_code == 0, done.output
    assert (folder / "1.cxi").read_bytes() == (folder / "2.cxi").read_bytes()
    with h5py.File(folder / "1.cxi") as file:
        assert file["loss"][-1] < 0.2 * file["loss"][0]
        for name, shape in shapes.items():
            assert file[f"entry_1/process_1/parameters/model.{name}"].shape[: len(shape)] == shape


@pytest.mark.parametrize(
    ("module", "parts", "said"),
    [
        ("own:wrong", {}, "and [8, 24, 24] were counted"),
        ("own:build", {"stages": [{"epochs": 1, "lr_factors": {"probe": 2}}]}, "are image, beam. Write some of them"),
        ("own:none", {}, "the object of own:none is missing"),
        ("own:flat", {}, "the probe of own:flat is of shape [24, 24]"),
        ("own:missing", {}, "Write a name that the module defines"),
    ],
)
def test_a_module_that_does_not_fit_is_told(folder: Path, module: str, parts: dict[str, Any], said: str) -> None:
    done = run(job(folder, "result.cxi", module, slots=1, **parts), "--workers", "1")
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": {"modes": 2}}, "write it in options"),
        ({"stages": [{"solver": "rpie", "epochs": 1}]}, "write adam"),
        ({"stages": [{"epochs": 1, "smoothness": 0.1}]}, "smoothness: is for the model of halotile; leave it out"),
        ({"resolution": True}, "is not there for a model of your own"),
    ],
)
def test_what_a_module_has_no_use_for_is_refused(folder: Path, parts: dict[str, Any], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", job(folder, "result.cxi", "own:build", **parts), "--allow-import"])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_code_of_ones_own_runs_only_where_it_is_allowed(folder: Path) -> None:
    path = job(folder, "result.cxi", "own:build")
    done = CliRunner().invoke(app, ["plan", path])
    assert done.exit_code == 2
    assert "add --allow-import" in done.output
    allowed = CliRunner().invoke(app, ["plan", path, "--allow-import"])
    assert allowed.exit_code == 0, allowed.output
