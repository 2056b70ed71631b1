"""Posterior samples from disk to disk: the same bits for any workers, blocks and kills; maps that are as sure as they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from scipy import ndimage

import halotile
from halotile.cli.status import find_run, read_status, status_rows
from halotile.errors import ConfigError, DiskRefused, HalotileError, InputError, ResumeRefused
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, PriorChoice, Reconstruction
from halotile.graphs.jobs.samples.job import FieldPrior, Sampling, plan_rows
from halotile.graphs.kinds.sections import Output
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.storage.grid import Region
from halotile.tasks.devices.device import torch_threads
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.posterior.gaussian import Solved
from halotile.tasks.priors.matern import Matern
from tests.cases import thorough
from tests.graphs import sampling
from tests.support import read_zarr, work_of

MonkeyPatch = pytest.MonkeyPatch


@pytest.fixture(autouse=True, scope="module")
def _as_in_workers() -> Iterator[None]:
    with torch_threads():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement with a hole."""
    place = tmp_path_factory.mktemp("samples")
    sampling.scene(place)
    return place


@pytest.fixture(scope="module")
def three() -> Iterator[RunningCluster]:
    """Three workers."""
    with local.start(Order(workers=3, memory_bytes=4 * 2**30)) as workers:
        yield workers


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[sampling.Pixels, ...]:
    """Mean, standard deviation and three draws of that measurement."""
    place = {"path": "mean0.zarr", "std": "std0.zarr", "samples": "draws0"}
    return sampling.computed(sampling.job_in(folder, {"output": place}))


def test_blocks_and_what_is_stored_change_no_bit(folder: Path, whole: tuple[sampling.Pixels, ...]) -> None:
    for block, place in ((96, {"path": "1.zarr", "std": "1s.zarr"}), (32, {"path": "2.zarr", "std": None})):
        found = sampling.computed(sampling.job_in(folder, {"tile": {"block": block}, "output": place}))
        assert sampling.same(found, whole[: len(found)])


def test_the_prior_is_found_through_a_mask_and_a_cut_rim(tmp_path: Path) -> None:
    sampling.scene(tmp_path, hole=False)
    np.save(tmp_path / "mask.npy", np.ones((sampling.N, sampling.N)))
    job = sampling.job_in(tmp_path)
    masked = sampling.with_operator(job, "mask", mask=str(tmp_path / "mask.npy"))
    valid = sampling.with_operator(job, "blur", kernel=str(tmp_path / "k.npy"), boundary="valid")
    for each, edge in ((masked, sampling.N), (valid, sampling.N + 4)):
        found = work_of(make_plan(replace(each, prior=FieldPrior(), shape=(edge, edge)))).solved.posterior.prior
        assert 0.3 < found.std < 0.8
        assert 3 < found.range < 20


