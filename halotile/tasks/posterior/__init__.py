"""Posterior distributions of an image: their mean, draws and standard deviation."""
