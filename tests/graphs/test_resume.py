"""Going on with a run, in another way, from any journal, after a full disk; and what is refused before anything is touched."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zarr

import halotile
from halotile import errors
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.jobs.simulate.job import NoiseChoice, simulation_of
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Job
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.driver import run
from halotile.storage.arrays import open_source
from halotile.storage.run_directory.journal import Journal
from halotile.tasks.operators.mask import Mask
from tests.cases import thorough
from tests.faults import BLOCKS, LEFT, Scene, flip_bit, image
from tests.support import job_of, write_zarr

pytestmark = pytest.mark.cluster
Check = Callable[[], None]


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder with its size, time of change and mode."""
    found = {}
    for entry in [folder, *folder.rglob("*")]:
        status = entry.lstat()
        size = 0 if entry.is_dir() else status.st_size
        found[str(entry.relative_to(folder))] = (size, status.st_mtime_ns, status.st_mode)
    return found


@contextmanager
def refused(folder: Path, kind: type[errors.HalotileError], words: str) -> Iterator[Any]:
    """What is done in here is refused, and nothing in the folder is touched."""
    before = listing(folder)
    with pytest.raises(kind, match=words) as failed:
        yield failed
    assert listing(folder) == before


def gaussian(source: Path, output: Path | str, *, overwrite: bool = False) -> Denoising:
    job = job_of(source, Path(output), "gaussian", {"sigma": 1.0})
    return replace(job, output=replace(job.output, path=str(output), overwrite=overwrite))


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
        with refused(tmp_path, errors.OutputRefused, words):
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
        with refused(tmp_path, errors.OutputRefused, words):
            run(make_plan(gaussian(source, place, overwrite=overwrite), fresh=fresh))


def test_an_image_that_lacks_a_block_is_not_read(half_done: Scene, cluster: RunningCluster) -> None:
    unfinished, following, folder = half_done.output, half_done.folder / "next.zarr", half_done.folder
    denoising = gaussian(half_done.source, following)

    def reconstruction(operator: Any, **options: Any) -> Job:
        seen = halotile.measurement(operator, half_done.source, **options)
        return Reconstruction(output=denoising.output, operators=(seen,))

    made = halotile.measurement("blur", folder / "y.zarr", kernel=[[1.0]], noise_sigma=0.1)
    simulated = Reconstruction(output=denoising.output, operators=(made,), reference=str(unfinished))
    makes: list[Callable[[], Job]] = [
        lambda: gaussian(unfinished, following),
        lambda: replace(denoising, input=replace(denoising.input, sides={"mask": str(unfinished)})),
        lambda: reconstruction("mask", mask=unfinished),
        lambda: reconstruction(Mask(mask=open_source(unfinished))),  # of a script
        lambda: reconstruction("blur", kernel=unfinished),
        lambda: simulation_of(simulated, NoiseChoice(), overwrite=False),
    ]
    words = r"clean\.zarr is the output of a run that has 4 of 64 blocks left to do"
    for make in makes:
        with refused(folder, errors.InputError, words):
            make_plan(make())
    half_done.run(cluster)
    make_plan(makes[0]())
    (lost := unfinished / "c" / "0" / "3").unlink()
    words = rf"{lost}: the shard is missing; 1 of the .* `recon-cli verify --repair`"
    with refused(folder, errors.InputError, words):
        make_plan(makes[0]())


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
        with refused(finished.output, errors.ResumeRefused, rf"{words}[\s\S]*--fresh"):
            finished.run(parts=parts)
    with pytest.raises(errors.ResumeRefused) as failed:
        finished.run(parts={"output": {"codec": "zstd", "chunk": 8}}, on_nan="fail")
    assert len(str(failed.value).splitlines()) == 5, "every difference is listed"
    monkeypatch.setattr(halotile, "__version__", "99.0")
    with refused(finished.output, errors.ResumeRefused, 'code.halotile was ".*", is "99.0"'):
        finished.run()
    assert finished.journalled() == set(range(BLOCKS))


STANDING = [("half done", "input"), ("run directory", "output"), ("no job.json", "denoiser")]


@pytest.mark.parametrize(("stands", "change"), [("finished", "denoiser"), *(thorough(*row) for row in STANDING)])
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
    with refused(finished.folder, errors.OutputRefused, r"another job.*--fresh discards only.*output\.overwrite"):
        run(make_plan(other, fresh=True))
    if stands != "run directory":
        with refused(finished.output, errors.ResumeRefused, r"--fresh and output\.overwrite: true"):
            run(make_plan(other))
    replacing = replace(other, output=replace(other.output, overwrite=True))
    assert run(make_plan(replacing, fresh=True), cluster=cluster).resumed == 0


def test_starting_over_discards_the_same_job_computed_in_another_way(finished: Scene, cluster: RunningCluster) -> None:
    (finished.source / "c" / "0" / "0").touch()  # an image that was mended is the same one here
    parts = {"tile": {"depth": 4, "size": 16, "boundary": "reflect"}, "run": {"on_nan": "fail", "workers": 1}}
    assert finished.run(cluster, fresh=True, parts=parts).resumed == 0


