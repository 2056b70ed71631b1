"""Calls, their tensors and their objects on the way to the workers and back."""
