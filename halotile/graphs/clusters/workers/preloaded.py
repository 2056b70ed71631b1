"""Imports of the process that workers are forked from, before the first of them."""

# ruff: noqa: E402 - imported modules are no garbage, and a search for garbage takes an eighth of the time

import gc

gc.disable()

import os

import distributed.nanny
import numpy as np

import halotile.tasks.denoise_block
import halotile.tasks.image_task
from halotile.graphs.clusters.workers.fork_server import hear_signals_after_fork

__all__ = ["distributed", "halotile"]

# Users' code may draw without a seed: workers must not draw the same numbers.
os.register_at_fork(after_in_child=np.random.seed)
hear_signals_after_fork()

# Imported modules stay to the end: a search for garbage would write to them, and end the sharing of their memory.
gc.freeze()
gc.enable()
