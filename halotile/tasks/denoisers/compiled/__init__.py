"""Filters in C, compiled when the package is installed: the same operations in the same order as on tensors. No filter that has no other form."""
