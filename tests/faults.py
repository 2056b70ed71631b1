"""A job whose every block is watched, and trouble that can be made for it.

The pixels of the image tell where they lie, so the denoiser knows which block it is given. It notes the
block in a log, and does what files named after the block in a folder tell it to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Worker

from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.jobs.denoise.job import Denoising
from halotile.graphs.kinds.sections import DenoiserChoice, Input, Output, Run, Tile
from halotile.graphs.plans.plan import make_plan
from halotile.graphs.runs.driver import Outcome, run
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from tests.support import Image, write_zarr

EDGE = 256
BLOCK = 32
ACROSS = EDGE // BLOCK
BLOCKS = ACROSS**2
LEFT = range(20, 24)
"""Blocks that a run which is half done has left."""
FIRST = 1000.0
"""Value of the first pixel: what a check of the denoiser tries it on lies below."""
REPOSITORY = Path(__file__).parents[1]


def run_python(
    *words: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python, with the package of this checkout, to its end."""
    command = [sys.executable, *words]
    own = os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(environment or {})
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=200, check=False)


def image() -> Image:
    """Every pixel tells its place."""
    return (np.arange(EDGE**2, dtype="float32") + FIRST).reshape(EDGE, EDGE)


def truth(pixels: Image) -> Image:
    """What the watched denoiser makes of them."""
    return np.sqrt(pixels) * np.float32(1.5)


def watched(pixels: Image, folder: str) -> Image:
    """The denoiser: see :func:`trouble`."""
    place = int(np.nanmin(pixels) - FIRST)
    result = truth(pixels)
    sick = Path(folder, f"sick-{os.getpid()}")
    if sick.exists() and (sick.read_text() == "load") == (place < 0):
        raise ImportError(f"no libfoo.so for {sick.name}")
    if place < 0 or not Worker._instances:  # a trial
        return result
    block = place // EDGE // BLOCK * ACROSS + place % EDGE // BLOCK
    with open(f"{folder}/log", "a") as log:
        log.write(f"{block} {os.getpid()}\n")
    own_pace = Path(folder, f"pace-{os.getpid()}")
    time.sleep(float((own_pace if own_pace.exists() else Path(folder, "pace")).read_text()))
    for kind, make in TROUBLE.items():
        file = Path(folder, f"{kind}-{block}")
        if file.exists():
            result = make(result, file)
    return result


def _raise(_: Image, file: Path) -> Image:
    raise ValueError(f"poisoned by {file.name}")


def _fail_twice(result: Image, file: Path) -> Image:
    left = int(file.read_text())
    if left:
        file.write_text(str(left - 1))
        raise ValueError(f"{file.name}: {left} failures to come")
    return result


def _die(_: Image, file: Path) -> Image:
    os._exit(3)


def _miss_a_file(_: Image, file: Path) -> Image:
    raise FileNotFoundError(2, "No such file or directory", "calibration.npy")


def _hang(result: Image, file: Path) -> Image:
    file.unlink()
    os.kill(os.getpid(), signal.SIGSTOP)
    return result


def _hang_in_the_write(result: Image, file: Path) -> Image:
    """The block is on the disk and has not got its name when the process stops."""

    replace = os.replace

    def stop_and_replace(*paths: str) -> None:
        os.replace = replace
        file.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # another thread may take the signal: this one stops a moment later
        replace(*paths)

    os.replace = stop_and_replace  # type: ignore[assignment]
    return result


TROUBLE: dict[str, Callable[[Image, Path], Image]] = {
    "raise": _raise,
    "flaky": _fail_twice,
    "die": _die,
    "missing": _miss_a_file,
    "hang": _hang,
    "tear": _hang_in_the_write,
    "nan": lambda result, _: np.full_like(result, np.nan),
    "shape": lambda result, _: result[1:],
}
"""What a file such as ``raise-7`` does to block 7."""


