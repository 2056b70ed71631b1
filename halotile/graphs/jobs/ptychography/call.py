"""Ptychography from Python, as ``halotile.ptychography``: scans that are opened, and solvers whose epochs are a loop.

Examples
--------
>>> import halotile
>>> scan = halotile.ptychography.open("petra.zarr", field="near", focus="3.65 mm")  # doctest: +SKIP
>>> with halotile.ptychography.Adam(scan, workers=2) as adam:  # doctest: +SKIP
...     for loss in adam.optimize(100, lr=0.04, batch_size=10):
...         print(scan.report())
...     scan.save("star.cxi")
"""

from __future__ import annotations

import operator
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from halotile.errors import ConfigError, RankFailed
from halotile.graphs.distributed.context import DistributedContext
from halotile.graphs.jobs.ptychography.job import ModelOptions, Ptychography, ResultFile, ScanInput, StageOptions
from halotile.graphs.jobs.ptychography.plan import check_used, program_of, recipe_of, stage_of
from halotile.graphs.rules.arguments import check_options, whole_path
from halotile.graphs.rules.values import check_job
from halotile.graphs.runs.passes.torch_ranks import is_final
from halotile.tasks.groups.training.curve import LOOK_SECONDS, StepRequests, read_curve
from halotile.tasks.options import Auto
from halotile.tasks.ptychography.recipe import VARYING

if TYPE_CHECKING:
    from halotile.tasks.ptychography.opened import OpenedScan, SimulatedScan

__all__ = ["LBFGS", "RPIE", "SGD", "Adam", "open", "simulate"]

LONGEST_PAUSE = 0.1  # seconds between two looks for an epoch's loss, at most


def open(  # noqa: A001 - as open() of other modules
    path: str | Path,
    *,
    slots: int = 4,
    window: int | Auto = "auto",
    resolution: bool = False,
    start: str | Path | None = None,
    held_out: float | Auto = "auto",
    seed: int = 0,
    **model: Any,
) -> OpenedScan:
    """Open a scan that ``recon-cli convert`` wrote.

    Parameters
    ----------
    path : path
        The Zarr of the scan.
    slots : int
        Parts of a batch for workers to share.
    window : int or "auto"
        Patterns that a slot draws from at a time; 0: all; auto: all, where they fit into 4 GiB.
    resolution : bool
        Reconstruct two halves of the positions by themselves as well, for ``report()`` and ``rings``.
    start : path, optional
        Result of an earlier reconstruction to begin with, as ``save()`` writes it, or an HDF5 file with ``object`` or ``probe``.
    held_out : float or "auto"
        Share of the pixels of each pattern whose loss decides which epoch of a call of ``optimize`` is kept; auto: 0.05 for few counts, else 0.
    seed : int
        The order of the patterns follows from it.
    **model
        Keys of the section ``model`` of a job, such as ``field``, ``focus``, ``modes`` and ``loss``.

    Returns
    -------
    OpenedScan
        With ``object``, ``probe``, ``positions``, ``losses``, ``report()`` and ``save(path)``.
    """
    from halotile.tasks.ptychography.opened import OpenedScan

    model = {name: _plain(value) for name, value in model.items()}
    check_options(ModelOptions, model)
    options = ModelOptions(**model)
    job = Ptychography(
        input=ScanInput(path=whole_path("path", path), start=None if start is None else whole_path("start", start)),
        output=ResultFile(path="result.cxi"),
        model=options,
        slots=slots,
        window=window,
        resolution=resolution,
        held_out=held_out,
        seed=seed,
    )
    if options.import_ is not None:
        raise ConfigError("import is for a job, which `recon-cli run --allow-import` runs. Leave it out.")
    check_job(job)
    return OpenedScan(recipe_of(job))


def simulate(path: str | Path, *, overwrite: bool = False, **options: Any) -> SimulatedScan:
    """Write a scan whose object, probe and positions are known, to try a model and its solvers on.

    Parameters
    ----------
    path : path
        The Zarr to write; patterns are computed some at a time.
    overwrite : bool
        True: what is there is replaced.
    **options
        Parameters of :class:`~halotile.tasks.ptychography.opened.SimulatedScan`, such as ``raster``, ``pattern`` and ``photons``.

    Returns
    -------
    SimulatedScan
        With the true ``image``, ``probe`` and ``places``.

    Examples
    --------
    >>> import halotile
    >>> truth = halotile.ptychography.simulate("known.zarr", raster=(8, 8), pattern=32, step=3, photons=1e4)  # doctest: +SKIP
    """
    from halotile.storage.scans.convert import write_scan
    from halotile.tasks.ptychography.opened import SimulatedScan

    options = {name: _plain(value) for name, value in options.items()}
    check_options(SimulatedScan, options)
    simulated = SimulatedScan(**options)
    write_scan(whole_path("path", path), simulated.scan, simulated, overwrite=overwrite)
    return simulated


