"""Scans of few counts: no note makes the object worse, and the noise is not fitted."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import fourier_shift
from scipy.optimize import minimize
from typer.testing import CliRunner

from halotile.cli.main import app
from halotile.graphs.jobs.ptychography.job import Ptychography, ResultFile, ScanInput, StageOptions, result_rows
from halotile.graphs.jobs.ptychography.plan import photon_loss_of, recipe_of
from halotile.storage.scans.convert import write_scan
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.program import Refinement
from tests.graphs.scans import job, words

EPOCHS = 150
LEVELS = (0.05, 0.2, 1.0, 10.0, 100.0)


def best_error(image: NDArray[Any], places: NDArray[Any], known: SimulatedScan) -> float:
    """Least error of the object under the shift of its positions, a constant factor and a gradient of the phase, which no pattern tells."""
    edge = known.pattern // 2
    inside = tuple(slice(edge, n - edge) for n in known.image.shape)
    shift = (known.places - places).mean(0)
    moved = np.fft.ifft2(fourier_shift(np.fft.fft2(image), shift))[: known.image.shape[0], : known.image.shape[1]]
    expected, seen = known.image[inside], moved[inside]
    row, column = (np.linspace(-0.5, 0.5, n) for n in expected.shape)

    def error(gradient: Any) -> float:
        turned = seen * np.exp(-2j * np.pi * (gradient[0] * row[:, None] + gradient[1] * column))
        factor = np.vdot(turned, expected) / np.vdot(turned, turned)
        return float(np.linalg.norm(factor * turned - expected) / np.linalg.norm(expected))

    begin = min(itertools.product(np.linspace(-1, 1, 9), repeat=2), key=error)
    return float(minimize(error, begin, method="Nelder-Mead").fun)


@cache
def found(counts: float, **options: Any) -> tuple[float, bool]:
    """Error of the object of a job with these options for a scan of so many counts a pixel; True where it warns of the noise."""
    known = SimulatedScan(raster=(12, 12), pattern=32, step=3.0, photons=counts * 32**2, position_error=0.7, phase=2.0)
    path = mkdtemp()
    write_scan(f"{path}/scan.zarr", known.scan, known)
    job = Ptychography(
        input=ScanInput(path=f"{path}/scan.zarr"),
        output=ResultFile(path="result.cxi"),
        stages=(StageOptions(epochs=EPOCHS, lr=options.get("lr", "auto")), StageOptions(epochs=20, lr=0.005, batch=50)),
        held_out=options.get("held_out", "auto"),
    )
    recipe = replace(recipe_of(job), checkpoint=Path(path) / "state", curve=Path(path) / "curve.json")
    work = Refinement(recipe, TorchGroup())
    state = work.first_state()
    for epoch in range(recipe.epochs):
        work.whole_epoch(state, epoch)
    places = recipe.places + state.parameters["positions"].numpy()
    image = state.parameters["object"].numpy()
    noise = photon_loss_of(f"{path}/scan.zarr")
    free = 2 * (image.size + 32**2) / np.prod(recipe.patterns.shape)
    rows = result_rows({"loss": state.losses[-1]}, Path(), recipe.loss, noise, free)
    error = best_error(image, places[np.argsort(recipe.scan.numbers)], known)
    return error, any("the object follows noise" in text for _, text in rows)


@pytest.mark.thorough
@pytest.mark.parametrize("counts", LEVELS)
def test_the_usual_settings_and_what_a_warning_says_make_no_object_worse(counts: float) -> None:
    earlier, warns = found(counts, lr=0.02, held_out=0.0)  # as of old: one rate for all scans, and the last epoch
    assert earlier / found(counts)[0] > (1.05 if counts < 0.5 else 0.999)
    assert warns or counts > 0.2
    assert not warns or found(counts, lr=0.02, held_out=0.05)[0] < 1.05 * earlier


@pytest.mark.cluster
@pytest.mark.parametrize("loss", ["amplitude_mse", "poisson_nll"])
def test_a_run_that_fits_the_noise_is_warned_of(tmp_path: Path, loss: str) -> None:
    known = SimulatedScan(raster=(3, 3), pattern=32, step=14.0, photons=1000, phase=2.0)
    write_scan(str(tmp_path / "scan.zarr"), known.scan, known)
    stages = [{"epochs": 60, "lr": 0.05}]
    path = job(tmp_path, model={"loss": loss}, held_out=0, stages=stages)
    said = words(CliRunner().invoke(app, ["run", str(path), "--workers", "1"]))
    assert "below that of photons alone: the object follows noise. Write held_out: 0.05" in said


@pytest.mark.parametrize(("kept", "advises"), [(170, True), (169, False)])
def test_more_epochs_are_advised_where_the_last_one_is_kept(kept: int, advises: bool) -> None:
    last = {"iteration": 170, "loss": 0.2, "kept": kept, "loss_of_kept": 0.2}
    words = [text for label, text in result_rows(last, Path()) if label == "note"]
    assert any("more epochs may give a better object" in text for text in words) is advises


RATES: list[tuple[float | None, str, dict[str, Any], str, bool]] = [
    (100, "amplitude_mse", {}, "0.01", True),
    (100, "poisson_nll", {}, "0.02", True),
    (100, "poisson_nll", {"held_out": 0}, "0.005", False),  # small steps where no pixel is held out
    (1e5, "amplitude_mse", {}, "0.02", False),
    (1e5, "poisson_nll", {}, "0.005", False),
    (None, "amplitude_mse", {}, "0.02", False),
]


@pytest.mark.parametrize(("photons", "loss", "parts", "rate", "holds_out"), RATES)
def test_the_rate_and_the_pixels_held_out_follow_from_loss_and_counts(
    tmp_path: Path, photons: float | None, loss: str, parts: dict[str, Any], rate: str, holds_out: bool
) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=32, step=3.0, photons=photons)
    write_scan(str(tmp_path / "scan.zarr"), simulated.scan, simulated)
    places = {"input": {"path": str(tmp_path / "scan.zarr")}, "output": {"path": str(tmp_path / "result.cxi")}}
    whole = {"version": 1, "job": "ptychography", **places, "model": {"loss": loss}, **parts}
    (tmp_path / "job.yaml").write_text(json.dumps(whole))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml")])
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert f"150 epochs of adam, lr {rate}," in said
    assert ("5% of the pixels of each pattern are held out" in said) is holds_out
