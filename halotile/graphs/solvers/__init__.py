"""Solvers, one a file: what an iteration makes of an image, as a step that is swept over its blocks."""