def test_halos_are_tried_where_the_noise_is_strongest_and_the_worst_place_decides(
    folder: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    sigma = sampling.SIGMA * (1 + np.arange(sampling.N * sampling.N).reshape(sampling.N, sampling.N) / sampling.N**2)
    np.save(tmp_path / "sigma.npy", sigma)
    tried: list[tuple[int, Region]] = []
    places: dict[Region, int] = {}

    def solved(self: Solved, core: Region) -> tuple[None, sampling.Pixels]:
        """Errors that differ between places, and fall with the halo."""
        tried.append((self.halo, core))
        places.setdefault(core, len(places))
        return None, np.array([np.exp(-self.halo / 12) * (1 if places[core] == 3 else 0.05)])

    monkeypatch.setattr(Solved, "solved", solved)
    options = {"operators": {"noise_sigma": str(tmp_path / "sigma.npy")}, "posterior": {"halo": "auto"}}
    assert work_of(make_plan(sampling.job_in(folder, options))).solved.halo == 64
    assert np.mean([np.mean(sigma[core.slices]) for _, core in tried]) > 1.7 * sampling.SIGMA
    assert Counter(halo for halo, _ in tried) == {8: 1, 16: 1, 32: 4, 48: 1, 64: 8}, "where it fails comes first"
    sigma = np.full((512, 512), sampling.SIGMA)
    sigma[100:160, 300:360] = 0
    np.save(tmp_path / "sigma.npy", sigma)
    sampling.scene(tmp_path, 512)
    tried.clear()
    make_plan(sampling.job_in(tmp_path, options))
    assert any(not sigma[core.slices].any() for _, core in tried)


def test_kills_and_any_workers_give_equal_bits(folder: Path, tmp_path: Path, whole: Any, three: RunningCluster) -> None:
    place = {"path": tmp_path / "mean.zarr", "std": tmp_path / "std.zarr"}
    job = sampling.job_in(folder, {"output": place})
    sampling.killed(sampling.started(tmp_path, job), lambda: len(sampling.journalled(tmp_path, "std.zarr")) >= 2)
    assert 0 < len(sampling.journalled(tmp_path, "mean.zarr")) < 9
    with claim(make_plan(job)) as outputs:
        # A block that one of two journals has is computed again.
        journal = outputs.journal_of(outputs.plan.outputs[1])
        journal.unmark([min(journal.done)])
    run(make_plan(job), cluster=three)
    assert sampling.same((read_zarr(tmp_path / "mean.zarr"), read_zarr(tmp_path / "std.zarr")), whole[:2])
    assert verify(tmp_path / "mean.zarr").problems == verify(tmp_path / "std.zarr").problems == ()
    assert ("noise", f"{sampling.SIGMA:g}") in status_rows(read_status(find_run(str(tmp_path / "mean.zarr"))))
    others: list[tuple[dict[str, Any], str]] = [
        ({"posterior": {"seed": 1}}, r"posterior\.seed was 0, is 1"),
        ({"posterior": {"count": 4}}, r"posterior\.count was 3, is 4\n.* run with --fresh to start over\."),
        ({"prior": {"std": 0.7, "mean": "auto"}}, r"prior\.std was 0\.5, is 0\.7"),
    ]
    for parts, words in others:
        with (
            pytest.raises(ResumeRefused, match=words),
            claim(make_plan(sampling.job_in(folder, {"output": place, **parts}))),
        ):
            pass
    with claim(make_plan(sampling.job_in(folder, {"output": place, "prior": {"std": "auto"}}))):
        pass


@pytest.mark.parametrize(("name", "tol"), [("reflect", 1e-2), ("crop", 1e-2), thorough("reflect", 1e-3)])
def test_blocks_with_the_halo_that_is_found_agree_with_the_whole_image(tmp_path: Path, name: str, tol: float) -> None:
    sampling.scene(tmp_path, 48)
    parts: dict[str, Any] = {"output": {"samples": "d"}, "posterior": {"tol": tol, "halo": "auto", "count": 1}}
    job = sampling.FAR[name](sampling.job_in(tmp_path, {**parts, "prior": {"range": 3.0}}), tmp_path)
    plan = make_plan(job)
    assert plan.figures["method"] == "blocks"
    assert plan.figures["halo"] < 24
    job = replace(job, posterior=replace(job.posterior, halo=plan.figures["halo"]))
    exact, deviation = sampling.whole_image(job, tol / 30)
    error = (np.stack(sampling.computed(job)) - exact) / deviation
    assert np.abs(error).max() <= tol
    assert np.sqrt(np.mean(np.square(error))) <= tol / 5


def test_a_truth_that_is_drawn_from_the_prior_lies_as_near_as_the_map_says(tmp_path: Path) -> None:
    truth = sampling.scene(tmp_path, 256, hole=False)
    output = {"shard": 256, "chunk": 64}
    parts = {"output": output, "tile": {"block": 256}, "posterior": {"count": 12, "halo": 256}}
    mean, std = sampling.computed(sampling.job_in(tmp_path, parts))
    away = (truth - mean) / std
    assert 0.95 <= np.sqrt(np.mean(np.square(away))) <= 1.06
    assert 0.935 <= np.mean(np.abs(away) <= 2) <= 0.968
    # Far from the edge, the variance is that of a periodic image.
    response = np.square(np.abs(np.fft.fft2(sampling.kernel(), truth.shape)))
    exact = np.sqrt(np.mean(1 / (1 / Matern(**sampling.PRIOR).spectrum(truth.shape) + response / sampling.SIGMA**2)))
    assert np.sqrt(np.mean(np.square(std[40:-40, 40:-40]))) == pytest.approx(exact, rel=0.01)


def test_a_map_of_the_noise_has_holes_and_weights(folder: Path, tmp_path: Path, whole: Any) -> None:
    sigma = np.full((sampling.N, sampling.N), sampling.SIGMA)
    sigma[sampling.HOLE] = np.where(np.arange(8) % 2, 0, np.nan)
    np.save(tmp_path / "sigma.npy", sigma)
    sampling.scene(tmp_path, hole=False)
    place = {"path": tmp_path / "m.zarr", "std": tmp_path / "s.zarr"}
    job = sampling.job_in(tmp_path, {"output": place, "operators": {"noise_sigma": str(tmp_path / "sigma.npy")}})
    assert sampling.same(sampling.computed(job), whole[:2])
    about = zarr.open_array(tmp_path / "s.zarr/0").attrs
    described = {"prior": {"name": "matern", **sampling.PRIOR}, "count": 3, "seed": 0, "tol": 0.01}
    assert about["long_name"] == "posterior standard deviation"
    assert described.items() <= about["posterior"].items()
    plan = make_plan(sampling.job_in(tmp_path, {"output": place, "operators": {"noise_sigma": "auto"}}))
    assert float(plan.figures["noise"][0]) == pytest.approx(sampling.SIGMA, rel=0.1)
    for level, count in ((sampling.SIGMA, 0), (1.0, 1)):
        notes = make_plan(sampling.job_in(tmp_path, {"output": place, "operators": {"noise_sigma": level}})).notes
        assert len([note for note in notes if "and the measurement shows about" in note]) == count


NOT_ABOVE_0 = r"operators\[0\]: noise_sigma: .*sigma\.npy is above 0 in no pixel where .*y\.zarr has a number"
REFUSED: list[tuple[dict[str, Any], type[HalotileError], str]] = [
    ({"prior": {"name": "tv"}}, ConfigError, "prior.name: tv, which leaves no Gaussian posterior; write matern"),
    ({"operators": {"noise_sigma": 0.0}}, ConfigError, r"noise_sigma: 0"),
    ({"operators": {"noise_sigma": float("nan")}}, ConfigError, r"noise_sigma: "),
    ({"operators": {"noise_sigma": np.ones((5, 5))}}, InputError, r"of shape \[5, 5\], and the measurement has"),
    ({"operators": {"noise_sigma": np.zeros((sampling.N, sampling.N))}}, InputError, NOT_ABOVE_0),
    ({"operators": {"noise_sigma": np.full((sampling.N, sampling.N), np.nan)}}, InputError, NOT_ABOVE_0),
    ({"posterior": {"count": 0}}, ConfigError, r"posterior.count: is 0, and output.std needs draws"),
    ({"posterior": {"count": 1, "estimator": "samples"}}, ConfigError, "one draw gives no standard deviation"),
    ({"posterior": {"tol": 2.0}}, ConfigError, r"2 standard deviations is too large an error"),
    ({"tile": {"depth": 8}}, ConfigError, "tile.depth: is for denoisers"),
    ({"posterior": {"halo": 100000}}, HalotileError, "smaller"),
    ({"posterior": {"method": "cg"}}, ConfigError, r"posterior.halo: 16, and method: cg has none"),
    ({"output": {"dtype": "uint16"}}, ConfigError, "output.dtype: uint16 holds whole numbers"),
    ({"prior": {"range": 1.5}}, ConfigError, "prior.range is 1.5 pixels, .* Write 2 or more"),
    ({"prior": {"mean": float("inf")}}, ConfigError, "mean is inf: it must be a finite number"),
    ({"prior": {"range": 100.0}}, ConfigError, "prior.range is 100 pixels, and the image has 96"),
]


def test_bad_input_is_refused(folder: Path, tmp_path: Path) -> None:
    for parts, kind, words in REFUSED:
        parts = {name: dict(values) for name, values in parts.items()}
        if isinstance(sigma := parts.get("operators", {}).get("noise_sigma"), np.ndarray):
            np.save(tmp_path / "sigma.npy", sigma)
            parts["operators"]["noise_sigma"] = str(tmp_path / "sigma.npy")
        with pytest.raises(kind, match=words):
            make_plan(sampling.job_in(folder, parts)).check_fits()


def test_counts_have_the_noise_of_their_smoothed_rate(tmp_path: Path) -> None:
    shown = sampling.scene(tmp_path, 80, hole=False)
    truth = 20 + 5 * (shown - sampling.PRIOR["mean"]) / sampling.PRIOR["std"]
    rate = read_all(Blur(kernel=sampling.kernel(), boundary="reflect").forward(InMemory(truth))) + 2
    counts = np.random.default_rng(1).poisson(np.asarray(rate, np.float64)).astype(np.float32)
    counts[sampling.HOLE] = np.nan
    zarr.create_array(tmp_path / "y.zarr", data=counts, chunks=(32, 32), overwrite=True)
    parts: dict[str, dict[str, Any]] = {"operators": {"noise_sigma": "auto"}, "prior": {"std": 5.0, "mean": 20.0}}
    poisson = FidelityChoice(name="poisson", options={"background": 2.0})
    mean, std = sampling.computed(sampling.job_in(tmp_path, parts, fidelity=poisson))
    assert 0.85 < np.sqrt(np.mean(np.square((truth - mean) / std))) < 1.2
    known = np.isfinite(counts)
    both = np.stack([np.where(known, counts, 0), known]).astype(np.float64)
    total, share = ndimage.gaussian_filter(both, 2, mode="constant", axes=(-2, -1))
    np.save(tmp_path / "sigma.npy", np.sqrt(np.maximum(total / share, 2)))
    zarr.create_array(tmp_path / "y.zarr", data=counts - 2, chunks=(32, 32), overwrite=True)
    parts = {"operators": {"noise_sigma": str(tmp_path / "sigma.npy")}, "prior": parts["prior"]}
    by_hand = {"path": "mean2.zarr", "std": "std2.zarr"}
    assert sampling.same((mean, std), sampling.computed(sampling.job_in(tmp_path, {**parts, "output": by_hand})))


def test_other_bad_input_is_refused_in_words(folder: Path) -> None:
    job, blocks = sampling.job_in(folder), sampling.job_in(folder, {"posterior": {"method": "blocks"}})
    counts, blur = FidelityChoice(name="poisson"), {"name": "blur", "kernel": str(folder / "k.npy")}
    halves = {"operators": [blur | {"boundary": "zero"}], "weights": [0.5]}
    summed = replace(sampling.with_operator(job, "sum", **halves), prior=FieldPrior())
    first = replace(job.operators[0], noise_sigma="auto")
    seen = halotile.measurement("blur", folder / "y.zarr", kernel=sampling.kernel())
    matern = PriorChoice(name="matern", options=sampling.PRIOR)
    inverted = Reconstruction(operators=(seen,), output=Output(path=str(folder / "x.zarr")), prior=matern)
    circular = r"operators\[0\] .*has boundary: circular.* Write method: cg"
    others: list[tuple[Any, type[HalotileError], str]] = [
        (replace(job, fidelity=counts), ConfigError, r"beside fidelity: poisson, where counts have the noise of their"),
        (replace(job, fidelity=counts, operators=(first,)), InputError, r"below 0 at .* write fidelity\.background"),
        (sampling.with_operator(blocks, "blur", kernel=str(folder / "k.npy")), ConfigError, circular),
        (sampling.with_operator(blocks, "composition", operators=[blur]), ConfigError, circular),
        (sampling.FAR["whole"](blocks, folder), ConfigError, r"operators\[0\] .*sees more than.* Write method: cg"),
        (summed, InputError, r"prior.std and prior.range and prior.mean: auto .* Write numbers"),
        (inverted, ConfigError, r"prior.name: matern, which is for job: samples; .* posterior.count: 0"),
    ]
    for other, kind, words in others:
        with pytest.raises(kind, match=words):
            make_plan(other)
    narrow = work_of(make_plan(sampling.job_in(folder, {"posterior": {"halo": 2}}))).solved
    with pytest.raises(InputError, match=r"halo of 2 pixels leaves errors of .* Write posterior.halo: 4.*method: cg"):
        narrow.read(Region((0, 32, 32), (2, 64, 64)))
    plan = make_plan(sampling.job_in(folder, {"output": {"samples": "draws2"}}))
    assert plan.disk_bytes > 1.5 * make_plan(job).disk_bytes
    plan = replace(plan, free_disk_bytes=plan.disk_bytes - 1)
    with pytest.raises(DiskRefused, match=r"Write output\.path on a larger disk, or leave out output\.samples"):
        plan.check_fits()


def test_the_plan_names_the_method_and_how_far_the_map_may_be_off(folder: Path) -> None:
    def shown(plan: Plan) -> str:
        return "\n".join(f"{label} {value}" for label, value in plan_rows(plan.summary()))

    job = sampling.job_in(folder, {"posterior": {"halo": "auto"}})
    plan = make_plan(job)
    assert "method blocks with a halo of 16 pixels, 4.00 × the image: for errors below 0.01" in shown(plan)
    assert f"rao-blackwell, std ± {plan.figures['std_error']:.0%}".replace("%", " %") in shown(plan)
    assert plan.figures["std_error"] < 1 / np.sqrt(6)
    far = make_plan(sampling.FAR["circular"](job, folder))
    assert "method cg, up to about 231 passes for each image: operators[0] has boundary: circular" in shown(far)
    assert far.disk_bytes > plan.disk_bytes + 12 * 8 * (sampling.N + 12) ** 2
    assert make_plan(sampling.FAR["whole"](job, folder)).figures["std_error"] == pytest.approx(1 / np.sqrt(6), abs=1e-4)
    wide = make_plan(sampling.job_in(folder, {"posterior": {"halo": 40}}))
    assert "the halo of 40 pixels is wider than what is solved with it, 32 × 32" in "\n".join(wide.notes)


def test_an_image_in_units_of_a_flux_has_the_same_maps(tmp_path: Path) -> None:
    sampling.scene(tmp_path, 48)
    unit, maps, auto = 1e-20, list[Any](), dict.fromkeys(("std", "range", "mean"), "auto")
    seen = read_zarr(tmp_path / "y.zarr")
    for size in (1.0, unit):
        job = sampling.job_in(tmp_path, {"operators": {"noise_sigma": 0.2 * size}, "prior": auto})
        maps.append(sampling.computed(job))
        np.save(tmp_path / "k.npy", -sampling.kernel())  # and a detector that inverts
        zarr.create_array(tmp_path / "y.zarr", data=-unit * seen, chunks=(32, 32), overwrite=True)
    (mean, std), (other, spread) = maps
    assert np.abs(other / unit - mean).max() < 0.01 * std.mean()
    assert spread.mean() / unit == pytest.approx(std.mean(), rel=0.02)  # of other draws: their noise has the other sign


def test_pixels_that_a_file_declares_to_hold_no_data_are_holes(tmp_path: Path) -> None:
    sampling.scene(tmp_path, hole=False)
    y = zarr.open_array(tmp_path / "y.zarr")
    y[sampling.HOLE] = -9999
    y.attrs["missing_value"] = -9999
    plan = make_plan(sampling.job_in(tmp_path, {"operators": {"noise_sigma": "auto"}}))
    weights = read_all(work_of(plan).solved.posterior.measurements[0].weight)
    assert not weights[sampling.HOLE].any()
    assert np.count_nonzero(weights == 0) == 7 * 8
    assert float(plan.figures["noise"][0]) == pytest.approx(sampling.SIGMA, rel=0.2)


def test_conjugate_gradients_have_equal_bits_for_any_workers_and_kills(tmp_path: Path, three: RunningCluster) -> None:
    sampling.scene(tmp_path, 40)
    parts: Any = {"posterior": {"tol": 0.5, "halo": "auto", "count": 1, "method": "cg"}, "prior": {"range": 2.0}}

    def at(name: str) -> Sampling:
        place = {"path": f"{name}.zarr", "std": f"{name}s.zarr", "samples": f"{name}d"}
        return sampling.FAR["circular"](sampling.job_in(tmp_path, {**parts, "output": place}), tmp_path)  # type: ignore[no-any-return]

    state = tmp_path / "1.zarr.run" / "state"
    sampling.killed(sampling.started(tmp_path, at("1")), lambda: (state / "draw-0" / "checkpoint").exists())
    assert not (state / "mean").exists()
    plan = make_plan(at("1"))
    outcome = run(plan, cluster=three)
    assert sampling.same(tuple(read_zarr(output.path) for output in plan.outputs), sampling.computed(at("0")))
    assert len(outcome.inspection.figures["residuals"]) == 2
    assert max(outcome.inspection.figures["residuals"]) < 1e-2
    assert not state.exists()


@pytest.mark.parametrize(("name", "tol"), [("reflect", 1e-3), ("circular", 1e-2), ("line", 1e-1)])
def test_conjugate_gradients_on_disk_agree_with_those_in_memory(tmp_path: Path, name: str, tol: float) -> None:
    sampling.scene(tmp_path, 48)
    parts: dict[str, dict[str, Any]] = {"output": {"samples": "d", "shard": 64}, "tile": {"block": 64}}
    parts |= {"posterior": {"tol": tol, "halo": "auto", "count": 1, "method": "cg"}, "prior": {"range": 3.0}}
    job = sampling.FAR[name](sampling.job_in(tmp_path, parts), tmp_path)
    found, reports = sampling.reported(job)
    exact, deviation = sampling.whole_image(job, tol / 30)
    error = np.abs((np.stack(found) - exact) / deviation)
    assert error.max() <= tol
    assert len(reports) == 2
    assert reports[1].startswith("draw-0: a residual of ")


def test_auto_takes_conjugate_gradients_where_no_halo_will_do(folder: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("halotile.graphs.jobs.samples.plan.HALOS", (4,))
    plan = make_plan(sampling.job_in(folder, {"posterior": {"halo": "auto"}}))
    assert plan.figures["method"] == "cg"
    assert plan.figures["halo_from"].startswith("no halo of up to 4 pixels keeps the error below posterior.tol")
    with pytest.raises(ConfigError, match=r"no halo of up to 4 pixels .* or posterior\.method: cg"):
        make_plan(sampling.job_in(folder, {"posterior": {"halo": "auto", "method": "blocks"}}))
