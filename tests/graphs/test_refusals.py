"""What is refused before anything is touched: other people's data, and another job's run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import halotile
from halotile.errors import BlockFailed, HalotileError, InputError, OutputRefused, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Job, Output
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import run
from halotile.storage.arrays import open_source
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.operators.mask import Mask
from tests.cases import thorough
from tests.faults import BLOCKS, Scene, image
from tests.support import job_of, write_zarr

pytestmark = pytest.mark.cluster


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder with its size, time of change and mode."""
    found = {}
    for entry in [folder, *folder.rglob("*")]:
        status = entry.lstat()
        size = 0 if entry.is_dir() else status.st_size
        found[str(entry.relative_to(folder))] = (size, status.st_mtime_ns, status.st_mode)
    return found


@contextmanager
def refused(folder: Path, kind: type[HalotileError], words: str) -> Iterator[pytest.ExceptionInfo[HalotileError]]:
    """What is done in here is refused, and nothing in the folder is touched."""
    before = listing(folder)
    with pytest.raises(kind, match=words) as failed:
        yield failed
    assert listing(folder) == before


def gaussian(source: Path, output: Path | str, *, overwrite: bool = False) -> Denoising:
    return Denoising(
        input=Input(path=str(source)),
        output=Output(path=str(output), shard=128, chunk=32, overwrite=overwrite),
        denoiser=DenoiserChoice(name="gaussian", options={"sigma": 1.0}),
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_zarr(tmp_path / "noisy.zarr", image())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("noisy.zarr", "that is the input"),
        ("noisy.zarr/clean.zarr", "is inside the input"),
        ("noisy.zarr/c/../clean.zarr", "is inside the input"),
        (".", "the input .* is inside it"),
        ("link/noisy.zarr", "that is the input"),
        ("link/noisy.zarr/x", "is inside the input"),
    ],
)
def test_an_output_that_is_in_the_way_of_the_input_is_refused(
    tmp_path: Path, source: Path, place: str, words: str, overwrite: bool, fresh: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with refused(tmp_path, OutputRefused, words):
        run(make_plan(gaussian(source, f"{tmp_path}/{place}", overwrite=overwrite), fresh=fresh))


def test_an_output_in_a_folder_that_is_a_symlink_is_made_where_it_leads(
    tmp_path: Path, source: Path, cluster: RunningCluster
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run(make_plan(gaussian(source, tmp_path / "link" / "clean.zarr")), cluster=cluster)
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"clean.zarr", "clean.zarr.run"}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("kind", "overwrite"),
    [("zarr", False)]  # one may be replaced where that is asked for
    + [(k, o) for k in ("folder", "file", "zarr with a link", "symlink", "dangling link") for o in (False, True)],
)
def test_what_is_not_ours_stays(tmp_path: Path, source: Path, kind: str, overwrite: bool, fresh: bool) -> None:
    place = tmp_path / "clean.zarr"
    theirs = tmp_path / "theirs"
    if kind == "file":
        place.write_text("a letter")
    elif kind == "folder":
        place.mkdir()
        (place / "thesis.txt").write_text("years")
    elif kind == "symlink":
        write_zarr(theirs, image())
        place.symlink_to(theirs)
    elif kind == "dangling link":
        place.symlink_to(theirs)
    else:
        write_zarr(place, image())
        if kind == "zarr with a link":
            write_zarr(theirs, image())
            (place / "more").symlink_to(theirs)
    with refused(tmp_path, OutputRefused, r"output\.path is .*/clean\.zarr"):
        run(make_plan(gaussian(source, place, overwrite=overwrite), fresh=fresh))


