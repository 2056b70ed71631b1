"""How each kind of job is planned, and how its plan is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halotile.errors import ConfigError
from halotile.graphs.jobs.sections import AnyJob, Job, Reconstruction

if TYPE_CHECKING:
    from halotile.graphs.plans.plan import RunPlan
    from halotile.graphs.runs.outcome import Outcome


@dataclass(frozen=True)
class Engine:
    """What works on a kind of job. It is imported when it is first used: it loads Dask.

    Parameters
    ----------
    plan : callable
        ``plan(job, *, fresh, same_input, probe, refuse, report) -> RunPlan``.
    run : callable
        ``run(plan, *, observer) -> Outcome``.
    """

    plan: Callable[..., RunPlan]
    run: Callable[..., Outcome]


def engine_of(job: AnyJob) -> Engine:
    """What works on a job.

    Examples
    --------
    >>> from halotile.graphs.jobs.sections import OperatorChoice, Output
    >>> job = Reconstruction(output=Output(path="x.zarr"), operators=(OperatorChoice(name="mask", data="y.zarr"),))
    >>> engine_of(job).run.__name__
    '_reconstruct'
    """
    return _ENGINES[type(job)]


def _plan_denoising(job: Job, **options: Any) -> RunPlan:
    from halotile.graphs.jobs.denoise.plan import make_plan

    return make_plan(job, **options)


def _denoise(plan: Any, **options: Any) -> Outcome:
    from halotile.graphs.jobs.denoise.run import run

    return run(plan, **options)


def _plan_reconstruction(job: Reconstruction, *, same_input: bool = False, **options: Any) -> RunPlan:
    from halotile.graphs.jobs.reconstruct.plan import make_reconstruction_plan

    if same_input:
        raise ConfigError(
            "--same-input is for denoising: every pixel of a reconstruction comes from all of its measurements. "
            "Leave it out, or start over with --fresh."
        )
    return make_reconstruction_plan(job, **options)


def _reconstruct(plan: Any, **options: Any) -> Outcome:
    from halotile.graphs.jobs.reconstruct.run import reconstruct

    return reconstruct(plan, **options)


_ENGINES: Mapping[type, Engine] = {
    Job: Engine(_plan_denoising, _denoise),
    Reconstruction: Engine(_plan_reconstruction, _reconstruct),
}
