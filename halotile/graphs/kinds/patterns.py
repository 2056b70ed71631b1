"""A job for each image that a pattern such as ``scans/*.tif`` matches."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from functools import cache
from pathlib import PurePath
from typing import Any

from halotile.errors import ConfigError, InputError
from halotile.graphs.kinds.sections import STEM, AJob, Job
from halotile.storage.run_directory.directory import RunDirectory


def is_pattern(path: str) -> bool:
    """Return True for a path with ``*``, ``?`` or ``[`` that is no file's name, and matches some.

    >>> is_pattern("/*"), is_pattern("/"), is_pattern("s3://scans/*.zarr")
    (True, False, False)
    """
    if "://" in path or not glob.has_magic(path) or os.path.lexists(path):
        return False
    return any(glob.iglob(path, recursive=True))


def takes_many(job: Job) -> bool:
    """Return True where the input of a job is a pattern."""
    section = getattr(job, "input", None)
    return section is not None and not job.joins_images and is_pattern(section.path)


def jobs_of(job: AJob) -> dict[str, AJob]:
    """Return a job for each image that the pattern matches, by its path, in the order of the paths.

    Outputs of these jobs and their run directories are left out, so that they may be beside the images.
    """
    section: Any = job.input  # type: ignore[attr-defined]
    pattern = section.path
    jobs = {
        path: for_its_image(replace(job, input=replace(section, path=path)))  # type: ignore[call-arg]
        for path in sorted(glob.glob(pattern, recursive=True))
    }
    places, real_folder = {path: one.place for path, one in jobs.items()}, cache(os.path.realpath)

    def resolved(path: str) -> str:
        folder, name = os.path.split(path)
        return os.path.join(real_folder(folder), name)

    own = str(RunDirectory.beside(job.place).path)  # that of a batch job for all images
    made = {resolved(own): {""}}
    for path, place in places.items():
        for name in (place, str(RunDirectory.beside(place).path)):
            made.setdefault(resolved(name), set()).add(path)
    jobs = {path: one for path, one in jobs.items() if made.get(resolved(path), set()) <= {path}}
    if not jobs:
        raise InputError(f"input.path is {pattern}: no image matches. Write a pattern of names that exist.")
    first: dict[str, str] = {}
    for path in jobs:
        if (other := first.setdefault(places[path], path)) != path:
            raise ConfigError(
                f"{other} and {path} would both be written to {places[path]}: {STEM} is the name without its suffix. "
                "Write a pattern that matches one of them."
            )
    return jobs


def first_job(job: AJob) -> AJob:
    """Return the job, or that of the first image where its input is a pattern."""
    return next(iter(jobs_of(job).values())) if takes_many(job) else job


def for_its_image(job: AJob) -> AJob:
    """Return a job with the stem of its image in place of ``{stem}``, in the paths of its output, of side inputs and of defects."""
    section: Any = getattr(job, "input", None)
    if section is None:
        return job
    if "://" in section.path and "*" in section.path:
        raise ConfigError(
            f"input.path is {section.path}: patterns are for files on a disk. Write the address of one image."
        )
    word = stem(section.path)
    moved: AJob = job.moved_to(job.place.replace(STEM, word))
    if not hasattr(section, "sides"):
        return moved
    sides = {name: side.replace(STEM, word) for name, side in section.sides.items()}
    defects = section.defects.replace(STEM, word)
    return replace(moved, input=replace(section, sides=sides, defects=defects))  # type: ignore[call-arg]


def stem(path: str) -> str:
    """Return the name of an image without its suffix.

    >>> stem("scans/a.tif"), stem("scans/a.b.ome.zarr")
    ('a', 'a.b')
    """
    return PurePath(path).stem.removesuffix(".ome")
