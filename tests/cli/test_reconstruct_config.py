"""The configuration of a reconstruction or a simulation is read whole, every mistake is told with its line, and a plan refuses what cannot be meant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from halotile.cli.config.loading import load_job, load_saved_job
from halotile.errors import ConfigError, InputError
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.runs import driver
from tests.cli.engine import ask, check_lie, printed, refused, sets

NESTED = "operators=[{name: composition, data: y0.npy, operators: [{name: blur, kernel: k0.npy}, {name: downsample}]}]"


def load(path: Path, *overrides: str) -> Reconstruction:
    """The job of a configuration."""
    job = load_job(path, overrides)
    assert isinstance(job, Reconstruction)
    return job


def test_a_configuration_becomes_a_job_with_whole_paths(reconstruction: Path) -> None:
    job, folder = load(reconstruction), reconstruction.parent
    blur, mask = job.operators
    assert (blur.name, blur.data, blur.noise_sigma) == ("blur", str(folder / "y0.npy"), 0.03)
    assert blur.options == {"kernel": str(folder / "k0.npy"), "boundary": "circular"}
    assert (mask.name, mask.noise_sigma, mask.options) == ("mask", 1.0, {"mask": str(folder / "m.npy")})
    assert job.prior.options["denoiser"] == {"name": "gaussian", "sigma": 0.5}
    assert (job.solver.name, job.solver.iterations, job.solver.tol) == ("pgd", 4, 1e-4)
    truth = str(folder / "truth.npy")
    assert (job.start, job.reference, job.shape, job.exact) == (truth, truth, "auto", False)
    assert job.output.path == str(folder / "x.zarr")


def test_what_is_left_out_has_its_default_and_entries_can_be_set(reconstruction: Path) -> None:
    before = load(reconstruction).operators
    sets = ("operators[0].noise_sigma=0.5", "operators[1]={name: mask, mask: m.npy, data: y0.npy}")
    now = load(reconstruction, *sets, "prior.weight=0.2", "solver.name=gd")
    assert (now.operators[0].noise_sigma, now.operators[0].options) == (0.5, before[0].options)
    assert (now.operators[1].data, now.prior.options["weight"]) == (before[0].data, 0.2), "RED takes a weight"
    (choice,) = load(reconstruction, NESTED).operators
    blur = {"name": "blur", "kernel": str(reconstruction.parent / "k0.npy")}
    assert choice.options == {"operators": [blur, {"name": "downsample"}]}
    reconstruction.write_text(reconstruction.read_text().split("fidelity:")[0])
    job = load(reconstruction)
    assert ((job.prior.name, job.solver.name, job.fidelity.name), job.run.workers) == (("none", "pgd", "l2"), "auto")
    assert (job.start, job.reference, job.shape, job.exact) == (None, None, "auto", False)
    for name in ("k0.npy", "y0.npy", "m.npy"):
        path = reconstruction.with_name(name)
        path.rename(reconstruction.with_name("away"))
        with pytest.raises(InputError, match=rf"{name} does not exist"):  # alone, which is bad data
            load_job(reconstruction, ["start=null", "reference=null"])
        reconstruction.with_name("away").rename(path)


# What stands in the file, what is written instead, the line, and words of the message.
LIES = [
    ("job: reconstruct", "job: reconstrukt", 2, "did you mean reconstruct?"),
    ("job: reconstruct\n", "", 1, "job: missing; write `job: denoise` or `job: ptychography` or `job: reconstruct`"),
    ("shard: 64", "shard: 60", 3, "output.shard: 60 is no multiple of output.chunk 32"),
    ("kernel: k0.npy, ", "", 5, "operators[0].kernel: missing; write a path"),
    ("boundary: circular", "engine: dirct", 5, "operators[0].engine: \"dirct\" is not auto, direct or fft; did you"),
    ("boundary: circular", "factor: 1.5", 5, "operators[0].factor: 1.5 is not a whole number"),
    ("noise_sigma: 0.03", "noise_sigma: 0", 5, "operators[0].noise_sigma: 0 is too small; write more than 0"),
    ("kernel: k0.npy", "kernel: [[1, 2, 1]]", 5, "operators[0].kernel: [[1, 2, 1]] is not a path"),
    ("boundary: circular", "factor: 0", 5, "operators[0].factor: factor is 0: write a whole number of at least 1"),
    ("noise_sigma: 0.03", "noise_sigma: .inf", 5, "operators[0].noise_sigma: Infinity is not finite; write a number above"),
    ("noise_sigma: 0.03", "noise_sigma: 1.0e-300", 5, "operators[0].noise_sigma: 1e-300 counts by 1 / noise_sigma², which"),
    ("noise_sigma: 0.03", "noise_sigma: 1.0e+200", 5, "write a number from 1e-15 to 1e+15, and give the data in units"),
    ("name: mask, ", "", 6, "operators[1].name: missing; write one of blur, "),
    ("{name: mask, mask: m.npy, data: y1.npy}", "mask", 6, 'operators[1]: "mask" is not a mapping; write `- {name'),
    ("{name: l2}", "{name: l2, background: 3}", 7, "fidelity.background: is for fidelity poisson, and the name is l2"),
    ("{name: l2}", "{name: poisson, background: -1}", 7, "fidelity.background: background is -1.0: write 0 or more counts"),
    ("denoiser: {name: gaussian, sigma: 0.5}, ", "", 8, "prior.denoiser: missing; write a denoiser: {name: dncnn, weights"),
    ("{name: gaussian, sigma: 0.5}", "gaussian", 8, 'prior.denoiser: "gaussian" is not a mapping; write `{name: gaussian, ...}`'),
    ("sigma: 0.5}", "sigma: -1}", 8, "prior.denoiser.sigma: sigma is -1"),
    ("name: pnp", "name: tv", 8, "prior.denoiser: is for prior pnp, and the name is tv"),
    ("{name: mask, mask: m.npy,", "{name: sum, operators: [{name: mask, mask: m.npy}], weights: [1, 2],", 6, "operators[1].weights: weights has length 2, and there are 1 operators: write one for each"),
    ("{name: mask, mask: m.npy,", "{name: composition, operators: [{name: sum, operators: [], weights: [1]}],", 6, "operators[1].operators[0].weights: weights has length 1, and there are 0 operators"),
    ("{name: mask, mask: m.npy,", "{name: sum, operators: [{name: mask, mask: m.npy}], weights: [.nan],", 6, "operators[1].weights: weights is [nan]: NaN and infinity are not allowed. Write"),
    ("weight: 1.0", "weight: 2.0", 8, "prior.weight: a denoiser in the place of a prox has no weight"),
    ("weight: 1.0", "sigma: 0", 8, "prior.sigma: sigma is 0.0: it must be a number above 0"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, weight: 0}", 8, "prior.weight: weight is 0.0: it"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, weight: .inf}", 8, "prior.weight: weight is inf:"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, iterations: 0}", 8, "prior.iterations: iterations is 0: write"),
    ("name: pgd", "name: lanczos", 9, "solver.name: no solver is called lanczos; write one of admm, cg, fista, gd, osem, pgd, sgd, svrg"),
    ("name: pgd", "name: cg", 8, "prior.name: pnp with solver cg, which knows no prior"),
    ("step: auto", "step: -0.5", 9, "solver.step: -0.5 is too small; write more than 0"),
    ("step: auto", "step: .inf", 9, "solver.step: Infinity is not finite; write a number above 0"),
    ("tol: 1.0e-4", "tol: 2", 9, "solver.tol: 2 would end the solver at once: it is relative to the norm of the image; write less"),
    ("checkpoint_every: 1", "checkpoint_every: 5", 9, "solver.checkpoint_every: 5 is too large: so many iterations reach far beyond each block, and cost more computation than they save; write at most 4"),
    ("checkpoint_every: 1", "checkpoint_every: 3", 9, "solver.iterations: 4 is no multiple of solver.checkpoint_every 3: the image of the last one would not be stored; write 6"),
    ("pgd, iterations: 4, step: auto, tol: 1.0e-4, checkpoint_every: 1", "fista, iterations: 4, checkpoint_every: 2", 9, "solver.checkpoint_every: 2 with solver fista, which has to know more of an iteration than its image; write 1, or solver.name: gd or pgd"),
    ("depth: auto", "depth: 1", 10, "tile.depth: 1 is less than gaussian's receptive field 2: seams would show"),
    ("axes: auto", "axes: zyx", 10, 'tile.axes: "zyx", and operators work on planes; write yx'),
    ("workers: 2", "on_bad_block: quarantine", 11, "run.on_bad_block: quarantine, and an iteration needs every block"),
    ("workers: 2", "on_nan: fail", 11, "run.on_nan: fail, and a solver stops by itself"),
    ("shape: auto", "shape: [96]", 12, "shape: [96] is no image; write its length along each axis"),
    ("reference: truth.npy", 'reference: ""', 14, "reference: is empty; write a path"),
    ("exact: false", "iterations: 3", 15, "iterations: unknown key; did you mean solver.iterations?"),
    ("exact: false", "input: {path: a.npy}", 15, "input: unknown key; "),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=[lie[1].strip() or lie[0].strip() for lie in LIES])
def test_a_lie_is_told_with_its_line(reconstruction: Path, lie: tuple[str, str, int, str]) -> None:
    check_lie(reconstruction, *lie)


DISAGREE = [
    ("solver={name: cg, step: 0.1};prior={name: none}", "--set solver: solver.step: 0.1, and cg finds its own"),
    ("solver={name: cg};prior={name: none};fidelity={name: poisson}", "poisson with solver cg, which works on l2 alone"),
    ("fidelity={name: poisson};start=null", "poisson divides by what the image gives, and zeros give nothing"),
    ("prior={name: none, weight: 2}", "prior.weight: is for prior l1, pnp or tv, and the name is none; write one of these names"),
    ("prior={name: tv, iterations: 9};tile.depth=8", "tile.depth: 8 is less than accelerated tv's receptive field 9"),
    ("prior={name: l1, sigma: 1}", "prior.sigma: is for prior pnp, and the name is l1"),
    ("prior={name: pnp, denoiser: {name: dncnn, weights: gone.safetensors}}", "gone.safetensors does not exist"),
    ("operators[0].engine=fft;exact=true", "operators[0].engine: fft with exact: true"),
    ("operators=[]", "--set operators: is empty; write what was measured"),
    ("operators={name: blur}", "is not a list; write entries below it, such as `- {name: ..., data: ...}`"),
    ("operators[0].noise_sigam=1", "--set operators[0].noise_sigam: unknown key; did you mean noise_sigma?"),
    ("operators[1].mask=gone.npy", "--set operators[1].mask: "),
    ("operators.0.noise_sigma=1", "operators is a list: write operators[0].noise_sigma."),
    ("operators.noise_sigma=1", "operators is a list: write which of its entries, such as operators[0].noise_sigma."),
    ("operators[2].noise_sigma=1", "operators has 2 entries, the last of them operators[1]: there is no entry 2."),
    ("solver[0]=3", "not a list: it has no entry 0. Set solver itself."),
    ("operators[0].data.x=3", 'operators[0].data is "y0.npy", not a section: nothing can be set inside it.'),
    ("operators[a].data=y.zarr", "not a key and a value. Write it as --set tile.size=256, or for an entry of a list"),
    (NESTED.replace("kernel: k0.npy", "krenel: k0.npy"), "operators[0].operators[0].krenel: unknown key; did you mean kernel?"),
    (NESTED.replace("k0.npy", "gone.npy"), "gone.npy does not exist"),
    (NESTED.replace("downsample", "downsmaple"), "operators[0].operators[1].name: no operator is called downsmaple"),
    (NESTED.replace("{name: downsample}", "3"), "operators[0].operators[1]: 3 is not a mapping"),
    (NESTED.replace("downsample}", "downsample, data: y0.npy}"), "operators[0].operators[1].data: unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), DISAGREE)
def test_parts_that_disagree_and_odd_values_are_told(reconstruction: Path, overrides: str, words: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        load_job(reconstruction, overrides.split(";"))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 or "krenel" in overrides


def test_every_mistake_is_told_at_once_in_the_order_of_the_file(reconstruction: Path) -> None:
    text = reconstruction.read_text()
    for was, lie in [
        ("kernel: k0.npy", "kernle: k9.npy"),
        ("noise_sigma: 0.03", "noise_sigma: -1"),
        ("mask: m.npy", "mask: gone.npy"),
        ("name: gaussian, sigma: 0.5", "name: tv, strength: 0, iterations: x"),
        ("name: pgd, iterations: 4", "name: pg, iterations: 4.5"),
        ("reference: truth.npy", "reference: gone.npy"),
    ]:
        text = text.replace(was, lie)
    reconstruction.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(reconstruction)
    head, *lines = str(caught.value).splitlines()
    told = [line.removeprefix(f"{reconstruction}:").split(": ")[:2] for line in lines]
    assert [" ".join(each) for each in told] == [
        "5 operators[0].kernle", "5 operators[0].noise_sigma", "6 operators[1].mask", "8 prior.denoiser.iterations",
        "8 prior.denoiser.strength", "9 solver.name", "9 solver.iterations", "14 reference",
    ]  # fmt: skip
    assert head == f"8 problems in {reconstruction}; nothing was started"


def test_a_saved_job_is_the_job(reconstruction: Path) -> None:
    from halotile.graphs.plans.plan import make_plan

    job = load(reconstruction)
    plan = make_plan(job)
    for name, tree in (("job", plan.documents.asked), ("config", plan.documents.resolved)):
        saved = reconstruction.with_name(f"{name}.json")
        saved.write_text(json.dumps(tree))
        again = load_saved_job(saved)
        assert isinstance(again, Reconstruction)
        assert make_plan(again).fingerprint == plan.fingerprint
    assert load_saved_job(reconstruction.with_name("job.json")) == job


@pytest.mark.thorough
def test_an_error_is_the_last_thing_on_the_screen_where_deepinv_is_loaded(reconstruction: Path) -> None:
    pytest.importorskip("deepinv")
    wrong = "operators=[{name: deepinv, physics: Blurr, data: y0.npy}]"
    command = [sys.executable, "-m", "halotile", "plan", str(reconstruction), "--set", wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: operators[0]: physics is 'Blurr'")
    assert len(done.stderr.splitlines()) == 1, done.stderr


REFLECT = ("operators[0].boundary=reflect",)


REFUSED = [
    ("k0", np.array([[0.5, np.nan]]), REFLECT, "operators[0]: kernel has 1 of 2 numbers that are NaN or infinite. Write finite ones."),
    ("k0", np.zeros((3, 3)), REFLECT, "operators[0]: kernel is 0 everywhere: the measurement would be empty. Write another kernel."),
    ("k0", np.ones(5), REFLECT, "operators[0]: kernel has shape (5,): write an array of rows and columns"),
    ("k0", np.ones((2, 2, 3, 3)), REFLECT, "operators[0]: kernel has shape (2, 2, 3, 3): write an array of rows and columns"),
    ("k0", np.ones((3, 3), complex), REFLECT, "operators[0]: kernel is complex128: a blur adds light. Write real numbers."),
    ("y0", np.ones((50, 80), "f4"), (), "y0.npy has shape [50, 80], but blur of an image of shape [96, 80] gives [96, 80]. Write the true shape"),
    ("y0", np.ones(80, "f4"), (), "y0.npy: the array's shape is (80,): an image has at least the axes y and x"),
    ("truth", np.ones((50, 80), "f4"), (), "truth.npy has shape [50, 80], and the image has [96, 80]. Give one of that shape."),
    ("", None, ("operators[1]={name: composition, operators: [], data: y1.npy}",), "operators[1]: a composition without operators"),
    *(("", None, ("operators[0].data=measured", f"output.path={path}"), words) for path, words in (
        ("measured", "measured: that is the input. Write another path"), ("no/x.zarr", "there is no folder"),
        ("measured/x.zarr", "measured is a file, so nothing can be made in it"))),
    ("", None, ("solver.checkpoint_every=2", "fuse=false"), "solver.checkpoint_every: 2 with fuse: false, and a gradient that is stored"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pixels", "settings", "words"), REFUSED)
def test_a_plan_refuses_what_cannot_be_meant(
    reconstruction: Path, name: str, pixels: Any, settings: tuple[str, ...], words: str
) -> None:
    if name:
        np.save(reconstruction.with_name(f"{name}.npy"), pixels)
    reconstruction.with_name("measured").write_bytes(reconstruction.with_name("y0.npy").read_bytes())
    # About files, not about the job.
    code = 4 if words.startswith(("y0.npy: the array's", "truth.npy has")) else 2
    assert words in refused("plan", reconstruction, *sets(*settings), code=code)


@pytest.mark.parametrize("solver", ["pgd", "pgd, step: 0.1", "cg"])
def test_an_operator_that_sees_nothing_is_refused(reconstruction: Path, solver: str) -> None:
    np.save(reconstruction.with_name("zeros.npy"), np.zeros((96, 80)))
    for operator, words in {
        "name: mask, mask: zeros.npy": "operators[0]: the mask is 0 everywhere: nothing of the image would be measured",
        "name: shift, shift: [500, 0]": "operators[0]: shift is (500, 0) and the image is 96 pixels long: only the zeros",
    }.items():
        settings = (f"operators=[{{{operator}, data: y0.npy}}]", f"solver={{name: {solver}}}", "prior={name: none}")
        assert words in refused("plan", reconstruction, *sets(*settings))


DOWN = ("operators=[{name: downsample, factor: 2, data: y0.npy}]", "start=null")
TAKEN = "shape is auto: the image is taken to be 192 × 160, 4 times the pixels"
NOTED: list[tuple[Any, tuple[str, ...], str, bool]] = [
    (np.full((3, 3), 2 / 9), (), "the kernel sums to 2: the image comes out 0.5 times as bright as the measurement", True),
    (np.full((3, 3), -1 / 9), (), "the kernel sums to -1: such an operator does not only spread light", True),
    (np.full((4, 3), 1 / 12), (), "the kernel is 4 × 3: an even edge has no middle pixel, and the image comes out half", True),
    (np.full((3, 3), 1 / 9), (*DOWN, "shape=auto", "reference=null"), TAKEN, True),
    (np.full((3, 3), 1 / 9), (*DOWN, "shape=[192, 160]", "reference=null"), TAKEN, False),
    (np.full((3, 3), 1 / 9), (*DOWN, "shape=auto", "reference=big.npy"), TAKEN, False),
    (np.full((3, 3), 1 / 9), ("solver.checkpoint_every=4", "prior.denoiser.sigma=3"), "of the gradient more than once: so many iterations reach far", True),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "settings", "note", "noted"), NOTED)
def test_what_was_hardly_meant_is_noted(
    reconstruction: Path, kernel: Any, settings: tuple[str, ...], note: str, noted: bool
) -> None:
    np.save(reconstruction.with_name("k0.npy"), kernel)
    np.save(reconstruction.with_name("big.npy"), np.ones((192, 160), np.float32))
    notes = json.loads(printed("plan", reconstruction, "--json", *sets(*settings)))["notes"]
    assert any(note in said for said in notes) == noted


def test_a_plan_tells_of_several_iterations_in_a_pass(reconstruction: Path) -> None:
    words = ("plan", reconstruction, "--set", "solver.checkpoint_every=2")
    assert " for each of 2 in one pass, which computes " in printed(*words)
    figures = json.loads(printed(*words, "--json"))
    assert (figures["per_pass"], figures["total_passes"]) == (2, figures["passes_before"] + 2 + 1)
    assert "direct convolutions" in figures["form"]


def test_what_sees_the_whole_image_needs_every_iteration_stored(tmp_path: Path) -> None:
    pytest.importorskip("deepinv")
    for name in ("mask", "y"):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 20, 16), np.float32))
    (tmp_path / "job.yaml").write_text(
        "version: 1\njob: reconstruct\noutput: {path: x.zarr}\noperators:\n"
        "  - {name: deepinv, physics: MRI, options: {mask: mask.npy}, data: y.npy}\n"
        "solver: {name: pgd, step: 0.5, iterations: 4, checkpoint_every: 2}\n"
    )
    text = refused("plan", tmp_path / "job.yaml")
    assert "solver.checkpoint_every is 2, and operators[0] (deepinv) sees the whole image" in text


SIMULATION = """\
version: 1
job: reconstruct
output: {path: x.zarr}
operators:
  - {name: blur, kernel: psf.npy, data: y0.zarr, noise_sigma: 0.02}
  - {name: crop, origin: [3, 5], size: [20, 30], data: y1.zarr, noise_sigma: 0.05}
