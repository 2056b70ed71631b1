"""The commands of examples/reconstruct/README.md, typed in order, on a smaller image."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.faults import REPOSITORY, members, until
from tests.support import read_zarr

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

PAGE = REPOSITORY / "examples/reconstruct/README.md"
BLOCKS = 4
SMALL = {
    "blur.py": ["--size", "200"],
    "train_dncnn.py": ["--steps", "2"],
    "pnp.yaml": ["--set", "solver.iterations=2"],
    "job.yaml": ["--set", "solver.iterations=12"],
}
"""Options added to the commands, so that the page takes seconds."""
CUT = [
    "--set",
    "output.shard=100",
    "--set",
    "output.chunk=50",
    "--set",
    "tile.block=100",
    "--set",
    "solver.step=3.2e-5",
]


def commands() -> list[str]:
    """Return the commands of the page."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@dataclass(frozen=True)
class Reader:
    """A reader who types the commands in a folder."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "deblur/sharp.zarr"

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command of the page, as the leader of a process group of its own."""
        program, *words = shlex.split(command)
        start = [sys.executable] if program == "python" else [sys.executable, "-m", "halotile"]
        for name, more in SMALL.items():
            words += more if any(word.endswith(name) for word in words) and "simulate" not in words else []
        words += CUT if "run" in words else []
        words += ["--workers", "1"] if {"run", "simulate"} & {*words} else []
        words = ["0:90,0:120" if word == "300:556,500:756" else word for word in words]
        return subprocess.Popen(
            [*start, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def type(self, command: str) -> str:
        """Run a command that has to succeed; return its output."""
        running = self.start(command)
        output, _ = running.communicate(timeout=200)
        assert running.returncode == 0, f"{command}\n{output}"
        return output

    def is_within_an_iteration(self) -> bool:
        """Return True while some blocks of an iteration after the second are done, and not all."""
        state = Path(f"{self.output}.run") / "state/iterate"
        with suppress(FileNotFoundError):  # an iteration that ends meanwhile takes its files with it
            sums = [
                path for path in state.glob("sums.[0-9]*") if path.suffix[1:].isdigit() and int(path.suffix[1:]) > 2
            ]
            return any(1 <= len(path.read_bytes().splitlines()) < BLOCKS for path in sums)
        return False

    def kill_in_the_middle(self, command: str) -> None:
        """Start a command, and kill it between two blocks of one iteration."""
        running = self.start(command)
        try:
            until(lambda: running.poll() is not None or self.is_within_an_iteration(), seconds=150)
        finally:
            running.send_signal(signal.SIGKILL)
            output, _ = running.communicate()
        assert running.returncode == -signal.SIGKILL, output
        until(lambda: not members(running.pid))

    def files(self) -> dict[str, bytes]:
        """Return every file of the output."""
        found = sorted(path for path in self.output.rglob("*") if path.is_file())
        return {str(path.relative_to(self.output)): path.read_bytes() for path in found}

    def image(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return read_zarr(self.folder / "deblur" / f"{name}.zarr")

    def psnr(self, name: str) -> float:
        """Return the PSNR of an image against the true one, in dB."""
        return float(-10 * np.log10(np.mean((self.image(name) - self.image("truth")) ** 2)))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    return Reader(folder)


def test_an_image_is_deblurred_killed_and_deblurred_again_to_the_same_bits(reader: Reader) -> None:
    lines = iter(commands())
    first = [next(lines) for _ in range(6)]
    assert [line.split()[1] for line in first[1:]] == ["simulate", "plan", "run", "status", "preview"]
    for command in first:
        reader.type(command)
    undisturbed = reader.files()
    assert (reader.folder / "deblur/before-after.png").stat().st_size > 5_000
    assert reader.psnr("sharp") > max(reader.psnr(f"y{number}") for number in range(3)) + 4
    reader.kill_in_the_middle(next(lines))
    assert reader.type(next(lines)).startswith("interrupted\n")
    output = reader.type(next(lines))
    assert "iteration 1 of 12:" not in output, "it started over"
    assert reader.files() == undisturbed
    rows = Path(f"{reader.output}.run/iterations.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == list(range(1, 13))
    assert reader.type(next(lines))


def test_the_other_jobs_of_the_page_run(reader: Reader) -> None:
    others = commands()[10:]
    assert [line.split()[1] for line in others] == ["examples/train_dncnn.py", "run", "simulate"]
    before = reader.image("y0"), reader.image("y1")
    for command in others:
        reader.type(command)
    assert reader.image("sharp-pnp").shape == (200, 200)
    assert not np.array_equal(before[0], reader.image("y0"))
    assert np.array_equal(before[1], reader.image("y1"))
