"""A job run from the command line, for one image or for many: its plan, and its output before, during and after the run."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import typer

from halotile.cli import exits
from halotile.cli.arguments import RunOptions
from halotile.cli.screens.outcome_rows import look_rows, outcome_json, outcome_rows
from halotile.cli.screens.progress_report import make_report
from halotile.cli.screens.screen import complain, echo, print_json, print_rows
from halotile.cli.status import MOST_ROWS, unlisted_row
from halotile.errors import ConfigError, HalotileError, OutputInUse
from halotile.graphs.clusters.base import AUTO, DEFAULT
from halotile.graphs.clusters.common.cluster_kind import cluster_kind_of, is_other_copy
from halotile.graphs.clusters.launches.batch_system import system_of, worker_script
from halotile.graphs.clusters.ranks import as_first, serve
from halotile.graphs.clusters.workers.fork_server import ensure_forks, expect_no_workers
from halotile.graphs.jobs.reconstruct.job import Reconstruction
from halotile.graphs.jobs.simulate.job import NoiseChoice, Simulation, simulation_of
from halotile.graphs.kinds.base import Row
from halotile.graphs.kinds.sections import Job, jobs_of, takes_many
from halotile.graphs.plans.plan import Plan, make_plan
from halotile.graphs.runs.claim import check_outputs, count_done
from halotile.graphs.waiting import no_report
from halotile.graphs.words import bytes_text, counted, first_line, rate_text, seconds_text
from halotile.storage.disk.object_path import full_path
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.groups.opening import copy_of

if TYPE_CHECKING:  # it imports dask, which plans do without
    from halotile.graphs.runs.driver import ManyOutcomes, ManyPlans


def show(job: Job, asked: RunOptions) -> None:
    """Print what a run would do, and the script of a worker in a batch job; nothing is started or written."""
    if takes_many(job):
        show_images(job, asked)
        return
    expect_no_workers()
    plan = make_plan(job, fresh=asked.fresh, same_input=asked.same_input, report=complain)
    figures = plan.summary() | {"resumed_blocks": count_done(plan)}
    system = system_of(cluster_kind_of(plan.cluster).name)
    script = worker_script(system, plan.run, plan.cluster, plan.run_directory) if system else None
    if asked.as_json:
        print_json({"script": script, "plan": figures})
        return
    if script is not None:
        echo(script)
    print_rows("plan", plan.kind.rows(figures))


def show_plan(job: Job, asked: RunOptions, *, probe: bool) -> None:
    """Print what a run would do and cost, and raise the reason where it is refused."""
    if takes_many(job):
        if probe:
            raise ConfigError("--probe tries one image. Write one of those that match: --set input.path=FILE")
        show_images(job, asked)
        return
    expect_no_workers()
    again = {"fresh": asked.fresh, "same_input": asked.same_input}
    plan = make_plan(job, **again, probe=probe, refuse=False, report=complain)
    kind, figures, refusal = cluster_kind_of(plan.cluster), plan.summary() | {"resumed_blocks": 0}, None
    if kind.name != DEFAULT or plan.cluster.kind == AUTO:
        figures["cluster"] = f"{kind.name} ({kind.why})"
    try:
        figures["resumed_blocks"] = count_done(plan)
    except HalotileError as error:
        refusal = error
    if asked.as_json:
        print_json(figures)
    else:
        print_rows("plan", plan.kind.rows(figures))
    plan.check_fits()
    if refusal is not None:
        raise refusal


def show_images(job: Job, asked: RunOptions) -> None:
    """Print what a run would do for each image; nothing is started or written."""
    expect_no_workers()
    many = plan_images(job, asked, quiet=asked.as_json)
    if asked.as_json:
        print_json(figures_of(many))
    else:
        print_rows("plan", plan_rows(many))
    many.check_disk()
    name_failures(many.failed)
    _end(many.failed, len(many.plans))


def go(job: Job, asked: RunOptions, *, quiet: bool = False) -> None:
    """Run a job, for each image where there are many; an interrupted run is resumed."""
    if takes_many(job):
        go_through_images(job, asked, quiet=quiet)
        return
    if is_other_copy(job.cluster):
        serve(RunDirectory.beside(job.place).path)
        return
    _import_for_workers(job)
    from halotile.graphs.runs.driver import run

    with _among_copies(job):
        report_line = no_report if quiet else complain
        plan = make_plan(job, fresh=asked.fresh, same_input=asked.same_input, report=report_line)
        check_outputs(plan)
        planned = time.perf_counter()
        if not quiet:
            complain(plan.kind.headline(plan.summary()))
            for note in plan.summary()["notes"]:
                complain(f"note: {note}")
        with make_report(quiet=quiet) as report:
            outcome = run(plan, observer=report)
    times = planned - asked.began, time.perf_counter() - asked.began
    if asked.as_json:
        print_json(outcome_json(outcome, *times))
    elif not quiet:
        title = "finished, except the bad blocks" if outcome.quarantined else "finished"
        print_rows(title, outcome_rows(outcome, *times))
    if quiet:  # the report said nothing, and a result that may be wrong is no news to leave out
        for warning in outcome.inspection.warnings:
            complain(f"warning: {warning}")
    for bad in outcome.quarantined:
        where = f"index {bad.index}, region {bad.region.start}–{bad.region.stop}"
        complain(f"quarantined: block {bad.number} ({where}): {first_line(bad.error)}")
    if outcome.quarantined:
        raise typer.Exit(exits.QUARANTINED)


def _import_for_workers(job: Job) -> None:
    """Begin to import what workers on this machine need, in the process that they are forked from, while the job is planned."""
    if cluster_kind_of(job.cluster).traits.is_here:
        ensure_forks()


def _among_copies(job: Job) -> AbstractContextManager[None]:
    """Notify the other copies of the command of its end, if this is the first of several."""
    of_copies = cluster_kind_of(job.cluster).traits.of_copies and copy_of() is not None
    return as_first() if of_copies else nullcontext()


def simulation(job: Job, noise: NoiseChoice, *, overwrite: bool) -> Simulation:
    """Return the job that simulates the measurements of another."""
    if not isinstance(job, Reconstruction):
        raise ConfigError(f"job is {job.kind}: measurements are simulated of a reconstruction. Write job: reconstruct.")
    if is_other_copy(job.cluster):
        raise ConfigError("simulate is a command for one copy. Start it without mpirun and srun.")
    return simulation_of(job, noise, overwrite=overwrite)


def figures_of(many: ManyPlans) -> dict[str, Any]:
    """Return the plans for programs."""
    images = {path: plan.summary() for path, plan in many.plans.items()}
    return {"images": images, "failed": _errors(many.failed), "planned_later": len(many.later)}


def go_through_images(
    job: Job, asked: RunOptions, *, quiet: bool = False, directory: RunDirectory | None = None, since: float = math.inf
) -> None:
    """Run a job for each image; interrupted ones are resumed, and those that fail are named at the end.

    In a batch job, ``directory`` keeps the status of all images, and ``fresh`` is for images that were not begun ``since`` its submission.
    """
    _import_for_workers(job)
    from halotile.graphs.runs.driver import run_many

    many = plan_images(job, asked, quiet=quiet, since=since)
    many.check_disk()
    planned = time.perf_counter()
    if not quiet:
        for note in _notes(many):
            complain(f"note: {note}")
    name_failures(many.failed)
    numbers = {path: number for number, path in enumerate(many.paths, 1)}

    def introduce(path: str, plan: Plan) -> str:
        which = f"image {numbers[path]} of {len(numbers)}, {_name(path)}"
        return f"{which}: {plan.kind.headline(plan.summary())}"

    with make_report(quiet=quiet) as report:
        ended = run_many(many, observer=report, introduce=introduce, directory=directory)
    times = planned - asked.began, time.perf_counter() - asked.began
    if asked.as_json:
        images = {path: outcome_json(outcome, *times) for path, outcome in ended.outcomes.items()}
        print_json({"images": images, "failed": _errors(ended.failed)})
    elif not quiet:
        title = "finished, except the images below" if ended.failed else "finished"
        print_rows(title, _rows(ended, *times))
    bad = {path: outcome.quarantined for path, outcome in ended.outcomes.items() if outcome.quarantined}
    for path, blocks in bad.items():
        complain(f"quarantined: {counted(len(blocks), 'block')} of {path}: {first_line(blocks[0].error)}")
    if quiet:
        _name_warnings(ended)
    if asked.as_json or quiet:
        name_failures({path: error for path, error in ended.failed.items() if path not in many.failed})
    for error in ended.failed.values() if directory else ():
        if isinstance(error, OutputInUse):
            raise error
    _end(ended.failed, len(ended.outcomes), is_bad=bool(bad))


def plan_images(job: Job, asked: RunOptions, *, quiet: bool, since: float = math.inf) -> ManyPlans:
    """Plan each image; ``fresh`` is for those that were not begun ``since``."""
    from halotile.graphs.runs.driver import plan_many
    from halotile.graphs.submission import has_begun

    if copy_of() is not None:
        raise ConfigError(
            "input.path is a pattern, which one copy of the command takes. Start it without mpirun and srun."
        )
    report_line = no_report if quiet else complain

    def planned(one: Job) -> Plan:
        anew = asked.fresh and not has_begun(RunDirectory.beside(full_path(one.place)), since)
        plan = make_plan(one, fresh=anew, same_input=asked.same_input, makes_folder=True, report=report_line)
        if plan.output.parent.is_dir():
            check_outputs(plan)
        return plan

    return plan_many(jobs_of(job), planned)


def plan_rows(many: ManyPlans) -> list[Row]:
    plans = many.plans.values()
    shown, count = list(many.plans.items())[:MOST_ROWS], len(many.paths)
    listed = [(_name(path), plan.kind.headline(plan.summary())) for path, plan in shown]
    unlisted = [("", f"and {count - MOST_ROWS:,} more")] if count > MOST_ROWS else []
    about = "about " if many.later else ""
    workers = counted(max(plan.run.count for plan in plans), "worker")
    return [
        *listed,
        *unlisted,
        ("", ""),
        ("images", f"{count:,}, one after the other on {workers}"),
        ("blocks", f"{about}{round(many.ratio * sum(plan.blocks for plan in plans)):,}"),
        ("outputs", f"{about}{bytes_text(round(many.ratio * sum(plan.output_bytes for plan in plans)))} at most"),
        ("memory", f"{bytes_text(max(plan.memory_bytes for plan in plans))} in one worker at most"),
        *(("note", note) for note in _notes(many)),
    ]


def _notes(many: ManyPlans) -> list[str]:
    """Return the notes of the plans, one of each form: with other numbers it is about other images; and folders that are made."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for path, plan in many.plans.items():
        for note in plan.notes:
            alike.setdefault(re.sub(r"[0-9.]+", "", note), []).append((path, note))
    notes = [*_odd_channels(many), *(_of_images(each, len(many.plans)) for each in alike.values())]
    if many.later:
        planned = f"{len(many.plans) + len(many.failed):,} images of the {len(many.paths) + len(many.failed):,}, spread evenly"
        notes.append(f"this is the plan of {planned}: the others are planned when their turn comes")
    if new := many.new_folders:
        others = f", and {counted(len(new) - 1, 'other')}" if new[1:] else ""
        notes.insert(0, f"there is no folder {new[0]} yet: the run makes it{others}")
    return notes


