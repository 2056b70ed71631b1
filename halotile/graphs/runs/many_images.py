"""One job for many images: planned together, run one after the other on one cluster, each with a run of its own."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from halotile.errors import ClusterFailed, DiskRefused, HalotileError, Stalled, Stopped
from halotile.graphs.amounts import bytes_text, counted, first_line
from halotile.graphs.kinds.sections import Job
from halotile.graphs.plans.plan import Plan, check_inodes, existing_parent
from halotile.graphs.runs.driver import run
from halotile.graphs.runs.outcome import Outcome
from halotile.graphs.runs.session import SharedCluster
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import STATUS_SECONDS, Counts, status_of
from halotile.graphs.watching.progress import Observer, Progress
from halotile.storage.disk.object_path import full_path
from halotile.storage.run_directory.directory import RunDirectory
from halotile.storage.stored_array import closing_files

AHEAD = 100
"""Images that are planned before any is run, at most."""
MOST_NAMED = 20
"""Images that failed, at most, which a status names."""
_OF_ALL = (DiskRefused, ClusterFailed, Stalled, Stopped)
"""Errors that the next image would meet as well."""


_SUMMED = (
    "done", "resumed", "pixels_done", "seconds", "read_bytes", "written_bytes", "compute_seconds", "retried", "failed", "holes", "defects",
)  # fmt: skip
_OF_THE_CLUSTER = ("cluster: ", "dashboard: ")
"""Beginnings of messages that are the same for every image."""
_LARGEST = ("peak_memory_bytes", "device_peak_bytes", "start_seconds")


@dataclass(frozen=True)
class ManyPlans:
    """The plans of the images by their paths, and the errors of those that cannot be planned; of very many, of some that are spread evenly."""

    plans: Mapping[str, Plan]
    failed: Mapping[str, HalotileError]
    later: Mapping[str, Job] = field(default_factory=dict)  # jobs of the images that are planned when their turn comes
    make_plan: Callable[[Job], Plan] | None = None

    @property
    def paths(self) -> list[str]:
        """The images that are run, in the order of their paths."""
        return sorted([*self.plans, *self.later])

    @property
    def ratio(self) -> float:
        """Number of images for each one that is planned."""
        return 1 + len(self.later) / len(self.plans)

    def plan_of(self, path: str) -> Plan:
        """The plan of an image, made now if it was not made before."""
        if (plan := self.plans.get(path)) is None:
            assert self.make_plan is not None
            plan = self.make_plan(self.later[path])
        return plan

    def check_disk(self) -> None:
        """Refuse outputs that together need more disk than there is."""
        disks: dict[int, list[Plan]] = {}
        for plan in self.plans.values():
            if not plan.resumes:
                disks.setdefault(os.stat(existing_parent(plan.run_directory)).st_dev, []).append(plan)
        for plans in disks.values():
            folder = existing_parent(plans[0].run_directory)
            needed = round(self.ratio * sum(plan.disk_bytes for plan in plans))
            free = shutil.disk_usage(folder).free
            check_inodes(round(self.ratio * sum(plan.inodes for plan in plans)), folder)
            if needed > free:
                raise DiskRefused(
                    f"the outputs of {counted(round(self.ratio * len(plans)), 'image')} take up to {bytes_text(needed)}, and {folder} has {bytes_text(free)} free. "
                    "Write output.path on a larger disk, or a pattern of fewer images."
                )

    @property
    def new_folders(self) -> list[Path]:
        """Folders of the outputs that are missing, and made before the run."""
        places = [
            *(plan.output for plan in self.plans.values()),
            *(full_path(job.place) for job in self.later.values()),
        ]
        folders = {place.parent for place in places if isinstance(place, Path)}
        return sorted(folder for folder in folders if not folder.is_dir())


@dataclass(frozen=True)
class ManyOutcomes:
    """The outcomes of the images by their paths, and the errors of those that failed."""

    outcomes: Mapping[str, Outcome]
    failed: Mapping[str, HalotileError]


def plan_many(jobs: Mapping[str, Job], make_plan: Callable[[Job], Plan]) -> ManyPlans:
    """Plan the job of each image; of more than :data:`AHEAD`, of that many."""
    plans, failed, paths = {}, {}, list(jobs)
    for path in paths if len(paths) <= AHEAD else [paths[n * len(paths) // AHEAD] for n in range(AHEAD)]:
        try:
            with closing_files():
                plans[path] = make_plan(jobs[path])
        except HalotileError as error:
            failed[path] = error
    if not plans:
        raise next(iter(failed.values()))
    later = {path: job for path, job in jobs.items() if path not in plans and path not in failed}
    return ManyPlans(plans, failed, later, make_plan)


def run_many(
    many: ManyPlans,
    *,
    observer: Observer | None = None,  # called with the progress of all of them together
    # returns the message at the beginning of an image
    introduce: Callable[[str, Plan], str] = lambda path, _: path,
    directory: RunDirectory | None = None,  # keeps the status of all of them together
) -> ManyOutcomes:
    """Run the plans one after the other; an image that fails does not keep the others from being finished."""
    outcomes, failed = {}, dict(many.failed)
    together = _Together(many, observer, directory)
    for folder in many.new_folders:
        folder.mkdir(exist_ok=True)
    with Signals() as signals, SharedCluster(max(plan.run.count for plan in many.plans.values())) as cluster:
        for path in many.paths:
            if signals.requested:  # by a signal that came when the image before had no block left
                stopped = f"stopped on {signals.name} before {path}. Run again to go on."
                together.record("stopped", stopped)
                raise Stopped(stopped, signals.name)
            together.left -= 1
            try:
                with closing_files():
                    plan = many.plan_of(path)
                    together.begin(path, plan, introduce(path, plan))
                    outcome = run(plan, observer=together, cluster=cluster, signals=signals)
                # The images of thousands would fill the memory; the page of each has them.
                outcomes[path] = replace(outcome, inspection=replace(outcome.inspection, places=()))
            except _OF_ALL as error:
                together.record("stopped" if isinstance(error, Stopped) else "failed", str(error))
                raise
            except HalotileError as error:
                failed[path] = error
            together.end()
    together.failed = {
        path: first_line(str(error).removeprefix(f"{path}: ")) for path, error in list(failed.items())[:MOST_NAMED]
    }
    named = f"{counted(len(failed), 'image')}: {', '.join(together.failed)}" if failed else ""
    together.record("failed" if failed else "finished", named)
    return ManyOutcomes(outcomes, failed)


class _Together:
    """Adds the progress of an image to that of the images before it: one start, one end, and its cluster reported once."""

    def __init__(self, many: ManyPlans, observer: Observer | None, directory: RunDirectory | None) -> None:
        self.observer = observer
        self.directory = self.of_image = directory
        self.written = 0.0
        self.failed: Mapping[str, str] = {}
        counts = Counts([phase for plan in many.plans.values() for phase in plan.work.passes])
        self.total, self.pixels = round(many.ratio * counts.total), round(many.ratio * counts.pixels)
        self.later = set(many.later)
        self.usual = counts.total // len(many.plans), counts.pixels // len(many.plans)
        """Blocks and pixels that an image is taken to have before it is planned."""
        self.left = len(many.paths)
        self.before = self.now = Progress("start", 0, 0, self.total, 0, self.pixels, 0.0)
        self.lines: list[str] = []
        """Lines that the observer has not been given yet."""
        self.seen: set[str] = set()
        self.warning = "warning: "

    def begin(self, path: str, plan: Plan, line: str) -> None:
        """Begin an image with a line, which goes with its first progress; warnings have the name of the image."""
        if path in self.later:
            counts = Counts(plan.work.passes)
            self.total += counts.total - self.usual[0]
            self.pixels += counts.pixels - self.usual[1]
        self.of_image = RunDirectory(plan.run_directory)
        self.lines = [line]
        self.warning = f"warning: {Path(path).name}: "

    def end(self) -> None:
        """Keep what the image has added."""
        self.before = self.now

    def record(self, state: str, reason: str = "") -> None:
        """Write the status of all images, with what that of the current one says of its workers."""
        if self.directory is None:
            return
        self.written = time.monotonic()
        theirs = (self.of_image and self.of_image.read_status()) or {}
        status = status_of(self.now, state, reason, output=str(self.directory.output))
        with suppress(OSError):  # the journals count
            self.directory.write_status(
                status
                | {"failed_images": self.failed}
                | {key: theirs[key] for key in ("dashboard", "retired") if key in theirs}
            )

    def __call__(self, progress: Progress) -> None:
        """Pass the progress on, with that of the images before."""
        lines = [line for line in progress.message.splitlines() if line not in self.seen]
        self.seen.update(line for line in lines if line.startswith(_OF_THE_CLUSTER))
        lines = [re.sub("^warning: ", lambda _: self.warning, line) for line in lines]
        message, self.lines = "\n".join([*self.lines, *lines]), []
        has_begun, is_last = self.before.seconds > 0, self.left == 0
        is_between = (progress.phase == "start" and has_begun) or (progress.phase == "stop" and not is_last)
        values = {name: getattr(self.before, name) + getattr(progress, name) for name in _SUMMED}
        values |= {name: max(getattr(self.before, name), getattr(progress, name)) for name in _LARGEST}
        phase = self.now.phase if is_between else progress.phase
        self.now = replace(progress, phase=phase, total=self.total, pixels_total=self.pixels, message="", **values)
        if time.monotonic() - self.written >= STATUS_SECONDS:
            self.record("draining" if progress.phase == "drain" else "running")
        if self.observer is not None:
            self.observer(replace(self.now, message=message))
