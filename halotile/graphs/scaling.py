"""The scaling of a job: trials with several numbers of workers, each a real run that ends early, compared."""

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

from distributed import Worker

from halotile.errors import BlockFailed, ConfigError, Stopped
from halotile.graphs.clusters.base import RunningCluster
from halotile.graphs.clusters.common.answers import ask
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of
from halotile.graphs.clusters.common.machine import cores_here
from halotile.graphs.kinds import base
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.driver import next_of, run
from halotile.graphs.runs.passes.stream import workers_of
from halotile.graphs.runs.session import SharedCluster
from halotile.graphs.runs.signals import Signals
from halotile.graphs.waiting import Report, no_report
from halotile.graphs.watching.progress import Progress
from halotile.graphs.words import counted, precise_seconds_text
from halotile.storage.disk.object_path import ObjectPath, full_path
from halotile.storage.disk.place import check_dots, check_parents
from halotile.tasks.block import peak_memory_bytes
from halotile.tasks.groups.training.curve import received_bytes


@dataclass(frozen=True)
class TimedRun:
    """Figures of one trial."""

    workers: int  # number of workers
    # time until the first step, or a block for each worker, was done: processes, imports, model, and what comes
    # before the steps
    start_seconds: float
    seconds: tuple[float, ...]  # seconds for a unit, block or step, after that
    losses: tuple[tuple[int, float], ...]  # number and loss of each step, the first one included
    # read_bytes, written_bytes: bytes that blocks read and wrote, in the whole trial; None where there are no blocks,
    # and nothing is counted
    read_bytes: int | None
    written_bytes: int | None
    # bytes that workers received from one another: of results, and in the steps of trainings and ptychography; None
    # where they are not counted
    exchanged_bytes: int | None
    # peak_memory_bytes, device_peak_bytes: peak of one worker, in its memory and on its GPU
    peak_memory_bytes: int
    device_peak_bytes: int


@dataclass(frozen=True)
class ScalingRow:
    """All trials with one number of workers."""

    # trials as one: the median start, all seconds, the losses of the first, and otherwise the largest figures
    run: TimedRun
    speed_up: float  # ratio of the median seconds with the fewest workers to those with these
    efficiency: float  # speed-up in relation to the number of workers

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Median, minimum and maximum of the seconds for a unit."""
        return median(self.run.seconds), min(self.run.seconds), max(self.run.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the row for programs."""
        names = ("seconds", "least_seconds", "most_seconds")
        compared = {"all_seconds": self.run.seconds, "speed_up": self.speed_up, "efficiency": self.efficiency}
        return asdict(self.run) | dict(zip(names, self.seconds, strict=True)) | compared


