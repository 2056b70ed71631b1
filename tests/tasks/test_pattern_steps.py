"""Steps of a reconstruction on one rank: gradients against automatic differentiation, solvers, and patterns whose gradients are computed some at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halotile.storage.scans.convert import write_scan
from halotile.storage.scans.scan import open_scan
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.groups.training.curve import read_curve
from halotile.tasks.ptychography import losses, opened, program, propagators, result, solvers
from halotile.tasks.ptychography import recipe as recipes
from halotile.tasks.ptychography.model import PatternGradients, PatternModel, Positions
from halotile.tasks.ptychography.patterns import Patterns, held_out, steps_of
from halotile.tasks.ptychography.recipe import PARTS, VARYING, ScanRecipe, SolverStage
from halotile.tasks.ptychography.state import ReconstructionState, first_state
from tests.tasks.test_patterns import recipe_of, small_recipe

SHAPE = (12, 15)


def leaves(kind: torch.dtype, *, of: torch.dtype, detector: Sequence[int] = SHAPE) -> dict[str, torch.Tensor]:
    """What has gradients, with values of one precision in another one: two modes, five positions, some of them on whole pixels."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wave = {
        "object": torch.complex(1 + 0.1 * random(30, 31), 0.1 * random(30, 31)),
        "probe": torch.complex(random(2, *SHAPE), random(2, *SHAPE)),
        "background": 0.1 * random(*detector),
        "place": torch.tensor([[0.0, 3.25], [4.5, 0.1], [7.0, 2.0], [17.3, 15.9], [2.2, 9.75]]),
        "weight": 1 + 0.1 * random(5),
        "variations": torch.complex(random(3, *SHAPE), random(3, *SHAPE)),
        "shares": 0.3 * random(5, 3),
    }
    found = {}
    for name, x in wave.items():
        narrow, wide = ((each.to_complex() if x.is_complex() else each) for each in (kind, of))
        found[name] = x.to(narrow).to(wide).requires_grad_()
    return found


def reference(model: PatternModel, x: dict[str, torch.Tensor], patterns: torch.Tensor) -> torch.Tensor:
    """The loss as a plain program has it."""
    frequencies = [2 * torch.pi * torch.fft.fftfreq(n, dtype=torch.float64) for n in SHAPE]
    pixels, loss = x["place"].detach().floor(), torch.zeros((), dtype=torch.float64)
    rows = zip(x["place"], pixels, x["weight"], x["shares"], patterns, strict=True)
    for place, pixel, weight, shares, pattern in rows:
        f = (place - pixel).double()
        ramp = torch.exp(-1j * (f[0] * frequencies[0][:, None] + f[1] * frequencies[1])).to(x["probe"].dtype)
        probe = torch.stack([(x["probe"][0] + (shares[:, None, None] * x["variations"]).sum(0)), *x["probe"][1:]])
        light = weight * torch.fft.ifft2(torch.fft.fft2(probe) * ramp)
        r, c = (int(n) for n in pixel)
        wave = light * x["object"][r : r + SHAPE[0], c : c + SHAPE[1]]
        if isinstance(model.propagator, propagators.NearField):
            back = torch.fft.ifft2(torch.fft.fft2(wave) * ramp.conj())
            wave = torch.fft.ifft2(torch.fft.fft2(back) * model.propagator.transfer)
        else:
            wave = torch.fft.fft2(wave) / (SHAPE[0] * SHAPE[1]) ** 0.5
        intensity, step = wave.abs().square().sum(0), model.oversampling
        pixels_of = (intensity[n::step, m::step] for n, m in itertools.product(range(step), repeat=2))
        intensity = sum(pixels_of) + x["background"].square()
        one = losses.LOSSES[model.loss](intensity, pattern)[0]
        loss = loss + (one if model.mask is None else one * model.mask).sum(dtype=torch.float64)
    return loss


