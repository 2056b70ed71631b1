"""What every plan decides: sizes, memory, devices, workers. What one kind of job plans is in its folder in ``graphs/jobs``."""
