"""Messages on platforms where halotile cannot run, and on those where it is not tested."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halotile.graphs import doctor
from tests.cases import thorough

AS_ON_WINDOWS = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; "


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", AS_ON_WINDOWS + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "code", ["import halotile.cli.main", "import runpy; runpy.run_module('halotile', run_name='__main__')"]
)
def test_the_command_names_wsl_on_windows(code: str) -> None:
    done = _run(code)
    assert done.returncode == 2
    assert done.stderr.startswith("error: halotile does not run on Windows")
    assert "wsl --install" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_is_told_the_same() -> None:
    done = _run("import halotile; halotile.denoise")
    assert done.stderr.splitlines()[-1].startswith("ImportError: halotile does not run on Windows")


JOB = """# größe in µm → Ж
version: 1
job: denoise
input: {path: größe.npy}
output: {path: Ж→.zarr, shard: 128, chunk: 32}
denoiser: {name: gaussian, sigma: 1.0}
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("info größe.npy", "größe.npy"),
        ("plan jöb→.yaml", "Ж→.zarr"),
        ("status fehlt→.zarr", "fehlt→.zarr: "),
        ("resume fehlt→.zarr", "fehlt→.zarr: "),
        ("verify fehlt→.zarr", "fehlt→.zarr: "),
        ("levels fehlt→.zarr", "fehlt→.zarr"),
        ("preview größe.npy bild→.png", "bild→.png"),
        ("export größe.npy bild→.tif", "bild→.tif"),
        ("convert fehlt→.h5 scan→.zarr", "fehlt→.h5"),
        thorough("run jöb→.yaml", "Ж→.zarr"),
        thorough("try jöb→.yaml blätter→.png --set denoiser.sigma=1,2", "blätter→.png"),
    ],
)
def test_words_and_names_are_utf8_in_any_locale(words: str, said: str, tmp_path: Path) -> None:
    np.save(tmp_path / "größe.npy", np.random.default_rng(0).random((64, 64), np.float32))
    (tmp_path / "jöb→.yaml").write_text(JOB, "utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "halotile", *words.split()],
        cwd=tmp_path, env=os.environ | plain, capture_output=True, timeout=120
    )  # fmt: skip
    text = (done.stdout + done.stderr).decode()
    assert said in text
    assert "Unicode" not in text
    assert done.returncode in ((0,) if "fehlt" not in words else (2, 4)), text


@pytest.mark.parametrize(
    ("system", "machine", "verdict"),
    [("Linux", "x86_64", "ok"), ("Linux", "aarch64", "note"), ("Darwin", "arm64", "note")],
)
def test_an_untested_platform_is_told(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, verdict: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert doctor._platform()[0] == verdict
    assert f"{system} {machine}" in doctor._platform()[1]