start: y0.zarr
reference: truth.npy
"""


@pytest.fixture
def simulation(tmp_path: Path) -> Path:
    """A job whose measurements are not there yet; it begins with one of them."""
    np.save(tmp_path / "truth.npy", np.random.default_rng(0).random((64, 48), np.float32))
    np.save(tmp_path / "psf.npy", np.full((3, 3), 1 / 9))
    path = tmp_path / "job.yaml"
    path.write_text(SIMULATION)
    return path


@pytest.mark.cluster
def test_measurements_make_a_job(simulation: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_the_cluster(*given: Any, **options: Any) -> Any:
        return run(*given, **options, cluster=cluster)

    run = driver.run
    monkeypatch.setattr(driver, "run", on_the_cluster)
    assert ask("validate", simulation).exit_code == 4
    told = json.loads(printed("simulate", simulation, "--noise", "poisson", "--gain", "0.01", "--json"))
    assert (told["output"], told["done"]) == (str(simulation.parent / "y0.zarr"), told["total"])
    arrays = [zarr.open_array(simulation.parent / f"y{number}.zarr", mode="r") for number in range(2)]
    assert [array.shape for array in arrays] == [(64, 48), (20, 30)]
    noise = json.loads((simulation.parent / "y0.zarr.run" / "job.json").read_text())["noise"]
    assert (noise["name"], noise["gain"]) == ("poisson", 0.01)
    assert ask("validate", simulation).exit_code == 0
    message = refused("simulate", simulation)
    assert "y0.zarr.run belongs to a different job:" in message
    assert 'noise.name was "poisson", is "gaussian"' in message
    assert "--overwrite" in message
    again = ask("simulate", simulation, "--overwrite", "--quiet")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")


NOT_SIMULATED = [
    (["--noise", "gausian"], 2, "noise is 'gausian': there is none of that name; did you mean gaussian?"),
    (["--gain", "much"], 2, "'much' is not a number; write one such as 0.5."),
    (["--seed", "1.5"], 2, "'1.5' is not a whole number; write one such as 4."),
    (["--set", "reference=gone.npy"], 4, "gone.npy does not exist"),
    (["--set", "operators[0].kernel=gone.npy"], 4, "gone.npy does not exist"),
    (["--set", "run.memory_per_worker=100MiB"], 5, "run.memory_per_worker is 100MiB; one block of"),
    (["--set", "job=denoise"], 2, "job"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), NOT_SIMULATED)
def test_what_cannot_be_simulated_is_refused(simulation: Path, words: list[str], code: int, said: str) -> None:
    before = sorted(simulation.parent.iterdir())
    assert said in refused("simulate", simulation, *words, code=code)
    assert sorted(simulation.parent.iterdir()) == before
