"""Priors of an image, one file each, with the two functions that solvers use: a prox and a slope."""
