"""More iterations than a run was begun with: it goes on, to the bits of one that was asked for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halotile
from halotile.cli.config.loading import load_saved_job
from halotile.errors import OutputRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import PriorChoice, Reached, Reconstruction, SolverChoice
from halotile.graphs.kinds.sections import Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import Outcome, run
from halotile.graphs.runs.verify import verify
from halotile.storage.images.added_levels import add_levels
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from tests.cases import thorough
from tests.graphs.solving import kernel
from tests.support import work_of

pytestmark = pytest.mark.cluster

Go = Callable[..., Outcome]


@pytest.fixture
def go(cluster: RunningCluster) -> Go:
    """Runs a job."""
    return lambda job, observer=None: run(make_plan(job), cluster=cluster, observer=observer)


def job_in(folder: Path, **solver: Any) -> Reconstruction:
    """A blurred image of a few blocks."""
    folder.mkdir(exist_ok=True)
    y, x = np.mgrid[:96, :80]
    image = (0.5 + 0.4 * np.sign(np.sin(y / 7) * np.cos(x / 5))).astype("float32")
    blurred = read_all(Blur(kernel=kernel(5), boundary="reflect").forward(InMemory(image)))
    np.save(folder / "y.npy", blurred + 0.02 * np.random.default_rng(0).standard_normal(image.shape, "float32"))
    np.save(folder / "psf.npy", kernel(5))
    measured = halotile.measurement("blur", folder / "y.npy", kernel=folder / "psf.npy", noise_sigma=0.1)
    is_cg = solver.get("name") == "cg"
    tv = PriorChoice(name="tv", options={"weight": 2.0, "iterations": 4})
    return Reconstruction(
        output=Output(path=str(folder / "x.zarr"), shard=32, chunk=16), operators=(measured,),
        prior=PriorChoice() if is_cg else tv, tile=Tile(block=32), run=Run(workers=2),
        solver=SolverChoice(**{"name": "pgd"} | ({} if is_cg else {"step": 0.01}) | solver),
    )  # fmt: skip


def solved(job: Reconstruction, **changes: Any) -> Reconstruction:
    """The same with other options of its solver."""
    return replace(job, solver=replace(job.solver, **changes))


def files(job: Reconstruction) -> dict[str, bytes]:
    """Everything in the output."""
    output = Path(job.output.path)
    return {str(p.relative_to(output)): p.read_bytes() for p in sorted(output.rglob("*")) if p.is_file()}


def directory(job: Reconstruction) -> RunDirectory:
    return RunDirectory(Path(job.output.path + ".run"))


@pytest.mark.parametrize("name", ["fista", thorough("cg"), thorough("admm")])
def test_three_and_three_more_are_six(name: str, tmp_path: Path, go: Go) -> None:
    parts, whole = (job_in(tmp_path / part, name=name, iterations=6, keep_state=True) for part in ("parts", "whole"))
    assert go(solved(parts, iterations=3)).figures["iteration"] == 3
    after_three = files(parts)
    plan = make_plan(parts)
    (note,) = plan.notes
    assert note == "3 iterations are done; goes on from there to 6 iterations at most, with the bits of one run"
    assert go(parts).figures["iteration"] == 6
    go(whole)
    assert files(parts) == files(whole) != after_three
    lines = [directory(job).iterations_path.read_text().splitlines() for job in (parts, whole)]
    ours, theirs = ([json.loads(line)["change"] for line in each] for each in lines)
    assert ours == theirs
    assert len(ours) == work_of(plan).solver.traits.passes_before + 6
    saved: Any = load_saved_job(directory(parts).job_path)
    assert saved.solver.iterations == 6
    again = go(parts)
    assert again.resumed == again.total


def test_a_run_cut_off_goes_on_to_another_end(tmp_path: Path, go: Go) -> None:
    cut, whole = (job_in(tmp_path / part, name="fista", iterations=5) for part in ("cut", "whole"))

    def cut_off(progress: Any) -> None:
        if progress.figures.get("iteration") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(solved(cut, iterations=3), cut_off)
    assert 2 <= Reached.from_run(directory(cut)).iterations <= 3
    go(cut)
    go(whole)
    assert files(cut) == files(whole)
    assert not directory(cut).state_path.exists()


def test_a_smaller_tolerance_goes_on_and_what_would_have_ended_earlier_is_refused(tmp_path: Path, go: Go) -> None:
    job = job_in(tmp_path, name="fista", iterations=8, tol=0.1, keep_state=True)
    stopped = go(job).figures["iteration"]
    assert 1 < stopped < 8
    assert go(solved(job, tol=0.0)).figures["iteration"] == 8
    with pytest.raises(ResumeRefused, match=rf"has done 8 iterations.*would have ended after {stopped:.0f}, whose im"):
        make_plan(job)
    said = r"with solver\.iterations: 2 .* would have ended after 2.* Write solver\.it"
    with pytest.raises(ResumeRefused, match=said):
        make_plan(solved(job, tol=0.0, iterations=2))


def test_a_finished_run_says_how_to_have_more_and_other_rules_make_another_job(tmp_path: Path, go: Go) -> None:
    job = job_in(tmp_path, iterations=1)
    cut, constant = (replace(job, tile=replace(job.tile, boundary=rule)) for rule in ("cut", "constant"))
    assert make_plan(cut).fingerprint == make_plan(job).fingerprint, "it is the rule of tv"
    go(cut)
    before = files(job)
    with pytest.raises(ResumeRefused, match=r"finished after 1 iteration.*--fresh.*solver\.keep_state: true"):
        make_plan(solved(cut, iterations=3))
    with pytest.raises(ResumeRefused, match=r'tile\.boundary was \["cut", .*, is \["constant"'):
        go(constant)
    assert files(job) == before
    requested = directory(job).read_job() or {}
    requested["prior"]["iterations"] += 20  # dual steps of tv
    directory(job).write_job(requested)
    with pytest.raises(OutputRefused, match="another job"):
        run(make_plan(cut, fresh=True))


@pytest.mark.parametrize("keep_state", [False, True])
def test_damage_is_mended_with_the_iterations_that_an_output_had(tmp_path: Path, go: Go, keep_state: bool) -> None:
    job = job_in(tmp_path, iterations=1, keep_state=keep_state)
    go(job)
    if keep_state:
        (note,) = make_plan(solved(job, iterations=3)).notes
        assert note.startswith("1 iteration is done; goes on from there to 3 iterations")
    before = files(job)
    next(Path(job.output.path).glob("0/c/*/*")).unlink()
    assert verify(job.output.path).iterates != keep_state
    done = go(job)
    said = [str(event.get("text")) for event in directory(job).read_events()]
    assert any("1 iteration from the start" in line for line in said) != keep_state
    assert sum("iteration 1 of 1:" in line for line in said) == (1 if keep_state else 2)
    assert done.resumed < done.total
    assert files(job) == before


def test_added_levels_do_not_outlast_their_image(tmp_path: Path, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, whole = (job_in(tmp_path / part, name="fista", iterations=3, keep_state=True) for part in ("parts", "whole"))
    go(solved(parts, iterations=2))
    with monkeypatch.context() as patched:
        patched.setattr("halotile.storage.sharded.layout.LARGEST_TOP", 30)
        assert add_levels(Path(parts.output.path))[0] == 3
    lines: list[str] = []
    go(parts, lambda progress: lines.append(progress.message))
    assert "removed 2 levels that `recon-cli levels` had added, because the image changes" in "\n".join(lines)
    go(whole)
    assert files(parts) == files(whole)
