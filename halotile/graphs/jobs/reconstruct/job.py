"""The job ``reconstruct`` as plain frozen values, its continuation by iterations of earlier runs, and its plan as text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from halotile.errors import ResumeRefused
from halotile.graphs.kinds.base import Figures, IterationRows, Row
from halotile.graphs.kinds.sections import DenoiserChoice, NamedChoice, TiledJob
from halotile.graphs.plans.rows import cost_rows, device_text, output_rows, probe_rows, tiles_text
from halotile.graphs.rules.arguments import whole_path
from halotile.graphs.rules.keys import stand_ins, written_keys
from halotile.graphs.words import bytes_text, counted, parts, shape_text
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.run_directory.json_files import Checkpoint
from halotile.tasks.options import Auto, OwnPath, ReadPath

if TYPE_CHECKING:
    from halotile.graphs.solvers.base import Solver

Bounds = tuple[float | None, float | None]  # least and greatest value of a pixel; None for none


@dataclass(frozen=True, kw_only=True)
class OperatorChoice(NamedChoice):
    """An operator by name, with its options and its measurement."""

    registry: ClassVar[str] = "operators"
    attribute: ClassVar[str] = "OPERATOR"
    hidden: ClassVar[tuple[str, ...]] = ("normal",)

    name: str
    """Name of a file in halotile.tasks.operators or of a plug-in."""
    data: ReadPath
    """The measurement: anything that can be the input of a denoising job."""
    noise_sigma: float | ReadPath = 1.0
    """Standard deviation of the noise of the measurement, which is weighted by 1 / noise_sigma²; a path: an image with that of each pixel, 0 where nothing was measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that operator; an operator object from a script is under ``operator``."""

    @classmethod
    def nested(cls, written: Mapping[str, Any]) -> Self:
        """Return an operator inside another one, which has no measurement of its own."""
        return cls.from_mapping({"data": "", **written})


def weighed(choices: Iterable[OperatorChoice]) -> tuple[OperatorChoice, ...]:
    """Return measurements with a noise level of 1 where a script gave none."""
    levels: list[tuple[OperatorChoice, Any]] = [(choice, choice.noise_sigma) for choice in choices]
    return tuple(replace(choice, noise_sigma=1.0) if level is None else choice for choice, level in levels)


@dataclass(frozen=True, kw_only=True)
class FidelityChoice(NamedChoice):
    """The data fidelity of the measurements by name, with its options."""

    registry: ClassVar[str] = "fidelities"
    attribute: ClassVar[str] = "FIDELITY"

    name: str = "l2"
    """Name of a file in halotile.tasks.fidelities or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that fidelity."""


@dataclass(frozen=True, kw_only=True)
class PriorChoice(NamedChoice):
    """The prior of the image by name, with its options."""

    registry: ClassVar[str] = "priors"
    attribute: ClassVar[str] = "PRIOR"

    name: str = "none"
    """Name of a file in halotile.tasks.priors or of a plug-in."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that prior."""


@dataclass(frozen=True, kw_only=True)
class SolverChoice(NamedChoice):
    """The solver by name, its iterations, and its options."""

    registry: ClassVar[str] = "solvers"
    attribute: ClassVar[str] = "SOLVER"
    hidden: ClassVar[tuple[str, ...]] = ("lanczos",)

    name: str = "pgd"
    """Name of a file in halotile.graphs.solvers or of a plug-in."""
    iterations: int = 20
    """Iterations at most."""
    step: float | Auto = "auto"
    """Step size; auto: 1 / |A|²."""
    tol: float = 0.0
    """Stop when the image changes by less than this, relative to its length."""
    checkpoint_every: int = 1
    """Iterations between two checkpoints, up to 4. More than 1: one pass makes so many, and the images between are not stored."""
    keep_state: bool = False
    """Keep the solver's images after the last iteration, so that more can follow."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that solver."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction(TiledJob):
    """A reconstruction job."""

    kind: ClassVar[str] = "reconstruct"

    operators: tuple[OperatorChoice, ...]
    fidelity: FidelityChoice = field(default_factory=FidelityChoice)
    prior: PriorChoice = field(default_factory=PriorChoice)
    solver: SolverChoice = field(default_factory=SolverChoice)
    shape: tuple[int, ...] | Auto = "auto"
    """Shape of the image in pixels; auto: that of the measurements."""
    start: ReadPath | None = None
    """An image to start from; zeros if left out."""
    reference: ReadPath | None = None
    """The true image, to report the PSNR of every iteration: with a peak of 1 for floats, of the range for integer types."""
    bounds: Bounds | Auto = "auto"
    """Least and greatest value of a pixel, null for none; auto: 0 and none for counts, otherwise none."""
    exact: bool = False
    """Use the plain form of the gradient and direct convolutions only."""
    fuse: bool | Auto = "auto"
    """Compute operators and denoiser in one pass over the image; auto: where this computes little twice."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", weighed(self.operators))


