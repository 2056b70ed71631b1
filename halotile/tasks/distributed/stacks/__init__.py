"""Stacks of operators: tensors in, tensors out."""