def _odd_channels(many: ManyPlans) -> list[str]:
    """Return a note on images with another number of channels than most."""
    sources = {path: plan.sources[0] for path, plan in many.plans.items() if plan.sources}
    forms = {path: dict(zip(one.axes, one.shape, strict=True)) for path, one in sources.items()}
    counts = {path: form.get("c", 1) for path, form in forms.items()}
    usual = Counter(counts.values()).most_common(1)[0][0]
    if not (odd := [path for path, count in counts.items() if count != usual]):
        return []
    more = f" (and {counted(len(odd) - 1, 'more image')} with an unusual number)" if odd[1:] else ""
    return [f"{_name(odd[0])} has {counted(counts[odd[0]], 'channel')}, and most images have {usual}{more}"]


def _of_images(alike: Sequence[tuple[str, str]], count: int) -> str:
    path, note = alike[0]
    if len(alike) == count and len({text for _, text in alike}) == 1:
        return note
    others = counted(len(alike) - 1, "other image")
    return f"{_name(path)}: {note}" + (f"; in {others} as well, each by itself" if len(alike) > 1 else "")


def _name(path: str) -> str:
    return PurePath(path).name


def _rows(ended: ManyOutcomes, plan_seconds: float, total_seconds: float) -> list[Row]:
    outcomes = ended.outcomes.values()
    done, total, resumed = (sum(getattr(one, name) for one in outcomes) for name in ("done", "total", "resumed"))
    failed = [(name, first_line(str(error))) for name, error in list(ended.failed.items())[:MOST_ROWS]]
    doubtful = [path for path, one in ended.outcomes.items() if one.inspection.warnings]
    rows = [
        ("images", f"{len(outcomes):,} of {len(outcomes) + len(ended.failed):,}"),
        *(("failed", f"{_name(path)}: {reason.removeprefix(f'{path}: ')}") for path, reason in failed),
        *unlisted_row(len(ended.failed)),
        ("blocks", f"{done:,} of {total:,} done{f', {resumed:,} of them by an earlier run' if resumed else ''}"),
    ]
    seconds = sum(one.seconds for one in outcomes)
    if done > resumed:
        pixels = sum(one.megapixels_per_second * one.seconds for one in outcomes)
        rows += [
            ("throughput", f"{rate_text(pixels / seconds)} over {seconds_text(seconds)}"),
            ("time", f"{seconds_text(total_seconds)} in total, {seconds_text(plan_seconds)} of it planning"),
            ("peak memory", f"{bytes_text(max(one.peak_memory_bytes for one in outcomes))} in one worker"),
        ]
    found = [
        (label, f"{_name(path)}: {text}")
        for path, one in list(ended.outcomes.items())[:MOST_ROWS]
        for label, text in one.inspection.rows
    ]
    rows += [(label if n == 0 else "", text) for n, (label, text) in enumerate(found)]
    if found:
        rows += unlisted_row(len(outcomes))
    if doubtful:
        more = f" and {len(doubtful) - MOST_ROWS:,} more" if len(doubtful) > MOST_ROWS else ""
        names = ", ".join(map(_name, doubtful[:MOST_ROWS])) + more
        rows.append(("warnings", f"above, for {counted(len(doubtful), 'image')}: {names}"))
    return rows + [row for one in list(outcomes)[:1] for row in look_rows(one.output)]