def shortened(job: Reconstruction, rows: int) -> Reconstruction:
    """Return a job that ends after at most so many rows of figures, one for each pass of the solver."""
    iterations = min(job.solver.iterations, rows * job.solver.checkpoint_every)
    return replace(job, solver=replace(job.solver, iterations=iterations))


SHOWN = 8  # number of operators that are listed one by one; `--json` has all


def title(job: Reconstruction) -> str:
    """Describe a job in a few words."""
    return f"{job.solver.name} with {counted(len(job.operators), 'operator')} to {job.output.path}"


def plan_rows(figures: Figures) -> list[Row]:
    """Return the figures of ``Plan.summary()`` as rows, in the order of the questions they answer."""
    return [
        *_operator_rows(figures),
        ("output", str(figures["output"])),
        ("", f"{shape_text(figures['shape'])} {figures['dtype']}"),
        ("fidelity", str(figures["fidelity"])),
        ("form", str(figures["form"])),
        ("prior", _prior(figures)),
        ("solver", _solver(figures)),
        ("", ""),
        *output_rows(figures),
        *([("tiles", tiles_text(figures))] if "tile" in figures else []),
        ("halo", f"{figures['halo']} pixels, {figures['read_amplification']:.2f} × the image is read"),
        ("iteration", traffic_text(figures)),
        ("", ""),
        *cost_rows(figures),
        *probe_rows(figures),
    ]


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    operators, workers = counted(len(figures["operators"]), "operator"), counted(figures["workers"], "worker")
    form = str(figures["form"]).partition(",")[0]
    per_pass = figures["per_pass"]
    passes = "of" if per_pass == 1 else f"in passes of {per_pass} over"
    return (
        f"{figures['solver']}: {shape_text(figures['shape'])} {figures['dtype']} from {operators} ({form} form), "
        f"prior {prior_text(figures)}; {counted(figures['iterations'], 'iteration')} {passes} "
        f"{counted(figures['blocks'], 'block')}, {workers}"
    )


def _operator_rows(figures: Figures) -> list[Row]:
    pairs = list(zip(figures["operators"], figures["data"], strict=True))
    lines = [f"{name} of {data}" for name, data in pairs[:SHOWN]]
    if unlisted := Counter(name for name, _ in pairs[SHOWN:]):
        lines.append("and " + ", ".join(f"{count:,} × {name}" for name, count in unlisted.items()))
    return [("" if number else "operators", line) for number, line in enumerate(lines)]


def prior_text(figures: Figures) -> str:
    """Describe the prior in a word or two.

    >>> prior_text({"prior": "pnp", "denoiser": "dncnn"}), prior_text({"prior": "tv", "denoiser": None})
    ('pnp with dncnn', 'tv')
    """
    return f"{figures['prior']} with {figures['denoiser']}" if figures["denoiser"] else str(figures["prior"])


def _prior(figures: Figures) -> str:
    """Describe the prior, and the device that computes it."""
    return f"{prior_text(figures)}, {device_text(figures)}" if "tile" in figures else prior_text(figures)


def _solver(figures: Figures) -> str:
    iterations = f"{figures['solver']}, {counted(figures['iterations'], 'iteration')} at most"
    before = figures["passes_before"]
    if not before:
        return iterations
    return f"{iterations}, after {'one pass' if before == 1 else f'at most {before} passes'} that prepare them"


