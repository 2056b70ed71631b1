"""The problem that a reconstruction solves: gradient, prior, blocks, memory."""
