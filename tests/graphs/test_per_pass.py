"""Several iterations in one run_pass: the images between are stored nowhere, and nothing else is different."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halotile.graphs.jobs.reconstruct.costs import choose_form
from halotile.graphs.solvers.base import CHANGE, Problem, Solver, State
from halotile.graphs.solvers.gd import GradientDescent
from halotile.graphs.solvers.pgd import ProximalGradient
from halotile.storage.rim import Readable
from halotile.tasks.convolution.overlap_save import EngineName
from halotile.tasks.denoisers.gaussian import Gaussian
from halotile.tasks.denoisers.tv import TotalVariation
from halotile.tasks.exact_sums import dot
from halotile.tasks.image_task import ImageTask
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.normal import weighted_adjoint
from halotile.tasks.priors.base import Prior, denoised_in
from halotile.tasks.priors.l1 import Sparse
from halotile.tasks.priors.none import NoPrior
from halotile.tasks.priors.tv import Variation
from halotile.tasks.terms import MISFIT, Gradient, Term
from tests.cases import all_of, thorough
from tests.graphs.inline import InlineIterations, inline
from tests.graphs.solving import blurs, denoised_by, in_memory, iterations_of, plugged, problem_of, scene, terms_of

IMAGE = scene((91, 77))
SOLVERS: dict[str, Solver] = {"gd": GradientDescent(), "pgd": ProximalGradient()}
BOUNDARIES = ["circular", "reflect", "replicate", "zero", "valid"]


def prior_of(name: str) -> Prior:
    if name == "none":
        return NoPrior()
    if name == "l1":
        return Sparse(weight=0.01)
    denoiser = Gaussian(sigma=0.7) if name == "gaussian" else TotalVariation(strength=0.1, iterations=4)
    denoised = denoised_by(denoiser, IMAGE, 64, 40)
    return Variation(denoised=denoised, weight=0.2) if name == "tv" else plugged(denoised)


def problem_in(terms: tuple[Term, ...], per_pass: int, prior: Prior | None = None) -> Problem:
    """The problem with so many iterations in a pass, operators one by one."""
    problem = problem_of(IMAGE, terms, prior, step=0.4)
    return replace(problem, per_pass=per_pass, plain_gradient=lambda x: Gradient(x, terms, records_misfit=False))


def folded_in(terms: tuple[Term, ...], per_pass: int, engine: EngineName = "fft") -> tuple[Problem, dict[str, Any]]:
    """The same in the normal form; and what its passes have to know."""
    form = choose_form(terms, IMAGE.dtype, exact=False, per_pass=per_pass)
    assert form.folded is not None
    form = replace(form, folded=replace(form.folded, engine=engine))
    measured = [np.asarray(read_all(t.measurement)) for t in terms]
    back = InMemory(
        read_all(
            weighted_adjoint(
                [t.operator for t in terms], [t.measurement for t in terms], [t.weight for t in terms], IMAGE.shape
            )
        )
    )
    problem = replace(
        problem_of(IMAGE, terms, prior_of("gaussian"), step=0.4),
        gradient=form.map("gradient", back),
        misfit_of_zero=sum(t.weight * dot(y, y) / 2 for t, y in zip(terms, measured, strict=True)),
        per_pass=per_pass,
        plain_gradient=form.map("gradient", back, records_misfit=False),
        reach=form.reach,
    )
    return problem, {"by_shard": form.by_shard}


def finished(run: InlineIterations, iterations: int = 6) -> InlineIterations:
    for _ in run.run(iterations, lambda *_: False):
        pass
    return run


def pixels_of(run: InlineIterations) -> Any:
    return read_all(run.image())


@pytest.mark.parametrize(
    ("prior", "boundary", "per_pass"),
    [
        *(("none", boundary, 2) for boundary in BOUNDARIES[:2]),
        *(thorough("none", boundary, 2) for boundary in BOUNDARIES[2:]),
        thorough("tv", BOUNDARIES[0], 2),
        ("gaussian", BOUNDARIES[0], 2),
        *(thorough(prior, boundary, 2) for prior in ("tv", "gaussian") for boundary in BOUNDARIES[1:]),
        thorough("l1", "circular", 2),
        thorough("none", "circular", 3),
        ("gaussian", "reflect", 3),
    ],
)
@pytest.mark.parametrize("solver", all_of(SOLVERS, thorough=["gd"]))
def test_they_have_the_bits_of_passes_of_one(
    tmp_path: Path, solver: str, prior: str, boundary: str, per_pass: int
) -> None:
    terms = terms_of(IMAGE, blurs(boundary))
    alone = problem_of(IMAGE, terms, prior_of(prior), step=0.4)
    whole, _ = in_memory(SOLVERS[solver], alone, 2 * per_pass)
    run = iterations_of(SOLVERS[solver], problem_in(terms, per_pass, prior_of(prior)), tmp_path / "several")
    assert np.array_equal(pixels_of(finished(run, 2 * per_pass)), whole)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_pass_tells_the_misfit_of_the_image_that_is_stored(tmp_path: Path, solver: Solver) -> None:
    terms = terms_of(IMAGE, blurs("reflect"))
    alone = finished(iterations_of(solver, problem_in(terms, 1), tmp_path / "one"))
    pairs = finished(iterations_of(solver, problem_in(terms, 2), tmp_path / "two"))
    assert [row["iteration"] for row in pairs.rows] == [2, 4, 6]
    assert [row[MISFIT] for row in pairs.rows] == [row[MISFIT] for row in alone.rows[::2]]
    assert all(row[CHANGE] > 0 for row in pairs.rows)
    assert pairs.done == alone.done == 6


@pytest.mark.parametrize("boundary", all_of(BOUNDARIES, thorough=["replicate", "zero", "valid"]))
def test_direct_convolutions_of_the_normal_form_have_the_same_bits(tmp_path: Path, boundary: str) -> None:
    terms = terms_of(IMAGE, blurs(boundary))
    found = []
    for per_pass in (1, 2, 3):
        problem, options = folded_in(terms, per_pass, "direct")
        run = iterations_of(SOLVERS["pgd"], problem, tmp_path / str(per_pass), **options)
        found.append(pixels_of(finished(run)))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("boundary", "per_pass"), [("circular", 3), *(thorough(rule, 3) for rule in BOUNDARIES[1:]), thorough("reflect", 2)]
)
def test_transforms_are_near_it_and_do_not_depend_on_the_blocks(tmp_path: Path, boundary: str, per_pass: int) -> None:
    terms = terms_of(IMAGE, blurs(boundary, (5, 9, 13)))
    alone, options = folded_in(terms, 1)
    assert not options["by_shard"]
    truth = pixels_of(finished(iterations_of(SOLVERS["pgd"], alone, tmp_path / "alone", **options)))
    problem, options = folded_in(terms, per_pass)
    assert options["by_shard"]
    found, rows = [], []
    for block in (32, 64, 96):
        run = iterations_of(SOLVERS["pgd"], problem, tmp_path / str(block), block=block, **options)
        found.append(pixels_of(finished(run)))
        rows.append([{name: row[name] for name in (MISFIT, CHANGE)} for row in run.rows])
    assert all(np.array_equal(found[0], other) for other in found[1:])
    assert all(rows[0] == other for other in rows[1:])
    assert np.abs(found[0] - truth).max() < 2e-6


@pytest.mark.thorough
def test_tiny_shards_do_not_share_what_one_of_them_computed(tmp_path: Path) -> None:
    terms = terms_of(IMAGE, blurs("reflect", (9, 13)))
    problem, options = folded_in(terms, 3)
    found, rows = [], []
    for block in (16, 96):
        run = iterations_of(SOLVERS["gd"], problem, tmp_path / str(block), block=block, shard=16, **options)
        found.append(pixels_of(finished(run)))
        rows.append([{name: row[name] for name in (MISFIT, CHANGE)} for row in run.rows])
    assert np.array_equal(found[0], found[1])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_what_a_pass_is_made_of_grows_with_its_iterations_and_no_faster(solver: Solver) -> None:
    terms = terms_of(IMAGE, blurs("reflect"))
    problem = problem_in(terms, 40, prior_of("gaussian"))
    image = solver.step(problem, State(), lambda name, age: InMemory(IMAGE)).images["x"]
    assert (image.shape, image.dtype) == (IMAGE.shape, IMAGE.dtype)
    assert len(list(denoised_in(image))) == 40


def test_a_pass_that_was_cut_short_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    terms = terms_of(IMAGE, blurs("circular"))
    problem, options = folded_in(terms, 2)
    whole = finished(iterations_of(SOLVERS["pgd"], problem, tmp_path / "whole", **options))
    part = iterations_of(SOLVERS["pgd"], problem, tmp_path / "part", **options)
    assert [row["iteration"] for row in part.run(4, lambda *_: False)] == [2, 4]
    again = finished(iterations_of(SOLVERS["pgd"], problem, tmp_path / "part", **options))
    assert np.array_equal(pixels_of(again), pixels_of(whole))
    assert [row["iteration"] for row in again.rows] == [2, 4, 6]


def test_the_images_between_are_read_and_written_nowhere(tmp_path: Path) -> None:
    terms = terms_of(IMAGE, blurs("zero"))
    stored: list[Readable] = []

    def noting(task: ImageTask, *books: Any) -> None:
        stored.extend(task.stored)
        inline(task, *books)

    run = finished(iterations_of(SOLVERS["pgd"], problem_in(terms, 3), tmp_path / "x", run_pass=noting))
    assert run.state.passes == 2
    assert len(stored) == 1  # the first pass begins at zeros, the second at the image of the first
