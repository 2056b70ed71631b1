"""Solvers, one per file: each computes an iteration as a step that one pass applies to the blocks of an image."""
