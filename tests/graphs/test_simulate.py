"""Simulated measurements: what operators give of the reference, with noise that no tiling changes; and several outputs of one run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import halotile
from halotile import errors
from halotile.cli.config.loading import saved_job
from halotile.cli.status import blocks_given_up, find_run, output_of
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.reconstruct.job import FidelityChoice, OperatorChoice, Reconstruction
from halotile.graphs.jobs.simulate.job import NoiseChoice, Simulation, Storage, simulation_of
from halotile.graphs.jobs.simulate.plan import SimulateWork
from halotile.graphs.kinds.base import OutputArray
from halotile.graphs.kinds.sections import Cluster, Job, Output, Run
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs import claim as claiming
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.status import Status
from halotile.graphs.runs.verify import verify
from halotile.storage.grid import Region
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import ShardWriter
from halotile.tasks.block import BadBlock
from halotile.tasks.noise.simulated import Simulated
from halotile.tasks.operators.base import InMemory, read_all
from halotile.tasks.operators.blur import Blur
from tests.graphs.solving import WholeBlur, kernel
from tests.storage.test_rundir import other_process
from tests.support import work_of

Pixels = NDArray[Any]


def image() -> Pixels:
    """Stripes between 0.2 and 0.8."""
    y, x = np.mgrid[:200, :150]
    waves: Pixels = (0.5 + 0.3 * np.sin(y / 5) * np.cos(x / 9)).astype("float32")
    return waves


def choices(folder: Path) -> Any:
    """A blur, a smaller copy, and a window."""
    return (
        halotile.measurement("blur", folder / "y0.zarr", kernel=kernel(7), noise_sigma=0.05),
        halotile.measurement("downsample", folder / "y1.zarr", factor=2, noise_sigma=0.02),
        halotile.measurement("crop", folder / "y2.zarr", origin=(11, 7), size=(60, 50), noise_sigma=0.01),
    )


def job_in(folder: Path, **changes: Any) -> Reconstruction:
    """A job whose measurements are yet to be made."""
    np.save(folder / "truth.npy", image())
    job = Reconstruction(
        output=Output(path=str(folder / "x.zarr"), shard=64, chunk=32),
        operators=choices(folder),
        reference=str(folder / "truth.npy"),
        run=Run(workers=2),
    )
    return replace(job, **changes)


def plan_of(job: Reconstruction, noise: NoiseChoice | None = None, *, overwrite: bool = False) -> Plan:
    """The plan of a job's measurements."""
    return make_plan(simulation_of(job, noise or NoiseChoice(), overwrite=overwrite))


def made(folder: Path) -> list[Pixels]:
    """The measurements that lie in a folder."""
    return [zarr.open_array(path, mode="r")[...] for path in sorted(folder.glob("y*.zarr"))]


def simulated_by(plan: Plan) -> list[Pixels]:
    """The measurements of a plan, in this process."""
    return [read_all(simulated) for _, simulated in work_of(plan).measurements]


def same(images: list[Pixels], others: list[Pixels]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(images, others, strict=True))


def state_of(folder: Path) -> str:
    """How the run of a folder's measurements ended; it is kept beside the first."""
    return str((RunDirectory(folder / "y0.zarr.run").read_status() or {})["state"])


def done_of(plan: Plan) -> list[int]:
    """How many blocks of each measurement are done."""
    return [len(Journal.open_any(RunDirectory.beside(output.path).journal_path).done) for output in plan.outputs]


@pytest.mark.cluster
def test_measurements_are_those_of_operators_for_any_blocks(tmp_path: Path, cluster: RunningCluster) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, (shard, workers) in zip(folders, [(64, 1), (32, 4)], strict=True):
        folder.mkdir()
        output = Output(path=str(folder / "x.zarr"), shard=shard, chunk=32)
        plan = plan_of(job_in(folder, output=output, run=Run(workers=workers)), NoiseChoice(seed=5))
        run(plan, cluster=cluster)
        paths = tuple(output.path for output in plan.outputs)
        assert paths == tuple(folder / f"y{number}.zarr" for number in range(3))
        kept = sorted(f"{path.name}{suffix}" for path in paths for suffix in ("", ".run"))
        assert sorted(p.name for p in folder.iterdir()) == ["truth.npy", *kept]
    one, other = made(folders[0]), made(folders[1])
    assert [part.shape for part in one] == [(200, 150), (100, 75), (60, 50)]
    assert same(one, other)
    blurred = Simulated(Blur(kernel=kernel(7)).forward(InMemory(image())), "gaussian", level=0.05, seed=5, operator=0)
    np.testing.assert_array_equal(one[0], read_all(blurred))
    cropped = Simulated(InMemory(image()[11:71, 7:57]), "gaussian", level=0.01, seed=5, operator=2)
    np.testing.assert_array_equal(one[2], read_all(cropped))