def _errors(failed: Mapping[str, HalotileError]) -> list[dict[str, Any]]:
    return [{"image": path, "error": str(error)} for path, error in failed.items()]


def name_failures(failed: Mapping[str, HalotileError]) -> None:
    for path, error in list(failed.items())[:MOST_ROWS]:
        complain(f"failed: {path}: {str(error).removeprefix(f'{path}: ')}")
    if len(failed) > MOST_ROWS:
        complain(f"failed: {len(failed) - MOST_ROWS:,} more; --json lists all of them")


def _name_warnings(ended: ManyOutcomes) -> None:
    """Name what is doubtful in the results of the first images that have such."""
    doubtful = {path: one.inspection.warnings for path, one in ended.outcomes.items() if one.inspection.warnings}
    for path, warnings in list(doubtful.items())[:MOST_ROWS]:
        for warning in warnings:
            complain(f"warning: {_name(path)}: {warning}")
    if len(doubtful) > MOST_ROWS:
        complain(f"warning: {counted(len(doubtful) - MOST_ROWS, 'more image')} with such results")


def _end(failed: Mapping[str, HalotileError], finished: int, *, is_bad: bool = False) -> None:
    """End with the exit code for the images that failed: that of the first error, where none was finished."""
    if failed and not finished:
        raise typer.Exit(exits.exit_code(next(iter(failed.values()))))
    if failed or is_bad:
        raise typer.Exit(exits.QUARANTINED)