def test_a_run_that_stopped_at_nan_goes_on(scene: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    causes = [scene.make_trouble("raise", block) for block in (3, 5)]
    with pytest.raises(errors.BlockFailed):
        scene.run(cluster, on_nan="fail", retries=0)
    for cause in causes:
        cause.unlink()
    scene.forget()
    assert (scene.run(cluster, on_nan="propagate").resumed, sorted(scene.seen())) == (BLOCKS - 2, [3, 5])
    # Now there may be NaN among what is done.
    with refused(scene.output, errors.ResumeRefused, 'run.on_nan was "propagate", is "fail"'):
        scene.run(on_nan="fail")
    check_whole()


def test_a_changed_input_is_noticed_and_a_moved_one_is_the_same_where_that_is_said(finished: Scene) -> None:
    moved = {"input": {"path": str(finished.folder / "moved.zarr")}}
    finished.source.rename(finished.folder / "moved.zarr")
    words = "Write what it was, .* these are the same pixels at another path, run with --same-input"
    with refused(finished.output, errors.ResumeRefused, words):
        finished.run(parts=moved)
    assert finished.run(parts=moved, same_input=True).resumed == BLOCKS
    with refused(finished.output, errors.ResumeRefused, r"output\.codec") as failed:
        finished.run(parts=moved | {"output": {"codec": "zstd"}}, same_input=True)
    assert "--same-input" not in str(failed.value)
    write_zarr(finished.source, image() + 1)
    for _ in range(2):
        with refused(finished.output, errors.ResumeRefused, r"input\.[\s\S]*same images, .* run with --same-input"):
            finished.run()
        zarr.open_array(finished.source, mode="r+")[...] = image() + 2  # rewritten in place
    shutil.rmtree(finished.source)
    write_zarr(finished.source, image()[:-1])
    with refused(finished.output, errors.ResumeRefused, r"input\.shape") as failed:
        finished.run(same_input=True)
    assert "--same-input" not in str(failed.value)


def test_a_run_that_began_since_the_plan_was_made_is_not_taken_for_ours(scene: Scene) -> None:
    plan = make_plan(scene.job(parts={"output": {"codec": "zstd"}}))
    with claim(make_plan(scene.job())) as held:
        held.held[0].journal.mark({0: b"some"})
    with refused(scene.output, errors.ResumeRefused, r"output\.codec"):
        run(plan)


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 1, "parts": {"output": {"overwrite": True}}},
        thorough({"workers": 7, "retries": 0, "on_bad_block": "quarantine", "parts": {"tile": {"size": 16}}}),
        thorough({"parts": {"tile": {"size": "auto", "block": "auto", "batch": 3}}}),
    ],
    ids=str,
)
def test_other_ways_give_equal_bits(half_done: Scene, cluster: RunningCluster, check_whole: Check, change: Any) -> None:
    outcome = half_done.run(cluster, **change)
    assert (outcome.done, outcome.resumed, set(half_done.seen())) == (BLOCKS, 60, set(LEFT))
    check_whole()


