"""A script's job: one call from Python, checked as a file's job is, in the same words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from distributed import Client
from scipy.ndimage import uniform_filter

import halotile
from halotile.errors import ConfigError
from halotile.graphs.clusters import local
from halotile.graphs.clusters.base import ADDRESS
from halotile.graphs.jobs.denoise import call
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.base import kinds
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run, Tile
from halotile.graphs.rules.arguments import cluster_of_script
from halotile.graphs.rules.keys import build, faults_in, keys_of
from halotile.graphs.rules.values import COMMON, check_job, credentials_in
from halotile.graphs.runs import driver
from halotile.graphs.watching.progress import Progress
from tests.support import dncnn_weights, job_of, noisy_image, read_zarr, run_inline, write_zarr

Patch = pytest.MonkeyPatch


def job(section: str, part: Any) -> Denoising:
    parts: dict[str, Any] = {"input": Input(path="a.npy"), "output": Output(path="b.zarr")} | {section: part}
    return Denoising(denoiser=DenoiserChoice(name="tv"), **parts)


WRONG: list[tuple[str, Any, str]] = [
    ("run", Run(workers=True), "run.workers: true is not auto or a whole number"),
    ("run", Run(stall_seconds=0), "run.stall_seconds: 0 is too small; write more than 0"),
    ("run", Run(on_nan="maybe"), 'run.on_nan: "maybe" is not propagate or fail'),  # type: ignore[arg-type]
    ("tile", Tile(size=()), "tile.size: [] is too small"),
    ("tile", Tile(depth=2.5), "tile.depth: 2.5 is not auto, a whole number or"),  # type: ignore[arg-type]
    ("input", Input(path=Path("a")), "input.path: PosixPath('a') is not a path"),  # type: ignore[arg-type]
    ("input", Input(path="a", range=(math.nan, 1.0)), "input.range: [NaN, 1.0] is not finite; write two"),
    ("input", Input(path="a", range=(1, 2, 3)), "is not auto or a list of 2 numbers"),  # type: ignore[arg-type]
    ("input", Input(path="a", sides={"mask": 1}), "input.sides.mask: 1 is not a path; put it in quotes if"),  # type: ignore[dict-item]
    ("output", Output(path="https://b/c"), "can be read at most; write a place in a store, such as s3://bucket/cl"),
    ("output", Output(path="s3://b/"), "names no output in a bucket; write one such as s3://b/clean.zarr"),
    ("output", Output(path="s3://b/c+d.zarr"), "has + in it"),
    ("output", Output(path="s3://b/../c"), "has .. in it"),
    ("output", Output(path=f"s3://b/{'c' * 230}"), "is of 237 bytes, and its run directory is named after it"),
    ("output", Output(path="s3://b/c.tif"), "`recon-cli export s3://b/c.zarr c.tif` makes a TIFF of it"),
]


@pytest.mark.parametrize(("section", "part", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_value_that_cannot_be_is_refused(section: str, part: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_job(job(section, part))


SECRETS = ("s3://a:secret@b/c", "https://b/c?X-Amz-Signature=secret", "s3://a:1secret/2@b/c", "https:/a:secret@b/c")


@pytest.mark.parametrize("address", [*SECRETS, "zip::https://a:secret@b/c"])
def test_addresses_with_credentials_are_refused_and_not_repeated(address: str) -> None:
    parts = {"output.path": Output(path=address), "input.path": Input(path=address)}
    for key, part in {**parts, "input.sides.mask": Input(path="a", sides={"mask": address})}.items():
        with pytest.raises(ConfigError, match=f"{key}: holds a name or a password; leave out what is before") as caught:
            check_job(job(key.partition(".")[0], part))
        assert "secret" not in str(caught.value)


def test_addresses_without_credentials_and_values_that_can_be_pass() -> None:
    paths = ["https://h:8080/a@2.zarr", "s3://b/c@d:e.zarr", "abfss://container@account.dfs.core.windows.net/a", "?a@b"]
    assert list(credentials_in(Input(path="a", sides=dict(zip("abcd", paths, strict=True))))) == []
    assert list(credentials_in({"cluster": {"prologue": ["tcp://me:word@proxy"]}})) == []
    check_job(job("tile", Tile(size=(64, 32), depth=[3, 4], batch=2)))  # type: ignore[arg-type]
    check_job(job("input", Input(path="a", range=(0, 1), axes="zyx", sides={"mask": "m.npy"})))
    check_job(job("run", Run(memory_per_worker=2**32, stall_seconds=1)))


def test_every_check_is_of_a_key_that_there_is() -> None:
    assert [key for part, key in COMMON if key not in keys_of(part)] == []
    for kind in kinds().values():
        keys = keys_of(kind.job)
        parts = [(name, part) for name, key in keys.items() for part in (key.type, *get_args(key.type))]
        places = {(name, key) for name, part in parts if hasattr(part, "__dataclass_fields__") for key in keys_of(part)}
        assert kind.checks.keys() <= places | {("", key) for key in keys}


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"workers": 0}, "run.workers: 0 is too small; write at least 1"),
    ({"memory_per_worker": 4}, "run.memory_per_worker: 4 is 4 bytes"),
    ({"boundary": "mirror"}, 'tile.boundary: "mirror" is not auto, reflect'),
    ({"source": np.zeros((4, 4))}, "source is of type ndarray.*Give a path, such as .*halotile.map_overlap"),
    ({"sides": {"mask": np.zeros((4, 4))}}, r"sides\['mask'\] is of type ndarray"),
    ({"denoiser": None}, "denoiser is null: that is neither a name nor a function"),
    ({"output": "nowhere/deep/out.zarr"}, "mkdir -p"),
    ({"precision": "half"}, r"run\.precision: .half. is not"),
    ({"device": "gpu"}, r"run\.device: .gpu. is not auto, cpu or cuda"),
    ({"device": "cuda", "cluster": "local"}, "no GPU here"),
    ({"denoiser": uniform_filter, "size": 9}, "needs depth"),
    ({"denoiser": {"depth": 9}}, "Write a name"),
]


def test_a_wrong_call_starts_nothing_and_a_tilde_is_the_home(tmp_path: Path, monkeypatch: Patch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(driver, "run", lambda plan, **_: plans.append(plan))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("in.npy", "mask.npy"):
        np.save(tmp_path / name, np.zeros((40, 30), np.float32))
    request: dict[str, Any] = {"source": "~/in.npy", "output": "~/out.zarr"}
    tv: dict[str, Any] = {"denoiser": "tv", "strength": 0.1}
    for changes, words in CALLS:
        with pytest.raises(ConfigError, match=words):
            halotile.denoise(**request | ({} if "denoiser" in changes else tv) | changes)
    assert (plans, sorted(path.name for path in tmp_path.iterdir())) == ([], ["in.npy", "mask.npy"])
    halotile.denoise(**request, **tv, sides={"mask": Path("~/mask.npy")})
    halotile.denoise("in.npy", "out.zarr", **tv)  # a relative path is kept whole
    plan, relative = plans
    asked = relative.documents.asked
    assert plan.job.input.path == asked["input"]["path"] == str(tmp_path / "in.npy")
    assert asked["output"]["path"] == str(tmp_path / "out.zarr")
    assert (plan.job.input.sides, plan.output) == ({"mask": str(tmp_path / "mask.npy")}, tmp_path / "out.zarr")


@dataclass(frozen=True)
class PlugIn:
    """Options in annotations that no part of halotile has, as a plug-in may write them."""

    file: Path = Path("a")
    numbers: list[int] = field(default_factory=list)
    words: Sequence[str] = ()
    table: dict[str, float] = field(default_factory=dict)
    anything: Any = None
    call: Callable[[int], int] | None = None


def test_options_of_a_plug_in_may_have_other_annotations() -> None:
    keys = keys_of(PlugIn)
    right = {"file": "b.npy", "numbers": [1], "words": ["a"], "table": {"x": 1}, "anything": [None, {}]}
    assert faults_in(keys, right) == {}
    built, faults = build(PlugIn, keys, right, {})
    assert (faults, built.numbers, built.table) == ({}, (1,), {"x": 1.0})
    wrong = {"file": 3, "numbers": [1, "x"], "words": "a", "table": {"x": "y"}}
    assert faults_in(keys, wrong) == {
        ("file",): "3 is not a path",
        ("numbers", 1): '"x" is not a whole number',
        ("words",): '"a" is not a list of texts',
        ("table", "x"): '"y" is not a number',
    }


# --- the main job as one call ------------------------------------------------------------------


@pytest.mark.cluster
def test_a_function_of_the_callers_own_runs_on_every_tile(tmp_path: Path) -> None:
    pixels = noisy_image((150, 140))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    seen: list[Progress] = []
    options: dict[str, Any] = {"depth": 4, "size": 9, "boundary": "reflect", "observer": seen.append}
    outcome = halotile.denoise(source, tmp_path / "out.zarr", uniform_filter, **options)
    assert outcome.done == outcome.total == 1
    assert outcome.peak_memory_bytes > 2**20
    assert seen[-1].done == 1
    want = uniform_filter(np.pad(pixels, 4, mode="symmetric"), 9)[4:-4, 4:-4]
    np.testing.assert_array_equal(read_zarr(tmp_path / "out.zarr"), want)


@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_precision_is_close_and_asked_for(precision: str, most: float, tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "in.zarr", noisy_image((90, 80)))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    exact = run_inline(job_of(source, tmp_path / "a.zarr", "dncnn", options))
    rough = run_inline(job_of(source, tmp_path / "b.zarr", "dncnn", options, run={"precision": precision}))
    assert not np.array_equal(rough, exact)
    assert np.abs(rough - exact).max() < most * np.abs(exact).max()


def test_options_named_like_arguments_are_in_a_mapping(tmp_path: Path, monkeypatch: Patch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr(call, "run_call", lambda job, *_, **__: jobs.append(job))
    section = {"name": "dncnn", "weights": tmp_path / "w.safetensors", "depth": 9}
    halotile.denoise(tmp_path / "in.zarr", tmp_path / "out.zarr", section, depth=12)
    (job,) = jobs
    options = {"weights": str(tmp_path / "w.safetensors"), "depth": 9}
    assert (job.denoiser, job.tile.depth) == (DenoiserChoice(name="dncnn", options=options), 12)
    assert section["name"] == "dncnn"


@pytest.mark.cluster
def test_an_open_client_serves_and_a_second_cluster_is_told(tmp_path: Path, cluster: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(local, "start", None)  # no second cluster
    source = write_zarr(tmp_path / "in.zarr", noisy_image((60, 50)))
    outcome = halotile.denoise(source, tmp_path / "out.zarr", "median", size=3, cluster=cluster.client)
    assert outcome.done == outcome.total > 0
    assert cluster.client.status == "running"
    monkeypatch.delenv(ADDRESS, raising=False)
    with cluster.client.as_current():
        with pytest.warns(UserWarning, match=r"beside those of the Client that is open\. Write cluster=client"):
            assert cluster_of_script("auto").kind == "auto"
        assert cluster_of_script("local").kind == "local"  # asked for
        assert cluster_of_script(cluster.client).address == cluster.client.scheduler.address
        monkeypatch.setenv(ADDRESS, cluster.client.scheduler.address)
        assert cluster_of_script("auto").kind == "auto"  # it joins


def test_a_client_that_cannot_serve_is_refused() -> None:
    for status, address, words in (
        ("closed", "tls://127.0.0.1:7", r"cluster is a Client \(closed\)"),
        ("running", "inproc://127.0.0.1/7/1", "whose workers are threads of this process"),
        ("running", "tcp://10.1.2.3:7", "is not encrypted; write one that begins with tls://"),
    ):
        own = {"status": status, "scheduler": SimpleNamespace(address=address), "__del__": lambda _: None}
        client: Client = object.__new__(type("Fake", (Client,), own))
        with pytest.raises(ConfigError, match=words):
            cluster_of_script(client)