def test_gradients_are_those_of_automatic_differentiation() -> None:
    far, near = propagators.FarField(), propagators.NearField.from_frame(SHAPE, (1e-6, 1.2e-6), 1e-10, 0.02)
    rows: list[tuple[propagators.Propagator, int]] = [(far, 1), (far, 3), (near, 1)]
    for (propagator, oversampling), loss, masked in itertools.product(rows, losses.LOSSES, (False, True)):
        generator, detector = torch.Generator().manual_seed(1), [n // oversampling for n in SHAPE]
        mask = torch.rand(detector, generator=generator) > 0.2 if masked else None
        patterns = torch.poisson(5 * torch.ones(5, *detector, dtype=torch.float64), generator)
        exact = leaves(torch.float32, of=torch.float64, detector=detector)
        reference(PatternModel(propagator, loss, mask, oversampling), exact, patterns).backward()
        errors = {}
        for kind in (torch.float64, torch.float32):
            moved = propagator
            if isinstance(propagator, propagators.NearField):
                moved = propagators.NearField(propagator.transfer.to(kind.to_complex()))
            model = PatternModel(moved, loss, None if mask is None else mask.to(kind), oversampling)
            x = leaves(torch.float32, of=kind, detector=detector)
            expected = reference(model, x, patterns.to(kind))
            expected.backward()
            expected = expected.detach()
            with torch.no_grad():
                places = Positions.at(x["place"], x["weight"], x["shares"])
                arguments = (x["object"], x["probe"], x["background"], places, patterns.to(kind), [slice(0, 5)])
                (found,) = model.gradients(*arguments, variations=x["variations"])
            assert abs(found.loss - expected) / abs(expected) < (1e-12 if kind == torch.float64 else 1e-6)
            for name, leaf in exact.items():
                assert leaf.grad is not None
                for way, gradient in (("ours", gradient_of(found, name, leaf)), ("torch", x[name].grad)):
                    assert gradient is not None
                    difference = (gradient.to(leaf.dtype) - leaf.grad).abs().max() / leaf.grad.abs().max()
                    errors[kind, name, way] = float(difference)
        with torch.no_grad():
            (few,) = model.gradients(*arguments, ("object", "shares"), x["variations"])
        assert list(few.parts) == ["object", "shares", "pattern_loss"]
        with torch.no_grad():
            (ranked,) = replace(model, loss="amplitude_mse").gradients(*arguments, ("object",), x["variations"])
        assert float(few.parts["pattern_loss"].double().sum()) == pytest.approx(float(ranked.loss), rel=1e-5)
        assert all(torch.equal(part, found.parts[name]) for name, part in few.parts.items())
        for name in exact:
            assert errors[torch.float64, name, "ours"] < 1e-12, name
            # A sum of many terms rounds in single precision, whoever computes it.
            assert errors[torch.float32, name, "ours"] < max(1e-6, 2 * errors[torch.float32, name, "torch"]), name


def gradient_of(found: PatternGradients, name: str, leaf: torch.Tensor) -> torch.Tensor:
    """A gradient, that of the object on all of it."""
    gradient = found.parts[{"place": "positions", "weight": "intensities"}.get(name, name)]
    if name != "object":
        return gradient
    whole = torch.zeros_like(leaf)
    whole[found.box] = gradient
    return whole


def test_a_step_of_rpie_is_that_of_the_formula() -> None:
    """One position, one mode, a far field: the object moves to the revised exit wave, as Maiden, Johnson and Li write it."""
    x = {name: tensor.detach() for name, tensor in leaves(torch.float64, of=torch.float64).items()}
    probe, image, alpha, norm = x["probe"][:1], x["object"], 0.3, 2.0
    counted = torch.poisson(5 * torch.ones(1, *SHAPE, dtype=torch.float64), torch.Generator().manual_seed(3))
    positions = Positions.at(torch.tensor([[4.0, 3.0]]), torch.ones(1, dtype=torch.float64))
    box = (slice(4, 4 + SHAPE[0]), slice(3, 3 + SHAPE[1]))
    exit_wave = probe[0] * image[box]
    far = torch.fft.fft2(exit_wave)
    difference = torch.fft.ifft2((counted[0].sqrt() * (SHAPE[0] * SHAPE[1]) ** 0.5) * far / far.abs()) - exit_wave
    light, passed = probe[0].abs().square(), image[box].abs().square()
    expected = image.clone()
    expected[box] += probe[0].conj() * difference / ((1 - alpha) * light + alpha * light.max())
    expected_probe = probe[0] + image[box].conj() * difference / ((1 - alpha) * passed + alpha * passed.max())

    one = [slice(0, 1)]
    (found,) = PatternModel(propagators.FarField()).gradients(image, probe, torch.zeros(SHAPE), positions, counted, one)
    state = ReconstructionState({"object": image.clone(), "probe": probe / norm}, norm)
    gradients = {"object": gradient_of(found, "object", image), "probe": found.parts["probe"] * norm}
    batch = solvers.PatternBatch([positions], 1.0, 1.0, replace(STAGE, alpha=alpha))
    solvers.rpie(state, gradients, {"object": 1.0, "probe": 1.0}, batch)
    torch.testing.assert_close(state.parameters["object"], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.probe[0], expected_probe, rtol=1e-6, atol=1e-6)


STAGE = SolverStage(epochs=1, lr=1.0, batch=1)


@pytest.fixture
def recipe(tmp_path: Path) -> ScanRecipe:
    """36 patterns of 24 pixels."""
    return small_recipe(tmp_path, PARTS, SolverStage(solver="lbfgs", epochs=60, lr=1.0, batch=36))


def test_gradients_of_some_patterns_are_those_of_all(recipe: ScanRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (2**28, 5 * recipes.WAVES * 8 * 24**2):
        monkeypatch.setattr(recipes, "WAVES_BYTES", most)
        work = program.Refinement(recipe, TorchGroup())
        state, numbers = first_state(recipe, work.patterns, "cpu"), next(iter(steps_of(recipe, 0)))[1]
        found.append(work._found_alone(state, numbers, state.positions(recipe, numbers)))
    assert recipe.at_once == 5 < len(numbers) == 12
    torch.testing.assert_close(*[each.pop("loss") for each in found], rtol=1e-12, atol=0)
    assert not all(map(torch.equal, *(each.values() for each in found)))  # the sums were made in another order
    for name, whole in found[0].items():
        torch.testing.assert_close(found[1][name], whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize(("edge", "variations", "batch"), [(21, 0, 10), (24, 0, 10), (24, 4, 4), (24, 5, 6)])
def test_slots_have_the_same_bits_together_and_alone(edge: int, variations: int, batch: int, tmp_path: Path) -> None:
    """Where the end of an array is computed otherwise than its beginning, they are not computed together."""
    simulated = opened.SimulatedScan(raster=(6, 6), pattern=edge, step=3.0)
    stage, parts_of_all = SolverStage(epochs=2, lr=0.03, batch=batch), PARTS if variations else PARTS[:5]
    recipe = replace(recipe_of(simulated, tmp_path, parts_of_all, stage), loss="poisson_nll", seed=5)
    recipe = replace(recipe, variations=variations, held_out=0.1 if batch == 10 else 0.0)
    states = []
    for alone in (False, True):
        work = program.Refinement(recipe, TorchGroup())
        sizes = {tuple(map(len, parts)) for epoch in (0, 1) for parts in steps_of(recipe, epoch)}
        if alone:
            work.together.update(dict.fromkeys(sizes, False))
        state = work.first_state()
        for epoch in (0, 1):
            state.losses.append(work.epoch(state, epoch))
        states.append(state)
        assert work.together.keys() == {each for each in sizes if sum(size > 0 for size in each) > 1}
        assert alone or edge == 21 or any(work.together.values())
    assert states[0].losses == states[1].losses
    for name, tensor in states[0].parameters.items():
        assert torch.equal(tensor, states[1].parameters[name]), name


def test_pixels_that_are_held_out_have_no_gradients(recipe: ScanRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(recipe, held_out=0.1)
    work, read = program.Refinement(recipe, TorchGroup()), Patterns.read
    state, numbers = work.first_state(), np.arange(12)
    found = [work._found_alone(state, numbers, state.positions(recipe, numbers))]
    unseen = torch.from_numpy(held_out(recipe, numbers))
    assert 0.08 < float(unseen.float().mean()) < 0.12
    assert np.array_equal(held_out(recipe, numbers[7:8])[0], unseen[7].numpy())
    monkeypatch.setattr(Patterns, "read", lambda *args: read(*args) + 50 * unseen)
    found.append(work._found_alone(state, numbers, state.positions(recipe, numbers)))
    for name in PARTS[:5]:
        assert torch.equal(found[0][name], found[1][name]), name
    assert found[0]["held_out"] != found[1]["held_out"]


def test_a_stage_ends_with_its_epoch_of_the_least_loss_of_held_out_pixels(recipe: ScanRecipe) -> None:
    wild = SolverStage(epochs=2, lr=0.15, batch=9)
    recipe = replace(recipe, held_out=0.1, stages=((replace(wild, epochs=3, lr=0.02), wild)), refined=PARTS[:4])
    work = program.Refinement(recipe, TorchGroup())
    state, objects = work.first_state(), []
    for epoch in range(recipe.epochs):
        work.whole_epoch(state, epoch)
        objects.append(state.parameters["object"].clone())
    best = int(np.argmin(state.held_out[3:]))
    assert best < 1  # or nothing was returned to
    assert torch.equal(objects[-1], objects[3 + best])
    assert "best" not in state.moments


def test_adam_counts_the_steps_that_were_its_own_and_forgets_what_it_kept_with_other_betas() -> None:
    state, gradients = ReconstructionState({"object": torch.ones(2)}, 1.0), {"object": torch.ones(2)}
    for _ in range(1000):
        solvers.sgd(state, gradients, {"object": 1e-4}, solvers.PatternBatch([], 1.0, 0.1, STAGE))
    for betas in ((0.9, 0.999), (0.9, 0.9), (0.5, 0.9999)):
        batch = solvers.PatternBatch([], 1.0, 0.1, replace(STAGE, betas=betas))
        for _ in range(5):
            before = state.parameters["object"].clone()
            solvers.adam(state, gradients, {"object": 0.1}, batch)
            assert (before - state.parameters["object"]).tolist() == pytest.approx([0.1, 0.1], rel=1e-4)


def test_options_of_solvers_are_those_of_torch() -> None:
    rows: list[tuple[str, Any]] = [("adam", {"betas": (0.5, 0.9)}), ("adam", {"amsgrad": True})]
    for solver, options in rows + [("sgd", {"momentum": momentum}) for momentum in (0.9, 0.0)]:
        theirs = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
        optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[solver]([theirs], lr=0.1, **options)
        state = ReconstructionState({"background": theirs.detach().clone()}, 1.0)
        batch = solvers.PatternBatch([], 0.5, 0.1, replace(STAGE, **options))
        for _ in range(8):
            optimizer.zero_grad()
            (0.5 * theirs.square().sum()).backward()
            optimizer.step()
            gradients = {"background": 2 * state.parameters["background"]}  # of the sum
            solvers.SOLVERS[solver](state, gradients, {"background": 0.1}, batch)
            torch.testing.assert_close(state.parameters["background"], theirs.detach())
        solvers.begin_epoch(state, STAGE, 0)
        assert "directions" not in state.moments


def test_patterns_may_have_any_unit(recipe: ScanRecipe, tmp_path: Path) -> None:
    """A scan in parts of its sum gives the object of one in other parts, and losses in their square."""
    simulated = opened.SimulatedScan(raster=(6, 6), pattern=24, step=3.0)
    stages, found = (SolverStage(epochs=20, lr=0.02, batch=9),), []
    for unit in (2.0**-16, 2.0**-26):  # whose roots are exact
        pixels = simulated.patterns(np.arange(36)) * unit
        write_scan(str(tmp_path / "scan.zarr"), simulated.scan, pixels, overwrite=True)
        scan, patterns = open_scan(str(tmp_path / "scan.zarr"))
        state = refined(recipe, 20, scan=scan, patterns=patterns, stages=stages, refined=PARTS[:5])
        found.append((state.losses[-1] / unit, state.parameters["object"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-4)


def test_what_was_not_said_before_a_kill_is_said_after_it(recipe: ScanRecipe) -> None:
    stages = (SolverStage(epochs=3, lr=0.02, batch=9),)
    work = program.Refinement(replace(recipe, stages=stages, refined=PARTS[:2]), TorchGroup())
    work.run()
    assert all(row["seconds"] > 0 for row in read_curve(recipe.curve)[1])
    recipe.curve.unlink()  # it was killed between the checkpoint and the curve
    work.run()
    assert [row["iteration"] for row in read_curve(recipe.curve)[1]] == [1, 2, 3]


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_steps_of_lbfgs_are_those_of_torch_until_its_stage_ends(rate: float) -> None:
    curvature = torch.tensor([1.0, 10.0, 100.0, 3.0, 50.0, 7.0, 20.0])
    theirs = torch.ones(7, requires_grad=True)
    optimizer = torch.optim.LBFGS([theirs], lr=rate, max_iter=1, history_size=5, tolerance_grad=0, tolerance_change=0)
    state = ReconstructionState({"background": torch.ones(7)}, 1.0)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (curvature * theirs**2).sum() / 2
        value.backward()
        return value

    for _ in range(9):
        optimizer.step(loss)
        gradient = curvature * state.parameters["background"]
        solvers.lbfgs(state, {"background": gradient}, {"background": rate}, solvers.PatternBatch([], 1.0, rate, STAGE))
        torch.testing.assert_close(state.parameters["background"], theirs.detach(), rtol=1e-3, atol=1e-5)
    solvers.begin_epoch(state, STAGE, 0)
    assert not state.moments


def test_a_factor_changes_the_units_of_a_part() -> None:
    """Half a unit of one value is a whole one of the other: the path is the same."""
    paths = []
    for unit in (1.0, 0.5):
        state = ReconstructionState({"object": torch.ones(2), "background": torch.full((2,), unit)}, 1.0)
        path = []
        for _ in range(6):
            x, y = state.parameters["object"], state.parameters["background"] / unit
            gradients = {"object": x + y, "background": (3 * y + x) / unit}
            rates = {"object": 0.3, "background": 0.3 * unit}
            solvers.lbfgs(state, gradients, rates, solvers.PatternBatch([], 1.0, 0.3, STAGE))
            path.append([*state.parameters["object"].tolist(), *(state.parameters["background"] / unit).tolist()])
        paths.append(path)
    assert np.allclose(paths[0], paths[1], rtol=1e-5)


def refined(recipe: ScanRecipe, epochs: int, **changes: Any) -> ReconstructionState:
    """The state after some epochs of one stage."""
    made = replace(recipe, **changes)
    work = program.Refinement(made, TorchGroup())
    state = first_state(made, work.patterns, "cpu")
    for epoch in range(epochs):
        state.losses.append(work.epoch(state, epoch))
    return state


def test_modes_that_are_written_with_variations_give_the_same_intensities(recipe: ScanRecipe) -> None:
    changed = replace(recipe, modes=2, refined=("object", "probe", *VARYING), variations=1)
    work = program.Refinement(changed, TorchGroup())
    state = work.first_state()
    state.losses.append(work.epoch(state, 0))
    positions = state.positions(changed, np.arange(36))
    found, dark = result.contents(changed, state), torch.zeros(24, 24)
    probes = state.probe, torch.from_numpy(found["image_2/data"])
    variations = torch.from_numpy(found["process_1/probe_variations"])
    expected, written = (
        PatternModel(propagators.FarField()).intensity(state.parameters["object"], probe, dark, positions, variations)
        for probe in probes
    )
    torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-4 * float(expected.max()))


def test_smoothness_is_the_gradient_of_squared_differences_by_the_light() -> None:
    image = torch.randn(5, 7, dtype=torch.complex128, requires_grad=True)
    state = ReconstructionState({"object": image.detach()}, norm=3.0)
    gradients = {"object": torch.zeros(5, 7, dtype=torch.complex128)}
    solvers.add_smoothness(state, gradients, 0.25)
    differences = [image.diff(dim=axis).abs().square().sum() for axis in (0, 1)]
    (expected,) = torch.autograd.grad(0.25 * 3.0**2 * sum(differences) / image.numel(), image)
    torch.testing.assert_close(gradients["object"], expected, rtol=1e-12, atol=1e-12)


def test_a_smooth_object_has_smaller_differences_whatever_the_batch_and_rpie_stays_finite(recipe: ScanRecipe) -> None:
    def smoothed(epochs: int, **options: Any) -> ReconstructionState:
        return refined(recipe, epochs, stages=(SolverStage(epochs=epochs, **options),), refined=("object",))

    rough = []
    for batch, smoothness in ((9, 0.0), (9, 0.1), (36, 0.1)):
        state = smoothed(12, lr=0.05, batch=batch, smoothness=smoothness)
        rough.append(float(state.parameters["object"].diff(dim=0).abs().square().mean()))
    assert max(rough[1:]) < 0.7 * rough[0]
    for smoothness in (0.01, 10.0):
        state = smoothed(15, solver="rpie", lr=1.0, batch=36, smoothness=smoothness)
        assert state.losses[-1] <= state.losses[0]
        assert float(state.parameters["object"].abs().max()) < 10


def test_a_loss_far_beyond_the_first_one_has_diverged() -> None:
    rows = [(36.0, 60.0, False), (36.0, 1e6, True), (36.0, float("nan"), True), (1e-9, 0.1, False), (-5.0, 1e5, True)]
    for begun, last, diverged in rows:  # the one before the last began with what is right
        assert ReconstructionState({}, 1.0, losses=[last], begun=begun).has_diverged == diverged, begun
