"""Jobs of samples on small scenes, run in this process or as processes that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import zarr
from numpy.typing import NDArray

from halotile.graphs.jobs.samples.job import FieldPrior, MapOutput, MeasuredOperator, PosteriorOptions, Sampling
from halotile.graphs.kinds.base import AnyPass, Gather, JobOutput, OutputArray, Pass, Sums
from halotile.graphs.kinds.sections import Cluster, Job, Run, Tile
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import next_of
from halotile.graphs.runs.records import open_records
from halotile.storage.grid import Region
from halotile.storage.rim import Readable
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.journal import Journal
from halotile.storage.sharded.output import create_output
from halotile.tasks.block import ONE_BLOCK, BlockRunner
from halotile.tasks.image_task import ImageTask
from halotile.tasks.operators.base import InMemory, OperatorKind, read_all
from halotile.tasks.operators.blur import Blur
from halotile.tasks.priors.matern import Matern
from tests.faults import REPOSITORY, until
from tests.graphs.inline import inline
from tests.graphs.solving import WholeBlur, gathered
from tests.support import read_zarr, work_of

Pixels = NDArray[Any]
PRIOR = {"std": 0.5, "range": 6.0, "mean": 1.0}
N, SIGMA = 96, 0.2
HOLE = (slice(40, 47), slice(28, 36))


def kernel() -> Pixels:
    line = np.exp(-np.square(np.arange(-2, 3)) / 2)
    outer: Pixels = np.outer(line, line) / line.sum() ** 2
    return outer


def scene(folder: Path, n: int = N, *, hole: bool = True) -> Pixels:
    """Write a kernel and a measurement of a truth that is drawn from the prior; return the truth."""
    rng, wide = np.random.default_rng(3), (2 * n, 2 * n)
    white = np.fft.fft2(rng.standard_normal(wide))
    truth: Pixels = np.fft.ifft2(white * np.sqrt(Matern(**PRIOR).spectrum(wide))).real[:n, :n] + PRIOR["mean"]
    seen: Pixels = read_all(Blur(kernel=kernel(), boundary="reflect").forward(InMemory(truth)))
    seen = seen + SIGMA * rng.standard_normal(seen.shape)
    seen[HOLE] = np.nan if hole else seen[HOLE]
    np.save(folder / "k.npy", kernel())
    zarr.create_array(folder / "y.zarr", data=seen.astype("float32"), chunks=(32, 32), overwrite=True)
    return truth


def job_in(folder: Path, parts: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Sampling:
    """A job of three draws; ``parts``: values of its sections."""
    options: dict[str, dict[str, Any]] = {
        "operators": {"noise_sigma": SIGMA},
        "output": {"path": "mean.zarr", "std": "std.zarr", "shard": 32, "chunk": 32},
        "posterior": {"count": 3, "halo": 16},
        "prior": dict(PRIOR),
        "tile": {"block": 32},
    }
    for name, values in (parts or {}).items():
        options[name] |= values
    for key in ("path", "std", "samples"):
        if options["output"].get(key):
            options["output"][key] = str(folder / str(options["output"][key]))
    blur = {"kernel": str(folder / "k.npy"), "boundary": "reflect"}
    name = options["prior"].pop("name", "matern")
    job = Sampling(
        output=MapOutput(**options["output"]),
        operators=(MeasuredOperator(name="blur", data=str(folder / "y.zarr"), options=blur, **options["operators"]),),
        prior=FieldPrior(name=name, options=options["prior"]),
        posterior=PosteriorOptions(**options["posterior"]),
        tile=Tile(**options["tile"]),
        run=Run(workers=1, memory_per_worker="3GiB"),
        cluster=Cluster(dashboard=False),
    )
    return replace(job, **changes)


class InProcess:
    """The run of a plan in this process."""

    def __init__(self, plan: Plan) -> None:
        self.directory, self.fingerprint = RunDirectory(plan.run_directory), plan.fingerprint
        self.directory.create()
        self.reports = list[str]()

    def report(self, line: str) -> None:
        self.reports.append(line)

    def take(self, wanted: AnyPass) -> Sums:
        if isinstance(wanted.records, JobOutput):
            assert isinstance(wanted, Pass)
            receipt = BlockRunner(wanted.task).run(range(len(wanted.grid)))
            assert not receipt.bad, receipt.bad[0].traceback
            return Sums({})
        grid = wanted.grid if isinstance(wanted, Pass) else ONE_BLOCK
        with open_records(wanted.records, grid, self.fingerprint) as opened:
            if isinstance(wanted, Pass):
                assert isinstance(wanted.task, ImageTask)
                inline(wanted.task, 0, opened.journal, opened.ledger)
            elif not opened.journal.done:
                assert isinstance(wanted, Gather)
                gathered(wanted.folder)(wanted, 0, opened.journal, opened.ledger)
            return opened.sums()


def reported(job: Job) -> tuple[tuple[Pixels, ...], list[str]]:
    """Every image of a job, in this process; and what it reports."""
    plan = make_plan(job, fresh=True)
    at, sums = InProcess(plan), None
    for output in plan.outputs:
        assert isinstance(output, OutputArray)
        create_output(output.path, output.layout, overwrite=True)
    passes = work_of(plan).run(at)
    while (wanted := next_of(passes, sums)) is not None:
        sums = at.take(wanted)
    shutil.rmtree(at.directory.path)
    return tuple(read_zarr(output.path) for output in plan.outputs), at.reports


def computed(job: Job) -> tuple[Pixels, ...]:
    return reported(job)[0]


def same(images: tuple[Pixels, ...], others: tuple[Pixels, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(images, others, strict=True))


def journalled(folder: Path, name: str) -> set[int]:
    path = RunDirectory(folder / f"{name}.run").journal_path
    return set(Journal.open_any(path).done) if path.exists() else set()


def started(folder: Path, job: Sampling) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a job from its file."""
    asked = make_plan(job).documents.asked
    own = ("allow_import", "import_folder")  # no file may allow itself to run code
    (folder / "job.yaml").write_text(json.dumps({key: value for key, value in asked.items() if key not in own}))
    return launch(folder)


