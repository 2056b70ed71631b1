"""The interface between kinds of jobs and the driver: declaration of a kind, its plan, and its passes."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from halotile.errors import ConfigError
from halotile.graphs.kinds.sections import Cluster, Job
from halotile.graphs.waiting import Report, no_report
from halotile.graphs.words import bytes_text
from halotile.registry import find, names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halotile.storage.arrays import Source
    from halotile.storage.disk.object_path import OutputPath
    from halotile.storage.grid import Grid
    from halotile.storage.run_directory.directory import RunDirectory
    from halotile.storage.sharded.layout import Layout
    from halotile.storage.sharded.output import AnyLayout, FileLayout
    from halotile.tasks.block import BlockTask
    from halotile.tasks.options import Auto
    from halotile.tasks.terms import Part


@dataclass(frozen=True)
class Revision:
    """A list in the identity of a job whose later entries may change: the work keeps what it computed of the first ones."""

    key: str  # its key, the same in a job file
    # takes the run directory, the fingerprint and the identity; returns the number of entries, the first ones, that
    # the run has begun. With any it goes on from there
    kept: Callable[[RunDirectory, str, Mapping[str, Any]], int]


@dataclass(frozen=True)
class Steps:
    """Steps of a job. The kind reports a row of figures after each, or after several at once: see ``RunView.report_row``."""

    # name of a step, such as `iteration`: in a row, the key of the last one's number. Its key `seconds` has the
    # duration of the row
    unit: str
    losses: Sequence[str]  # keys of figures that ought to fall; the first of them that a row has is its loss
    # `shortened(job, rows)` returns the same job with at most so many rows
    shortened: Callable[[Any, int], Any]
    counted: str = "block"  # unit that progress counts
    # returns the number of steps that go through all data once, on average, from the figures of the plan
    per_epoch: Callable[[Mapping[str, Any]], float] | None = None
    drawing: str = ""  # what its drawing shows, if it makes one


class Numbered(Protocol):
    """A computation with its number and its totals."""

    @property
    def number(self) -> int:
        """Its place in the order."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The totals that it is part of."""


class SumFunctions(Protocol):
    """The functions that workers call to compute and to add up."""

    @property
    def phase(self) -> str:
        """Name of the tasks on the dashboard."""

    @property
    def what(self) -> str:
        """The unit that a number counts: operator, tile."""

    @property
    def compute(self) -> Callable[..., Any]:
        """``compute(calls, after)`` returns the result of several calls; it only waits for ``after``."""

    @property
    def add(self) -> Callable[[list[Any]], Any]:
        """``add(results)`` returns their sum."""


class TermWork(SumFunctions, Protocol):
    """Work of the workers on the terms of one sum; pickles to a few kilobytes."""

    @property
    def keep(self) -> Callable[[Part], Part]:
        """Function that writes the total; it is durable on return."""


Figures = Mapping[str, Any]  # figures of a plan by name, as `plan --json` shows them
IterationRows = Sequence[Mapping[str, float]]  # figures of each iteration, the first one first
Row = tuple[str, str]  # a label and a value, as a table shows them; an empty label continues the row before
Check = Callable[[Any], str | None]  # returns the fault of a value of the right type, or None
# Takes parts of a job by their names and yields faults: place and message.
Rule = Callable[..., Iterator[tuple[tuple[str | int, ...], str]]]