def traffic_text(figures: Figures) -> str:
    """Describe the bytes that an iteration moves, in its number of passes, compared with the other number.

    >>> one = {"passes": 1, "iteration_bytes": 3 * 2**20, "iteration_bytes_fused": 3 * 2**20, "computed_twice": 0.06}
    >>> one["per_pass"] = 1
    >>> traffic_text(one | {"iteration_bytes_unfused": 5 * 2**20})
    '3 MiB read and written in one pass, which computes 6 % of the gradient twice; in two, 5 MiB'
    >>> traffic_text(one | {"iteration_bytes_unfused": None})
    '3 MiB read and written in one pass'
    >>> traffic_text(one | {"iteration_bytes_unfused": None, "per_pass": 2})
    '3 MiB read and written for each of 2 in one pass, which computes 6 % of the gradient twice'
    """
    moved = f"{bytes_text(figures['iteration_bytes'])} read and written"
    twice = f"{figures['computed_twice']:.0%} of the gradient twice".replace("%", " %")
    if figures["per_pass"] > 1:
        return f"{moved} for each of {figures['per_pass']} in one pass, which computes {twice}"
    if figures["iteration_bytes_unfused"] is None:
        return f"{moved} in one pass"
    if figures["passes"] == 1:
        other_bytes = bytes_text(figures["iteration_bytes_unfused"])
        return f"{moved} in one pass, which computes {twice}; in two, {other_bytes}"
    other_bytes = bytes_text(figures["iteration_bytes_fused"])
    return f"{moved} in two passes; in one, {other_bytes}, but {twice}"


def with_whole_paths(job: Reconstruction) -> Reconstruction:
    """Return a job in which every path that is read is absolute."""
    start, reference = (
        path and whole_path(key, path) for key, path in (("start", job.start), ("reference", job.reference))
    )
    prior = replace(job.prior, options=_whole_options(job.prior, job.prior.options))
    operators = tuple(map(whole_choice, job.operators))
    return replace(job, operators=operators, prior=prior, start=start, reference=reference)


def whole_choice(choice: OperatorChoice) -> OperatorChoice:
    """Return a measurement in which every path is absolute."""
    level: Any = choice.noise_sigma
    if isinstance(level, str) and level != "auto":
        level = whole_path("noise_sigma", level)
    options = _whole_options(choice, choice.options)
    return replace(choice, data=whole_path("data", choice.data), noise_sigma=level, options=options)


def _whole_options(choice: NamedChoice, options: Any) -> dict[str, Any]:
    """Return the options of a choice with absolute paths, those of nested choices included."""
    if "operator" in options or choice.name not in choice.accepted():
        return dict(options)
    declared = choice.declared(choice.name)
    keys, kinds = written_keys(declared), stand_ins(declared)
    paths = {key for key, kind in keys.items() if {ReadPath, OwnPath} & {*parts(kind.type)}}
    whole = {
        key: whole_path(key, value)
        for key, value in options.items()
        if key in paths and isinstance(value, str | os.PathLike)
    }
    return {key: _whole_option(value, kinds.get(key), type(choice)) for key, value in options.items()} | whole


def _whole_option(value: Any, kind: str | None, choice: type[NamedChoice]) -> Any:
    if kind == "operators" and isinstance(value, list | tuple):
        return [_whole_mapping(inner, choice) for inner in value]
    return _whole_mapping(value, DenoiserChoice) if kind == "denoiser" else value


def _whole_mapping(written: Any, choice: type[NamedChoice]) -> Any:
    if isinstance(written, DenoiserChoice):
        return replace(written, options=_whole_options(written, written.options))
    if not (isinstance(written, dict) and "name" in written):
        return written
    inner = {key: value for key, value in written.items() if key != "name"}
    named = choice.nested(written)
    return {"name": written["name"], **_whole_options(named, inner)}


ITERATE = "iterate"  # folder of the solver's state