@pytest.mark.cluster
def test_a_stop_keeps_what_is_done(tmp_path: Path, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    plan = plan_of(job)
    passes = SimulateWork.run

    def stopping(self: SimulateWork, at: Any) -> Any:
        for wanted in passes(self, at):
            if wanted.title == " while y2.zarr was made":
                raise errors.Stopped("stopped on SIGTERM")
            yield wanted

    monkeypatch.setattr(SimulateWork, "run", stopping)
    with pytest.raises(errors.Stopped):
        run(plan, cluster=cluster)
    monkeypatch.undo()
    blocks = [len(output.grid) for output in plan.outputs]
    assert (state_of(tmp_path), done_of(plan)) == ("stopped", [*blocks[:2], 0])
    before = made(tmp_path)
    with pytest.raises(errors.ResumeRefused, match=r"noise\.seed was 0, is 1"):
        run(plan_of(job, NoiseChoice(seed=1)), cluster=cluster)
    assert same(made(tmp_path), before)
    resumed: list[int] = []
    again = plan_of(job)
    assert (again.resumes, again.fresh) == (True, False)
    run(again, cluster=cluster, observer=lambda p: resumed.append(p.resumed))
    assert (max(resumed), state_of(tmp_path), done_of(plan)) == (sum(blocks[:2]), "finished", blocks)
    assert same(made(tmp_path), simulated_by(plan))
    repeated = plan_of(job, overwrite=True)
    assert (repeated.resumes, repeated.fresh) == (True, False), "the same simulation is done already"
    other = plan_of(job, NoiseChoice(seed=1), overwrite=True)
    assert other.fresh
    run(other, cluster=cluster)
    assert same(made(tmp_path), simulated_by(other))


def test_a_job_that_cannot_be_simulated_is_told_why(tmp_path: Path) -> None:
    blur, _, crop = choices(tmp_path)

    def at(data: str | Path) -> dict[str, Any]:
        return {"operators": (replace(blur, data=str(data)),)}

    rows: list[tuple[dict[str, Any], str]] = [
        ({"reference": None}, "reference is not there: measurements are simulated from the true image. Write ref"),
        (at("y.npy"), r"operators\[0\]\.data is y\.npy: measurements are written as Zarr .* Write y\.zarr"),
        (at("s3://b/y.zarr"), r"operators\[0\]\.data is s3://b/y\.zarr: measurements are .* on a disk"),
        (at(tmp_path / "no/y.zarr"), r"operators\[0\]\.data is .*: there is no folder"),
        (at(tmp_path / "truth.npy/y.zarr"), r"operators\[0\]\.data is .*truth\.npy is a file"),
        ({"operators": (blur, blur)}, r"operators\[1\]\.data is .*y0\.zarr, and so is operators\[0\]\.data\. Write an"),
        ({"operators": (replace(crop, options={"origin": (0, 0), "size": (999, 9)}),)}, r"operators\[0\]: .*"),
        ({"run": Run(workers=1, memory_per_worker="100MiB")}, r"memory_per_worker is 100MiB; one block of .* needs"),
    ]
    for changes, words in rows:
        with pytest.raises((errors.ConfigError, errors.MemoryRefused), match=words):
            plan_of(job_in(tmp_path, **changes))
        assert [path.name for path in tmp_path.iterdir()] == ["truth.npy"]


def test_an_operator_that_sees_the_whole_image_measures_once_and_counts_have_a_background(tmp_path: Path) -> None:
    far = halotile.measurement(WholeBlur(blur=Blur(kernel=kernel(5))), tmp_path / "y.zarr", noise_sigma=0.1)
    plan = plan_of(job_in(tmp_path, operators=(far,)))
    assert plan.grid.block == plan.grid.shape == image().shape
    fidelity = FidelityChoice(name="poisson", options={"background": 0.25})
    job = job_in(tmp_path, fidelity=fidelity, start=str(tmp_path / "truth.npy"))
    counts = simulated_by(plan_of(job, NoiseChoice(name="poisson", gain=0.01)))[2]
    assert counts.mean() == pytest.approx(image()[11:71, 7:57].mean() + 0.25, abs=0.01)


@pytest.mark.cluster
def test_a_reference_below_0_has_no_counts(tmp_path: Path, cluster: RunningCluster) -> None:
    job = job_in(tmp_path, operators=choices(tmp_path)[:1], run=Run(workers=2))
    below = image()
    below[130:, :40] = -0.25
    np.save(tmp_path / "truth.npy", below)
    plan = plan_of(job, NoiseChoice(name="poisson", gain=0.01))
    told: list[Any] = []
    words = r"pixels that operators\[0\] makes .* the least -0\.25\. Write a reference"
    with pytest.raises(errors.InputError, match=words):
        run(plan, cluster=cluster, observer=lambda p: told.append(p.retried))
    assert not any(told)  # no retry helps
    assert state_of(tmp_path) == "failed"
    lifted = replace(job, fidelity=FidelityChoice(name="poisson", options={"background": 0.25}), start=job.reference)
    (counts,) = simulated_by(plan_of(lifted, NoiseChoice(name="poisson", gain=0.01)))
    assert counts.min() == 0


def test_noise_that_is_none_is_refused_with_its_job(tmp_path: Path) -> None:
    seen = halotile.measurement("blur", tmp_path / "y.zarr", kernel=[[1.0]])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"noise": "gausian"}, "did you mean gaussian"),
        ({"gain": 0.0}, "gain is 0: a count has to be worth something. Write more than 0"),
        ({"gain": float("nan")}, "gain is nan"),
        ({"seed": -1}, "seed is -1: seeds count from 0. Write 0 or more"),
        ({"gain": None}, r"noise\.gain: null is not a number"),
        ({"background": "2"}, r'noise\.background: "2" is not a number'),
        ({"seed": 1.5}, r"noise\.seed: 1\.5 is not a whole number"),
    ]
    for given, words in wrong:
        with pytest.raises(errors.ConfigError, match=words):
            halotile.simulate([seen], tmp_path / "truth.npy", **{"noise": "poisson", **given})


