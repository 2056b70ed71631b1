"""Ptychography on one rank: the order of patterns, the state between two steps, further modes of the probe, and the resolution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from halotile.errors import Diverged
from halotile.storage.lengths import AT_BEST, AT_WORST, shown_resolution
from halotile.storage.scans import convert
from halotile.storage.scans.scan import open_scan
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import StepRequests
from halotile.tasks.groups.training.fit import read_content, state_in
from halotile.tasks.ptychography.opened import SimulatedScan
from halotile.tasks.ptychography.patterns import Patterns, steps_of
from halotile.tasks.ptychography.program import Refinement
from halotile.tasks.ptychography.recipe import PARTS, Optics, ScanRecipe, SolverStage
from halotile.tasks.ptychography.result import FIRST, aligned, ring_correlation, shown_probe
from halotile.tasks.ptychography.solvers import PatternBatch, adam, begin_epoch
from halotile.tasks.ptychography.state import FOLLOWED, FURTHER, ReconstructionState
from tests.cases import in_folders


def recipe_of(simulated: SimulatedScan, folder: Path, refined: Sequence[str], *stages: SolverStage) -> ScanRecipe:
    """A reconstruction of a simulated scan in 4 slots, its files in a folder."""
    convert.write_scan(str(folder / "scan.zarr"), simulated.scan, simulated)
    scan, patterns = open_scan(str(folder / "scan.zarr"))
    optics = Optics.from_scan(scan, (simulated.pattern, simulated.pattern), "far", None)
    return ScanRecipe(scan, patterns, optics, "amplitude_mse", 2, tuple(refined), stages, 4, 0, 4)


def small_recipe(folder: Path, refined: Sequence[str], *stages: SolverStage) -> ScanRecipe:
    """36 patterns of 24 pixels, far, in 3 slots."""
    found = recipe_of(SimulatedScan(raster=(6, 6), pattern=24, step=3.0), folder, refined, *stages)
    found = replace(found, modes=1, slots=3, seed=5)
    return replace(found, checkpoint=folder / "checkpoint", curve=folder / "curve.json")


SLOTS = 3


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScanRecipe:
    """53 patterns in chunks of 4."""
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4 * 16 * 16 * 4)
    simulated, stage = SimulatedScan(raster=(53, 1), pattern=16, step=2.0), SolverStage(epochs=3, lr=0.1, batch=7)
    return replace(recipe_of(simulated, tmp_path, ("object",), stage), slots=SLOTS, seed=5, modes=1)


def test_each_pattern_is_used_once_an_epoch_in_another_order(recipe: ScanRecipe) -> None:
    for window in (0, 4, 8):
        recipe = replace(recipe, window=window)
        orders = []
        for epoch in (0, 1, 0):
            steps = steps_of(recipe, epoch)
            assert all(len(parts) == SLOTS and sum(map(len, parts)) <= 7 for parts in steps)
            orders.append(np.concatenate([part for parts in steps for part in parts]).tolist())
            assert sorted(orders[-1]) == list(range(53))
            last = [part.tolist() for part in list(steps)[-1]]
            assert [part.tolist() for part in steps[-1]] == last
        assert orders[0] == orders[2] != orders[1]
        other = steps_of(replace(recipe, seed=6), 0)
        assert orders[0] != np.concatenate([part for parts in other for part in parts]).tolist()


def test_a_batch_of_all_patterns_is_one_step_and_none_of_windows_is_left_with_a_few(recipe: ScanRecipe) -> None:
    for batch, window in itertools.product((53, 100), (0, 4)):
        (parts,) = steps_of(replace(recipe, window=window, stages=((replace(recipe.stages[0], batch=batch),))), 0)
        assert sorted(np.concatenate(parts).tolist()) == list(range(53))
    sizes = [sum(map(len, parts)) for parts in steps_of(replace(recipe, window=4), 0)]
    assert max(sizes) - min(sizes) <= SLOTS


def test_the_halves_share_the_patterns_of_a_stage(recipe: ScanRecipe) -> None:
    for window in (0, 4):
        chosen = tuple(range(3, 40))
        recipe = replace(recipe, window=window, stages=((replace(recipe.stages[0], subset=chosen),)))
        halves = []
        for half in (0, 1):
            steps = steps_of(recipe, 1, half)
            numbers = np.concatenate([part for parts in steps for part in parts])
            halves.append(recipe.scan.numbers[numbers].tolist())
            assert not np.any(np.diff(np.sort(numbers)) == 1)
        assert abs(len(halves[0]) - len(halves[1])) == 1
        assert sorted(halves[0] + halves[1]) == list(chosen)


def test_a_rank_holds_the_windows_of_its_slots_alone(recipe: ScanRecipe) -> None:
    for ranks in (1, 3):
        recipe = replace(recipe, window=4)
        slots = range(SLOTS) if ranks == 1 else range(1)
        patterns, whole = Patterns(recipe, len(slots)), recipe.patterns[:]
        for parts in steps_of(recipe, 0):
            for slot in slots:
                if len(parts[slot]):
                    read = patterns.read(parts[slot], "cpu").numpy()
                    assert np.array_equal(np.fft.fftshift(read, (-2, -1)), whole[parts[slot]].astype(np.float32))
            assert len(patterns.chunks) <= 3 * len(slots)
        assert recipe.chunks == 14


BATCH = PatternBatch([], 1.0, 0.1, SolverStage(epochs=1, lr=0.1, batch=1))


@pytest.fixture
def refining(tmp_path: Path) -> ScanRecipe:
    """36 patterns of 24 pixels, of which everything is refined."""
    return small_recipe(tmp_path, PARTS[:5], SolverStage(epochs=3, lr=0.02, batch=9))


def test_a_step_changes_the_pixel_whose_gradient_it_is_however_an_image_lies_in_memory() -> None:
    image = torch.arange(6.0).reshape(2, 3).T  # as one of MATLAB, or orthogonal modes
    kept = {"means": torch.zeros(3, 2), "squares": torch.zeros(3, 2), "counts": torch.zeros(())}
    moments = {name: {"object": tensor} for name, tensor in kept.items()}
    content = ReconstructionState({"object": image}, 1.0, moments=moments).content()
    state = ReconstructionState.from_content(content, "cpu")
    gradient = torch.zeros(3, 2)
    gradient[0, 1] = 1
    adam(state, {"object": gradient}, {"object": 0.1}, BATCH)
    torch.testing.assert_close(state.parameters["object"] - image, -0.1 * gradient)


def test_a_part_that_is_set_begins_without_what_was_kept_of_it() -> None:
    state = ReconstructionState({"object": torch.zeros(2), "probe": torch.zeros(2)}, 1.0)
    adam(state, {name: torch.ones(2) for name in state.parameters}, {"object": 0.1, "probe": 0.1}, BATCH)
    state.begin_with("object", torch.ones(2))
    assert state.parameters["object"].tolist() == [1, 1]
    assert all(list(state.moments[name]) == ["probe"] for name in ("means", "squares", "counts"))


def test_curvature_is_not_that_of_positions_which_begin_to_move(refining: ScanRecipe) -> None:
    stages = (SolverStage(solver="lbfgs", epochs=5, lr=0.1, batch=36, hold_positions=3),)
    work = Refinement(replace(refining, stages=stages), TorchGroup())
    state = work.first_state()
    pairs = []
    for epoch in range(5):
        state.losses.append(work.epoch(state, epoch))
        pairs.append(sum(name.startswith("step ") for name in state.moments["lbfgs"]))
    assert pairs == [0, 1, 2, 0, 1]


def test_a_last_epoch_that_is_refused_loses_no_other(refining: ScanRecipe, tmp_path: Path) -> None:
    spoiling = SolverStage(solver="sgd", epochs=1, lr=1000.0, batch=36)
    refining = replace(refining, stages=(*refining.stages, spoiling), requests=tmp_path / "requests")
    StepRequests(tmp_path / "requests").ask(4)
    with pytest.raises(Diverged):
        Refinement(refining, TorchGroup()).run()
    newest = refining.newest_checkpoint
    assert newest is not None
    assert len(state_in(read_content(newest))["losses"]) == 3


def test_a_step_that_spoils_a_tenth_of_the_amplitude_is_no_result() -> None:
    rows: list[tuple[float, float, str, bool]] = [
        (0.25, 2.0, "amplitude_mse", False), (0.25, 150.0, "amplitude_mse", True),
        (50.0, 400.0, "amplitude_mse", False), (float("nan"), 1.0, "amplitude_mse", True),
        (-36e3, -35e3, "poisson_nll", False), (-36e3, -20e3, "poisson_nll", True),
    ]  # fmt: skip
    for before, after, kind, is_spoilt in rows:
        assert ReconstructionState({}, 1.0, scale=1e4).is_spoilt(before, after, kind) == is_spoilt


def test_modes_still_follow_the_first_one_in_the_next_stage() -> None:
    """What the solver keeps of later epochs is forgotten; the losses of patterns alone are no later state."""
    state = ReconstructionState({"object": torch.zeros(2), "pattern_loss": torch.zeros(3)}, 1.0)
    state.moments |= {"following": {"probe": torch.tensor(7)}, "means": {"object": torch.ones(2)}}
    state.keep_best(0, 1.0)
    state.parameters["pattern_loss"] += 1
    state.return_to_best()
    assert state.moments.keys() == {"following", "means"}
    state.keep_best(1, 0.9)
    state.parameters["object"] += 1
    state.return_to_best()
    assert state.moments == {"following": {"probe": torch.tensor(7)}}
    assert not state.parameters["object"].any()


STAGES = (SolverStage(epochs=100, lr=0.02, batch=20), SolverStage(epochs=20, lr=0.005, batch=50))


@dataclass(frozen=True)
class TwoModes(SimulatedScan):
    """A scan whose second mode has a given share of the light."""

    share: float = 0.15

    @cached_property
    def probe(self) -> NDArray[np.complex64]:
        """The modes of the probe, in roots of counts."""
        modes = SimulatedScan(pattern=self.pattern, modes=2, photons=self.photons).probe
        light = (np.abs(modes) ** 2).sum((1, 2))
        scale = np.sqrt(np.array([1 - self.share, self.share]) * light.sum() / light)
        return np.asarray(scale[:, None, None] * modes, np.complex64)


def share_of(state: ReconstructionState) -> float:
    light = shown_probe(state).abs().square().sum((1, 2))
    return float(light[1:].sum() / light.sum())


@pytest.mark.parametrize(("true", "least", "most"), [(0.15, 0.1, 0.2), (0.0, 0.0, 0.05)])
def test_the_share_of_a_second_mode_is_found(true: float, least: float, most: float, tmp_path: Path) -> None:
    simulated = TwoModes(raster=(12, 12), pattern=32, step=1.5, modes=2, photons=1e6, share=true)
    work = Refinement(recipe_of(simulated, tmp_path, ("object", "probe"), *STAGES), TorchGroup())
    state = work.first_state()
    for epoch in range(work.recipe.epochs):
        state.losses.append(work.epoch(state, epoch))
    assert least <= share_of(state) <= most


def test_further_modes_follow_the_first_one_until_they_are_set_or_the_epochs_are_over(tmp_path: Path) -> None:
    simulated = SimulatedScan(raster=(4, 4), pattern=16, step=2.0, modes=2)
    recipe = replace(recipe_of(simulated, tmp_path, ("object", "probe"), *STAGES), support=5)
    for is_set in (False, True):
        state = Refinement(recipe, TorchGroup()).first_state()
        outside = state.probe[0] == 0
        assert outside.any()
        begin_epoch(state, STAGES[0], 0)
        light = state.probe.abs().square().sum((1, 2))
        assert float(light[1] / light.sum()) == pytest.approx(FURTHER, rel=1e-4)
        assert not state.probe[1][outside].any()
        if is_set:
            state.begin_with("probe", torch.ones_like(state.probe))
        else:
            for epoch in range(1, FOLLOWED + 1):
                begin_epoch(state, STAGES[0], epoch)
            state.parameters["probe"] = torch.ones_like(state.probe)
        state.follow_first()
        assert torch.equal(state.parameters["probe"], torch.ones_like(state.probe))


def test_modes_do_not_follow_where_they_are_fixed_unseen_or_have_no_derivative(tmp_path: Path) -> None:
    rows: list[tuple[tuple[str, ...], float | None]] = [(("object",), None), (("object", "probe"), 200.0)]
    for folder, (refined, photons) in in_folders(tmp_path, rows):
        simulated = SimulatedScan(raster=(4, 4), pattern=16, step=2.0, modes=2, photons=photons)
        assert not Refinement(recipe_of(simulated, folder, refined, *STAGES), TorchGroup()).first_state().moments
    probe = torch.ones(3, 16, 16, dtype=torch.complex64)  # a plane wave
    probe[1:] *= 0.1
    state = ReconstructionState({"probe": probe.clone()}, 1.0, moments={"following": {"probe": torch.tensor(9)}})
    for _ in range(3):
        state.follow_first()
    torch.testing.assert_close(state.parameters["probe"], probe)


PIXEL = (2e-8, 2e-8)


def truth(shape: tuple[int, int] = (150, 180)) -> NDArray[np.complex128]:
    """An object with details of all sizes."""
    noise = np.random.default_rng(0).standard_normal((2, *shape))
    return np.asarray((1 - 0.1 * noise[0]) * np.exp(1j * gaussian_filter(noise[1], 1)))


def with_noise(image: NDArray[np.complex128], seed: int, widths: NDArray[np.float64]) -> NDArray[np.complex128]:
    """The image with noise whose amplitude is that of each frequency."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal(image.shape) + 1j * random.standard_normal(image.shape)
    return np.asarray(image + np.fft.ifft2(np.fft.fft2(noise) * widths))


