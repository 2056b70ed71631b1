"""Outputs of a run: claimed, held, checked."""
