"""Decisions of every plan: sizes, memory, devices, workers. The planner of each kind of job is in its folder
in ``graphs/jobs``."""
