"""Blocks that cannot be computed: they are named, and the others are done."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from halotile.errors import BlockFailed, BlockInputFailed, ConfigError, ResumeRefused
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise import image as job_image
from halotile.storage.grid import Region
from halotile.storage.sharded.ownership import is_marked
from tests.cases import thorough
from tests.faults import ACROSS, BLOCK, BLOCKS, Scene, image, truth
from tests.support import write_zarr

pytestmark = pytest.mark.cluster


def put_nan(scene: Scene, block: int) -> None:
    """A NaN in the input, in the middle of a block."""
    pixels = zarr.open_array(scene.source, mode="r+")
    row, column = divmod(block, ACROSS)
    pixels[row * BLOCK + 5, column * BLOCK + 7] = np.nan


def others(*bad: int) -> set[int]:
    return set(range(BLOCKS)) - set(bad)


BAD = [
    ("raise", "ValueError: poisoned by raise-19"),
    ("nan", r"returned NaN or infinity for finite pixels at .*64.*96"),
    thorough("shape", r"the function returned \(31, 32\) for an image of shape \(32, 32\)"),
    ("die", "every worker that took it died"),
    thorough("missing", r"FileNotFoundError: .*calibration\.npy"),
]


@pytest.mark.parametrize(("kind", "words"), BAD)
def test_a_bad_block_is_named_and_the_others_are_done(
    scene: Scene, cluster: RunningCluster, check_resumes: Callable[[], None], kind: str, words: str
) -> None:
    cause = scene.make_trouble(kind, 19)
    with pytest.raises(BlockFailed, match="1 of 64 blocks failed after 1 retry;") as failed:
        scene.run(cluster, retries=1)
    assert r"block 19 (index (2, 3), region (64, 96)–(96, 128))" in str(failed.value)
    assert "distributed" not in str(failed.value)
    failed.match(words)
    assert scene.journalled() == others(19)
    status = scene.status()
    assert (status["state"], status["done"], status["failed"], status["retried"]) == ("failed", 63, 1, 1)
    (event,) = scene.events("bad block")
    assert (event["block"], event["index"]) == (19, [2, 3])
    assert len(scene.events("retry")) == 1
    assert Counter(scene.seen())[19] == 2
    if kind == "raise":
        assert 'raise ValueError(f"poisoned by {file.name}")' in event["traceback"]
    cause.unlink()
    check_resumes()


def test_quarantined_blocks_are_named_in_the_outcome(
    scene: Scene, cluster: RunningCluster, check_resumes: Callable[[], None]
) -> None:
    causes = [scene.make_trouble("raise", block) for block in (40, 7)]
    outcome = scene.run(cluster, retries=0, on_bad_block="quarantine")
    assert [bad.number for bad in outcome.quarantined] == [7, 40]
    assert [bad.index for bad in outcome.quarantined] == [(0, 7), (5, 0)]
    assert outcome.done == BLOCKS - 2
    assert (set(Counter(scene.seen()).values()), scene.events("retry")) == ({1}, []), "without retries"
    assert scene.status()["state"] == "finished"
    assert scene.journalled() == others(7, 40)
    written = zarr.open_array(scene.output, mode="r")[...]
    assert np.isnan(written[:BLOCK, 7 * BLOCK :]).all()
    for cause in causes:
        cause.unlink()
    check_resumes()


def test_a_block_that_kills_its_worker_takes_no_other_down(scene: Scene, cluster: RunningCluster) -> None:
    for block in (3, 30):
        scene.make_trouble("die", block)
    outcome = scene.run(cluster, retries=0, on_bad_block="quarantine")
    assert [bad.number for bad in outcome.quarantined] == [3, 30]
    assert scene.journalled() == others(3, 30)
    assert not is_marked(scene.output)


def test_a_flaky_block_is_tried_again(scene: Scene, cluster: RunningCluster, check_whole: Callable[[], None]) -> None:
    scene.make_trouble("flaky", 12, "2")
    outcome = scene.run(cluster, retries=2)
    assert outcome.done == BLOCKS
    assert Counter(scene.seen())[12] == 3
    assert len(scene.events("retry")) == scene.status()["retried"] == 2
    assert is_marked(scene.output)
    check_whole()


def test_a_nan_of_the_input_fails_its_block_where_that_is_asked_for_and_stays_elsewhere(
    scene: Scene, cluster: RunningCluster
) -> None:
    put_nan(scene, 19)
    where = r"rows 64–95, columns 96–127; the first is at row 69, column 103"
    with pytest.raises(BlockInputFailed, match=rf"block 19 .*the input holds NaN or infinity in {where}") as failed:
        scene.run(cluster, on_nan="fail")
    failed.match("1 of 64 blocks failed for its input")
    failed.match("Run again with run.on_nan: propagate to do only these. Once the image is repaired.*--same-input")
    assert scene.events("retry") == []
    assert scene.journalled() == others(19)
    assert scene.run(cluster).resumed == BLOCKS - 1
    expected = image()
    expected[2 * BLOCK + 5, 3 * BLOCK + 7] = np.nan
    np.testing.assert_array_equal(zarr.open_array(scene.output, mode="r")[...], truth(expected))


def test_a_bad_side_input_is_told_once_and_is_what_has_to_be_mended(scene: Scene, cluster: RunningCluster) -> None:
    values = np.ones(image().shape, "float32")
    values[:, :BLOCK] = np.nan
    mask = write_zarr(scene.folder / "mask.zarr", values)
    parts = {"input": {"sides": {"mask": str(mask)}}}
    with pytest.raises(BlockInputFailed, match="8 of 64 blocks failed for their input") as failed:
        scene.run(cluster, parts=parts)
    assert str(failed.value).count("the side input mask holds NaN or infinity in rows ") == 1
    failed.match(r"\nand 7 more for input\.sides\.mask\n.*Once input\.sides\.mask is repaired, run with --same-input")
    zarr.open_array(mask, mode="r+")[...] = 1
    assert scene.run(cluster, parts=parts, same_input=True).resumed == BLOCKS - 8


def test_a_nan_does_not_become_an_integer(
    scene: Scene, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nan(scene, 19)
    parts = {"output": {"dtype": "uint16"}}
    with pytest.raises(ConfigError, match=r"output\.dtype is uint16, which cannot hold the NaN"):
        scene.run(cluster, parts=parts)
    monkeypatch.setattr(job_image, "_squares", lambda *_: [Region((0, 0), (BLOCK, BLOCK))])
    with pytest.raises(BlockFailed, match=r"block 19 .*a pixel is NaN, and the output is uint16"):
        scene.run(cluster, parts=parts)
    assert scene.journalled() == others(19)


def test_a_damaged_input_names_the_block_and_the_file(scene: Scene, cluster: RunningCluster, tmp_path: Path) -> None:
    chunk = scene.source / "c" / "1" / "1"
    content = chunk.read_bytes()
    chunk.write_bytes(content[: len(content) // 2])
    with pytest.raises(BlockInputFailed, match=r"4 of 64 blocks failed after 0 retries") as failed:
        scene.run(cluster, retries=0)
    failed.match("Once the image is repaired, run with --same-input: only these are redone")
    failed.match(r"DamagedData: .*noisy\.zarr.*restore this file from its origin")
    chunk.write_bytes(content)
    with pytest.raises(ResumeRefused, match=r"input\.[\s\S]*same images, repaired or copied, run with --same-input"):
        scene.run(cluster)
    done = scene.run(cluster, same_input=True)
    assert (done.done, done.resumed) == (BLOCKS, BLOCKS - 4)
    assert scene.run(cluster).resumed == BLOCKS, "it is remembered"
    assert scene.run(cluster, fresh=True).done == BLOCKS


def test_input_that_the_system_does_not_give_is_tried_again_and_named(scene: Scene, cluster: RunningCluster) -> None:
    chunk = scene.source / "c" / "1" / "1"
    chunk.unlink()
    os.mknod(chunk, stat.S_IFSOCK)  # not opened as a file: the system refuses, as for a broken disk
    with pytest.raises(BlockInputFailed, match=r"InputUnreadable: .*noisy\.zarr.*No such device"):
        scene.run(cluster, retries=1)
    assert {event["block"] for event in scene.events("retry")} == set(range(BLOCKS)) - scene.journalled()