@pytest.mark.cluster
def test_what_came_to_its_place_meanwhile_stays(tmp_path: Path, cluster: RunningCluster) -> None:
    plan = plan_of(job_in(tmp_path), overwrite=True)
    thesis = tmp_path / "y2.zarr" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    with pytest.raises(errors.OutputRefused, match=r"y2\.zarr"):
        run(plan, cluster=cluster)
    assert thesis.read_text() == "mine"
    assert {path.name for path in tmp_path.glob("y*.zarr")} == {"y2.zarr"}, "nothing is begun"
    thesis.unlink()
    thesis.parent.rmdir()
    run(plan_of(job_in(tmp_path)), cluster=cluster)
    assert (state_of(tmp_path), len(made(tmp_path))) == ("finished", 3)


@pytest.mark.cluster
@pytest.mark.parametrize("role", ["operators[0].data", "start", "reference"])
def test_holes_are_refused_and_packing_is_noted(tmp_path: Path, cluster: RunningCluster, role: str) -> None:
    named = {"_FillValue": -32768, "scale_factor": 0.5}
    for name in ("measured", "holed"):
        pixels = np.ones((64, 64), np.float32)
        pixels[20:24, 20:24] = -32768 if name == "holed" else 1
        stated = named if name == "holed" or role != "operators[0].data" else {}
        zarr.create_array(tmp_path / f"{name}.zarr", data=pixels, chunks=(32, 32), attributes=stated)
    holed, measured = str(tmp_path / "holed.zarr"), str(tmp_path / "measured.zarr")
    data = {"operators[0].data": holed, "start": measured, "reference": str(tmp_path / "y.zarr")}[role]
    seen = halotile.measurement("blur", data, kernel=kernel(3), noise_sigma=1.0)
    given: dict[str, Any] = {role: holed} if role in ("start", "reference") else {}
    job = Reconstruction(output=Output(path=str(tmp_path / "x.zarr")), operators=(seen,), **given)
    plan = plan_of(job) if role == "reference" else make_plan(job)
    assert any("scale_factor 0.5, which are not applied" in note for note in plan.notes)
    words = rf"{re.escape(role)} has pixels of -32768, which its file names for no measurement"
    with pytest.raises(errors.HalotileError, match=words):
        run(plan, cluster=cluster)