@dataclass(frozen=True)
class Scene:
    """A watched job in a folder of its own."""

    folder: Path
    place: Path
    """Where the output goes."""

    @classmethod
    def create(cls, folder: Path, place: Path | None = None) -> Scene:
        """An image to read, nothing written yet."""
        scene = cls(folder, place or folder)
        write_zarr(scene.source, image(), axes="yx")
        scene.set_pace(0)
        return scene

    @property
    def source(self) -> Path:
        return self.folder / "noisy.zarr"

    @property
    def output(self) -> Path:
        return self.place / "clean.zarr"

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.place / "clean.zarr.run")

    @property
    def cwd(self) -> Path:
        """Working directory of runs that are started."""
        return REPOSITORY

    @property
    def config(self) -> Path:
        return self.folder / "job.yaml"

    def set_pace(self, seconds: float) -> None:
        """How long every block takes."""
        (self.folder / "pace").write_text(str(seconds))

    def set_pace_of(self, process: int, seconds: float) -> None:
        """How long every block takes one worker."""
        (self.folder / f"pace-{process}").write_text(str(seconds))

    def make_sick(self, process: int, when: str = "blocks") -> None:
        """Have one worker fail every block, or have it fail to load the job."""
        (self.folder / f"sick-{process}").write_text(when)

    def make_trouble(self, kind: str, block: int, text: str = "") -> Path:
        """See :data:`TROUBLE`."""
        file = self.folder / f"{kind}-{block}"
        file.write_text(text)
        return file

    def job(self, *, parts: dict[str, dict[str, Any]] | None = None, **options: Any) -> Denoising:
        """The job; ``options`` are those of its run, ``parts`` those of its other sections."""
        sections: dict[str, dict[str, Any]] = {
            "input": {"path": str(self.source)},
            "output": {"path": str(self.output), "format": "zarr", "shard": BLOCK, "chunk": 16},
            "tile": {"size": BLOCK, "block": BLOCK},
            "run": {"memory_per_worker": "3GiB", "retries": 2} | options,
        }
        for name, values in (parts or {}).items():
            sections[name] |= values
        watching = {"import": "tests.faults:watched", "options": {"folder": str(self.folder)}, "depth": 0}
        return Denoising(
            input=Input(**sections["input"]),
            output=Output(**sections["output"]),
            denoiser=DenoiserChoice(name="function", options=watching),
            tile=Tile(**sections["tile"]),
            run=Run(**sections["run"]),
            allow_import=True,
        )

    def run(
        self, cluster: RunningCluster | None = None, *, fresh: bool = False, same_input: bool = False, observer: Any = None, **job: Any
    ) -> Outcome:  # fmt: skip
        """Plan and run the job in this process."""
        return run(make_plan(self.job(**job), fresh=fresh, same_input=same_input), observer=observer, cluster=cluster)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Run the job with the command line, as the leader of a process group of its own."""
        self.write_config(**options)
        command = [sys.executable, "-m", "halotile.cli.main", "run", str(self.config), "--allow-import", *arguments]
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        return subprocess.Popen(command, cwd=self.cwd, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, **streams)

    def write_config(self, **options: Any) -> None:
        """Write the job that is started."""
        self.config.write_text(json.dumps(_as_config(self.job(**options))))

    def seen(self, but_by: Collection[int] = ()) -> list[int]:
        """The blocks that the denoiser was given, in order, but those of some processes."""
        return [block for block, pid in self._log() if pid not in but_by]

    def blocks_of(self, process: int) -> list[int]:
        """The blocks that one worker was given, in order."""
        return [block for block, pid in self._log() if pid == process]

    def workers(self) -> set[int]:
        """Process ids that have computed a block and still live."""
        return {pid for _, pid in self._log() if is_alive(pid)}

    def forget(self) -> None:
        """Begin a new log."""
        (self.folder / "log").unlink(missing_ok=True)

    def fingerprint(self) -> str:
        """Digest of the plan that the run directory keeps."""
        return str((self.directory.read_plan() or {})["fingerprint"])

    def journalled(self) -> set[int]:
        """The blocks that the journal has now."""
        if self.directory.read_plan() is None:
            return set()
        return set(Journal.open_any(self.directory.journal_path).done)

    def status(self) -> dict[str, Any]:
        """What status.json says."""
        return self.directory.read_status() or {}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.directory.read_events() if event["event"] == kind]

    def files(self) -> dict[str, bytes]:
        """Everything in the output."""
        return {str(p.relative_to(self.output)): p.read_bytes() for p in sorted(self.output.rglob("*")) if p.is_file()}

    def _log(self) -> list[tuple[int, int]]:
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(block), int(pid)) for block, pid in map(str.split, lines)]


def _as_config(job: Denoising) -> dict[str, Any]:
    wanted: dict[str, tuple[str, ...]] = {
        "input": ("path",),
        "output": ("path", "format", "shard", "chunk"),
        "tile": ("size", "block"),
        "run": ("workers", "memory_per_worker", "retries", "on_bad_block", "stall_seconds"),
    }
    parts = {part: {name: getattr(getattr(job, part), name) for name in names} for part, names in wanted.items()}
    return {"version": 1, "job": "denoise", **parts, "denoiser": {"name": job.denoiser.name, **job.denoiser.options}}


def flip_bit(file: Path, place: int = -100) -> None:
    """One bit of a file is not as it was written."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def members(group: int) -> set[int]:
    """The live processes of a process group."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.add(int(entry.name))
            except ProcessLookupError:
                continue
    return found
