"""A physics of deepinv as an operator: whatever it is, its adjoint is the adjoint and a region is that of the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from distributed.protocol.pickle import dumps, loads

from halotile.errors import ConfigError, MissingPackage
from halotile.storage.grid import Region
from halotile.tasks.operators.base import InMemory, OperatorKind
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.deepinv import DeepInv
from halotile.tasks.operators.mask import Mask
from tests.tasks.operators.test_operators import TOLERANCE, check_adjoint, kernel, numbers, pair, some_regions, whole

physics = pytest.importorskip("deepinv.physics")

IMAGE = (2, 40, 33)
PSF = kernel(5, 4)
MASK = (numbers(40, 33) > 0.5).astype("float32")
COILS = numbers(1, 3, 40, 33) + 1j * numbers(1, 3, 40, 33, seed=1)


def differences(x: Any, mode: str = "constant", more: float = 0.0) -> Any:
    """Pixels minus their neighbours."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode)
    around = padded[..., 1:-1, 2:] + padded[..., 1:-1, :-2] + padded[..., 2:, 1:-1] + padded[..., :-2, 1:-1]
    return (4 + more) * x - around


folding, wrapping = (partial(differences, mode=mode) for mode in ("reflect", "circular"))
wrong = partial(differences, more=1.0)


def ramp(x: Any) -> Any:
    return x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


def made(forward: Callable[[Any], Any], adjoint: Callable[[Any], Any] | None) -> Any:
    return physics.LinearPhysics(A=forward, A_adjoint=adjoint)


def named(name: str, **options: Any) -> DeepInv:
    return DeepInv(physics=name, options=options)


