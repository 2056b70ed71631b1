"""Filters in C have the bits of those on tensors, at all sizes and in all positions."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from halotile.tasks.denoisers import gaussian, median, tv
from halotile.tasks.denoisers.base import Denoiser
from halotile.tasks.denoisers.compiled import library as compiled
from halotile.tasks.denoisers.nlm import NonLocalMeans, exponential_
from tests.cases import thorough

FILTERS = [
    *(gaussian.Gaussian(sigma=sigma) for sigma in (0.1, 0.3, 0.6, 1.5, 4.0)), gaussian.Gaussian(sigma=1.0, spacing=(1.0, 3.0)),
    *(median.Median(size=size) for size in (3, 5, 7, 9, 17)), thorough(median.Median(size=15)),
    *(tv.TotalVariation(strength=0.2, iterations=steps) for steps in (1, 2, 20)), tv.TotalVariation(strength=2.0, sigma=0.1),
    NonLocalMeans(strength=0.8, sigma=0.3),
    *(NonLocalMeans(strength=0.5, patch=edge, distance=2) for edge in range(1, 16, 2)),
    *(NonLocalMeans(strength=0.5, distance=9, spacing=spacing) for spacing in ((1.0, 2.0), (2.0, 1.0))),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    """Where there is a compiler, the filters were compiled when the package was installed."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    assert compiled.library() is not None


def on_tensors(denoiser: Denoiser, image: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The result without compiled code."""
    with monkeypatch.context() as context:
        context.setattr(compiled, "library", lambda: None)
        return denoiser.build()(image)


class FailingLibrary:
    """In place of the compiled filters: none of them gets its memory."""

    called: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        self.called.append(name)
        return lambda *_: 1


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two images are the same, zeros of another sign and NaN too."""
    return bool(torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)))