def test_a_run_that_is_done_does_nothing_and_starts_no_cluster(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done.run(cluster)
    half_done.forget()
    monkeypatch.setattr(local, "start", lambda **_: pytest.fail("a cluster was started"))
    before, status = {p: p.stat().st_mtime_ns for p in half_done.output.rglob("*")}, half_done.status()
    assert status["peak_memory_bytes"] > 0
    seen = list[Any]()
    outcome = half_done.run(observer=seen.append)
    assert (outcome.done, outcome.resumed, outcome.seconds, half_done.seen()) == (BLOCKS, BLOCKS, 0.0, [])
    assert {p: p.stat().st_mtime_ns for p in half_done.output.rglob("*")} == before
    said = "".join(moment.message for moment in seen)
    assert "nothing left to do: all 64 blocks are done; checking every byte" in said
    assert (seen[-1].done, half_done.status()) == (BLOCKS, status)
    check_whole()


@pytest.mark.parametrize("cut", [1, 12, None])
def test_a_torn_journal_goes_on_and_leftovers_are_swept(half_done: Scene, check_resumes: Check, cut: Any) -> None:
    leftovers = [half_done.output / "c" / "0" / "0.0a1b2c3d.partial", half_done.output / "zarr.json.0a1b2c3d.partial"]
    leftovers += [half_done.directory.path / "status.json.0a1b2c3d.partial"]
    for file in leftovers:
        file.write_bytes(b"half of it")
    before, journal = half_done.journalled(), half_done.directory.journal_path
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3
    if cut is None:
        lines[2] = lines[2].replace(b"+", b"*")
    journal.write_bytes(b"".join(lines)[: cut and -cut])
    assert half_done.journalled() < before
    check_resumes()
    assert any("line 3 is damaged" in event["text"] for event in half_done.events("message")) is (cut is None)
    assert not any(file.exists() for file in leftovers)


def test_a_run_without_its_journal_starts_over(half_done: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    journal = half_done.directory.journal_path
    journal.write_bytes(journal.read_bytes()[20:])
    with pytest.raises(errors.DamagedData, match=r"first line is damaged\. Run with --fresh"):
        half_done.run(cluster)
    assert (half_done.run(cluster, fresh=True).resumed, sorted(half_done.seen())) == (0, list(range(BLOCKS)))
    journal.unlink()
    assert half_done.run(cluster).resumed == 0
    check_whole()


LOST = [(["job.json", "plan.json"], "half"), thorough(["plan.json"], "gone"), thorough(["job.json"], "gone")]


@pytest.mark.parametrize(("names", "how"), LOST, ids=str)
def test_a_run_that_has_its_journal_goes_on_and_restores_the_other_files(
    half_done: Scene, cluster: RunningCluster, check_whole: Check, names: list[str], how: str
) -> None:
    files = [half_done.directory.path / name for name in names]
    kept = [json.loads(file.read_bytes()) for file in files]
    for file in files:
        file.write_bytes(file.read_bytes()[:100]) if how == "half" else file.unlink()
    assert (half_done.run(cluster).resumed, set(half_done.seen())) == (60, set(LEFT))
    for file, content in zip(files, kept, strict=True):
        restored = json.loads(file.read_bytes())
        assert (restored.get("fingerprint"), restored.keys()) == (content.get("fingerprint"), content.keys())
    check_whole()


def test_a_journal_of_another_job_without_its_plan_is_refused(half_done: Scene, cluster: RunningCluster) -> None:
    half_done.directory.plan_path.unlink()
    with pytest.raises(errors.ResumeRefused, match=r"60 blocks of another job.*recon-cli resume .*--fresh"):
        half_done.run(cluster, parts={"output": {"codec": "zstd"}})
    assert half_done.run(cluster).resumed == 60


def test_blocks_of_damaged_files_are_done_again(half_done: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    shards = half_done.output / "c" / "0"
    (shards / "1").unlink()
    (shards / "3").write_bytes((shards / "3").read_bytes()[:-1])
    (shards / "4").write_bytes(b"")
    (shards / "6").write_bytes((shards / "6").read_bytes()[20:])
    shutil.copyfile(shards / "0", shards / "7")
    flip_bit(shards / "5", 100)
    assert (half_done.run(cluster).resumed, set(half_done.seen())) == (54, {1, 3, 4, 5, 6, 7, *LEFT})
    half_done.forget()
    flip_bit(shards / "3", 100)  # of a finished run
    assert (half_done.run(cluster).resumed, half_done.seen()) == (BLOCKS - 1, [3])
    said = [event["text"] for event in half_done.events("message") if "damaged" in event["text"]]
    one = "1 block of the earlier run is damaged and done again"  # its bits alone
    assert said == ["5 blocks of the earlier run are damaged and done again", one, one]
    check_whole()


def test_a_lost_output_is_not_replaced_unasked(half_done: Scene, cluster: RunningCluster, check_whole: Check) -> None:
    aside = half_done.output.rename(half_done.folder / "aside")
    for parts in ({}, {"output": {"overwrite": True}}):
        with pytest.raises(errors.OutputRefused, match=r"is not there, .* 60 blocks of it .* Put it back .*--fresh"):
            half_done.run(cluster, parts=parts)
    assert len(half_done.journalled()) == 60
    aside.rename(half_done.output)
    assert half_done.run(cluster).resumed == 60
    shutil.rmtree(half_done.output)
    assert half_done.run(cluster, fresh=True).resumed == 0
    check_whole()


def test_what_a_solver_has_done_outlives_its_output(half_done: Scene, cluster: RunningCluster) -> None:
    with Journal.open(half_done.directory.journal_path, half_done.fingerprint(), BLOCKS) as journal:
        journal.unmark(range(BLOCKS))
    half_done.directory.state_path.mkdir()
    shutil.rmtree(half_done.output)
    with pytest.raises(errors.OutputRefused, match=r"is not there, .* intermediate results .*--fresh"):
        half_done.run(cluster)
    half_done.directory.state_path.rmdir()
    assert half_done.run(cluster).resumed == 0


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.parametrize("room_kib", [40, thorough(16), 0])
def test_a_full_disk_stops_the_run_and_more_room_lets_it_go_on(
    cluster: RunningCluster, tmp_path: Path, small_disk: Path, undisturbed: dict[str, bytes], room_kib: int
) -> None:
    scene = Scene.create(tmp_path, small_disk)
    plan = make_plan(scene.job())
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - room_kib * 1024))
    with pytest.raises(errors.DiskRefused, match=r"the disk ran full.*No space left on device.*run again") as full:
        run(plan, cluster=cluster)
    done = scene.journalled()
    assert room_kib // 4 - 16 <= len(done) <= room_kib // 4
    if room_kib > 20:
        full.match(rf"{len(done)} of 64 blocks are safe; the others take up to [\d.]+ KiB, and .* has [\d.]+ \w+ free")
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True)
    scene.forget()
    assert (scene.run(cluster).resumed, sorted(scene.seen())) == (len(done), sorted(set(range(BLOCKS)) - done))
    assert scene.files() == undisturbed
