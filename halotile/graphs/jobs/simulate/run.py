"""``halotile.simulate``: measurements made block by block beside their names, and named when all are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from halotile.errors import BlockInputFailed, DiskRefused
from halotile.graphs.amounts import counted, first_line
from halotile.graphs.clusters.base import Cluster
from halotile.graphs.jobs.sections import Auto, FidelityChoice, OperatorChoice, Output, Reconstruction, Run
from halotile.graphs.jobs.simulate.noise import NoiseChoice
from halotile.graphs.jobs.simulate.plan import SimulationPlan, make_simulation_plans
from halotile.graphs.rules.arguments import Words, cluster_of_script
from halotile.graphs.rules.paths import whole_path
from halotile.graphs.runs.claim import claim
from halotile.graphs.runs.held_output import Claimed
from halotile.graphs.runs.outcome import describe_full_disk, ended_by, failure_of
from halotile.graphs.runs.progress import Observer
from halotile.graphs.runs.session import Session
from halotile.graphs.runs.signals import Signals
from halotile.graphs.runs.status import StatusFile
from halotile.graphs.runs.sweep import Sweep
from halotile.graphs.watching.progress_bar import progress_shown
from halotile.storage.disk.durable import DISK, remove_partials
from halotile.storage.disk.place import ZARR_FILES, check_place
from halotile.storage.run_directory.directory import RunDirectory
from halotile.tasks.noise.simulated import Noise


def simulate(
    measurements: Sequence[OperatorChoice],
    reference: str | Path,
    *,
    noise: Noise = "gaussian",
    gain: float = 1.0,
    background: float = 0.0,
    seed: int = 0,
    workers: int | Auto = "auto",
    memory_per_worker: str | int = "4GiB",
    cluster: str | Words = "auto",
    overwrite: bool = False,
    observer: Observer | None = None,
) -> tuple[Path, ...]:
    """Write what operators would measure of an image, ``y = A x`` with noise, from disk to disk.

    The noise of a pixel depends on the seed, the operator's place in the list and the pixel's place alone: the result has
    the same bits for any number of workers. A measurement appears under its name when all of them are whole.

    Parameters
    ----------
    measurements : sequence of OperatorChoice
        Each from :func:`halotile.measurement`; its ``data`` is the Zarr to write.
    reference : path
        The true image.
    noise : str
        ``gaussian``, of the standard deviation ``noise_sigma`` of each measurement; ``poisson``, or ``none``.
    gain : float
        poisson: what one count is worth, so ``y = gain P((A x + background) / gain)``.
    background : float
        poisson: what is there without the image.
    seed : int
        Which noise: 0 or more.
    workers : int or "auto"
        Number of worker processes; by default what the cores and the memory of this machine allow, or all of an allocation.
    memory_per_worker : str or int
        Memory that one worker may use, such as ``"4GiB"``, or a number of bytes.
    cluster : str or mapping
        Where the workers live: a kind such as ``"slurm"``, or the cluster section of a job file. ``"auto"`` is what the
        environment says, else this machine.
    overwrite : bool
        Replace Zarrs that stand at the measurements' paths.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.runs.progress.Progress` about twice a second; by default a bar shows it,
        at a terminal and in a notebook.

    Returns
    -------
    tuple of Path
        Where the measurements lie.

    Raises
    ------
    ConfigError, OutputRefused
        When an argument cannot be, or something stands where a measurement is to go.
    HalotileError
        See :mod:`halotile.errors`.

    Examples
    --------
    >>> import halotile
    >>> seen = halotile.measurement("blur", "y.zarr", kernel=[[0.5, 0.5]], noise_sigma=0.01)
    >>> halotile.simulate([seen], "truth.zarr", noise="poison")
    Traceback (most recent call last):
    halotile.errors.ConfigError: noise is 'poison': there is none of that name; did you mean poisson?
    >>> halotile.simulate([seen], "truth.zarr")  # doctest: +SKIP
    """
    wanted = NoiseChoice(name=noise, gain=gain, seed=seed)
    # A reconstruction that is never run: it says what is measured, and how.
    job = Reconstruction(
        output=Output(path="x.zarr"),
        operators=tuple(measurements),
        fidelity=FidelityChoice(name="poisson" if background else "l2", background=background),
        reference=whole_path("reference", reference),
        start=whole_path("reference", reference),
        run=Run(workers=workers, memory_per_worker=memory_per_worker),
        cluster=cluster_of_script(cluster),
        allow_import=True,
    )
    plans = make_simulation_plans(job, wanted, overwrite=overwrite)
    with progress_shown(observer) as observe:
        return run_simulation(plans, observer=observe)


def run_simulation(
    plans: tuple[SimulationPlan, ...],
    *,
    observer: Observer | None = None,
    cluster: Cluster | None = None,
    import_folder: str | None = None,
) -> tuple[Path, ...]:
    """Make every measurement; what an earlier call left of the same is gone on with.

    Parameters
    ----------
    plans : tuple of SimulationPlan
        From :func:`halotile.graphs.jobs.simulate.plan.make_simulation_plans`.
    observer : callable, optional
        Called with a :class:`~halotile.graphs.runs.progress.Progress` about twice a second.
    cluster : Cluster, optional
        A running cluster to use; by default the one the job names is started, and ended.
    import_folder : str, optional
        Where imports of the user's own code start from.

    Returns
    -------
    tuple of Path
        Where the measurements lie.

    Raises
    ------
    OutputRefused
        When another run is making one of them, or one was moved or removed meanwhile.
    InputError
        When the reference was changed meanwhile.
    BlockFailed
        When blocks failed after their retries.
    DiskRefused
        When the disk is full.
    Stopped
        When SIGTERM or SIGUSR1 asked for it.
    """
    with ExitStack() as held:
        signals = held.enter_context(Signals())
        makings = [held.enter_context(_making(plan, observer, signals)) for plan in plans]
        with Session(plans[0].run, plans[0].cluster, makings[0].status, cluster) as session:
            for making in makings:
                making.make(session, signals, import_folder)
        # Only now has the cluster left the folder of the first one.
        for making in makings:
            making.check_place()
        for making in makings:
            making.name()
    return tuple(plan.data for plan in plans)


class _Making:
    """One measurement on its way."""

    def __init__(self, plan: SimulationPlan, claimed: Claimed, observer: Observer | None) -> None:
        self.plan = plan
        self.claimed = claimed
        self.journal = claimed.journal
        self.directory = RunDirectory(plan.run_directory)
        self.status = StatusFile(self.directory, plan, observer)

    def make(self, session: Session, signals: Signals, import_folder: str | None) -> None:
        """Every block that is left."""
        self.claimed.strike_damaged(self.journal.done, signals, thorough=True)
        sweep = Sweep(
            self.plan.task,
            phase="simulate",
            stages=("read", "forward", "write"),
            options=self.plan.run,
            claimed=self.claimed,
            journal=self.journal,
            directory=self.directory,
            signals=signals,
            status=self.status,
            import_folder=import_folder,
            title=f" while {self.plan.data.name} was made",
        )
        session.follow(self.status)
        self.status.begin(sweep.progress("start"))
        self.status.report(self.plan.told)
        try:
            session.through(sweep)
            self._check(sweep)
            self.claimed.finish(signals)
        except BaseException as error:
            with suppress(OSError):
                self.journal.sync()
            self.status.end("stopped", sweep.progress("stop"), ended_by(error))
            raise
        self.status.end("finished", sweep.progress("stop"), "")

    def check_place(self) -> None:
        """Refuse to replace what came to its place since the plan was made, unless that may go."""
        check_place(self.plan.data, overwrite=self.plan.overwrite, key="data", remedy="add --overwrite")

    def name(self) -> None:
        """Give it the name that it is asked for; what stood there goes."""
        self.journal.sync()  # it is not to be looked for once its folder is gone
        remove_partials(self.plan.output)
        if self.plan.data.exists():
            DISK.remove_tree(self.plan.data, last=ZARR_FILES)
        os.rename(self.plan.output, self.plan.data)
        DISK.sync_directory(self.plan.data.parent)
        DISK.remove_tree(self.directory.path)

    def _check(self, sweep: Sweep) -> None:
        done = len(self.journal.done)
        if sweep.disk_error:
            raise DiskRefused(describe_full_disk(self.plan, sweep.disk_error, done))
        if sweep.bad:
            bad = tuple(sweep.bad[number] for number in sorted(sweep.bad))
            if all(block.kind == "input" for block in bad):
                _, _, message = first_line(bad[0].error).partition(": ")
                more = f" So it is in {counted(len(bad) - 1, 'other block')}." if len(bad) > 1 else ""
                raise BlockInputFailed(
                    f"{self.plan.data}: {bad[0].region.start}–{bad[0].region.stop}: {message}{more}"
                )
            raise failure_of(self.plan, bad)
        assert done == len(self.plan.grid), counted(done, "block")


@contextmanager
def _making(plan: SimulationPlan, observer: Observer | None, signals: Signals) -> Iterator[_Making]:
    """A measurement whose place is this process's alone."""
    with claim(plan, RunDirectory(plan.run_directory), signals) as claimed:
        yield _Making(plan, claimed, observer)
