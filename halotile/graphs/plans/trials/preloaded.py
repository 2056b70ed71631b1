"""Imports of the same process where no workers are forked from it, but trials of a denoiser alone."""

# ruff: noqa: E402 - as in ``clusters.workers.preloaded``
from __future__ import annotations

import gc

gc.disable()

import numpy.random

import halotile.graphs.plans.trials.denoiser_trials
import halotile.tasks.denoisers.common.layers  # torch, with it

__all__ = ["halotile", "numpy"]

gc.freeze()
gc.enable()
