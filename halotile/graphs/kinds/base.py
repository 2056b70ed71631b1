"""The interface between kinds of jobs and the driver: declaration of a kind, its plan, and its passes."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from halotile.graphs.waiting import Report, no_report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halotile.graphs.kinds.sections import Job
    from halotile.graphs.plans.plan import Planned
    from halotile.graphs.plans.stages import Begun
    from halotile.storage.disk.object_path import OutputPath
    from halotile.storage.grid import Grid
    from halotile.storage.run_directory.directory import RunDirectory
    from halotile.storage.sharded.layout import Layout
    from halotile.storage.sharded.output import AnyLayout, FileLayout
    from halotile.tasks.block import BlockTask
    from halotile.tasks.contributions import Part


@dataclass(frozen=True)
class Revision:
    """A list in the identity of a job whose later entries may change: the work keeps what it computed of the first ones.

    Parameters
    ----------
    key : str
        Its key, the same in a job file.
    kept : callable
        Takes the run directory, the fingerprint and the identity; returns the number of entries, the first ones, that the run has begun. With
        any it goes on from there.
    """

    key: str
    kept: Callable[[RunDirectory, str, Mapping[str, Any]], int]


@dataclass(frozen=True)
class Steps:
    """Steps of a job. The kind reports a row of figures after each, or after several at once: see ``RunView.report_row``.

    Parameters
    ----------
    unit : str
        Name of a step, such as ``iteration``: in a row, the key of the last one's number. Its key ``seconds`` has the duration of the row.
    losses : sequence of str
        Keys of figures that ought to fall; the first of them that a row has is its loss.
    shortened : callable
        ``shortened(job, rows)`` returns the same job with at most so many rows.
    counted : str
        The unit that progress counts.
    per_epoch : callable, optional
        Returns the number of steps that go through all data once, on average, from the figures of the plan.
    drawing : str
        What its drawing shows, if it makes one.
    """

    unit: str
    losses: Sequence[str]
    shortened: Callable[[Any, int], Any]
    counted: str = "block"
    per_epoch: Callable[[Mapping[str, Any]], float] | None = None
    drawing: str = ""


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


Figures = Mapping[str, Any]
"""Figures of a plan by name, as ``plan --json`` shows them."""
IterationRows = Sequence[Mapping[str, float]]
"""Figures of each iteration, the first one first."""
Row = tuple[str, str]
"""A label and a value, as a table shows them; an empty label continues the row before."""
Check = Callable[[Any], str | None]
"""Returns the fault of a value of the right type, or None."""
Rule = Callable[..., Iterator[tuple[tuple[str | int, ...], str]]]
"""Takes parts of a job by their names and yields faults: place and message."""


@dataclass(frozen=True)
class JobKind:
    """A kind of job. Declaring a kind imports nothing heavy; its planner is loaded when it is first used.

    Parameters
    ----------
    job : type
        The dataclass of the job. Its fields are the sections, lists and values of a job file.
    plan : str
        ``module:function``; the function takes the job, what stands at its output and a :class:`PlanRequest`, and returns a :class:`Planned`.
    title : callable
        Returns a short description of a checked job.
    headline, rows : callable
        Return the figures of a plan as one line, and as a table.
    checks : mapping
        Checks of values by section and key; values outside sections are in the section "".
    rules : sequence of callable
        Rules for parts that have to agree.
    how : sequence of str
        Top-level keys that only affect how the job is computed, not its result.
    identity_words : mapping of str to str
        Names in a job file of the identity keys that are named differently there.
    inputs : sequence of str
        Keys of the identity that describe the input, where ``--same-input`` can accept another input.
    makes_data, checks_nan : bool
        The ``data`` of operators are written, not read; its blocks obey ``run.on_nan``, which the rules refuse for other kinds.
    to_replace : str
        Text of an error: what to write to replace existing outputs.
    on_cpu : str
        Parts that are computed on CPUs beside a denoiser on GPUs, such as ``operators and solver``.
    essentials, changes : callable
        Return a stored job without the parts that may differ in a run that resumes it, and the parts that are stored anew then.
    steps : Steps, optional
        Its steps, where it iterates.
    revision : Revision, optional
        The part that may change while a run is not finished.
    """

    job: type[Job]
    plan: str
    title: Callable[[Any], str]
    headline: Callable[[Figures], str]
    rows: Callable[[Figures], list[Row]]
    checks: Mapping[tuple[str, str], Check] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    how: Sequence[str] = ()
    identity_words: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    makes_data: bool = False
    checks_nan: bool = False
    to_replace: str = "output.overwrite: true"
    on_cpu: str = ""
    essentials: Callable[[dict[str, Any]], dict[str, Any]] = dict
    changes: Callable[[Mapping[str, Any]], Any] = lambda _: None
    steps: Steps | None = None
    revision: Revision | None = None

    def make_plan(self, job: Any, begun: Begun, request: PlanRequest) -> Planned:
        """Plan a job of this kind; imports its planner."""
        module, _, function = self.plan.partition(":")
        planned: Planned = getattr(importlib.import_module(module), function)(job, begun, request)
        return planned


@dataclass(frozen=True)
class PlanRequest:
    """Options of planning.

    Parameters
    ----------
    fresh : bool
        Ignore what an earlier run left.
    same_input : bool
        Accept the input as the same image as that of the run to resume.
    probe : bool
        Try the device also where nothing has to be decided, in every precision.
    makes_folder : bool
        The folder of the output is made by the command where only that one is missing.
    report : callable
        Called with a line about each slow operation.
    """

    fresh: bool = False
    same_input: bool = False
    probe: bool = False
    makes_folder: bool = False
    report: Report = no_report


@dataclass(frozen=True)
class JobOutput:
    """Something that a job writes, with a journal of its own.

    Parameters
    ----------
    path : Path or ObjectPath
        Its path.
    layout : Layout or FileLayout
        Everything about it except its content.
    grid : Grid
        Blocks of the pass that writes it.
    overwrite : bool
        Replace what exists at the path.
    key : str
        Key of the path in the job.
    """

    path: OutputPath
    layout: AnyLayout
    grid: Grid
    overwrite: bool = False
    key: str = "output.path"


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
    """Journal and sums of a pass that writes scratch arrays, stored beside these.

    Parameters
    ----------
    folder : Path
        Folder of the journal and the sums.
    name : str
        Name of the pass within that folder.
    arrays : sequence of Path
        Scratch arrays that the pass writes, in the order of the task's images.
    layout : Layout, optional
        Layout of each array.
    """

    folder: Path
    name: str
    arrays: Sequence[OutputPath] = ()
    layout: Layout | None = None


@dataclass(frozen=True)
class Pass:
    """One pass over the blocks of a grid.

    Parameters
    ----------
    phase : str
        Name of the pass in :attr:`Work.passes`, and on the dashboard.
    task : BlockTask
        Work of a worker on a block.
    records : JobOutput or Records
        Place of the journal: an output, or a folder of scratch arrays.
    number : int
        Number of the pass among those of its phase.
    title : str
        Text that identifies the pass after a message, such as ``" in iteration 3 of 20"``.
    iteration : int, optional
        Number in the dashboard's groups.
    task_seconds : float, optional
        Minimum duration of a task.
    seconds_per_block : float, optional
        Estimate from a trial.
    blocks : int, optional
        Compute only so many blocks, the first ones.
    """

    phase: str
    task: BlockTask
    records: JobOutput | Records
    number: int = 0
    title: str = ""
    iteration: int | None = None
    task_seconds: float | None = None
    seconds_per_block: float | None = None
    blocks: int | None = None

    @property
    def grid(self) -> Grid:
        """Blocks of the pass."""
        return self.task.grid


@dataclass(frozen=True)
class Gather:
    """One sum over terms, added by a tree in an order fixed by term number.

    Parameters
    ----------
    phase : str
        Name of the phase in :attr:`Work.passes` that the sum belongs to.
    work : TermWork
        Work of a worker on the terms.
    terms : sequence of Numbered
        The terms in the order in which they are added.
    read_bytes : int
        Bytes that each task reads.
    folder : Path
        Folder of the partial sums while they are needed.
    records : Records
        Journal, of a single block, and sums.
    number, title
        As of :class:`Pass`.
    """

    phase: str
    work: TermWork
    terms: Sequence[Numbered]
    read_bytes: int
    folder: Path
    records: Records
    number: int = 0
    title: str = ""


@dataclass(frozen=True)
class RankProgram:
    """A program of one rank on each worker, with a checkpoint.

    Parameters
    ----------
    phase : str
        Name of the phase in :attr:`Work.passes`, whose blocks are the steps of the program.
    program : callable
        Called on each worker with its :class:`~halotile.tasks.groups.group.TorchGroup`. It goes on from its checkpoint.
    records : Records
        Journal of a single block, all steps, and the folder of the checkpoint.
    look, keep, revert : callable
        Return the number of steps that are done; keep the checkpoint, as the input is what it was; return to the one kept before that.
    device, number, title : str, int, str
        ``cpu`` or ``cuda``; others as of :class:`Pass`.
    """

    phase: str
    program: Callable[[Any], None]
    records: Records
    look: Callable[[], int]
    keep: Callable[[], None]
    revert: Callable[[], None]
    device: str = "cpu"
    number: int = 0
    title: str = ""


AnyPass = Pass | Gather | RankProgram
"""A part of a job, which the driver takes through a cluster."""


@dataclass(frozen=True)
class Sums:
    """Totals of a finished pass.

    Parameters
    ----------
    values : mapping of str to float or ndarray
        Sums over all blocks, exact and independent of the order in which the blocks were done.
    digests : tuple of str
        Digest of each array that was written.
    seconds : float
        Duration of a pass over blocks, from the moment when the workers were ready.
    """

    values: Mapping[str, float | NDArray[np.float64]]
    digests: tuple[str, ...] = ()
    seconds: float = 0.0


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


@dataclass(frozen=True)
class Inspection:
    """Figures of a finished result, from a few places of it.

    Parameters
    ----------
    figures : mapping
        By name, for programs.
    rows : sequence of (str, str)
        The same as a table shows them.
    warnings : sequence of str
        Sentences about what the user may not have wanted.
    """

    figures: Figures = field(default_factory=dict)
    rows: Sequence[Row] = ()
    warnings: Sequence[str] = ()


class Work(ABC):
    """A planned job: its outputs, its passes, and the generator that yields them."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[JobOutput, ...]:
        """The arrays and files that are written; the run directory lies beside the first."""

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

    def inspect(self) -> Inspection:
        """Look at a few places of outputs of which every block is done; it costs little beside a run."""
        return Inspection()

    @abstractmethod
    def run(self, at: RunView) -> Generator[AnyPass, Sums, None]:
        """Yield passes until every output is written. Finished ones may be yielded again: journals skip them."""