def test_a_zarr_is_replaced_where_that_is_asked_for(tmp_path: Path, source: Path, cluster: RunningCluster) -> None:
    write_zarr(tmp_path / "clean.zarr", image()[:10])
    outcome = run(make_plan(gaussian(source, tmp_path / "clean.zarr", overwrite=True)), cluster=cluster)
    assert outcome.done == outcome.total


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_whose_dots_lead_elsewhere_is_refused(tmp_path: Path, source: Path, overwrite: bool) -> None:
    (tmp_path / "there" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "deep")
    with refused(tmp_path, OutputRefused, r"behind a symlink, its \.\. leads to .*/there/clean\.zarr"):
        run(make_plan(gaussian(source, f"{tmp_path}/link/../clean.zarr", overwrite=overwrite)))


@pytest.mark.parametrize("kind", ["folder", "file", "symlink"])
def test_a_run_directory_that_is_not_ours_stays(tmp_path: Path, source: Path, kind: str) -> None:
    place = tmp_path / "clean.zarr.run"
    if kind == "file":
        place.write_text("")
    elif kind == "folder":
        place.mkdir()
        (place / "notes").touch()
    else:
        place.symlink_to(tmp_path)
    with refused(tmp_path, OutputRefused, "something that no run made is there already"):
        run(make_plan(gaussian(source, tmp_path / "clean.zarr")))


def test_an_output_that_holds_a_side_input_is_refused(tmp_path: Path, source: Path) -> None:
    mask = write_zarr(tmp_path / "clean.zarr" / "mask", np.ones(image().shape, "uint8"))
    (tmp_path / "clean.zarr" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    job = Denoising(
        input=Input(path=str(source), sides={"mask": str(mask)}),
        output=Output(path=str(tmp_path / "clean.zarr"), overwrite=True),
        denoiser=DenoiserChoice(name="gaussian", options={"sigma": 1.0}),
    )
    with refused(tmp_path, OutputRefused, r"the job reads .*/clean\.zarr/mask there"):
        run(make_plan(job))


@pytest.fixture
def unfinished(scene: Scene, cluster: RunningCluster) -> Path:
    """The output of a run that lacks a block."""
    scene.make_trouble("raise", 3)
    with pytest.raises(BlockFailed):
        scene.run(cluster, retries=0)
    return scene.output


@pytest.mark.parametrize("read_as", ["input", "side input", "mask", thorough("mask of a script"), thorough("kernel")])
def test_an_image_that_a_run_has_not_finished_is_not_read(
    scene: Scene, unfinished: Path, tmp_path: Path, read_as: str
) -> None:
    def job() -> Job:
        denoising = gaussian(unfinished if read_as == "input" else scene.source, tmp_path / "next.zarr")
        if read_as == "input":
            return denoising
        if read_as == "side input":
            return replace(denoising, input=replace(denoising.input, sides={"mask": str(unfinished)}))
        operators: dict[str, tuple[Any, dict[str, Any]]] = {
            "mask": ("mask", {"mask": unfinished}),
            "mask of a script": (Mask(mask=open_source(unfinished)), {}),
            "kernel": ("blur", {"kernel": unfinished}),
        }
        operator, options = operators[read_as]
        measured = halotile.measurement(operator, scene.source, **options)
        return Reconstruction(output=denoising.output, operators=(measured,))

    with refused(tmp_path, InputError, r"clean\.zarr is the output of a run that has 1 of 64 blocks left to do"):
        make_plan(job())


@pytest.fixture
def finished(scene: Scene, cluster: RunningCluster) -> Scene:
    """A run that is done."""
    scene.run(cluster)
    return scene


def test_the_output_of_a_run_that_lost_a_shard_is_not_read(finished: Scene, tmp_path: Path) -> None:
    make_plan(gaussian(finished.output, tmp_path / "next.zarr"))
    lost = next(file for file in (finished.output / "c").rglob("*") if file.is_file())
    lost.unlink()
    with refused(tmp_path, InputError, rf"{lost}: the shard is missing; 1 of the .* `recon-cli verify --repair`"):
        make_plan(gaussian(finished.output, tmp_path / "next.zarr"))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"output": {"codec": "zstd"}}, 'output.codec was "lz4", is "zstd"'),
        thorough({"output": {"chunk": 8}}, r"output.chunk was \[16, 16\], is \[8, 8\]"),
        thorough({"output": {"dtype": "float64"}}, 'output.dtype was "float32", is "float64"'),
        thorough({"input": {"range": (0.0, 2.0)}}, r"range was absent, is \[0.0, 2.0\]"),
        thorough({"run": {"on_nan": "fail"}}, 'on_nan was "propagate", is "fail"'),
        thorough({"tile": {"boundary": "reflect"}}, 'boundary was .*"cut".*, is .*"reflect"'),
        ({"tile": {"depth": 4}}, "depth was .*0.*, is .*4"),
    ],
)
def test_another_job_does_not_go_on_with_a_run(
    finished: Scene, parts: dict[str, dict[str, object]], words: str
) -> None:
    with refused(finished.folder / "clean.zarr", ResumeRefused, rf"{words}[\s\S]*--fresh"):
        finished.run(parts=parts)
    assert finished.journalled() == set(range(BLOCKS))


