"""Stages of a step: images that operators need before its pass, recorded first, then computed in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from halotile.graphs.solvers.base import Map, Problem, Staged
from halotile.storage.arrays import open_source
from halotile.storage.disk.object_path import OutputPath, path_of
from halotile.storage.rim import Readable
from halotile.storage.sharded.output import ShardWriter, create_metadata
from halotile.storage.sharded.vectors import Vectors
from halotile.tasks.contributions import Contributions
from halotile.tasks.operators.sum import Total
from halotile.tasks.shared import Shared


@dataclass(frozen=True)
class Stage:
    """An image that is computed before the pass that reads it.

    Parameters
    ----------
    number : int
        Its number among the stages of the step; it may read those before it.
    wanted : Readable or Contributions
        The image to compute, by a pass or as a sum over operators.
    writer : ShardWriter
        Writer of the stored image.
    """

    number: int
    wanted: Readable | Contributions
    writer: ShardWriter

    @property
    def path(self) -> OutputPath:
        """Path of the stored image."""
        return path_of(self.writer.path)


def merge_sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sums of several passes as one mapping: values noted by several of them are added up."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + value
    return merged


class StagedStep:
    """The stages of one step.

    Parameters
    ----------
    problem : Problem
        The problem whose maps may be staged.
    vectors : Vectors
        Vectors beside which the stages are stored.

    Attributes
    ----------
    problem : Problem
        The same problem, to build the step from: staged images are read from where they will be stored.
    requested : list of Stage
        Images that have to be computed before the pass of the step, in this order.
    """

    def __init__(self, problem: Problem, vectors: Vectors) -> None:
        self.vectors = vectors
        self.requested: list[Stage] = []
        self.problem = self._staged(problem)

    def _staged(self, problem: Problem) -> Problem:
        """Return the problem, and those of its parts, with maps that read what will be stored."""
        sensitivity, parts = problem.sensitivity, problem.parts
        return replace(
            problem,
            gradient=self._stored(problem.gradient),
            normal=self._stored(problem.normal),
            sensitivity=sensitivity and self._stored(sensitivity),
            parts=parts and (lambda numbers: self._staged(parts(numbers))),
        )

    def _stored(self, operation: Map) -> Map:
        if not isinstance(operation, Staged):
            return operation
        staged = operation

        def mapped(image: Readable) -> Readable:
            before = self._add_stage(staged.before(image))
            if staged.within is None:
                return before
            return Total((staged.within(image), before), (1.0, 1.0))

        return mapped

    def _add_stage(self, image: Readable | Contributions) -> Shared:
        number = len(self.requested)
        path = self.vectors.folder / f"stage.{number}"
        create_metadata(path, self.vectors.layout, self.vectors.disk)
        writer = ShardWriter(path, self.vectors.layout, self.vectors.disk)
        self.requested.append(Stage(number, image, writer))
        return Shared(open_source(path))
