"""Imports of the same process where no workers are forked from it, but trials of a denoiser alone."""

# ruff: noqa: E402 - as in preloaded.py
from __future__ import annotations

import gc

gc.disable()

import numpy.random

import halotile.graphs.plans.denoiser_trials
import halotile.tasks.convolution.layers  # torch, with it

__all__ = ["halotile", "numpy"]

gc.freeze()
gc.enable()
