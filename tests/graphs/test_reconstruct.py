"""Reconstructions by the command line, which whatever kills them go on to the same bits, and from Python in the words of a job file."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import halotile
from halotile.cli.arguments import Flags
from halotile.cli.config.loading import load_job
from halotile.cli.main import app
from halotile.errors import ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs import driver
from halotile.graphs.runs.driver import run as reconstruct
from halotile.tasks.operators.blur import Blur
from tests import faults
from tests.faults import flip_bit, members, until
from tests.graphs.solving import kernel
from tests.support import read_zarr, write_zarr

pytestmark = pytest.mark.cluster

ITERATIONS = 6
CONFIG = """\
version: 1
job: reconstruct
output: {path: clean.zarr, shard: 32, chunk: 16}
operators:
  - {name: blur, kernel: k0.npy, boundary: circular, data: y0.zarr, noise_sigma: 0.02}
  - {name: blur, kernel: k1.npy, boundary: reflect, data: y1.zarr, noise_sigma: 0.03}
prior: {name: pnp, denoiser: {name: function, import: "tests.slow:slow", options: {folder: FOLDER}, depth: 0}}
solver: {name: fista, iterations: 6, step: 2.5e-4}
reference: truth.zarr
tile: {block: 32}
run: {workers: 2, memory_per_worker: 3GiB}
"""


class Scene(faults.Scene):
    """A blurred image, twice, and a job that makes it sharp; nothing is written yet."""

    @classmethod
    def create(cls, folder: Path, place: Path | None = None) -> Scene:
        """The scene with its images in a folder."""
        scene, rng = cls(folder, place or folder), np.random.default_rng(3)
        y, x = np.mgrid[:128, :112]
        image = (np.sin(y / 5) * np.cos(x / 4) / 3 + 0.5).astype("float32")
        write_zarr(folder / "truth.zarr", image)
        for number, edge in enumerate((3, 7)):
            np.save(folder / f"k{number}.npy", kernel(edge))
            noise = 0.02 * rng.standard_normal(image.shape).astype("float32")
            write_zarr(folder / f"y{number}.zarr", image + noise)
        scene.write_config()
        scene.set_pace(0)
        return scene

    def write_config(self, **_: Any) -> None:
        """Write the job."""
        self.config.write_text(CONFIG.replace("FOLDER", json.dumps(str(self.folder))))

    def rows(self) -> list[dict[str, Any]]:
        """What the iterations so far came to, but for the time they took."""
        path = self.directory.iterations_path
        lines = path.read_text().splitlines() if path.exists() else []
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    def is_within(self, iteration: int, blocks: int) -> bool:
        """Whether the pass after an iteration has done some blocks, and not all."""
        sums = self.directory.state_path / "iterate" / f"sums.{iteration}"
        return sums.exists() and blocks <= len(sums.read_bytes().splitlines()) < 14

    def plan(self, **options: Any) -> Any:
        """The plan of the job."""
        return make_plan(load_job(self.config, flags=Flags(allow_import=True)), **options)


def call(*words: object) -> Result:
    """A command, in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene.create(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run without trouble."""
    scene = Scene.create(tmp_path_factory.mktemp("undisturbed"))
    outcome = reconstruct(scene.plan(), cluster=cluster)
    assert outcome.figures["iteration"] == ITERATIONS
    assert len(scene.rows()) == ITERATIONS
    return scene


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_is_killed_or_stopped_loses_no_iteration_and_no_bit(
    scene: Scene, undisturbed: Scene, sent: signal.Signals
) -> None:
    scene.set_pace(0.2)
    driver = scene.start()
    try:
        until(lambda: driver.poll() is not None or scene.is_within(2, 3), seconds=150)
        assert driver.poll() is None, driver.communicate()[0]
        scene.set_pace(2)  # so that it is still there when it has been looked at
        until(lambda: scene.status()["figures"].get("iteration") == 2)
        shown = call("status", scene.output)
        assert shown.stdout.startswith("running\n")
        assert re.search(rf"iteration +2 of {ITERATIONS}: misfit .*, change .*, PSNR .* dB", shown.stdout)
        figures = json.loads(call("status", scene.output, "--json").stdout)["figures"]
        assert (figures["iteration"], figures["iterations"]) == (2, ITERATIONS)
        refused = call("run", scene.config, "--allow-import")
        assert (refused.exit_code, "in use" in refused.stderr) == (2, True)
        driver.send_signal(sent)
        said, _ = driver.communicate(timeout=120)
        is_drained = re.search(r"stopped on SIGTERM in iteration \d of 6 with \d+ of 16 blocks done", said)
        assert (driver.returncode, bool(is_drained)) == ((75, True) if sent is signal.SIGTERM else (-sent, False))
        assert "Traceback" not in said
        state = "stopped" if sent is signal.SIGTERM else "interrupted"
        assert call("status", scene.output).stdout.startswith(f"{state}\n")
        planned = call("plan", scene.config, "--allow-import")
        assert "resumes the existing run" in planned.stdout, planned.stderr
        scene.set_pace(0)
        assert 0 < (iteration := len(scene.rows())) < ITERATIONS
        done = call("resume", scene.directory.path, "--allow-import", "--json")
    finally:
        for pid in members(driver.pid):
            os.kill(pid, signal.SIGKILL)
        driver.communicate()
    assert done.exit_code == 0, done.stderr
    assert f"iteration {iteration} of {ITERATIONS}:" not in done.stderr, "it was done already"
    assert f"iteration {iteration + 1} of {ITERATIONS}:" in done.stderr
    assert json.loads(done.stdout)["figures"]["iterations"] == ITERATIONS
    assert scene.files() == undisturbed.files()
    assert scene.rows() == undisturbed.rows()
    assert call("verify", scene.output).exit_code == 0
    assert not scene.directory.state_path.exists()


@pytest.mark.thorough
def test_a_run_ends_where_a_measurement_is_changed(scene: Scene, undisturbed: Scene, cluster: RunningCluster) -> None:
    chunk = scene.folder / "y1.zarr" / "c" / "0" / "0"
    written, times = chunk.read_bytes(), chunk.stat()

    def disturb(progress: Any) -> None:
        if progress.figures.get("iteration") == 2:
            chunk.write_bytes(b"other bytes" + written[11:])

    scene.set_pace(0.05)
    read = r"y1\.zarr was written to while the run read it in iteration [34] of 6\. .*--fresh"
    with pytest.raises(InputError, match=read):
        reconstruct(scene.plan(), cluster=cluster, observer=disturb)
    assert len(scene.rows()) in (2, 3)
    assert call("status", scene.output).stdout.startswith("failed\n")
    refused = call("run", scene.config, "--allow-import")
    assert (refused.exit_code, "chunks_changed" in refused.stderr) == (2, True)
    chunk.write_bytes(written)
    os.utime(chunk, ns=(times.st_atime_ns, times.st_mtime_ns))
    scene.set_pace(0)
    reconstruct(scene.plan(), cluster=cluster)
    assert scene.files() == undisturbed.files()
    assert scene.rows() == undisturbed.rows()


def test_damage_is_found_and_mended_by_iterating_again(undisturbed: Scene) -> None:
    scene, before = undisturbed, undisturbed.files()
    flip_bit(scene.output / "0" / "c" / "1" / "2", -50)
    found = call("verify", scene.output)
    assert (found.exit_code, "block 6: " in found.stdout) == (4, True)
    assert "does all passes again, from the start" in found.stderr
    mended = call("verify", scene.output, "--repair", "--allow-import")
    assert mended.exit_code == 0, mended.stderr
    assert "1 problem repaired" in mended.stdout
    assert "the run repeats 6 iterations from the start, because the state of the solver was removed" in mended.stderr
    assert scene.files() == before
    assert "nothing left to do" in call("run", scene.config, "--allow-import").stderr
    for changed, words in (
        ("solver.iterations=7", "finished after 6 iterations, and the state of its solver was removed"),
        ("solver.step=3.0e-4", "solver.step was 0.00025, is 0.0003"),
    ):
        another = call("run", scene.config, "--allow-import", "--set", changed)
        assert (another.exit_code, words in another.stderr) == (2, True)


def test_numbers_that_grow_end_the_run_with_its_last_image(scene: Scene) -> None:
    words = ["--set", "solver={name: gd, step: 1.0, iterations: 30}", "--set", "prior={name: none}"]
    failed = call("run", scene.config, *words)
    assert failed.exit_code == 1, failed.stderr
    told = r"error: iteration \d+: in 3 iterations the misfit grew from .* better than that of iteration 3 in (\S+)\. Write"
    said = re.search(told, failed.stderr)
    assert said, failed.stderr
    assert (Path(said[1]) / "zarr.json").exists()
    assert re.match(r"failed\n(?s:.*)the misfit grew", call("status", scene.output).stdout)


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorChoice:
    """A blurred image, named as a script in its folder would."""
    monkeypatch.chdir(tmp_path)
    np.save("y.npy", np.random.default_rng(0).random((64, 48), np.float32))
    np.save("psf.npy", kernel(3))
    return halotile.measurement("blur", "y.npy", kernel="psf.npy", noise_sigma=0.1)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, cluster: RunningCluster) -> list[Plan]:
    """The plans that are run, on the cluster that stands."""
    made: list[Plan] = []

    def run(plan: Plan, **options: Any) -> Any:
        made.append(plan)
        return reconstruct(plan, **options | {"cluster": cluster})

    monkeypatch.setattr(driver, "run", run)
    return made


def test_a_job_from_python_keeps_whole_paths_from_its_folder(tmp_path: Path, seen: OperatorChoice, plans: Any) -> None:
    psf = str(tmp_path / "psf.npy")
    assert (seen.data, seen.options) == (str(tmp_path / "y.npy"), {"kernel": psf})
    parts = [{"name": "blur", "kernel": "psf.npy"}, {"name": "downsample"}]
    assert halotile.measurement("composition", "y.npy", operators=parts).options["operators"][0]["kernel"] == psf
    solver = {"name": "pgd", "iterations": 1, "step": 0.01}
    outcome = halotile.reconstruct([seen], "x.zarr", solver=solver, reference="y.npy", start="y.npy")
    assert outcome.output == str(tmp_path / "x.zarr")
    kept = json.loads((tmp_path / "x.zarr.run/job.json").read_text())
    assert {kept["reference"], kept["start"], kept["operators"][0]["data"]} == {seen.data}
    assert plans[0].job.solver.iterations == 1


@pytest.mark.usefixtures("plans")
def test_a_lambda_is_a_prior(seen: OperatorChoice) -> None:
    strength = 0.5
    denoiser = {"name": "function", "call": lambda image: strength * image, "depth": 0}
    solver = {"name": "pgd", "iterations": 2, "step": 0.01}
    given: dict[str, Any] = {"prior": {"name": "pnp", "denoiser": denoiser}, "solver": solver}
    outcome, again = (halotile.reconstruct([seen], "x.zarr", **given) for _ in range(2))
    assert outcome.figures["iteration"] == 2
    assert again.resumed == again.total


@pytest.mark.usefixtures("seen", "plans")
def test_operators_that_give_0_for_every_image_are_told_before_the_first_iteration() -> None:
    dark = halotile.measurement("sum", "y.npy", operators=[{"name": "blur", "kernel": "psf.npy"}], weights=[0.0])
    with pytest.raises(ConfigError, match="the operators give 0 for every image"):
        halotile.reconstruct([dark], "x.zarr", solver={"name": "pgd", "iterations": 2})
    for solver in ({"name": "pgd", "iterations": 2, "step": 0.1}, {"name": "cg", "iterations": 2}):
        outcome = halotile.reconstruct([dark], f"{solver['name']}.zarr", solver=solver)
        assert not read_zarr(outcome.output).any()  # what it began with


@pytest.mark.usefixtures("plans")
def test_a_map_of_the_noise_weighs_pixels_and_its_holes_are_not_read(seen: OperatorChoice) -> None:
    y, sigma = np.load("y.npy"), np.where(np.arange(48) < 24, 0.1, 0.2) * np.ones((64, 1))
    hole = np.zeros(y.shape, bool)
    hole[20:30, 10:22] = True
    np.save("sigma.npy", np.where(hole, 0, sigma))
    np.save("weights.npy", np.where(hole, 0, 0.1 / sigma))
    np.save("holed.npy", np.where(hole, np.nan, y))
    np.save("weighted.npy", np.where(hole, 0, y * 0.1 / sigma))
    mapped = halotile.measurement("blur", "holed.npy", kernel="psf.npy", noise_sigma="sigma.npy")
    parts = [{"name": "blur", "kernel": "psf.npy"}, {"name": "mask", "mask": "weights.npy"}]
    masked = halotile.measurement("composition", "weighted.npy", operators=parts, noise_sigma=0.1)
    prior, solver = {"name": "tv", "weight": 5.0}, {"name": "fista", "iterations": 8}
    found, expected = (
        read_zarr(halotile.reconstruct([each], f"{name}.zarr", prior=prior, solver=solver).output)
        for name, each in (("a", mapped), ("b", masked))
    )
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    for words, choice, fidelity in (
        (r"noise_sigma: auto is for job: samples; write", replace(seen, noise_sigma="auto"), "l2"),
        (r"is a map, and fidelity poisson has none; write a number", mapped, "poisson"),
    ):
        with pytest.raises(ConfigError, match=words):
            halotile.reconstruct([choice], "c.zarr", fidelity=fidelity, start="y.npy")
    with pytest.raises(ConfigError, match="noise is simulated with one level; write a number"):
        halotile.simulate([replace(mapped, data="z.zarr")], "y.npy")


NO_LIST = "that is no list of measurements. Write [halotile.measurement("
WORDS: list[tuple[dict[str, Any], str]] = [
    ({"prior": {"name": "tv", "wieght": 3}}, "prior.wieght: unknown key; did you mean weight"),
    ({"prior": 3}, "prior is 3: that is neither a name nor a mapping"),
    ({"prior": "pnp"}, "prior pnp: write denoiser, which has no default. denoiser is a denoiser: {name: dncnn"),
    ({"prior": {"name": "pnp", "denoiser": "tv"}}, "denoiser is 'tv', without its options"),
    ({"prior": {"name": "pnp", "denoiser": {"size": 3}}}, "denoiser has no name"),
    ({"prior": {"name": "pnp", "denoiser": {"call": np.sort}}}, "a function needs depth"),
    ({"solver": "newton"}, "solver.name: no solver is called newton"),
    ({"fidelity": {"name": "l2", "background": 3.0}}, "fidelity.background: is for fidelity poisson"),
    ({"workers": 0}, "run.workers: 0 is too small"),
    ({"reference": "gone.npy"}, "gone.npy: nothing is there"),
    ({"shape": 3}, "shape: 3 is not auto or a list of whole numbers"),
    ({"measurements": "y.npy"}, f'measurements is "y.npy": {NO_LIST}'),
    ({"measurements": OperatorChoice(name="blur", data="y.npy")}, NO_LIST),
    ({"shape": (9, 9)}, "y.npy has shape [64, 48], but blur of an image of shape [9, 9] gives [9, 9]"),
]
MEASURED: list[tuple[Any, dict[str, Any], str]] = [
    ("blurr", {}, "blurr"),
    ("blur", {"kernle": 3}, "operator blur has no option 'kernle'"),
    ("blur", {}, "write kernel, which has no default"),
    ("blur", {"kernel": "gone.npy"}, "gone.npy: nothing is there"),
    ("blur", {"kernel": [[np.nan]]}, "kernel has 1 of 1 numbers that are NaN or infinite"),
    ("blur", {"kernel": [[1.0]], "data": np.ones((3, 3))}, "data is of type ndarray, and the work goes from disk"),
    (Blur(kernel=np.ones((1, 1))), {"boundary": "zero"}, "boundary is given beside an operator"),
    (3, {}, "operator is 3: that is neither a name nor an operator"),
    (torch.nn.Identity(), {}, "that is neither a name nor an operator, nor a physics of deepinv. Write a name"),
]


def test_words_that_cannot_be_are_refused(seen: OperatorChoice) -> None:
    calls: list[tuple[Any, dict[str, Any], str]] = [
        *((halotile.reconstruct, {"measurements": [seen], "output": "x.zarr"} | given, said) for given, said in WORDS),
        *((halotile.measurement, {"operator": op, "data": "y.zarr"} | options, said) for op, options, said in MEASURED),
        (halotile.simulate, {"measurements": seen, "reference": "y.npy"}, NO_LIST),
    ]
    for call, options, words in calls:
        with pytest.raises((ConfigError, InputError), match=re.escape(words)):
            call(**options)
    assert not Path("x.zarr").exists()


def test_a_physics_of_deepinv_is_an_operator(seen: OperatorChoice) -> None:
    mri = pytest.importorskip("deepinv.physics").MRI(img_size=(2, 8, 8))
    made = halotile.measurement(mri, "y.zarr", noise_sigma=0.1, reach=2)
    assert (made.name, made.options) == ("deepinv", {"physics": mri, "reach": 2})
    with pytest.raises(ConfigError, match="operator deepinv has no option 'raech'"):
        halotile.measurement(mri, "y.zarr", raech=2)
