"""One job for many images on the command line: its plan, its run, its status."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import typer

from halotile.cli import exits
from halotile.cli.running import import_for_workers
from halotile.cli.screens.screen import complain, print_json, print_rows
from halotile.errors import ConfigError, HalotileError, OutputInUse
from halotile.graphs.amounts import bytes_text, counted, first_line, percent, rate_text, seconds_text
from halotile.graphs.kinds.patterns import jobs_of
from halotile.storage.disk.object_path import full_path
from halotile.storage.run_directory.directory import RunDirectory

if TYPE_CHECKING:
    from halotile.cli.status import RunStatus
    from halotile.graphs.kinds.base import Row
    from halotile.graphs.kinds.sections import Job
    from halotile.graphs.runs.many_images import ManyOutcomes, ManyPlans

MOST_ROWS = 20
"""Images that are listed one by one."""
IDLE_SECONDS = 30
"""Time without a run after which no other is expected."""


def show(job: Job, *, fresh: bool, same_input: bool, as_json: bool) -> None:
    """Print what a run would do for each image; nothing is started or written."""
    from halotile.graphs.clusters.workers.fork_server import expect_no_workers

    expect_no_workers()
    many = plan_images(job, fresh=fresh, same_input=same_input, quiet=as_json)
    if as_json:
        print_json(figures_of(many))
    else:
        print_rows("plan", plan_rows(many))
    many.check_disk()
    name_failures(many.failed)
    _end(many.failed, len(many.plans))


def figures_of(many: ManyPlans) -> dict[str, Any]:
    """Return the plans for programs."""
    images = {path: plan.summary() for path, plan in many.plans.items()}
    return {"images": images, "failed": _errors(many.failed)}


def go(
    job: Job,
    *,
    fresh: bool,
    same_input: bool,
    as_json: bool,
    quiet: bool,
    directory: RunDirectory | None = None,
    since: float = math.inf,
) -> None:
    """Run a job for each image; interrupted ones are resumed, and those that fail are named at the end.

    In a batch job, ``directory`` keeps the status of all images, and ``fresh`` is for images that were not begun ``since`` its submission.
    """
    began = time.perf_counter()
    from halotile.cli.screens.outcome_rows import outcome_json
    from halotile.cli.screens.progress_report import make_report
    from halotile.graphs.runs.many_images import run_many

    import_for_workers(job)
    many = plan_images(job, fresh=fresh, same_input=same_input, quiet=quiet, since=since)
    many.check_disk()
    planned = time.perf_counter()
    if not quiet:
        for note in _notes(many):
            complain(f"note: {note}")
    name_failures(many.failed)
    numbers = {path: number for number, path in enumerate(many.plans, 1)}
    with make_report(quiet=quiet) as report:
        ended = run_many(
            many,
            observer=report,
            introduce=lambda path, plan: (
                f"image {numbers[path]} of {len(numbers)}, {_name(path)}: {plan.kind.headline(plan.summary())}"
            ),
            directory=directory,
        )
    times = planned - began, time.perf_counter() - began
    if as_json:
        images = {path: outcome_json(outcome, *times) for path, outcome in ended.outcomes.items()}
        print_json({"images": images, "failed": _errors(ended.failed)})
    elif not quiet:
        print_rows(
            "finished" if not ended.failed else "finished, except the images below", _rows(ended, *times)
        )
    bad = {path: outcome.quarantined for path, outcome in ended.outcomes.items() if outcome.quarantined}
    for path, blocks in bad.items():
        complain(f"quarantined: {counted(len(blocks), 'block')} of {path}: {first_line(blocks[0].error)}")
    if quiet:
        _name_warnings(ended)
    if as_json or quiet:
        name_failures({path: error for path, error in ended.failed.items() if path not in many.failed})
    for error in ended.failed.values() if directory else ():
        if isinstance(error, OutputInUse):
            raise error
    _end(ended.failed, len(ended.outcomes), is_bad=bool(bad))


def status(job: Job, *, follow: bool, as_json: bool) -> None:
    """Show how the run of each image stands."""
    stand = _followed(job, quiet=as_json) if follow else _stand(job)
    recorded = (RunDirectory.beside(full_path(job.place)).read_status() or {}).get("failed_images", {})
    faults = {path: recorded.get(path) or fault for path, fault in _faults(job, stand).items()}
    states = {path: "cannot be read" if fault else "not begun" for path, fault in faults.items()}
    states |= dict.fromkeys(recorded.keys() & faults, "failed")
    states |= {path: one.state for path, one in stand.items() if one}
    reasons = {path: first_line(one.reason) for path, one in stand.items() if one and one.reason} | faults
    if as_json:
        unbegun = {path: {"state": states[path], "reason": fault} for path, fault in faults.items()}
        print_json({"images": {path: one.to_json() if one else unbegun[path] for path, one in stand.items()}})
        return
    counts = {state: list(states.values()).count(state) for state in dict.fromkeys(states.values())}
    rows = [("images", ", ".join(f"{count:,} {state}" for state, count in counts.items()))]
    unfinished = [path for path in stand if states[path] != "finished"]
    for path in unfinished[:MOST_ROWS]:
        said = ": ".join(filter(None, (_name(path), states[path], reasons.get(path))))
        rows.append((_done(stand[path]), said))
    rows += _listed(len(unfinished))
    if "not begun" in counts and len(counts) > 1:
        rows.append(("not begun", "`recon-cli plan` of this job says what keeps an image from it"))
    print_rows(f"{counts.get('finished', 0):,} of {counted(len(stand), 'image')} finished", rows)


def _listed(count: int) -> list[Row]:
    """Return a row that says how many of so many images the rows above are of; none where they are of all."""
    return [("", f"{MOST_ROWS} of {count:,} images; --json lists all")] if count > MOST_ROWS else []


def _followed(job: Job, *, quiet: bool) -> dict[str, RunStatus | None]:
    """Show the progress of one image after the other, until none has begun for a while."""
    from halotile.cli.screens.progress_report import make_report
    from halotile.cli.status import watch

    idle = 0
    while idle <= IDLE_SECONDS:
        stand = _stand(job)
        if active := next((one for one in stand.values() if one and not one.over), None):
            watch(active.directory, make_report(quiet=quiet))
            idle = 0
        elif all(stand.values()):
            break
        else:
            time.sleep(1)
            idle += 1
    return stand


def _faults(job: Job, stand: Mapping[str, RunStatus | None]) -> dict[str, str]:
    """Return the fault of each image without a run; pixels are only read of few, or of those that a run has passed over."""
    unbegun = [path for path, one in stand.items() if one is None]
    last = max((path for path, one in stand.items() if one), default="")
    return {path: _fault(job, path, read=len(unbegun) <= MOST_ROWS or path < last) for path in unbegun}


def _fault(job: Any, path: str, *, read: bool) -> str:
    """Return why an image cannot be opened as the job says, or its first pixel not be read; empty where it can."""
    from halotile.storage.arrays import open_source

    chosen = job.input
    if not hasattr(chosen, "level"):  # it is no image
        return ""
    try:
        source = open_source(path, level=chosen.level, dataset=chosen.dataset, axes=chosen.axes)
        if read:
            source[(0,) * len(source.shape)]
    except HalotileError as error:
        return first_line(str(error)).removeprefix(f"{path}: ")
    return ""


def _stand(job: Job) -> dict[str, RunStatus | None]:
    """Return the status of the run of each image; None where it has not begun."""
    from halotile.cli.status import find_run, read_status

    stand: dict[str, RunStatus | None] = {}
    for path, one in jobs_of(job).items():
        try:
            stand[path] = read_status(find_run(one.place))
        except ConfigError:
            stand[path] = None
    return stand


def _name(path: str) -> str:
    return PurePath(path).name


def _done(one: RunStatus | None) -> str:
    return f"{percent(one.progress.done, one.progress.total):.0f} %" if one and one.progress.total else ""


def plan_images(
    job: Job, *, fresh: bool, same_input: bool, quiet: bool, since: float = math.inf
) -> ManyPlans:
    """Plan each image; ``fresh`` is for those that were not begun ``since``."""
    from halotile.graphs.plans.make import make_plan
    from halotile.graphs.plans.plan import Plan
    from halotile.graphs.runs.claim import check_outputs
    from halotile.graphs.runs.many_images import plan_many
    from halotile.graphs.submission import has_begun
    from halotile.graphs.waiting import no_report
    from halotile.tasks.groups.launchers import copy_of

    if copy_of() is not None:
        raise ConfigError(
            "input.path is a pattern, which one copy of the command takes. Start it without mpirun and srun."
        )

    def planned(one: Job) -> Plan:
        report_line = no_report if quiet else complain
        anew = fresh and not has_begun(RunDirectory.beside(full_path(one.place)), since)
        plan = make_plan(one, fresh=anew, same_input=same_input, makes_folder=True, report=report_line)
        if plan.output.parent.is_dir():
            check_outputs(plan)
        return plan

    return plan_many(jobs_of(job), planned)


def plan_rows(many: ManyPlans) -> list[Row]:
    plans = many.plans
    listed = [
        (_name(path), plan.kind.headline(plan.summary())) for path, plan in list(plans.items())[:MOST_ROWS]
    ]
    unlisted = [("", f"and {len(plans) - MOST_ROWS:,} more")] if len(plans) > MOST_ROWS else []
    sizes = bytes_text(sum(plan.output_bytes for plan in plans.values()))
    memory = bytes_text(max(plan.memory_bytes for plan in plans.values()))
    return [
        *listed,
        *unlisted,
        ("", ""),
        (
            "images",
            f"{len(plans):,}, one after the other on {counted(max(plan.run.count for plan in plans.values()), 'worker')}",
        ),
        ("blocks", f"{sum(plan.blocks for plan in plans.values()):,}"),
        ("outputs", f"{sizes} at most"),
        ("memory", f"{memory} in one worker at most"),
        *(("note", note) for note in _notes(many)),
    ]


def _notes(many: ManyPlans) -> list[str]:
    """Return the notes of the plans, one of each form: with other numbers it is about other images; and folders that are made."""
    notes: dict[str, list[tuple[str, str]]] = {}
    new = many.new_folders
    made = (
        [
            f"there is no folder {new[0]} yet: the run makes it"
            + (f", and {counted(len(new) - 1, 'other')}" if new[1:] else "")
        ]
        if new
        else []
    )
    for path, plan in many.plans.items():
        for note in plan.notes:
            notes.setdefault(re.sub(r"[0-9.]+", "", note), []).append((path, note))
    return [*made, *(_of_images(alike, len(many.plans)) for alike in notes.values())]


def _of_images(alike: Sequence[tuple[str, str]], count: int) -> str:
    path, note = alike[0]
    if len(alike) == count and len({text for _, text in alike}) == 1:
        return note
    return f"{_name(path)}: {note}" + (
        f"; in {counted(len(alike) - 1, 'other image')} as well, each by itself" if len(alike) > 1 else ""
    )


def _rows(ended: ManyOutcomes, plan_seconds: float, total_seconds: float) -> list[Row]:
    from halotile.cli.screens.outcome_rows import look_rows

    outcomes = ended.outcomes.values()
    done, total, resumed = (
        sum(getattr(one, name) for one in outcomes) for name in ("done", "total", "resumed")
    )
    failed = [(name, first_line(str(error))) for name, error in list(ended.failed.items())[:MOST_ROWS]]
    doubtful = [path for path, one in ended.outcomes.items() if one.inspection.warnings]
    rows = [
        ("images", f"{len(outcomes):,} of {len(outcomes) + len(ended.failed):,}"),
        *(("failed", f"{_name(path)}: {reason.removeprefix(f'{path}: ')}") for path, reason in failed),
        *_listed(len(ended.failed)),
        (
            "blocks",
            f"{done:,} of {total:,} done{f', {resumed:,} of them by an earlier run' if resumed else ''}",
        ),
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
        rows += _listed(len(outcomes))
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
    doubtful = {
        path: one.inspection.warnings for path, one in ended.outcomes.items() if one.inspection.warnings
    }
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
