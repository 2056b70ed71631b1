"""Programs of ranks that go on from a checkpoint: training, saved states, curves, and the file of a result."""
