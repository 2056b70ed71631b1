"""Training of networks by the ranks of a group, and the checkpoints of it."""