OURS: dict[str, tuple[DeepInv, type]] = {
    **{f"blur {padding}": (named("Blur", filter=PSF, padding=padding), Blur) for padding in ("circular", "reflect", "replicate", "valid", "constant")},
    "blur by fft": (named("Blur", filter=PSF, padding="circular", use_fft=True), Blur),
    "blur of each plane": (named("Blur", filter=kernel(2, 5, 3)[None], padding="circular"), Blur),
    "BlurFFT": (named("BlurFFT", filter=PSF.tolist(), img_size=[2, 40, 33]), Blur),
    "downsampling": (named("Downsampling", filter="bicubic", factor=2, padding="reflect"), Blur),
    "decimation": (named("Downsampling", filter=None, factor=2, padding="valid"), Blur),
    "denoising": (named("Denoising"), Blur),
    "inpainting": (named("Inpainting", mask=0.5, img_size=[2, 40, 33]), Mask),
}  # fmt: skip
GENERIC: dict[str, tuple[DeepInv, OperatorKind, int, tuple[int, ...]]] = {
    "differences": (DeepInv(physics=made(differences, differences), reach_="auto"), "local", 1, IMAGE),
    "folding, no adjoint": (DeepInv(physics=made(folding, None), reach_="auto"), "local", 1, IMAGE),
    "wrong adjoint": (DeepInv(physics=made(differences, wrong), reach_="auto"), "local", 1, IMAGE),
    "declared": (DeepInv(physics=made(folding, None), reach_=3), "local", 3, IMAGE),
    "many images": (DeepInv(physics=made(folding, None), reach_="auto"), "local", 1, (2, 2, 3, 20, 17)),
    "no reach": (DeepInv(physics=made(differences, differences)), "whole", 0, IMAGE),
    "wrapping": (DeepInv(physics=made(wrapping, wrapping), reach_="auto"), "whole", 0, IMAGE),
    "different everywhere": (DeepInv(physics=made(ramp, ramp), reach_="auto"), "whole", 0, IMAGE),
    "colours to grey": (named("Decolorize"), "whole", 0, (3, 40, 33)),
    "MRI": (named("MRI", mask=MASK, img_size=[2, 40, 33]), "whole", 0, IMAGE),
    "MRI with several coils": (named("MultiCoilMRI", mask=MASK, coil_maps=COILS), "whole", 0, IMAGE),
    "tomography": (named("Tomography", angles=6, img_width=16, normalize=False), "whole", 0, (16, 16)),
    "compressed sensing": (named("CompressedSensing", m=50, img_size=[1, 12, 12]), "whole", 0, (12, 12)),
}
SINGLE_ONLY = {"tomography", "compressed sensing"}
"""Physics of deepinv that compute in single precision whatever they are given."""
CASES = {name: (operator, IMAGE) for name, (operator, _) in OURS.items()} | {
    name: (operator, image) for name, (operator, _, _, image) in GENERIC.items()
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_its_adjoint_the_whole_in_any_region_and_travels(name: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        x, y, forward, adjoint = pair(CASES[name][0], dtype, CASES[name][1])
        wholes = whole(forward), whole(adjoint)
        check_adjoint((x, y, *wholes), dtype, TOLERANCE["float32"] if name in SINGLE_ONLY else tolerance)
    x, y, forward, adjoint = pair(CASES[name][0], "float32", CASES[name][1])
    windows = name in GENERIC and CASES[name][0].kind == "local"
    for source in (forward, adjoint):
        everything = whole(source)
        for region in some_regions(everything.shape, 4):
            gap = np.abs(np.asarray(source.read(region)) - everything[region.slices]).max()
            assert gap <= (1e-6 * np.abs(everything).max() if windows else 0), region
    operator = loads(dumps(CASES[name][0]))
    assert np.array_equal(whole(operator.forward(InMemory(x))), whole(forward))
    assert np.array_equal(whole(loads(dumps(operator.adjoint(InMemory(y), x.shape)))), whole(adjoint))


def test_what_is_ours_becomes_ours_what_another_sees_is_found_out_and_both_measure_what_deepinv_does() -> None:
    for name, (operator, kind) in OURS.items():
        assert (type(operator.replacement), operator.kind) == (kind, "local"), name
        x, _, forward, _ = pair(CASES[name][0], "float32")
        there = operator.calls.forward(x)
        assert np.abs(whole(forward) - there).max() <= 5e-6 * np.abs(there).max(), name
    for name, (operator, seen, reach, _) in GENERIC.items():
        assert (operator.replacement, operator.kind, operator.reach) == (None, seen, reach), name
    for name in ("differences", "MRI", "MRI with several coils"):
        x, _, forward, _ = pair(CASES[name][0], "float32")
        there = CASES[name][0].calls.module.A(torch.from_numpy(x)[None])[0].numpy()
        assert np.array_equal(whole(forward), there), name


def test_an_image_of_one_channel_has_two_axes_and_a_filter_is_read_from_its_file(tmp_path: Any) -> None:
    x = numbers(30, 20).astype("float32")
    np.save(tmp_path / "psf.npy", PSF)
    blur, read = (named("Blur", filter=given, padding="reflect") for given in (PSF, str(tmp_path / "psf.npy")))
    assert np.array_equal(whole(blur.forward(InMemory(x))), whole(read.forward(InMemory(x[None]))).reshape(30, 20))
    assert DeepInv(physics=made(differences, differences), reach_="auto").measured((30, 20)) == (30, 20)


def test_what_a_physics_draws_is_the_same_in_every_process() -> None:
    seeds = (3, 3, 4)
    one, same, other = (named("Inpainting", mask=0.5, img_size=[1, 20, 20], rng=seed) for seed in seeds)
    before = torch.random.get_rng_state()
    masks = [operator.calls.module.mask for operator in (one, same, other)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_map_of_the_whole_is_computed_once_with_memory_that_is_known_in_advance() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(tuple(x.shape))
        return wrapping(x)

    forward = DeepInv(physics=made(counted, wrapping)).forward(InMemory(numbers(20, 300)))
    calls.clear()
    for start in range(0, 300, 50):
        forward.read(Region((0, start), (20, start + 50)))
    assert calls == [(1, 1, 20, 300)]
    tomography = GENERIC["tomography"][0]
    measured = int(np.prod(tomography.measured((16, 16))))
    assert tomography.memory_bytes((16, 16)) == 4 * 3 * (256 + measured)


def test_without_deepinv_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepinv.physics", None)
    with pytest.raises(MissingPackage, match=r"halotile\[deepinv\]"):
        _ = named("Denoising").kind


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no class": (lambda: named("Bluur").kind, "Did you mean 'Blur'"),
    "not linear": (lambda: named("PhaseRetrieval").kind, "not a linear physics"),
    "not a physics": (lambda: DeepInv(physics=3).kind, "physics is a int"),
    "a stack": (lambda: DeepInv(physics=physics.stack(physics.Denoising(), physics.Denoising())).kind, "Write each operator of a stack by itself"),
    "options": (lambda: named("Tomography", corners=4).kind, "options has 'corners', which physics Tomography does not take. Write some of angles, img_width"),
    "an option misspelt": (lambda: named("Blur", paddin="circular").kind, r"'paddin', which .* Did you mean 'padding'\?"),
    "options that do not fit": (lambda: named("Tomography", angles="many", img_width=16).kind, r"cannot be built with the options \['angles', 'img_width'\]"),
    "reach that is none": (lambda: DeepInv(physics="Blur", reach_=-1), "reach is -1"),
    "reach too short": (lambda: DeepInv(physics=made(folding, None), reach_=0).measured(IMAGE), "reach is 0, but LinearPhysics looks farther"),
    "complex numbers": (lambda: DeepInv(physics=made(torch.fft.fft2, None)).measured(IMAGE), "one measurement of real numbers"),
}  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    for attempt, words in REFUSED.values():
        with pytest.raises(ConfigError, match=words):
            attempt()