@dataclass(frozen=True)
class JobKind:
    """A kind of job. Declaring a kind imports nothing heavy; its planner is loaded when it is first used."""

    job: type[Job]  # dataclass of the job. Its fields are the sections, lists and values of a job file
    # `module:function`; the function takes the job, what stands at its output and a `PlanRequest`, and returns a
    # `Planned`
    plan: str
    title: Callable[[Any], str]  # returns a short description of a checked job
    # headline, rows: return the figures of a plan as one line, and as a table
    headline: Callable[[Figures], str]
    rows: Callable[[Figures], list[Row]]
    # checks of values by section and key; values outside sections are in the section ""
    checks: Mapping[tuple[str, str], Check] = field(default_factory=dict)
    rules: Sequence[Rule] = ()  # rules for parts that have to agree
    execution_keys: Sequence[str] = ()  # top-level keys that only affect how the job is computed, not its result
    # names in a job file of the identity keys that are named differently there
    identity_words: Mapping[str, str] = field(default_factory=dict)
    # keys of the identity that describe the input, where `--same-input` can accept another input
    inputs: Sequence[str] = ()
    # makes_data, checks_nan: the `data` of operators are written, not read; its blocks obey `run.on_nan`, which the
    # rules refuse for other kinds
    makes_data: bool = False
    checks_nan: bool = False
    to_replace: str = "output.overwrite: true"  # text of an error: what to write to replace existing outputs
    # parts that are computed on CPUs beside a denoiser on GPUs, such as `operators and solver`
    on_cpu: str = ""
    # essentials, changes: return a stored job without the parts that may differ in a run that resumes it, and the
    # parts that are stored anew then
    essentials: Callable[[dict[str, Any]], dict[str, Any]] = dict
    changes: Callable[[Mapping[str, Any]], Any] = lambda _: None
    # refuses places of outputs under the kind's own keys, before any is opened
    check_places: Callable[[Any], None] = lambda _: None
    steps: Steps | None = None  # its steps, where it iterates
    revision: Revision | None = None  # part that may change while a run is not finished

    def make_plan(self, job: Any, state: OutputState, request: PlanRequest) -> Planned:
        """Plan a job of this kind; imports its planner."""
        module, _, function = self.plan.partition(":")
        planned: Planned = getattr(importlib.import_module(module), function)(job, state, request)
        return planned


@dataclass(frozen=True)
class PlanRequest:
    """Options of planning."""

    fresh: bool = False  # ignore what an earlier run left
    same_input: bool = False  # accept the input as the same image as that of the run to resume
    probe: bool = False  # try the device also where nothing has to be decided, in every precision
    makes_folder: bool = False  # the command makes the folder of the output where only that is missing
    report: Report = no_report  # called with a line about each slow operation


@dataclass(frozen=True)
class JobOutput:
    """Something that a job writes, with a journal of its own."""

    path: OutputPath
    layout: AnyLayout  # everything about it except its content
    grid: Grid  # blocks of the pass that writes it
    overwrite: bool = False  # replace what exists at the path
    key: str = "output.path"  # key of the path in the job


@dataclass(frozen=True)
class OutputArray(JobOutput):
    """An array that a job writes."""

    layout: Layout


@dataclass(frozen=True)
class OutputFile(JobOutput):
    """A file that a job writes as a whole."""

    path: Path
    layout: FileLayout


@dataclass(frozen=True)
class Records:
    """Journal and sums of a pass that writes scratch arrays, stored beside these."""

    folder: Path  # folder of the journal and the sums
    name: str  # name of the pass within that folder
    # scratch arrays that the pass writes, in the order of the task's images
    arrays: Sequence[OutputPath] = ()
    layout: Layout | None = None  # layout of each array


@dataclass(frozen=True)
class Pass:
    """One pass over the blocks of a grid."""

    phase: str  # name of the pass in `passes`, and on the dashboard
    task: BlockTask  # work of a worker on a block
    records: JobOutput | Records  # place of the journal: an output, or a folder of scratch arrays
    number: int = 0  # number of the pass among those of its phase
    title: str = ""  # text that identifies the pass after a message, such as `" in iteration 3 of 20"`
    iteration: int | None = None  # number in the dashboard's groups
    task_seconds: float | None = None  # minimum duration of a task
    seconds_per_block: float | None = None  # estimate from a trial
    blocks: int | None = None  # compute only so many blocks, the first ones
    also: tuple[JobOutput, ...] = ()  # further outputs of the same blocks, in the order of the task's images

    @property
    def grid(self) -> Grid:
        """Blocks of the pass."""
        return self.task.grid


@dataclass(frozen=True)
class Gather:
    """One sum over terms, added by a tree in an order fixed by term number."""

    phase: str  # name of the phase in `passes` that the sum belongs to
    work: TermWork  # work of a worker on the terms
    terms: Sequence[Numbered]  # terms in the order in which they are added
    read_bytes: int  # bytes that each task reads
    folder: Path  # folder of the partial sums while they are needed
    records: Records  # journal, of a single block, and sums
    number: int = 0  # number, title: as of `Pass`
    title: str = ""


