"""Variational inference over the ranks of a group: samples of a posterior around a mean that is moved to fit them."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors.torch import load, save

from halotile.errors import ConfigError, DamagedData, Diverged, ResumeRefused
from halotile.storage.disk.durable import DISK
from halotile.storage.run_directory.json_files import read_object
from halotile.tasks.groups.group import TorchGroup
from halotile.tasks.posterior.residuals import (
    Draws,
    Inference,
    Likelihood,
    Linearized,
    Rows,
    Tree,
    conjugate_gradients,
    scale_of,
)

WORDS = {"mode": ("geometric", "linear"), "redraw": ("new", "same", "update")}
USUAL: Mapping[str, dict[str, float]] = {
    "sampling": {"tol": 1e-5, "steps": 200},
    "bending": {"tol": 1e-5, "steps": 10, "inner": 50},
    "minimizing": {"tol": 1e-4, "steps": 10, "inner": 100},
}
BATCH_NUMBERS = 2**17
"""Latent numbers of the pairs that are computed at once, by default: larger batches save no time."""
HALVINGS = 10
ENERGY, SAME_ENERGY = "energy of the data at the start", 1e-6
"""The setting that stands for model, likelihood and data, and its rounding on other devices."""
STATE = "state.json"
Varying = Any
"""A value, or a function of the number of the iteration, from 0 on, that returns it."""


@dataclass(frozen=True)
class Batches:
    """Pairs of samples in batches, which the ranks share: a batch is computed alike on any rank."""

    group: TorchGroup
    pairs: int
    chunk: int

    @property
    def _slots(self) -> range:
        """Those of this rank: a slot for each batch, and no fewer than ranks."""
        return self.group.slots(max(self.count, self.group.world_size))

    @property
    def count(self) -> int:
        return max(1, -(-self.pairs // self.chunk))

    @property
    def own(self) -> list[int]:
        """Numbers of the batches of this rank."""
        return [batch for batch in self._slots if batch < self.count]

    def numbers(self, batch: int) -> range:
        """Numbers of the pairs in a batch."""
        return range(batch * self.chunk, min(self.pairs, (batch + 1) * self.chunk))

    def total(self, parts: Mapping[int, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Sum over the batches of all ranks, with the same bits for any number of ranks."""
        spare = {slot: torch.zeros_like(like) for slot in self._slots if slot >= self.count}
        # The zeros of spare slots turn -0 into 0, so it is always done.
        return self.group.sum_slots({**parts, **spare}, max(self.count, self.group.world_size)) + 0.0


