"""The model of ptychography: its gradients against automatic differentiation, in every field, with every loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from halotile.tasks.ptychography.losses import LOSSES
from halotile.tasks.ptychography.model import PatternGradients, PatternModel, Positions
from halotile.tasks.ptychography.propagators import FarField, NearField, Propagator
from halotile.tasks.ptychography.recipe import SolverStage
from halotile.tasks.ptychography.solvers import PatternBatch, rpie
from halotile.tasks.ptychography.state import ReconstructionState

SHAPE = (12, 15)
NEAR = NearField.of(SHAPE, (1e-6, 1.2e-6), 1e-10, 0.02)


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
        narrow, wide = ((_complex(each) if x.is_complex() else each) for each in (kind, of))
        found[name] = x.to(narrow).to(wide).requires_grad_()
    return found


def _complex(kind: torch.dtype) -> torch.dtype:
    return torch.complex128 if kind == torch.float64 else torch.complex64


def reference(model: PatternModel, x: dict[str, torch.Tensor], patterns: torch.Tensor) -> torch.Tensor:
    """The loss as a plain program has it."""
    frequencies = [2 * torch.pi * torch.fft.fftfreq(n, dtype=torch.float64) for n in SHAPE]
    pixels = x["place"].detach().floor()
    loss = torch.zeros((), dtype=torch.float64)
    rows = zip(x["place"], pixels, x["weight"], x["shares"], patterns, strict=True)
    for place, pixel, weight, shares, pattern in rows:
        f = (place - pixel).double()
        turn = f[0] * frequencies[0][:, None] + f[1] * frequencies[1]
        ramp = torch.exp(-1j * turn).to(x["probe"].dtype)
        first = x["probe"][0] + (shares[:, None, None] * x["variations"]).sum(0)
        probe = torch.stack([first, *x["probe"][1:]])
        light = weight * torch.fft.ifft2(torch.fft.fft2(probe) * ramp)
        r, c = (int(n) for n in pixel)
        wave = light * x["object"][r : r + SHAPE[0], c : c + SHAPE[1]]
        if isinstance(model.propagator, NearField):
            back = torch.fft.ifft2(torch.fft.fft2(wave) * ramp.conj())
            wave = torch.fft.ifft2(torch.fft.fft2(back) * model.propagator.transfer)
        else:
            wave = torch.fft.fft2(wave) / (SHAPE[0] * SHAPE[1]) ** 0.5
        intensity = wave.abs().square().sum(0)
        intensity = sum(
            intensity[n :: model.oversampling, m :: model.oversampling]
            for n in range(model.oversampling)
            for m in range(model.oversampling)
        )
        intensity = intensity + x["background"].square()
        one = LOSSES[model.loss](intensity, pattern)[0]
        loss = loss + (one if model.mask is None else one * model.mask).sum(dtype=torch.float64)
    return loss


def test_gradients_are_those_of_automatic_differentiation() -> None:
    rows: list[tuple[Propagator, int]] = [(FarField(), 1), (FarField(), 3), (NEAR, 1)]
    for (propagator, oversampling), loss, masked in itertools.product(rows, LOSSES, (False, True)):
        generator = torch.Generator().manual_seed(1)
        detector = [n // oversampling for n in SHAPE]
        mask = torch.rand(detector, generator=generator) > 0.2 if masked else None
        patterns = torch.poisson(5 * torch.ones(5, *detector, dtype=torch.float64), generator)
        exact = leaves(torch.float32, of=torch.float64, detector=detector)
        differentiated(PatternModel(propagator, loss, mask, oversampling), exact, patterns)
        errors = {}
        for kind in (torch.float64, torch.float32):
            model = PatternModel(_of(propagator, kind), loss, None if mask is None else mask.to(kind), oversampling)
            x = leaves(torch.float32, of=kind, detector=detector)
            expected = differentiated(model, x, patterns.to(kind))
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


def differentiated(model: PatternModel, x: dict[str, torch.Tensor], patterns: torch.Tensor) -> torch.Tensor:
    """The loss as a plain program has it, whose gradients the leaves get."""
    loss = reference(model, x, patterns)
    loss.backward()
    return loss.detach()


def _of(propagator: Propagator, kind: torch.dtype) -> Propagator:
    if isinstance(propagator, NearField):
        return NearField(propagator.transfer.to(_complex(kind)))
    return propagator


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
    amplitude = counted[0].sqrt() * (SHAPE[0] * SHAPE[1]) ** 0.5
    difference = torch.fft.ifft2(amplitude * far / far.abs()) - exit_wave
    light, passed = probe[0].abs().square(), image[box].abs().square()
    expected = image.clone()
    expected[box] += probe[0].conj() * difference / ((1 - alpha) * light + alpha * light.max())
    expected_probe = probe[0] + image[box].conj() * difference / ((1 - alpha) * passed + alpha * passed.max())

    one = [slice(0, 1)]
    (found,) = PatternModel(FarField()).gradients(image, probe, torch.zeros(SHAPE), positions, counted, one)
    state = ReconstructionState({"object": image.clone(), "probe": probe / norm}, norm)
    gradients = {"object": gradient_of(found, "object", image), "probe": found.parts["probe"] * norm}
    rpie(
        state,
        gradients,
        {"object": 1.0, "probe": 1.0},
        PatternBatch([positions], 1.0, 1.0, SolverStage(epochs=1, lr=1.0, batch=1, alpha=alpha)),
    )
    torch.testing.assert_close(state.parameters["object"], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.probe[0], expected_probe, rtol=1e-6, atol=1e-6)