@pytest.mark.parametrize(
    "stands", ["finished", thorough("half done"), thorough("run directory"), thorough("no job.json")]
)
@pytest.mark.parametrize("change", [thorough("output"), thorough("input"), "denoiser"])
def test_starting_over_discards_no_other_job(
    finished: Scene, cluster: RunningCluster, stands: str, change: str
) -> None:
    if stands == "half done":
        with Journal.open(finished.directory.journal_path, finished.fingerprint(), BLOCKS) as journal:
            journal.unmark(range(9))
    elif stands == "run directory":
        finished.output.rename(finished.folder / "kept")
    elif stands == "no job.json":
        finished.directory.job_path.unlink()
    other = finished.job(parts={"output": {"codec": "zstd"}} if change == "output" else {})
    if change == "input":
        other = replace(other, input=Input(path=str(write_zarr(finished.folder / "o.zarr", image()))))
    elif change == "denoiser":
        other = replace(other, denoiser=DenoiserChoice(name="gaussian", options={"sigma": 1.0}))
    with refused(finished.folder, OutputRefused, r"another job.*--fresh discards only.*output\.overwrite"):
        run(make_plan(other, fresh=True))
    if stands != "run directory":
        with refused(finished.output, ResumeRefused, r"--fresh and output\.overwrite: true"):
            run(make_plan(other))
    replacing = replace(other, output=replace(other.output, overwrite=True))
    assert run(make_plan(replacing, fresh=True), cluster=cluster).resumed == 0


@pytest.mark.parametrize(
    "parts",
    [
        thorough({"tile": {"boundary": "reflect"}}),
        thorough({"tile": {"depth": 4, "size": 16}}),
        thorough({"run": {"on_nan": "fail", "workers": 1}}),
        {"output": {"overwrite": True}},
    ],
    ids=str,
)
def test_starting_over_discards_the_same_job_computed_in_another_way(
    finished: Scene, cluster: RunningCluster, parts: dict[str, dict[str, object]]
) -> None:
    (finished.source / "c" / "0" / "0").touch()  # an image that was mended is the same one here
    assert finished.run(cluster, fresh=True, parts=parts).resumed == 0


