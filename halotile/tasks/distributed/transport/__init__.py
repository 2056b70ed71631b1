"""Calls, tensors and objects on their way to workers and back."""
