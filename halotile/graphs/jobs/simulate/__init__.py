"""Measurements made of a true image."""
