"""Variational inference over the ranks of a group: samples of a posterior around a mean that is moved to fit them."""

from __future__ import annotations

import json
import math
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch.utils import _pytree as pytree

from halotile.errors import ConfigError, DamagedData, Diverged, ResumeRefused
from halotile.storage.disk.durable import DISK
from halotile.storage.run_directory.json_files import read_object
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.krylov import conjugate_gradients
from halotile.tasks.posterior.residuals import Draws, Inference, Likelihood, Linearized, Rows, Tree, check, numbers

WORDS = {"mode": ("geometric", "linear"), "redraw": ("new", "same", "update")}
USUAL: Mapping[str, dict[str, float]] = {
    "sampling": {"tol": 0.002, "steps": 200},
    "bending": {"tol": 0.002, "steps": 10, "inner": 50},
    "minimizing": {"tol": 0.02, "steps": 10, "inner": 100},
}
BATCH_NUMBERS = 2**17  # latent numbers of the pairs that are computed at once, by default: larger batches save no time
HALVINGS, SHARE = 10, 0.1  # of a step of the mean: most halvings, and the relative residual that the solver leaves
STATE = "state.json"
# Names of files that later ones replace.
OWN = re.compile(r"samples-\d{5}-\d{5}\.safetensors(\.\w+\.partial)?|state\.json\.\w+\.partial")
FIGURES_OF_MODEL = "figures of model and data"
Varying = Any  # a value, or a function of the number of the iteration, from 0 on, that returns it


