"""Operators and their measurements."""
