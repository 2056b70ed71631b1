"""Runs whose outputs go to an object store: the rules of a disk hold there, and one run directory owns an output."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import halotile
from halotile.cli.main import app
from halotile.errors import ConfigError, InputError, MissingPackage, OutputInUse, OutputRefused
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import check_outputs, claim
from halotile.graphs.runs.verify import verify
from halotile.storage.disk.object_path import ObjectPath, store_at
from halotile.storage.run_directory.directory import CLAIM, RunDirectory
from halotile.storage.sharded.ownership import is_marked
from tests.cases import thorough
from tests.faults import BLOCKS, members, until
from tests.graphs.test_claimed import after
from tests.graphs.test_kills import Check, kill, running
from tests.stores import BUCKET, DENIED, SECRET, ObjectServer, StoreScene, contents, delete, failing, put
from tests.support import job_of, noisy_image

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.cluster
pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def store_cluster(object_store: ObjectServer) -> Iterator[RunningCluster]:
    """Two worker processes whose environment names the store."""
    with local.start(Order(workers=2, memory_bytes=4 * 2**30)) as running:
        yield running


@pytest.fixture
def scene(tmp_path: Path, object_store: ObjectServer, monkeypatch: Patch) -> StoreScene:
    """A watched job, not begun, in its working directory."""
    object_store.trouble = lambda *_: None
    monkeypatch.chdir(tmp_path)
    scene = StoreScene.create(tmp_path)
    assert isinstance(scene, StoreScene)
    return scene


REPLACING = {"output": {"overwrite": True}}


def test_objects_are_the_files_of_a_run(scene: StoreScene, store_cluster: RunningCluster, check_whole: Check) -> None:
    outcome = scene.run(store_cluster)
    assert (outcome.done, outcome.output) == (BLOCKS, str(scene.output))
    assert is_marked(scene.output)
    check_whole()
    assert halotile.status(str(scene.output)).state == halotile.status(scene.directory.path).state == "finished"
    for file in filter(Path.is_file, scene.directory.path.rglob("*")):
        assert SECRET.encode() not in file.read_bytes()


@pytest.mark.thorough
def test_killed_workers_and_drivers_lose_nothing(
    scene: StoreScene, store_cluster: RunningCluster, check_whole: Check, monkeypatch: Patch
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
        (scene.folder / "elsewhere").mkdir()
        elsewhere.chdir(scene.folder / "elsewhere")
        with pytest.raises(InputError, match="which has not finished it"):
            make_plan(job_of(str(scene.output), Path("again.zarr"), "none"))
    scene.forget()
    scene.set_pace(0)
    assert scene.run(store_cluster).resumed == len(done)
    assert sorted(scene.seen()) == sorted(set(range(BLOCKS)) - done)
    check_whole()
    make_plan(job_of(str(scene.output), Path("again.zarr"), "none"))


@pytest.mark.thorough
def test_one_run_directory_owns_an_output(scene: StoreScene, monkeypatch: Patch) -> None:
    with claim(make_plan(scene.job())):
        pass
    before, first = contents(scene.output), scene.directory.path
    other = StoreScene(scene.folder, scene.folder / "elsewhere")
    other.place.mkdir()
    monkeypatch.chdir(other.place)
    words = rf"belongs to the run in {re.escape(str(first))} on \S+, of user \d+, by .*clean\.zarr\.run/claim\.json"
    for plan in (make_plan(scene.job()), make_plan(scene.job(), fresh=True), make_plan(scene.job(parts=REPLACING))):
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
    place = claim_of(scene)
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


def claim_of(scene: StoreScene) -> ObjectPath:
    return scene.output.with_name("clean.zarr.run") / CLAIM


CHANGES = [
    (lambda scene: put(claim_of(scene), b"{}"), "now belongs to the run in unknown"),
    thorough(lambda scene: delete(claim_of(scene)), "has lost its claim"),
    thorough(lambda scene: delete(scene.output / "zarr.json"), r"was moved or removed \(no such object\)"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_run_ends_where_its_output_is_taken_away(
    scene: StoreScene, store_cluster: RunningCluster, change: Callable[[Any], object], words: str
) -> None:
    with pytest.raises(OutputRefused, match=words):
        scene.run(store_cluster, observer=after(10, scene, change))


def test_what_cannot_be_written_is_refused(scene: StoreScene, object_store: ObjectServer, monkeypatch: Patch) -> None:
    def refused(words: str, *, begin: Callable[[Plan], Any] = nullcontext, **job: Any) -> None:
        with pytest.raises((OutputRefused, ConfigError), match=words), begin(make_plan(scene.job(**job))):
            pass

    refused(r"s3://none/a\.zarr: there is no such bucket\. Write", parts={"output": {"path": "s3://none/a.zarr"}})
    with monkeypatch.context() as patch:
        patch.setattr("halotile.graphs.plans.plan.MOST_PUT_BYTES", 4095)
        refused(r"output\.shard is \[32, 32\], 4 KiB each, and a")
    object_store.trouble = lambda *_: DENIED
    refused(r"Access Denied\. Write a place .* that you may list, read and write")
    object_store.trouble = failing(1, DENIED, "PUT", CLAIM)
    refused(r"claim\.json cannot be written: Access Denied", begin=claim)
    put(scene.output / "zarr.json", b"{}")
    with pytest.raises(OutputRefused, match=r"it already exists"):
        check_outputs(make_plan(scene.job()))
    delete(scene.output / "zarr.json")
    for method, name in (("HEAD", "clean.zarr"), ("PUT", "clean.zarr/zarr.json")):
        object_store.trouble = failing(1, DENIED, method, name)
        refused(rf"{name}: Access Denied\. What is done", begin=claim)
    store_at.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackage, match=r'pip install "halotile\[s3\]"'):
        make_plan(scene.job())


MANY = """\
version: 1
job: denoise
input: {{path: "scan-*.npy"}}
output: {{path: "{output}", shard: 32, chunk: 16}}
denoiser: {{name: gaussian, sigma: 1.0}}
run: {{workers: 2, memory_per_worker: 3GiB}}
"""


@pytest.fixture
def images(tmp_path: Path, object_store: ObjectServer, monkeypatch: Patch) -> ObjectPath:
    """Two images and a kernel in the working directory; returns a folder in the store."""
    object_store.trouble = lambda *_: None
    monkeypatch.chdir(tmp_path)
    np.save("kernel.npy", np.full((3, 3), 1 / 9, np.float32))
    for name in ("a", "b"):
        np.save(f"scan-{name}.npy", noisy_image((64, 48), seed=ord(name)))
    return ObjectPath(f"s3://{BUCKET}/{tmp_path.name}")


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


def test_no_run_is_resumed_from_another_folder(images: ObjectPath, monkeypatch: Patch) -> None:
    run_directory = RunDirectory.beside(images / "a.zarr")
    run_directory.create()
    job = job_of(Path("scan-a.npy").absolute(), images / "a.zarr", "gaussian", {"sigma": 1})  # type: ignore[arg-type]
    run_directory.write_job(make_plan(job).documents.asked)
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    for words in (["resume"], ["verify"], ["verify", "--repair"]):
        result = CliRunner().invoke(app, [*words, str(run_directory.path)])
        assert (result.exit_code, f"Write `cd {run_directory.path.parent}` first" in result.output) == (2, True)
