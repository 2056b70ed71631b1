"""torch, in the process that workers are forked from, before what is in ``preloaded``."""

# ruff: noqa: E402 - as in preloaded.py

import gc

gc.disable()

import halotile.tasks.denoisers.common.layers

__all__ = ["halotile"]
