"""What somebody else put at an output's place stays there; what is damaged is mended; what a user adds is left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import zarr

from halotile.errors import OutputRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.verify import verify
from halotile.storage.sharded.output import ShardWriter
from tests.cases import all_of, thorough
from tests.faults import BLOCKS, Scene
from tests.graphs.test_claimed import after
from tests.graphs.test_refusals import refused
from tests.support import write_zarr

pytestmark = pytest.mark.cluster

Change = Callable[[Scene], object]


@pytest.fixture
def finished(scene: Scene, cluster: RunningCluster) -> Scene:
    """A run that is done."""
    scene.run(cluster)
    scene.forget()
    return scene


def write_others(scene: Scene, count: int = BLOCKS) -> None:
    """Have so many blocks be those of another job of the same layout."""
    layout = make_plan(scene.job()).layout
    for number in range(count):
        region = layout.grid.block_at(number).core
        ShardWriter(scene.output, layout).write(region, np.zeros(region.shape, "float32"))


def test_the_result_of_another_job_that_was_moved_here_stays(
    finished: Scene, cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    write_others(finished, BLOCKS // 2 + 1)
    with refused(finished.output, OutputRefused, r"33 of the 64 blocks .* other pixels.*Move it away.*--repair"):
        finished.run(cluster)
    assert finished.journalled() == set(range(BLOCKS))
    assert verify(finished.output, job=finished.job(), repair=True).repaired == BLOCKS // 2 + 1
    check_whole()


def test_a_few_blocks_of_another_time_are_done_again(
    finished: Scene, cluster: RunningCluster, check_whole: Callable[[], None]
) -> None:
    write_others(finished, BLOCKS // 2)
    assert finished.run(cluster).resumed == BLOCKS // 2
    check_whole()


def put_array(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    zarr.save_array(str(scene.output), np.ones((60, 50)))


def put_old_array(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    zarr.create_array(scene.output, shape=(60, 50), dtype="uint8", zarr_format=2)[:] = 1


def put_group(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    zarr.create_group(scene.output).create_array("other", data=np.ones(9))


OTHERS: dict[str, Change] = {"array": put_array, "old array": put_old_array, "group": put_group}
"""What may stand at the output's place, beside its run directory."""


@pytest.mark.parametrize("name", all_of(OTHERS, thorough=["old array", "group"]))
def test_another_zarr_at_the_place_of_an_output_is_not_damage(finished: Scene, name: str) -> None:
    OTHERS[name](finished)
    for attempt in (
        finished.run,
        lambda: verify(finished.output),
        lambda: verify(finished.output, job=finished.job(), repair=True),
    ):
        with refused(finished.output, OutputRefused, "is not what the run wrote there: .*Move it away") as told:
            attempt()
        assert "--repair" not in str(told.value)
    assert finished.journalled() == set(range(BLOCKS))


def write_metadata(scene: Scene, **values: object) -> None:
    """Have the metadata describe another array than the run wrote."""
    file = scene.output / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "values", [{"shape": [250, 256]}, thorough({"shape": [300, 256]}), thorough({"data_type": "int32"})]
)
def test_metadata_that_describe_another_array_are_restored_where_the_pixels_are_the_runs(
    finished: Scene, check_whole: Callable[[], None], values: dict[str, object]
) -> None:
    write_metadata(finished, **values)
    (problem,) = verify(finished.output).problems
    (key, value) = next(iter(values.items()))
    assert problem.startswith(
        f"metadata: {finished.output}/zarr.json has {key} {json.dumps(value)}, and the run wrote "
    )
    with pytest.raises(OutputRefused, match=r"and the run wrote .*\. .*--repair.* restores it\."):
        finished.run()
    assert verify(finished.output, job=finished.job(), repair=True).repaired == 1
    assert finished.seen() == []
    check_whole()


def test_an_output_that_a_user_appended_to_is_not_damage(finished: Scene) -> None:
    array = zarr.open_array(finished.output, mode="r+")
    array.resize((300, 256))
    array[256:] = 1.0
    with pytest.raises(OutputRefused, match=r"has shape \[300, 256\], and the run wrote .*Move it away"):
        verify(finished.output, job=finished.job(), repair=True)


def put_result(scene: Scene) -> None:
    write_others(scene)


def add_notes(scene: Scene) -> None:
    (scene.output / "c" / "notes.txt").write_text("mine")


def add_attributes(scene: Scene) -> None:
    attributes = zarr.open_array(scene.output, mode="r+").attrs
    attributes["who"] = "me"
    attributes["scale"] = [2, 2]


def test_attributes_of_the_user_are_no_damage_and_outlive_a_repair(scene: Scene, cluster: RunningCluster) -> None:
    scene.run(cluster, observer=after(8, scene, add_attributes))
    assert verify(scene.output).problems == ()
    assert scene.run(cluster).resumed == BLOCKS
    attributes = zarr.open_array(scene.output, mode="r+").attrs
    del attributes["halotile"]
    assert verify(scene.output, job=scene.job(), repair=True).repaired == 1
    kept = zarr.open_array(scene.output, mode="r").attrs.asdict()
    assert kept == {
        "halotile": {"scale": [1.0, 1.0], "units": [None, None], "complete": [256, 256]},
        "who": "me",
        "scale": [2, 2],
    }
    assert verify(scene.output).problems == ()


STRANGERS: dict[str, tuple[Change, str]] = {
    "array": (put_array, "zarr.json has shape .60, 50., and the run wrote .256, 256."),
    "old array": (put_old_array, "zarray is of another Zarr"),
    "group": (put_group, 'zarr.json has node_type "group"'),
    "result": (put_result, "64 of the 64 blocks that are done are whole there, with other pixels"),
    "notes": (add_notes, "no run wrote .*/c/notes.txt"),
    "labels": (lambda scene: write_zarr(scene.output / "labels" / "seg", np.ones((9, 9))), "no run wrote .*labels/seg"),
    "attributes": (add_attributes, "attributes that no run wrote .who, scale."),
}


@pytest.mark.parametrize("name", all_of(STRANGERS, thorough=["array", "old array", "group", "labels"]))
def test_starting_over_discards_nothing_that_no_run_wrote(
    finished: Scene, cluster: RunningCluster, check_whole: Callable[[], None], name: str
) -> None:
    change, words = STRANGERS[name]
    change(finished)
    with refused(finished.output, OutputRefused, rf"{words}.*output\.overwrite: true"):
        finished.run(cluster, fresh=True)
    assert finished.journalled() == set(range(BLOCKS))
    assert finished.run(cluster, fresh=True, parts={"output": {"overwrite": True}}).resumed == 0
    check_whole()


@pytest.mark.parametrize("plan", [thorough("there"), "lost"])
@pytest.mark.parametrize("metadata", ["gone", thorough("half")])
def test_starting_over_needs_no_metadata_where_all_else_is_the_runs(
    finished: Scene, cluster: RunningCluster, check_whole: Callable[[], None], metadata: str, plan: str
) -> None:
    file = finished.output / "zarr.json"
    file.write_bytes(file.read_bytes()[:100]) if metadata == "half" else file.unlink()
    if plan == "lost":
        finished.directory.plan_path.unlink()
    assert finished.run(cluster, fresh=True).resumed == 0
    check_whole()