@dataclass(frozen=True)
class RankProgram:
    """A program of one rank on each worker, with a checkpoint."""

    phase: str  # name of the phase in `passes`, whose blocks are the steps of the program
    # called on each worker with its `TorchGroup`. It goes on from its checkpoint
    program: Callable[[Any], None]
    records: Records  # journal of a single block, all steps, and the folder of the checkpoint
    # steps_done: return the number of finished steps; keep_checkpoint: keep the checkpoint, as the input is unchanged;
    # restore_checkpoint: return to the one kept before that
    steps_done: Callable[[], int]
    keep_checkpoint: Callable[[], None]
    restore_checkpoint: Callable[[], None]
    device: str = "cpu"  # device, number, title: `cpu` or `cuda`; others as of `Pass`
    number: int = 0
    title: str = ""


AnyPass = Pass | Gather | RankProgram  # a part of a job, which the driver takes through a cluster


@dataclass(frozen=True)
class Sums:
    """Totals of a finished pass."""

    # sums over all blocks, exact and independent of the order in which the blocks were done
    values: Mapping[str, float | NDArray[np.float64]]
    digests: tuple[str, ...] = ()  # digest of each array that was written
    seconds: float = 0.0  # duration of a pass over blocks, from the moment when the workers were ready


@dataclass(frozen=True)
class PassCount:
    """A phase of a job: at most this number of passes over a grid, or 0 for one that the progress leaves out."""

    phase: str
    grid: Grid
    times: int = 1


class RunView(Protocol):
    """The run of a job, as its generator of passes sees it."""

    @property
    def directory(self) -> RunDirectory:
        """The run directory; scratch arrays go into its state folder."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the identity that checkpoints are tied to."""
        ...

    def report(self, line: str) -> None:
        """Show a line to whoever watches the run, and log it."""
        ...

    def report_row(self, rows: Sequence[Mapping[str, float]], total: int) -> None:
        """Report the figures of all iterations so far, out of at most ``total``."""
        ...


class InspectedPlace(NamedTuple):
    """A part of an image, (channels, rows, columns), as the report of a run shows it."""

    title: str
    before: NDArray[Any]
    after: NDArray[Any]
    residual: NDArray[Any]  # in noise levels


@dataclass(frozen=True)
class Inspection:
    """Figures of a finished result, from a few places of it."""

    figures: Figures = field(default_factory=dict)  # by name, for programs
    rows: Sequence[Row] = ()  # same as a table shows them
    warnings: Sequence[str] = ()  # sentences about what the user may not have wanted
    places: Sequence[InspectedPlace] = ()


class Work(ABC):
    """A planned job: its outputs, its passes, and the generator that yields them."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[JobOutput, ...]:
        """The arrays and files that are written; the run directory is beside the first."""

    @property
    @abstractmethod
    def passes(self) -> tuple[PassCount, ...]:
        """All phases in order, for progress and remaining time."""

    @property
    def keeps_state(self) -> bool:
        """True where scratch arrays are kept after the run has finished."""
        return False

    def is_outdated(self, directory: RunDirectory) -> bool:
        """Return True where the outputs hold an earlier result of this job that has to be computed again."""
        return False

    def inspect(self, seconds: float = 0.0, pixel_seconds: float = math.inf) -> Inspection:
        """Inspect a few places of finished outputs; the cost is small beside a run.

        ``seconds``: duration of the run; ``pixel_seconds``: its speed on one worker.
        """
        return Inspection()

    @abstractmethod
    def run(self, at: RunView) -> Generator[AnyPass, Sums, None]:
        """Yield passes until every output is written. Finished ones may be yielded again: journals skip them."""


def kind_names() -> list[str]:
    """Return every word that may follow ``job:``.

    >>> "denoise" in kind_names()
    True
    """
    return names("jobs")


def find_kind(name: str) -> JobKind:
    """Return the kind of this name.

    >>> find_kind("denoise").job.__name__
    'Denoising'
    """
    module = find("jobs", name)
    kind = getattr(module, "KIND", module)
    if not isinstance(kind, JobKind):
        raise ConfigError(f"the plug-in {name} declares no KIND of job. Repair or uninstall it.")
    return kind


def kind_of(job: Job) -> JobKind:
    return find_kind(job.kind)


def kinds() -> Mapping[str, JobKind]:
    """Return all kinds by name."""
    return {name: find_kind(name) for name in kind_names()}


J = TypeVar("J", bound=Job)
Footprint = Mapping[str, int]  # bytes that one worker holds at once, by purpose


@dataclass(frozen=True)
class Need:
    """Memory that one worker holds at once in one kind of task."""

    what: str  # task, such as `one block of [512, 512]`
    parts: Footprint  # projected peak, by purpose
    smaller: str = ""  # what to write instead, as the end of a sentence
    remedy: str = ""  # sentences with what to write instead, where these are others
    remark: str = ""  # further remark

    @property
    def total_bytes(self) -> int:
        """The projected peak."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Describe the largest parts, largest first."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{bytes_text(count)} are {purpose}" for purpose, count in largest if count)

    def refusal(self) -> str:
        """Return what is needed, its parts, and what to write instead."""
        remedy = self.remedy or f"Write run.memory_per_worker: {-(-self.total_bytes // 2**20)}MiB, or {self.smaller}."
        return f"{self.what} needs {bytes_text(self.total_bytes)}, including {self.describe()}.{self.remark} {remedy}"


