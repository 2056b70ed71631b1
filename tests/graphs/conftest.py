"""A context for distributed objects, and a watched job with what it writes when nobody disturbs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from distributed import LocalCluster

from halotile import DistributedContext
from halotile.errors import BlockFailed
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.trials import denoiser_trials
from halotile.graphs.runs.verify import verify
from halotile.storage.arrays import open_source
from halotile.storage.disk.durable import Disk
from halotile.tasks.denoisers.function import Function
from tests.faults import BLOCKS, LEFT, Scene, image, truth
from tests.graphs.trials import FOUND, TWO, finding
from tests.support import IN_THREADS


@pytest.fixture(scope="module")
def ctx(cluster: RunningCluster) -> Iterator[DistributedContext]:
    """A context on the cluster of the tests."""
    with DistributedContext(cluster=cluster, device_mode="cpu", seed=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def four() -> Iterator[DistributedContext]:
    """Four workers for the ranks of torch programs; no longer than a module, whose Dask it is by default."""
    with DistributedContext(workers=4, device_mode="cpu", memory_per_worker="3GiB") as opened:
        yield opened


@pytest.fixture(scope="module")
def counts() -> Iterator[list[DistributedContext]]:
    """Contexts of one, two and three workers, in this process."""
    with ExitStack() as opened:
        clusters = [opened.enter_context(LocalCluster(n_workers=n, **IN_THREADS)) for n in (1, 2, 3)]
        contexts = [DistributedContext(cluster=each.get_client(), device_mode="cpu") for each in clusters]
        yield [opened.enter_context(each) for each in contexts]


@pytest.fixture(scope="session", autouse=True)
def _watched_is_tried_once() -> Iterator[None]:
    """The denoiser of watched jobs is the same in each: a process tries it once for each way of tiling."""
    bounded, answers = denoiser_trials.bounded, dict[str, Any]()

    def remembered(call: Any, title: str, *arguments: Any, **options: Any) -> Any:
        denoiser = call.args[0] if isinstance(call, partial) and call.args else None
        if not isinstance(denoiser, Function) or denoiser.import_ != "tests.faults:watched":
            return bounded(call, title, *arguments, **options)
        asked = [each for each in call.args[1:] if not isinstance(each, list)]  # but for pixels of samples
        key = repr((call.func, replace(denoiser, options={}), asked, call.keywords))
        if key not in answers:
            answers[key] = bounded(call, title, *arguments, **options)
        return answers[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(denoiser_trials, "bounded", remembered)
        yield


Kept = tuple[Scene, Path]
"""A scene, and a copy of its folder as a run left it."""


def kept(scene: Scene) -> Kept:
    scene.forget()
    return scene, shutil.copytree(scene.folder, scene.folder.with_name(f"{scene.folder.name}-kept"))


@pytest.fixture(scope="session")
def finished_once(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A run without trouble."""
    scene = Scene.create(tmp_path_factory.mktemp("finished"))
    scene.run(cluster)
    assert sorted(scene.seen()) == list(range(BLOCKS))
    return kept(scene)


@pytest.fixture(scope="session")
def half_done_once(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A run that ended with some of its blocks missing."""
    scene = Scene.create(tmp_path_factory.mktemp("half-done"))
    causes = [scene.make_trouble("raise", block) for block in LEFT]
    with pytest.raises(BlockFailed):
        scene.run(cluster, retries=0)
    for cause in causes:
        cause.unlink()
    assert scene.journalled() == {*range(BLOCKS)} - {*LEFT}
    return kept(scene)


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A watched job, not begun; or as the run was left that a test asks for, which is made once, in one place."""
    for name in {"finished", "half_done"}.intersection(request.fixturenames):
        once, copy = request.getfixturevalue(f"{name}_once")
        shutil.rmtree(once.folder)
        shutil.copytree(copy, once.folder)
        return cast(Scene, once)
    return Scene.create(tmp_path)


@pytest.fixture
def finished(scene: Scene) -> Scene:
    """A run that is done."""
    return scene


@pytest.fixture
def half_done(scene: Scene) -> Scene:
    """A run with some of its blocks left to do."""
    return scene


@pytest.fixture(scope="session")
def undisturbed(finished_once: Kept) -> dict[str, bytes]:
    """Every file of the output of a run without trouble."""
    scene, copy = finished_once
    return replace(scene, place=copy).files()


@pytest.fixture
def check_whole(scene: Scene, undisturbed: dict[str, bytes]) -> Callable[[], None]:
    """Assert that the output is what a run without trouble writes, to the byte, and nothing else is there."""

    def check() -> None:
        assert scene.files() == undisturbed
        np.testing.assert_array_equal(open_source(str(scene.output))[...], truth(image()))
        assert verify(scene.output).problems == ()
        assert scene.journalled() == set(range(BLOCKS))
        assert scene.status()["state"] == "finished"

    return check


@pytest.fixture
def check_resumes(scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None]) -> Callable[[], None]:
    """Run the job again and assert that it ends whole, with no journalled block computed a second time."""

    def check() -> None:
        done = scene.journalled()
        orphans = scene.workers().difference(cluster.client.run(os.getpid).values())
        scene.forget()
        scene.set_pace(0)
        assert scene.run(cluster).resumed == len(done)
        # Workers of a driver that was killed end with a block that nobody awaits.
        seen = scene.seen(but_by=orphans)
        assert done.isdisjoint(seen)
        assert sorted(seen) == sorted(set(range(BLOCKS)) - done)
        check_whole()

    return check


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk in this process: other tests cut the power."""
    for name in ("_fsync", "_begin_fsync"):
        monkeypatch.setattr(Disk, name, lambda *_: None)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What trials of GPUs are asked for, which end as it is told."""
    return finding(monkeypatch, FOUND, TWO)
