"""torch, in the process that workers are forked from, before what is in ``preloaded``."""

# ruff: noqa: E402 - as in preloaded.py

import gc

gc.disable()

import halotile.tasks.denoisers.common.layers
from halotile.tasks.devices.device import cpu_kind
from halotile.tasks.trials.provenance import own_digest

__all__ = ["halotile"]

own_digest(), cpu_kind()  # kept for every trial
