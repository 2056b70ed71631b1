"""Iterations of a solver over images on disk: passes, sums, checkpoints. The mathematics is in ``graphs/solvers``."""