class Requested(NamedTuple):
    """The number of workers that a job asked for, and why the plan has another.

    Parameters
    ----------
    workers : int or "auto"
        The number as written.
    why : str
        The reason in a few words; empty where the plan has the number as written.
    """

    workers: int | Auto
    why: str


@dataclass(frozen=True)
class Placement(Generic[J]):
    """Workers and device of a job."""

    job: J  # job with its number of workers decided
    requested: Requested  # number of workers that was asked for
    cluster: Cluster  # cluster of the workers
    device: str  # device, precision: device and precision of the denoiser
    precision: str
    ignored: tuple[str, ...]  # notes on settings that have no effect
    machine_bytes: int | None  # memory that the workers share; None where they run on other machines

    @property
    def on_gpu(self) -> bool:
        """True where GPUs compute."""
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Decisions of a kind of job on its plan; :func:`~halotile.graphs.plans.plan.make_plan` adds what all plans have."""

    # job with its number of workers decided, and the cluster: that of the job, or a better one where the job leaves
    # that open
    placement: Placement[Any]
    work: Work  # its outputs and passes
    identity: dict[str, Any]  # everything that can change a bit of an output
    needs: tuple[Need, ...]  # memory of a worker in each kind of task
    figures: Mapping[str, Any]  # figures of the kind of job, by name
    sources: tuple[Source, ...]  # arrays that workers read
    smaller: str  # advice by which a worker needs less, as the end of a sentence
    files: tuple[Path, ...] = ()  # other files that the job reads
    notes: tuple[str, ...] = ()  # sentences about trial results, or what the result will lack or cost
    scratch_bytes: int = 0  # scratch_bytes, scratch_inodes: size and files of scratch arrays, at most
    scratch_inodes: int = 0
    smaller_output: str = ""  # advice by which the output becomes smaller, as the end of a sentence
    # given, decided: parts of the job that a job file writes differently, and those whose values were decided
    given: Mapping[str, Any] = field(default_factory=dict)
    decided: Mapping[str, Any] = field(default_factory=dict)
    # returns notes for a run that goes on with an earlier one
    notes_of_resumed: Callable[[], Sequence[str]] = tuple
    discards_others: bool = False  # earlier run of another job is discarded

    @property
    def job(self) -> Any:
        """The job with its number of workers decided."""
        return self.placement.job

    @property
    def cluster(self) -> Cluster:
        """Cluster of the workers."""
        return self.placement.cluster


@dataclass(frozen=True)
class OutputState:
    """The first output of a job, and the plan that an earlier run left there."""

    output: OutputPath  # its absolute path, or its place in a store
    directory: RunDirectory  # directory beside it
    previous: dict[str, Any] | None  # plan of an earlier run of this kind of job
    other_kind: str | None = None  # kind of an earlier run of another job
