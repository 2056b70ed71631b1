"""One job for many images: each as by itself, on one cluster; those that fail are named, and the others are finished."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import tifffile
from PIL import Image
from typer.testing import CliRunner

from halotile.cli import exits
from halotile.cli.main import app
from halotile.errors import ConfigError, DiskRefused, InputError, MemoryRefused, Stopped
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import Order, RunningCluster
from halotile.graphs.kinds.base import Inspection
from halotile.graphs.kinds.sections import jobs_of
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import ManyPlans, plan_many, run_many
from halotile.graphs.runs.session import SharedCluster
from halotile.graphs.watching.progress import Progress
from halotile.storage.run_directory.directory import RunDirectory
from tests.support import load_denoising, noisy_image, read_zarr, run_inline

Patch = pytest.MonkeyPatch

CONFIG = """\
version: 1
job: denoise
input:    {path: "scans/*.npy", sides: {mask: "masks/{stem}.npy"}}
output:   {path: "clean/{stem}.zarr", shard: 32, chunk: 16}
denoiser: {name: tv, sigma: auto, strength: 1}
tile:     {block: 32}
run:      {workers: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two images with masks, and a file that is none."""
    for folder in ("scans", "masks", "clean"):
        (tmp_path / folder).mkdir()
    for seed, name in enumerate(("a", "b.c")):
        np.save(tmp_path / f"scans/{name}.npy", noisy_image((70, 50 + seed), seed=seed))
        np.save(tmp_path / f"masks/{name}.npy", np.ones((70, 50 + seed), bool))
    (tmp_path / "scans/none.npy").write_text("none")
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def starts(monkeypatch: Patch, cluster: RunningCluster) -> list[Order]:
    """The orders of local clusters, which are given the one that runs."""
    orders: list[Order] = []

    @contextmanager
    def start(order: Order) -> Iterator[RunningCluster]:
        orders.append(order)
        yield cluster

    monkeypatch.setattr(local, "start", start)
    return orders


def copy_as(config: Path, *names: str) -> None:
    """Copy the first image, with its mask."""
    for name in names:
        for folder in ("scans", "masks"):
            shutil.copyfile(config.parent / f"{folder}/a.npy", config.parent / f"{folder}/{name}.npy")


def command(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.cluster
def test_each_image_is_as_by_itself_and_a_bad_one_is_named(config: Path, starts: list[Order]) -> None:
    code, out, told = command("run", config)
    assert (code, len(starts)) == (exits.QUARANTINED, 1)
    assert "2 of 3" in out
    assert "none.npy: a file that begins with" in out
    assert told.splitlines()[1].startswith(f"failed: {config.parent}/scans/none.npy: a file")
    assert "image 2 of 2, b.c.npy: tv: 70 × 51 float32" in told
    for name in ("a", "b.c"):
        words = [f"input.path={config.parent}/scans/{name}.npy", f"output.path={name}-alone.zarr"]
        alone = run_inline(load_denoising(config, words))
        np.testing.assert_array_equal(read_zarr(config.parent / f"clean/{name}.zarr"), alone)
    copy_as(config, "d")
    (config.parent / "scans/none.npy").unlink()
    assert "2 finished" in command("status", config)[1]
    code, out, _ = command("run", config, "--json")
    images = json.loads(out)["images"]
    assert (code, [(one["done"], one["resumed"]) for one in images.values()]) == (exits.OK, [(6, 6), (6, 6), (6, 0)])
    assert "3 of 3 images finished" in command("status", config)[1]
    index = Path(command("report", config)[1].strip())
    links = re.findall(
        r'<a href="([^"]+)"><img alt="" src="data:image/png;base64,[^"]+"><br>([^<]+)</a>', index.read_text()
    )
    assert [name for _, name in links] == ["a.npy", "b.c.npy", "d.npy"]
    assert all((index.parent / link).is_file() for link, _ in links)
    index.write_text("my own")
    assert command("report", config)[0] == exits.USAGE
    assert index.read_text() == "my own"


@pytest.mark.cluster
def test_a_signal_after_the_last_block_of_an_image_is_heeded(config: Path, starts: list[Order]) -> None:
    (config.parent / "scans/none.npy").unlink()
    many = plan_many(jobs_of(load_denoising(config)), make_plan)

    def ask(progress: Progress) -> None:
        if progress.done == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"stopped on SIGTERM before .*b\.c\.npy"):
        run_many(many, observer=ask)
    assert [path.name for path in (config.parent / "clean").glob("*.zarr")] == ["a.zarr"]


def test_plans_of_many_images_hold_none_of_their_files_open(config: Path) -> None:
    for number in range(40):
        tifffile.imwrite(config.parent / f"scans/{number}.tif", noisy_image((9, 8), seed=number))
    changes = [f"input.path={config.parent}/scans/*.tif", "input.sides={}", "denoiser.sigma=0.1"]
    many = plan_many(jobs_of(load_denoising(config, changes)), make_plan)
    files = [Path(os.path.realpath(fd)) for fd in Path("/proc/self/fd").iterdir()]
    assert len([file for file in files if file.is_relative_to(config.parent)]) < 20
    assert (len(many.plans), many.failed) == (40, {})


def test_the_plan_lists_images_and_failures(config: Path) -> None:
    code, out, told = command("plan", config)
    assert code == exits.QUARANTINED
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["a.npy", "b.c.npy"]
    assert "12" in next(line for line in out.splitlines() if "blocks " in line)
    assert all(words in out for words in ("noise level", "in 1 other image as well"))
    assert "failed: " in told
    code, _, told = command("run", config, "--set", "input.axes=zyx")  # all fail, by the first one's fault
    assert (code, "axes" in told) == (exits.BAD_DATA, True)


def test_paths_are_those_of_images_and_not_of_outputs(config: Path) -> None:
    """Outputs may lie beside the images, or behind a link; brackets in the name of a folder are no pattern."""
    job = load_denoising(config, ["input.path=scans/a.npy"])
    assert (job.output.path, job.input.sides["mask"]) == tuple(
        f"{config.parent}/{p}" for p in ("clean/a.zarr", "masks/a.npy")
    )
    (place := config.parent / "exp [2024]").mkdir()
    for name in ("scans", "masks", "clean", "job.yaml"):
        (config.parent / name).rename(place / name)
    with pytest.raises(InputError, match=r"scans/x\.npy does not exist"):
        load_denoising(place / "job.yaml", ["input.path=scans/x.npy"])
    one = load_denoising(place / "job.yaml", ["input.path=scans/a.npy"])
    assert (one.input.path, one.output.path) == (f"{place}/scans/a.npy", f"{place}/clean/a.zarr")
    (place / "linked").symlink_to(place / "scans")
    for path in ("scans/a.zarr", "scans/a.zarr.run", "scans/b.c.zarr", "scans/{stem}.zarr.run"):
        (place / path).mkdir()
    for folder in ("scans", "linked"):
        job = load_denoising(place / "job.yaml", [f"input.path={folder}/*", "output.path=scans/{stem}.zarr"])
        assert [Path(path).name for path in jobs_of(job)] == ["a.npy", "b.c.npy", "none.npy"]
    assert load_denoising(place / "job.yaml", ["output.path={stem}.zarr"]).output.path.endswith("/{stem}.zarr")


def test_wrong_patterns_are_refused(config: Path) -> None:
    rows: list[tuple[str, Any, type[Exception], str]] = [
        ("output.path=clean/all.zarr", None, ConfigError, r"write \{stem\} for the name of .*clean/\{stem\}\.zarr"),
        ("input.path=scans/*.tiff", None, InputError, r"scans/\*\.tiff does not exist"),
        ("input.path=scans/*", jobs_of, ConfigError, r"a\.npy and .*a\.tif would both be written to .*clean/a\.zarr"),
        ("input.axes=yx", make_plan, ConfigError, r"input\.path is a pattern, which `recon-cli run`.*glob\.glob"),
    ]
    for change, use, error, words in rows:
        (config.parent / "scans/a.tif").write_text("")
        with pytest.raises(error, match=words):
            (use or (lambda job: job))(load_denoising(config, [change]))


def test_disk_is_reckoned_for_all_together(config: Path, monkeypatch: Patch) -> None:
    (config.parent / "scans/none.npy").unlink()
    many = plan_many(jobs_of(load_denoising(config)), make_plan)
    one = max(plan.output_bytes for plan in many.plans.values())
    usage = shutil.disk_usage(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=one))
    with pytest.raises(DiskRefused, match="the outputs of 2 images take up to"):
        many.check_disk()


def test_a_shared_cluster_is_started_once_and_again_after_its_loss() -> None:
    start: Any = Mock(side_effect=lambda _: nullcontext(f"cluster {start.call_count}"))
    with SharedCluster(3) as shared:
        lent: list[Any] = [shared.lend(start), shared.lend(start)]
        shared.close()
        lent.append(shared.lend(start))
    assert lent == ["cluster 1", "cluster 1", "cluster 2"]
    assert start.call_args_list == [call(3), call(3)]


@pytest.mark.cluster
def test_images_denoised_too_much_are_named(config: Path, starts: list[Order], monkeypatch: Patch) -> None:
    waves = np.sin(np.arange(300) / 4 + np.arange(300)[:, None] / 9)
    for name in ("a", "b.c"):
        np.save(config.parent / f"scans/{name}.npy", (waves + noisy_image((300, 300))).astype("float32"))
    (config.parent / "scans/neither.npy").write_text("neither")
    for module in ("running", "status"):
        monkeypatch.setattr(f"halotile.cli.{module}.MOST_ROWS", 1)
    words = ["--set", "denoiser={name: gaussian, sigma: 6.0}", "--set", "input.sides={}"]
    code, out, told = command("run", config, *words)
    warnings = [line for line in told.splitlines() if line.startswith("warning: ")]
    text = "the residual, which is what was removed, holds structure of the image"
    assert [line.split(": ")[1:3] for line in warnings] == [[name, text] for name in ("a.npy", "b.c.npy")]
    assert (code, out.count("   1 of 2 images; --json lists all\n")) == (exits.QUARANTINED, 2)
    assert sum(" of the noise level" in line for line in out.splitlines() if ".npy: " in line) == 1
    assert f"look at it   recon-cli preview {config.parent}/clean/a.zarr a.png" in out
    assert "above, for 2 images: a.npy and 1 more\n" in out
    code, out, told = command("run", config, *words, "--set", "output.overwrite=true", "--quiet", "--json")
    assert (code, len(json.loads(out)["images"])) == (exits.QUARANTINED, 2)
    told_again = [line for line in told.splitlines() if line.startswith("warning: ")]
    assert told_again == [warnings[0], "warning: 1 more image with such results"]


def test_status_says_which_images_failed_or_cannot_be_read_and_names_twenty(config: Path) -> None:
    copy_as(config, *(f"more{number:02}" for number in range(22)))
    jobs = jobs_of(load_denoising(config))
    plans = {path: make_plan(job) for path, job in jobs.items() if path.endswith("/a.npy")}
    failed = {path: MemoryRefused(f"{path}: too large.\nWrite more.") for path in jobs if "/a.npy" not in path}
    ended = make_dataclass("Ended", ["inspection"])(Inspection())
    directory = RunDirectory(config.parent / "clean/{stem}.zarr.run")
    directory.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halotile.graphs.runs.driver.run", lambda *_, **__: ended)
        run_many(ManyPlans(plans, failed), directory=directory)
    status = directory.read_status() or {}
    assert status["reason"].startswith("24 images: ")
    assert status["reason"].endswith("more18.npy")
    assert list(status["failed_images"]) == list(failed)[:20]
    code, out, _ = command("status", config)
    assert (code, "4 not begun, 20 failed, 1 cannot be read" in out) == (exits.OK, True)
    assert " more03.npy: failed: too large.\n" in out
    assert " 20 of 25 images; --json lists all\n" in out
    as_json = json.loads(command("status", config, "--json")[1])["images"]
    assert as_json[next(path for path in failed if "more03" in path)] == {"state": "failed", "reason": "too large."}


def test_status_opens_images_as_the_job_does_and_says_which_pixels_are_damaged(config: Path) -> None:
    path = config.parent / "scans/p.png"
    Image.fromarray(noisy_image((60, 50), "uint8")).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    config.write_text(CONFIG.replace("scans/*.npy", "scans/*"))
    code, out, _ = command("status", config)
    assert (code, "2 not begun, 2 cannot be read" in out) == (exits.OK, True)
    assert "p.png: cannot be read: the pixels from" in out
    assert "none.npy: cannot be read: a file that begins with" in out
    h5py = pytest.importorskip("h5py")
    for name in ("a", "b"):
        with h5py.File(config.parent / f"scans/{name}.h5", "w") as file:
            file["raw"] = file["flat"] = noisy_image((70, 50))
    config.write_text(CONFIG.replace('"scans/*.npy"', '"scans/*.h5", dataset: raw'))
    assert "2 not begun" in command("status", config)[1]


@pytest.mark.cluster
def test_the_folder_of_the_outputs_is_made_and_no_other(config: Path, starts: list[Order]) -> None:
    (config.parent / "clean").rmdir()
    _, out, _ = command("plan", config)
    assert f"there is no folder {config.parent}/clean yet: the run makes it" in out
    _, _, told = command("run", config, "--set", "input.path=scans/a.npy")  # no folder is made for a single image
    assert "Make it first" in told
    assert command("try", config)[0] == exits.OK
    assert not (config.parent / "clean").exists()
    code, _, told = command("run", config, "--set", "output.path=new/clean/{stem}.zarr")
    assert (code, (config.parent / "new").exists()) == (exits.USAGE, False)
    assert f"there is no folder {config.parent}/new/clean. Make it first" in told
    command("run", config)
    assert sorted(path.name for path in (config.parent / "clean").glob("*.zarr")) == ["a.zarr", "b.c.zarr"]


def test_an_image_with_other_channels_is_named_in_the_plan(tmp_path: Path) -> None:
    for name, count in {"a": 2, "b": 3, "c": 2}.items():
        channels = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP", "FISH"][:count]}}
        tifffile.imwrite(tmp_path / f"{name}.tif", noisy_image((count, 40, 50)), ome=True, metadata=channels)
    text = 'version: 1\njob: denoise\ninput: {path: "*.tif"}\noutput: {path: "{stem}.zarr"}\ndenoiser: {name: none}\n'
    (tmp_path / "job.yaml").write_text(text)
    _, shown, _ = command("plan", tmp_path / "job.yaml")
    assert "b.tif has 3 channels, and most images have 2" in " ".join(shown.split())
    assert "a.tif has" not in shown


@pytest.mark.cluster
def test_of_very_many_images_some_are_planned(config: Path, starts: list[Order], monkeypatch: Patch) -> None:
    copy_as(config, *(f"d{number}" for number in range(5)))
    monkeypatch.setattr("halotile.graphs.runs.driver.AHEAD", 3)
    jobs = jobs_of(load_denoising(config))
    plan = Mock(side_effect=make_plan)

    def planned() -> list[str]:
        return [Path(each.args[0].input.path).stem for each in plan.call_args_list]

    many = plan_many(jobs, plan)
    assert planned() == ["a", "d0", "d3"]
    (config.parent / "scans/d4.npy").write_text("no image")
    seen: list[Progress] = []
    ended = run_many(many, observer=seen.append)
    assert planned() == ["a", "d0", "d3", "b.c", "d1", "d2", "d4", "none"]
    assert [Path(path).stem for path in ended.failed] == ["d4", "none"]
    assert [outcome.done for outcome in ended.outcomes.values()] == [6] * 6
    assert (seen[-1].done, seen[0].total) == (36, 48)
    assert len(starts) == 1
    out = command("plan", config)[1]
    assert "this is the plan of 3 images of the 8, spread evenly" in out
    assert "about 48" in out