@dataclass(frozen=True)
class Samples:
    """Positions that are likely, given the data: a mean and deviations from it. Each is computed when it is asked for.

    Iterating yields the latent positions of this rank; a single rank has all.
    """

    position: Rows = field(repr=False)
    residuals: Mapping[int, Rows] = field(repr=False)  # of the batches of this rank
    inference: Inference = field(repr=False)
    batches: Batches = field(repr=False)
    recompute: bool = False

    def __len__(self) -> int:
        """Number of samples of all ranks, two for each pair."""
        return max(1, 2 * self.batches.pairs)

    def __iter__(self) -> Iterator[Tree]:
        return (self.inference.tree(self.position + row) for rows in self.residuals.values() for row in rows)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def mean_and_std(self, function: Callable[[Any], torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of a function of the position; left out, of what the model returns. All ranks call it."""
        chosen, tree = function or self.inference.model, self.inference.tree
        like = chosen(tree(self.position))

        def mean(of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
            return self._mean(lambda b: self.inference.each(lambda row: of(tree(row)), self._rows(b)), like)

        center = mean(chosen)
        return center, mean(lambda position: (chosen(position) - center).square()).sqrt()

    def _rows(self, batch: int) -> Rows:
        return self.position + self.residuals[batch]

    def _mean(self, function: Callable[[int], Rows], like: torch.Tensor) -> torch.Tensor:
        """Mean of rows, one for each sample of a batch."""
        parts = {batch: function(batch).sum(0) for batch in self.residuals}
        return self.batches.total(parts, like) / len(self)

    @cached_property
    def _known(self) -> dict[int, Linearized]:
        return {batch: Linearized(self.inference, self._rows(batch)) for batch in self.residuals}

    def point(self, batch: int) -> Linearized:
        return Linearized(self.inference, self._rows(batch)) if self.recompute else self._known[batch]

    def energy(self) -> float:
        return float(self._mean(lambda b: self.point(b).energies[:, None], self.position[:1]))

    @property
    def gradient(self) -> Rows:
        return self._mean(lambda b: self.point(b).gradients, self.position)

    def metric(self, tangent: Rows) -> Rows:
        """The product with the metric averaged over the samples of all ranks."""
        return self._mean(lambda b: self.point(b).metric(tangent.expand_as(self.residuals[b])), tangent)

    def reduced_chi2(self) -> list[float]:
        """That of the data, and of each part of the latent position."""

        def of(batch: int) -> Rows:
            parts = self.inference.split(self._rows(batch)).values()
            return torch.stack([self.point(batch).reduced_chi2, *(part.square().mean(-1) for part in parts)], -1)

        found: list[float] = self._mean(of, self.position.new_zeros(1 + len(self.inference.shapes))).tolist()
        return found


@dataclass(frozen=True)
class VariationalState:
    """What an iteration has found.

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
    seconds: float


FIGURES = [each.name for each in fields(VariationalState) if each.name not in ("mean", "samples")]


@dataclass(frozen=True)
class _Run:
    """Settings of all iterations on one rank."""

    inference: Inference
    start: Rows
    choices: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    free: Rows  # 1 where the mean moves
    kept: Rows  # 1 where samples vary
    group: TorchGroup
    folder: Path | None
    recompute: bool
    callback: Callable[[VariationalState], object]

    def states(self) -> Iterator[VariationalState]:
        """Go on from the folder, and yield the state of each further iteration; that of the last one, where all are done."""
        record = self._record()
        done, key, samples = record["iteration"], record["key"], self._samples(0, self.start, {})
        if done:
            samples = self._read(record)
        if done == len(self.choices):
            yield self._state(samples, record)
        for iteration in range(done, len(self.choices)):
            began, self.inference.products = time.monotonic(), 0
            key = iteration if self.choices[iteration]["redraw"] == "new" else key
            scale = scale_of(self.inference, samples.position)
            drawn = self._drawn(samples, scale, key, iteration)
            samples = self._samples(iteration, samples.position, drawn)
            samples, energy, steps = self._minimized(samples, scale, iteration)
            data, *latent = samples.reduced_chi2()
            parts = {b: self.start.new_tensor([self.inference.products * (b == min(drawn))]) for b in drawn}
            products = int(samples.batches.total(parts, self.start[:1]))
            chi2 = dict(zip(self.inference.shapes, latent, strict=True))
            figures = iteration + 1, energy, data, chi2, steps, products, time.monotonic() - began
            record = {"key": key, **dict(zip(FIGURES, figures, strict=True))}
            samples = replace(samples)  # without what is known of the model there
            self._write(record, samples)
            state = self._state(samples, record)
            self.callback(state)
            yield state

    def _state(self, samples: Samples, record: Mapping[str, Any]) -> VariationalState:
        figures = {name: record[name] for name in FIGURES}
        return VariationalState(mean=self.inference.tree(samples.position), samples=samples, **figures)

    def _samples(self, iteration: int, position: Rows, residuals: Mapping[int, Rows]) -> Samples:
        batches = Batches(self.group, self.choices[iteration]["samples"], self.settings["chunk"])
        return Samples(position, residuals, self.inference, batches, self.recompute)

    def _drawn(self, before: Samples, scale: Rows, key: int, iteration: int) -> dict[int, Rows]:
        """Residuals of the batches of this rank."""
        choice, batches = self.choices[iteration], self._samples(iteration, self.start, {}).batches
        if not batches.pairs:
            return {batch: torch.zeros_like(self.start)[None] for batch in batches.own}
        is_update = choice["redraw"] == "update" and iteration > 0 and before.batches == batches
        found = {}
        for batch in batches.own:
            numbers, seed = batches.numbers(batch), self.settings["seed"]
            draws = Draws(self.inference, before.position, scale, numbers, seed, key, self.kept)
            rows = before.residuals[batch] if is_update else draws.linear(**choice["sampling"])
            found[batch] = draws.bent(rows, **choice["bending"]) if choice["mode"] == "geometric" else rows
        return found

    def _minimized(self, here: Samples, scale: Rows, iteration: int) -> tuple[Samples, float, int]:
        """Move the mean to the least energy, by Newton's method with the metric of all samples; return that energy and the number of steps as well."""
        options = self.choices[iteration]["minimizing"]
        enough = options["tol"] * self.inference.size
        energy = here.energy()
        if not math.isfinite(energy):
            first = 2 * here.batches.chunk
            bad = [
                first * b + int(i) for b in here.residuals for i in torch.nonzero(~here.point(b).energies.isfinite())
            ]
            raise Diverged(
                f"the energy is {energy} in iteration {iteration + 1}, at samples {bad} of this rank. Write a tighter prior, a start that is closer to the "
                "data, or mode='linear' for the first iterations."
            )
        for step in range(options["steps"]):
            change = conjugate_gradients(
                lambda rows, here=here: self.free * here.metric(rows[0])[None],
                -(self.free * here.gradient)[None],
                scale,
                options["inner"],
                enough=enough / 10,
                share=0.1,
            )
            for halving in range(HALVINGS):
                there = replace(here, position=here.position + change[0] / 2**halving)
                if (lower := there.energy()) <= energy:
                    break
            else:
                return here, energy, step
            gained, energy, here = energy - lower, lower, there
            if gained <= enough:
                return here, energy, step + 1
        return here, energy, options["steps"]

    def _record(self) -> dict[str, Any]:
        """What the folder has of this run; of another one it is refused."""
        record = read_object(self.folder / STATE, "Remove the folder to begin anew.") if self.folder else None
        if record is None:
            return {"iteration": 0, "key": 0}
        done = record["iteration"]
        if done > len(self.choices):
            raise ResumeRefused(
                f"{self.folder} has {done} iterations, and iterations is {len(self.choices)}. Write iterations={done} or more, or another folder."
            )
        for number, own in enumerate(json.loads(json.dumps([self.settings, *self.choices[:done]]))):
            for name, value in own.items():
                was = record["settings"][number][name]
                if was != value and not (name == ENERGY and math.isclose(was, value, rel_tol=SAME_ENERGY)):
                    name = f"{name} in iteration {number}" if number else name
                    raise ResumeRefused(
                        f"{self.folder} is that of another run: {name} was {was!r} and is {value!r} here. Write what it was, or another folder."
                    )
        return record

    def _write(self, record: dict[str, Any], samples: Samples) -> None:
        """Write the batches of this rank, and the record when those of all ranks are there."""
        if self.folder is None:
            return
        DISK.make_directory(self.folder)
        sums = torch.zeros(samples.batches.count, dtype=torch.float64, device=self.start.device)
        parts = dict.fromkeys(samples.residuals, sums)
        for batch, rows in samples.residuals.items():
            split = self.inference.split(torch.cat((samples.position[None], rows)).cpu())
            content = save(
                {name: p.reshape(-1, *self.inference.shapes[name]).contiguous() for name, p in split.items()}
            )
            DISK.write_file(self._path(record, batch), [content])
            parts[batch] = sums.clone()
            parts[batch][batch] = google_crc32c.value(content)
        sums = samples.batches.total(parts, sums)
        if self.group.rank == 0:
            settings = [self.settings, *self.choices[: record["iteration"]]]
            content = json.dumps({**record, "settings": settings, "checksums": sums.tolist()}, indent=1)
            DISK.write_file(self.folder / STATE, [content.encode()])
            kept = {self._path(record, batch) for batch in range(samples.batches.count)}
            for path in {*self.folder.glob("samples-*")} - kept:
                DISK.remove(path)
        samples.batches.total(parts, sums)  # all wait for the record

    def _read(self, record: Mapping[str, Any]) -> Samples:
        empty, rows = self._samples(record["iteration"] - 1, self.start, {}), {}
        for batch in {*empty.batches.own, 0}:
            path = self._path(record, batch)
            content = path.read_bytes() if path.exists() else b""
            if google_crc32c.value(content) != record["checksums"][batch]:
                raise DamagedData(f"{path} is damaged or missing. Remove the folder to begin anew.")
            parts = load(content)
            rows[batch] = torch.cat([parts[n].reshape(len(parts[n]), -1) for n in self.inference.shapes], 1).to(
                self.start
            )
        residuals = {batch: rows[batch][1:] for batch in empty.batches.own}
        return replace(empty, position=rows[0][0], residuals=residuals)

    def _path(self, record: Mapping[str, Any], batch: int) -> Path:
        """The file of a batch: each tensor has the mean first, and then deviations from it."""
        assert self.folder is not None
        return self.folder / f"samples-{record['iteration']:05d}-{batch:05d}.safetensors"


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
    folder: str | PathLike[str] | None = None,
    callback: Callable[[VariationalState], object] = lambda state: None,
) -> Iterator[VariationalState]:
    """Find a mean and samples around it that stand for a posterior: MGVI and geoVI."""
    parts = {name: torch.as_tensor(part, dtype=dtype) for name, part in _named(start)}
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    row = torch.cat([part.detach().reshape(-1) for part in parts.values()])
    if not row.isfinite().all() or not len(row):
        raise ConfigError("start has no numbers, or some that are not finite. Write zeros, the center of the prior.")
    inference = Inference(model, likelihood, shapes, vmap)
    settings = {
        "seed": seed,
        "chunk": max(1, BATCH_NUMBERS // len(row)) if chunk is None else chunk,
        "constants": list(constants),
        "point_estimates": list(point_estimates),
        "shapes of the start": shapes,
        "digest of the start": hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()[:16],
        ENERGY: inference.checked_energy(row),
        "dtype": str(dtype),
    }
    for name, value, least in (("iterations", iterations, 1), ("chunk", settings["chunk"], 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}. Write a whole number of {least} or more.")
    given = {"samples": samples, "mode": mode, "redraw": redraw}
    given |= {"sampling": sampling, "bending": bending, "minimizing": minimizing}
    choices = [_choice(given, iteration) for iteration in range(iterations)]
    if any(choice["mode"] == "geometric" for choice in choices) and not hasattr(likelihood, "transformation"):
        raise ConfigError(f"{type(likelihood).__name__} has no transformation. Write mode='linear', or define it.")
    masks = [_mask("constants", constants, shapes, row), _mask("point_estimates", point_estimates, shapes, row)]
    path = None if folder is None else Path(folder)
    return _Run(inference, row, choices, settings, *masks, group or TorchGroup(), path, recompute, callback).states()


def _at(value: Varying, iteration: int) -> Any:
    return value(iteration) if callable(value) else value


def _choice(given: Mapping[str, Varying], iteration: int) -> dict[str, Any]:
    """Options of one iteration."""
    found = {name: _at(value, iteration) for name, value in given.items()}
    for name, usual in USUAL.items():
        options = {key: _at(value, iteration) for key, value in found[name].items()}
        found[name] = usual | options
        if options.keys() - usual.keys() or min(found[name].values()) < 0:
            raise ConfigError(f"{name} is {options}. Write numbers of 0 or more for {', '.join(usual)}.")
    for name, words in WORDS.items():
        if found[name] not in words:
            raise ConfigError(f"{name} is {found[name]!r}. Write one of {', '.join(words)}.")
    if not isinstance(found["samples"], int) or found["samples"] < 0:
        raise ConfigError(f"samples is {found['samples']!r}. Write the number of pairs, or 0 for the mean alone.")
    if (found["mode"], found["redraw"]) == ("linear", "update"):
        raise ConfigError(
            "redraw is 'update', which bends samples, and mode is 'linear'. Write redraw='same', or mode='geometric'."
        )
    return found


def _named(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a nested dictionary with their names, joined by dots."""
    if not isinstance(tree, Mapping) and prefix:
        yield prefix[:-1], tree
        return
    if not isinstance(tree, Mapping) or not all(isinstance(key, str) and "." not in key for key in tree):
        raise ConfigError(
            "start is not a dictionary of tensors by names without dots. Write {'white': torch.zeros(64, 64)}."
        )
    for key, value in tree.items():
        yield from _named(value, f"{prefix}{key}.")


def _mask(option: str, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], row: Rows) -> Rows:
    """0 where a number belongs to one of the names, else 1."""
    found = {known: [n for n in names if f"{known}.".startswith(f"{n}.")] for known in shapes}
    if isinstance(names, str) or {*names} - {name for each in found.values() for name in each}:
        raise ConfigError(f"{option} is {names!r}. Write names of the latent position, of {', '.join(shapes)}.")
    return torch.cat([row.new_full((math.prod(shapes[known]),), not each) for known, each in found.items()])
