"""The job ``simulate``: measurements computed from a true image, with noise."""

from halotile.graphs.jobs.reconstruct.job import OperatorChoice
from halotile.graphs.jobs.reconstruct.rules import CHECKS, OPERATOR_RULES
from halotile.graphs.jobs.simulate.job import Simulation, check_places
from halotile.graphs.kinds.base import Figures, JobKind, Row
from halotile.graphs.plans.rows import cost_rows, output_rows
from halotile.graphs.rules.values import AtLeast, Faults, filled
from halotile.graphs.words import counted, shape_text


def title(job: Simulation) -> str:
    """Describe a job in a few words."""
    return f"{counted(len(job.operators), 'measurement')} of {job.reference}"


def headline(figures: Figures) -> str:
    """Describe a plan in one line."""
    return "\n".join(figures["measurements"])


def plan_rows(figures: Figures) -> list[Row]:
    """Return a plan as a table."""
    measurements = [("" if number else "measurements", line) for number, line in enumerate(figures["measurements"])]
    return [
        ("reference", f"{figures['reference']}, {shape_text(figures['shape'])}"),
        *measurements,
        ("", ""),
        *output_rows(figures),
        ("", ""),
        *cost_rows(figures),
    ]


def _noise_levels(operators: tuple[OperatorChoice, ...]) -> Faults:
    for number, level in enumerate(choice.noise_sigma for choice in operators):
        if isinstance(level, str):
            yield (
                ("operators", number, "noise_sigma"),
                f"{level}, and noise is simulated with one level; write a number",
            )


KIND = JobKind(
    job=Simulation,
    plan="halotile.graphs.jobs.simulate.plan:plan_simulation",
    title=title,
    headline=headline,
    rows=plan_rows,
    checks={key: CHECKS[key] for key in CHECKS if key[0] == "operators"}
    | {("", "reference"): filled, ("noise", "background"): AtLeast(0)}
    | {("output", key): AtLeast(1) for key in ("shard", "chunk")},
    rules=(*OPERATOR_RULES, _noise_levels),
    execution_keys=("exact",),
    check_places=check_places,
    makes_data=True,
    to_replace="output.overwrite: true (--overwrite of `recon-cli simulate`)",
)
