"""Passes through a cluster: blocks, sums, and the journals of both."""
