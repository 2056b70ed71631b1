"""The commands of examples/reconstruct/README.md, typed in order, on a smaller image."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.faults import REPOSITORY
from tests.house.test_docs import run_command
from tests.support import Image, read_zarr

PAGE = REPOSITORY / "examples/reconstruct/README.md"
SMALL = {
    "blur.py": ["--size", "200"],
    "train_dncnn.py": ["--steps", "2"],
    "pnp.yaml": ["--set", "solver.iterations=2"],
    "job.yaml": ["--set", "solver.iterations=12"],
}
"""Options added to the commands, so that the page takes seconds."""
CUT = "--set output.shard=100 --set output.chunk=50 --set tile.block=100 --set solver.step=3.2e-5 --workers 1"


def small(command: str) -> list[str]:
    """A command of the page, for a small image."""
    words = shlex.split(command)
    for name, more in SMALL.items():
        words += more if any(word.endswith(name) for word in words) and "simulate" not in words else []
    words += CUT.split() if "run" in words else ["--workers", "1"] if "simulate" in words else []
    return ["0:90,0:120" if word == "300:556,500:756" else word for word in words]


@pytest.mark.cluster
@pytest.mark.thorough
def test_an_image_is_deblurred_twice_to_the_same_bits_and_the_other_jobs_of_the_page_run(tmp_path: Path) -> None:
    def image(name: str) -> Image:
        return read_zarr(tmp_path / "deblur" / f"{name}.zarr")

    def psnr(name: str) -> float:
        return float(-10 * np.log10(np.mean((image(name) - image("truth")) ** 2)))

    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    first, again, others = commands[:6], commands[6:10], commands[10:]
    assert [line.split()[1] for line in first[1:]] == ["simulate", "plan", "run", "status", "preview"]
    assert [line.split()[1] for line in others] == ["examples/train_dncnn.py", "run", "simulate"]
    for command in first:
        run_command(small(command), tmp_path, dict(os.environ))
    undisturbed = image("sharp")
    assert (tmp_path / "deblur/before-after.png").stat().st_size > 5_000
    assert psnr("sharp") > max(psnr(f"y{number}") for number in range(3)) + 4
    before = image("y0"), image("y1")
    for command in (*again, *others):
        run_command(small(command), tmp_path, dict(os.environ))
    assert np.array_equal(image("sharp"), undisturbed)
    assert image("sharp-pnp").shape == (200, 200)
    assert not np.array_equal(before[0], image("y0"))
    assert np.array_equal(before[1], image("y1"))