def test_the_resolution_is_where_the_noise_begins() -> None:
    for edge in (0.1, 0.25):
        image = truth()
        widths = np.where(np.hypot(*np.meshgrid(*map(np.fft.fftfreq, image.shape), indexing="ij")) < edge, 1e-3, 1.0)
        rings = ring_correlation(with_noise(image, 1, widths), with_noise(image, 2, widths), PIXEL)
        assert rings.resolution == pytest.approx(0.5 * PIXEL[0] / edge, rel=0.05)
        assert not rings.bound
        assert (rings.correlation[(rings.frequency < 0.9 * edge / PIXEL[0])][FIRST:] > 0.96).all()
        assert abs(rings.correlation[rings.frequency > 1.1 * edge / PIXEL[0]].mean()) < 0.1


def test_noise_alone_has_no_resolution_and_equal_images_that_of_a_pixel() -> None:
    flat, ones = np.ones((150, 180), complex), np.ones((150, 180))
    rings = ring_correlation(with_noise(flat, 1, ones), with_noise(flat, 2, ones), PIXEL)
    assert rings.resolution > 10 * PIXEL[0]
    equal = ring_correlation(truth(), truth(), PIXEL)
    assert equal.resolution == pytest.approx(PIXEL[0], rel=0.03)
    assert (rings.bound, equal.bound) == (AT_BEST, AT_WORST)
    assert shown_resolution(rings.resolution, rings.bound).startswith("worse than")


def test_what_no_pattern_tells_does_not_count() -> None:
    """A shift, a gradient of the phase and a factor change neither image nor resolution; the border, where the shift wraps, apart."""
    for gradient, shift in itertools.product(((0.0, 0.0), (0.011, -0.027)), ((0.0, 0.0), (2.3, -1.6))):
        image = gaussian_filter(truth().real, 1.5) + 1j * gaussian_filter(truth().imag, 1.5)
        row, column = np.indices(image.shape)
        frequency = np.meshgrid(*map(np.fft.fftfreq, image.shape), indexing="ij")
        turn = frequency[0] * shift[0] + frequency[1] * shift[1]
        other = np.fft.ifft2(np.fft.fft2(image) * np.exp(-2j * np.pi * turn))
        other = 1.7j * other * np.exp(2j * np.pi * (gradient[0] * row + gradient[1] * column))
        found = aligned(image, other, np.outer(*map(np.hanning, image.shape)))
        inside = (slice(15, -15),) * 2
        assert np.linalg.norm((found - image)[inside]) < 0.02 * np.linalg.norm(image[inside] - image.mean())
        rings = ring_correlation(image, other, PIXEL)
        assert (rings.correlation[FIRST : len(rings.correlation) // 3] > 0.99).all()
