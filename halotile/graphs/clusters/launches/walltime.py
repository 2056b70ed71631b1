"""Walltimes, in Slurm's format of job files and in the formats of other batch systems."""

from __future__ import annotations

import re


def is_walltime(text: str) -> bool:
    """Return True for the format that :func:`seconds_of` reads.

    Examples
    --------
    >>> is_walltime("1-12:30"), is_walltime("UNLIMITED")
    (True, False)
    """
    return re.fullmatch(r"(\d+-)?\d+(:\d{1,2}){0,2}", text) is not None


def seconds_of(walltime: str) -> int:
    """Seconds of a walltime: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, or ``days-hours[:minutes[:seconds]]``.

    Source: the option ``--time`` of Slurm's ``sbatch``.

    Examples
    --------
    >>> seconds_of("04:00:00"), seconds_of("90"), seconds_of("90:30"), seconds_of("1-12"), seconds_of("1-12:30")
    (14400, 5400, 5430, 129600, 131400)
    """
    days, dash, clock = walltime.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def clock(walltime: str) -> str:
    """Hours, minutes and seconds, the format of PBS, SGE and OAR.

    Examples
    --------
    >>> clock("04:00:00"), clock("1-12:30:00"), clock("90")
    ('04:00:00', '36:30:00', '01:30:00')
    """
    minutes, seconds = divmod(seconds_of(walltime), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
