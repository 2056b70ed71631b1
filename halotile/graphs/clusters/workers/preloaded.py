"""Imported by the process that workers are forked from, before the first of them."""

# ruff: noqa: E402 - nothing that is imported is garbage, and searching it takes an eighth of the time
from __future__ import annotations

import gc

gc.disable()

import os

import distributed.nanny
import numpy as np

import halotile.tasks.convolution.layers  # torch, with it
import halotile.tasks.denoise_block
import halotile.tasks.step

__all__ = ["distributed", "halotile"]

# Users' code may draw without a seed: workers are not to draw the same.
os.register_at_fork(after_in_child=np.random.seed)

# What is imported stays to the end: a search for garbage would write to it, and it would be shared no longer.
gc.freeze()
gc.enable()