@dataclass(frozen=True)
class Scaling:
    """The trials of a job."""

    job: str  # kind of the job
    unit: str  # word for what is timed: block, iteration
    # blocks, of_blocks: number of blocks that were measured, and of all blocks of a pass, in a job without steps
    blocks: int | None
    of_blocks: int | None
    trials: int  # trials with each number of workers
    runs: Sequence[TimedRun]  # trials, in the order of their numbers of workers
    notes: Sequence[str] = ()  # sentences about the numbers of workers

    @property
    def rows(self) -> list[ScalingRow]:
        """The trials with each number of workers together, the fewest first."""
        groups = itertools.groupby(self.runs, lambda run: run.workers)
        joined = [_joined(list(group)) for _, group in groups]
        fewest = joined[0]
        ratios = (median(fewest.seconds) / median(run.seconds) for run in joined)
        return [
            ScalingRow(run, ratio, ratio * fewest.workers / run.workers)
            for run, ratio in zip(joined, ratios, strict=True)
        ]

    @property
    def largest_difference(self) -> float | None:
        """Largest relative difference of a loss between two trials; None where there are no losses.

        >>> runs = [TimedRun(n, 1.0, (1.0,), ((1, 4.0), (2, 2.0 + n)), 0, 0, 0, 0, 0) for n in (0, 1)]
        >>> round(Scaling("reconstruct", "iteration", None, None, 1, runs).largest_difference, 3)
        0.333
        """
        steps = zip(*([loss for _, loss in run.losses] for run in self.runs), strict=False)
        spans = ((max(step) - min(step), max(map(abs, step))) for step in steps)
        return max((span / (size or 1.0) for span, size in spans), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return asdict(self) | {
            "largest_loss_difference": self.largest_difference,
            "workers": [row.to_json() for row in self.rows],
        }


def _joined(runs: Sequence[TimedRun]) -> TimedRun:
    names = [name for name in TimedRun.__dataclass_fields__ if name.endswith("_bytes")]
    figures: dict[str, Any] = {name: _largest([getattr(run, name) for run in runs]) for name in names}
    return replace(
        runs[0],
        start_seconds=median(run.start_seconds for run in runs),
        seconds=tuple(seconds for run in runs for seconds in run.seconds),
        **figures,
    )


def _largest(counts: Sequence[int | None]) -> int | None:
    """The largest of those that are counted."""
    return max((count for count in counts if count is not None), default=None)


SECONDS = 10.0  # time that the fewest workers are measured for in a trial of a job without steps, about
LEAST = 4  # blocks for each worker at least: with fewer, the last ones leave too many of them idle


class Enough(Exception):
    """The blocks or steps to measure are done."""


@dataclass
class Portion:
    """The blocks that are computed in each pass of a job without steps, the same in all trials."""

    most_workers: int  # largest number of workers
    # number of blocks to measure; where it is not given, the pace of the first ones in the first trial decides
    blocks: int | None = None

    def choose(self, seconds: float) -> None:
        """Choose the number of blocks, unless it is known: as many as take :data:`SECONDS`, of so many seconds each."""
        self.blocks = self.blocks or max(LEAST * self.most_workers, int(SECONDS / max(seconds, 1e-6)))

    def first_of(self, total: int) -> int:
        """Return the number of blocks that are done first and not measured: with them, workers load what they need."""
        return min(self.most_workers, total // 2)

    def measured_of(self, total: int) -> int:
        """Return the number of blocks that are measured."""
        return min(self.blocks or total, total - self.first_of(total))


@dataclass
class ShortWork(base.Work):
    """A work that ends early. What it measures is in its fields once it has raised :class:`Enough`.

    Passes of a job without steps are done in two parts: first a block for each worker, then those that are measured.
    Of a job with steps, which has been shortened, everything is done but the writing of its outputs: a step needs all of the
    one before.
    """

    work: base.Work  # whole work
    steps: base.Steps | None  # steps of the job
    portion: Portion  # blocks to do
    began: float = field(default_factory=time.perf_counter)
    start_seconds: float = 0.0  # time until the first step, or the first blocks, were done
    rows: base.IterationRows = ()  # figures of the steps
    # Number of all blocks, and seconds for each one that was measured, of every pass of a job without steps.
    measured: list[tuple[int, float]] = field(default_factory=list)

    @property
    def outputs(self) -> tuple[base.JobOutput, ...]:
        """Those of the whole work."""
        return self.work.outputs

    @property
    def passes(self) -> tuple[base.PassCount, ...]:
        """Those of the whole work."""
        return self.work.passes

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds for a block, weighted by the blocks of each pass; or for a step, in each row after the first."""
        if self.steps is None:
            total = sum(blocks for blocks, _ in self.measured)
            return (sum(blocks * each for blocks, each in self.measured) / total,) if total else ()
        unit = self.steps.unit
        return tuple(row["seconds"] / (row[unit] - before[unit]) for before, row in itertools.pairwise(self.rows))

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """Number and loss of the steps that rows end with."""
        if self.steps is None or not self.rows:
            return ()
        named = (key for key in self.steps.losses if key in self.rows[0])
        return tuple((int(row[self.steps.unit]), row[key]) for key in itertools.islice(named, 1) for row in self.rows)

    def run(self, at: base.RunView) -> Generator[base.AnyPass, base.Sums, None]:
        """Yield passes until enough is done."""
        with closing(self.work.run(_ListeningView(at, self._take))) as passes:
            sums = None
            while (wanted := next_of(passes, sums)) is not None:
                if self.steps is None and isinstance(wanted, base.Pass) and len(wanted.grid) > 1:
                    sums = yield from self._part_of(wanted)
                elif self.steps is not None and isinstance(wanted.records, base.JobOutput):
                    break
                else:
                    sums = yield wanted
        raise Enough

    def _part_of(self, wanted: base.Pass) -> Generator[base.AnyPass, base.Sums, base.Sums]:
        """Yield the two parts of a pass."""
        total = len(wanted.grid)
        first = self.portion.first_of(total)
        sums = yield replace(wanted, blocks=first)
        self.start_seconds = self.start_seconds or time.perf_counter() - self.began
        self.portion.choose(sums.seconds / first)
        blocks = self.portion.measured_of(total)
        sums = yield replace(wanted, blocks=first + blocks)
        self.measured.append((total, sums.seconds / blocks))
        return sums

    def _take(self, rows: base.IterationRows) -> None:
        if rows and not self.rows:  # several may come at once
            later = sum(row["seconds"] for row in rows[1:])
            self.start_seconds = time.perf_counter() - self.began - later
        self.rows = list(rows)


class _ListeningView:
    """A run as its generator of passes sees it, with somebody who listens to the figures of steps."""

    def __init__(self, view: base.RunView, listen: Callable[[base.IterationRows], None]) -> None:
        self.directory, self.fingerprint, self.report = view.directory, view.fingerprint, view.report
        self._view, self._listen = view, listen

    def report_row(self, rows: base.IterationRows, total: int) -> None:
        """Report the figures of all steps so far."""
        self._view.report_row(rows, total)
        self._listen(rows)


BLOCK = "block"  # the unit of a job without steps
STEPS = 5  # steps in each trial, of a job with steps


@dataclass(frozen=True)
class ScalingRequest:
    """Options of the report."""

    counts: Sequence[int] = ()  # numbers of workers; empty for powers of two up to that of the job
    trials: int = 3  # trials with each of them
    # blocks to measure in each trial of a job without steps; by default what takes about ten seconds
    blocks: int | None = None
    # steps in each trial of a job with steps; by default `STEPS`. The first is not measured
    steps: int | None = None


def measure(job: Job, request: ScalingRequest, report: Report = no_report) -> Scaling:
    """Run a job for a few blocks or steps with each number of workers, in turns.

    It is planned once, for the largest number, so that all of them compute the same blocks.

    ``job``: job. Its output, and the run directory beside it, are neither read nor written; ``request``: options; ``report``: takes a line about the
    plan, and one after each trial.
    """
    steps = base.kind_of(job).steps
    _check(request, steps)
    with Signals() as signals, _folder_beside(job) as folder:
        short = steps.shortened(job, request.steps or STEPS) if steps else job
        plan = _plan(short.moved_into(str(folder)), request, folder, report)
        report(plan.kind.headline(plan.summary()))
        most, total = plan.run.count, _blocks_of(plan)
        doublings = (2**k for k in range(most.bit_length()))
        counts = sorted(set(request.counts) or {most, *(n for n in doublings if n < most)})
        portion, unit, runs = Portion(most, request.blocks), steps.unit if steps else BLOCK, []
        for trial, workers in itertools.product(range(1, request.trials + 1), counts):
            try:
                runs.append(_run(_with_workers(plan, workers), portion, signals))
            except Stopped:
                raise Stopped(f"stopped on {signals.name}; nothing of it is kept", signals.name) from None
            except BlockFailed as error:  # the tracebacks that it names are removed
                first = str(error).splitlines()[:2]
                raise type(error)(
                    "\n".join([*first, "`recon-cli run` of the same job keeps the tracebacks."])
                ) from None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700, exist_ok=True)
            report(
                f"trial {trial} of {request.trials}, {counted(workers, 'worker')}: start {precise_seconds_text(runs[-1].start_seconds)}, "
                f"{precise_seconds_text(median(runs[-1].seconds))} per {unit}"
            )
    runs.sort(key=lambda one: one.workers)
    blocks, of_blocks = (None, None) if steps else (portion.measured_of(total), total)
    scaling = Scaling(job.kind, unit, blocks, of_blocks, request.trials, runs, tuple(_notes(plan, blocks)))
    if steps and steps.per_epoch:
        epoch = _epoch_text(steps.per_epoch(plan.figures), scaling)
        scaling = replace(scaling, notes=(*scaling.notes, epoch))
    return scaling


def _check(request: ScalingRequest, steps: base.Steps | None) -> None:
    """Refuse options that are out of range, or for another kind of job."""
    for name, value, least in (
        ("trials", request.trials, 1),
        ("blocks", request.blocks, 1),
        ("steps", request.steps, 2),
    ):
        if value is not None and value < least:
            first = ": the first is not measured" if name == "steps" else ""
            raise ConfigError(f"--{name} {value} is too few{first}. Write {least} or more.")
    if steps and request.blocks:
        raise ConfigError(
            f"--blocks: this job is measured by the {steps.unit}, each over all blocks. Write --steps {STEPS}."
        )
    if request.steps and not steps:
        raise ConfigError("--steps: this job has no steps, and is measured by the block. Write --blocks, or neither.")


@contextmanager
def _folder_beside(job: Job) -> Iterator[Path]:
    """A new folder beside the output of a job, on the same disk; it is removed with all that is in it."""
    place = full_path(job.place)
    if isinstance(place, ObjectPath):
        raise ConfigError(
            f"the output is {place}, and bench measures on a disk, so that it leaves nothing in a store. Write another path, such as "
            "--set output.path=clean.zarr."
        )
    check_dots(job.place)
    check_parents(place)
    name = f".{place.name}.bench-"
    check_parents(place.with_name(name))
    folder = Path(mkdtemp(prefix=name, dir=place.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plan(job: Job, request: ScalingRequest, folder: Path, report: Report) -> Plan:
    """Plan a job for the most workers; refuse one that would write elsewhere, or has nothing to divide."""
    kind = cluster_kind_of(job.cluster)
    if kind.traits.joins or kind.traits.of_copies:
        raise ConfigError(
            f"the cluster is {kind.name} ({kind.why}): its workers are there already, and bench starts as many as it compares. "
            "Write --cluster local, or a batch system."
        )
    most = max(request.counts, default=0)
    plan = make_plan(replace(job, run=replace(job.run, workers=most)) if most else job, fresh=True, report=report)
    if plan.run.count < most:
        raise ConfigError(
            f"--workers asks for {most}, and this job gets {plan.run.count}: {plan.placement.requested.why}. Write --workers {plan.run.count}."
        )
    if strays := [output for output in plan.outputs if folder not in Path(str(output.path)).parents]:
        raise ConfigError(
            f"{strays[0].key} is {strays[0].path}: bench writes in a folder of its own only, and job {job.kind} does not move this output there "
            "(moved_into)."
        )
    if _blocks_of(plan) < 2:
        raise ConfigError(
            f"the job is one block of {list(plan.grid.block)}, which workers cannot share. Write a smaller output.shard, or measure the job on a larger image."
        )
    return _with_workers(plan, most or plan.run.count)


def _blocks_of(plan: Plan) -> int:
    """Number of blocks of the longest pass."""
    return max(len(phase.grid) for phase in plan.work.passes)


def _with_workers(plan: Plan, workers: int) -> Plan:
    """Return the same plan with fewer workers: where each GPU has one, with fewer GPUs."""
    choice, job = plan.cluster, replace(plan.job, run=replace(plan.run, workers=workers))
    if cluster_kind_of(choice).traits.has_worker_per_gpu:
        choice = replace(choice, gpus=choice.gpus[:workers] if isinstance(choice.gpus, tuple) else workers)
    return replace(plan, placement=replace(plan.placement, job=job, cluster=choice))


def _notes(plan: Plan, blocks: int | None) -> Iterator[str]:
    """Notes on the workers; ``blocks`` are those that were measured, None of a job with steps."""
    most, cores = plan.run.count, cores_here()
    if cluster_kind_of(plan.cluster).traits.is_here and most > cores:
        yield f"{counted(most, 'worker')} share {counted(cores, 'core')} here: more workers than cores gain nothing"
    if blocks is None:
        return
    if blocks < most:
        yield f"{counted(most, 'worker')} share {counted(blocks, 'block')}: the others are idle; a smaller output.shard makes more blocks"
    elif blocks < LEAST * most:
        yield f"{counted(most, 'worker')} had {counted(blocks, 'block')}, too few to measure the gain: {LEAST * most} or more are needed; a smaller output.shard makes more blocks"


def _epoch_text(steps: float, scaling: Scaling) -> str:
    """Describe the time of an epoch, which has so many steps, with each number of workers: the median, and the range."""
    times = []
    for row in scaling.rows:
        middle, *ends = (precise_seconds_text(steps * seconds) for seconds in row.seconds)
        times.append(f"{middle} ({' to '.join(dict.fromkeys(ends))}) with {counted(row.run.workers, 'worker')}")
    return f"an epoch is {steps:.3g} {scaling.unit}s: {', '.join(times)}"


class _CompleteCluster(SharedCluster):
    """A cluster that is lent once all of its workers are there."""

    def __init__(self, workers: int, signals: Signals) -> None:
        super().__init__(workers)
        self.signals = signals

    def lend(self, start: Callable[[int], AbstractContextManager[RunningCluster]]) -> RunningCluster:
        running = super().lend(start)
        while len(workers_of(running.client)) < running.workers and not self.signals.requested:
            running.check()
            time.sleep(0.1)
        return running


def _run(plan: Plan, portion: Portion, signals: Signals) -> TimedRun:
    """Run a plan until its portion is done."""
    work, progress = ShortWork(plan.work, plan.kind.steps, portion), deque[Progress](maxlen=1)
    with _CompleteCluster(plan.run.count, signals) as cluster:
        with suppress(Enough):
            run(replace(plan, work=work), observer=progress.append, cluster=cluster, signals=signals)
        client = cluster.running.client if cluster.running else None
        received, peaks = (
            ask(client, client.run, question) if client else {} for question in (_received_bytes, peak_memory_bytes)
        )
    if not work.seconds:
        raise ConfigError(
            f"the job is over after its first {plan.kind.steps.unit if plan.kind.steps else BLOCK}, which belongs to the start: nothing is "
            "left to measure. Write a job with more."
        )
    last = progress[-1]
    # Without blocks nothing is counted on the disk, and of programs of ranks what trainings and ptychography exchange.
    has_blocks, exchanged = bool(last.read_bytes or last.written_bytes), sum(received.values())
    return TimedRun(
        workers=plan.run.count,
        start_seconds=work.start_seconds,
        seconds=work.seconds,
        losses=work.losses,
        read_bytes=last.read_bytes if has_blocks else None,
        written_bytes=last.written_bytes if has_blocks else None,
        exchanged_bytes=exchanged if has_blocks or exchanged or plan.run.count == 1 else None,
        peak_memory_bytes=max([last.peak_memory_bytes, *peaks.values()]),
        device_peak_bytes=last.device_peak_bytes,
    )


def _received_bytes(dask_worker: Worker) -> int:
    """Bytes that a worker received from others: of results, by Dask's log of its last transfers, and as a rank of trainings."""
    results: int = sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)
    return results + received_bytes()
