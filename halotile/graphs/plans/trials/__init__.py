"""Trials of denoisers for a plan: reach, bits, speed on a GPU."""
