"""Reconstructions: planned, iterated on disk, written."""