def test_a_run_that_stopped_at_nan_goes_on_with_them(
    scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    causes = [scene.make_trouble("raise", block) for block in (3, 5)]
    with pytest.raises(BlockFailed):
        scene.run(cluster, on_nan="fail", retries=0)
    for cause in causes:
        cause.unlink()
    scene.forget()
    assert scene.run(cluster, on_nan="propagate").resumed == BLOCKS - 2
    assert sorted(scene.seen()) == [3, 5]
    # Now there may be NaN among what is done.
    with refused(scene.output, ResumeRefused, 'run.on_nan was "propagate", is "fail"'):
        scene.run(on_nan="fail")
    check_whole()


def test_every_difference_is_listed(finished: Scene) -> None:
    with pytest.raises(ResumeRefused) as failed:
        finished.run(parts={"output": {"codec": "zstd", "chunk": 8}}, on_nan="fail")
    assert len(str(failed.value).splitlines()) == 5


@pytest.mark.parametrize("how", ["replaced", thorough("rewritten in place")])
def test_a_changed_input_is_noticed(finished: Scene, how: str) -> None:
    if how == "replaced":
        finished.source.rename(finished.folder / "first.zarr")
        write_zarr(finished.source, image() + 1)
    else:
        import zarr

        zarr.open_array(finished.source, mode="r+")[...] = image() + 1
    with refused(finished.output, ResumeRefused, r"input\.[\s\S]*same images, .* run with --same-input"):
        finished.run()


@pytest.mark.thorough
def test_a_picture_that_was_moved_is_the_same_where_that_is_said(finished: Scene) -> None:
    moved = finished.folder / "moved.zarr"
    finished.source.rename(moved)
    elsewhere = {"input": {"path": str(moved)}}
    with refused(finished.output, ResumeRefused, "Write what it was, .* --same-input takes your word that"):
        finished.run(parts=elsewhere)
    assert finished.run(parts=elsewhere, same_input=True).resumed == BLOCKS
    with refused(finished.output, ResumeRefused, r"output\.codec") as failed:
        finished.run(parts=elsewhere | {"output": {"codec": "zstd"}}, same_input=True)
    assert "--same-input" not in str(failed.value)


@pytest.mark.thorough
def test_a_picture_of_another_shape_is_another_one_whatever_is_said(finished: Scene) -> None:
    finished.source.rename(finished.folder / "first.zarr")
    write_zarr(finished.source, image()[:-1])
    with refused(finished.output, ResumeRefused, r"input\.shape") as failed:
        finished.run(same_input=True)
    assert "--same-input" not in str(failed.value)


def test_other_code_does_not_go_on_with_a_run(finished: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halotile, "__version__", "99.0")
    with refused(finished.output, ResumeRefused, 'code.halotile was ".*", is "99.0"'):
        finished.run()


def test_other_weights_do_not_go_on_with_a_run(tmp_path: Path, source: Path, cluster: RunningCluster) -> None:
    def weights(seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = {"0": (8, 1, 3, 3), "2": (8, 8, 3, 3), "4": (1, 8, 3, 3)}
        tensors = {}
        for name, shape in shapes.items():
            tensors[f"{name}.weight"] = rng.normal(0, 0.1, shape).astype("float32")
            tensors[f"{name}.bias"] = np.zeros(shape[0], "float32")
        save_file(tensors, tmp_path / "w.safetensors")

    options = {"depth": 3, "width": 8, "weights": str(tmp_path / "w.safetensors")}
    job = job_of(source, tmp_path / "clean.zarr", "dncnn", options)
    weights(0)
    run(make_plan(job), cluster=cluster)
    weights(1)
    with refused(tmp_path / "clean.zarr", ResumeRefused, r"weights\.w\.safetensors was"):
        run(make_plan(job), cluster=cluster)


def test_a_run_that_began_since_the_plan_was_made_is_not_taken_for_ours(scene: Scene, cluster: RunningCluster) -> None:
    plan = make_plan(scene.job(parts={"output": {"codec": "zstd"}}))
    scene.run(cluster)
    with refused(scene.output, ResumeRefused, r"output\.codec"):
        run(plan)


@pytest.mark.thorough
def test_an_output_that_was_replaced_behind_our_back_is_not_removed(finished: Scene) -> None:
    finished.output.rename(finished.folder / "moved")
    finished.output.mkdir()
    (finished.output / "thesis.txt").write_text("years")
    with refused(finished.output, OutputRefused, "metadata|no Zarr"):
        finished.run()
    with refused(finished.output, OutputRefused, "it is no Zarr"):
        finished.run(fresh=True)
    assert finished.journalled() == set(range(BLOCKS))
    assert os.listdir(finished.output) == ["thesis.txt"]