def launch(folder: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that runs the job of a folder."""
    command = [sys.executable, "-m", "halotile", "run", "job.yaml"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return partial(subprocess.Popen, command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def killed(start: Callable[..., subprocess.Popen[str]], condition: Callable[[], bool]) -> None:
    """Kill a run as soon as something is true."""
    with start(start_new_session=True) as process:
        try:
            until(lambda: process.poll() is not None or condition())
            assert process.poll() is None, process.communicate()[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def whole_image(job: Sampling, tol: float) -> tuple[Pixels, Pixels]:
    """The maps of a job, solved in double precision on the whole image at once; and the deviation from more draws."""
    solved = work_of(make_plan(job, fresh=True)).solved
    posterior = replace(solved.posterior, dtype=np.dtype(np.float64))
    solved = replace(solved, posterior=posterior, halo=10**6, tol=tol)
    images, deviations = (
        replace(solved, draws=draws).solved(Region.whole(posterior.shape))[0] for draws in (solved.draws, range(8))
    )
    return images, deviations[1]


def with_operator(job: Sampling, name: str, **options: Any) -> Sampling:
    return replace(job, operators=(replace(job.operators[0], name=name, options=options),))


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Sums of all rows and columns, as one line."""

    name: ClassVar[str] = "projections"
    kind: ClassVar[OperatorKind] = "whole"
    reach: ClassVar[int] = 0

    def measured(self, image: tuple[int, ...]) -> tuple[int, ...]:
        return (*image[:-2], image[-2] + image[-1])

    def forward(self, image: Readable) -> Readable:
        pixels: Pixels = read_all(image)
        return InMemory(np.concatenate([pixels.sum(-1), pixels.sum(-2)], -1))

    def adjoint(self, measurement: Readable, image: tuple[int, ...]) -> Readable:
        line: Pixels = read_all(measurement)
        return InMemory(line[..., : image[-2], None] + line[..., None, image[-2] :])


def projected(job: Sampling, folder: Path) -> Sampling:
    seen: Pixels = read_all(Projections().forward(InMemory(read_zarr(folder / "y.zarr")[:24, :24])))
    zarr.save_array(folder / "line.zarr", seen + 0.2 * np.random.default_rng(0).standard_normal(48))
    (operator,) = with_operator(job, "own", operator=Projections()).operators
    line = replace(operator, data=str(folder / "line.zarr"), noise_sigma=2.0)
    return replace(job, operators=(line,), shape=(24, 24))


def cropped(job: Sampling, folder: Path) -> Sampling:
    """A job for a larger image, whose measurement is a part of it."""
    return replace(with_operator(job, "crop", origin=(6, 2), size=(48, 48)), shape=(60, 54))


FAR: dict[str, Any] = {
    "reflect": lambda job, folder: job,
    "circular": lambda job, folder: with_operator(job, "blur", kernel=str(folder / "k.npy")),
    "whole": lambda job, folder: with_operator(job, "own", operator=WholeBlur(blur=Blur(kernel=kernel()))),
    "crop": cropped,
    "line": projected,
}