def end_of(rows: IterationRows, choice: SolverChoice, solver: Solver) -> int | None:
    """Return the iteration that a solver ends with, if the rows are enough to decide it.

    >>> from halotile.graphs.solvers.base import SolverBase
    >>> rows = [{"iteration": n, "change": change} for n, change in enumerate((0.5, 0.1, 0.02), 1)]
    >>> [end_of(rows, SolverChoice(iterations=n, tol=tol), SolverBase()) for n, tol in ((3, 0.0), (2, 0.0), (9, 0.2), (9, 0.0))]
    [3, 2, 2, None]
    """
    ends = (row for row in rows if row["iteration"] == choice.iterations or solver.is_done(choice.tol, row))
    return next((int(row["iteration"]) for row in ends), None)


def last_of(rows: IterationRows) -> int:
    """Return the number of the last iteration of the rows; 0 where there are none.

    >>> last_of([{"iteration": 2}, {"iteration": 4}]), last_of([])
    (4, 0)
    """
    return int(rows[-1]["iteration"]) if rows else 0


@dataclass(frozen=True)
class Reached:
    """Iterations that earlier runs reached."""

    rows: IterationRows  # figures of each iteration
    written: int  # iteration whose image the output holds, or is about to hold; 0 before the first is written
    has_state: bool  # the solver's images exist, so that more iterations can follow

    @classmethod
    def from_run(cls, directory: RunDirectory) -> Reached:
        """Return the iterations that a run directory records."""
        stored = Checkpoint(directory.state_path / ITERATE / "checkpoint").read()
        written = directory.read_output_iterations()
        # A run that only repairs its output iterates again, and is behind the iterations that it has reported
        # already.
        rows = max((stored or {}).get("rows", []), written, key=len)
        return cls(rows, last_of(written), stored is not None)

    @property
    def iterations(self) -> int:
        return last_of(self.rows)


def note_of(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> tuple[str, ...]:
    """Return notes on a run that continues the iterations of an earlier one."""
    reached = Reached.from_run(directory)
    end, done = end_of(reached.rows, choice, solver), counted(reached.iterations, "iteration")
    if end == reached.iterations or not reached.rows:
        return ()
    if end is not None:
        raise ResumeRefused(
            f"{directory.path} has done {done}; with solver.iterations: {choice.iterations} and solver.tol: {choice.tol:g} "
            f"it would have ended after {end}, whose image is gone. Write solver.iterations: {reached.iterations} or "
            "more with a smaller tol, or run with --fresh to start over."
        )
    if not reached.has_state:
        raise ResumeRefused(
            f"{directory.path} finished after {done}, and the state of its solver was removed: "
            "it cannot go on from there. Run with --fresh to start over, with solver.keep_state: true if you may want "
            "more iterations later; or write another output.path, and the path of this output as start, to begin at its image."
        )
    at_most = counted(choice.iterations, "iteration")
    are = "is" if reached.iterations == 1 else "are"
    return (f"{done} {are} done; goes on from there to {at_most} at most, with the bits of one run",)


def is_gone(directory: RunDirectory) -> bool:
    """Return True where an image was written and the solver's images are gone: it is iterated from the start."""
    reached = Reached.from_run(directory)
    return reached.written > 0 and not reached.has_state


def is_behind(directory: RunDirectory, choice: SolverChoice, solver: Solver) -> bool:
    """Return True where the output holds the image of another iteration than the requested one."""
    reached = Reached.from_run(directory)
    return end_of(reached.rows, choice, solver) != reached.written


def identity_of(solver: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a solver that can change an iterate: not their number, nor which are kept."""
    return {key: value for key, value in solver.items() if key not in ("iterations", "tol", "keep_state")}


def essentials(job: dict[str, Any]) -> dict[str, Any]:
    """Return a stored job without the parts that may differ between an earlier run and one that resumes it."""
    parts = dict(job)
    if "solver" in parts:
        parts["solver"] = identity_of(parts["solver"])
    return parts


def changes(job: Mapping[str, Any]) -> Any:
    """Return the part of a stored job that a resumed run stores anew: it may continue to another end."""
    return job.get("solver")
