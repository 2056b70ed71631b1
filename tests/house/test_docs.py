"""Every fenced block of the documentation runs as it is written.

A comment above a fence configures it: ``<!-- example: NAME needs FILE ...; cluster -->``, or for ``cluster`` the batch system of the example:
``slurm`` and ``sge`` are real ones, ``pbs`` is commands that stand in for it. Blocks of one NAME run in order in one folder, in which the
files they need are made first. YAML and Python blocks are saved under the name in their first line (``# job.yaml``); YAML is validated (unless a
later block simulates its data, or it is no job), Python is run. Of a console block the lines that begin with ``$`` are run. ``make`` and ``pip`` cannot run inside a test: their targets and extras are looked up instead.
"""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
import zarr

from tests.cli.engine import ask
from tests.hpc import pretended_pbs

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS, "examples/tiff/README.md", "examples/reconstruct/README.md")
LONGEST = {"README.md": 180}
ELSEWHERE = {"exec", "submit", "cancel", "logs", "view"}
"""Commands that run in a process of their own; all others run in this one where they need no batch system and no code of the user's: most of a short one is imports."""
SITE = {"queue: gpu ": "queue: debug ", "account: phys123": "account: root", "ib0": "lo"}
"""Names of a site in the pages, and those of the batch systems that tests start."""
CUT = "--set output.shard=100 --set output.chunk=50 --set tile.block=100 --set solver.step=3.2e-5 --workers 1"
SHORTER = {
    "deblur": {
        "blur.py deblur": "blur.py deblur --size 200",
        "run deblur/job.yaml": f"run deblur/job.yaml --set solver.iterations=12 {CUT}",
        "run deblur/pnp.yaml": f"run deblur/pnp.yaml --set solver.iterations=2 {CUT}",
        "--depth 5": "--steps 2 --depth 5",
        "300:556,500:756": "0:90,0:120",
    },
    "train": {"minutes: 10": "minutes: 0.04"},
    "samples": {"count: 16": "count: 4"},
    "ptychography": {"epochs: 30": "epochs: 6", "epochs: 15": "epochs: 3"},
}
"""What takes the time of an example, for a test."""
THOROUGH = {
    *("python-run", "tiff-example"),  # the job of first-run and tiff-walk
    *("on-a-cluster", "hpc-alloc", "hpc-ranks", "hpc-jobs", "torch-slurm"),  # Slurm, as in hpc
    "submit-sge",  # Grid Engine, as in submit-pbs
    *("hpc-exec", "torch-exec"),  # tests/cli/test_clusters.py and tests/graphs/test_launched_ranks.py do so
    *("distribute-parameters", "distribute-subsets"),  # contexts, as in distribute-quick-start
    *("torch-fft", "torch-fit", "torch-spatial", "variational-ranks"),  # ranks, as in torch-function
    *("many-images", "python-reconstruct", "deblur"),  # tests/graphs/test_many_images.py and test_reconstruct.py
    *("export", "bench"),  # tests/cli/test_export.py and test_comparing.py
    "gpu-shared",  # tests/graphs/test_tuning.py
}
"""Examples that repeat what others show. None of them is the first of a page of docs/."""
FENCE = re.compile(
    r"(?:<!-- example: (?P<name>[\w-]+)(?: needs (?P<needs>[^;]*?))?(?:; (?P<site>cluster|slurm|sge|pbs))? -->\n)?"
    r"```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Example:
    """The blocks of one name, in order."""

    needs: list[str] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    site: str = ""
    blocks: list[tuple[str, str]] = field(default_factory=list)

    def simulated(self) -> set[str]:
        """The jobs whose data a console block makes."""
        bodies = [body for kind, body in self.blocks if kind == "console"]
        return {name for body in bodies for name in re.findall(r"recon-cli simulate (\S+)", body)}


def fences() -> Iterator[tuple[str, re.Match[str]]]:
    for page in PAGES:
        for match in FENCE.finditer((ROOT / page).read_text()):
            yield page, match


def examples() -> dict[str, Example]:
    found: dict[str, Example] = {}
    for page, match in fences():
        if match["kind"] == "text":
            continue
        loose = f"{page}-{match.start()}"
        example = found.setdefault(match["name"] or loose, Example())
        example.needs += (match["needs"] or "").split()
        example.site = match["site"] or example.site
        example.marks |= {"cluster", example.site} & {"cluster", "slurm"} if example.site else set()
        example.blocks.append((match["kind"], match["body"]))
    return found


def cases() -> list[object]:
    found = examples()
    assert found.keys() >= THOROUGH
    for name in THOROUGH:
        found[name].marks.add("thorough")
    return [
        pytest.param(example, id=name, marks=[getattr(pytest.mark, mark) for mark in example.marks])
        for name, example in found.items()
    ]


@pytest.mark.parametrize("example", cases())
def test_an_example_runs_as_it_is_written(example: Example, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    environment = dict(os.environ)
    if example.site == "slurm":
        environment = request.getfixturevalue("slurm").environment
    elif example.site == "sge":
        environment |= request.getfixturevalue("grid_engine").settings
    elif example.site == "pbs":
        environment = pretended_pbs(tmp_path / "pbs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in example.needs:
        make_file(name, tmp_path)
    shorter = SHORTER.get(request.node.callspec.id, {})
    assert all(any(word in body for _, body in example.blocks) for word in shorter), "the page has other words"
    for kind, body in example.blocks:
        for word, ours in (shorter | (SITE if example.site else {})).items():
            body = body.replace(word, ours)
        run_block(kind, body, tmp_path, environment, without_data=example.simulated())


def make_file(name: str, folder: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = np.clip(0.5 + 0.1 * rng.standard_normal((260, 360)), 0, 1)
    if name.endswith(("scan.tif", "/a.tif", "/b.tif")):
        (folder / name).parent.mkdir(exist_ok=True)
        tifffile.imwrite(folder / name, (pixels * 65535).astype("uint16"), tile=(128, 128))
    elif name == "channels.tif":
        channels = {"axes": "CYX", "Channel": {"Name": ["DAPI", "GFP", "FISH", "Cy5"]}}
        noisy = [np.linspace(0, 1, 200) + sigma * rng.standard_normal((160, 200)) for sigma in (0.02, 0.1, 0.2, 0.3)]
        tifffile.imwrite(folder / name, np.array(noisy, "float32"), ome=True, metadata=channels)
    elif name == "striped.tif":
        off = 0.05 * rng.standard_normal(pixels.shape[1])
        tifffile.imwrite(folder / name, ((pixels + off).clip(0, 1) * 65535).astype("uint16"), tile=(128, 128))
    elif name == "photons.tif":
        counts = 100 + 2.1 * rng.poisson(np.linspace(5, 500, 360), pixels.shape)
        tifffile.imwrite(folder / name, counts.astype("uint16"), tile=(128, 128))
    elif name == "holes.tif":
        pixels[100:150, 200:260] = -9999
        tag = (42113, "s", 0, "-9999", True)
        tifffile.imwrite(folder / name, pixels.astype("float32"), tile=(128, 128), extratags=[tag])
    elif name == "map.tif":
        scale, tie = (33550, "d", 3, (10.0, 10.0, 0.0), True), (33922, "d", 6, (0, 0, 0, 5e5, 5e6, 0), True)
        keys = (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32632)
        tags = [scale, tie, (34735, "H", len(keys), keys, True)]
        tifffile.imwrite(folder / name, pixels.astype("float32"), tile=(128, 128), extratags=tags)
    elif name == "noisy.zarr":
        array = zarr.create_array(folder / name, shape=pixels.shape, chunks=(128, 128), dtype="float32")
        array[...] = pixels
    elif name == "cells.zarr":
        group = zarr.create_group(folder / name)
        group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
        group.create_array("0", data=np.resize(pixels, (2100, 1500)), chunks=(512, 512))
    elif name == "bare.zarr":
        zarr.create_array(folder / name, data=np.resize(pixels, (2100, 1500)), chunks=(512, 512))
    elif name in ("sigma.npy", "mask.npy"):
        np.save(folder / name, np.full(pixels.shape, 0.1, np.float32))
    elif name == "job.yaml":
        shutil.copy(ROOT / "examples/tiff/job.yaml", folder)
        if not (folder / "scan.tif").exists():
            make_file("scan.tif", folder)
    elif name == "scan.yaml":
        page = (ROOT / "docs/hpc.md").read_text()
        block = re.search(r"```yaml\n(# scan\.yaml\n.*?)```", page, re.DOTALL)
        assert block
        text = block[1]
        for word, ours in SITE.items():
            text = text.replace(word, ours)
        (folder / name).write_text(text)
    elif name in ("frames.h5", "raster.npy"):
        places = np.indices((5, 6)).reshape(2, -1).T
        frames = np.random.default_rng(0).poisson(3, (30, 16, 16))
        if name == "raster.npy":
            np.save(folder / name, frames.reshape(5, 6, 16, 16))
        else:
            with h5py.File(folder / name, "w") as file:
                file["raw/frames"], file["raw/places"] = frames, 0.2 * places
    elif name == "petra.cxi":
        shutil.copy(ROOT / "examples/ptychography" / name, folder)
    elif name == "train.py":
        block = re.search(r"```text\n(# train\.py\n.*?)```", (ROOT / "docs/torch.md").read_text(), re.DOTALL)
        assert block
        (folder / name).write_text(block[1])
    else:
        raise AssertionError(f"no file called {name} can be made: extend make_file, or correct the comment")


def run_block(kind: str, body: str, folder: Path, environment: dict[str, str], *, without_data: set[str]) -> None:
    if kind == "console":
        for line in body.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                run_command(shlex.split(line[2:]), folder, environment)
        return
    title = re.match(r"# ([\w-]+\.\w+)\n", body)
    path = folder / (title[1] if title else f"example.{kind}")
    path.write_text(body)
    if path.name in without_data or (kind == "yaml" and "\njob: " not in body):
        return
    if kind == "python":
        return run_script(path)
    run_command(["recon-cli", "validate", path.name], folder, environment)


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Import from a folder first, as a script there does; nothing of it stays, and warnings are no errors."""
    known, threads = set(sys.modules), torch.get_num_threads()
    with chdir(folder), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("default")
        patch.syspath_prepend(str(folder))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for name in set(sys.modules) - known:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]


def run_script(path: Path) -> None:
    """Run a script of a page as Python does; in this process, for most of a short one is imports."""
    with own_modules(path.parent):
        runpy.run_path(str(path), run_name="__main__")


def run_command(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    program, *rest = words
    if program == "make":
        return check_target(*rest)
    if program == "pip":
        return check_pip(rest)
    # The command itself: unlike `python -m`, it does not put the folder it is called in on the path.
    ours = {"python": sys.executable, "recon-cli": str(Path(sys.executable).with_name("recon-cli"))}
    assert program in {*ours, "salloc", "srun"}
    command = [ours.get(word, word) for word in words]
    if (
        program == "recon-cli"
        and words[1] not in ELSEWHERE
        and environment == os.environ
        and "--allow-import" not in words
    ):
        with own_modules(folder):
            assert (ended := ask(*rest)).exit_code == 0, (
                f"{shlex.join(words)} exits with {ended.exit_code}\n{ended.output}"
            )
        return
    if words[1] == "view":  # until Ctrl-C
        # --foreground: one signal; without it timeout sends a second one to its process group
        command = ["timeout", "--foreground", "--preserve-status", "--signal=INT", "10", *command, "--no-browser"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"


def project() -> dict[str, Any]:
    """The section of that name in pyproject.toml."""
    section: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return section


def check_target(target: str, *_: str) -> None:
    listed = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target in listed


def check_pip(words: list[str]) -> None:
    """The extras and files of a command that would install or fetch something, or look at what is installed."""
    extras = project()["optional-dependencies"]
    requested = {extra for word in words for listed in re.findall(r"\[(.*?)\]", word) for extra in listed.split(",")}
    assert words[0] in ("install", "download", "wheel", "check")
    assert requested <= set(extras)
    for option, value in itertools.pairwise(words):
        assert option not in ("-r", "-c") or (ROOT / value).exists()
