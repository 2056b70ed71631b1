"""Noise: its level estimated from an image, and random numbers by position."""
