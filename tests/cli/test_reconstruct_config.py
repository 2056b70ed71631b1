"""The configuration of a reconstruction is read whole, and every mistake in it is told with its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halotile.cli.config.loading import load_job, load_saved_job
from halotile.errors import ConfigError, InputError
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from tests.cli.engine import ask, refused, without_loading


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


def test_what_is_left_out_has_its_default(reconstruction: Path) -> None:
    head, tail = reconstruction.read_text().split("fidelity:")
    assert tail
    reconstruction.write_text(head)
    job = load(reconstruction)
    names = (job.prior.name, job.solver.name, job.fidelity.name)
    assert (names, job.run.workers) == (("none", "pgd", "l2"), "auto")
    assert (job.start, job.reference, job.shape, job.exact) == (None, None, "auto", False)


# What stands in the file, what is written instead, the line, and words of the message.
LIES = [
    ("job: reconstruct", "job: reconstrukt", 2, "did you mean reconstruct?"),
    ("job: reconstruct\n", "", 1, "job: missing; write `job: denoise` or `job: ptychography` or `job: reconstruct`"),
    ("operators:", "opreators:", 4, "opreators: unknown key; did you mean operators?"),
    ("output: {path: x.zarr", "output: {pth: x.zarr", 3, "output.pth: unknown key; did you mean path?"),
    ("shard: 64", "shard: 60", 3, "output.shard: 60 is no multiple of output.chunk 32"),
    ("kernel: k0.npy", "kernle: k0.npy", 5, "operators[0].kernle: unknown key; did you mean kernel?"),
    ("kernel: k0.npy, ", "", 5, "operators[0].kernel: missing; write a path"),
    ("kernel: k0.npy", "kernel: 3", 5, "operators[0].kernel: 3 is not a path"),
    ("data: y0.npy, ", "", 5, "operators[0].data: missing; write a path"),
    ("data: y0.npy", 'data: ""', 5, "operators[0].data: is empty; write a path"),
    ("boundary: circular", "boundary: round", 5, "operators[0].boundary: boundary is 'round': write one of"),
    ("boundary: circular", "engine: dirct", 5, "operators[0].engine: \"dirct\" is not auto, direct or fft; did you"),
    ("boundary: circular", "factor: 1.5", 5, "operators[0].factor: 1.5 is not a whole number"),
    ("noise_sigma: 0.03", "noise_sigma: 0", 5, "operators[0].noise_sigma: 0 is too small; write more than 0"),
    ("kernel: k0.npy", "kernel: [[1, 2, 1]]", 5, "operators[0].kernel: [[1, 2, 1]] is not a path"),
    ("boundary: circular", "factor: 0", 5, "operators[0].factor: factor is 0: write a whole number of at least 1"),
    ("noise_sigma: 0.03", "noise_sigma: -0.1", 5, "operators[0].noise_sigma: -0.1 is too small; write more than 0"),
    ("noise_sigma: 0.03", "noise_sigma: .inf", 5, "operators[0].noise_sigma: Infinity is not finite; write a number above"),
    ("noise_sigma: 0.03", "noise_sigma: .nan", 5, "operators[0].noise_sigma: NaN is not finite; write a number above 0"),
    ("noise_sigma: 0.03", "noise_sigma: 1.0e-300", 5, "operators[0].noise_sigma: 1e-300 counts by 1 / noise_sigma², which"),
    ("noise_sigma: 0.03", "noise_sigma: 1.0e+200", 5, "write a number from 1e-15 to 1e+15, and give the data in units"),
    ("noise_sigma: 0.03", "noise_sigam: 1", 5, "operators[0].noise_sigam: unknown key; did you mean noise_sigma?"),
    ("name: mask, ", "", 6, "operators[1].name: missing; write one of blur, "),
    ("name: mask", "name: masc", 6, "operators[1].name: no operator is called masc; did you mean mask?"),
    ("name: mask", "name: 7", 6, "operators[1].name: 7 is not text; write one of blur, "),
    ("{name: mask, mask: m.npy, data: y1.npy}", "mask", 6, 'operators[1]: "mask" is not a mapping; write `- {name'),
    ("{name: l2}", "{name: l22}", 7, "fidelity.name: no fidelity is called l22; did you mean l2?"),
    ("{name: l2}", "{name: l2, background: 3}", 7, "fidelity.background: is for fidelity poisson, and the name is l2"),
    ("{name: l2}", "{name: poisson, background: -1}", 7, "fidelity.background: background is -1.0: write 0 or more counts"),
    ("name: pnp", "name: pnb", 8, "prior.name: no prior is called pnb; did you mean pnp?"),
    ("denoiser: {name: gaussian, sigma: 0.5}, ", "", 8, "prior.denoiser: missing; write a denoiser: {name: dncnn, weights"),
    ("{name: gaussian, sigma: 0.5}", "gaussian", 8, 'prior.denoiser: "gaussian" is not a mapping; write `{name: gaussian, ...}`'),
    ("name: gaussian", "name: gausian", 8, "prior.denoiser.name: no denoiser is called gausian; did you mean"),
    ("sigma: 0.5}", "sigmaa: 0.5}", 8, "prior.denoiser.sigmaa: unknown key; did you mean sigma?"),
    ("sigma: 0.5}", "sigma: -1}", 8, "prior.denoiser.sigma: sigma is -1"),
    ("name: pnp", "name: tv", 8, "prior.denoiser: is for prior pnp, and the name is tv"),
    ("{name: mask, mask: m.npy,", "{name: sum, operators: [{name: mask, mask: m.npy}], weights: [1, 2],", 6, "operators[1].weights: weights has length 2, and there are 1 operators: write one for each"),
    ("{name: mask, mask: m.npy,", "{name: composition, operators: [{name: sum, operators: [], weights: [1]}],", 6, "operators[1].operators[0].weights: weights has length 1, and there are 0 operators"),
    ("{name: mask, mask: m.npy,", "{name: sum, operators: [{name: mask, mask: m.npy}], weights: [.nan],", 6, "operators[1].weights: weights is [nan]: NaN and infinity are not allowed. Write"),
    ("weight: 1.0", "weight: 2.0", 8, "prior.weight: a denoiser in the place of a prox has no weight"),
    ("weight: 1.0", "wieght: 2.0", 8, "prior.wieght: unknown key; did you mean weight?"),
    ("weight: 1.0", "sigma: 0", 8, "prior.sigma: sigma is 0.0: it must be a number above 0"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, weight: 0}", 8, "prior.weight: weight is 0.0: it"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, weight: .inf}", 8, "prior.weight: weight is inf:"),
    ("{name: pnp, denoiser: {name: gaussian, sigma: 0.5}, weight: 1.0}", "{name: tv, iterations: 0}", 8, "prior.iterations: iterations is 0: write"),
    ("name: pgd", "name: pdg", 9, "solver.name: no solver is called pdg; did you mean pgd?"),
    ("name: pgd", "name: lanczos", 9, "solver.name: no solver is called lanczos; write one of admm, cg, fista, gd, osem, pgd, sgd, svrg"),
    ("name: pgd", "name: cg", 8, "prior.name: pnp with solver cg, which knows no prior"),
    ("iterations: 4", "iterations: four", 9, 'solver.iterations: "four" is not a whole number'),
    ("chunk: 32", "chunk: 0", 3, "output.chunk: 0 is too small; write at least 1"),
    ("iterations: 4", "iterations: 0", 9, "solver.iterations: 0 is too small; write at least 1"),
    ("step: auto", "step: -0.5", 9, "solver.step: -0.5 is too small; write more than 0"),
    ("step: auto", "step: fast", 9, 'solver.step: "fast" is not auto or a number'),
    ("step: auto", "step: .inf", 9, "solver.step: Infinity is not finite; write a number above 0"),
    ("tol: 1.0e-4", "tol: 2", 9, "solver.tol: 2 would end the solver at once: it is a part of the image's length; write less"),
    ("tol: 1.0e-4", "tol: -1", 9, "solver.tol: -1 is too small"),
    ("checkpoint_every: 1", "checkpoint_every: 0", 9, "solver.checkpoint_every: 0 is too small; write at least 1"),
    ("checkpoint_every: 1", "checkpoint_every: 5", 9, "solver.checkpoint_every: 5 is too large: so many iterations look far beside each block, and compute more than they save; write at most 4"),
    ("checkpoint_every: 1", "checkpoint_every: 3", 9, "solver.iterations: 4 is no multiple of solver.checkpoint_every 3: the image of the last one would not be stored; write 6"),
    ("pgd, iterations: 4, step: auto, tol: 1.0e-4, checkpoint_every: 1", "fista, iterations: 4, checkpoint_every: 2", 9, "solver.checkpoint_every: 2 with solver fista, which has to know more of an iteration than its image; write 1, or solver.name: gd or pgd"),
    ("depth: auto", "depth: 1", 10, "tile.depth: 1 is less than gaussian's receptive field 2: seams would show"),
    ("axes: auto", "axes: zyx", 10, 'tile.axes: "zyx", and operators work on planes; write yx'),
    ("workers: 2", "on_bad_block: quarantine", 11, "run.on_bad_block: quarantine, and an iteration needs every block"),
    ("workers: 2", "on_nan: fail", 11, "run.on_nan: fail, and a solver stops by itself"),
    ("workers: 2", "wokers: 2", 11, "run.wokers: unknown key; did you mean workers?"),
    ("shape: auto", "shape: [96]", 12, "shape: [96] is no image; write its length along each axis"),
    ("shape: auto", "shape: [96, 0]", 12, "shape: [96, 0] is too small"),
    ("shape: auto", "shape: big", 12, 'shape: "big" is not auto or a list of whole numbers'),
    ("reference: truth.npy", 'reference: ""', 14, "reference: is empty; write a path"),
    ("reference: truth.npy", "refrence: truth.npy", 14, "refrence: unknown key; did you mean reference?"),
    ("exact: false", "exact: no", 15, 'exact: "no" is not true or false; in YAML 1.2 that is text: write false'),
    ("exact: false", "iterations: 3", 15, "iterations: unknown key; did you mean solver.iterations?"),
    ("exact: false", "input: {path: a.npy}", 15, "input: unknown key; "),
]  # fmt: skip


@pytest.mark.parametrize(("was", "lie", "line", "words"), LIES, ids=[lie[1].strip() or lie[0].strip() for lie in LIES])
def test_a_lie_is_told_with_its_line(reconstruction: Path, was: str, lie: str, line: int, words: str) -> None:
    text = reconstruction.read_text()
    assert text.count(was) == 1
    reconstruction.write_text(text.replace(was, lie))
    result = refused("validate", reconstruction)
    assert result.startswith(f"error: {reconstruction}:{line}: ")
    assert words in result
    assert len(result.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("solver={name: cg, step: 0.1}", "prior={name: none}"), "--set solver: solver.step: 0.1, and cg finds its own"),
        (("solver={name: cg}", "prior={name: none}", "fidelity={name: poisson}"), "poisson with solver cg, which works on l2 alone"),
        (("solver={name: cg}", "prior={name: l1}"), "prior.name: l1 with solver cg, which knows no prior; write none"),
        (("fidelity={name: poisson}", "start=null"), "poisson divides by what the image gives, and zeros give nothing"),
        (("prior={name: none, weight: 2}",), "prior.weight: is for prior l1, pnp or tv, and the name is none; write one of these names"),
        (("prior={name: tv, iterations: 9}", "tile.depth=8"), "tile.depth: 8 is less than accelerated tv's receptive field 9"),
        (("prior={name: l1, sigma: 1}",), "prior.sigma: is for prior pnp, and the name is l1"),
        (("operators=[]",), "--set operators: is empty; write what was measured"),
        (("operators={name: blur}",), "is not a list; write entries below it, such as `- {name: ..., data: ...}`"),
    ],
)  # fmt: skip
def test_parts_that_disagree_are_refused(reconstruction: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(reconstruction, overrides)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("operators[0].noise_sigma=0", "--set operators[0].noise_sigma: 0 is too small; write more than 0"),
        ("operators[0].noise_sigam=1", "--set operators[0].noise_sigam: unknown key; did you mean noise_sigma?"),
        ("operators[1].mask=gone.npy", "--set operators[1].mask: "),
        ("operators.0.noise_sigma=1", "operators is a list: write operators[0].noise_sigma."),
        ("operators.noise_sigma=1", "operators is a list: write which of its entries, such as operators[0].noise_sigma."),
        ("operators[2].noise_sigma=1", "operators has 2 entries, the last of them operators[1]: there is no entry 2."),
        ("solver[0]=3", "not a list: it has no entry 0. Set solver itself."),
        ("operators[0].data.x=3", 'operators[0].data is "y0.npy", not a section: nothing can be set inside it.'),
        ("operators[a].data=y.zarr", "not a key and a value. Write it as --set tile.size=256, or for an entry of a list"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_set_is_told(reconstruction: Path, override: str, words: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        load_job(reconstruction, [override])
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_entry_of_a_list_is_set_and_the_others_stay(reconstruction: Path) -> None:
    before = load(reconstruction).operators
    now = load(
        reconstruction, "operators[0].noise_sigma=0.5", "operators[1]={name: mask, mask: m.npy, data: y0.npy}"
    ).operators
    assert (now[0].noise_sigma, now[0].options) == (0.5, before[0].options)
    assert now[1].data == before[0].data


def test_direct_sums_and_transforms_are_not_both_asked_for(reconstruction: Path) -> None:
    text = reconstruction.read_text().replace("boundary: circular", "engine: fft")
    reconstruction.write_text(text.replace("exact: false", "exact: true"))
    with pytest.raises(ConfigError, match=r":5: operators\[0\]\.engine: fft with exact: true"):
        load_job(reconstruction)


def test_red_takes_a_weight(reconstruction: Path) -> None:
    text = reconstruction.read_text().replace("weight: 1.0", "weight: 0.2").replace("name: pgd", "name: gd")
    reconstruction.write_text(text)
    assert load(reconstruction).prior.options["weight"] == 0.2


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


@pytest.mark.parametrize("name", ["k0.npy", "y0.npy", "m.npy", "truth.npy"])
def test_a_file_that_is_missing_alone_is_bad_data(reconstruction: Path, name: str) -> None:
    (reconstruction.parent / name).unlink()
    with pytest.raises(InputError, match=rf"{name} does not exist"):
        load_job(reconstruction)
    assert ask("validate", reconstruction).exit_code == 4


def test_missing_weights_of_the_prior_are_told(reconstruction: Path) -> None:
    with pytest.raises(ConfigError, match=r"prior\.denoiser\.weights: .*gone\.safetensors does not exist"):
        load_job(reconstruction, ["prior={name: pnp, denoiser: {name: dncnn, weights: gone.safetensors}}"])


NESTED = "operators=[{name: composition, data: y0.npy, operators: [{name: blur, kernel: k0.npy}, {name: downsample}]}]"


def test_operators_stand_inside_of_others(reconstruction: Path) -> None:
    (choice,) = load(reconstruction, NESTED).operators
    blur = {"name": "blur", "kernel": str(reconstruction.parent / "k0.npy")}
    assert choice.options == {"operators": [blur, {"name": "downsample"}]}


@pytest.mark.parametrize(
    ("was", "lie", "words"),
    [
        ("kernel: k0.npy", "krenel: k0.npy", r"operators[0].operators[0].krenel: unknown key; did you mean kernel?"),
        ("kernel: k0.npy", "kernel: gone.npy", r"gone.npy does not exist"),
        ("name: downsample", "name: downsmaple", r"operators[0].operators[1].name: no operator is called downsmaple"),
        ("{name: downsample}", "3", r"operators[0].operators[1]: 3 is not a mapping"),
        ("{name: downsample}", "{name: downsample, data: y0.npy}", r"operators[0].operators[1].data: unknown key"),
    ],
)  # fmt: skip
def test_a_lie_inside_of_an_operator_is_told(reconstruction: Path, was: str, lie: str, words: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        load_job(reconstruction, [NESTED.replace(was, lie)])
    assert words in str(caught.value)


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


@pytest.mark.parametrize(
    ("command", "heavy"),
    [("validate", {"torch", "dask", "distributed", "zarr", "deepinv"}), ("plan", {"torch", "deepinv"})],
)
def test_a_light_command_loads_nothing_heavy(reconstruction: Path, command: str, heavy: set[str]) -> None:
    without_loading(heavy, command, reconstruction)
