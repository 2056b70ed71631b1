"""Runs whose outputs go to an object store: the rules of a disk hold there, and one run directory owns an output."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import halotile
from halotile.cli.config.loading import load_job
from halotile.cli.main import app
from halotile.errors import BlockFailed, ConfigError, InputError, MissingPackage, OutputInUse, OutputRefused
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.claim import check_outputs, claim
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.verify import verify
from halotile.graphs.watching.progress import Progress
from halotile.storage.disk.object_path import ObjectPath, files_below, store_at
from halotile.storage.run_directory.directory import CLAIM, RunDirectory
from halotile.storage.sharded.ownership import is_marked
from tests.cases import thorough
from tests.faults import BLOCKS, members, until
from tests.graphs.test_kills import kill, running
from tests.stores import BUCKET, DENIED, SECRET, ObjectServer, StoreScene, contents, delete, failing, put
from tests.support import job_of, noisy_image

pytestmark = pytest.mark.cluster
pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def store_cluster(object_store: ObjectServer) -> Iterator[RunningCluster]:
    """Two worker processes whose environment names the store."""
    with local.start(Order(workers=2, memory_bytes=4 * 2**30)) as running:
        yield running


@pytest.fixture
def scene(tmp_path: Path, object_store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> StoreScene:
    """A watched job, not begun, in its working directory."""
    object_store.trouble = lambda *_: None
    monkeypatch.chdir(tmp_path)
    scene = StoreScene.create(tmp_path)
    assert isinstance(scene, StoreScene)
    return scene


REPLACING = {"output": {"overwrite": True}}


def test_the_objects_are_the_files_of_a_local_run(
    scene: StoreScene, store_cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    outcome = scene.run(store_cluster)
    assert (outcome.done, outcome.output) == (BLOCKS, str(scene.output))
    assert is_marked(scene.output)
    check_whole()
    assert halotile.status(str(scene.output)).state == halotile.status(scene.directory.path).state == "finished"
    for file in filter(Path.is_file, scene.directory.path.rglob("*")):
        assert SECRET.encode() not in file.read_bytes()


@pytest.mark.thorough
def test_killed_workers_and_drivers_lose_nothing(
    scene: StoreScene,
    store_cluster: RunningCluster,
    check_whole: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running(scene) as driver:
        workers = scene.workers()
        kill([min(workers)])
        until(lambda: len(scene.workers() - workers) == 1)
        driver.send_signal(signal.SIGKILL)
        kill(members(driver.pid))
    done = scene.journalled()
    assert 6 <= len(done) < BLOCKS
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path_factory.mktemp("elsewhere"))
        with pytest.raises(InputError, match="which has not finished it"):
            make_plan(job_of(str(scene.output), Path("again.zarr"), "none"))
    scene.forget()
    scene.set_pace(0)
    assert scene.run(store_cluster).resumed == len(done)
    assert sorted(scene.seen()) == sorted(set(range(BLOCKS)) - done)
    check_whole()
    make_plan(job_of(str(scene.output), Path("again.zarr"), "none"))


@pytest.mark.thorough
def test_damage_is_repaired_and_nothing_else_is_done(
    scene: StoreScene, store_cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    scene.run(store_cluster)
    shards = [scene.output / f"c/2/{column}" for column in range(4)]
    delete(shards[0])
    put(shards[1], shards[1].read_bytes()[:-50])
    put(shards[2], (scene.output / "c/2/7").read_bytes())
    put(shards[3], b"\x00" + shards[3].read_bytes()[1:])
    delete(scene.output / "zarr.json")
    scene.forget()
    verdict = verify(str(scene.output), job=scene.job(), repair=True)
    assert (verdict.repaired, verdict.undone.to_text()) == (5, "")
    assert sorted(scene.seen()) == [16, 17, 18, 19]
    check_whole()


@pytest.mark.thorough
def test_a_block_whose_put_fails_is_done_again_and_what_is_done_stays_done(
    scene: StoreScene, object_store: ObjectServer, store_cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    twice, always = (failing(2, DENIED, "PUT", "clean.zarr/c/0/3"), failing(99, DENIED, "PUT", "clean.zarr/c/1/1"))
    object_store.trouble = lambda *asked: twice(*asked) or always(*asked)
    shard = f"{scene.output}/c/1/1"
    with pytest.raises(BlockFailed, match=rf"block 9 .*PermissionError: .*Access Denied: '{shard}'"):
        scene.run(store_cluster)
    assert sorted(event["block"] for event in scene.events("retry")) == [3, 3, 9, 9]
    assert scene.journalled() == set(range(BLOCKS)) - {9}
    object_store.trouble = lambda *_: None
    scene.forget()
    scene.run(store_cluster)
    assert scene.seen() == [9]
    check_whole()


@pytest.mark.thorough
def test_one_run_directory_owns_an_output(scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(make_plan(scene.job())):
        pass
    before, first = contents(scene.output), scene.directory.path
    other = StoreScene(scene.folder, scene.folder / "elsewhere")
    other.place.mkdir()
    monkeypatch.chdir(other.place)
    words = rf"belongs to the run in {re.escape(str(first))} on \S+, of user \d+, by .*clean\.zarr\.run/claim\.json"
    plans = [make_plan(scene.job()), make_plan(scene.job(), fresh=True), make_plan(scene.job(parts=REPLACING))]
    for plan in plans:
        with pytest.raises(OutputRefused, match=words), claim(plan):
            pass
    for command in (lambda: halotile.status(str(scene.output)), lambda: verify(str(scene.output), repair=True)):
        with pytest.raises(ConfigError, match=rf" It belongs to the run in {re.escape(str(first))} on"):
            command()
    assert contents(scene.output) == before
    with claim(make_plan(scene.job(parts=REPLACING), fresh=True)):
        assert list(scene.output.objects()) == ["zarr.json"]
    monkeypatch.chdir(scene.place)
    with pytest.raises(OutputRefused, match=f"belongs to the run in {re.escape(str(other.directory.path))} "):
        check_outputs(make_plan(scene.job()))
    shutil.rmtree(first)
    shutil.move(other.directory.path, first)  # what owns it is the directory, wherever it lies
    with claim(make_plan(scene.job())) as outputs:
        outputs.check_place()


def test_of_two_runs_that_claim_at_once_one_is_refused(scene: StoreScene, object_store: ObjectServer) -> None:
    place = scene.output.with_name("clean.zarr.run") / CLAIM
    for fresh in (False, True):
        theirs = json.dumps({"token": str(fresh), "directory": "d", "host": "h"}).encode()

        def meanwhile(method: str, name: str, theirs: bytes = theirs) -> None:
            if method == "PUT" and name == place.key:
                object_store.trouble = lambda *_: None
                put(place, theirs)

        plan = make_plan(scene.job(parts=REPLACING), fresh=fresh)
        object_store.trouble = meanwhile
        with pytest.raises(OutputInUse, match="claimed by another run at this moment"), claim(plan):
            pass
        assert place.read_bytes() == theirs
        assert not (scene.output / "zarr.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda scene: put(scene.output.with_name("clean.zarr.run") / CLAIM, b"{}"),
            "now belongs to the run in unknown",
        ),
        thorough(lambda scene: delete(scene.output.with_name("clean.zarr.run") / CLAIM), "has lost its claim"),
        thorough(lambda scene: delete(scene.output / "zarr.json"), r"was moved or removed \(no such object\)"),
    ],
)
def test_a_run_ends_where_its_output_is_taken_away(
    scene: StoreScene, store_cluster: RunningCluster, change: Callable[[StoreScene], object], words: str
) -> None:
    due = [change]

    def watch(progress: Progress) -> None:
        if progress.done >= 10 and due:
            due.pop()(scene)

    with pytest.raises(OutputRefused, match=words):
        scene.run(store_cluster, observer=watch)


def test_a_foreign_object_is_not_discarded_unasked_and_a_neighbour_never(scene: StoreScene) -> None:
    with claim(make_plan(scene.job())):
        pass
    neighbour = scene.output.with_name("clean.zarr2") / "zarr.json"
    for place in (scene.output / "notes.txt", neighbour):
        put(place, b"mine")
    with pytest.raises(OutputRefused, match=r"no run wrote s3://.*/notes\.txt"):
        check_outputs(make_plan(scene.job(), fresh=True))
    assert (scene.output / "notes.txt").read_bytes() == b"mine"
    with claim(make_plan(scene.job(parts=REPLACING), fresh=True)):
        assert list(scene.output.objects()) == ["zarr.json"]
    assert neighbour.read_bytes() == b"mine"


def test_a_plan_refuses_what_cannot_be_written(
    scene: StoreScene, object_store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputRefused, match=r"s3://none/a\.zarr: there is no such bucket\. Write"):
        make_plan(scene.job(parts={"output": {"path": "s3://none/a.zarr"}}))
    with monkeypatch.context() as patch:
        patch.setattr("halotile.graphs.plans.plan.MOST_PUT_BYTES", 4095)
        with pytest.raises(ConfigError, match=r"output\.shard is \[32, 32\], 4 KiB each, and a"):
            make_plan(scene.job())
    object_store.trouble = lambda *_: DENIED
    with pytest.raises(OutputRefused, match=r"Access Denied\. Write a place .* that you may list, read and write"):
        make_plan(scene.job())
    object_store.trouble = failing(1, DENIED, "PUT", CLAIM)
    with (
        pytest.raises(OutputRefused, match=r"claim\.json cannot be written: Access Denied"),
        claim(make_plan(scene.job())),
    ):
        pass
    put(scene.output / "zarr.json", b"{}")
    with pytest.raises(OutputRefused, match=r"something stands there"):
        check_outputs(make_plan(scene.job()))
    delete(scene.output / "zarr.json")
    for method, name in (("HEAD", "clean.zarr"), ("PUT", "clean.zarr/zarr.json")):
        object_store.trouble = failing(1, DENIED, method, name)
        with (
            pytest.raises(OutputRefused, match=rf"{name}: Access Denied\. What is done"),
            claim(make_plan(scene.job())),
        ):
            pass
    store_at.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[s3\]"'):
        make_plan(scene.job())


RECONSTRUCTION = """\
version: 1
job: reconstruct
output: {{path: "{output}", shard: 32, chunk: 16}}
operators: [{{name: blur, kernel: kernel.npy, data: scan-a.npy, noise_sigma: 0.05}}]
prior: {{name: tv, weight: 0.1}}
solver: {{name: fista, iterations: 1}}
run: {{workers: 2, memory_per_worker: 3GiB}}
"""
MANY = """\
version: 1
job: denoise
input: {{path: "scan-*.npy"}}
output: {{path: "{output}", shard: 32, chunk: 16}}
denoiser: {{name: gaussian, sigma: 1.0}}
run: {{workers: 2, memory_per_worker: 3GiB}}
"""


@pytest.fixture
def images(tmp_path: Path, object_store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """Two images and a kernel in the working directory; returns a folder in the store."""
    object_store.trouble = lambda *_: None
    monkeypatch.chdir(tmp_path)
    np.save("kernel.npy", np.full((3, 3), 1 / 9, np.float32))
    for name in ("a", "b"):
        np.save(f"scan-{name}.npy", noisy_image((64, 48), seed=ord(name)))
    return ObjectPath(f"s3://{BUCKET}/{tmp_path.name}")


@pytest.mark.thorough
def test_a_reconstruction_writes_the_same_and_keeps_its_state_here(
    images: ObjectPath, store_cluster: RunningCluster
) -> None:
    for output in (images / "x.zarr", Path("x.zarr")):
        Path("job.yaml").write_text(RECONSTRUCTION.format(output=output))
        plan = make_plan(load_job(Path("job.yaml")))
        assert (plan.disk_bytes > plan.scratch_bytes > 0) is isinstance(output, Path)
        run(plan, cluster=store_cluster)
    local_files = {name: Path("x.zarr", name).read_bytes() for name in files_below(Path("x.zarr"))}
    assert contents(images / "x.zarr") == local_files


def test_commands_take_the_address_of_an_output(images: ObjectPath) -> None:
    Path("job.yaml").write_text(MANY.format(output=images / "{stem}.zarr"))

    def command(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        return result.stdout

    ended = json.loads(command("run", "job.yaml", "--quiet"))["images"]
    assert [Path(one["output"]).name for one in ended.values()] == ["scan-a.zarr", "scan-b.zarr"]
    output = str(images / "scan-a.zarr")
    delete(images / "scan-a.zarr" / "0/c/0/1")
    assert json.loads(command("verify", output, "--repair", "--quiet"))["repaired"] == 1
    for named in (output, str(RunDirectory.beside(output).path)):
        assert json.loads(command("status", named))["state"] == "finished"
        assert json.loads(command("resume", named, "--quiet"))["output"] == output
        assert json.loads(command("verify", named, "--quiet"))["checked"] == 4


def test_a_run_directory_is_not_resumed_from_another_folder(
    images: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory = RunDirectory.beside(images / "a.zarr")
    run_directory.create()
    job = job_of(Path("scan-a.npy").absolute(), images / "a.zarr", "gaussian", {"sigma": 1})  # type: ignore[arg-type]
    run_directory.write_job(make_plan(job).documents.asked)
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    for words in (["resume"], ["verify"], ["verify", "--repair"]):
        result = CliRunner().invoke(app, [*words, str(run_directory.path)])
        assert (result.exit_code, f"Write `cd {run_directory.path.parent}` first" in result.output) == (2, True)
