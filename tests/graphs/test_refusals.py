"""What is refused before anything is touched: other people's data, and another job's run."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zarr

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
from tests.support import write_zarr

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


PLACES = [
    ("noisy.zarr", "that is the input"),
    ("noisy.zarr/clean.zarr", "is inside the input"),
    ("noisy.zarr/c/../clean.zarr", "is inside the input"),
    (".", "the input .* is inside it"),
    ("link/noisy.zarr", "that is the input"),
    ("link/noisy.zarr/x", "is inside the input"),
]


@pytest.mark.parametrize(("place", "words"), PLACES)
def test_an_output_in_the_way_of_the_input_is_refused(tmp_path: Path, source: Path, place: str, words: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for overwrite, fresh in itertools.product((False, True), repeat=2):
        with refused(tmp_path, OutputRefused, words):
            run(make_plan(gaussian(source, f"{tmp_path}/{place}", overwrite=overwrite), fresh=fresh))


@pytest.mark.parametrize("kind", ["zarr", "folder", "symlink", "notes of another in the run directory"])
def test_what_is_not_ours_stays(tmp_path: Path, source: Path, kind: str) -> None:
    place, theirs, words = tmp_path / "clean.zarr", tmp_path / "theirs", r"output\.path is .*/clean\.zarr"
    if kind == "symlink":
        place.symlink_to(write_zarr(theirs, image()))
    elif kind == "zarr":  # which may be replaced where that is asked for
        write_zarr(place, image())
    else:
        theirs = place if kind == "folder" else tmp_path / "clean.zarr.run"
        theirs.mkdir()
        (theirs / "thesis.txt").write_text("years")
        words = words if kind == "folder" else "something that no run made is there already"
    for overwrite, fresh in itertools.product((False,) if kind == "zarr" else (False, True), (False, True)):
        with refused(tmp_path, OutputRefused, words):
            run(make_plan(gaussian(source, place, overwrite=overwrite), fresh=fresh))


def test_a_zarr_is_replaced_where_that_is_asked_for_and_a_symlinked_folder_is_followed(
    tmp_path: Path, source: Path, cluster: RunningCluster
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    write_zarr(tmp_path / "disk" / "clean.zarr", image()[:10])
    outcome = run(make_plan(gaussian(source, tmp_path / "link" / "clean.zarr", overwrite=True)), cluster=cluster)
    assert outcome.done == outcome.total
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"clean.zarr", "clean.zarr.run"}


def test_an_image_that_lacks_a_block_is_not_read(scene: Scene, cluster: RunningCluster, tmp_path: Path) -> None:
    cause = scene.make_trouble("raise", 3)
    with pytest.raises(BlockFailed):
        scene.run(cluster, retries=0)
    unfinished, denoising = scene.output, gaussian(scene.source, tmp_path / "next.zarr")
    operators: list[Callable[[], tuple[Any, dict[str, Any]]]] = [
        lambda: ("mask", {"mask": unfinished}),
        lambda: (Mask(mask=open_source(unfinished)), {}),  # of a script
        lambda: ("blur", {"kernel": unfinished}),
    ]

    def reconstruction(choose: Callable[[], tuple[Any, dict[str, Any]]]) -> Job:
        operator, options = choose()
        return Reconstruction(
            output=denoising.output, operators=(halotile.measurement(operator, scene.source, **options),)
        )

    makes: list[Callable[[], Job]] = [
        lambda: gaussian(unfinished, tmp_path / "next.zarr"),
        lambda: replace(denoising, input=replace(denoising.input, sides={"mask": str(unfinished)})),
        *(partial(reconstruction, choose) for choose in operators),
    ]
    for make in makes:
        with refused(tmp_path, InputError, r"clean\.zarr is the output of a run that has 1 of 64 blocks left to do"):
            make_plan(make())
    cause.unlink()
    scene.run(cluster)
    make_plan(gaussian(scene.output, tmp_path / "next.zarr"))
    lost = next(file for file in (scene.output / "c").rglob("*") if file.is_file())
    lost.unlink()
    with refused(tmp_path, InputError, rf"{lost}: the shard is missing; 1 of the .* `recon-cli verify --repair`"):
        make_plan(gaussian(scene.output, tmp_path / "next.zarr"))


@pytest.fixture
def finished(scene: Scene, cluster: RunningCluster) -> Scene:
    """A run that is done."""
    scene.run(cluster)
    return scene


def test_another_job_does_not_go_on_with_a_run(finished: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[tuple[dict[str, dict[str, object]], str]] = [
        ({"output": {"codec": "zstd"}}, 'output.codec was "lz4", is "zstd"'),
        ({"output": {"chunk": 8}}, r"output.chunk was \[16, 16\], is \[8, 8\]"),
        ({"output": {"dtype": "float64"}}, 'output.dtype was "float32", is "float64"'),
        ({"input": {"range": (0.0, 2.0)}}, r"range was absent, is \[0.0, 2.0\]"),
        ({"run": {"on_nan": "fail"}}, 'on_nan was "propagate", is "fail"'),
        ({"tile": {"boundary": "reflect"}}, 'boundary was .*"cut".*, is .*"reflect"'),
        ({"tile": {"depth": 4}}, "depth was .*0.*, is .*4"),
    ]
    for parts, words in others:
        with refused(finished.output, ResumeRefused, rf"{words}[\s\S]*--fresh"):
            finished.run(parts=parts)
    with pytest.raises(ResumeRefused) as failed:
        finished.run(parts={"output": {"codec": "zstd", "chunk": 8}}, on_nan="fail")
    assert len(str(failed.value).splitlines()) == 5, "every difference is listed"
    monkeypatch.setattr(halotile, "__version__", "99.0")
    with refused(finished.output, ResumeRefused, 'code.halotile was ".*", is "99.0"'):
        finished.run()
    assert finished.journalled() == set(range(BLOCKS))


@pytest.mark.parametrize(
    ("stands", "change"),
    [
        ("finished", "denoiser"),
        thorough("half done", "input"),
        thorough("run directory", "output"),
        thorough("no job.json", "denoiser"),
    ],
)
def test_fresh_discards_no_other_job(finished: Scene, cluster: RunningCluster, stands: str, change: str) -> None:
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


def test_starting_over_discards_the_same_job_computed_in_another_way(finished: Scene, cluster: RunningCluster) -> None:
    (finished.source / "c" / "0" / "0").touch()  # an image that was mended is the same one here
    parts = {"tile": {"depth": 4, "size": 16, "boundary": "reflect"}, "run": {"on_nan": "fail", "workers": 1}}
    assert finished.run(cluster, fresh=True, parts=parts).resumed == 0


def test_a_run_that_stopped_at_nan_goes_on(
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


def test_a_changed_input_is_noticed_and_a_moved_one_is_the_same_where_that_is_said(finished: Scene) -> None:
    moved = {"input": {"path": str(finished.folder / "moved.zarr")}}
    finished.source.rename(finished.folder / "moved.zarr")
    with refused(
        finished.output,
        ResumeRefused,
        "Write what it was, .* these are the same pixels at another path, run with --same-input",
    ):
        finished.run(parts=moved)
    assert finished.run(parts=moved, same_input=True).resumed == BLOCKS
    with refused(finished.output, ResumeRefused, r"output\.codec") as failed:
        finished.run(parts=moved | {"output": {"codec": "zstd"}}, same_input=True)
    assert "--same-input" not in str(failed.value)
    write_zarr(finished.source, image() + 1)
    for _ in range(2):
        with refused(finished.output, ResumeRefused, r"input\.[\s\S]*same images, .* run with --same-input"):
            finished.run()
        zarr.open_array(finished.source, mode="r+")[...] = image() + 2  # rewritten in place
    shutil.rmtree(finished.source)
    write_zarr(finished.source, image()[:-1])
    with refused(finished.output, ResumeRefused, r"input\.shape") as failed:
        finished.run(same_input=True)
    assert "--same-input" not in str(failed.value)


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
    for fresh, words in ((False, "metadata|no Zarr"), (True, "it is no Zarr")):
        with refused(finished.output, OutputRefused, words):
            finished.run(fresh=fresh)
    assert finished.journalled() == set(range(BLOCKS))
