"""Imaging operators, one file each."""
