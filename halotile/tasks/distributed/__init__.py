"""Distributed physics, fidelities and denoisers: they take and return tensors, and workers compute."""