A, B = "a.zarr", "b.zarr"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a true image and a kernel."""
    np.save(tmp_path / "truth.npy", np.random.default_rng(0).random((256, 256), np.float32))
    np.save(tmp_path / "k.npy", np.ones((3, 3), np.float32) / 9)
    return tmp_path


def simulation(folder: Path, *names: str, **options: Any) -> Simulation:
    """A simulation of measurements of these names, of four blocks each."""
    workers, seed = options.pop("workers", 1), options.pop("seed", 0)
    reference = options.pop("reference", "truth.npy")
    blur = partial(OperatorChoice, name="blur", noise_sigma=0.01, options={"kernel": str(folder / "k.npy")})
    return Simulation(
        operators=tuple(blur(data=str(folder / name)) for name in names),
        noise=NoiseChoice(seed=seed),
        output=Storage(shard=128, chunk=64, **options),
        reference=str(folder / reference),
        run=Run(workers=workers, memory_per_worker="2GiB"),
        cluster=Cluster(dashboard=False, tls=False),
    )


def fill(job: Job, blocks: int = 100, *, fresh: bool = False) -> None:
    """Write so many blocks, as a run does."""
    with claim(make_plan(job, fresh=fresh)) as outputs:
        for output in outputs.plan.outputs:
            assert isinstance(output, OutputArray)
            writer = ShardWriter(output.path, output.layout)
            for block in output.grid:
                if (blocks := blocks - 1) < 0:
                    return
                pixels = np.full(block.core.shape, block.number, output.layout.dtype)
                outputs.journal_of(output).mark({block.number: writer.write(block.core, pixels).digest})


def claimed(job: Job, *, fresh: bool = False) -> int:
    """The number of blocks that a run finds done."""
    with claim(make_plan(job, fresh=fresh)) as outputs:
        return outputs.done


def test_fresh_discards_no_output_of_another_run(folder: Path) -> None:
    fill(simulation(folder, B))
    fill(simulation(folder, A, B, overwrite=True), fresh=True)
    for fresh in (True, False):
        with pytest.raises(errors.OutputRefused, match="another job"):
            claimed(simulation(folder, B), fresh=fresh)
    assert (claimed(simulation(folder, A, B)), find_run(folder / B)) == (8, folder / f"{A}.run")
    fill(simulation(folder, A, B, overwrite=True, seed=1), 3, fresh=True)
    with pytest.raises(errors.OutputRefused, match="another job"):
        claimed(simulation(folder, B))
    assert claimed(simulation(folder, A, B, seed=1)) == 3, "an unfinished run keeps its empty outputs"


def test_workers_of_an_earlier_run_are_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "ORPHAN_SECONDS", 0.5)
    fill(simulation(folder, A, B), 2)
    worker = other_process(RunDirectory(folder / f"{A}.run"), "WorkerLock(directory.path).hold()")
    with worker, pytest.raises(errors.OutputInUse):
        claimed(simulation(folder, B, overwrite=True), fresh=True)
    assert claimed(simulation(folder, B, overwrite=True), fresh=True) == 0


def test_a_stored_job_discards_nothing_that_it_did(folder: Path) -> None:
    fill(simulation(folder, A, B, overwrite=True))
    os.utime(folder / "truth.npy")
    with pytest.raises(errors.ResumeRefused, match="reference"):
        claimed(saved_job(find_run(folder / A)))
    assert verify(folder / A).sound


def test_an_image_that_is_read_is_not_removed_and_outputs_in_one_another_are_refused(folder: Path) -> None:
    zarr.create_group(folder / "truth.zarr").create_array("0", data=np.ones((256, 256), "float32"))
    with pytest.raises(errors.OutputRefused, match="the job reads"):
        claimed(simulation(folder, "truth.zarr", reference="truth.zarr/0", overwrite=True))
    assert (folder / "truth.zarr/0/zarr.json").exists()
    with pytest.raises((errors.ConfigError, errors.OutputRefused), match=r"operators\[1\]\.data"):
        make_plan(simulation(folder, A, f"{A}/b.zarr"))


def test_an_output_is_checked_where_it_is_and_one_of_a_run_that_is_gone_by_itself(folder: Path) -> None:
    fill(simulation(folder, A, B))
    for part in (A, f"{A}.run", B, f"{B}.run"):
        shutil.copytree(folder / part, folder / "copy" / part)
    shard = folder / "copy" / B / "c/0/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    assert verify(folder / B).sound
    for name in (A, B):
        (problem,) = verify(folder / "copy" / name).problems
        assert str(folder / "copy") in problem or "block 0" in problem
    fill(simulation(folder, A, overwrite=True), fresh=True)
    shutil.copy(shard, folder / B / "c/0/0")
    verdict = verify(folder / B)
    assert (verdict.sound, verdict.repairable) == (False, False)


def test_outputs_that_were_moved_together_are_whole_and_a_journal_that_is_missing_is_named(folder: Path) -> None:
    fill(simulation(folder, A, B))
    (new := folder / "new").mkdir()
    for part in (A, f"{A}.run", B, f"{B}.run"):
        shutil.move(folder / part, new / part)
    assert verify(new / A).sound
    assert verify(new / B).sound
    assert output_of(new / f"{B}.run") == new / B
    for part in (A, f"{A}.run"):
        shutil.move(new / part, folder / part)
    with pytest.raises(errors.OutputRefused, match=r"b\.zarr\.run/journal is not there"):
        verify(folder / A)
    with pytest.raises(errors.OutputRefused, match=r"b\.zarr\.run/journal is not there, and 4 blocks"):
        claimed(simulation(folder, A, B))


@pytest.mark.parametrize("step", ["create_output", "Journal.create"])
def test_a_start_that_was_killed_can_be_repeated(folder: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(simulation(folder, A, B))

    def until_the_second(call: Callable[..., Any]) -> Callable[..., Any]:
        def killed(path: Path, *arguments: Any, **options: Any) -> Any:
            if B in str(path):
                raise KeyboardInterrupt
            return call(path, *arguments, **options)

        return killed

    owner, _, name = step.rpartition(".")
    place = getattr(claiming, owner) if owner else claiming
    with monkeypatch.context() as patch:
        patch.setattr(place, name, until_the_second(getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            claimed(simulation(folder, A, B), fresh=True)
    assert claimed(simulation(folder, A, B)) == 0
    fill(simulation(folder, A, B))
    assert verify(folder / B).sound


def test_an_output_or_a_plan_that_is_lost_costs_no_blocks(folder: Path) -> None:
    fill(simulation(folder, A, B), 4)
    assert list(verify(folder / A).undone) == [4, 5, 6, 7], "those of the second follow those of the first"
    (folder / f"{A}.run/plan.json").write_text("x")
    assert claimed(simulation(folder, A, B, workers=4)) == 4
    shutil.rmtree(folder / B)
    with pytest.raises(errors.OutputRefused, match="4 blocks"):
        claimed(simulation(folder, A, B))


def test_the_directory_of_an_output_that_was_moved_away_stays(folder: Path) -> None:
    fill(simulation(folder, B))
    shutil.move(folder / B, folder / "away.zarr")
    with pytest.raises(errors.OutputRefused, match="another job"):
        claimed(simulation(folder, A, B))
    shutil.move(folder / "away.zarr", folder / B)
    assert claimed(simulation(folder, B)) == 4


def test_blocks_given_up_are_told_by_their_outputs(folder: Path) -> None:
    plan = make_plan(simulation(folder, A, B))
    with claim(plan):
        status = Status(RunDirectory(folder / f"{A}.run"), plan, None)
        for output, number in ((plan.outputs[1], 2), (plan.outputs[0], 2), (plan.outputs[0], 1)):
            whole = Region((0, 0), (128, 128))
            status.give_up(BadBlock(number, (0, number), whole, "broken", "trace", "task"), output)
    bad = blocks_given_up(RunDirectory(folder / f"{A}.run"))
    named = [(1, A), (2, A), (2, B)]
    assert [block.name for block in bad] == [f"block {number} of {name}" for number, name in named]
    assert [block.to_json().get("output") for block in bad] == [str(folder / name) for _, name in named]
