"""Jobs for the tests of batch systems: an image, a slow denoiser that records its blocks, and the command that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tests.faults import REPOSITORY
from tests.support import read_zarr, write_zarr

EDGE = 128
ACROSS = 6
BLOCKS = ACROSS**2

NOTED = '''
import os, time
from pathlib import Path

import numpy as np
from distributed import Worker


def noted(pixels, folder):
    """Double the pixels, after a while; each call writes a line."""
    folder = Path(folder)
    if float(pixels.max()) < 1 or not Worker._instances:  # what a check tries it on, or a trial
        return pixels * 2
    with open(folder / "log", "a") as log:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "-")
        node = os.environ.get("SLURMD_NODENAME", "-")
        log.write(f"{int(pixels[0, 0])} {os.getpid()} {node} {visible}\\n")
    time.sleep(float((folder / "pace").read_text()))
    return pixels * 2
'''


_PBS = {
    "qsub": """
        exec 9> {folder}/lock; flock 9
        number=$(( $(ls {folder} | grep -c 'pid$') + 1 ))
        cp "$1" {folder}/$number.sh
        pwd > {folder}/$number.cwd
        (sleep 1; cd /; exec 9>&-; PBS_JOBID=$number.fake exec setsid --fork bash -c 'echo $$ > {folder}/'$number'.pid; exec bash {folder}/'$number'.sh') > {folder}/$number.out 2>&1 &
        touch {folder}/$number.pid
        echo $number.fake
    """,
    "qstat": """
        for each in "$@"; do
            number=${{each%.fake}}; pid=$(cat {folder}/$number.pid)
            if [ -z "$pid" ] || kill -0 $pid 2> /dev/null; then echo "$number.fake  halotile"; else echo "qstat: Unknown Job Id" >&2; code=153; fi
        done
        exit $code
    """,
    "qdel": """
        pid={folder}/${{1%.fake}}.pid
        until [ -s $pid ]; do sleep 0.1; done
        kill -KILL -$(cat $pid)
    """,
}
"""Commands of a PBS that starts scripts on this machine."""


def pretended_pbs(folder: Path) -> dict[str, str]:
    """Make a PBS of three commands in a folder, and return the environment that has them."""
    (folder / "bin").mkdir(parents=True)
    for name, lines in _PBS.items():
        (folder / "bin" / name).write_text("#!/bin/bash\n" + lines.format(folder=folder))
        (folder / "bin" / name).chmod(0o755)
    return dict(os.environ) | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


@dataclass(frozen=True)
class HpcJob:
    """A job in a folder of its own.

    Parameters
    ----------
    folder : Path
        Where everything lies.
    environment : mapping
        What the command starts with.
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @classmethod
    def create(cls, folder: Path, environment: Mapping[str, str] | None = None, **cluster: Any) -> HpcJob:
        """A job that has not begun; every block of its image has another value."""
        job = cls(folder, environment or dict(os.environ))
        folder.mkdir(exist_ok=True)
        numbers = np.arange(BLOCKS, dtype="float32").reshape(ACROSS, ACROSS) + 1
        write_zarr(folder / "in.zarr", np.kron(numbers, np.ones((EDGE, EDGE), "float32")), axes="yx")
        (folder / "noting.py").write_text(NOTED)
        (folder / "log").touch()
        job.set_pace(0)
        options: dict[str, Any] = {"depth": 0, "options": {"folder": str(folder)}}
        parts: dict[str, Any] = {
            "input": {"path": "in.zarr"},
            "output": {"path": "out.zarr", "shard": EDGE, "chunk": EDGE},
            "denoiser": {"name": "function", "import": "noting:noted", **options},
            "tile": {"block": EDGE, "size": EDGE},
            "run": {"workers": 2, "memory_per_worker": "1GiB"},
        }
        job.config.write_text(json.dumps({"version": 1, "job": "denoise", **parts, "cluster": cluster}))
        return job

    @property
    def config(self) -> Path:
        """The job file."""
        return self.folder / "job.yaml"

    @property
    def run_directory(self) -> Path:
        """The run directory."""
        return self.folder / "out.zarr.run"

    def set_pace(self, seconds: float) -> None:
        """Seconds that a block takes."""
        (self.folder / "pace").write_text(str(seconds))

    def log(self) -> list[list[str]]:
        """The number, process, node and visible GPUs of each block that was begun."""
        return [line.split() for line in (self.folder / "log").read_text().splitlines()]

    def command(self, *words: str) -> list[str]:
        """The command ``recon-cli`` with these arguments."""
        return [str(Path(sys.executable).with_name("recon-cli")), *words]

    def start(self, *words: str, errors: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        """Begin a command of ``recon-cli``."""
        return self.start_of(self.command(*words), errors)

    def start_of(self, command: Sequence[str], errors: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        """Begin any command."""
        environment, pipe = dict(self.environment) | {"PYTHONPATH": str(REPOSITORY)}, subprocess.PIPE
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": errors, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **streams)

    def call(self, *words: str, code: int = 0, timeout: float = 120) -> str:
        """Run a command and return its output; it has to end with this exit code."""
        return finish(self.start(*words), code=code, timeout=timeout)

    def json_of(self, *words: str) -> dict[str, Any]:
        """The JSON output of a command."""
        found: dict[str, Any] = json.loads(finish(self.start(*words, "--json", errors=subprocess.DEVNULL)))
        return found

    def status(self) -> dict[str, Any]:
        """Output of `recon-cli status`."""
        return self.json_of("status", "out.zarr.run")

    def record(self) -> dict[str, Any]:
        """The record of the submission."""
        found: dict[str, Any] = json.loads((self.run_directory / "batch.json").read_text())
        return found

    def wait_finished(self) -> None:
        """Wait for the end of a submitted run, at full pace from now on."""
        self.set_pace(0)
        wait_for((self.run_directory / "finished").exists)

    def check_whole(self) -> None:
        """Assert that the output is right, and no certificates are left."""
        pixels = zarr.open_array(self.folder / "in.zarr", mode="r")[...]
        np.testing.assert_array_equal(read_zarr(self.folder / "out.zarr"), pixels * 2)
        assert list(self.run_directory.glob("workers/tls-*")) == []


def finish(process: subprocess.Popen[str], *, code: int = 0, timeout: float = 120) -> str:
    """Wait for a process and return its output; it has to end with this exit code."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"it did not end within {timeout:g} s\n{output}") from None
    assert process.returncode == code, f"it ended with {process.returncode}\n{output}"
    return str(output)


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until a condition is true; a Slurm on a busy machine takes its time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)
    return found