class _Solver:
    """Epochs of a scan on workers.

    Parameters
    ----------
    scan : OpenedScan
        The scan; its object, probe and losses change with each epoch.
    workers : int
        Number of worker processes on this machine.
    context : DistributedContext, optional
        Workers that are there, in place of new ones.
    """

    name: Any

    def __init__(self, scan: OpenedScan, *, workers: int = 1, context: DistributedContext | None = None) -> None:
        if context is None and workers > scan.recipe.slots:
            raise ConfigError(
                f"workers is {workers}, and a batch has {scan.recipe.slots} parts. Open the scan with slots={workers}, or write fewer workers."
            )
        self.scan = scan
        self._own = context is None
        self.context = context or DistributedContext(workers=workers)
        self._is_open = not self._own
        self._end_epochs: Callable[[], object] = bool  # there are none to end

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        """Start the workers, unless they are there."""
        if not self._is_open:
            self.context.__enter__()
            self._is_open = True

    def close(self) -> None:
        """End the epochs of a loop that was not, and the workers that it has started."""
        self._end_epochs()
        if self._own and self._is_open:
            self.context.__exit__(None, None, None)
            self._is_open = False

    def optimize(
        self,
        epochs: int,
        *,
        lr: float | Auto = "auto",
        batch_size: int | Auto = "auto",
        schedule: bool = False,
        lr_factors: Mapping[str, float] | None = None,
        hold_positions: int | Auto = "auto",
        alpha: float = 0.1,
        betas: Sequence[float] = (0.9, 0.999),
        amsgrad: bool = False,
        momentum: float = 0.0,
        smoothness: float = 0.0,
        subset: Sequence[int] | None = None,
    ) -> Generator[float, None, None]:
        """Compute more epochs; each is computed when the loop asks for it.

        Parameters
        ----------
        epochs : int
            Number of times that each pattern is used.
        lr : float or "auto"
            Learning rate; auto: that of a stage of a job without `lr`. SGD needs a number.
        batch_size : int or "auto"
            Patterns of a step; auto: 20, of LBFGS all.
        schedule : bool
            Divide the learning rate by 5 where the loss has not fallen for more than 10 epochs.
        lr_factors : dict, optional
            Factors of the learning rate by part, such as ``{"positions": 0.5}``.
        hold_positions : int or "auto"
            Epochs before positions begin to move; auto: half of the first call's, at most 100; 0 with a `start` or a factor of positions.
        alpha : float
            RPIE: near 0, each place steps by its own light; at 1, all by that of the brightest, which is ePIE.
        betas : pair of float
            Adam and RPIE: shares of the earlier mean and mean square of the gradients that a step keeps.
        amsgrad : bool
            Adam: divide a step by the largest mean square of the gradients so far.
        momentum : float
            SGD: share of the last step that is added to the next one; each call begins without.
        smoothness : float
            Weight of the squared differences between neighbouring pixels of the object.
        subset : sequence of int, optional
            Numbers of the only patterns to use, as in the scan file.

        Yields
        ------
        float
            Loss of the epoch.

        Raises
        ------
        ConfigError
            For values that do not fit the scan or the solver.
        Diverged
            When the loss grows beyond that of the first guess.

        Examples
        --------
        >>> import tempfile
        >>> from halotile import ptychography
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     truth = ptychography.simulate(f"{folder}/scan.zarr", raster=(4, 4), pattern=16, step=2)
        ...     with ptychography.Adam(ptychography.open(f"{folder}/scan.zarr")) as adam:
        ...         losses = list(adam.optimize(2, lr=0.02, batch_size=8))
        >>> losses[1] < losses[0]
        True
        """
        options = StageOptions(
            solver=self.name,
            epochs=_plain(epochs),
            lr=_plain(lr),
            batch=_plain(batch_size),
            lr_factors=lr_factors or {},
            plateau=schedule,
            hold_positions=hold_positions,
            alpha=alpha,
            betas=(*betas,),  # type: ignore[arg-type]  # their number is checked with their values
            amsgrad=amsgrad,
            momentum=momentum,
            smoothness=smoothness,
            subset=None if subset is None else _whole_numbers(subset),
        )
        recipe = self.scan.recipe
        own: dict[str, Any] = {"loss": recipe.loss, "variations": recipe.variations}
        own["refine"] = tuple(part for part in recipe.refined if part not in VARYING)
        model = ModelOptions(**own)
        check_job(replace(_JOB, model=model, stages=(options,)))
        holds = "positions" in recipe.refined and recipe.start is None and not self.scan.losses
        stage = stage_of(options, recipe, holds=holds)
        check_used(replace(recipe, stages=(stage,)))
        self.scan.check_ready()
        self._open()
        with tempfile.TemporaryDirectory(dir=self.context.folder) as folder:
            yield from self._epochs(stage, Path(folder))

    def _epochs(self, stage: Any, folder: Path) -> Iterator[float]:
        checkpoint, curve, asked = (folder / name for name in ("checkpoint", "curve.json", "requests"))
        done, requests = len(self.scan.losses), StepRequests(asked)
        recipe = self.scan.hand_over(stage, checkpoint, curve, asked)
        failures: list[BaseException] = []
        is_left, took = False, 0.0

        def compute() -> None:
            try:
                ranks = min(self.context.world_size, recipe.slots)
                self.context.run_torch(program_of(recipe), ranks=ranks)
            except BaseException as failure:
                has_words = isinstance(failure, RankFailed) and is_final(failure)
                failures.append((failure.__cause__ if has_words else None) or failure)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()

        def end() -> None:
            self._end_epochs = bool
            try:
                requests.end()
            finally:
                thread.join()
                self.scan.take_back()

        self._end_epochs = end
        try:
            for epoch in range(done, done + stage.epochs):
                if self._end_epochs is not end:
                    raise ConfigError("the solver was closed: go on with another one, or within its `with`.")
                began = time.monotonic()
                requests.ask(epoch + 1)
                if (loss := _loss_of(epoch, curve, thread, took)) is None:
                    break
                took = time.monotonic() - began
                self.scan.hand_out(loss, thread.is_alive)
                yield loss
        except GeneratorExit:  # the loop was left: what is raised here would not reach the script
            is_left = True
            raise
        finally:
            if self._end_epochs is end:
                end()
            if is_left and failures:
                warnings.warn(f"the epoch at hand was lost: {failures[0]}", stacklevel=2)
        if failures:
            raise failures[0]


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python."""
    return value.item() if hasattr(value, "item") else value


def _whole_numbers(subset: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, subset))
    except TypeError as error:
        raise ConfigError(f"subset must contain integers (pattern numbers): {error}.") from None


def _loss_of(epoch: int, curve: Path, thread: threading.Thread, expected: float) -> float | None:
    """Wait for the loss of an epoch that is expected to take so many seconds; None where the computation ended without."""
    began = time.monotonic()
    is_over, seen = False, None
    while not is_over:
        is_over = not thread.is_alive()
        with suppress(FileNotFoundError):
            status = curve.stat()
            if (found := (status.st_ino, status.st_size)) != seen or is_over:
                seen, (step, rows) = found, read_curve(curve)
                if step > epoch:
                    return rows[epoch]["loss"]
        time.sleep(_pause(time.monotonic() - began, expected))
    return None


def _pause(waited: float, expected: float) -> float:
    """Return the seconds until the next look: few looks, since the ranks may need every core, and none comes late."""
    return min(max(LOOK_SECONDS, 0.8 * expected - waited, waited / 200), LONGEST_PAUSE)


class Adam(_Solver):
    """Adam: each value changes by about the learning rate in a step."""

    name = "adam"


class SGD(_Solver):
    """Steepest descent."""

    name = "sgd"


class RPIE(_Solver):
    """The regularised ptychographic iterative engine."""

    name = "rpie"


class LBFGS(_Solver):
    """Limited-memory BFGS: steps by the curvature of the loss of all patterns, after epochs of another solver."""

    name = "lbfgs"


# A job whose values are right, for checks of stages.
_JOB = Ptychography(input=ScanInput(path="scan.zarr"), output=ResultFile(path="result.cxi"))
