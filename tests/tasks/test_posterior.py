"""Gaussian posteriors against dense linear algebra: precision, covariance, mean, draws and the map of deviations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from halotile.errors import InputError
from halotile.storage.grid import Region
from halotile.tasks.noise.simulated import gaussian, normals
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.operators.composition import Composition
from halotile.tasks.operators.mask import Mask
from halotile.tasks.operators.shift import Shift
from halotile.tasks.operators.sum import WeightedSum
from halotile.tasks.posterior import gaussian as equations
from halotile.tasks.posterior.gaussian import FIELD, MEASURED, Posterior, Solved, solve
from halotile.tasks.priors.matern import Excerpt, Matern, gain_of, likely, masks_nothing, transfer_of
from halotile.tasks.terms import Filled, Gradient, Measurement, NormalImage, Weights

Values = NDArray[Any]
N = 12
PRIOR = Matern(std=0.5, range=4.0, mean=0.2)


def kernel(sigma: float, reach: int) -> Values:
    line = np.exp(-np.square(np.arange(-reach, reach + 1) / sigma) / 2)
    outer: Values = np.outer(line, line) / line.sum() ** 2
    return outer


def data(n: int = N, hole: bool = True) -> tuple[Values, Values]:
    """A measurement with a hole, and the map of its noise."""
    y = 0.2 + 0.4 * np.random.default_rng(1).standard_normal((n, n))
    if hole:
        y[n // 3 : n // 2, n // 4 : n // 2] = np.nan
    return y, np.where(np.arange(n) < n // 2, 0.1, 0.3) * np.ones((n, n))


def posterior(*operators: Any, n: int = N, prior: Matern = PRIOR, hole: bool = True) -> Posterior:
    y, sigma = data(n, hole)
    filled, weights = Filled(InMemory(y)), Weights(InMemory(y), InMemory(sigma))
    parts = tuple(Measurement(operator, filled, weights, number) for number, operator in enumerate(operators))
    return Posterior(parts, prior, (n, n), np.dtype(np.float64))


def whole(of: Posterior) -> Region:
    return of.window(Region.whole(of.shape), 10**6)


def matrix(apply: Callable[[Values], Values], shape: tuple[int, ...]) -> Values:
    """The matrix of a linear map of a stack of images, a column for each pixel."""
    size = int(np.prod(shape))
    return apply(np.eye(size).reshape(size, *shape)).reshape(size, -1).T


def dense(of: Posterior) -> tuple[Values, Values, list[tuple[Values, Values, Values]]]:
    """Precision, that of the prior, and operator, weights and data of each measurement, on the domain; by other code."""
    edge, inner, prior = of.padding, whole(of).shape, of.prior

    def white(units: Values) -> Values:
        field = np.pad(units, ((0, 0), (2, 2), (2, 2)))
        around = sum(np.roll(field, step, axis) for step in (1, -1) for axis in (1, 2))
        return (prior.tau * ((prior.kappa2 + 4) * field - around))[:, 1:-1, 1:-1]

    d = matrix(white, inner)
    parts = []
    for part in of.measurements:

        def seen(units: Values, operator: Any = part.operator) -> Values:
            return read_all(operator.forward(InMemory(units[:, edge:-edge, edge:-edge].copy())))

        parts.append((matrix(seen, inner), read_all(part.weight).ravel(), read_all(part.data).ravel()))
    return (d.T @ d + sum(a.T @ (w[:, None] * a) for a, w, _ in parts)), d.T @ d, parts


OPERATORS = {
    "pixels": (Blur(kernel=np.ones((1, 1)), boundary="zero"),),
    "blur": (Blur(kernel=kernel(1.2, 2), boundary="zero"),),
    "folded": (Blur(kernel=kernel(1.2, 2), boundary="reflect"),),
    "halves": (Blur(kernel=kernel(1.0, 2), boundary="replicate"), Mask(mask=InMemory(np.eye(N) + 0.5))),
}


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
def test_precision_inverse_and_mean_are_those_of_dense_matrices(operators: tuple[Any, ...]) -> None:
    """The mean as that of the Wiener filter: a formula in the space of the data, which has no precision in it."""
    of = posterior(*operators)
    window, (q, prior, parts) = whole(of), dense(of)
    apply, units = of.precision(window), np.eye(len(q)).reshape(-1, *window.shape)
    assert np.abs(apply(units).reshape(len(q), -1).T - q).max() < 1e-12 * np.abs(q).max()
    found = solve(apply, units[::7], np.ones(window.shape) * np.diag(q).max(), 1e-13)
    covariance = np.linalg.inv(q)
    assert np.abs(found.images.reshape(-1, len(q)) - covariance[::7]).max() < 1e-9 * np.abs(covariance).max()
    field = np.linalg.inv(prior)
    a, w, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    seen = w > 0
    a, noise, away = a[seen], np.diag(1 / w[seen]), y[seen] - a[seen].sum(1) * of.prior.mean
    expected = of.prior.mean + field @ a.T @ np.linalg.solve(a @ field @ a.T + noise, away)
    frame = np.zeros(window.shape, bool)
    frame[of.padding : -of.padding, of.padding : -of.padding] = True
    mean, _ = Solved(of, 10**6, (), 1e-11).solved(Region.whole(of.shape))
    assert np.abs(mean[0].ravel() - expected[frame.ravel()]).max() < 1e-9


SPOTS = {"circular": kernel(1.2, 2), "negative": kernel(1.2, 2) - 0.05}
LEAST_SQUARES = OPERATORS | {name: (Blur(kernel=spot),) for name, spot in SPOTS.items()}


@pytest.mark.parametrize("operators", LEAST_SQUARES.values(), ids=LEAST_SQUARES)
def test_least_squares_on_the_domain_have_the_same_precision_and_sides(operators: tuple[Any, ...]) -> None:
    of = posterior(*operators)
    window = whole(of)
    image = np.random.default_rng(0).standard_normal(window.shape)
    for draw, side in ((None, of.sides(window)[0]), (3, of.random_sides(window, (3,))[0])):
        terms = of.terms(draw)
        applied: Values = read_all(NormalImage(InMemory(image), terms))
        assert np.allclose(applied, of.precision(window)(image[None])[0], rtol=0, atol=1e-12 * np.abs(applied).max())
        found: Values = read_all(Gradient(InMemory(np.zeros(window.shape)), terms))
        assert np.allclose(-found, side, rtol=0, atol=1e-12 * np.abs(side).max())
        part = Region((2, 3), (9, 15))
        assert np.array_equal(NormalImage(InMemory(image), terms).read(part), applied[part.slices])


def test_sides_have_the_covariance_of_the_precision_and_one_field_has_the_same_numbers_in_any_window() -> None:
    of = posterior(Blur(kernel=kernel(1.2, 2), boundary="reflect"))
    window, (q, _, _) = whole(of), dense(of)
    draws = range(800)
    sides = of.random_sides(window, draws).reshape(len(draws), -1)
    seen = sides.T @ sides / len(draws)
    spread = np.sqrt((np.square(q) + np.outer(np.diag(q), np.diag(q))) / len(draws))
    assert np.abs((seen - q) / spread).max() < 6
    assert np.mean(np.square((seen - q) / spread)) == pytest.approx(1, abs=0.1)
    part = Region((3, 5), (12, 14))
    inner: tuple[Any, ...] = (slice(None), *part.relative_to(window).slices)
    assert np.array_equal(of.random_sides(part, (7,))[0], of.random_sides(window, (3, 7))[inner][1])
    assert np.array_equal(of.sides(part)[0], of.sides(window)[inner][0])


def test_no_number_of_a_draw_is_one_of_a_simulated_measurement() -> None:
    pixel, keys = Region((0, 0), (1, 1)), itertools.product(range(3), (MEASURED, FIELD), range(3), range(3))
    drawn = {normals(pixel, seed, tuple(key)).item() for seed, *key in keys}
    numbers, zero = itertools.product(range(4), repeat=2), np.zeros((1, 1))
    simulated = {gaussian(zero, pixel, sigma=1, seed=a, operator=b).item() for a, b in numbers}
    assert len(drawn) == 2 * 27
    assert not drawn & simulated


@pytest.mark.parametrize(
    ("operator", "most"),
    [(Blur(kernel=np.ones((1, 1)), boundary="zero"), 0.6), (Blur(kernel=kernel(1.2, 3), boundary="zero"), 0.75)],
    ids=["denoising", "deblurring"],
)
def test_the_map_of_deviations_needs_fewer_draws_than_plain_squares(operator: Blur, most: float) -> None:
    of = posterior(operator, n=20, prior=Matern(std=0.5, range=8.0, mean=0.0))
    window, (q, _, _) = whole(of), dense(of)
    core = Region.whole(of.shape)
    exact = np.sqrt(np.diag(np.linalg.inv(q))).reshape(window.shape)[core.relative_to(window).slices]

    def error(estimator: str) -> float:
        found, _ = Solved(of, 10**6, tuple(range(16)), 1e-2, estimator).solved(core)
        return float(np.sqrt(np.mean(np.square(found[1] / exact - 1))))

    assert (plain := error("samples")) == pytest.approx(1 / np.sqrt(32), rel=0.25)
    assert error("rao-blackwell") < most * plain


UNKNOWN = {
    "folded": (Blur(kernel=kernel(1.2, 2), boundary="reflect"),),
    "mask": (Mask(mask=InMemory(np.eye(N) + 0.5)),),
    "flags": (Mask(mask=InMemory(255 * np.eye(N, dtype=np.uint8))),),
    "blur and mask": (Composition((Blur(kernel=kernel(1.2, 2), boundary="zero"), Mask(mask=InMemory(np.tri(N))))),),
}


@pytest.mark.parametrize("operators", UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_diagonal_is_not_known_the_variance_is_unbiased(operators: tuple[Any, ...]) -> None:
    of, even = posterior(*operators, n=N), InMemory(np.full((N, N), 0.05))
    of = replace(of, measurements=tuple(replace(m, weight=Weights(m.data, even)) for m in of.measurements))
    window, (q, _, _) = whole(of), dense(of)
    core, known = Region.whole(of.shape), of.diagonal(window)
    is_known = np.isfinite(known)
    assert np.allclose(known[is_known], np.diag(q).reshape(window.shape)[is_known])
    assert is_known.all() == (operators[0].name == "mask")
    assert np.all(of.scale(window, known) >= (1 - 1e-6) * np.diag(q).reshape(window.shape))
    exact = np.diag(np.linalg.inv(q)).reshape(window.shape)[core.relative_to(window).slices]
    found, _ = Solved(of, 10**6, tuple(range(96)), 5e-2).solved(core)
    ratio = np.square(found[1]) / exact
    assert np.mean(ratio) == pytest.approx(1, abs=0.05)
    assert 0.5 < ratio.min() <= ratio.max() < 1.7


@pytest.mark.parametrize(("away", "cases"), [(0, [(1e-2, 3), (1e-3, 3)]), (30, [(1e-2, 3), (1e-2, 0)])])
def test_a_block_has_the_mean_and_the_draws_of_the_whole(away: float, cases: list[tuple[float, int]]) -> None:
    """``away``: distance of the image from the mean of the prior."""
    of = posterior(Blur(kernel=kernel(1.2, 3), boundary="reflect"), n=64)
    (part,) = of.measurements
    weights, y = (np.asarray(read_all(image), np.float64) for image in (part.weight, part.data))
    of = replace(of, measurements=(replace(part, data=InMemory(np.where(weights > 0, y + away, 0))),))
    core = Region((20, 20), (40, 44))
    exact, _ = Solved(of, 10**6, (0, 1, 2), 1e-5, keeps_draws=True).solved(Region.whole(of.shape))
    exact = exact[(slice(None), *core.slices)]
    for tol, count in cases:
        halos, draws = [], tuple(range(count))
        for halo in (4, 12, 16, 24):
            found, error = Solved(of, halo, draws, tol, keeps_draws=True).solved(core)
            seen = np.abs((found - exact[: 2 + count])[[0, *range(2, 2 + count)]] / exact[1]).max()
            if np.abs(error).max() <= tol:
                halos.append(halo)
                assert seen <= tol
        assert halos
        with pytest.raises(InputError, match=r"Write posterior\.halo: 4"):
            Solved(of, 2, draws, tol).read(Region((0, *core.start), (2, *core.stop)))


def test_a_long_range_is_solved_in_double_precision_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = posterior(Blur(kernel=kernel(1.2, 2), boundary="reflect"), n=24, prior=Matern(std=3.0, range=24.0, mean=0.0))
    single, core = replace(of, dtype=np.dtype(np.float32)), Region.whole(of.shape)
    exact, _ = Solved(of, 10**6, (0,), 1e-3, keeps_draws=True).solved(core)
    solved = Solved(single, 10**6, (0,), 1e-2, keeps_draws=True)
    found, _ = solved.solved(core)
    assert found.dtype == np.float32
    assert np.abs((found - exact)[[0, 2]] / exact[1]).max() < 1e-2
    monkeypatch.setattr(equations, "solve", partial(solve, most=20))
    with pytest.raises(InputError, match=r"are not solved after 20 steps .* Write a larger posterior.tol than 0.01"):
        solved.solved(core)


def test_the_prior_has_its_deviation_up_to_the_edge_and_at_any_range() -> None:
    y, _ = data(24)
    pixels = Blur(kernel=np.ones((1, 1)), boundary="zero")
    nothing = Measurement(pixels, Filled(InMemory(y)), InMemory(np.zeros((24, 24))))
    of = Posterior((nothing,), Matern(std=2.0, range=6.0, mean=0.0), (24, 24), np.dtype(np.float64))
    window = whole(of)
    std = np.sqrt(np.diag(np.linalg.inv(dense(of)[1]))).reshape(window.shape)[6:-6, 6:-6]
    assert std.min() > 0.9 * 2.0
    assert std.max() < 1.05 * 2.0
    for size in (2.0, 3.0, 8.0, 40.0):
        assert Matern(std=2.0, range=size, mean=0.0).spectrum((512, 512)).mean() == pytest.approx(4.0, rel=1e-9)


@pytest.mark.parametrize("brightness", [30.0, 1000.0])
def test_what_is_bright_beyond_a_hole_as_wide_as_the_halo_is_seen(brightness: float) -> None:
    y = 0.3 * np.random.default_rng(0).standard_normal((64, 192))
    y[:, 116:] += brightness
    y[:, 86:115] = np.nan
    even = Weights(InMemory(y), InMemory(np.full(y.shape, 0.3)))
    part = Measurement(Blur(kernel=np.ones((1, 1)), boundary="zero"), Filled(InMemory(y)), even)
    of = Posterior((part,), Matern(std=1.0, range=6.0, mean=0.0), y.shape, np.dtype(np.float64))
    core = Region((0, 32), (64, 96))
    found, checked = Solved(of, 16, (0,), 1e-2).solved(core)
    exact, _ = Solved(of, 200, (0,), 1e-2).solved(core)
    assert np.abs(checked).max() > np.abs((found - exact)[0] / exact[1]).max() > 1e-2


def test_pixels_without_a_measurement_have_no_weight_and_negative_noise_is_refused() -> None:
    y, sigma = np.array([[1.0, np.nan, 2.0, 2.0]]), np.array([[0.5, 0.5, 0.0, np.nan]])
    assert read_all(Weights(InMemory(y), InMemory(sigma))).tolist() == [[4, 0, 0, 0]]
    with pytest.raises(InputError, match=r"the map of the noise has -0\.5 among its pixels"):
        read_all(Weights(InMemory(y), InMemory(-sigma)))


def test_a_solution_or_an_error_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = np.stack([np.zeros((4, 4)), np.ones((4, 4)), np.arange(16.0).reshape(4, 4)])
    found = solve(lambda image: image * 2, sides, np.ones((4, 4)), 1e-8)
    assert np.allclose(found.images, sides / 2)
    assert not found.images[0].any()
    with pytest.raises(InputError, match="not finite"):
        solve(lambda image: image, np.full((1, 2, 2), np.nan), np.ones((2, 2)), 1e-3)
    solved, core = Solved(posterior(Blur(kernel=np.ones((1, 1)), boundary="zero")), 4, (), 1e-2), Region((0, 0), (4, 4))
    with monkeypatch.context() as patch:
        patch.setattr(Posterior, "precision", lambda self, window: lambda images: images * np.nan)
        with pytest.raises(InputError, match="are not solved after"):
            solved.solved(core)
    monkeypatch.setattr(Solved, "solved", lambda self, core: (np.zeros((2, 4, 4)), np.full((4, 4), np.nan)))
    with pytest.raises(InputError, match="leaves errors of nan"):
        solved.read(Region((0, 0, 0), (2, 4, 4)))


@pytest.mark.parametrize("size", [4.0, 12.0])
@pytest.mark.parametrize("blurred", [False, True])
def test_the_prior_is_found_from_windows_of_the_data(size: float, blurred: bool) -> None:
    true = Matern(std=0.5, range=size, mean=3.0)
    rng, edge = np.random.default_rng(5), 128
    field = np.fft.ifft2(np.fft.fft2(rng.standard_normal((512, 512))) * np.sqrt(true.spectrum((512, 512)))).real + 3.0
    operator = Blur(kernel=kernel(1.5, 4) if blurred else np.ones((1, 1)), boundary="circular")
    blurred_field: Values = read_all(operator.forward(InMemory(field)))
    seen = blurred_field + 0.1 * rng.standard_normal((512, 512))
    corners = itertools.product(range(0, 512, edge), repeat=2)
    windows = [Excerpt(seen[a : a + edge, b : b + edge], 0.01) for a, b in corners]
    transfer = transfer_of(operator, edge)
    assert transfer is not None
    found = likely(windows, transfer, Matern(), gain_of(operator))
    assert found.prior.std == pytest.approx(0.5, rel=0.08)
    assert found.prior.range == pytest.approx(size, rel=0.1)
    assert found.prior.mean == pytest.approx(3.0, abs=0.1)
    assert 0.002 < found.std_error < 0.08
    given = Matern(std=0.7, range=9.0, mean=1.0)
    assert likely(windows, transfer, given, gain_of(operator)).prior == given


SPOT = kernel(1.0, 2)
ALIKE: dict[str, tuple[Any, bool]] = {
    "blur": (Blur(kernel=SPOT, boundary="reflect"), True),
    "valid": (Blur(kernel=SPOT, boundary="valid"), True),
    "mask": (Mask(mask=InMemory(np.ones((64, 64)))), True),
    "blur and mask": (Composition((Blur(kernel=SPOT), Mask(mask=InMemory(np.ones((64, 64)))))), True),
    "factor": (Blur(kernel=SPOT, factor=2), False),
    "kernel for each plane": (Blur(kernel=np.stack([SPOT, SPOT])), False),
    "kernel without sum": (Blur(kernel=np.array([[1.0, -1.0]])), False),
    "sum": (WeightedSum((Blur(kernel=SPOT),), (1.0,)), False),
    "another": (Shift(shift=(1.0, 0.0)), False),
}


def test_only_operators_that_treat_all_pixels_alike_have_a_transfer() -> None:
    for operator, is_alike in ALIKE.values():
        transfer = transfer_of(operator, 32)
        assert (transfer is not None) == is_alike
        if transfer is not None:
            blurs = operator.name != "mask"
            assert np.allclose(transfer, np.square(np.abs(np.fft.fft2(SPOT, (32, 32)))) if blurs else 1)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_windows_near_a_masked_pixel_say_nothing_of_the_prior(dtype: str) -> None:
    mask = np.ones((64, 64), dtype)
    mask[40, 40] = 0
    operator = Composition((Blur(kernel=SPOT, boundary="valid"), Mask(mask=InMemory(mask))))
    free = [masks_nothing(operator, Region((a, a), (a + 8, a + 8))) for a in (20, 30, 36, 40, 50)]
    assert free == [True, False, False, False, True]
