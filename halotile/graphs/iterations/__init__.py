"""A solver's iterations over images on disk: passes, sums, checkpoints. What a solver computes is in ``graphs/solvers``."""