@pytest.mark.parametrize("denoiser", FILTERS, ids=str)
def test_filters_have_the_bits_of_those_on_tensors(denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in [(2, 1, 67, 131), (1, 2, 40, 1100), (1, 1, 1, 17), (1, 1, 18, 1), (3, 1, 2, 2), (1, 1, 1, 1)]:
        image = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        image[..., 0] = -0.0
        for given in (image, image.transpose(2, 3), (image * 3).round()):
            before = given.clone()
            assert same_bits(denoiser.build()(given), on_tensors(denoiser, given, monkeypatch)), shape
            assert same_bits(given, before)
    for value in (float("nan"), float("inf"), -float("inf"), 3e38, 1e-42):
        image = torch.randn(1, 1, 50, 60, generator=torch.Generator().manual_seed(1))
        image[0, 0, 20, 30] = image[0, 0, -1, -1] = value
        found, expected = denoiser.build()(image), on_tensors(denoiser, image, monkeypatch)
        assert torch.equal(found.isnan(), expected.isnan())
        assert same_bits(found.nan_to_num(1.5), expected.nan_to_num(1.5)), value


@pytest.mark.parametrize("size", [9, 31, 101])
def test_large_medians_follow_steps_and_ties_and_go_far(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of each window of the last images is half of all ranks away from that of the one before."""
    rows, columns = torch.meshgrid(torch.arange(50.0), torch.arange(70.0), indexing="ij")
    wide = torch.where(columns.int() // 40 % 2 == 0, -1e30, 1e30)
    images = [rows - columns, wide, (rows + columns) % 2, torch.full((50, 70), -0.0)]
    if size == 9:
        noise, narrow = torch.randn(300, 330, generator=torch.Generator().manual_seed(1)), torch.arange(330) % 2
        images += [narrow.expand(300, 330).float(), narrow + noise / 20, 5 * narrow - noise]
    for image in images:
        batch, denoiser = image[None, None].contiguous(), median.Median(size=size)
        assert same_bits(denoiser.build()(batch), on_tensors(denoiser, batch, monkeypatch))


def test_the_code_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    FailingLibrary.called.clear()
    monkeypatch.setattr(compiled, "library", FailingLibrary)
    medians = median.Median(size=3), median.Median(size=9)
    for denoiser in (gaussian.Gaussian(sigma=1), *medians, tv.TotalVariation(strength=1), NonLocalMeans(strength=1)):
        with pytest.raises(MemoryError, match="could not get its memory"):
            denoiser.build()(torch.ones(1, 1, 8, 8))
    assert FailingLibrary.called == ["smooth", "median_3", "median_of", "total_variation", "nonlocal_means"]


def test_what_they_do_not_take_is_done_on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", FailingLibrary)
    derived = torch.ones(1, 1, 8, 8, requires_grad=True)
    for denoiser, image in [
        (gaussian.Gaussian(sigma=1), torch.ones(1, 1, 8, 8, dtype=torch.float64)),
        (gaussian.Gaussian(sigma=1), torch.ones(1, 1, 4, 8, 8)),
        (median.Median(size=3), derived),
        (median.Median(size=17), torch.ones(1, 1, 3, 20, 20)),
        (tv.TotalVariation(strength=1, spacing=(1.0, 2.0)), torch.ones(1, 1, 8, 8)),
        (NonLocalMeans(strength=1), derived),
    ]:
        result = denoiser.build()(image)
        assert result.requires_grad == image.requires_grad
        assert torch.allclose(result, image)


def test_planes_with_too_many_pixels_for_ranks_are_done_on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randn(1, 1, 12, 22, generator=torch.Generator().manual_seed(1))
    expected = on_tensors(median.Median(size=9), image, monkeypatch)
    monkeypatch.setattr(compiled, "library", FailingLibrary)
    monkeypatch.setattr(median, "MOST_RANKS", 20 * 30 - 1)
    assert same_bits(median.Median(size=9).build()(image), expected)
    monkeypatch.setattr(median, "MOST_RANKS", 20 * 30)
    with pytest.raises(MemoryError):
        median.Median(size=9).build()(image)


@pytest.mark.parametrize("filter_of", [tv.TotalVariation, NonLocalMeans])
def test_one_noise_level_in_a_map_is_one_number(filter_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randn(2, 1, 30, 40, generator=torch.Generator().manual_seed(1))
    known, by_map = filter_of(strength=1.0, sigma=0.25), filter_of(strength=1.0, sigma="auto")
    levels = torch.full_like(image, 0.25)
    assert same_bits(known.build()(image), by_map.build()(image, sigma=levels))
    monkeypatch.setattr(compiled, "library", FailingLibrary)
    with pytest.raises(MemoryError):
        by_map.build()(image, sigma=levels)
    levels[0, 0, 3, 4] = 0.5
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert by_map.build()(image[:1], sigma=levels[:1]).isfinite().all()


def test_gradients_of_means_are_those_of_differences() -> None:
    means = NonLocalMeans(strength=1.0, sigma="auto", patch=3, distance=2).build()
    drawn = torch.randn(3, 1, 1, 9, 8, generator=torch.Generator().manual_seed(1))
    image, levels, valid = drawn[0], drawn[1].abs() + 0.5, (drawn[2] > -1).float()
    image.requires_grad_()
    levels.requires_grad_()
    step = 1e-3 * torch.randn(image.shape, generator=torch.Generator().manual_seed(2))
    for more in ({}, {"valid": valid}):
        for along in ((step, 0 * step), (0 * step, step)):
            gradients = torch.autograd.grad(means(image, sigma=levels, **more).square().sum(), [image, levels])
            with torch.no_grad():
                moved = (means(image + n * along[0], sigma=levels + n * along[1], **more) for n in (1, -1))
                ends = [each.double().square().sum() for each in moved]
                slope = sum(float((g * a).sum()) for g, a in zip(gradients, along, strict=True))
            assert slope == pytest.approx(float(ends[0] - ends[1]) / 2, rel=0.02)
    uniform = torch.full_like(image, 0.5, requires_grad=True)
    assert means(image.detach(), sigma=uniform).requires_grad


def test_exponentials_have_the_same_bits_in_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    values = -90 * torch.rand(3, 1, 5, 999, generator=torch.Generator().manual_seed(1))
    values[0, 0, 0, :4] = torch.tensor([0.0, -0.0, -torch.inf, torch.nan])
    found, exact = exponential_(values.clone()), values.double().exp().masked_fill(values < -87, 0)
    assert torch.allclose(found.double(), exact, rtol=1e-7, atol=0, equal_nan=True)
    assert same_bits(found, exponential_(values.clone().transpose(2, 3)).transpose(2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        assert same_bits(found, exponential_(values.clone()))
    monkeypatch.setattr(compiled, "digest_of_sources", lambda: "0" * 64)
    assert compiled.library.__wrapped__() is None


def test_means_of_images_with_holes_and_of_volumes_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = NonLocalMeans(strength=0.8, sigma=0.3, distance=2)
    image = torch.randn(1, 1, 12, 31, 29, generator=torch.Generator().manual_seed(1))
    assert same_bits(denoiser.build()(image), on_tensors(denoiser, image, monkeypatch))
    holed, valid = image[:, :, 0], (image[:, :, 1] > -1).float()
    found = denoiser.build()(holed, valid=valid)
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert same_bits(found, denoiser.build()(holed, valid=valid))


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build, with a compiler that speaks Latin-1 and writes an empty library, which is put nowhere."""
    spec = importlib.util.spec_from_file_location("hatch_build", Path(__file__).parents[2] / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_put_in_place", lambda file, place: None)
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'd\\351conseill\\351\\n' >&2\nexit ${STATUS:-0}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    return module


def test_a_compiler_may_print_in_any_encoding(build: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert build.compile_kernels()
    for empty in ("", " "):
        monkeypatch.setenv("CC", empty)
        assert build.compile_kernels()
    monkeypatch.setenv("STATUS", "1")
    assert not build.compile_kernels()
    assert "conseill" in capsys.readouterr().err
    monkeypatch.setenv("CC", '"unclosed')
    assert not build.compile_kernels()
    assert "installed without compiled filters: No closing quotation" in capsys.readouterr().err