@dataclass(frozen=True)
class Samples:
    """Positions that are likely, given the data: a mean and deviations from it. Each is computed when it is asked for.

    Iterating yields the latent positions of this rank; a single rank has all. Pairs are computed in batches, each alike on any rank.
    """

    inference: Inference = field(repr=False)
    group: TorchGroup = field(repr=False)
    chunk: int  # pairs of a batch
    recompute: bool
    pairs: int
    position: Rows = field(repr=False)
    residuals: Mapping[int, Rows] = field(repr=False)  # of the batches of this rank

    def __len__(self) -> int:
        """Number of samples of all ranks, two for each pair."""
        return max(1, 2 * self.pairs)

    def __iter__(self) -> Iterator[Tree]:
        return (self.inference.tree(row) for batch in self.residuals for row in self._rows(batch))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def mean_and_std(self, function: Callable[[Any], torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of a function of the position; left out, of what the model returns. All ranks call it."""
        asked, tree = function or self.inference.model, self.inference.tree

        def chosen(row: Rows) -> torch.Tensor:
            value = asked(tree(row))
            return value if value.is_floating_point() or value.is_complex() else value.to(row.dtype)

        def mean(of: Callable[[Rows], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
            return self._mean(lambda batch: self.inference.each(of, self._rows(batch)), like)

        center = mean(chosen, chosen(self.position.clone()))
        return center, mean(lambda row: (chosen(row) - center).abs().square(), center.abs()).sqrt()

    @property
    def batches(self) -> int:
        """Number of batches of all ranks."""
        return max(1, -(-self.pairs // self.chunk))

    @property
    def _slots(self) -> int:
        return max(self.batches, self.group.world_size)

    @property
    def own(self) -> range:
        """Numbers of the batches of this rank."""
        slots = self.group.slots(self._slots)
        return range(slots.start, min(slots.stop, self.batches))

    def total(self, parts: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Sum over the batches of all ranks, with the same bits for any number of ranks; adding zeros turns -0 into 0."""
        filled = {
            slot: parts.get(slot, torch.zeros_like(like)).to(like.dtype) for slot in self.group.slots(self._slots)
        }
        return self.group.sum_slots(filled, self._slots) + 0.0

    def _rows(self, batch: int) -> Rows:
        return self.position + self.residuals[batch]

    def _mean(self, function: Callable[[int], Rows], like: torch.Tensor) -> torch.Tensor:
        """Mean of rows, one for each sample of a batch."""
        return self.total({batch: function(batch).sum(0) for batch in self.residuals}, like) / len(self)

    @cached_property
    def _known(self) -> dict[int, Linearized]:
        return {batch: Linearized(self.inference, self._rows(batch)) for batch in self.residuals}

    def point(self, batch: int) -> Linearized:
        return Linearized(self.inference, self._rows(batch)) if self.recompute else self._known[batch]

    def energy(self) -> float:
        return float(self._mean(lambda batch: self.point(batch).energies()[:, None], self.position[:1].double()))

    def counted(self, *counts: int) -> list[int]:
        """Sums of counts over all ranks."""
        mine = self.position.new_tensor(counts, dtype=torch.float64)
        return list(map(int, self.total(dict.fromkeys(self.own[:1], mine), mine)))

    def gradient(self) -> Rows:
        return self._mean(lambda b: self._rows(b) + (p := self.point(b)).back(p.slopes[1]), self.position)

    def metric(self, scale: Rows, tangent: Rows) -> Rows:
        """The product with the metric averaged over the samples of all ranks, scaled on both sides."""
        rows = scale * tangent
        mean = self._mean(lambda b: self.point(b).metric(rows.expand_as(self.residuals[b])), self.position)
        return scale * mean[None]

    def reduced_chi2(self) -> list[float]:
        """Reduced χ² of the data, and of each part of the latent position."""

        def of(batch: int) -> Rows:
            squares = [part.square().mean(-1).nan_to_num() for part in self.inference.split(self._rows(batch)).values()]
            return torch.stack([self.point(batch).reduced_chi2(), *squares], -1)

        return list(map(float, self._mean(of, self.position.new_zeros(1 + len(self.inference.shapes)))))


@dataclass(frozen=True)
class VariationalState:
    """Outcome of an iteration.

    Attributes
    ----------
    iteration : int
        Number of iterations that are done.
    mean : dict
        Latent position around which the samples are.
    samples : Samples
        Positions that are likely, given the data.
    energy : float
        Negative logarithm of likelihood and prior, averaged over the samples.
    reduced_chi2 : float
        Mean square of the data's residuals in standard deviations, averaged over the samples: about 1 for a model that fits.
    reduced_chi2_latent : dict of str to float
        Mean square of the latent numbers of each name: about 1 where the prior fits.
    newton_steps, products : int
        Newton steps of the mean, and products with the metric of a sample, in this iteration.
    unfinished : int
        Number of samples whose solver did not reach its tolerance within its steps: their deviations are too small, as a rule.
    seconds : float
        Duration of this iteration.
    """

    iteration: int
    mean: Tree = field(repr=False)
    samples: Samples = field(repr=False)
    energy: float
    reduced_chi2: float
    reduced_chi2_latent: dict[str, float]
    newton_steps: int
    products: int
    unfinished: int
    seconds: float


FIGURES = [each.name for each in fields(VariationalState) if each.name not in ("mean", "samples")]


@dataclass(frozen=True)
class _Run:
    """Settings of all iterations on one rank."""

    begin: Samples  # none yet, around the start
    choices: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    free: Rows  # 1 where the mean moves
    kept: Rows  # 1 where samples vary
    folder: Path | None
    callback: Callable[[VariationalState], object]

    def states(self) -> Iterator[VariationalState]:
        """Go on from the folder, and yield the state of each further iteration; that of the last one, where all are done."""
        record, inference = self._record(), self.begin.inference
        samples = self._read(self.folder, record) if self.folder and record["iteration"] else self.begin
        if record["iteration"] == len(self.choices):
            yield self._state(samples, record)
        for iteration in range(record["iteration"], len(self.choices)):
            began, inference.products, inference.unfinished = time.monotonic(), 0, 0
            key = iteration if self.choices[iteration]["redraw"] == "new" else record["key"]
            scale = Linearized(inference, samples.position[None]).scale()
            samples, steps = self._minimized(self._drawn(samples, scale, key, iteration), scale, iteration)
            data, *latent = samples.reduced_chi2()
            counts = samples.counted(inference.products, inference.unfinished)
            chi2 = dict(zip(inference.shapes, latent, strict=True))
            figures = iteration + 1, samples.energy(), data, chi2, steps, *counts, time.monotonic() - began
            record = {"key": key, **dict(zip(FIGURES, figures, strict=True))}
            samples = replace(samples)  # without what is known of the model there
            if self.folder is not None:
                self._write(self.folder, record, samples)
            state = self._state(samples, record)
            if state.unfinished and samples.group.rank == 0:
                name = "bending" if self.choices[iteration]["mode"] == "geometric" else "sampling"
                missed = f"iteration {iteration + 1}: {state.unfinished} of {len(samples)} samples do not reach the tolerance"
                warnings.warn(f"{missed} of {name}={self.choices[iteration][name]}. Write more steps.", stacklevel=2)
            self.callback(state)
            yield state

    def _state(self, samples: Samples, record: Mapping[str, Any]) -> VariationalState:
        figures = {name: record[name] for name in FIGURES}
        return VariationalState(mean=samples.inference.tree(samples.position.clone()), samples=samples, **figures)

    def _drawn(self, before: Samples, scale: Rows, key: int, iteration: int) -> Samples:
        """Samples around the mean, of the batches of this rank."""
        choice, seed, found = self.choices[iteration], self.settings["seed"], dict[int, Rows]()
        new = replace(before, pairs=choice["samples"], residuals=found)
        is_update = choice["redraw"] == "update" and iteration > 0 and before.pairs == new.pairs
        for batch in new.own:
            numbers = range(batch * new.chunk, min(new.pairs, (batch + 1) * new.chunk))
            draws = Draws(new.inference, new.position, scale, numbers, seed, key, self.kept)
            if not numbers:
                found[batch] = torch.zeros_like(new.position)[None]
            else:
                rows = before.residuals[batch] if is_update else draws.linear(**choice["sampling"])
                found[batch] = draws.bent(rows, **choice["bending"]) if choice["mode"] == "geometric" else rows
        return new

    def _minimized(self, here: Samples, scale: Rows, iteration: int) -> tuple[Samples, int]:
        """Move the mean to the least energy, by Newton's method with the metric of all samples; return the number of steps as well."""
        options, energy = self.choices[iteration]["minimizing"], here.energy()
        if not math.isfinite(energy):
            bad = [batch for batch in here.residuals if not here.point(batch).energies().isfinite().all()]
            where = f"in iteration {iteration + 1} (batches {bad} of rank {here.group.rank})"
            linear = ", or mode='linear' at first" * (self.choices[iteration]["mode"] == "geometric")
            raise Diverged(f"the energy is {energy} {where}. Write a tighter prior{linear}.")
        enough, inner = options["tol"] ** 2 * len(here.position) / 2, options["inner"]
        for step in range(options["steps"]):
            metric, sides = partial(here.metric, self.free / scale), -(self.free * here.gradient() / scale)[None]
            change = conjugate_gradients(metric, sides, SHARE, inner)[0][0] / scale
            for halving in range(HALVINGS):
                there = replace(here, position=here.position + change / 2**halving)
                if (lower := there.energy()) <= energy:
                    break
            else:
                return here, step
            gained, energy, here = energy - lower, lower, there
            if gained <= enough:
                return here, step + 1
        return here, options["steps"]

    def _record(self) -> dict[str, Any]:
        """Return the record in the folder; that of another run is refused, and a folder that is not that of all ranks."""
        path = Path(self.folder or "", STATE)
        record = read_object(path, "Remove the folder to begin anew.") if self.folder else None
        own = json.loads(json.dumps([self.settings, *self.choices]))
        if record is not None and (missing := {"key", "settings", "checksums", *FIGURES} - record.keys()):
            raise DamagedData(
                f"{path} has no {min(missing)}: it is damaged, or of another program. Write another folder."
            )
        self._compare(record or {}, own)
        if record is None:
            return {"iteration": 0, "key": 0}
        stored = record["settings"]
        check(len(own) >= len(stored), f"{self.folder} has {len(stored) - 1} iterations. Write as many or more.")
        for number, (was, now) in enumerate(zip(stored, own, strict=False)):
            for name in [name for name in now if not _is_same(was.get(name), now[name], name == FIGURES_OF_MODEL)]:
                where = f"{name} is {was.get(name)!r} there{f' in iteration {number - 1}' * (number > 0)}"
                problem = f"{self.folder} is of another run: {where}, and {now[name]!r} here"
                raise ResumeRefused(f"{problem}. Write what is there, or another folder.")
        return record

    def _compare(self, record: Mapping[str, Any], own: list[dict[str, Any]]) -> None:
        """Refuse, on all ranks, another folder or other arguments on some."""
        group, text = self.begin.group, json.dumps([{**each, FIGURES_OF_MODEL: None} for each in own])
        given = record.get("iteration", 0), zlib.crc32(json.dumps(record).encode()), zlib.crc32(text.encode())
        own_part = self.begin.position.new_tensor(given, dtype=torch.float64)
        first, *others = (part.tolist() for part in group.gather_parts(own_part, [3] * group.world_size))
        for rank, each in enumerate(others, 1):
            where = f"rank {rank} sees iteration {each[0]:.0f}, rank 0 iteration {first[0]:.0f}"
            problem = f"folder {self.folder} is not the same for all ranks: {where}. Write a folder that all ranks see."
            check(each[:2] == first[:2], problem)
            check(each == first, f"rank {rank} has other arguments than rank 0. Write the same on all ranks.")

    def _write(self, folder: Path, record: dict[str, Any], samples: Samples) -> None:
        """Write the batches of this rank, and the record when those of all ranks are there."""
        DISK.make_directory(folder)
        none = torch.zeros(samples.batches, dtype=torch.float64, device=samples.position.device)
        sums, inference = {}, samples.inference
        for batch, rows in samples.residuals.items():
            parts = inference.split(torch.cat((samples.position[None], rows)).cpu())
            content = save({n: p.reshape(len(p), *inference.shapes[n]).contiguous() for n, p in parts.items()})
            DISK.write_file(folder / _name(record, batch), [content])
            sums[batch] = none.clone()
            sums[batch][batch] = zlib.crc32(content)
        total = samples.total(sums, none)
        if spectrum := getattr(inference.model, "spectrum", None):
            rows = zip(*(part.tolist() for part in samples.mean_and_std(spectrum)), strict=True)
            lines = [f"{number},{mean:.9g},{std:.9g}\n" for number, (mean, std) in enumerate(rows, 1)]
        if samples.group.rank == 0:
            if spectrum:
                DISK.write_file(folder / "spectrum.csv", ["".join(["wave number,power,std\n", *lines]).encode()])
            settings = [self.settings, *self.choices[: record["iteration"]]]
            content = json.dumps({**record, "settings": settings, "checksums": total.tolist()}, indent=1).encode()
            DISK.write_file(folder / STATE, [content])
            kept = {folder / _name(record, batch) for batch in range(samples.batches)}
            for path in [path for path in folder.iterdir() if OWN.fullmatch(path.name) and path not in kept]:
                DISK.remove(path)
        samples.total(sums, none)  # all wait for the record

    def _read(self, folder: Path, record: Mapping[str, Any]) -> Samples:
        """The samples that the folder has."""
        rows, new = {}, replace(self.begin, pairs=self.choices[record["iteration"] - 1]["samples"])
        for batch in {0, *new.own}:
            path = folder / _name(record, batch)
            content = path.read_bytes() if path.exists() else b""
            if zlib.crc32(content) != record["checksums"][batch]:
                raise DamagedData(f"{path} is damaged or missing. Remove the folder to begin anew.")
            parts = load(content)
            rows[batch] = torch.cat([p.reshape(len(p), p[0].numel()) for p in map(parts.get, new.inference.shapes)], 1)
        position, residuals = rows[0][0].to(new.position), {b: rows[b][1:].to(new.position) for b in new.own}
        return replace(new, position=position, residuals=residuals)


def _name(record: Mapping[str, Any], batch: int) -> str:
    """The file of a batch: each tensor has the mean first, and then deviations from it."""
    return f"samples-{record['iteration']:05d}-{batch:05d}.safetensors"


def optimize_kl(
    model: Callable[[Any], torch.Tensor],
    likelihood: Likelihood,
    start: Mapping[str, Any],
    *,
    iterations: int,
    samples: Varying,
    mode: Varying = "geometric",
    redraw: Varying = "new",
    seed: int = 0,
    constants: Sequence[str] = (),
    point_estimates: Sequence[str] = (),
    sampling: Varying = USUAL["sampling"],
    bending: Varying = USUAL["bending"],
    minimizing: Varying = USUAL["minimizing"],
    chunk: int | None = None,
    vmap: bool = True,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    group: TorchGroup | None = None,
    folder: str | Path | None = None,
    callback: Callable[[VariationalState], object] = lambda state: None,
) -> Iterator[VariationalState]:
    """Find a mean and samples around it that stand for a posterior: MGVI and geoVI. Yield the state of each iteration.

    The latent position has a standard normal prior. An iteration draws samples around the mean, from the Fisher metric there, and moves the mean to where
    the energy, averaged over the samples, is least. On CPUs with the same number of threads, the bits are the same for any number of ranks, and after an
    interruption.

    Parameters
    ----------
    model : callable
        ``model(position)`` returns a real tensor in the shape of the data: their expectation. It uses functions of torch that can be derived twice.
    likelihood : Likelihood
        Probability of the data given what the model returns: :class:`Gaussian`, :class:`Poisson`, or your own.
    start : dict
        First position: tensors, or nested dictionaries of them, on the device that computes.
    iterations : int
        Number of iterations, those before an interruption included.
    samples : int, or function of the iteration
        Number of pairs of samples, each a deviation and its mirror image; 0: the mean alone, which is then the most likely position.
    mode : {"geometric", "linear"}, or function of the iteration
        geometric: samples are bent along the curvature of the model (geoVI); linear: they are Gaussian (MGVI).
    redraw : {"new", "same", "update"}, or function of the iteration
        new: other random numbers in each iteration; same: those of the last one; update: the same, and samples are bent further from where they are. A
        change of their number draws them anew.
    seed : int
        Random numbers follow from it, from the iteration, and from the number of the pair.
    constants, point_estimates : sequence of str
        Names, such as ``"sky.slope"``, of numbers that the mean keeps, and of those without deviations.
    sampling, bending, minimizing : dict, or function of the iteration
        ``tol``: error of linear samples, bent ones and the mean, in standard deviations, about; ``steps``: most steps; ``inner``: most steps of the linear
        solver in each. A value may be a function of the iteration.
    chunk : int, optional
        Pairs that are computed at once. Left out, as many as have 131,072 numbers.
    vmap : bool
        False: the model computes one sample after the other.
    recompute : bool
        True: the model is computed again for each product with the metric, which saves memory.
    dtype : torch.dtype
        Of the latent numbers.
    group : TorchGroup, optional
        Ranks that share the batches; all of them call this function with the same arguments.
    folder : path, optional
        Folder that all ranks see. It keeps the last state, and a call continues from there; of a :class:`CorrelatedField`, or another model with a function
        `spectrum`, such as that of the field in it, also the mean and the standard deviation of this as ``spectrum.csv``.
    callback : callable
        Called with each state after it is stored.

    Raises
    ------
    ConfigError
        For arguments, a model or a likelihood that do not fit together, and, as `ResumeRefused`, for a folder with another run.
    Diverged
        When the energy is not finite.
    DamagedData
        When a file in the folder is damaged.

    References
    ----------
    J. Knollmüller, T. A. Enßlin, Metric Gaussian variational inference, arXiv:1901.11033 (2019). P. Frank, R. Leike, T. A. Enßlin, Geometric variational
    inference, Entropy 23 (2021). Reference implementation: NIFTy.

    Examples
    --------
    Two numbers, whose sum is measured:

    >>> from halotile import posterior
    >>> data = posterior.Gaussian([3.0], std=0.1)
    >>> start = {"a": torch.zeros(1), "b": torch.zeros(1)}
    >>> *_, state = optimize_kl(lambda x: x["a"] + x["b"], data, start, iterations=1, samples=4)
    >>> f"{float(state.mean['a']):.2f} {float(state.mean['b']):.2f}"
    '1.49 1.49'
    """
    leaves, structure = pytree.tree_flatten_with_path(start)
    _check(dtype in (torch.float32, torch.float64), "dtype", dtype, "torch.float64 or torch.float32")
    parts = {".".join(str(getattr(k, "key", k)) for k in path): numbers(x).to(dtype) for path, x in leaves}
    _check(
        len(parts) == len(leaves), "start", start, "other names: with dots between those of nested ones, two are alike"
    )
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    row = torch.cat([part.detach().reshape(-1) for part in (*parts.values(), torch.zeros(0, dtype=dtype))])
    _check(len(row) and row.isfinite().all(), "start", start, "finite numbers, such as zeros, the center of the prior")
    inference = Inference(model, likelihood, shapes, structure, vmap)
    chunk = max(1, BATCH_NUMBERS // len(row)) if chunk is None else chunk
    for name, value, least in (("iterations", iterations, 1), ("chunk", chunk, 1), ("seed", seed, 0)):
        _check(isinstance(value, int) and value >= least, name, value, f"a whole number of {least} or more")
    names = {"constants": list(constants), "point_estimates": list(point_estimates)}
    free, kept = (_mask(option, given, shapes, row) for option, given in names.items())
    start_is: dict[str, Any] = {"shapes of the start": shapes, "checksum of the start": _checksum(row)}
    data = [getattr(likelihood, name, None) for name in ("data", "root")]
    start_is["checksums of the data"] = [_checksum(x) for x in data if isinstance(x, torch.Tensor)]
    settings = {"seed": seed, "chunk": chunk, "vmap": vmap, "dtype": str(dtype), **names, **start_is}
    settings[FIGURES_OF_MODEL] = inference.checked_figures(row)
    given = {"samples": samples, "mode": mode, "redraw": redraw}
    given |= {"sampling": sampling, "bending": bending, "minimizing": minimizing}
    choices = [_choice(given, iteration) for iteration in range(iterations)]
    is_bent = any(choice["mode"] == "geometric" for choice in choices)
    _check(not is_bent or hasattr(likelihood, "transformation"), "mode", "geometric", "'linear', or a transformation")
    begin = Samples(inference, group or TorchGroup(), chunk, recompute, 0, row, {})
    path = None if folder is None else Path(folder)
    _check(path is None or path.is_dir() or not path.exists(), "folder", folder, "a folder; this is a file")
    return _Run(begin, choices, settings, free, kept, path, callback).states()


def _check(is_good: object, name: str, value: object, instead: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} is {value!r}. Write {instead}.")


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())


def _is_same(was: Any, now: Any, is_rounded: bool) -> bool:
    return np.allclose(was, now, 1e-4, 0, equal_nan=True) if is_rounded and was else bool(was == now)


def _at(value: Varying, iteration: int) -> Any:
    return value(iteration) if callable(value) else value


def _choice(given: Mapping[str, Varying], iteration: int) -> dict[str, Any]:
    """Options of one iteration."""
    found = {name: _at(value, iteration) for name, value in given.items()}
    for name, usual in USUAL.items():
        options, instead = found[name], f"a dictionary with numbers of 0 or more for {', '.join(usual)}"
        _check(isinstance(options, Mapping), name, options, instead)
        options = usual | {key: _at(value, iteration) for key, value in options.items()}
        is_good = options.keys() <= usual.keys() and all(isinstance(x, Real) for x in options.values())
        is_good = is_good and all(0 <= x < math.inf and (key == "tol" or x == int(x)) for key, x in options.items())
        _check(is_good, name, found[name], f"{instead}; those of steps are whole")
        found[name] = {key: float(x) if key == "tol" else int(x) for key, x in options.items()}
    for name, words in WORDS.items():
        _check(found[name] in words, name, found[name], f"one of {', '.join(words)}")
    pairs, is_bent = found["samples"], found["mode"] == "geometric"
    _check(isinstance(pairs, int) and pairs >= 0, "samples", pairs, "the number of pairs, or 0 for the mean alone")
    _check(is_bent or found["redraw"] != "update", "redraw", "update", "'same', or mode='geometric'")
    return found


def _mask(option: str, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], row: Rows) -> Rows:
    """0 where a number belongs to one of the names, else 1."""
    chosen = {known: [name for name in names if f"{known}.".startswith(f"{name}.")] for known in shapes}
    _check({*names} == set().union(*chosen.values()), option, names, f"a list of some of {', '.join(shapes)}")
    return torch.cat([row.new_full((math.prod(shapes[known]),), not chosen[known]) for known in shapes])
