"""Decisions common to all plans: sizes, memory, devices, workers; the planners are in ``graphs/jobs``."""
