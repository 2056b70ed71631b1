"""Messages on platforms where halotile cannot run, and on those where it is not tested."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from halotile.graphs.scripts import doctor

AS_ON_WINDOWS = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; "


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS + code], capture_output=True, text=True, timeout=60
    )


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


@pytest.mark.parametrize(
    ("system", "machine", "verdict"),
    [("Linux", "x86_64", "ok"), ("Linux", "aarch64", "note"), ("Darwin", "arm64", "note")],
)
def test_the_doctor_tells_where_nobody_has_tested(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, verdict: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert doctor._platform()[0] == verdict
    assert f"{system} {machine}" in doctor._platform()[1]
