"""The main job as one call from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import uniform_filter

import halotile
from halotile.errors import ConfigError, HalotileError
from halotile.graphs.watching.progress import Progress
from tests.support import noisy_image, read_zarr, run_inline, write_zarr

pytestmark = pytest.mark.cluster


def test_a_function_of_the_callers_own_runs_on_every_tile(tmp_path: Path) -> None:
    pixels = noisy_image((700, 650))
    source = write_zarr(tmp_path / "in.zarr", pixels)
    seen: list[Progress] = []
    outcome = halotile.denoise(
        source, tmp_path / "out.zarr", uniform_filter, depth=4, size=9, boundary="reflect", observer=seen.append
    )
    assert outcome.done == outcome.total == 1
    assert outcome.peak_memory_bytes > 2**20
    assert seen[-1].done == 1
    want = uniform_filter(np.pad(pixels, 4, mode="symmetric"), 9)[4:-4, 4:-4]
    np.testing.assert_array_equal(read_zarr(tmp_path / "out.zarr"), want)


def test_a_function_without_depth_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs depth"):
        halotile.denoise("in.zarr", tmp_path / "out.zarr", uniform_filter, size=9)


def test_a_function_is_told_by_its_code_in_every_process() -> None:
    code = (
        "from functools import partial\n"
        "from halotile.tasks.denoisers.function import GivenFunction\n"
        "def outer(p, k=2, words=frozenset(('a', 'b', 'c'))):\n"
        "    return [(lambda v: v * k)(p) for _ in p if k in {1, 2, 'x', 'y'}]\n"
        "print(GivenFunction(call=partial(outer, k=3), depth=1).check())\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert "'__main__:outer'" in said.pop()


@pytest.mark.parametrize(("precision", "most"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_precision_is_close_and_asked_for(precision: str, most: float, tmp_path: Path) -> None:
    from tests.support import dncnn_weights, job_of

    source = write_zarr(tmp_path / "in.zarr", noisy_image((300, 260)))
    options = {"weights": str(dncnn_weights(tmp_path / "w.safetensors")), "depth": 5, "width": 8}
    exact = run_inline(job_of(source, tmp_path / "a.zarr", "dncnn", options))
    rough = run_inline(job_of(source, tmp_path / "b.zarr", "dncnn", options, run={"precision": precision}))
    assert not np.array_equal(rough, exact)
    assert np.abs(rough - exact).max() < most * np.abs(exact).max()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"precision": "half"}, r"run\.precision: .half. is not"),
        ({"device": "gpu"}, r"run\.device: .gpu. is not auto, cpu or cuda"),
        ({"device": "cuda", "cluster": "local"}, "no GPU here"),
    ],
)
def test_what_computes_and_how_exactly_can_be_said(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], said: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)))
    with pytest.raises(ConfigError, match=said):
        halotile.denoise(source, tmp_path / "out.zarr", "gaussian", sigma=1, **words)


def test_every_error_is_the_fitting_builtin_and_survives_pickling() -> None:
    import pickle

    from halotile import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HalotileError)]
    assert len(kinds) >= 14
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("what, why, what instead")))
        assert type(back) is kind
        assert str(back) == "what, why, what instead"


def test_a_relative_path_is_kept_whole_so_that_a_run_goes_on_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zarr(tmp_path / "in.zarr", noisy_image((64, 64)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halotile.graphs.runs.driver.run", lambda plan, **_: plan.documents.asked)
    job: Any = halotile.denoise("in.zarr", "out.zarr", "gaussian", sigma=1.0, workers=1)
    assert job["input"]["path"] == str(tmp_path / "in.zarr")
    assert job["output"]["path"] == str(tmp_path / "out.zarr")
