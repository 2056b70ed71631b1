"""Imports of the same process where no workers are forked from it, but trials of a denoiser alone."""

# ruff: noqa: E402 - as in `clusters.workers.preloaded`

import gc

gc.disable()

import numpy.random

import halotile.graphs.plans.trials.denoiser_trials
import halotile.tasks.denoisers.common.layers  # torch, with it
from halotile.graphs.clusters.workers.fork_server import hear_signals_after_fork
from halotile.tasks.devices.device import cpu_kind
from halotile.tasks.trials.provenance import own_digest

__all__ = ["halotile", "numpy"]

own_digest(), cpu_kind()  # kept for every trial
hear_signals_after_fork()
gc.freeze()
gc.enable()
