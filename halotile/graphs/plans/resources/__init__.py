"""Resources that a plan gives a run: memory, workers, devices, sizes of tiles."""
